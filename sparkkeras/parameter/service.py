"""The parameter protocol: the service that handles the calls of workers, and the client with a method for each call.

=============  ======================================================================  ====================================
call           purpose                                                                 request's body / reply's body
=============  ======================================================================  ====================================
`health`       check that the server replies                                           - / -
`lease`        take the lease of a partition                                           - / metric state of its epoch so far
`renew`        renew the lease, and get a directive                                    - / -
`parameters`   pull the weights, if they are newer, or those of the end of an epoch    - / weights, integers
`optimizer`    send the optimizer variables at the end of an epoch, for checkpoints    optimizer variables / -
`update`       push an update, and pull the weights after it if asked to               update, integers, metric state /
                                                                                       weights, integers, or -
`report`       report on the validation rows                                           metric state / -
`finish`       end the partition: nothing is left to do                                - / -
`release`      give the lease up: another attempt continues                            - / -
=============  ======================================================================  ====================================

All calls are idempotent, so the client retries a call that gets no reply.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkkeras.errors import ConfigurationError, DivergenceError, SparkKerasError
from sparkkeras.parameter.exchange import (
    Directive,
    EvaluationReport,
    ExchangePoint,
    ParameterServerStats,
    ResumePoint,
    Settings,
)
from sparkkeras.parameter.ledger import Ledger
from sparkkeras.parameter.store import Snapshot
from sparkkeras.rpc.service import INCREASE_TIMEOUT, Client, Service
from sparkkeras.rpc.transport import Address, Call, Caller, RefusedError, Reply, TransportError, backoff
from sparkkeras.rpc.wire import Body, Fields
from sparkkeras.weights import Array, Flat

DIVERGED = "diverged"
"""The kind of `RefusedError` for an update or a loss that is not finite."""

RENEWAL_JOIN_SECONDS = 2.0
"""How long a worker that ends waits for the thread that renews its lease."""


@dataclass(frozen=True)
class ArraySpecs:
    """The format of a list of small arrays as bytes: their shapes and dtypes.

    Attributes:
        specs: The shape and the dtype name of each array.
    """

    specs: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def like(cls, arrays: Sequence[Array]) -> ArraySpecs:
        """The format of given arrays."""
        return cls(tuple((tuple(array.shape), np.dtype(array.dtype).name) for array in arrays))

    @property
    def nbytes(self) -> int:
        """The size of the arrays in bytes."""
        return sum(_nbytes(shape, dtype) for shape, dtype in self.specs)

    def pack(self, arrays: Sequence[Array]) -> bytes:
        """Arrays of these shapes as bytes; dtypes are converted.

        Raises:
            ValueError: The arrays have other shapes.
        """
        if [array.shape for array in arrays] != [shape for shape, _ in self.specs]:
            raise ValueError(
                f"expected arrays of the shapes and dtypes {self.specs}, received {ArraySpecs.like(arrays).specs}"
            )
        return b"".join(array.astype(dtype).tobytes() for array, (_, dtype) in zip(arrays, self.specs, strict=True))

    def unpack(self, data: memoryview) -> tuple[Array, ...]:
        """The arrays in the bytes, as copies."""
        arrays, start = [], 0
        for shape, dtype in self.specs:
            stop = start + _nbytes(shape, dtype)
            arrays.append(np.frombuffer(data[start:stop], dtype).reshape(shape).copy())
            start = stop
        return tuple(arrays)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class PayloadFormat:
    """The format of weights and metric states. Both ends know it, so neither has to trust the other.

    Attributes:
        size: The number of values in the weight vector.
        dtype: The dtype name of the weight vector.
        integer_variables: The format of the weights that are not floating point.
        metrics: The format of the metric state.
        optimizer: The format of the optimizer variables that workers send at the end of an epoch; ``None``: they do not.
    """

    size: int
    dtype: str
    integer_variables: ArraySpecs
    metrics: ArraySpecs
    optimizer: ArraySpecs | None = None

    @classmethod
    def of(cls, weights: Flat, metrics: Sequence[Array], optimizer: Flat | None = None) -> PayloadFormat:
        """The format of given weights, metrics and optimizer variables."""
        return cls(
            weights.vector.size,
            weights.vector.dtype.name,
            ArraySpecs.like(weights.integer_variables),
            ArraySpecs.like(metrics),
            None if optimizer is None else ArraySpecs.like((optimizer.vector, *optimizer.integer_variables)),
        )

    @property
    def vector_bytes(self) -> int:
        """The size of the weight vector in bytes."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def weights_bytes(self) -> int:
        """The size of a body with weights, in bytes."""
        return self.vector_bytes + self.integer_variables.nbytes

    @property
    def update_bytes(self) -> int:
        """The size of a body with an update, in bytes."""
        return self.weights_bytes + self.metrics.nbytes

    def pack_optimizer(self, optimizer: Flat) -> bytes:
        """The bytes of optimizer variables."""
        assert self.optimizer is not None
        return self.optimizer.pack((optimizer.vector, *optimizer.integer_variables))

    def unpack_optimizer(self, packed: bytes) -> Flat:
        """The inverse of `pack_optimizer`."""
        assert self.optimizer is not None
        vector, *integers = self.optimizer.unpack(memoryview(packed))
        return Flat(vector, tuple(integers))

    def weights(self, body: memoryview) -> Flat:
        """The weights at the start of a body; the vector shares the body's memory."""
        vector = np.frombuffer(body[: self.vector_bytes], self.dtype)
        return Flat(vector, self.integer_variables.unpack(body[self.vector_bytes :]))


