"""Groups of processes that train in step: the collective operations of each backend, and noticing that a peer is gone.

A process is in one group for its whole life. It is a fork of a process that has only imported the backend, since `join` has
to come before the first operation. After an error in a group, its processes must end: the backends cannot form the group
anew.

What the backends listen on is not authenticated (docs/security.md).
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import numpy as np

from sparkkeras.errors import ClusterError
from sparkkeras.rpc.addresses import host_and_port
from sparkkeras.weights import Array

HostAndPort = tuple[str, int]

HEARTBEAT_SECONDS = 1.0
"""The interval at which a process checks its peers."""

LOST_SECONDS = 5.0
"""A peer that has not answered for so long is gone."""

LARGE_SIZE = 1 << 18
"""Gradients of so many values travel alone."""

PARTS = 4
"""In so many parts TensorFlow sums a large vector."""

PART_SIZE = 1 << 21
"""A part has at least so many values."""


class PeerLostError(ClusterError):
    """Another process of the group has ended, was stopped, or cannot be reached."""


def hold_port(host: str = "", port: int = 0) -> socket.socket:
    """A socket that is bound to a port and does not listen: while it is open, no other process gets the port by chance.

    Libraries bind their sockets beside it, since these have ``SO_REUSEADDR`` or ``SO_REUSEPORT``.

    Args:
        host: The host; empty: all addresses of this machine.
        port: The port, perhaps one that another such socket holds; 0: a free one.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except BaseException:
        held.close()
        raise
    return held


def compiles_collectives() -> bool:
    """Whether Keras's current backend trains with collectives if it is to compile the step with XLA."""
    import keras

    return bool(keras.backend.backend() != "tensorflow")


def join(rank: int, addresses: Sequence[HostAndPort], held: socket.socket, timeout: float = 60.0) -> Group:
    """Join a group with the collectives of Keras's current backend, which must not have run any operation.

    Args:
        rank: The index of this process in the group.
        addresses: Host and port of each process, by rank, as the others reach it.
        held: The socket of `hold_port` that is bound to the port of this process.
        timeout: How long to wait for the others, in seconds.

    Raises:
        PeerLostError: Some processes did not join, or cannot reach each other.
    """
    import keras

    kinds: dict[str, type[Group]] = {"tensorflow": _TensorFlowGroup, "jax": _JaxGroup, "torch": _TorchGroup}
    group = kinds[keras.backend.backend()](rank, addresses)
    if group.size > 1:
        group.meet(timeout)
        group.connect(held, timeout)
    return group


