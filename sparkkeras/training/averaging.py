"""Synchronous training: each round is an ordinary Spark job whose results, the workers' replicas, are averaged.

A round is a pure function of its input, so task retries, speculation, more partitions than slots and dynamic allocation need
no special handling. A replica is weighted by the rows that it saw in the round; a worker without rows does not count.
Floating-point optimizer variables and batch-norm statistics are averaged like weights and go into the next round. Of the
optimizers' iterations the largest is taken, so they count the steps of one worker. The update rule computes the next
trainable weights from their mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import BlockStream, Shared, TaskContext
from sparkkeras.errors import DataError, DivergenceError
from sparkkeras.events import RowsTrained
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.state import ModelState, ModelWeights, trainable_size
from sparkkeras.parameter.rules import WorkerUpdate, apply_in_place, fitting_state
from sparkkeras.scoring import inference
from sparkkeras.training.recorder import EpochPart
from sparkkeras.training.validation import Validation
from sparkkeras.training.worker_reports import Mean, add_histories, check_finite, gathered, merge, warn_of_steps
from sparkkeras.weights import Flat
from sparkkeras.worker.batches import BatchRange, FitOptions
from sparkkeras.worker.trainer import LocalTrainer

if TYPE_CHECKING:
    from sparkkeras.training.run import Run


@dataclass(frozen=True)
class RoundTask:
    """A worker's part of a round."""

    archive: Shared[ModelArchive]
    state: Shared[ModelState]
    options: Shared[FitOptions]
    rows: tuple[int | None, ...]
    epoch: int
    first: int
    last: int

    def __call__(self, context: TaskContext, rows: Iterator[Block | BlockStream]) -> Iterator[Mean]:
        """Train from the shared state and yield the result; yield nothing if the partition has no rows."""
        trainer = LocalTrainer(self.archive.value, context)
        for part in rows:
            batch_range = BatchRange(self.epoch, self.rows[context.worker], self.first, self.last)
            replica = trainer.fit(self.state.value, part, batch_range, self.options.value)
            if replica is not None:
                yield Mean.of(replica, context.startup_seconds)


class AveragingStrategy:
    """The strategy of synchronous training; see the module docstring."""

    def train(self, run: Run, epochs: range) -> None:
        """Train in rounds; see `Strategy.train`."""
        model, dataset, callbacks = run.model, run.dataset, run.callbacks
        with dataset.share(run.archive) as archive, dataset.share(run.options) as options:
            for epoch in epochs:
                callbacks.on_epoch_begin(epoch)
                part = run.recorder.begin_epoch(epoch)
                while part.batches < run.batches:
                    part, state = self._round(run, (archive, options), part)
                    run.recorder.end_round(part, state)
                logs = metrics.logs(model, part.metrics, part.reports)
                add_histories(run, epoch, part.reports)
                if epoch == run.initial_epoch:
                    warn_of_steps(run, part.reports)
                if run.validation is not None and (epoch + 1) % run.validation.frequency == 0:
                    logs |= callbacks.validated(partial(_validate, run, run.validation, archive))
                callbacks.on_epoch_end(epoch, logs)
                run.recorder.end_epoch(epoch)
                if model.stop_training:
                    break

    def _round(
        self,
        run: Run,
        shared: tuple[Shared[ModelArchive], Shared[FitOptions]],
        part: EpochPart,
    ) -> tuple[EpochPart, ModelState]:
        """Run a round: train all workers from the master model's state, average them, apply the rule to the master model.

        Returns:
            The part of the epoch that has been trained then, and the state of the master model.
        """
        epoch, first, dataset = part.epoch, part.batches, run.dataset
        last = min(first + _window(run), run.batches)
        before = ModelState.take(run.model)
        with dataset.share(before) as state:
            task = RoundTask(shared[0], state, shared[1], run.split.train, epoch, first, last)
            means = gathered(dataset.train(task), run.num_workers, before.nbytes, dataset.max_result_bytes)
        if not means:
            raise DataError(
                f"no worker has rows to train on in epoch {epoch + 1}, although the data had some when it was first read. "
                "Return batches in each epoch from a function that reads them; cache other data, or write it to files first."
            )
        mean = merge(means)
        check_finite(mean.reports, epoch, "round")
        after = _applied(run, before, mean, epoch)
        after.put(run.model)
        # All processes load Keras at the same time, each in its first task.
        startup = max(report.startup_seconds for report in mean.reports)
        run.events.emit(RowsTrained(mean.rows, last / run.batches, startup))
        state_so_far = metrics.merge([*([part.metrics] if part.reports else []), mean.metrics])
        return EpochPart(epoch, last, state_so_far, (*part.reports, *mean.reports)), after


def _window(run: Run) -> int:
    return run.batches if run.frequency == "epoch" else int(run.frequency)


def _applied(run: Run, before: ModelState, mean: Mean, epoch: int) -> ModelState:
    """The state after a round: trainable weights computed by the rule, everything else from the mean.

    Raises:
        DivergenceError: The rule computed a weight that is not finite.
        ConfigurationError: The rule did not change the weights in place.
    """
    trainable = trainable_size(run.model)
    weights, optimizer = mean.vectors
    vector = weights.vector.copy()
    center = before.weights.vector[:trainable].copy()
    state = fitting_state(run.rule, run.rule_state, center)
    update = WorkerUpdate(
        sent=vector[:trainable],
        steps=max(report.steps for report in mean.reports),
        rows=mean.rows,
        learning_rate=float(np.mean([report.learning_rate for report in mean.reports])),
        num_workers=len(mean.reports),
    )
    apply_in_place(run.rule, center, state, update, 0)
    if not np.isfinite(center).all():
        raise DivergenceError(
            f"the rule {run.rule!r} produced weights that are not finite in epoch {epoch + 1}. The model keeps the weights "
            "of the last completed round. Try a smaller learning rate or momentum in the rule."
        )
    run.rule_state.clear()
    run.rule_state.update(state)
    vector[:trainable] = center
    return ModelState(Flat(vector, weights.integer_variables), optimizer)


def _validate(run: Run, validation: Validation, archive: Shared[ModelArchive]) -> dict[str, Any]:
    with validation.dataset.share(ModelWeights.take(run.model)) as state:
        found = inference.evaluate(validation.dataset, archive, state, validation.options, validation.spans)
    return {} if found is None else found.logs(run.model)
