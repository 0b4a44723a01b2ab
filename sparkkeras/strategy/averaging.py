"""Synchronous training: rounds of ordinary Spark jobs, and the mean of what comes back.

A round is a pure function of what it was given, so retries, speculation, more partitions than slots and executors that
come and go need no care here. A replica counts by the rows that it saw in the round; a worker without rows has no vote.
Floating optimizer slots and batch-norm statistics are averaged like weights and go into the next round; iterations are
the largest, so they count one worker's steps. What becomes of the trainable mean is the rule's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from sparkkeras import inference, metrics
from sparkkeras.callbacks import DriverCallbacks
from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Results, Shared, StoredDataset, TaskContext
from sparkkeras.errors import ConfigurationError, DivergenceError
from sparkkeras.job import Job, Validation
from sparkkeras.metrics import MetricState
from sparkkeras.model import ModelArchive, ModelState, trainable_size
from sparkkeras.parameter.rules import Update
from sparkkeras.weights import Flat, average
from sparkkeras.worker import FitOptions, LocalTrainer, Replica, Stretch

TREE_WORKERS = 64
"""With more workers than this, replicas are averaged on the workers first."""

TREE_BYTES = 256 * 1024 * 1024
"""So are they if they are larger than this altogether, or than half of what Spark lets a job return."""


@dataclass(frozen=True)
class Report:
    """What a worker tells of a round beside its replica."""

    worker: int
    rows: int
    steps: int
    seconds: float
    learning_rate: float
    logs: dict[str, Any]
    is_finite: bool


@dataclass(frozen=True)
class Mean:
    """The mean of some replicas."""

    rows: int
    weights: Flat
    optimizer: Flat
    metrics: MetricState
    reports: tuple[Report, ...]

    @classmethod
    def of(cls, replica: Replica) -> Mean:
        """The mean of one."""
        report = Report(
            replica.worker,
            replica.rows,
            replica.steps,
            replica.seconds,
            replica.learning_rate,
            replica.logs,
            replica.is_finite,
        )
        return cls(replica.rows, replica.state.weights, replica.state.optimizer, replica.metrics, (report,))


def merge(means: Sequence[Mean]) -> Mean:
    """The mean of means, each weighted by its rows. In the order given, so it is the same to the last bit each time."""
    return Mean(
        rows=sum(mean.rows for mean in means),
        weights=average((mean.weights, mean.rows) for mean in means),
        optimizer=average((mean.optimizer, mean.rows) for mean in means),
        metrics=metrics.merge(mean.metrics for mean in means),
        reports=tuple(report for mean in means for report in mean.reports),
    )


@dataclass(frozen=True)
class RoundTask:
    """A worker's part of a round."""

    archive: Shared[ModelArchive]
    state: Shared[ModelState]
    options: Shared[FitOptions]
    shares: tuple[int, ...]
    epoch: int
    first: int
    last: int

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Mean]:
        """Train from the common state on; yields nothing where there are no rows."""
        trainer = LocalTrainer(self.archive.value, context)
        for block in blocks:
            # A source that is not deterministic may give fewer rows when a lost partition is read again.
            rows = min(self.shares[context.worker], block.rows)
            stretch = Stretch(self.epoch, rows, self.first, self.last)
            replica = trainer.fit(self.state.value, block, stretch, self.options.value)
            if replica is not None:
                yield Mean.of(replica)


class AveragingStrategy:
    """See the module's words."""

    def fit(self, job: Job, dataset: StoredDataset, callbacks: DriverCallbacks) -> None:
        """As `Strategy.fit`."""
        model = job.model
        with dataset.share(job.archive) as archive, dataset.share(job.options) as options:
            callbacks.on_train_begin()
            for epoch in range(callbacks.restored_epoch or job.initial_epoch, job.epochs):
                callbacks.on_epoch_begin(epoch)
                means = [
                    self._round(job, dataset, (archive, options), callbacks, epoch, first) for first in _round_starts(job)
                ]
                reports = [report for mean in means for report in mean.reports]
                logs = _figures(model, metrics.merge(mean.metrics for mean in means), reports)
                _note_workers(job, epoch, reports)
                if job.validation is not None and (epoch + 1) % job.validation.frequency == 0:
                    logs |= _validate(job, job.validation, archive, callbacks)
                callbacks.on_epoch_end(epoch, logs)
                if model.stop_training:
                    break
            if model.optimizer is not None and job.epochs > job.initial_epoch:
                model.optimizer.finalize_variable_values(model.trainable_weights)
            callbacks.on_train_end()

    def _round(
        self,
        job: Job,
        dataset: StoredDataset,
        shared: tuple[Shared[ModelArchive], Shared[FitOptions]],
        callbacks: DriverCallbacks,
        epoch: int,
        first: int,
    ) -> Mean:
        """Train every worker from the master's state on, and give the master what the rule makes of the mean."""
        last = min(first + _window(job), job.batches)
        before = ModelState.take(job.model)
        with dataset.share(before) as state:
            task = RoundTask(shared[0], state, shared[1], job.shares.train, epoch, first, last)
            mean = _gathered(dataset.run(task), job, dataset, before)
        _check_finite(mean.reports, epoch)
        _folded(job, before, mean, epoch).put(job.model)
        callbacks.on_round_end(mean.rows, last / job.batches)
        return mean


