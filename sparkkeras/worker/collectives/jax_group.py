"""Groups of processes with JAX's distributed runtime."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from sparkkeras.errors import ClusterError
from sparkkeras.rpc.addresses import host_and_port
from sparkkeras.weights import Array
from sparkkeras.worker.collectives.group import LOST_SECONDS, Group, does_not_answer, unreachable
from sparkkeras.worker.device import silenced


class JaxGroup(Group):
    """JAX's distributed runtime: a step is compiled for one device of each process, with one sum over them.

    The arrays of a step are replicated as far as JAX knows, but differ between processes, also in shape: the programs of
    the processes need only have the same collectives.

    The coordination service of rank 0 checks the processes. When one is gone, JAX ends all others with SIGABRT, without an
    exception: its client calls no callback of Python, since jaxlib cannot convert the argument. What JAX writes before that
    has the reason; see `ended_by_jax`.
    """

    def connect(self, held: socket.socket, timeout: float) -> None:
        """See `Group.connect`."""
        jax = _jax()
        sharding = jax.sharding
        if not hasattr(jax, "shard_map"):
            raise ClusterError(f"training in step needs JAX 0.7 or newer, but the workers have {jax.__version__}.")
        coordinator = host_and_port(*self.addresses[0])
        self._bind_to_host()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)  # JAX writes why it ends the process: faulthandler would add no more
        try:
            jax.distributed.initialize(
                coordinator,
                self.size,
                self.rank,
                cluster_detection_method="deactivate",
                initialization_timeout=int(timeout),
                heartbeat_timeout_seconds=int(LOST_SECONDS),
                shutdown_timeout_seconds=int(LOST_SECONDS),
                coordinator_bind_address=coordinator,
            )
        except RuntimeError as error:
            raise self._incomplete(timeout, error) from error
        first = {device.process_index: device for device in reversed(jax.devices())}
        self._mesh = sharding.Mesh(np.array([first[rank] for rank in range(self.size)]), ("ranks",))
        self.uses_gpus = self._mesh.local_devices[0].platform != "cpu"
        self._replicated = sharding.NamedSharding(self._mesh, sharding.PartitionSpec())
        self._gathered = self._mapped(lambda vector: jax.lax.all_gather(vector, "ranks"))
        sys.stdout.flush()
        with silenced(1):  # what gloo writes
            self.gather(np.zeros((), np.int32))

    def _bind_to_host(self) -> None:
        """Have gloo use the interface of this process's address, and not that of the machine's name."""
        from jax._src import xla_bridge

        runtime: Any = vars(xla_bridge)["_jax"]
        make, host = runtime.make_gloo_tcp_collectives, self.addresses[self.rank][0]
        runtime.make_gloo_tcp_collectives = lambda **options: make(**{"hostname": host, **options})

    def adopt(self, model: Any) -> None:
        """See `Group.adopt`."""
        if self.size == 1:
            return

        def make_train_function(force: bool = False) -> None:
            if model.train_function is None or force:
                model.train_function = self._train_function(model)

        vars(model)["make_train_function"] = make_train_function

    def _train_function(self, model: Any) -> Callable[[Any, Iterator[Any]], Any]:
        """Keras's train function of ``steps_per_execution`` steps, for a step over all processes."""
        step = self._mapped(model.train_step, donate_argnums=0)

        def train(state: Any, batches: Iterator[Any]) -> Any:
            state, count = self._shared(state), 0
            while count < model.steps_per_execution and (batch := next(batches, None)) is not None:
                logs, state = step(state, self._shared(batch))
                count += 1
            if not count:
                raise StopIteration
            return self._own(logs), self._own(state)

        return train

    def _disconnect(self) -> None:
        _jax().distributed.shutdown()

    def _gather(self, words: Array) -> Array:
        return np.asarray(self._own(self._gathered(self._shared(words))))

    def _sum(self, vector: Any) -> Any:
        return _jax().lax.psum(vector, "ranks")

    def _vectors(self, vector: Any) -> Sequence[Any]:
        return list(_jax().lax.all_gather(vector, "ranks"))

    def _mapped(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A function of arrays that all processes share, compiled for one device of each process."""
        jax = _jax()
        everywhere = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        return cast(Callable[..., Any], jax.jit(mapped, **options))

    def _shared(self, values: Any) -> Any:
        """Arrays of this process as parts of arrays that all processes share."""
        jax = _jax()

        def shared(value: Any) -> Any:
            local = value if isinstance(value, jax.Array) else jax.device_put(value, self._mesh.local_devices[0])
            return jax.make_array_from_single_device_arrays(local.shape, self._replicated, [local])

        return jax.tree.map(shared, values)

    def _own(self, values: Any) -> Any:
        """The inverse of `_shared`."""
        return _jax().tree.map(lambda array: array.addressable_data(0), values)

    def _reason(self, error: Exception) -> str:
        return unreachable(error) if "Gloo" in str(error) else ""


def ended_by_jax(output: Sequence[str]) -> str:
    """Why JAX has ended a process with SIGABRT, given the last lines of its output; empty if it has not.

    The client of JAX's coordination service ends a process that has lost its peers so, also one of a user's function.
    """
    starts = [number for number, line in enumerate(output) if "JAX distributed service detected fatal errors" in line]
    if not starts:
        return ""
    reason = output[starts[0] :]
    if "stopped sending heartbeats" in reason[0]:
        tasks = [_JAX_TASK.fullmatch(line.strip()) for line in reason[1:]]
        gone = [task[1] for task in itertools.takewhile(bool, tasks) if task]
    else:
        gone = ["0"] if any(sign in line for line in reason for sign in _JAX_WITHOUT_SERVICE) else []
    return (
        f"JAX ended it, since {does_not_answer(', '.join(gone))}" if gone else "JAX ended it, for the reason in its output."
    )


_JAX_TASK = re.compile(r"(?:\S*/task:)?(\d+)")
"""A process that does not answer, in a line of its own; of an older jaxlib after ``/job:jax_worker/replica:0/task:``."""

_JAX_WITHOUT_SERVICE = "Failed to send RPC to coordination service", "CoordinationService/Heartbeat"
"""What JAX writes if the service itself, in the process of rank 0, does not answer."""


def _jax() -> Any:
    """The module, many of whose functions have no types."""
    import jax

    return jax
