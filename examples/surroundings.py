"""What all examples need around what they show: a quiet terminal, and Spark."""

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
    """Keep what TensorFlow and Java say on standard error off the terminal, unless something goes wrong."""
    with tempfile.TemporaryFile() as said:
        terminal = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(terminal, said.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def start_spark(master: str, *, remote: bool = False) -> SparkSession:
    """A session on a master, or through Spark Connect; one on this machine runs the Python that has Keras."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote(master) if remote else SparkSession.builder.appName("sparkkeras").master(master)
    if remote and not master.startswith("local"):
        return builder.getOrCreate()
    if master.startswith("local"):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"  # whatever this machine's name resolves to
    return (
        builder.config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")  # small jobs are quicker so
        .config("spark.python.daemon.module", "sparkkeras.spark.daemon")  # Keras is loaded once, and not by every worker
        .getOrCreate()
    )
