"""`WorkerTensorBoard`: a curve of each worker in TensorBoard.

Event files are TFRecords of protocol buffers. TensorBoard's own writer would import TensorFlow, which is not the backend of
every user and takes seconds; its messages do not.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.events import Event, RunEnded, WorkersReported
from sparkkeras.formats.records import framed


class WorkerTensorBoard(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the metrics of each worker for TensorBoard, as a Keras callback on the driver.

    Each worker is a run ``worker-0``, ``worker-1``, ... with the tags that `keras.callbacks.TensorBoard` uses
    (``epoch_loss``), so with the same ``log_dir`` a chart has the curves of all workers besides ``train`` and
    ``validation``. ``epoch_rows_per_second`` is the speed of a worker, without the start of its process.

    Args:
        log_dir: The local folder, the ``--logdir`` of TensorBoard.

    Raises:
        ConfigurationError: The package ``tensorboard`` is not installed, or ``log_dir`` is not a local path.

    Example::

        callbacks = [keras.callbacks.TensorBoard("logs"), WorkerTensorBoard("logs")]
        spark_model.fit(df, epochs=10, callbacks=callbacks)
    """

    @known_arguments
    def __init__(self, log_dir: str | os.PathLike[str] = "logs") -> None:
        super().__init__()
        self.log_dir = arguments.path("log_dir", log_dir)
        if "://" in self.log_dir:
            raise ConfigurationError(
                f"log_dir={self.log_dir!r}: expected a local folder, such as 'logs'; URIs are not written. Copy the folder "
                "after training."
            )
        _messages()
        self._files: dict[int, IO[bytes]] = {}

    def on_event(self, event: Event) -> None:
        """Write the metrics of the workers at the end of an epoch.

        Raises:
            StorageError: The folder cannot be written.
        """
        if isinstance(event, WorkersReported):
            for worker in event.workers:
                speed = {"rows_per_second": worker.rows / worker.seconds} if worker.seconds > 0 else {}
                self._write(worker.worker, event.epoch, {**worker.logs, **speed})
        elif isinstance(event, RunEnded):
            self._close()

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin new files, which TensorBoard shows as a continuation of those in the folder."""
        self._close()

    def on_train_end(self, logs: Any = None) -> None:
        """Close the files."""
        self._close()

    def _write(self, worker: int, epoch: int, values: dict[str, Any]) -> None:
        event_type, summary_type = _messages()
        summary = summary_type()
        for name, value in values.items():
            if np.ndim(value) == 0 and value is not None:
                summary.value.add(tag=f"epoch_{name}", simple_value=float(value))
        try:
            if worker not in self._files:
                self._files[worker] = self._open(worker)
            file = self._files[worker]
            file.write(framed(event_type(wall_time=time.time(), step=epoch, summary=summary).SerializeToString()))
            file.flush()
        except OSError as error:
            raise StorageError(
                f"log_dir={self.log_dir!r} cannot be written ({error}): give a folder that can be."
            ) from error

    def _open(self, worker: int) -> IO[bytes]:
        event_type, _ = _messages()
        folder = Path(self.log_dir) / f"worker-{worker}"
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}").open("xb")
        file.write(framed(event_type(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()))
        return file

    def _close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def _messages() -> tuple[Any, Any]:
    """The types of TensorBoard's messages ``Event`` and ``Summary``.

    Raises:
        ConfigurationError: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event as EventMessage
        from tensorboard.compat.proto.summary_pb2 import Summary
    except ImportError as error:
        raise ConfigurationError(
            "WorkerTensorBoard needs the package tensorboard, which is not installed: pip install sparkkeras[tensorboard]."
        ) from error
    return EventMessage, Summary
