"""Shared by all examples: a quiet terminal, and a Spark session."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


@contextmanager
def hushed() -> Iterator[None]:
    """Hide the messages of TensorFlow and Java on standard error, unless an exception is raised."""
    with tempfile.TemporaryFile() as captured:
        terminal = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(terminal, captured.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def start_spark(master: str, *, remote: bool = False) -> SparkSession:
    """Start a session on a master, or through Spark Connect; local workers run the current Python."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote(master) if remote else SparkSession.builder.appName("sparkkeras").master(master)
    if remote and not master.startswith("local"):
        return builder.getOrCreate()
    if master.startswith("local"):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"  # whatever this machine's host name resolves to
    return (
        builder.config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")  # faster small jobs
        .config("spark.python.daemon.module", "sparkkeras.spark.daemon")  # Keras is loaded once, not by every worker
        .getOrCreate()
    )
