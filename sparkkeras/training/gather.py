"""What comes back from workers, brought together: their results, and the figures of an epoch."""

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
    """What a worker reports of its rows."""

    @property
    def worker(self) -> int:
        """Which worker."""
        ...

    @property
    def rows(self) -> int:
        """How many rows it saw."""
        ...

    @property
    def seconds(self) -> float:
        """How long that took."""
        ...

    @property
    def logs(self) -> dict[str, Any]:
        """The figures over them."""
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


def figures(model: keras.Model, state: MetricState, reports: Sequence[WorkerReport]) -> dict[str, Any]:
    """The figures of an epoch, from the metrics' state.

    An own ``train_step`` may return figures that are no metrics of the model. Keras then shows those of the last batch;
    here they are averaged over the workers by rows.
    """
    found = metrics.results(model, state)
    return found if set(found) == set(reports[0].logs) else mean_logs(reports)


def mean_logs(reports: Sequence[WorkerReport]) -> dict[str, Any]:
    """The means of the workers' own figures, by rows."""
    return {name: _mean([(report.logs[name], report.rows) for report in reports]) for name in reports[0].logs}


def _mean(figures: Sequence[tuple[Any, int]]) -> Any:
    """A mean by rows: a number, an array where the figure is one, and ``None`` where a worker did not send it."""
    if any(figure is None for figure, _ in figures):
        return None
    mean = sum(np.asarray(figure) * rows for figure, rows in figures) / sum(rows for _, rows in figures)
    return float(mean) if np.ndim(mean) == 0 else mean


def note_workers(job: Job, epoch: int, reports: Sequence[WorkerReport]) -> None:
    """Write down what each worker saw in an epoch: its figures are the mean of its rounds, by rows."""
    for worker in sorted({report.worker for report in reports}):
        rounds = [report for report in reports if report.worker == worker]
        told = {
            "worker": worker,
            "epoch": epoch,
            "rows": sum(report.rows for report in rounds),
            "seconds": sum(report.seconds for report in rounds),
        }
        job.histories.append(told | mean_logs(rounds) | told)  # a metric may be called "rows"
