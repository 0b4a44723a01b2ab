"""A daemon for Spark's Python workers that has already imported Keras, so that training workers start immediately.

Spark forks Python workers from a daemon, of which it has one for each set of environment variables. It kills workers whose
task failed and workers that were idle for a minute, and the next worker would import Keras and its backend again, which
takes seconds. This daemon imports them once, if it is the one for training workers; for other workers it changes nothing::

    spark-submit --conf spark.python.daemon.module=sparkkeras.spark.daemon ...

The daemon only imports the backend and runs no operation, so that every fork can use it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from pyspark import daemon

if __name__ == "__main__":
    if os.environ.get("SPARKKERAS_WORKER"):
        from sparkkeras.worker import device

        with suppress(Exception):  # workers import it as well, and report the error
            device.load()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sparkkeras"]:
        del sys.modules[name]  # the driver may ship its own version to the workers
    daemon.manager()
