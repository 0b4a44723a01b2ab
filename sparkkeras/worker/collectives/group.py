"""A group of processes: what all backends have in common, and ports that are held for them."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import math
import operator
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import numpy as np

from sparkkeras.errors import ClusterError
from sparkkeras.rpc.addresses import host_and_port, open_socket
from sparkkeras.weights import Array

HostAndPort = tuple[str, int]

HEARTBEAT_SECONDS = 1.0
"""The interval at which a process checks its peers."""

LOST_SECONDS = 5.0
"""A peer that has not answered for so long is gone."""

LARGE_SIZE = 1 << 18
"""Gradients of so many values travel alone."""

GATHERED_SIZE = 1 << 13
"""Vectors are not gathered instead of summed if that sends so many values more."""


class PeerLostError(ClusterError):
    """Another process of the group has ended, was stopped, or cannot be reached."""


class NeverMetError(PeerLostError):
    """A process of the group did not come."""


def hold_port(host: str = "", port: int = 0) -> socket.socket:
    """A socket that is bound to a port and does not listen: while it is open, no other process gets the port by chance.

    Libraries bind their sockets beside it, since these have ``SO_REUSEADDR`` or ``SO_REUSEPORT``.

    Args:
        host: The host; empty: all addresses of this machine.
        port: The port, perhaps one that another such socket holds; 0: a free one.

    Raises:
        ClusterError: The host is not this machine.
        OSError: The port is taken, or may not be used.
    """
    options = [socket.SO_REUSEPORT] if hasattr(socket, "SO_REUSEPORT") else []
    try:
        return open_socket(host or None, port, *options)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ClusterError(
                f"the worker on {socket.gethostname()} cannot listen on {host} ({error.strerror}), where other workers "
                "connect to it: set SPARK_LOCAL_IP on this machine to an address of its own that the others reach."
            ) from error
        raise


@contextmanager
def holding_port(ports: range | None) -> Iterator[int]:
    """Hold a port with `hold_port` until the context ends; yields it.

    Args:
        ports: The ports to choose from; ``None``: any free one.

    Raises:
        ClusterError: All are taken, or one may not be used.
    """
    with ExitStack() as stack:
        if ports is None:
            yield stack.enter_context(closing(hold_port())).getsockname()[1]
            return
        for port in ports:
            # `hold_port` succeeds also for a port that another process holds: a name that one process gets tells.
            name = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
            try:
                name.bind(f"\0sparkkeras-port-{port}")
                stack.enter_context(closing(hold_port(port=port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise ClusterError(
                    f"a worker cannot listen on port {port} of {socket.gethostname()} ({error.strerror}): "
                    f"spark.sparkkeras.worker.ports is {ports[0]}-{ports[-1]}, and has to name ports that it may use."
                ) from error
            yield port
            return
        raise ClusterError(
            f"the ports {ports[0]} to {ports[-1]} of {socket.gethostname()} are all taken: spark.sparkkeras.worker.ports "
            "has to name one for each worker that runs on a machine."
        )


class Group(ABC):
    """Processes that call the same operations in the same order.

    Attributes:
        rank: The index of this process.
        addresses: Host and port of each process, by rank.
        runs_eagerly: Whether the values of tensors are known in a training step.
        listens_anywhere: Whether a process also listens on a port that the operating system chooses, as gloo does.
        uses_gpus: Whether gradients are summed on GPUs.
    """

    runs_eagerly = False
    listens_anywhere = True
    uses_gpus = False

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
        """The mean of gradients over the ranks, in a training step. That of sparse gradients is sparse.

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
        sparse = [i for i, each in enumerate(given) if self._is_sparse(each)]
        dense = [0 if each is None or i in sparse else math.prod(shapes[i]) for i, each in enumerate(given)]
        buckets = _buckets(dense)
        weights: Any = None
        if dtype is not None or len(buckets) != 1 or sparse:
            # Gradients are divided by the sum of the weights before they travel: it has too many digits for half precision,
            # and a division afterwards would read large gradients once more.
            weights = self._total(self._weighted(counts, weight))
        means: list[Any] = [None] * len(given)
        for bucket in buckets:
            parts, forms = [given[i] for i in bucket], [shapes[i] for i in bucket]
            if weights is None:
                vector = self._packed([*parts, counts], [*forms, tuple(counts.shape)], wide)
                summed = self._total(self._weighted(vector, weight))
                weights = summed[-counts.shape[0] :]
                mean = summed / weights[0]
            else:
                vector = self._weighted(self._packed(parts, forms, wide), weight / weights[0])
                mean = self._total(vector if dtype is None else ops.cast(vector, dtype))
            for i, found in zip(bucket, self._unpacked(mean, forms), strict=True):
                means[i] = ops.cast(found, _dtype(given[i]))
        if sparse:
            found = self._sparse_means([given[i] for i in sparse], weight / weights[0], dtype)
            for i, mean in zip(sparse, found, strict=True):
                means[i] = mean
        return self._contributed(means, weights[1:])

    def begin_step(self) -> None:  # noqa: B027 - not every backend needs it
        """Called at the beginning of a training step, or of its trace."""

    def adopt(self, model: Any) -> None:  # noqa: B027 - not every backend needs it
        """Prepare a model whose ``train_step`` calls `mean`. Its training is inside of `naming_lost_peers`."""

    def leave(self) -> None:
        """Leave the group when all processes have come here."""
        self.gather(np.zeros((), np.int32))
        if self.size > 1:
            self._disconnect()

    def meet(self, timeout: float, patience: float = math.inf) -> None:
        """Wait until each process has connected to each other one: not all backends name those that cannot be reached.

        Args:
            timeout: How long to wait for processes that have not started yet.
            patience: How long another machine may leave connections unanswered. One that answers refuses them until the
                process listens.

        Raises:
            ClusterError: A machine does not answer for so long.
            NeverMetError: A process did not come in time.
        """
        waiting = _Patience(timeout, patience)
        with ExitStack() as stack:
            listening = stack.enter_context(closing(hold_port(*self.addresses[self.rank])))
            listening.listen(self.size)
            further = 0
            if self.listens_anywhere:
                beside = stack.enter_context(closing(hold_port(self.addresses[self.rank][0])))
                beside.listen(self.size)
                further = beside.getsockname()[1]
            with ThreadPoolExecutor(len(self._others)) as threads:
                tried = threads.map(
                    lambda rank: _call(self.addresses[rank], self._greeting(self.rank), waiting), self._others
                )
                callers = _accept(listening, {self._greeting(rank): rank for rank in self._others}, waiting, further)
            called = {rank: connection for rank, connection in zip(self._others, tried, strict=True) if connection}
            for connection in (*called.values(), *callers.values()):
                stack.enter_context(closing(connection))
            if waiting.unanswered:
                raise ClusterError(
                    f"the worker of rank {self._named(self.rank)} cannot connect to another one at {waiting.unanswered}. "
                    f"{_MAY_CONNECT}"
                )
            if missing := [rank for rank in self._others if rank not in called or rank not in callers]:
                raise self._missing(missing, timeout)
            # Backends listen on the same ports. So each process closes its connections when it has stopped listening, and
            # goes on when all others have.
            for each in (listening, *callers.values()):
                each.close()
            for connection in called.values():
                connection.settimeout(waiting.remaining + LOST_SECONDS)
                with suppress(OSError):
                    connection.recv(1)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _greeting(self, rank: int) -> bytes:
        """What a process of this group sends first, and no process of another one."""
        return hashlib.sha256(repr((rank, self.addresses)).encode()).digest()[:16]

    @abstractmethod
    def connect(self, held: socket.socket, timeout: float) -> None:
        """Connect with the other processes."""

    @abstractmethod
    def _disconnect(self) -> None:
        """The inverse of `connect`."""

    def _await(self, missing: Callable[[], list[int]], timeout: float) -> None:
        """Wait until no rank is missing."""
        deadline = time.monotonic() + timeout
        while ranks := missing():
            if time.monotonic() > deadline:
                raise self._missing(ranks, timeout)
            time.sleep(0.02)

    @abstractmethod
    def _gather(self, words: Array) -> Array:
        """The vectors of all ranks, as rows."""

    def _total(self, vector: Any) -> Any:
        """The sum of the vectors of all ranks, in a training step.

        Each rank adds the gathered vectors itself, in the same order, where that hardly sends more: a gather has half as
        many round trips as a sum. For 10,000 values and two ranks on loopback, it takes 15 (TensorFlow) to 60 % (PyTorch)
        less time.
        """
        size = int(vector.shape[0])
        more = size * (self.size - 1) * (self.size - 2) // self.size  # the sum sends 2 * size * (self.size - 1) / self.size
        if self.uses_gpus or size >= LARGE_SIZE or more >= GATHERED_SIZE:
            return self._sum(vector)
        return functools.reduce(operator.add, self._vectors(vector))

    @abstractmethod
    def _sum(self, vector: Any) -> Any:
        """The sum of the vectors of all ranks, in a training step."""

    @abstractmethod
    def _vectors(self, vector: Any) -> Sequence[Any]:
        """The vectors of all ranks, in a training step without GPUs."""

    def _is_sparse(self, gradient: Any) -> bool:
        """Whether a gradient has values for some of the rows of its variable only."""
        return False

    def _sparse_means(self, gradients: Sequence[Any], weight: Any, dtype: str | None) -> Sequence[Any]:
        """The means of sparse gradients, of which there is at least one: they have the values of all ranks.

        Args:
            gradients: The gradients of this rank.
            weight: Its part in the sum of all weights. With 0, it has no rows.
            dtype: The dtype in which values travel; ``None``: their own.
        """
        raise NotImplementedError

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

    def _named(self, *ranks: int) -> str:
        return ", ".join(f"{rank} ({host_and_port(*self.addresses[rank])})" for rank in ranks)

    def _gone(self, ranks: Sequence[int]) -> str:
        return does_not_answer(self._named(*ranks))

    def _missing(self, ranks: Sequence[int], timeout: float) -> NeverMetError:
        return NeverMetError(
            f"the process of rank {self._named(*ranks)} did not join the group of {self.size} processes within "
            f"{timeout:.0f} s, or it and rank {self._named(self.rank)} cannot reach each other. {_MAY_CONNECT}"
        )

    def _incomplete(self, timeout: float, error: Exception) -> PeerLostError:
        reason = str(error).strip().partition("\n")[0]
        return PeerLostError(
            f"not all of the {self.size} processes joined the group of rank {self._named(0)} within {timeout:.0f} s: "
            f"{reason}. {_MAY_CONNECT}"
        )


