"""What training has reached, and how it is packed for a checkpoint.

A `TrainingProgress` is what training needs to continue with the same bits. It refers to arrays and lists that do not change
any more, so a thread can write it while training goes on. Row orders and dropout masks are functions of seed, worker, epoch
and batch, so a seed is all that is stored of random numbers, with the states of the generators in the driver's model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.rules import State
from sparkkeras.training.recorder import EpochPart
from sparkkeras.training.worker_reports import Report
from sparkkeras.weights import Array, Flat

if TYPE_CHECKING:
    from sparkkeras.parameter.ledger import LedgerProgress


@dataclass(frozen=True)
class EpochRecord:
    """What the driver knows besides the model, which changes only between epochs.

    Attributes:
        epochs: The epochs in the history.
        history: The logs of these epochs, by name.
        logs: The logs of the last one.
        histories: The records of the workers.
        callbacks: The states of the callbacks.
    """

    epochs: list[int]
    history: dict[str, list[Any]]
    logs: dict[str, Any]
    histories: list[dict[str, Any]]
    callbacks: list[dict[str, Any]]


@dataclass(frozen=True)
class TrainingProgress:
    """What training has reached at the end of a round.

    Attributes:
        part: The epoch, and what was trained of it; at the end of an epoch, nothing of the next one.
        rounds: The number of rounds since the beginning of training.
        stopped: Whether a callback has stopped training.
        state: The state of the model.
        generators: The states of the model's generators of random numbers.
        rule_state: The state of the rule.
        record: What the driver knows besides.
        result: The state of the model after training, where callbacks or moving averages have changed it at the end.
        finished: Whether training was completed.
        workers: The progress of the workers of a parameter server.
    """

    part: EpochPart
    rounds: int
    stopped: bool
    state: ModelState
    generators: list[Array]
    rule_state: State
    record: EpochRecord
    result: ModelState | None = None
    finished: bool = False
    workers: LedgerProgress | None = None

    def pack(self) -> dict[str, Any]:
        """The values for a checkpoint."""
        return {
            "part": dataclasses.asdict(self.part),
            "rounds": self.rounds,
            "stopped": self.stopped,
            "state": pack_state(self.state),
            "generators": self.generators,
            "rule_state": self.rule_state,
            "record": vars(self.record),
            "result": None if self.result is None else pack_state(self.result),
            "finished": self.finished,
            "workers": None if self.workers is None else _pack_workers(self.workers),
        }

    @classmethod
    def unpack(cls, values: Mapping[str, Any]) -> TrainingProgress:
        """The inverse of `pack`."""
        part = values["part"]
        reports = tuple(Report(**report) for report in part["reports"])
        return cls(
            EpochPart(**part | {"metrics": tuple(part["metrics"]), "reports": reports}),
            values["rounds"],
            values["stopped"],
            unpack_state(values["state"]),
            values["generators"],
            values["rule_state"],
            EpochRecord(**values["record"]),
            None if values["result"] is None else unpack_state(values["result"]),
            values["finished"],
            None if values["workers"] is None else _unpack_workers(values["workers"]),
        )


def pack_state(state: ModelState) -> dict[str, Any]:
    """The values of a state for a checkpoint."""
    return {
        name: {"vector": flat.vector, "integers": flat.integer_variables}
        for name, flat in (("weights", state.weights), ("optimizer", state.optimizer))
    }


def unpack_state(values: Mapping[str, Any]) -> ModelState:
    """The inverse of `pack_state`."""
    flats = {name: Flat(flat["vector"], tuple(flat["integers"])) for name, flat in values.items()}
    return ModelState(flats["weights"], flats["optimizer"])


def _pack_workers(progress: LedgerProgress) -> dict[str, Any]:
    """The values for a checkpoint."""
    partitions = {
        str(worker): vars(each) | {"optimizer": np.frombuffer(each.optimizer, np.uint8)}
        for worker, each in progress.partitions.items()
    }
    return {
        "next_epoch": progress.next_epoch,
        "partitions": partitions,
        "reports": [vars(report) for report in progress.reports],
        "sets_outside": progress.sets_outside,
    }


def _unpack_workers(values: Mapping[str, Any]) -> LedgerProgress:
    """The inverse of `_pack_workers`."""
    from sparkkeras.parameter.ledger import EpochReport, LedgerProgress, PartitionProgress

    def with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "iterations": tuple(fields["iterations"]), "metrics": tuple(fields["metrics"])}

    partitions = {
        int(worker): PartitionProgress(**with_tuples(fields) | {"optimizer": fields["optimizer"].tobytes()})
        for worker, fields in values["partitions"].items()
    }
    reports = tuple(EpochReport(**with_tuples(fields)) for fields in values["reports"])
    return LedgerProgress(values["next_epoch"], partitions, reports, values["sets_outside"])