def _window(job: Job) -> int:
    return job.batches if job.frequency == "epoch" else int(job.frequency)


def _round_starts(job: Job) -> range:
    return range(0, job.batches, _window(job))


def _gathered(results: Results[Mean], job: Job, dataset: StoredDataset, state: ModelState) -> Mean:
    """The mean of all replicas: formed here, or on the workers first where they are many or large."""
    groups = tree_groups(job.num_workers, state.nbytes, dataset.max_result_bytes)
    return merge(results.collect() if groups is None else results.reduce(merge, groups))


def tree_groups(workers: int, replica_bytes: int, max_result_bytes: int) -> int | None:
    """How many partial means come to the driver, or ``None`` where the replicas themselves can.

    Args:
        workers: How many replicas there are.
        replica_bytes: The size of one.
        max_result_bytes: What Spark lets the results of a job have; 0 is no bound.
    """
    bound = min(TREE_BYTES, max_result_bytes // 2 if max_result_bytes else TREE_BYTES)
    if workers <= TREE_WORKERS and workers * replica_bytes <= bound:
        return None
    return max(1, min(math.isqrt(workers), bound // max(1, replica_bytes)))


def _check_finite(reports: Sequence[Report], epoch: int) -> None:
    for report in reports:
        if not report.is_finite:
            loss = report.logs.get("loss")
            raise DivergenceError(
                f"training diverged in epoch {epoch + 1} on worker {report.worker}: weights or loss are not finite (loss "
                f"{loss}). The model keeps the weights of the last finished round. Try a smaller learning rate, "
                "clipnorm= in the optimizer, or look for extreme values in that partition."
            )


def _folded(job: Job, before: ModelState, mean: Mean, epoch: int) -> ModelState:
    """The next common state: the trainable weights as the rule has them, all else as the mean has it.

    Raises:
        DivergenceError: The rule made a weight that is not finite.
        ConfigurationError: The rule did not work in place.
    """
    trainable = trainable_size(job.model)
    vector = mean.weights.vector.copy()
    center = before.weights.vector[:trainable].copy()
    state = {name: value.copy() for name, value in job.rule_state.items()}
    fresh = job.rule.init(center)
    if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in fresh.items()}:
        state = fresh  # the first round, or other weights train than in the last fit
    update = Update(
        weights=vector[:trainable],
        steps=max(report.steps for report in mean.reports),
        rows=mean.rows,
        learning_rate=float(np.mean([report.learning_rate for report in mean.reports])),
        num_workers=len(mean.reports),
    )
    fold: Callable[..., Any] = job.rule.fold
    if fold(center, state, update, 0) is not None:
        raise ConfigurationError(f"the rule {job.rule!r} returned something from fold: it must change center in place.")
    if not np.isfinite(center).all():
        raise DivergenceError(
            f"the rule {job.rule!r} made weights that are not finite in epoch {epoch + 1}. The model keeps the weights of "
            "the last finished round. Try a smaller learning rate or momentum in the rule."
        )
    job.rule_state.clear()
    job.rule_state.update(state)
    vector[:trainable] = center
    return ModelState(Flat(vector, mean.weights.counters), mean.optimizer)


def _validate(job: Job, validation: Validation, archive: Shared[ModelArchive], callbacks: DriverCallbacks) -> dict[str, Any]:
    callbacks.on_test_begin()
    with validation.dataset.share(ModelState.take(job.model)) as state:
        found = inference.evaluate(validation.dataset, archive, state, validation.options, validation.spans)
    figures = {} if found is None else metrics.results(job.model, found.metrics)
    callbacks.on_test_end(figures)
    return {f"val_{name}": value for name, value in figures.items()}


def _figures(model: keras.Model, state: MetricState, reports: Sequence[Report]) -> dict[str, Any]:
    """The figures of an epoch, from the metrics' state.

    An own ``train_step`` may return figures that are no metrics of the model. Keras then shows those of the last batch;
    here they are averaged over the workers by rows.
    """
    figures = metrics.results(model, state)
    return figures if set(figures) == set(reports[0].logs) else _mean_logs(reports)


def _mean_logs(reports: Sequence[Report]) -> dict[str, Any]:
    rows = sum(report.rows for report in reports)
    return {name: sum(report.logs[name] * report.rows for report in reports) / rows for name in reports[0].logs}


def _note_workers(job: Job, epoch: int, reports: Sequence[Report]) -> None:
    """Write down what each worker saw in an epoch: its figures are the mean of its rounds, by rows."""
    for worker in sorted({report.worker for report in reports}):
        rounds = [report for report in reports if report.worker == worker]
        total = {"rows": sum(report.rows for report in rounds), "seconds": sum(report.seconds for report in rounds)}
        job.histories.append({"worker": worker, "epoch": epoch, **total, **_mean_logs(rounds)})