class ParameterService(Service):
    """Handles the calls of workers.

    Args:
        ledger: The leases and the progress of the workers, and the weights.
        payload_format: The format of weights and metric states.

    Attributes:
        failure: The error that ends training, if a worker sent an invalid update or the rule failed.
    """

    def __init__(self, ledger: Ledger, payload_format: PayloadFormat) -> None:
        calls = {
            "health": (self._health, 0),
            "lease": (self._lease, 0),
            "renew": (self._directive, 0),
            "parameters": (self._parameters, 0),
            "optimizer": (self._optimizer, 0 if payload_format.optimizer is None else payload_format.optimizer.nbytes),
            "update": (self._update, payload_format.update_bytes),
            "report": (self._report, payload_format.metrics.nbytes),
            "finish": (self._finish, 0),
            "release": (self._release, 0),
        }
        super().__init__(calls, ledger.expire)
        self._store, self._ledger, self._payload_format = ledger.store, ledger, payload_format
        self._counts: Counter[str] = Counter()
        self._rejected_requests: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._started = time.monotonic()
        self.failure: SparkKerasError | None = None

    def __call__(self, call: Call) -> Reply:
        """See `Handler`."""
        try:
            reply = super().__call__(call)
        except RefusedError as error:
            with self._lock:
                self._rejected_requests[error.kind] += 1
            raise
        with self._lock:
            self._counts["received_bytes"] += len(call.body)
            self._counts["sent_bytes"] += sum(len(part) for part in reply.body)
        return reply

    def stats(self, transport: str) -> ParameterServerStats:
        """The statistics so far."""
        steps = self._ledger.steps  # outside of the lock: the ledger's own lock is taken before it
        with self._lock:
            return ParameterServerStats(
                transport=transport,
                seconds=time.monotonic() - self._started,
                duplicates=self._ledger.duplicates,
                rejected_requests=dict(self._rejected_requests),
                staleness=dict(sorted(self._staleness.items())),
                steps=steps,
                takeovers=self._ledger.takeovers,
                **self._counts,
            )

    def _health(self, call: Call) -> Reply:
        return Reply({"version": self._store.version})

    def _lease(self, call: Call) -> Reply:
        resumed = self._ledger.lease(call.field("worker", int), call.field("attempt", int))
        if isinstance(resumed, str):
            return Reply({"status": resumed, "wait": resumed == "wait"})
        fields = dataclasses.asdict(dataclasses.replace(resumed, metrics=()))
        body = self._payload_format.metrics.pack(resumed.metrics) if resumed.metrics else b""
        return Reply({"status": "granted", **fields}, _bytes(body))

    def _parameters(self, call: Call) -> Reply:
        if "epoch" in call.fields:
            return self._weights(self._ledger.snapshot(call.field("epoch", int)), lambda: None)  # the ledger holds it
        with self._lock:
            self._counts["pulls"] += 1
        snapshot = self._store.snapshot()
        if snapshot.version == call.fields.get("newer_than"):
            snapshot.release()
            with self._lock:
                self._counts["cached_pulls"] += 1
            return Reply({"version": snapshot.version, "unchanged": True})
        return self._weights(snapshot, snapshot.release)

    def _weights(self, snapshot: Snapshot, sent: Callable[[], None], fields: Fields | None = None) -> Reply:
        weights = snapshot.weights
        body = (_view(weights.vector), *_bytes(self._payload_format.integer_variables.pack(weights.integer_variables)))
        return Reply({**(fields or {}), "version": snapshot.version}, body, sent)

    def _update(self, call: Call) -> Reply:
        payload_format = self._payload_format
        _check_length(call, payload_format.update_bytes)
        worker, lease, sequence, base = (call.field(name, int) for name in ("worker", "lease", "sequence", "base"))
        point = ExchangePoint.unpack(call.field, payload_format.metrics.unpack(call.body[payload_format.weights_bytes :]))
        update = payload_format.weights(call.body)
        with self._ledger.pushing(worker, lease, sequence) as new:
            if new:
                self._apply(worker, base, point, update)
                self._ledger.pushed(worker, point)
        reply = self._directive(call)
        if not call.fields.get("pull"):
            return reply
        with self._lock:
            self._counts["pulls"] += 1
        snapshot = self._store.snapshot()
        return self._weights(snapshot, snapshot.release, reply.fields)

    def _optimizer(self, call: Call) -> Reply:
        assert self._payload_format.optimizer is not None
        _check_length(call, self._payload_format.optimizer.nbytes)
        self._ledger.keep_optimizer(*_holder(call), bytes(call.body))
        return Reply({})

    def _report(self, call: Call) -> Reply:
        report = None
        if len(call.body) or call.fields.get("logs"):
            _check_length(call, self._payload_format.metrics.nbytes)
            report = EvaluationReport.unpack(call.field, self._payload_format.metrics.unpack(call.body))
        self._ledger.evaluated(*_holder(call), call.field("epoch", int), report)
        return self._directive(call)

    def _finish(self, call: Call) -> Reply:
        self._ledger.finish(*_holder(call))
        return Reply({})

    def _release(self, call: Call) -> Reply:
        self._ledger.release(*_holder(call), call.field("missing", bool))
        return Reply({})

    def _directive(self, call: Call) -> Reply:
        directive = self._ledger.directive(*_holder(call))
        return Reply({"version": self._store.version, **vars(directive)})

    def _apply(self, worker: int, base: int, point: ExchangePoint, update: Flat) -> None:
        if base > self._store.version:
            raise RefusedError(
                "malformed", f"the update's base is version {base}, but the newest version is {self._store.version}."
            )
        self._check_finite(worker, point, update.vector)
        try:
            staleness = self._store.apply(update, base, point)
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
            self._staleness[staleness] += 1

    def _check_finite(self, worker: int, point: ExchangePoint, sent: Array) -> None:
        loss = (point.logs or {}).get("loss")  # a custom train_step may report a vector, of which a long one is left out
        if is_finite(sent) and (loss is None or np.isfinite(loss).all()):
            return
        what = f"its loss is not finite ({loss})" if is_finite(sent) else "its update is not finite"
        message = (
            f"training diverged in epoch {point.epoch + 1} on worker {worker}: {what}. The update was not applied, and the "
            "model keeps the weights of the last completed epoch, if there is one. Try a smaller learning rate or clipnorm= "
            "in the optimizer, or look for NaN and extreme values in that partition (on_invalid='allow' accepts them)."
        )
        if not self._store.is_finite:
            message = (
                f"the update rule {self._store.rule!r} produced weights that are not finite, in epoch {point.epoch + 1} or "
                "before. The model keeps the weights of the last completed epoch, if there is one. Check the rule's apply, "
                "or try a smaller learning rate."
            )
        self.fail(DivergenceError(message))
        raise RefusedError(DIVERGED, message)

    def fail(self, error: SparkKerasError) -> None:
        """End training with an error, which the driver raises."""
        with self._lock:
            self.failure = self.failure or error
        self._ledger.stop()


