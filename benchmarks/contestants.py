"""The contestants: the same training with plain Keras, with sparkkeras on Spark, and with Elephas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import data
import keras
from harness import ELEPHAS_PYTHON, Turn
from pyspark.sql import SparkSession

from sparkkeras import SparkModel

WORKERS = 2
SPARK_SETTINGS = {
    "spark.driver.memory": "4g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.unix.domain.socket.enabled": "true",
}


@contextmanager
def spark() -> Iterator[SparkSession]:
    """Start Spark with two slots in this process; its workers use the same Python."""
    os.environ["PYSPARK_PYTHON"] = sys.executable  # the setting spark.pyspark.python affects only spark-submit
    builder = SparkSession.builder.master(f"local[{WORKERS}]").appName("benchmarks")
    session = builder.config(map=SPARK_SETTINGS).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


class EpochClock(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the seconds from the beginning to the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Turn = []
        self._begun = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._begun)


class PlainKeras:
    """``keras.Model.fit`` in this process."""

    def __init__(self, model: keras.Model, x: Any, y: Any) -> None:
        self.model, self.x, self.y = model, x, y

    def epochs(self, count: int) -> Turn:
        """Return the seconds of ``count`` epochs after the first one, in which Keras compiles its loop."""
        clock = EpochClock()
        self.model.fit(self.x, self.y, batch_size=data.BATCH_SIZE, epochs=count + 1, verbose=0, callbacks=[clock])
        return clock.seconds[1:]


class OnSpark:
    """``SparkModel.fit``, with two workers by default.

    Attributes:
        added: For each call of `epochs`, the seconds of each epoch minus those of its slowest worker's ``fit``.
    """

    def __init__(self, model: keras.Model, x: Any, y: Any, **arguments: Any) -> None:
        self.spark_model, self.x, self.y = SparkModel(model, **{"num_workers": WORKERS, "seed": 0} | arguments), x, y
        self.added: list[Turn] = []

    def epochs(self, count: int, **arguments: Any) -> Turn:
        """Return the seconds of ``count`` epochs after the first one."""
        clock = EpochClock()
        self.spark_model.training_histories.clear()
        options = {"batch_size": data.BATCH_SIZE, "epochs": count + 1, "verbose": 0, "callbacks": [clock]}
        self.spark_model.fit(self.x, self.y, **options, **arguments)
        slowest = [0.0] * (count + 1)
        for history in self.spark_model.training_histories:
            slowest[history["epoch"]] = max(slowest[history["epoch"]], history["seconds"])
        self.added.append([epoch - fit for epoch, fit in zip(clock.seconds, slowest, strict=True)][1:])
        return clock.seconds[1:]

    def steps(self, count: int) -> Turn:
        """Return the mean seconds of a worker's steps in each of ``count`` epochs after the first one."""
        with tempfile.TemporaryDirectory() as folder:
            self.epochs(count, worker_callbacks=[_worker_clock(folder)])
            steps = -(-self.spark_model.training_histories[0]["rows"] // data.BATCH_SIZE)
            measured = [path for path in sorted(Path(folder).iterdir()) if not path.name.startswith("0-")]
            return [float(path.read_text()) / steps for path in measured]


def _worker_clock(folder: str) -> keras.callbacks.Callback:
    """A callback that writes the seconds of an epoch's steps to a file. It is nested: workers cannot import this file."""

    class WorkerClock(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seconds = time.perf_counter() - self.begun
            Path(folder, f"{epoch}-{os.getpid()}").write_text(str(seconds))

    return WorkerClock()


class Elephas:
    """Elephas with two workers, in a separate environment: each call starts a new process."""

    def run(self, *, rows: int, warmup: int, epochs: int, predict_rows: int, predicts: int) -> dict[str, Turn]:
        """Return the seconds of epochs and of predictions, as ``"epoch"`` and ``"predict"``."""
        options = {
            "rows": rows,
            "warmup": warmup,
            "epochs": epochs,
            "predict-rows": predict_rows,
            "predicts": predicts,
            "workers": WORKERS,
        }
        return _in_elephas("elephas_bench.py", options)

    def transforms(self, rows: int, passes: int) -> dict[str, Turn]:
        """Return the seconds of passes through Elephas's transformer, as ``"wide"`` and ``"narrow"``."""
        return _in_elephas("elephas_frames_bench.py", {"rows": rows, "passes": passes, "workers": WORKERS})

    def servers(self, count: int) -> dict[str, dict[str, Turn]]:
        """Return the seconds of ``count`` pulls and pushes of 100 MB, by server: ``"http"`` or ``"socket"``."""
        return _in_elephas("elephas_servers_bench.py", {"count": count, "only": "servers"})

    def asynchronous(self, rows: int, epochs: int) -> dict[str, float]:
        """Return the seconds of an asynchronous epoch with each server, as ``"http_epoch"`` and ``"socket_epoch"``."""
        options = {"rows": rows, "epochs": epochs, "workers": WORKERS, "only": "training"}
        return _in_elephas("elephas_servers_bench.py", options)


def _in_elephas(script: str, options: dict[str, Any]) -> Any:
    """Run a script in Elephas's environment; return the last line of its output, parsed as JSON."""
    command = [ELEPHAS_PYTHON, Path(__file__).parent / script]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
