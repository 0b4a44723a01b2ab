"""The protocol between workers and driver during a search: the service on the driver, and the workers' client.

==========  ==========================================================  =================================================
call        meaning                                                     body of the request / of the reply
==========  ==========================================================  =================================================
`ask`       get the next trial, or wait and ask again                   - / the hyper-parameters, as JSON
`report`    report the metric at an epoch; replies whether to continue
`suggest`   the value of a hyper-parameter that the trial defines       its distribution, as JSON / the value, as JSON
`renew`     heartbeat: renew the lease; replies whether to continue
`offer`     ask whether the model is wanted, given the trial's values
`model`     upload a piece of that model                                the piece / -
`finish`    report the result of the trial                              the result, as JSON / -
`release`   report that the trial's process ended: assign it again
==========  ==========================================================  =================================================

The calls use the same transports as the parameter server (`sparkkeras.rpc.transport`). All except `ask` are idempotent; if
the reply to an `ask` is lost, the lease of its trial expires and another worker gets the trial. No call waits for the
storage of the search: `finish` hands the trial over to be saved (`saving`), and until that has ended, the reply to its
worker's next `ask` is to wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt.distributions import Distribution, from_json, to_json
from sparkkeras.hyperopt.ledger import UNDEFINED, Assignment, TrialLedger, Worker
from sparkkeras.hyperopt.saving import UploadedModel
from sparkkeras.rpc.leases import LEASE_LOST
from sparkkeras.rpc.service import INCREASE_TIMEOUT, Client, Service
from sparkkeras.rpc.transport import Address, Call, Caller, RefusedError, Reply

if TYPE_CHECKING:
    from sparkkeras.hyperopt.journal import Journal

PIECE_BYTES = 4 * 1024 * 1024
"""Workers upload models in pieces of this size, so that the driver never holds a whole model in memory."""

OUTCOME_BYTES = 16 * 1024 * 1024
"""The maximum size of a trial's result without its model (metrics, a traceback)."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial, as its worker reports it; `Trial` describes the attributes that are not listed here.

    Attributes:
        values: May be empty for a single metric.
        is_definition_error: Whether the search itself is invalid, so that other trials would fail in the same way; unless
            one already has a value, the search ends.
        model: The bytes of the model's file.
        suffix: The suffix of that file, one of `SUFFIXES`.
    """

    status: str
    value: float | None = None
    best_epoch: int | None = None
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_definition_error: bool = False
    model: bytes = field(default=b"", repr=False)
    suffix: str = ""
    values: Sequence[float] = ()


SUFFIXES = ("npz", "keras")
"""The suffixes of model files: the weights alone, or the whole model."""

_OUTCOME_FIELDS = ("status", "value", "values", "best_epoch", "history", "error", "traceback", "extra")


class SearchService(Service):
    """Handles the calls of workers.

    Args:
        ledger: The trials and their leases.
        journal: The folder in which models are kept.
        encode: Encodes hyper-parameters as JSON values.
    """

    def __init__(self, ledger: TrialLedger, journal: Journal, encode: Callable[[Any], Any]) -> None:
        calls: dict[str, tuple[Callable[[Call], Reply], int]] = {
            "health": (lambda call: Reply({}), 0),
            "ask": (self._ask, 0),
            "report": (self._report, 0),
            "suggest": (self._suggest, OUTCOME_BYTES),
            "renew": (lambda call: Reply({"directive": ledger.renew(_lease_of(call))}), 0),
            "offer": (self._offer, 0),
            "model": (self._model, PIECE_BYTES),
            "finish": (self._finish, OUTCOME_BYTES),
            "release": (self._release, 0),
        }
        super().__init__(calls, ledger.expire)
        self._ledger, self._journal, self._encode = ledger, journal, encode

    def _ask(self, call: Call) -> Reply:
        worker = Worker(call.field("worker", str), call.field("task", int), call.field("attempt", int))
        assignment = self._ledger.ask(worker)
        if assignment is None:
            return Reply({"wait": self._ledger.should_wait(worker)})
        body = json.dumps(self._encode(assignment.params)).encode()
        return Reply({"number": assignment.number, "lease": assignment.lease}, (memoryview(body),))

    def _release(self, call: Call) -> Reply:
        self._ledger.release(_lease_of(call), call.field("cause", str))
        return Reply({})

    def _report(self, call: Call) -> Reply:
        epoch, value = call.field("epoch", int), call.field("value", float)
        return Reply({"directive": self._ledger.report(_lease_of(call), epoch, value)})

    def _suggest(self, call: Call) -> Reply:
        distribution = from_json(json.loads(bytes(call.body)))
        value = self._ledger.suggest(_lease_of(call), call.field("label", str), distribution)
        return Reply({}, (memoryview(json.dumps(value).encode()),))

    def _offer(self, call: Call) -> Reply:
        self._ledger.extend_for_upload(_lease_of(call))
        return Reply({"wanted": self._journal.wants(*call.field("values", _floats))})

    def _model(self, call: Call) -> Reply:
        lease, start = _lease_of(call), call.field("start", int)
        self._ledger.extend_for_upload(lease)
        try:
            draft = self._journal.draft(lease)
            draft.touch()  # and not truncated: a repeated call may write its piece after later pieces
            with draft.open("r+b") as file:
                file.seek(start)
                file.write(call.body)
        except OSError as error:
            self._ledger.fail(StorageError(f"cannot write a model to the temporary folder of the driver: {error}."))
        return Reply({})

    def _finish(self, call: Call) -> Reply:
        lease = _lease_of(call)
        if self._ledger.is_done(lease):
            return Reply({})
        trial = self._ledger.extend_for_upload(lease)
        fields = json.loads(bytes(call.body))
        trial = replace(trial, **{name: fields[name] for name in _OUTCOME_FIELDS})
        if call.field("is_definition_error", bool) and not self._ledger.has_value():
            self._ledger.fail(ConfigurationError("\n\n".join(filter(None, (trial.error, trial.traceback)))))
        model = None if trial.value is None else self._uploaded_model(lease, call.field("suffix", str))
        is_saved = self._ledger.finish(lease, trial, model)
        if model is not None and not is_saved:
            model.draft.unlink(missing_ok=True)
        return Reply({})

    def _uploaded_model(self, lease: int, suffix: str) -> UploadedModel | None:
        draft = self._journal.draft(lease)
        if not draft.exists():
            return None
        if suffix not in SUFFIXES:
            draft.unlink()
            raise RefusedError("malformed", f"the model of a trial has the suffix {suffix!r}; expected one of {SUFFIXES}.")
        return UploadedModel(draft, suffix)


class LeaseLostError(Exception):
    """Another worker has the trial."""


class SearchClient(Client):
    """The client that a worker uses to call the driver.

    Args:
        address: The address of the driver.
        worker: The worker.
        caller: The caller to use; by default one for the address.
    """

    def __init__(self, address: Address, worker: Worker, caller: Caller | None = None) -> None:
        super().__init__(
            address, worker.name, caller, {LEASE_LOST: LeaseLostError, UNDEFINED: ConfigurationError}, INCREASE_TIMEOUT
        )
        self._worker = worker

    def ask(self) -> Assignment | None:
        """The next trial, with its hyper-parameters still encoded; ``None`` if there is none for this worker."""
        worker = self._worker
        reply, body = self._poll("ask", {"worker": worker.name, "task": worker.task, "attempt": worker.attempt})
        if "lease" not in reply:
            return None
        return Assignment(int(reply["number"]), int(reply["lease"]), json.loads(bytes(body)))

    def report(self, lease: int, epoch: int, value: float) -> str:
        """Report the metric at an epoch, counted from 1; returns whether to continue.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        return str(self._call("report", {"lease": lease, "epoch": epoch, "value": value})[0]["directive"])

    def suggest(self, lease: int, label: str, distribution: Distribution) -> Any:
        """The value of a hyper-parameter that the trial defines.

        Raises:
            LeaseLostError: Another worker has the trial.
            ConfigurationError: It cannot be defined so.
        """
        body = memoryview(json.dumps(to_json(distribution)).encode())
        return json.loads(bytes(self._call("suggest", {"lease": lease, "label": label}, (body,))[1]))

    def renew(self, lease: int) -> str:
        """Send a heartbeat; returns whether to continue.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        return str(self._call("renew", {"lease": lease})[0]["directive"])

    def release(self, lease: int, cause: str) -> None:
        """Report that the process of the trial ended, and why.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        self._call("release", {"lease": lease, "cause": cause})

    def finish(self, lease: int, outcome: Outcome) -> None:
        """Report the result of a trial, and upload its model if the driver wants it.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        if outcome.model and outcome.value is not None:
            reply, _ = self._call("offer", {"lease": lease, "values": outcome.values or [outcome.value]})
            model = memoryview(outcome.model) if reply["wanted"] else memoryview(b"")
            for start in range(0, len(model), PIECE_BYTES):
                self._call("model", {"lease": lease, "start": start}, (model[start : start + PIECE_BYTES],))
        body = _pack(outcome)
        if len(body) > OUTCOME_BYTES:
            too_large = f"its history and its extra results are too large to be kept ({len(body):,} bytes)"
            error = "; ".join(filter(None, (outcome.error[:1000], too_large)))
            body = _pack(replace(outcome, history={}, extra={}, error=error))
        self._call(
            "finish",
            {"lease": lease, "suffix": outcome.suffix, "is_definition_error": outcome.is_definition_error},
            (memoryview(body),),
        )


def _pack(outcome: Outcome) -> bytes:
    return json.dumps({name: getattr(outcome, name) for name in _OUTCOME_FIELDS}).encode()


def _floats(given: Any) -> tuple[float, ...]:
    return tuple(map(float, given))


def _lease_of(call: Call) -> int:
    return call.field("lease", int)
