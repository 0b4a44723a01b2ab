"""A daemon for Spark's Python workers that has Keras loaded, so that each of our workers begins at once.

Spark forks its Python workers from a daemon, of which it has one for each set of environment variables. It ends a worker
whose task failed, and one that had nothing to do for a minute, and the next one loads Keras and its backend again, which
takes seconds. This daemon loads them once, if its workers are those of sparkkeras; others are as ever::

    spark-submit --conf spark.python.daemon.module=sparkkeras.spark.daemon ...

The backend is loaded here, and runs nothing, so that every fork can use it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from pyspark import daemon

if __name__ == "__main__":
    if os.environ.get("SPARKKERAS_WORKER"):
        from sparkkeras.worker import device

        with suppress(Exception):  # a worker that has to load it says what is wrong
            device.load()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sparkkeras"]:
        del sys.modules[name]  # the driver may ship its own version to the workers
    daemon.manager()