_MAY_CONNECT = (
    "Workers have to reach each other on the ports of spark.sparkkeras.worker.ports, by default on any; with JAX and "
    "PyTorch also on those of net.ipv4.ip_local_port_range: check the network and the firewalls between them."
)


class _Patience:
    """How long processes wait for each other; see `Group.meet`. Thread-safe.

    Attributes:
        patience: How long a machine may leave connections unanswered.
        unanswered: The first address that has not answered for so long, and the error; empty if there is none.
    """

    def __init__(self, timeout: float, patience: float) -> None:
        self._end, self.patience, self.unanswered = time.monotonic() + timeout, patience, ""

    @property
    def remaining(self) -> float:
        """The seconds until the end; 0 at the end, or if an address has not answered."""
        return 0.0 if self.unanswered else max(0.0, self._end - time.monotonic())

    def connect(self, address: HostAndPort) -> socket.socket | None:
        """A connection; ``None`` if there is none in time."""
        since: float | None = None
        while (remaining := self.remaining) > 0:
            began = time.monotonic()
            try:
                return socket.create_connection(address, min(remaining, self.patience))
            except ConnectionRefusedError:
                since = None
            except OSError as error:
                since = began if since is None else since
                if time.monotonic() - since >= self.patience:
                    self.unanswered = f"{host_and_port(*address)} ({error.strerror or error})"
            time.sleep(0.02)
        return None


