"""The environment and output of programs that tests start in separate processes, and the interrupt of this process."""

import contextlib
import os
import random
import signal
import socket
import threading
import time

import pytest

SHORT_LIVED_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""JVM options for programs that run for about a minute: compile quickly instead of optimizing."""

KEPT = {"PYSPARK_PYTHON", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS"}


def clean_environment():
    """The environment of this process without the variables that a SparkContext or a Connect server has set."""
    return {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(("SPARK_", "PYSPARK_"))}


def free_port():
    """A free port below the ephemeral range, so that the system does not assign it to another process meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def lines_of_ranks(capsys):
    """The lines that ranks have written, without the lines of progress that a run of more than 10 seconds writes."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]


@contextlib.contextmanager
def interrupted_when(condition, seconds=3):
    """Interrupt this process, as Ctrl-C does, when a condition holds; the body must raise that within some seconds."""
    interrupted = []

    def interrupt():
        limit = time.monotonic() + 60
        while not condition() and time.monotonic() < limit:
            time.sleep(0.02)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - interrupted[0] < seconds
    thread.join()
