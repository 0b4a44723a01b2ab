"""What workers and the driver say to each other during a search: calls on a ledger, and the client with the same face.

==========  ==========================================================  =================================================
call        asks                                                        body there / back
==========  ==========================================================  =================================================
`ask`       for the next trial                                          - / the hyper-parameters, as JSON
`report`    to take the loss of an epoch, and whether to go on
`renew`     whether to go on; the lease lives on
`offer`     whether the model of a trial with this value is wanted
`model`     to take a piece of that model                               the piece / -
`finish`    to take what came of the trial                              that, as JSON / -
`lose`      to give the trial out again: its process is gone
==========  ==========================================================  =================================================

They travel as those of the parameter server do (`sparkkeras.rpc.transport`). All but `ask` may be repeated without
harm; a trial that was given out to nobody, since the answer to `ask` was lost, runs out and is given out again.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkkeras.errors import ConfigurationError, DriverConnectionError, StorageError
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import LEASE_LOST, Assignment, TrialLedger, Worker
from sparkkeras.hyperopt.trials import STOPPED, Trial
from sparkkeras.rpc.transport import Address, Call, Caller, RefusedError, Reply, TransportError, connect, insist
from sparkkeras.rpc.wire import Body

PIECE_BYTES = 4 * 1024 * 1024
"""Models travel in pieces of this size, so the driver never holds one in memory."""

WAIT_SECONDS = 0.5
"""How often a worker asks that is to wait."""

OUTCOME_BYTES = 16 * 1024 * 1024
"""What is reported of a trial beside its model (metrics, a traceback) may have this size."""


@dataclass(frozen=True)
class Outcome:
    """What came of a trial, as its worker reports it.

    Attributes:
        status: As in `Trial`.
        value: As in `Trial`.
        best_epoch: As in `Trial`.
        history: As in `Trial`.
        error: As in `Trial`.
        traceback: As in `Trial`.
        extra: As in `Trial`.
        is_mistake: Whether other trials will hardly fare better; if none has yet, the search is to end.
        model: The bytes of the model's file.
        suffix: What kind of file that is, one of `SUFFIXES`.
    """

    status: str
    value: float | None = None
    best_epoch: int | None = None
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_mistake: bool = False
    model: bytes = field(default=b"", repr=False)
    suffix: str = ""


SUFFIXES = ("npz", "keras")
"""What kinds of files models come as: weights alone, or whole."""

_TOLD = ("status", "value", "best_epoch", "history", "error", "traceback", "extra")


class SearchService:
    """Answers the calls of workers; a `Handler`.

    Args:
        ledger: Who runs what.
        journal: Where models are kept.
        encode: What the space made of a choice, as JSON knows it.
    """

    def __init__(self, ledger: TrialLedger, journal: Journal, encode: Callable[[Any], Any]) -> None:
        self._ledger, self._journal, self._encode = ledger, journal, encode
        self._lock = threading.Lock()
        self._keeping = threading.Lock()
        self._leases: defaultdict[Hashable, set[int]] = defaultdict(set)
        self._calls: dict[str, tuple[Callable[[Call], Reply], int]] = {
            "health": (lambda call: Reply({}), 0),
            "ask": (self._ask, 0),
            "report": (self._report, 0),
            "renew": (lambda call: Reply({"go": ledger.renew(_lease(call))}), 0),
            "offer": (self._offer, 0),
            "model": (self._model, PIECE_BYTES),
            "finish": (self._finish, OUTCOME_BYTES),
            "lose": (self._lose, 0),
        }

    def limit(self, name: str) -> int:
        """As `Handler.limit`."""
        if name not in self._calls:
            raise RefusedError("unknown", f"there is no call {name!r}.")
        return self._calls[name][1]

    def __call__(self, call: Call) -> Reply:
        """As `Handler`."""
        try:
            if "lease" in call.fields:
                with self._lock:
                    self._leases[call.peer].add(_lease(call))
            return self._calls[call.name][0](call)
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError("malformed", f"{call.name!r} is not understood: {error!r}.") from error

    def closed(self, peer: Hashable) -> None:
        """As `Handler.closed`: the trials that this peer has are in doubt."""
        with self._lock:
            leases = self._leases.pop(peer, set())
        self._ledger.doubt(leases)

    def _ask(self, call: Call) -> Reply:
        worker = Worker(str(call.fields["worker"]), int(call.fields["task"]), int(call.fields["attempt"]))
        assignment = self._ledger.ask(worker)
        if assignment is None:
            return Reply({"wait": self._ledger.shall_wait(worker)})
        with self._lock:
            self._leases[call.peer].add(assignment.lease)
        body = json.dumps(self._encode(assignment.params)).encode()
        return Reply({"number": assignment.number, "lease": assignment.lease}, (memoryview(body),))

    def _lose(self, call: Call) -> Reply:
        self._ledger.lose(_lease(call), str(call.fields["cause"]))
        return Reply({})

    def _report(self, call: Call) -> Reply:
        epoch, loss = int(call.fields["epoch"]), float(call.fields["loss"])
        return Reply({"go": self._ledger.report(_lease(call), epoch, loss)})

    def _offer(self, call: Call) -> Reply:
        self._ledger.hand_over(_lease(call))
        with self._keeping:
            return Reply({"wanted": self._journal.wants(float(call.fields["value"]))})

    def _model(self, call: Call) -> Reply:
        lease, start = _lease(call), int(call.fields["start"])
        self._ledger.hand_over(lease)
        try:
            with self._journal.draft(lease).open("r+b" if start else "wb") as file:
                file.seek(start)
                file.write(call.body)
        except OSError as error:
            self._ledger.fail(StorageError(f"cannot keep a model in the temporary folder of this machine: {error}."))
        return Reply({})

    def _finish(self, call: Call) -> Reply:
        lease = _lease(call)
        if self._ledger.is_done(lease):
            return Reply({})
        trial = self._ledger.hand_over(lease)
        told = json.loads(bytes(call.body))
        trial = replace(trial, **{name: told[name] for name in _TOLD})
        if call.fields["is_mistake"] and not self._ledger.has_value():
            self._ledger.fail(ConfigurationError("\n\n".join(filter(None, (trial.error, trial.traceback)))))
        draft = self._journal.draft(lease)
        is_lost = trial.status == STOPPED and not self._ledger.reason  # as the ledger will say: it is tried again
        try:
            with self._keeping:
                if draft.exists() and trial.value is not None and not is_lost:
                    self._keep(trial, draft, str(call.fields["suffix"]))
                self._ledger.finish(lease, trial)
                try:
                    self._journal.drop_surplus()
                except StorageError as error:
                    self._ledger.fail(error)
        finally:
            draft.unlink(missing_ok=True)
        return Reply({})

    def _keep(self, trial: Trial, draft: Path, suffix: str) -> None:
        if suffix not in SUFFIXES:
            raise ValueError(suffix)
        try:
            self._journal.keep_model(trial.number, trial.value or 0.0, draft, suffix)
        except StorageError as error:
            self._ledger.fail(error)


class LeaseLostError(Exception):
    """Another worker has the trial."""


class SearchClient:
    """A worker's end of the protocol.

    Args:
        address: Where the driver is.
        worker: Who asks.
        caller: How to call; made from the address if it is not given.
    """

    def __init__(self, address: Address, worker: Worker, caller: Caller | None = None) -> None:
        self._address, self._worker = address, worker
        self._caller = caller or connect(address)

    def __enter__(self) -> SearchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._caller.close()

    def ask(self) -> Assignment | None:
        """The next trial, with its hyper-parameters as they travel; ``None`` where there is none for this worker."""
        worker = self._worker
        told, body = self._call("ask", {"worker": worker.name, "task": worker.task, "attempt": worker.attempt})
        while told.get("wait"):
            time.sleep(WAIT_SECONDS)
            told, body = self._call("ask", {"worker": worker.name, "task": worker.task, "attempt": worker.attempt})
        if "lease" not in told:
            return None
        return Assignment(int(told["number"]), int(told["lease"]), json.loads(bytes(body)))

    def report(self, lease: int, epoch: int, loss: float) -> str:
        """Report the loss of an epoch, counted from 1; whether to go on.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        return str(self._call("report", {"lease": lease, "epoch": epoch, "loss": loss})[0]["go"])

    def renew(self, lease: int) -> str:
        """Give a sign of life; whether to go on.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        return str(self._call("renew", {"lease": lease})[0]["go"])

    def lose(self, lease: int, cause: str) -> None:
        """Report that the trial's process is gone.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        self._call("lose", {"lease": lease, "cause": cause})

    def finish(self, lease: int, outcome: Outcome) -> None:
        """Report what came of a trial, and hand its model over if it is wanted.

        Raises:
            LeaseLostError: Another worker has the trial.
        """
        if outcome.model and outcome.value is not None:
            told, _ = self._call("offer", {"lease": lease, "value": outcome.value})
            model = memoryview(outcome.model) if told["wanted"] else memoryview(b"")
            for start in range(0, len(model), PIECE_BYTES):
                self._call("model", {"lease": lease, "start": start}, (model[start : start + PIECE_BYTES],))
        body = _packed(outcome)
        if len(body) > OUTCOME_BYTES:
            cut = f"its history and what it returned beside its loss are too large to be kept ({len(body):,} bytes)"
            error = "; ".join(filter(None, (outcome.error[:1000], cut)))
            body = _packed(replace(outcome, history={}, extra={}, error=error))
        self._call(
            "finish", {"lease": lease, "suffix": outcome.suffix, "is_mistake": outcome.is_mistake}, (memoryview(body),)
        )

    def _call(self, name: str, fields: Mapping[str, Any], body: Body = ()) -> tuple[Mapping[str, Any], memoryview]:
        try:
            return insist(self._caller, self._address.timeout, name, fields, body)
        except TransportError as error:
            raise DriverConnectionError(
                f"{self._worker.name} has had no answer from the search on the driver at {self._address.told} for "
                f"{self._address.timeout:g} seconds ({error}). The driver may have ended; otherwise look at the network "
                "between them, or raise timeout= of server_options."
            ) from error
        except RefusedError as error:
            if error.kind == LEASE_LOST:
                raise LeaseLostError from error
            raise DriverConnectionError(str(error)) from error


def _packed(outcome: Outcome) -> bytes:
    return json.dumps({name: getattr(outcome, name) for name in _TOLD}).encode()


def _lease(call: Call) -> int:
    return int(call.fields["lease"])
