"""The parameter protocol: calls on a store and its ledger, and the client with the same face.

=============  ================================================================  =======================================
call           asks                                                              body there / back
=============  ================================================================  =======================================
`health`       whether anybody is there
`lease`        for a partition                                                   - / the metric state of its epoch so far
`renew`        what to do; the lease lives on
`parameters`   for the weights, if they are newer, or as they were at an         - / weights, counters
               epoch's end
`update`       to apply an update                                                 update, counters, metric state / -
`report`       to take the metric state of validation rows                       metric state / -
`finish`       nothing: the partition is done
`release`      nothing: another attempt has to go on
=============  ================================================================  =======================================

All calls may be repeated without harm, so the client does so when an answer does not come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkkeras.errors import ConfigurationError, DivergenceError, DriverConnectionError, SparkKerasError
from sparkkeras.parameter.ledger import Directive, Ledger, ResumePoint
from sparkkeras.parameter.store import Snapshot, Store
from sparkkeras.rpc.transport import (
    Address,
    Call,
    Caller,
    RefusedError,
    Reply,
    TransportError,
    connect,
    insist,
    pauses,
)
from sparkkeras.rpc.wire import Body
from sparkkeras.weights import Array, Flat

DIVERGED = "diverged"
"""The kind of a refusal: an update, or a loss, is not finite."""

FAREWELL_SECONDS = 2.0
"""How long a worker that ends waits for the last answer to its renewals."""


@dataclass(frozen=True)
class Arrays:
    """A list of small arrays of known shapes, as bytes.

    Attributes:
        specs: The shape and the dtype name of each.
    """

    specs: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def like(cls, arrays: Sequence[Array]) -> Arrays:
        """For arrays like these."""
        return cls(tuple((tuple(array.shape), np.dtype(array.dtype).name) for array in arrays))

    @property
    def nbytes(self) -> int:
        """The bytes that they take."""
        return sum(_nbytes(shape, dtype) for shape, dtype in self.specs)

    def pack(self, arrays: Sequence[Array]) -> bytes:
        """The bytes of arrays that have these shapes; dtypes are converted.

        Raises:
            ValueError: They have others.
        """
        if [array.shape for array in arrays] != [shape for shape, _ in self.specs]:
            raise ValueError(f"expected arrays of the shapes and dtypes {self.specs}, received {Arrays.like(arrays).specs}")
        return b"".join(array.astype(dtype).tobytes() for array, (_, dtype) in zip(arrays, self.specs, strict=True))

    def unpack(self, data: memoryview) -> tuple[Array, ...]:
        """The arrays, copied."""
        arrays, start = [], 0
        for shape, dtype in self.specs:
            stop = start + _nbytes(shape, dtype)
            arrays.append(np.frombuffer(data[start:stop], dtype).reshape(shape).copy())
            start = stop
        return tuple(arrays)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Contents:
    """What weights and metric states look like; both ends know, so neither has to believe the other.

    Attributes:
        size: The values of the weight vector.
        dtype: Their dtype name.
        counters: The weights that are not floating point.
        metrics: The metric state.
    """

    size: int
    dtype: str
    counters: Arrays
    metrics: Arrays

    @classmethod
    def of(cls, weights: Flat, metrics: Sequence[Array]) -> Contents:
        """For weights and metrics like these."""
        return cls(weights.vector.size, weights.vector.dtype.name, Arrays.like(weights.counters), Arrays.like(metrics))

    @property
    def vector_bytes(self) -> int:
        """The bytes of the weight vector."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def weights_bytes(self) -> int:
        """The bytes of a body with weights."""
        return self.vector_bytes + self.counters.nbytes

    @property
    def update_bytes(self) -> int:
        """The bytes of a body with an update."""
        return self.weights_bytes + self.metrics.nbytes

    def vector(self, body: memoryview) -> Array:
        """The vector at the head of a body; it shares the body's memory."""
        return np.frombuffer(body[: self.vector_bytes], self.dtype)