class Group(ABC):
    """Processes that call the same operations in the same order.

    Attributes:
        rank: The index of this process.
        addresses: Host and port of each process, by rank.
        runs_eagerly: Whether the values of tensors are known in a training step.
    """

    runs_eagerly = False

    def __init__(self, rank: int, addresses: Sequence[HostAndPort]) -> None:
        self.rank, self.addresses = rank, tuple(addresses)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.addresses)

    def gather(self, array: Array) -> list[Array]:
        """The arrays of all ranks, which have the same shape and dtype."""
        array = np.asarray(array)
        if self.size == 1:
            return [array]
        data = array.tobytes()
        words = np.frombuffer(data + bytes(-len(data) % 4), np.int32)  # a dtype that all backends gather
        with self.naming_lost_peers():
            found = self._gather(words) if len(words) else np.zeros((self.size, 0), np.int32)
        return [np.frombuffer(row.tobytes()[: len(data)], array.dtype).reshape(array.shape) for row in found]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, which may differ in length."""
        sizes = [int(size) for size in self.gather(np.array(len(data), np.int32))]
        rows = self.gather(np.frombuffer(data.ljust(max(sizes), b"\0"), np.uint8))
        return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    def mean(self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any, dtype: str | None) -> list[Any]:
        """The mean of gradients over the ranks, in a training step.

        Args:
            gradients: The gradients of this rank, some perhaps ``None``.
            variables: The variables that they are for.
            weight: The weight of this rank, a float32 scalar; with 0, the gradients do not matter, even if they are not
                finite. At least one rank has another weight.
            dtype: The dtype in which gradients travel; ``None``: float32, or float64 for gradients in float64.
        """
        from keras import ops

        if self.size == 1:
            return list(gradients)
        given = self._complete(gradients, variables)
        wide = "float64" if any(_dtype(each) == "float64" for each in given if each is not None) else "float32"
        counts = ops.convert_to_tensor(self._counts(gradients), "float32")
        shapes = [tuple(variable.shape) for variable in variables]
        buckets = _buckets([0 if each is None else math.prod(shape) for each, shape in zip(given, shapes, strict=True)])
        weights: Any = None
        if dtype is not None or len(buckets) != 1:
            # Gradients are divided by the sum of the weights before they travel: it has too many digits for half precision,
            # and a division afterwards would read large gradients once more.
            weights = self._sum(self._weighted(counts, weight))
        means: list[Any] = [None] * len(given)
        for bucket in buckets:
            parts, forms = [given[i] for i in bucket], [shapes[i] for i in bucket]
            if weights is None:
                vector = self._packed([*parts, counts], [*forms, tuple(counts.shape)], wide)
                summed = self._sum(self._weighted(vector, weight))
                weights = summed[-counts.shape[0] :]
                mean = summed / weights[0]
            else:
                vector = self._weighted(self._packed(parts, forms, wide), weight / weights[0])
                mean = self._sum(vector if dtype is None else ops.cast(vector, dtype))
            for i, found in zip(bucket, self._unpacked(mean, forms), strict=True):
                means[i] = ops.cast(found, _dtype(given[i]))
        return self._contributed(means, weights[1:])

    def begin_step(self) -> None:  # noqa: B027 - not every backend needs it
        """Called at the beginning of a training step, or of its trace."""

    def adopt(self, model: Any) -> None:  # noqa: B027 - not every backend needs it
        """Prepare a model whose ``train_step`` calls `mean`. Its training is inside of `naming_lost_peers`."""

    def leave(self) -> None:
        """Leave the group when all processes have come here."""
        self.gather(np.zeros((), np.int32))

    def meet(self, timeout: float) -> None:
        """Wait until each process has connected to each other one: not all backends name those that cannot be reached.

        Raises:
            PeerLostError: A process did not come, or a connection failed.
        """
        deadline = time.monotonic() + timeout
        with ExitStack() as stack:
            listening = stack.enter_context(closing(hold_port(*self.addresses[self.rank])))
            listening.listen(self.size)
            with ThreadPoolExecutor(len(self._others)) as threads:
                tried = threads.map(lambda rank: _call(self.addresses[rank], self.rank, deadline), self._others)
                callers = _accept(listening, self._others, deadline)
            called = {rank: connection for rank, connection in zip(self._others, tried, strict=True) if connection}
            for connection in (*called.values(), *callers.values()):
                stack.enter_context(closing(connection))
            if missing := [rank for rank in self._others if rank not in called or rank not in callers]:
                raise self._missing(missing, timeout)
            # Backends listen on the same ports. So each process closes its connections when it has stopped listening, and
            # goes on when all others have.
            for each in (listening, *callers.values()):
                each.close()
            for connection in called.values():
                connection.settimeout(max(0.0, deadline - time.monotonic()) + LOST_SECONDS)
                with suppress(OSError):
                    connection.recv(1)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @abstractmethod
    def connect(self, held: socket.socket, timeout: float) -> None:
        """Connect with the other processes."""

    @abstractmethod
    def _gather(self, words: Array) -> Array:
        """The vectors of all ranks, as rows."""

    @abstractmethod
    def _sum(self, vector: Any) -> Any:
        """The sum of the vectors of all ranks, in a training step."""

    def _packed(self, tensors: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtype: str) -> Any:
        """The values of tensors as one vector of a dtype."""
        from keras import ops

        parts = [
            ops.reshape(ops.cast(ops.convert_to_tensor(tensor), dtype), (math.prod(shape),))
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else ops.concatenate(parts)

    def _unpacked(self, vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The tensors whose values a vector begins with."""
        from keras import ops

        ends = itertools.accumulate(map(math.prod, shapes))
        return [ops.reshape(vector[end - math.prod(shape) : end], shape) for shape, end in zip(shapes, ends, strict=True)]

    def _weighted(self, vector: Any, weight: Any) -> Any:
        """A vector, which may be overwritten, times a weight; zeros if the weight is 0, even if it is not finite."""
        from keras import ops

        return ops.cond(weight > 0, lambda: vector * ops.cast(weight, vector.dtype), lambda: ops.zeros_like(vector))

    def _complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """The gradients that are sent, at the same places on all ranks."""
        return gradients

    def _counts(self, gradients: Sequence[Any]) -> list[float]:
        """What is multiplied by the weight and summed besides gradients: 1, then perhaps which gradients this rank has."""
        return [1.0]

    def _contributed(self, means: list[Any], presence: Any) -> list[Any]:
        """The means, without those to which no rank contributed."""
        return means

    @contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """Raise errors of collectives for which a peer is the reason as `PeerLostError`."""
        try:
            yield
        except Exception as error:
            if self.size > 1 and not isinstance(error, PeerLostError) and (lost := self._reason(error)):
                raise PeerLostError(lost) from error
            raise

    def _reason(self, error: Exception) -> str:
        """What happened to the peers, if this is the reason of an error; otherwise an empty string."""
        return ""

    def _gone(self, ranks: Sequence[int]) -> str:
        named = ", ".join(f"{rank} ({host_and_port(*self.addresses[rank])})" for rank in ranks)
        return _silent(named)

    def _missing(self, ranks: Sequence[int], timeout: float) -> PeerLostError:
        named = ", ".join(f"{rank} ({host_and_port(*self.addresses[rank])})" for rank in ranks)
        return PeerLostError(
            f"the process of rank {named} did not join the group of {self.size} processes within {timeout:.0f} s, or it and "
            f"rank {self.rank} ({host_and_port(*self.addresses[self.rank])}) cannot reach each other. {_MAY_CONNECT}"
        )

    def _incomplete(self, timeout: float, error: Exception) -> PeerLostError:
        reason = str(error).strip().partition("\n")[0]
        return PeerLostError(
            f"not all of the {self.size} processes joined the group of rank 0 ({host_and_port(*self.addresses[0])}) within "
            f"{timeout:.0f} s: {reason}. {_MAY_CONNECT}"
        )