def _holder(call: Call) -> tuple[int, int]:
    """The worker of a call and its lease."""
    return call.field("worker", int), call.field("lease", int)


def _check_length(call: Call, expected: int) -> None:
    if len(call.body) != expected:
        raise RefusedError(
            "malformed", f"the call {call.name!r} takes a body of {expected} bytes, received {len(call.body)}."
        )


def is_finite(vector: Array) -> bool:
    """Whether all values are finite. One pass over the sum of squares is enough, unless it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(vector, vector)) or np.isfinite(vector).all())


@dataclass(frozen=True)
class PulledWeights:
    """Weights that a worker has pulled.

    Attributes:
        version: Their version.
        weights: The weights; valid until the next pull.
    """

    version: int
    weights: Flat


class ParameterClient(Client):
    """The worker's end of the protocol, for one partition and one attempt of its task.

    Args:
        address: The address of the server.
        payload_format: The format of weights and metric states.
        worker: The index of the partition.
        attempt: A number that is unique among the attempts of all partitions.
        caller: The caller to use; by default one for the address.
        lease: The number of the partition's lease, if the attempt has it already.

    Attributes:
        stopped: Whether the thread that renews the lease has received the directive to stop.
    """

    def __init__(
        self,
        address: Address,
        payload_format: PayloadFormat,
        worker: int,
        attempt: int,
        caller: Caller | None = None,
        lease: int = 0,
    ) -> None:
        super().__init__(address, f"worker {worker}", caller, {DIVERGED: DivergenceError}, INCREASE_TIMEOUT)
        self._payload_format = payload_format
        self._worker, self._attempt = worker, attempt
        self._lease = lease
        self._sequence = 0
        self.stopped = False
        self._pulled: PulledWeights | None = None
        self._buffer = memoryview(bytearray(0))

    def lease(self) -> ResumePoint | None:
        """Wait for the partition's lease and take it; ``None`` if there is nothing left to do."""
        reply, body = self._poll("lease", {"worker": self._worker, "attempt": self._attempt})
        if reply["status"] == "done":
            return None
        self._lease, self._sequence = reply["lease"], reply["sequence"]
        metrics = self._payload_format.metrics.unpack(body) if len(body) else ()
        iterations, settings = tuple(reply["iterations"]), _settings(reply["settings"])
        return ResumePoint(self._lease, self._sequence, reply["epoch"], reply["batch"], iterations, metrics, settings)

    @contextmanager
    def renewing(self, every: float) -> Iterator[None]:
        """Renew the lease every ``every`` seconds until the context ends, in a separate thread with its own connection."""
        stop = threading.Event()
        heartbeat = ParameterClient(self._address, self._payload_format, self._worker, self._attempt, lease=self._lease)

        def renew() -> None:
            with heartbeat:
                while not stop.wait(every):
                    try:
                        reply, _ = heartbeat._caller.call("renew", heartbeat._identity())
                    except TransportError:
                        continue  # the network may come back within an epoch, before the worker's next call
                    except RefusedError:
                        return  # the worker's next call raises the same error
                    self.stopped = _directive(reply).stop

        thread = threading.Thread(target=renew, name="sparkkeras-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=RENEWAL_JOIN_SECONDS)

    def pull(self) -> PulledWeights:
        """The server's weights. They are sent only if they have changed since the last pull."""
        known = None if self._pulled is None else self._pulled.version
        reply, body = self._weights({"newer_than": known})
        if self._pulled is None or not reply.get("unchanged"):
            self._pulled = PulledWeights(int(reply["version"]), self._payload_format.weights(body))
        return self._pulled

    def snapshot(self, epoch: int) -> Flat:
        """The weights at the end of an epoch that is being evaluated."""
        self._pulled = None  # its weights share the buffer
        _, body = self._weights({"epoch": epoch})
        return self._payload_format.weights(body)

    def push(
        self, parts: Sequence[Array], integers: Sequence[Array], base: int, point: ExchangePoint, pull: bool = False
    ) -> tuple[Directive, PulledWeights | None]:
        """Push an update. It is applied exactly once, however often it is sent.

        Args:
            parts: The update's vector, as consecutive parts.
            integers: The integer variables of the worker's weights.
            base: The version that the worker has trained from since its last exchange.
            point: The worker's progress.
            pull: Whether to pull the weights after it.
        """
        small = self._payload_format.integer_variables.pack(integers) + self._payload_format.metrics.pack(point.metrics)
        self._sequence += 1
        fields = {**self._identity(), "sequence": self._sequence, "base": base, **point.pack(), "pull": pull}
        body = (*(_view(part) for part in parts if part.size), *_bytes(small))
        reply, received = self._call("update", fields, body, self._buffer if pull else None)
        if pull:
            self._pulled = PulledWeights(int(reply["version"]), self._payload_format.weights(received))
        return _directive(reply), self._pulled if pull else None

    def keep_optimizer(self, optimizer: Flat) -> None:
        """Send the optimizer variables at the end of an epoch, before the push."""
        self._call("optimizer", self._identity(), _bytes(self._payload_format.pack_optimizer(optimizer)))

    def report(self, epoch: int, report: EvaluationReport | None) -> Directive:
        """Report on the validation rows for the weights of an epoch; ``None`` if there were no rows."""
        body = b"" if report is None else self._payload_format.metrics.pack(report.metrics)
        fields = {"rows": 0} if report is None else report.pack()
        return _directive(self._call("report", {**self._identity(), "epoch": epoch, **fields}, _bytes(body))[0])

    def renew(self) -> Directive:
        """Renew the lease, and get the next directive."""
        return _directive(self._call("renew", self._identity())[0])

    def proceed(self) -> Directive:
        """Wait until the directive is no longer to wait."""
        return _directive(self._poll("renew", self._identity())[0])

    def staying(self) -> Iterator[Directive]:
        """Poll directives for as long as the server says that there will be more to validate."""
        for delay in backoff():
            directive = self.renew()
            if directive.stop or not directive.stay:
                return
            yield directive
            time.sleep(delay)

    def finish(self) -> None:
        """Report that the partition is done."""
        self._call("finish", self._identity())

    def release(self, missing: bool = False) -> None:
        """Give the unfinished partition up to another attempt; ``missing`` if its rows were not found. Ignores errors."""
        with contextlib.suppress(TransportError, RefusedError):  # the lease expires anyway
            self._caller.call("release", {**self._identity(), "missing": missing})

    def _identity(self) -> dict[str, Any]:
        return {"worker": self._worker, "lease": self._lease}

    def _weights(self, fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], memoryview]:
        if not len(self._buffer):
            self._buffer = memoryview(bytearray(self._payload_format.weights_bytes))
        return self._call("parameters", fields, (), self._buffer)


def _directive(fields: Mapping[str, Any]) -> Directive:
    evaluate, settings = tuple(fields["evaluate"]), _settings(fields["settings"])
    return Directive(fields["stop"], fields["wait"], fields["stay"], evaluate, settings)


def _settings(value: Any) -> Settings | None:
    return None if value is None else (int(value[0]), tuple(map(float, value[1])))


def _view(array: Array) -> memoryview:
    """The memory of an array as bytes."""
    return np.ascontiguousarray(array).data.cast("B")


def _bytes(data: bytes) -> Body:
    return (memoryview(data),) if data else ()
