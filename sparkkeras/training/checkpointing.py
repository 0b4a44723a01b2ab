"""Checkpoints of a call of `fit`: when they are written, and how training continues from one.

`saved_run.py` has what is in them, and what they belong to.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sparkkeras.checkpoints import values
from sparkkeras.checkpoints.background_writer import BackgroundWriter
from sparkkeras.checkpoints.store import Checkpoint, CheckpointStore
from sparkkeras.errors import (
    ConfigurationError,
    DivergenceError,
    StorageError,
    TrainingInterruptedError,
    counted,
    warn,
)
from sparkkeras.events import CheckpointWritten, Incident, RunResumed
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.optimizers import has_several, iterations
from sparkkeras.modeling.state import (
    ModelState,
    has_settable_rate,
    learning_rate,
    put_generators,
    take_generators,
)
from sparkkeras.parameter.exchange import LedgerProgress
from sparkkeras.parameter.rules import State
from sparkkeras.progress.pace import logs_by_epoch
from sparkkeras.spark.job_errors import interruptible
from sparkkeras.training import callback_states
from sparkkeras.training.fit_arguments import ASYNCHRONOUS_MODES
from sparkkeras.training.recorder import EpochPart, Recorder
from sparkkeras.training.saved_run import EpochRecord, SameWork, SavedRun, TrainingProgress, WorkerRows, check_same
from sparkkeras.weights import Array

if TYPE_CHECKING:
    from sparkkeras.training.run import Run


class CheckpointRecorder(Recorder):
    """Writes the checkpoints of one call of `fit`, and restores the one that it continues from.

    Args:
        checkpoint: Where and how often to write.
        store: The folder.
        saved: The checkpoint to continue from.
        in_step: Whether it is all-reduce training, where ``checkpoint.every`` is a number of steps.
    """

    records = True

    def __init__(
        self, checkpoint: Checkpoint, store: CheckpointStore, saved: SavedRun | None, in_step: bool = False
    ) -> None:
        self._continue_from(saved)
        self.every_steps = int(checkpoint.every) if in_step and checkpoint.every != "epoch" else None
        self._checkpoint, self._store, self._in_step = checkpoint, store, in_step
        self._writer = BackgroundWriter(self._write)
        self._rounds = 0
        self._due = False
        self._saved_at = time.monotonic()
        self._has_same_rows = False
        self._written = "" if saved is None else saved.name
        self._epoch_to_continue: EpochPart | None = None
        self._asked = Termination()

    @classmethod
    def open(cls, checkpoint: object, resume: object, mode: str) -> CheckpointRecorder | None:
        """Check the arguments of `fit`, and read the checkpoint to continue from; ``None`` without checkpoints.

        Raises:
            ConfigurationError: An argument is not valid, or there are checkpoints that would not be used.
            StorageError: The folder cannot be read, or all checkpoints are damaged.
        """
        if isinstance(checkpoint, Checkpoint) and checkpoint.every != "epoch" and mode in ASYNCHRONOUS_MODES:
            raise ConfigurationError(
                f"Checkpoint(every={checkpoint.every}): in mode={mode!r} workers do not make rounds together. Use "
                'every="epoch", and every_seconds= for checkpoints within epochs.'
            )
        store = CheckpointStore.open(checkpoint, resume)
        if store is None:
            return None
        assert isinstance(checkpoint, Checkpoint)
        return cls(checkpoint, store, SavedRun.newest(store) if resume else None, mode == "allreduce")

    def check(self, run: Run, kept: Mapping[str, Any]) -> None:
        """Check that a run can continue from the checkpoint, as far as it is known without the rows.

        Args:
            run: The checked run.
            kept: The settings of the SparkModel after it.

        Raises:
            ConfigurationError: The model or an argument differs, or a callback cannot be resumed.
        """
        self._work = SameWork.of(run, kept)
        callback_states.check(run.given["callbacks"])
        if self.saved is not None:
            self.saved.work.check(self._work, self._store.path, self.saved.name)
            self._work = replace(self._work, rates=self.saved.work.rates)  # with which training has begun

    def check_data(self, run: Run) -> None:
        """Check that the stored rows are those of the checkpoint. Warns if the result will have other bits.

        Raises:
            ConfigurationError: The rows differ, or the number of steps in an epoch is unknown.
            StorageError: The folder cannot be written.
        """
        if self.every_steps is not None and None in run.split.train:
            raise ConfigurationError(
                f"Checkpoint(every={self.every_steps}): data is a function that reads batches, so the steps of an epoch are "
                'not known in advance. Use every="epoch", and steps_per_epoch= for shorter epochs.'
            )
        self._rows = WorkerRows.of(run)
        saved = self.saved
        if not self.is_complete(run.epochs):
            self._store.check_writable()
        if saved is None:
            return
        check_same(saved.rows.described, self._rows.described, self._store.path, saved.name)
        reasons = []
        if saved.rows.counts != self._rows.counts:
            reasons.append(f"its workers had {_listed(saved.rows.counts)} rows, and these have {_listed(self._rows.counts)}")
        elif self._rows.differ_from(saved.rows):
            reasons.append(_CHANGED_ROWS + (_VALIDATED_ROWS if any(run.split.validate) else ""))
        self._has_same_rows = not reasons
        if reasons and saved.progress.part.batches:
            saved = SavedRun.newest(self._store, at_epoch_end=True) or saved
            self._continue_from(saved)
            part = saved.progress.part
            if part.batches:
                again = f"the first {counted(part.batches, 'batch')} of epoch {part.epoch + 1} will be trained again"
                reasons.append(f"{again}, because there is no checkpoint of the end of an epoch")
        if self._in_step and saved.every != self._checkpoint.every:
            reasons.append(f"it was trained with every={saved.every!r}, and this is every={self._checkpoint.every!r}")
        if saved.backend != keras.backend.backend():
            reasons.append(f"it was trained with the backend {saved.backend}, and this is {keras.backend.backend()}")
        if reasons and not self.is_complete(run.epochs):
            warn(
                f"training continues from the checkpoint {saved.name}, but the weights will differ in their bits from those "
                f"of a training without interruption: {'; '.join(reasons)}."
            )

    def _continue_from(self, saved: SavedRun | None) -> None:
        """Continue from what a checkpoint has reached, at the end of which callbacks had not changed the model yet."""
        self.saved = saved
        self._reached = None if saved is None else replace(saved.progress, result=None, finished=False)
        self._submitted = self._reached

    def is_complete(self, epochs: int) -> bool:
        """Whether the checkpoint is of a training that has ended, and nothing remains to be trained up to ``epochs``."""
        progress = None if self.saved is None else self.saved.progress
        return progress is not None and progress.finished and (progress.stopped or progress.part.epoch >= epochs)

    def restore_result(self, run: Run) -> keras.callbacks.History:
        """Restore the results of a training that has ended; returns its History."""
        assert self.saved is not None
        progress, model = self.saved.progress, run.model
        self.saved.restore_result(model)
        callback_states.put(progress.record.callbacks, run.given["callbacks"])
        _replace(run.rule_state, progress.rule_state)
        _continue_histories(run.histories, progress.record.histories)
        history = keras.callbacks.History()
        history.set_model(model)
        record = progress.record
        history.epoch, history.history = record.epochs, record.history
        model.history = history
        trained = counted(progress.part.epoch, "epoch")
        text = (
            f"Nothing to train: {self._store.path}/{self.saved.name} is of a training that ended after {trained}, and "
            f"epochs={run.epochs}. A larger epochs= trains on, unless a callback has ended the training."
        )
        run.events.emit(RunResumed(text, record.epochs, logs_by_epoch(record.epochs, record.history)))
        return history

    @contextmanager
    def recording(self, run: Run) -> Iterator[None]:
        """Training with this recorder runs within this context, at the end of which the last checkpoint has been written.

        A SIGTERM ends training with a checkpoint, as do Ctrl-C and errors of Spark.

        Raises:
            TrainingInterruptedError: The process has received a SIGTERM.
            StorageError: Training was completed, but the last checkpoint cannot be written.
        """
        archive = run.archive
        if has_several(run.model):  # they have been built since
            archive = ModelArchive.pack(run.model, archive.custom.load())
        self._model = archive.data
        with termination() as asked:
            self._asked = asked
            try:
                with interruptible():
                    yield
                    asked.interrupts = False
            except BaseException as error:
                asked.interrupts = False
                failure = self._close_early(error)
                if isinstance(error, KeyboardInterrupt) and asked.requested:
                    asked.handled = True
                    raise TrainingInterruptedError(self._interrupted(failure)) from error
                if failure is not None:
                    warn(f"the last checkpoint could not be written to {self._store.path!r}: {failure}")
                raise
            failure = self._writer.close()
            if failure is not None:
                raise StorageError(
                    f"training was completed, and the model has the trained weights, but the last checkpoint could not be "
                    f"written to {self._store.path!r}: {failure} Save the model with SparkModel.save."
                ) from failure

    def _close_early(self, error: BaseException) -> Exception | None:
        """Write what was reached before an error, and end the thread; returns the error of the last checkpoint."""
        is_new = self._reached is not None and self._reached is not self._submitted
        if is_new and not isinstance(error, DivergenceError):  # which would happen again
            self._save()
        return self._writer.close()

    def _interrupted(self, failure: Exception | None) -> str:
        """The message for a training that a SIGTERM has ended."""
        path = self._store.path
        how = f"To continue, call fit again with checkpoint=Checkpoint({path!r}), resume=True."
        again = "It has not completed a round, so it has to begin again." if failure is None else str(failure)
        if failure is not None:
            how = f"A checkpoint could not be written: {failure} {how}"
        if not self._written:
            return f"training was interrupted by SIGTERM, and there is no checkpoint in {path!r}. {again}"
        assert self._reached is not None
        part = self._reached.part
        where = f"epoch {part.epoch + 1}" + (f", after {counted(part.batches, 'batch')}" if part.batches else "")
        return f"training was interrupted by SIGTERM in {where}. The newest checkpoint is {path}/{self._written}. {how}"

    # The methods of a Recorder

    @property
    def workers(self) -> LedgerProgress | None:
        """See `Recorder.workers`."""
        return self.saved.progress.workers if self.saved is not None and self._has_same_rows else None

    def begin(self, run: Run) -> int:
        """Call the callbacks at the beginning of training, and restore the checkpoint; returns the first epoch."""
        self._run, callbacks = run, run.callbacks
        self._first_history = len(run.histories)
        saved = self.saved
        if saved is None:
            callbacks.on_train_begin()
            return run.initial_epoch
        progress = saved.progress
        states = progress.record.callbacks
        with callback_states.appending(states, callbacks.given):
            callbacks.on_train_begin()
        callback_states.warn_of_missing(states, callbacks.given)
        record = progress.record
        callbacks.restore(record.epochs, record.history, record.logs)
        self._first_history = _continue_histories(run.histories, record.histories)
        _replace(run.rule_state, progress.rule_state)
        self._rounds = progress.rounds
        rate = learning_rate(run.model)
        may_be_set = any(iterations(run.model)) and has_settable_rate(run.model)  # else it was compared
        self._restore(progress)
        if (
            may_be_set
            and learning_rate(run.model) != rate
            and not any(isinstance(each, _SETTERS) for each in callbacks.given)
        ):
            warn(
                f"the model has the learning rate {rate}, and training continues with that of the checkpoint, "
                f"{learning_rate(run.model)}. To train with another one, pass the model of SparkModel.from_checkpoint and "
                "another path."
            )
        part = progress.part
        after = f", after {counted(part.batches, 'batch')}" if part.batches else ""
        text = f"Continuing from {self._store.path}/{saved.name} with epoch {part.epoch + 1}{after}."
        frequency = 1 if run.validation is None else run.validation.frequency
        run.events.emit(RunResumed(text, record.epochs, logs_by_epoch(record.epochs, record.history, frequency)))
        run.model.stop_training = progress.stopped
        if progress.part.batches:
            self._epoch_to_continue = progress.part
        return run.epochs if progress.stopped else progress.part.epoch

    def begin_epoch(self, epoch: int) -> EpochPart:
        """After the callbacks at the beginning of an epoch: the part of it that need not be trained again."""
        self._asked.check()
        part, self._epoch_to_continue = self._epoch_to_continue, None
        if part is not None and self.saved is not None:
            self._restore(self.saved.progress)  # the callbacks may have changed the learning rate a second time
        self._record = self._take_record()
        return part if part is not None and self._has_same_rows else EpochPart(epoch)

    def end_round(self, part: EpochPart, state: ModelState, workers: LedgerProgress | None = None) -> None:
        """Note what was reached; write it if it is time for a checkpoint, and the epoch has not ended."""
        self._rounds += 1
        self._reached = self._progress(part, False, state, workers)
        every = 1 if self._in_step else self._checkpoint.every
        self._due = self._due or (every != "epoch" and self._rounds % int(every) == 0) or self.is_late
        if self._due and (self._in_step or workers is not None or part.batches < self._run.batches):
            self._save()
        self._warn_of_errors()
        self._asked.check()

    def end_epoch(self, epoch: int, state: ModelState | None = None, workers: LedgerProgress | None = None) -> None:
        """Note what was reached; write it if it is time for a checkpoint, and training has not ended."""
        self._record = self._take_record()
        stopped = bool(self._run.model.stop_training)
        state = state or ModelState.take(self._run.model)
        self._reached = self._progress(EpochPart(epoch + 1), stopped, state, workers)
        due = self._due or self._in_step or self._checkpoint.every == "epoch" or self.is_late
        if due and not stopped and epoch + 1 < self._run.epochs:
            self._save()
        self._warn_of_errors()
        self._asked.check()

    def end(self) -> None:
        """Write the last checkpoint, with the model that callbacks have left."""
        if self._reached is None:
            return
        found = ModelState.take(self._run.model)
        arrays = zip(_arrays(found), _arrays(self._reached.state), strict=True)
        is_reached = all(one.tobytes() == other.tobytes() for one, other in arrays)
        self._reached = replace(self._reached, result=None if is_reached else found, finished=True)
        self._save()

    def _progress(
        self, part: EpochPart, stopped: bool, state: ModelState, workers: LedgerProgress | None
    ) -> TrainingProgress:
        generators, rule_state = take_generators(self._run.model), dict(self._run.rule_state)
        return TrainingProgress(part, self._rounds, stopped, state, generators, rule_state, self._record, workers=workers)

    def _take_record(self) -> EpochRecord:
        history = self._run.callbacks.history
        for members in history.history.values():
            members[-1:] = map(_constant, members[-1:])
        last = {name: members[-1] for name, members in history.history.items()}
        values.pack(last, "logs")  # raises an error now, and not in the thread that writes
        return EpochRecord(
            list(history.epoch),
            {name: list(members) for name, members in history.history.items()},
            _constant(self._run.callbacks.logs),
            self._run.histories[self._first_history :],
            callback_states.take(self._run.callbacks.given),
        )

    def _restore(self, progress: TrainingProgress) -> None:
        progress.state.put(self._run.model)
        put_generators(progress.generators, self._run.model)
        callback_states.put(progress.record.callbacks, self._run.callbacks.given)

    @property
    def is_late(self) -> bool:
        """See `Recorder.is_late`."""
        seconds = self._checkpoint.every_seconds
        return seconds is not None and time.monotonic() - self._saved_at >= seconds

    def _save(self) -> None:
        """Have the thread write what was reached."""
        assert self._reached is not None
        self._due, self._saved_at, self._submitted = False, time.monotonic(), self._reached
        self._writer.submit(self._reached)

    def _write(self, progress: TrainingProgress) -> None:
        """Write a checkpoint; in the thread."""
        began = time.monotonic()
        run = SavedRun(progress, self._work, self._rows, keras.backend.backend(), self._checkpoint.every)
        self._written = run.write(self._store, self._model)
        path, seconds = f"{self._store.path}/{self._written}", time.monotonic() - began
        self._run.events.emit(CheckpointWritten(path, progress.part.epoch, seconds))

    def _warn_of_errors(self) -> None:
        error = self._writer.new_error()
        if error is not None:
            message = f"a checkpoint could not be written, training continues: {error}"
            self._run.events.emit(Incident("warning", message))
            warn(message)


_CHANGED_ROWS = (
    "its workers had other rows, or the same in another order, as after repartition(n) of a DataFrame (num_workers=n keeps "
    "the order)"
)
_VALIDATED_ROWS = ", and validation_split may now take rows that were trained on"

_SETTERS = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
"""Callbacks that change the learning rate of a model, also in an epoch that was interrupted."""


def _constant(value: Any) -> Any:
    """A value of logs that training does not change: variables and tensors as NumPy's values."""
    if isinstance(value, dict):
        return {name: _constant(member) for name, member in value.items()}
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        return np.array(keras.ops.convert_to_numpy(value))[()]
    return value