@dataclass(frozen=True)
class ParameterServerStats:
    """What a parameter server has done during one ``fit``.

    Attributes:
        transport: ``"http"`` or ``"socket"``.
        seconds: How long it ran.
        pulls: Weights that were asked for.
        cached_pulls: Those of them that were not sent, since the worker had them.
        pushes: Updates that were applied.
        duplicates: Updates that came again, after a lost answer, and were not applied again.
        rejected_requests: Calls that were refused, by reason.
        received_bytes: Bytes of updates and reports.
        sent_bytes: Bytes of weights.
        staleness: How many updates had a staleness of so many others that were applied in between.
        steps: The optimizer steps that were applied, by worker.
        takeovers: How often another attempt of a worker's task went on for one that was lost.
    """

    transport: str = ""
    seconds: float = 0.0
    pulls: int = 0
    cached_pulls: int = 0
    pushes: int = 0
    duplicates: int = 0
    rejected_requests: dict[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    sent_bytes: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    takeovers: int = 0

    def __str__(self) -> str:
        return (
            f"{self.pushes} updates in {self.seconds:.1f} s over {self.transport or 'nothing'} "
            f"({self.updates_per_second:.1f} a second), staleness {self.mean_staleness:.1f} on average and "
            f"{self.max_staleness} at most; {self.pulls} pulls, {self.received_bytes / 1e6:.1f} MB received, "
            f"{self.sent_bytes / 1e6:.1f} MB sent; {self.duplicates} duplicates, "
            f"{sum(self.rejected_requests.values())} rejected, {self.takeovers} takeovers"
        )

    @property
    def updates_per_second(self) -> float:
        """Applied updates for each second."""
        return self.pushes / self.seconds if self.seconds else 0.0

    @property
    def mean_staleness(self) -> float:
        """The mean over all updates; 0 where there were none."""
        return sum(value * count for value, count in self.staleness.items()) / max(1, self.pushes)

    @property
    def max_staleness(self) -> int:
        """The largest of all; 0 where there were none."""
        return max(self.staleness, default=0)


@dataclass(frozen=True)
class UpdateHeader:
    """What an update says beside its body. All of it is read before anything is applied."""

    base: int
    epoch: int
    batch: int
    steps: int
    rows: int
    learning_rate: float
    ended: dict[str, Any] | None

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> UpdateHeader:
        """From the fields of a call; a mistake in them is a KeyError, a TypeError or a ValueError."""
        ended = fields["ended"]
        return cls(
            **{name: int(fields[name]) for name in ("base", "epoch", "batch", "steps", "rows")},
            learning_rate=float(fields["learning_rate"]),
            ended=None
            if ended is None
            else {
                "logs": dict(ended["logs"]),
                "seconds": float(ended["seconds"]),
                "learning_rate": float(ended["learning_rate"]),
            },
        )


class ParameterService:
    """Answers the calls of workers; a `Handler`.

    Args:
        store: The weights.
        ledger: Who may push, and how far they are.
        contents: What travels.

    Attributes:
        failure: What a worker sent that ends training, if any did.
    """

    def __init__(self, store: Store, ledger: Ledger, contents: Contents) -> None:
        self._store, self._ledger, self._contents = store, ledger, contents
        self._lock = threading.Lock()
        self._leases: dict[Hashable, tuple[int, int]] = {}
        self._counts: Counter[str] = Counter()
        self._rejected_requests: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._started = time.monotonic()
        self.failure: SparkKerasError | None = None
        self._calls: dict[str, tuple[Callable[[Call], Reply], int]] = {
            "health": (self._health, 0),
            "lease": (self._lease, 0),
            "renew": (self._renew, 0),
            "parameters": (self._parameters, 0),
            "update": (self._update, contents.update_bytes),
            "report": (self._report, contents.metrics.nbytes),
            "finish": (self._finish, 0),
            "release": (self._release, 0),
        }

    def limit(self, name: str) -> int:
        """As `Handler.limit`."""
        if name not in self._calls:
            raise RefusedError("unknown", f"there is no call {name!r}.")
        return self._calls[name][1]

    def __call__(self, call: Call) -> Reply:
        """As `Handler`."""
        answer, _ = self._calls[call.name]
        try:
            if "lease" in call.fields:
                with self._lock:
                    self._leases[call.peer] = (int(call.fields["worker"]), int(call.fields["lease"]))
            reply = answer(call)
        except (KeyError, TypeError, ValueError) as error:
            self._count_refusal("malformed")
            raise RefusedError("malformed", f"{call.name!r} is not understood: {error!r}.") from error
        except RefusedError as error:
            self._count_refusal(error.kind)
            raise
        with self._lock:
            self._counts["received_bytes"] += len(call.body)
            self._counts["sent_bytes"] += sum(len(part) for part in reply.body)
        return reply

    def closed(self, peer: Hashable) -> None:
        """As `Handler.closed`: the lease that this peer used is in doubt, unless another connection uses it."""
        with self._lock:
            held = self._leases.pop(peer, None)
            elsewhere = held in self._leases.values()
        if held is not None and not elsewhere:
            self._ledger.doubt(*held)

    def stats(self, transport: str) -> ParameterServerStats:
        """What was done so far."""
        ledger = self._ledger
        steps, duplicates, takeovers = ledger.steps, ledger.duplicates, ledger.takeovers  # its lock comes before this one
        with self._lock:
            return ParameterServerStats(
                transport=transport,
                seconds=time.monotonic() - self._started,
                pulls=self._counts["pulls"],
                cached_pulls=self._counts["cached_pulls"],
                pushes=self._counts["pushes"],
                duplicates=duplicates,
                rejected_requests=dict(self._rejected_requests),
                received_bytes=self._counts["received_bytes"],
                sent_bytes=self._counts["sent_bytes"],
                staleness=dict(sorted(self._staleness.items())),
                steps=steps,
                takeovers=takeovers,
            )

    def _health(self, call: Call) -> Reply:
        return Reply({"version": self._store.version})

    def _lease(self, call: Call) -> Reply:
        resumed = self._ledger.lease(int(call.fields["worker"]), int(call.fields["attempt"]))
        if isinstance(resumed, str):
            return Reply({"status": resumed})
        told = dataclasses.asdict(dataclasses.replace(resumed, metrics=()))
        body = self._contents.metrics.pack(resumed.metrics) if resumed.metrics else b""
        with self._lock:
            self._leases[call.peer] = (int(call.fields["worker"]), resumed.lease)
        return Reply({"status": "granted", **told}, _bytes(body))

    def _renew(self, call: Call) -> Reply:
        return self._directive(call)

    def _parameters(self, call: Call) -> Reply:
        epoch = call.fields.get("epoch")
        if epoch is not None:
            return self._weights(self._ledger.held(int(epoch)), lambda: None)  # the ledger holds it
        with self._lock:
            self._counts["pulls"] += 1
        snapshot = self._store.snapshot()
        if snapshot.version == call.fields.get("newer_than"):
            snapshot.release()
            with self._lock:
                self._counts["cached_pulls"] += 1
            return Reply({"version": snapshot.version, "unchanged": True})
        return self._weights(snapshot, snapshot.release)

    def _weights(self, snapshot: Snapshot, sent: Callable[[], None]) -> Reply:
        weights = snapshot.weights
        body = (_view(weights.vector), *_bytes(self._contents.counters.pack(weights.counters)))
        return Reply({"version": snapshot.version}, body, sent)

    def _update(self, call: Call) -> Reply:
        contents = self._contents
        if len(call.body) != contents.update_bytes:
            raise RefusedError("malformed", f"an update has {contents.update_bytes} bytes, received {len(call.body)}.")
        worker, lease, sequence = (int(call.fields[name]) for name in ("worker", "lease", "sequence"))
        told = UpdateHeader.read(call.fields)
        counters = contents.counters.unpack(call.body[contents.vector_bytes : contents.weights_bytes])
        metrics = contents.metrics.unpack(call.body[contents.weights_bytes :])
        with self._ledger.pushing(worker, lease, sequence) as new:
            if new:
                self._apply(worker, told, contents.vector(call.body), counters)
                self._ledger.pushed(
                    worker,
                    epoch=told.epoch,
                    batch=told.batch,
                    steps=told.steps,
                    rows=told.rows,
                    metrics=metrics,
                    ended=told.ended,
                )
        return self._directive(call)

    def _report(self, call: Call) -> Reply:
        metrics = self._contents.metrics.unpack(call.body) if len(call.body) else ()
        worker, lease = int(call.fields["worker"]), int(call.fields["lease"])
        self._ledger.evaluated(worker, lease, int(call.fields["epoch"]), metrics)
        return self._directive(call)

    def _finish(self, call: Call) -> Reply:
        self._ledger.finish(int(call.fields["worker"]), int(call.fields["lease"]))
        return Reply({})

    def _release(self, call: Call) -> Reply:
        self._ledger.release(int(call.fields["worker"]), int(call.fields["lease"]), bool(call.fields["missing"]))
        return Reply({})

    def _directive(self, call: Call) -> Reply:
        directive = self._ledger.directive(int(call.fields["worker"]), int(call.fields["lease"]))
        return Reply({"version": self._store.version, **dataclasses.asdict(directive)})

    def _apply(self, worker: int, told: UpdateHeader, sent: Array, counters: tuple[Array, ...]) -> None:
        if told.base > self._store.version:
            raise ValueError(f"a base of {told.base} at version {self._store.version}")
        self._check_finite(worker, told, sent)
        try:
            applied = self._store.apply(
                sent, counters, told.base, steps=told.steps, rows=told.rows, learning_rate=told.learning_rate
            )
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            message = (
                f"the update rule {self._store.rule!r} failed to apply an update: {type(error).__name__}: {error} (in "
                f"{last.filename}, line {last.lineno})"
            )
            self.fail(error if isinstance(error, SparkKerasError) else ConfigurationError(message))
            raise RefusedError("rule", message) from error
        with self._lock:
            self._counts["pushes"] += 1
            self._staleness[applied.staleness] += 1

    def _count_refusal(self, kind: str) -> None:
        with self._lock:
            self._rejected_requests[kind] += 1

    def _check_finite(self, worker: int, told: UpdateHeader, sent: Array) -> None:
        loss = 0.0 if told.ended is None else told.ended["logs"].get("loss", 0.0)
        if is_finite(sent) and np.isfinite(loss):
            return
        what = f"its loss is not finite ({loss})" if is_finite(sent) else "its update is not finite"
        message = (
            f"training diverged in epoch {told.epoch + 1} on worker {worker}: {what}. It was not taken up. The model keeps "
            "the weights of the last epoch that ended, if one has. Try a smaller learning rate, clipnorm= in the optimizer, "
            "or look for NaN and extreme values in that partition (on_invalid='allow' lets them in)."
        )
        if not self._store.is_finite:
            message = (
                f"the update rule {self._store.rule!r} has made weights that are not finite, in epoch {told.epoch + 1} or "
                "before. The model keeps the weights of the last epoch that ended, if one has. Look into its apply, or try "
                "a smaller learning rate."
            )
        self.fail(DivergenceError(message))
        raise RefusedError(DIVERGED, message)

    def fail(self, error: SparkKerasError) -> None:
        """End training for a reason that the driver will raise."""
        with self._lock:
            self.failure = self.failure or error
        self._ledger.stop()


def is_finite(vector: Array) -> bool:
    """Whether all values are finite. The sum of squares shows it in one pass, unless it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(vector, vector)) or np.isfinite(vector).all())


@dataclass(frozen=True)
class Pulled:
    """Weights of the server.

    Attributes:
        version: Their version.
        weights: The weights; good until the next pull.
    """

    version: int
    weights: Flat


class ParameterClient:
    """A worker's end of the protocol, for one partition and one attempt; a context manager.

    Args:
        address: Where the server is.
        contents: What travels.
        worker: Which partition.
        attempt: A number that no other attempt at any partition has.
        caller: How to call; made from the address if it is not given.

    Attributes:
        stopped: Whether the thread that renews the lease has heard that training is over.
    """

    def __init__(
        self, address: Address, contents: Contents, worker: int, attempt: int, caller: Caller | None = None
    ) -> None:
        self._address, self._contents = address, contents
        self._worker, self._attempt = worker, attempt
        self._caller = caller or connect(address)
        self._lease = 0
        self._sequence = 0
        self.stopped = False
        self._pulled: Pulled | None = None
        self._buffer = memoryview(bytearray(0))

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._caller.close()

    def lease(self) -> ResumePoint | None:
        """Take the partition, as soon as no other attempt holds it; ``None`` if there is nothing left to do."""
        for pause in pauses():
            told, body = self._call("lease", {"worker": self._worker, "attempt": self._attempt})
            if told["status"] == "done":
                return None
            if told["status"] == "granted":
                break
            time.sleep(pause)
        self._lease, self._sequence = int(told["lease"]), int(told["sequence"])
        metrics = self._contents.metrics.unpack(body) if len(body) else ()
        names = ("lease", "sequence", "epoch", "batch", "steps")
        rate = _rate(told["learning_rate"])
        return ResumePoint(**{name: int(told[name]) for name in names}, metrics=metrics, learning_rate=rate)

    @contextmanager
    def renewing(self, every: float) -> Iterator[None]:
        """Keep the lease alive from a thread and a connection of its own."""
        stop = threading.Event()
        twin = ParameterClient(self._address, self._contents, self._worker, self._attempt)
        twin._lease = self._lease

        def renew() -> None:
            with twin:
                while not stop.wait(every):
                    try:
                        self.stopped = twin.renew().stop
                    except SparkKerasError:
                        return  # the worker's own next call says why

        thread = threading.Thread(target=renew, name="sparkkeras-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=FAREWELL_SECONDS)

    def pull(self) -> Pulled:
        """The server's weights; nothing travels if they have not changed since the last pull."""
        known = None if self._pulled is None else self._pulled.version
        told, body = self._weights({"newer_than": known})
        if self._pulled is None or not told.get("unchanged"):
            self._pulled = Pulled(int(told["version"]), self._flat(body))
        return self._pulled

    def snapshot(self, epoch: int) -> Flat:
        """The weights as they were at the end of an epoch that is to be evaluated."""
        self._pulled = None  # shares the buffer
        _, body = self._weights({"epoch": epoch})
        return self._flat(body)

    def push(
        self,
        parts: Sequence[Array],
        counters: Sequence[Array],
        metrics: Sequence[Array],
        *,
        base: int,
        epoch: int,
        batch: int,
        steps: int,
        rows: int,
        learning_rate: float,
        ended: Mapping[str, Any] | None = None,
    ) -> Directive:
        """Send an update, which is applied exactly once however often it travels.

        Args:
            parts: The vector, in parts one after the other.
            counters: The counters of the worker's weights.
            metrics: The metric state of the epoch so far.
            base: The version that the worker went on from after its last exchange.
            epoch: In which epoch.
            batch: The batches of it that are behind.
            steps: The optimizer steps behind the update.
            rows: The rows that they saw.
            learning_rate: That of the last step.
            ended: Where the epoch is over, its ``logs``, ``seconds`` and ``learning_rate``.
        """
        small = self._contents.counters.pack(counters) + self._contents.metrics.pack(metrics)
        self._sequence += 1
        fields = {
            **self._who(),
            "sequence": self._sequence,
            "base": base,
            "epoch": epoch,
            "batch": batch,
            "steps": steps,
            "rows": rows,
            "learning_rate": learning_rate,
            "ended": ended,
        }
        body = (*(_view(part) for part in parts if part.size), *_bytes(small))
        return _directive(self._call("update", fields, body)[0])

    def report(self, epoch: int, metrics: Sequence[Array]) -> Directive:
        """Send the metric state of the validation rows under the weights of an epoch; none if there were no rows."""
        body = _bytes(self._contents.metrics.pack(metrics) if metrics else b"")
        return _directive(self._call("report", {**self._who(), "epoch": epoch}, body)[0])

    def renew(self) -> Directive:
        """Ask what to do; the lease lives on."""
        return _directive(self._call("renew", self._who())[0])

    def proceed(self) -> Directive:
        """Ask what to do until that is not to wait."""
        for pause in pauses():
            directive = self.renew()
            if directive.stop or not directive.wait:
                break
            time.sleep(pause)
        return directive

    def staying(self) -> Iterator[Directive]:
        """Directives from time to time, for as long as the server has something to come."""
        for pause in pauses():
            directive = self.renew()
            if directive.stop or not directive.stay:
                return
            yield directive
            time.sleep(pause)

    def finish(self) -> None:
        """Say that the partition is done."""
        self._call("finish", self._who())

    def release(self, missing: bool = False) -> None:
        """Give the partition up unfinished. Says nothing if nobody hears it."""
        with contextlib.suppress(TransportError, RefusedError):  # the lease will run out
            self._caller.call("release", {**self._who(), "missing": missing})

    def _who(self) -> dict[str, Any]:
        return {"worker": self._worker, "lease": self._lease}

    def _weights(self, fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], memoryview]:
        if not len(self._buffer):
            self._buffer = memoryview(bytearray(self._contents.weights_bytes))
        return self._call("parameters", fields, (), self._buffer)

    def _flat(self, body: memoryview) -> Flat:
        return Flat(self._contents.vector(body), self._contents.counters.unpack(body[self._contents.vector_bytes :]))

    def _call(
        self, name: str, fields: Mapping[str, Any], body: Body = (), into: memoryview | None = None
    ) -> tuple[Mapping[str, Any], memoryview]:
        """Call, again and again where there is no answer, for as long as the address's timeout.

        Raises:
            DriverConnectionError: There was none in that time, or the server refuses.
            DivergenceError: What was sent is not finite.
        """
        try:
            return insist(self._caller, self._address.timeout, name, fields, body, into)
        except TransportError as error:
            raise DriverConnectionError(
                f"worker {self._worker} has had no answer from the parameter server at {self._address.told} for "
                f"{self._address.timeout:g} seconds ({error}). The driver may have ended, or its training may have "
                "failed; otherwise look at the network between them, or raise ParameterServerOptions(timeout=...)."
            ) from error
        except RefusedError as error:
            kind = DivergenceError if error.kind == DIVERGED else DriverConnectionError
            raise kind(str(error)) from error


def _directive(told: Mapping[str, Any]) -> Directive:
    return Directive(
        stop=bool(told["stop"]),
        wait=bool(told["wait"]),
        stay=bool(told["stay"]),
        evaluate=tuple(told["evaluate"]),
        learning_rate=_rate(told["learning_rate"]),
    )


def _rate(told: Any) -> tuple[int, float] | None:
    return None if told is None else (int(told[0]), float(told[1]))


def _view(array: Array) -> memoryview:
    """The memory of an array."""
    return np.ascontiguousarray(array).data.cast("B")


def _bytes(data: bytes) -> Body:
    return (memoryview(data),) if data else ()
