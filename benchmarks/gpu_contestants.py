"""The contestants of `gpu.py`, with plain Keras and with sparkkeras in memory, and what is measured of the GPU meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import keras
import numpy as np
from contestants import EpochClock
from harness import Turn
from numpy.typing import NDArray

from sparkkeras.arguments import declared
from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalDataset, LocalShared
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelState, ModelWeights
from sparkkeras.scoring.inference import PredictTask
from sparkkeras.training.callbacks import DriverCallbacks
from sparkkeras.training.fit_arguments import FitArguments
from sparkkeras.training.run import Run, train
from sparkkeras.worker.batches import BatchOptions, FitOptions


class PlainKeras:
    """``keras.Model.fit`` and ``predict``."""

    def __init__(self, model: keras.Model, x: Any, y: Any, batch_size: int) -> None:
        self.model, self.x, self.y, self.batch_size = model, x, y, batch_size
        self.block = from_arrays(x, y, None)
        metrics.prepare(model, self.block.spec.zeros())
        self._start = ModelState.take(model)

    @property
    def weights(self) -> NDArray[Any]:
        """All weights as one vector."""
        return ModelState.take(self.model).weights.vector

    def reset(self) -> None:
        """Go back to the first weights, and to an optimizer that has not trained."""
        self._start.put(self.model)

    def epochs(self, count: int) -> Turn:
        """Return the seconds of ``count`` epochs after the first one of a call."""
        clock = EpochClock()
        self.fit(count + 1, callbacks=[clock])
        return clock.seconds[1:]

    def fit(self, epochs: int, shuffle: bool = True, callbacks: Sequence[Any] = ()) -> None:
        """Train."""
        self.model.fit(
            self.x, self.y, batch_size=self.batch_size, epochs=epochs, shuffle=shuffle, callbacks=[*callbacks], verbose=0
        )

    def predict(self) -> Any:
        """Predict all rows."""
        return self.model.predict(self.x, batch_size=self.batch_size, verbose=0)


class InMemory(PlainKeras):
    """Synchronous training and prediction of sparkkeras with one worker, in this process and without Spark."""

    def __init__(self, model: keras.Model, x: Any, y: Any, batch_size: int) -> None:
        super().__init__(model, x, y, batch_size)
        self.archive = ModelArchive.pack(model)

    def fit(self, epochs: int, shuffle: bool = True, callbacks: Sequence[Any] = ()) -> None:
        """Train, as `SparkModel.fit` does when its workers have the rows."""
        given = {name: argument.default for name, argument in declared(FitArguments).items()}
        run = Run("synchronous", [self.model], given | {"epochs": epochs})
        run.archives, run.dataset = [self.archive], LocalDataset((self.block,))
        run.split, run.options = TrainValidationSplit((self.block.rows,), (0,)), FitOptions(self.batch_size, shuffle=shuffle)
        run.callbacks = DriverCallbacks(callbacks, self.model, epochs, run.steps, run.events)
        train(run)

    def predict(self) -> Any:
        """Predict all rows, as `SparkModel.predict` does after a fit."""
        options = BatchOptions(self.batch_size, to_predict=True)
        shared = map(LocalShared, (self.archive, ModelWeights.take(self.model), options))
        features = LocalDataset((from_arrays(self.x, None, None),))
        return np.concatenate(features.run(PredictTask(*shared, schema_of(self.model))).collect())


def gpu_name() -> str | None:
    """The GPU that Keras uses in this process; ``None`` if it uses the CPU."""
    if keras.backend.backend() == "jax":
        import jax

        device = jax.devices()[0]
        return None if device.platform == "cpu" else str(device.device_kind)
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def gpu_bytes() -> int:
    """The GPU memory that this process uses."""
    if keras.backend.backend() == "jax":
        import jax

        return int(jax.devices()[0].memory_stats()["bytes_in_use"])
    import torch

    return int(torch.cuda.memory_allocated())


def peak_gpu_bytes(call: Callable[[], Any]) -> int:
    """The most GPU memory that this process uses during a call; with JAX, of what a thread sees every millisecond."""
    if keras.backend.backend() == "torch":
        import torch

        torch.cuda.reset_peak_memory_stats()
        call()
        return int(torch.cuda.max_memory_allocated())
    peak, ended = gpu_bytes(), threading.Event()  # JAX's own peak is that of the process

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, gpu_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        ended.set()
        watcher.join()
    return peak


class Utilization:
    """The share of time in which the GPU runs a kernel, as nvidia-smi reports it ten times a second."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Take samples until the context ends; none without nvidia-smi."""
        program = shutil.which("nvidia-smi")
        if program is None:
            yield
            return
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = [program, f"--id={first}", "--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits"]
        with subprocess.Popen([*command, "--loop-ms=100"], stdout=subprocess.PIPE, text=True) as process:
            reader = threading.Thread(target=self._read, args=(process.stdout,))
            reader.start()
            try:
                yield
            finally:
                process.terminate()
                reader.join()

    def waits(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """The share of time in which the GPU runs nothing, in some spans of `time.time`; ``None``: unknown."""
        inside = [busy for at, busy in self._samples if any(start < at < stop for start, stop in spans)]
        return 1 - sum(inside) / len(inside) / 100 if inside else None

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            at, _, busy = line.strip().partition(", ")
            if busy.isdigit():  # for a part of a GPU, it is [N/A]
                self._samples.append((datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(busy)))