def _replace(state: State, values: Mapping[str, Array]) -> None:
    state.clear()
    state.update(values)


def _continue_histories(histories: list[dict[str, Any]], stored: list[dict[str, Any]]) -> int:
    """Append the stored records of workers, unless they are there; returns the index of the first of them."""

    def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return record["worker"], record.get("epoch"), record.get("seconds")

    keys = set(map(key, stored))
    histories[:] = [record for record in histories if key(record) not in keys]
    histories.extend(stored)
    return len(histories) - len(stored)


def _arrays(state: ModelState) -> list[Array]:
    return [each for flat in (state.weights, state.optimizer) for each in (flat.vector, *flat.integer_variables)]


def _listed(rows: Sequence[int | None]) -> str:
    """The numbers of rows of workers, in messages."""
    shown = ["an unknown number of" if each is None else str(each) for each in rows[:4]]
    return ", ".join(shown) + (f" and others ({len(rows)} workers)" if len(rows) > len(shown) else "")


@dataclass
class Termination:
    """Whether the process was asked to end.

    Attributes:
        requested: Whether a SIGTERM has arrived.
        interrupts: Whether it raises KeyboardInterrupt.
        handled: Whether the caller raises an error for it; otherwise the previous handler gets the signal in the end.
    """

    requested: bool = False
    interrupts: bool = True
    handled: bool = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self.requested = True
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGTERM has arrived. Python ignores that of the handler within a finalizer."""
        if self.requested and self.interrupts:
            raise KeyboardInterrupt


@contextmanager
def termination() -> Iterator[Termination]:
    """Handle SIGTERM within this context, if this is the main thread; then restore the previous handler."""
    found = Termination()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is None:  # a handler in C, which Python cannot restore
        yield found
        return
    previous = signal.signal(signal.SIGTERM, found.receive)
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, previous)
        if found.requested and not found.handled:
            signal.raise_signal(signal.SIGTERM)
