"""`Checkpoint`: where and how often training writes checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_fields
from sparkkeras.errors import ConfigurationError


@known_fields
@dataclass(frozen=True)
class Checkpoint:
    """Where and how often training writes checkpoints, from which it can be resumed.

    Args:
        path: The folder of the checkpoints of one training: a local path, or a URI that Spark can write (``hdfs://``,
            ``s3a://``, ``file:``). It is created if it does not exist. With Spark Connect, a URI is on a file system of the
            server, and in all-reduce training and `SparkRunner` writing there needs a slot that no worker holds.
        every: ``"epoch"``, or a number of averaging rounds. A round is an epoch, or ``frequency`` batches. In the mode
            ``"allreduce"``, a number of steps, counted from the beginning of each epoch; then a round is so many steps.
            ``"asynchronous"`` and ``"hogwild"`` take ``"epoch"`` only.
        every_seconds: Write a checkpoint also if the last one is this many seconds old, at the end of a round; in the modes
            ``"asynchronous"`` and ``"hogwild"`` at any time.
        keep: The number of checkpoints to keep; older ones are deleted.

    Raises:
        ConfigurationError: A value is out of range.

    Example::

        spark_model.fit(df, epochs=100, checkpoint=Checkpoint("hdfs:///checkpoints/digits"), resume=True)
    """

    path: str | os.PathLike[str]
    every: str | int = "epoch"
    every_seconds: float | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        path = arguments.path("path", self.path)
        object.__setattr__(self, "path", str(Path(path).expanduser()) if path.startswith("~") else path)
        object.__setattr__(self, "keep", arguments.integer("keep", self.keep))
        every, seconds = self.every, self.every_seconds
        if every != "epoch":
            if isinstance(every, (bool, str)) or not isinstance(every, (int, np.integer)) or every < 1:
                raise ConfigurationError(f'every={every!r}: expected "epoch" or a positive whole number of rounds.')
            object.__setattr__(self, "every", int(every))
        if seconds is not None:
            is_number = isinstance(seconds, (int, float, np.number)) and not isinstance(seconds, bool)
            if not is_number or not 0 < seconds < float("inf"):
                raise ConfigurationError(f"every_seconds={seconds!r}: expected a positive number of seconds or None.")
            object.__setattr__(self, "every_seconds", float(seconds))
