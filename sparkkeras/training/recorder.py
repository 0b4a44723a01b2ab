"""How a strategy hands over what it has reached, so that training can be resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkkeras.modeling.metrics import MetricState
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.exchange import LedgerProgress

if TYPE_CHECKING:
    from sparkkeras.training.run import Run
    from sparkkeras.training.worker_reports import Report


@dataclass(frozen=True)
class EpochPart:
    """The part of an epoch that has been trained.

    Attributes:
        epoch: The epoch, counted from 0.
        batches: The number of batches of each worker, at most.
        metrics: The merged metric state over them.
        reports: The reports of the workers, in the order of rounds and workers.
        workers: The number of workers of all-reduce training, which its batches depend on.
        stopped: Whether a callback of a worker has asked to stop at the end of the epoch.
    """

    epoch: int
    batches: int = 0
    metrics: MetricState = ()
    reports: tuple[Report, ...] = ()
    workers: int = 0
    stopped: bool = False


class Recorder:
    """Gets the progress of a training. Its methods are called in this order: begin, for each epoch, end.

    This one records nothing: see `sparkkeras.training.checkpointing.CheckpointRecorder`.

    Attributes:
        records: Whether it records anything.
        every_steps: The length of a round of all-reduce training in steps; ``None``: a round is an epoch.
    """

    records = False
    every_steps: int | None = None

    @property
    def workers(self) -> LedgerProgress | None:
        """The progress of the workers of a parameter server to continue from, after `begin`; ``None``: they start anew."""
        return None

    @property
    def is_late(self) -> bool:
        """Whether progress should be recorded now, though no round has ended."""
        return False

    def begin(self, run: Run) -> int:
        """Call the callbacks at the beginning of training, and restore what was recorded; returns the first epoch."""
        run.callbacks.on_train_begin()
        return run.callbacks.restored_epoch or run.initial_epoch

    def begin_epoch(self, epoch: int) -> EpochPart:
        """After the callbacks at the beginning of an epoch: the part of it that need not be trained again."""
        return EpochPart(epoch)

    def end_round(self, part: EpochPart, state: ModelState, workers: LedgerProgress | None = None) -> None:
        """A round was completed, or a parameter server has reached this, with this state of the model."""

    def end_epoch(self, epoch: int, state: ModelState | None = None, workers: LedgerProgress | None = None) -> None:
        """An epoch was completed; the callbacks have been called, and may have changed the model.

        Args:
            epoch: The index of the epoch.
            state: The state from which the next epoch begins; ``None``: that of the model.
            workers: The progress of the workers of a parameter server, whose weights are in ``state``.
        """

    def end(self) -> None:
        """Training was completed; the callbacks have been called."""
