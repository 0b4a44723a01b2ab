"""Collection of the workers' results on the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparkkeras.data.dataset import Results
from sparkkeras.errors import DivergenceError, counted, warn
from sparkkeras.events import WorkerEpoch, WorkersReported
from sparkkeras.modeling import metrics
from sparkkeras.modeling.metrics import MetricState
from sparkkeras.weights import Flat, average
from sparkkeras.worker.trainer import Replica

if TYPE_CHECKING:
    from sparkkeras.training.run import Run

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


@dataclass(frozen=True)
class Report:
    """A report on an epoch, or on a round of it, that is sent besides the replica: a `WorkerReport`."""

    worker: int
    rows: int
    steps: int
    seconds: float
    learning_rate: float
    logs: dict[str, Any]
    is_finite: bool
    startup_seconds: float = 0.0

    @classmethod
    def of(cls, replica: Replica, startup_seconds: float = 0.0) -> Report:
        """The report on a replica, from a process that took ``startup_seconds`` to load Keras."""
        return cls(
            replica.worker,
            replica.rows,
            replica.steps,
            replica.seconds,
            replica.learning_rate,
            replica.logs,
            replica.is_finite,
            startup_seconds,
        )


@dataclass(frozen=True)
class Mean:
    """The means of the vectors of one or several workers, weighted by rows, with their merged metrics and their reports."""

    rows: int
    vectors: tuple[Flat, ...]
    metrics: MetricState = ()
    reports: tuple[Report, ...] = ()

    @classmethod
    def of(cls, replica: Replica, startup_seconds: float = 0.0) -> Mean:
        """The weights and optimizer variables of a replica, from a process that took ``startup_seconds`` to load Keras."""
        vectors = replica.state.weights, replica.state.optimizer
        return cls(replica.rows, vectors, replica.metrics, (Report.of(replica, startup_seconds),))


@dataclass(frozen=True)
class MergeMeans:
    """Averages means, each weighted by its rows. It keeps their order, so that the result is bit-identical each time."""

    def __call__(self, means: Sequence[Mean]) -> Mean:
        """Compute the mean of all means."""
        rows, vectors = [mean.rows for mean in means], [mean.vectors for mean in means]
        return Mean(
            rows=sum(rows),
            vectors=tuple(average(zip(each, rows, strict=True)) for each in zip(*vectors, strict=True)),
            metrics=metrics.merge(mean.metrics for mean in means),
            reports=tuple(report for mean in means for report in mean.reports),
        )

    def split(self, mean: Mean, max_bytes: int) -> list[Mean]:
        """Split a mean into pieces of at most ``max_bytes``, see `Merging`: consecutive parts of its vectors.

        Metrics and reports are small and go with the first piece.
        """
        count = max(1, -(-sum(each.nbytes for each in mean.vectors) // max_bytes))
        pieces = [Mean(mean.rows, each) for each in zip(*(each.split(count) for each in mean.vectors), strict=True)]
        return [replace(pieces[0], metrics=mean.metrics, reports=mean.reports), *pieces[1:]]

    def join(self, pieces: Sequence[Mean]) -> Mean:
        """Join the pieces of `split`, see `Merging`."""
        return replace(pieces[0], vectors=tuple(map(Flat.join, zip(*(piece.vectors for piece in pieces), strict=True))))


merge = MergeMeans()


def gathered(results: Results[Mean], workers: int, each: int, max_result_bytes: int) -> list[Mean]:
    """The results of all workers, merged on the workers if they are many or large.

    Args:
        results: The results.
        workers: The number of results.
        each: The size of one result in bytes.
        max_result_bytes: The limit on the size of all results of a job; 0: no limit.
    """
    return results.reduce(merge) if merges_on_workers(workers, each, max_result_bytes) else results.collect()


def merges_on_workers(workers: int, each: int, max_result_bytes: int) -> bool:
    """Whether results are too many or too large for the driver; the arguments are those of `gathered`."""
    limit = min(MAX_BYTES, max_result_bytes // 2 if max_result_bytes else MAX_BYTES)
    return workers > MAX_WORKERS or workers * each > limit


def add_histories(run: Run, epoch: int, reports: Sequence[WorkerReport]) -> None:
    """Report each worker's epoch, and append it to the histories; its metrics are row-weighted means of its rounds."""
    found = []
    for worker in sorted({report.worker for report in reports}):
        rounds = [report for report in reports if report.worker == worker]
        rows, seconds = sum(report.rows for report in rounds), sum(report.seconds for report in rounds)
        logs = metrics.mean_logs(rounds)
        found.append(WorkerEpoch(worker, rows, seconds, logs))
        fixed = {"worker": worker, "epoch": epoch, "rows": rows, "seconds": seconds}
        run.histories.append(fixed | logs | fixed)  # a metric may have the name "rows"
    run.events.emit(WorkersReported(epoch, tuple(found)))


def divergence(loss: float | None) -> str:
    """Which values of a worker are not finite, for a message."""
    return "the weights are not finite" if loss is not None and np.isfinite(loss) else f"the loss is {loss}"


def check_finite(reports: Sequence[Report], epoch: int, kept: str, in_step: bool = False) -> None:
    """Check that training has not diverged.

    Args:
        reports: The reports of the workers.
        epoch: The epoch.
        kept: The last completed one of these gave the weights that the model has: ``"round"`` or ``"epoch"``.
        in_step: Whether the workers train with common gradients, so that the rows of one can make the weights of all NaN.

    Raises:
        DivergenceError: Weights or the loss of a worker are not finite.
    """
    diverged = [report for report in reports if not report.is_finite]
    if not diverged:
        return
    where, rows = f" on worker {diverged[0].worker}", "its rows"
    if in_step and len(diverged) == len(reports):
        where, rows = "", "the data"
    raise DivergenceError(
        f"training diverged in epoch {epoch + 1}{where}: {divergence(diverged[0].logs.get('loss'))}. The model keeps the "
        f"weights of the last completed {kept}. Try a smaller learning rate, clipnorm= in the optimizer, or look for "
        f"extreme values in {rows}, and for NaN from transform= or on_invalid='allow'."
    )


def warn_of_steps(run: Run, reports: Sequence[Report]) -> None:
    """Warn if no worker has as many batches as ``steps_per_epoch``, as Keras does."""
    steps: Counter[int] = Counter()
    for report in reports:
        steps[report.worker] += report.steps
    most = max(steps.values(), default=0)
    if run.steps_per_epoch is not None and most < run.steps_per_epoch and not run.model.stop_training:
        warn(
            f"steps_per_epoch={run.steps_per_epoch}, but no worker has more than {counted(most, 'batch')}, after which its "
            "data ended: each epoch is shorter. Repeat the data, or set a smaller steps_per_epoch."
        )