_MAY_CONNECT = "Check that no firewall is between the workers, which connect to each other on any port."


def _call(address: HostAndPort, rank: int, deadline: float) -> socket.socket | None:
    """A connection to another process, to which it has sent the rank of this one; ``None`` if there is none in time."""
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, remaining)
            connection.sendall(rank.to_bytes(4))
            return connection
        except OSError:
            time.sleep(0.02)
    return None


def _accept(listening: socket.socket, ranks: Sequence[int], deadline: float) -> dict[int, socket.socket]:
    """The connections from other processes by rank, as many as there are in time."""
    found: dict[int, socket.socket] = {}
    while len(found) < len(ranks) and (remaining := deadline - time.monotonic()) > 0:
        listening.settimeout(remaining)
        with suppress(OSError):
            connection, _ = listening.accept()
            connection.settimeout(HEARTBEAT_SECONDS)
            rank = int.from_bytes(connection.recv(4))
            if rank in ranks:
                found[rank] = connection
            else:
                connection.close()
    return found


class _TensorFlowGroup(Group):
    """TensorFlow's collective operations, without a strategy. A thread aborts them when a peer does not answer."""

    _calls = 0

    def connect(self, held: socket.socket, timeout: float) -> None:
        import tensorflow as tf
        from tensorflow.core.protobuf import tensorflow_server_pb2
        from tensorflow.python.eager import context

        os.environ["TF_GRPC_REUSE_PORT"] = "1"  # beside the socket that holds the port
        self._context = context.context()
        gpus = bool(tf.config.list_physical_devices("GPU"))
        self._hint = "nccl" if gpus else "ring"
        self._context.configure_collective_ops(
            collective_leader=_task(0), device_filters=(f"/job:worker/task:{self.rank}",), use_nccl_communication=gpus
        )
        cluster = tf.train.ClusterSpec({"worker": [host_and_port(*address) for address in self.addresses]})
        self._context.enable_collective_ops(
            tensorflow_server_pb2.ServerDef(
                cluster=cluster.as_cluster_def(),
                default_session_config=self._context.config,
                job_name="worker",
                task_index=self.rank,
                protocol="grpc",
            )
        )
        self._context.ensure_initialized()
        self._instances: dict[tuple[int, int, str], int] = {}
        self._gathers = 0
        self._lost: list[int] = []
        self._left = threading.Event()
        _wait_for(lambda: [rank for rank in self._others if not self._answers(rank)], timeout, self._missing)
        self.gather(np.zeros((), np.int32))
        threading.Thread(target=self._watch, name="sparkkeras-peers", daemon=True).start()

    def adopt(self, model: Any) -> None:
        model.jit_compile = model.jit_compile and self.size == 1  # see compiles_collectives

    def begin_step(self) -> None:
        self._calls = 0

    def leave(self) -> None:
        super().leave()
        if self.size > 1:
            self._left.set()

    def _gather(self, words: Array) -> Array:
        import tensorflow as tf

        self._gathers += 1
        with tf.device("/device:CPU:0"):
            found = tf.raw_ops.CollectiveGatherV2(
                input=tf.constant(words),
                group_size=self.size,
                group_key=2,  # its devices are CPUs
                instance_key=self._gathers,
                ordering_token=[],
                communication_hint="ring",
            )
        result: Array = found.numpy().reshape(self.size, -1)
        return result

    def _sum(self, vector: Any) -> Any:
        import tensorflow as tf

        # A large vector travels faster in a few parts at the same time: 84 MB take 0.2 instead of 0.3 to 0.5 s on loopback.
        size = int(vector.shape[0])
        parts = min(PARTS, size // PART_SIZE)
        if parts < 2:
            return self._sum_of_part(vector)
        split = tf.split(vector, [(size + number) // parts for number in range(parts)])
        return tf.concat([self._sum_of_part(part) for part in split], 0)

    def _sum_of_part(self, vector: Any) -> Any:
        import tensorflow as tf

        # Ranks know the vectors that belong together by a key; a key is for vectors of one size.
        call = (self._calls, int(vector.shape[0]), vector.dtype.name)
        self._calls += 1
        return tf.raw_ops.CollectiveReduceV2(
            input=vector,
            group_size=self.size,
            group_key=1,
            instance_key=self._instances.setdefault(call, len(self._instances) + 1),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint=self._hint,
        )

    def _weighted(self, vector: Any, weight: Any) -> Any:
        import tensorflow as tf

        return tf.math.multiply_no_nan(vector, tf.cast(weight, vector.dtype))

    def _answers(self, rank: int) -> bool:
        import tensorflow as tf

        try:
            self._context.check_collective_ops_peer_health(_task(rank), int(HEARTBEAT_SECONDS * 1000))
        except tf.errors.OpError:
            return False
        return True

    def _watch(self) -> None:
        """Abort collectives when a peer has not answered for some seconds."""
        from tensorflow.python.framework import errors

        failing: dict[int, float] = {}  # the ranks whose last check failed, since when; a check of each takes a second
        while not self._left.wait(HEARTBEAT_SECONDS):
            for rank in self._others:
                asked = time.monotonic()
                if self._answers(rank):
                    failing.pop(rank, None)
                elif time.monotonic() - failing.setdefault(rank, asked) >= LOST_SECONDS and not self._left.is_set():
                    self._lost = sorted(failing)
                    self._context.abort_collective_ops(errors.UNAVAILABLE, self._gone(self._lost))
                    return

    def _reason(self, error: Exception) -> str:
        import tensorflow as tf

        if not isinstance(error, tf.errors.OpError):
            return ""
        lost = self._lost or [rank for rank in self._others if not self._answers(rank)]
        return self._gone(lost) if lost else ""


def _task(rank: int) -> str:
    return f"/job:worker/replica:0/task:{rank}"


class _TorchGroup(Group):
    """PyTorch's process groups: gloo, and NCCL for gradients on GPUs. Heartbeats go through the store of rank 0."""

    runs_eagerly = True

    def connect(self, held: socket.socket, timeout: float) -> None:
        import torch

        distributed = _torch_distributed()
        store = self._store(held, timeout)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self.addresses[self.rank][0])]
        options._timeout = timedelta(seconds=timeout)
        try:
            gloo = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), self.rank, self.size, options)
        except RuntimeError as error:
            raise self._incomplete(timeout, error) from error
        gloo._set_default_timeout(_FOREVER)
        self._host: Any = gloo
        self._device: Any = gloo
        if torch.cuda.is_available():
            on_gpu = distributed.PrefixStore("nccl", store)
            chosen = distributed.ProcessGroupNCCL.Options()
            chosen._timeout = _FOREVER
            self._device = distributed.ProcessGroupNCCL(on_gpu, self.rank, self.size, chosen)

    def _store(self, held: socket.socket, timeout: float) -> Any:
        """The store, when all processes have joined. Rank 0 serves it."""
        distributed = _torch_distributed()
        host, port = self.addresses[0]
        serving: dict[str, Any] = {}
        if self.rank == 0:
            held.listen()
            serving = {"is_master": True, "master_listen_fd": os.dup(held.fileno())}
        wait: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
        try:
            store = distributed.TCPStore(host, port, self.size, **serving, **wait)
            beats = distributed.TCPStore(host, port, self.size, is_master=False, **wait)
        except RuntimeError as error:  # torch.distributed.DistError
            raise self._missing([0], timeout) from error
        store.set(f"joined/{self.rank}", "")

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if not store.check([f"joined/{rank}"])]

        _wait_for(missing, timeout, self._missing)
        self._beats = _Beats(beats, self.rank, self.size)
        return store

    def leave(self) -> None:
        super().leave()
        if self.size > 1:
            self._beats.stop()

    def _gather(self, words: Array) -> Array:
        import torch

        mine = torch.from_numpy(words.copy())
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(self._host.allgather([found], [mine]))
        return np.stack([each.numpy() for each in found])

    def _sum(self, vector: Any) -> Any:
        vector = vector.detach().contiguous()
        self._wait(self._device.allreduce([vector]), on_gpu=self._device is not self._host)
        return vector

    # The same with PyTorch's functions: those of Keras take longer than the gradients of a small model on their way.

    def _packed(self, tensors: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtype: str) -> Any:
        import torch

        parts = [tensor.detach().reshape(-1).to(getattr(torch, dtype)) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _unpacked(self, vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        sizes = list(map(math.prod, shapes))
        parts = vector[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _weighted(self, vector: Any, weight: Any) -> Any:
        return vector.mul_(weight) if weight > 0 else vector.zero_()

    def _wait(self, work: Any, on_gpu: bool = False) -> None:
        """Wait for a collective. NCCL aborts one that has not ended when a wait with a time limit ends."""
        while on_gpu and not work.is_completed():
            self._check_peers()
            time.sleep(_GPU_POLL_SECONDS)
        while True:
            try:
                work.wait(timedelta(seconds=HEARTBEAT_SECONDS))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise PeerLostError(_unreachable(error)) from error
                self._check_peers()

    def _check_peers(self) -> None:
        silent = self._beats.silent()
        if silent:
            raise PeerLostError(self._gone(silent)) from None

    def _complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """PyTorch has no gradients for what a step did not use, which may depend on the data."""
        from keras import ops

        pairs = zip(gradients, variables, strict=True)
        return [ops.zeros(variable.shape, variable.dtype) if each is None else each for each, variable in pairs]

    def _counts(self, gradients: Sequence[Any]) -> list[float]:
        return [1.0, *(float(each is not None) for each in gradients)]

    def _contributed(self, means: list[Any], presence: Any) -> list[Any]:
        flags = presence.tolist()
        return [mean if flag > 0 else None for mean, flag in zip(means, flags, strict=True)]


def _torch_distributed() -> Any:
    """The module, whose declared types lack most of what is used here."""
    from torch import distributed

    return distributed


_FOREVER = timedelta(days=7)
"""The time limit of collectives: heartbeats tell a slow peer from one that is gone."""


_GPU_POLL_SECONDS = 1e-4


class _Beats:
    """Heartbeats through a store: each process counts up, and notes when it last saw the others' counts change."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        now = time.monotonic()
        self._seen = {other: (b"", now) for other in range(size) if other != rank}
        self._answered = now
        self._stopped = threading.Event()
        store.set(f"beat/{rank}", "0")
        threading.Thread(target=self._run, name="sparkkeras-heartbeats", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def silent(self) -> list[int]:
        """The ranks that are gone."""
        limit = time.monotonic() - LOST_SECONDS
        if self._answered < limit:  # the store does not answer
            return [0]
        return [rank for rank, (_, when) in self._seen.items() if when < limit]

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", str(count))
                for rank, (last, _) in list(self._seen.items()):
                    beat = self._store.get(f"beat/{rank}")
                    if beat != last:
                        self._seen[rank] = beat, time.monotonic()
            except RuntimeError:  # rank 0 is gone
                return
            self._answered = time.monotonic()


class _JaxGroup(Group):
    """JAX's distributed runtime: a step is compiled for one device of each process, with one sum over them.

    The arrays of a step are replicated as far as JAX knows, but differ between processes, also in shape: the programs of
    the processes need only have the same collectives.

    The coordination service of rank 0 checks the processes. When one is gone, JAX ends all others with SIGABRT, without an
    exception: its client calls no callback of Python, since jaxlib cannot convert the argument. What JAX writes before that
    has the reason; see `ended_by_jax`.
    """

    def connect(self, held: socket.socket, timeout: float) -> None:
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
        self._replicated = sharding.NamedSharding(self._mesh, sharding.PartitionSpec())
        self._gathered = self._mapped(lambda vector: jax.lax.all_gather(vector, "ranks"))
        with _without_output():  # of gloo
            self.gather(np.zeros((), np.int32))

    def _bind_to_host(self) -> None:
        """Have gloo use the interface of this process's address, and not that of the machine's name."""
        from jax._src import xla_bridge

        runtime: Any = vars(xla_bridge)["_jax"]
        make, host = runtime.make_gloo_tcp_collectives, self.addresses[self.rank][0]
        runtime.make_gloo_tcp_collectives = lambda **options: make(**{"hostname": host, **options})

    def adopt(self, model: Any) -> None:
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

    def leave(self) -> None:
        super().leave()
        if self.size > 1:
            _jax().distributed.shutdown()

    def _gather(self, words: Array) -> Array:
        return np.asarray(self._own(self._gathered(self._shared(words))))

    def _sum(self, vector: Any) -> Any:
        return _jax().lax.psum(vector, "ranks")

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
        return _unreachable(error) if "Gloo" in str(error) else ""


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
    return f"JAX ended it, since {_silent(', '.join(gone))}" if gone else "JAX ended it, for the reason in its output."


_JAX_TASK = re.compile(r"(?:\S*/task:)?(\d+)")
"""A process that does not answer, in a line of its own; of an older jaxlib after ``/job:jax_worker/replica:0/task:``."""

_JAX_WITHOUT_SERVICE = "Failed to send RPC to coordination service", "CoordinationService/Heartbeat"
"""What JAX writes if the service itself, in the process of rank 0, does not answer."""


def _jax() -> Any:
    """The module, many of whose functions have no types."""
    import jax

    return jax


def _wait_for(missing: Callable[[], list[int]], timeout: float, error: Callable[[list[int], float], Exception]) -> None:
    """Wait until no rank is missing."""
    deadline = time.monotonic() + timeout
    while ranks := missing():
        if time.monotonic() > deadline:
            raise error(ranks, timeout)
        time.sleep(0.02)


def _silent(ranks: str) -> str:
    """The message for peers that do not answer."""
    return (
        f"the process of rank {ranks} does not answer: it has ended, is stopped, or is out of memory, or the network is "
        "interrupted. Look for its own error."
    )


def _unreachable(error: Exception) -> str:
    """The message for a collective that fails without saying which peer is the reason."""
    reason = str(error).strip().partition("\n")[0]
    return f"another process of the group has ended, or cannot be reached ({reason}). Look for its own error."


@contextmanager
def _without_output() -> Iterator[None]:
    """Discard what native code writes to standard output."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """The gradients that travel together: small ones in one vector, large ones alone, which need not be copied for it.

    Args:
        sizes: The number of values of each gradient; 0 if there is none.
    """
    large = [[i] for i, size in enumerate(sizes) if size >= LARGE_SIZE]
    small = [i for i, size in enumerate(sizes) if 0 < size < LARGE_SIZE]
    return [*([small] if small else []), *large]


def _dtype(tensor: Any) -> str:
    import keras

    return str(keras.backend.standardize_dtype(tensor.dtype))
