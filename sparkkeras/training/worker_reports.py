"""Collection of the workers' results on the driver, and the logs of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import keras
import numpy as np

from sparkkeras.data.dataset import Merging, Results
from sparkkeras.modeling import metrics
from sparkkeras.modeling.metrics import MetricState
from sparkkeras.training.job import Job

R = TypeVar("R")

MAX_WORKERS = 64
"""With more workers than this, their results are merged on the workers."""

MAX_BYTES = 256 * 1024 * 1024
"""Results that are larger than this in sum, or than half of what Spark lets a job return, are merged on the workers."""


class WorkerReport(Protocol):
    """A worker's report on the rows that it trained on."""

    @property
    def worker(self) -> int:
        """The index of the worker."""
        ...

    @property
    def rows(self) -> int:
        """The number of rows."""
        ...

    @property
    def seconds(self) -> float:
        """The time that training on them took."""
        ...

    @property
    def logs(self) -> dict[str, Any]:
        """The metrics over the rows, by name."""
        ...


def gathered(results: Results[R], merging: Merging[R], workers: int, each: int, max_result_bytes: int) -> list[R]:
    """The results of all workers, merged on the workers if they are many or large.

    Args:
        results: The results.
        merging: Merges results.
        workers: The number of results.
        each: The size of one result in bytes.
        max_result_bytes: The limit on the size of all results of a job; 0: no limit.
    """
    return results.reduce(merging) if merges_on_workers(workers, each, max_result_bytes) else results.collect()


def merges_on_workers(workers: int, each: int, max_result_bytes: int) -> bool:
    """Whether results are too many or too large for the driver; the arguments are those of `gathered`."""
    limit = min(MAX_BYTES, max_result_bytes // 2 if max_result_bytes else MAX_BYTES)
    return workers > MAX_WORKERS or workers * each > limit


def epoch_logs(model: keras.Model, state: MetricState, reports: Sequence[WorkerReport]) -> dict[str, Any]:
    """The logs of an epoch, computed from the merged metric state.

    A custom ``train_step`` may also return values that are not metrics of the model. Keras reports those of the last batch;
    here the workers' values are averaged, weighted by rows.
    """
    found = metrics.results(model, state)
    if set(found) == set(reports[0].logs):
        return found
    merged = metrics.updated(model, state) & found.keys()
    return {name: found[name] if name in merged else mean for name, mean in mean_logs(reports).items()}


def mean_logs(reports: Sequence[WorkerReport]) -> dict[str, Any]:
    """The means of the values that the workers logged, weighted by rows."""
    return {name: _mean([(report.logs[name], report.rows) for report in reports]) for name in reports[0].logs}


def _mean(values: Sequence[tuple[Any, int]]) -> Any:
    """The mean of ``(value, rows)`` pairs: a number, or an array for array values; ``None`` if a worker sent no value."""
    if any(value is None for value, _ in values):
        return None
    mean = sum(np.asarray(value) * rows for value, rows in values) / sum(rows for _, rows in values)
    return float(mean) if np.ndim(mean) == 0 else mean


def add_histories(job: Job, epoch: int, reports: Sequence[WorkerReport]) -> None:
    """Append a record of each worker's epoch to the job's histories; its metrics are row-weighted means of its rounds."""
    for worker in sorted({report.worker for report in reports}):
        rounds = [report for report in reports if report.worker == worker]
        fixed = {
            "worker": worker,
            "epoch": epoch,
            "rows": sum(report.rows for report in rounds),
            "seconds": sum(report.seconds for report in rounds),
        }
        job.histories.append(fixed | mean_logs(rounds) | fixed)  # a metric may have the name "rows"


def divergence(loss: float | None) -> str:
    """Which values of a worker are not finite, for a message."""
    return "the weights are not finite" if loss is not None and np.isfinite(loss) else f"the loss is {loss}"