def _call(address: HostAndPort, greeting: bytes, waiting: _Patience) -> socket.socket | None:
    """A connection to another process, which this one has greeted; ``None`` if there is none in time."""
    while waiting.remaining > 0:
        connection = waiting.connect(address)
        if connection is None:
            break
        with suppress(OSError):
            connection.sendall(greeting)
            if reply := connection.recv(4):  # it is accepted only then
                further = int.from_bytes(reply)
                beside = waiting.connect((address[0], further)) if further else None
                if beside is not None:
                    beside.close()
                return connection
        connection.close()
    return None


def _accept(
    listening: socket.socket, ranks: Mapping[bytes, int], waiting: _Patience, further: int
) -> dict[int, socket.socket]:
    """The connections from other processes by rank, as many as there are in time; each gets a further port.

    Args:
        listening: Where they connect to.
        ranks: Their ranks, by what they send.
        waiting: How long to wait.
        further: The port that they get.
    """
    found: dict[int, socket.socket] = {}
    while len(found) < len(ranks) and (remaining := waiting.remaining) > 0:
        listening.settimeout(min(remaining, HEARTBEAT_SECONDS))
        with suppress(OSError):
            connection, _ = listening.accept()
            connection.settimeout(HEARTBEAT_SECONDS)
            rank = ranks.get(connection.recv(16))
            if rank is not None:
                connection.sendall(further.to_bytes(4))
                found[rank] = connection
            else:
                connection.close()
    return found


def does_not_answer(ranks: str) -> str:
    """The message for peers that do not answer."""
    return (
        f"the process of rank {ranks} does not answer: it has ended or is stopped, or the network is interrupted. "
        "Look for its own error."
    )


def unreachable(error: Exception) -> str:
    """The message for a collective that fails without saying which peer is the reason."""
    reason = str(error).strip().partition("\n")[0]
    return f"another process of the group has ended, or cannot be reached ({reason}). Look for its own error."


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
