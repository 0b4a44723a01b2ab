"""What checkpoints cost during training, and how long it takes to resume."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import data
import keras
import numpy as np
from harness import Effort, Metric, Samples, Turn, alternate, benchmark

ROWS = 8_000
"""So many that an epoch takes about a second on two cores."""


@benchmark(
    Metric("synchronous epoch begin -> next begin, 10 MB, with checkpoints against without", "written", "plain", 1.02),
    Metric("the same, asynchronous", "written_asynchronous", "plain_asynchronous", 1.02),
    Metric("the same, asynchronous with one worker: a core for the driver", "written_one_worker", "plain_one_worker", 1.02),
    Metric("the same, all-reduce", "written_allreduce", "plain_allreduce", 1.02),
    Metric("fit(resume=True) -> begin of its first epoch, 10 MB", "resume", None, None, "seconds"),
    Metric("fit without checkpoints -> begin of its first epoch, 10 MB", "begin", None, None, "seconds"),
)
def checkpoints(effort: Effort) -> Samples:
    """Epochs of a second of a model with 10 MB of weights and 20 MB of optimizer variables, with a checkpoint for each."""
    from contestants import spark

    x, y = data.vectors(effort.rows(ROWS))
    with spark(), tempfile.TemporaryDirectory() as folder:
        runs = {}
        epochs = max(2, effort.epochs // 2)
        for suffix, mode, num_workers in (
            ("", "synchronous", 2),
            ("_asynchronous", "asynchronous", 2),
            ("_one_worker", "asynchronous", 1),
            ("_allreduce", "allreduce", 2),
        ):
            rows = slice(len(x) * num_workers // 2)
            trained = _OnSpark(x[rows], y[rows], folder, mode, num_workers)
            trained.epochs(1, writes=True)
            runs[f"plain{suffix}"] = lambda run=trained: run.epochs(epochs)
            runs[f"written{suffix}"] = lambda run=trained: run.epochs(epochs, writes=True)
        trained = _OnSpark(x, y, folder, "synchronous", 2)
        trained.epochs(1, writes=True)
        runs["resume"] = trained.resume
        runs["begin"] = trained.begin
        return alternate(effort.turns, **runs)


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """The times at which epochs begin: until the next one, a checkpoint is handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


class _OnSpark:
    """Training with or without checkpoints in a new folder."""

    def __init__(self, x: Any, y: Any, folder: str, mode: str, num_workers: int) -> None:
        from sparkkeras import SparkModel

        self._x, self._y, self._folder, self._path = x, y, folder, ""
        frequency = {"synchronous": "epoch", "asynchronous": 10}.get(mode)
        self._spark_model = SparkModel(data.middle_mlp(), mode, frequency, num_workers=num_workers, seed=0)

    def epochs(self, count: int, writes: bool = False) -> Turn:
        """The seconds of so many epochs after the first one."""
        arguments: dict[str, Any] = {}
        if writes:
            self._path = tempfile.mkdtemp(dir=self._folder)
            arguments = {"checkpoint": self._checkpoint(), "resume": True}
        times = self._fit(count + 2, **arguments)
        return list(np.diff(times)[1:])

    def resume(self) -> Turn:
        """The seconds until the first epoch of a training that continues from the last checkpoint begins."""
        self._continued += 1
        started = time.perf_counter()
        times = self._fit(2 + self._continued, checkpoint=self._checkpoint(), resume=True)
        return [times[0] - started]

    def begin(self) -> Turn:
        """The seconds until the first epoch of a training without checkpoints begins."""
        started = time.perf_counter()
        return [self._fit(1)[0] - started]

    _continued = 1

    def _checkpoint(self) -> Any:
        from sparkkeras import Checkpoint

        return Checkpoint(self._path)

    def _fit(self, epochs: int, **arguments: Any) -> list[float]:
        clock = Clock()
        options = {"batch_size": data.BATCH_SIZE, "epochs": epochs, "verbose": 0, "callbacks": [clock]}
        self._spark_model.fit(self._x, self._y, **options, **arguments)
        return clock.times
