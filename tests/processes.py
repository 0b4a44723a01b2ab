"""What programs that tests start in processes of their own find around them."""

import contextlib
import os
import random
import socket

SHORT_LIVED_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java as it is best for programs of a minute: with the compiler that is quick, not the one whose code is."""

KEPT = {"PYSPARK_PYTHON", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS"}


def clean_environment():
    """This process's environment without what a SparkContext of it, or a server of Connect, has put there."""
    return {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(("SPARK_", "PYSPARK_"))}


def free_port():
    """A port below those that the system gives out by itself, so that nobody takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
