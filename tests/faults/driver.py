"""Driver processes with a Spark of their own, which run one operation after the other until they are ended or killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.integration.standalone import ROOT
from tests.processes import SHORT_LIVED_JAVA, clean_environment, free_port

SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SHORT_LIVED_JAVA,
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "sparkkeras.spark.daemon",
}


class Driver:
    """A driver process; a context manager that ends it.

    Args:
        folder: For its log and results.
        master: The Spark master.
        connect: Whether it is the client of a Spark Connect server, which it starts in its JVM.
        prefix: The words before its command.
        settings: Further settings of Spark.
    """

    def __init__(self, folder, master="local-cluster[2,1,1024]", connect=False, prefix=(), **settings):
        self.log = Path(folder) / "driver.log"
        self._results = Path(folder)
        self._count = 0
        given = json.dumps({"master": master, "connect": connect, "settings": SETTINGS | settings})
        address = (SETTINGS | settings)["spark.driver.host"]
        environment = clean_environment() | {"PYSPARK_PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.faults.driver", given],
                cwd=ROOT,
                env=environment | {"SPARK_SUBMIT_OPTS": SHORT_LIVED_JAVA, "SPARK_LOCAL_IP": address},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def begin(self, operation, probe, **options):
        """Start an operation; returns the path at which its result appears."""
        self._count += 1
        result = self._results / f"result-{self._count}-{time.time_ns()}.json"
        task = {"operation": operation, "probe": asdict(probe), "options": options, "result": str(result)}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return result

    def end(self, result, seconds=300):
        """Wait for the result of an operation, and return it."""
        deadline = time.monotonic() + seconds
        while not result.exists():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, f"no result in {seconds} s: {self.log.read_text(errors='replace')[-4000:]}"
            time.sleep(0.05)
        return json.loads(result.read_text())

    def run(self, operation, probe, seconds=300, **options):
        """Run an operation, and return its result."""
        return self.end(self.begin(operation, probe, **options), seconds)

    def processes(self):
        """The process, its JVM, executors and workers."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


def start(master, connect, settings):
    """The SparkContext of this process; with ``connect`` that of the server, of which this process has a session."""
    from pyspark import SparkConf, SparkContext

    if not connect:
        return SparkContext(conf=SparkConf().setMaster(master).setAppName("faults").setAll(settings.items()))
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder

    port = free_port()
    DefaultChannelBuilder.default_port = staticmethod(lambda: port)
    os.environ["SPARKKERAS_WORKER"] = "1"  # of the server: all its Python workers start with Keras loaded
    builder = SparkSession.builder.appName("faults").config("spark.api.mode", "connect").config("spark.master", master)
    for key, value in (settings | {"spark.connect.grpc.binding.port": str(port)}).items():
        builder = builder.config(key, value)
    builder.getOrCreate()
    return SparkContext._active_spark_context


def main(given):
    from tests.faults.injection import Probe
    from tests.faults.operations import attempt

    context = start(given["master"], given["connect"], given["settings"])
    context.setLogLevel("OFF")
    for line in sys.stdin:
        task = json.loads(line)
        found = attempt(context, task["operation"], Probe(**task["probe"]), **task["options"])
        draft = Path(task["result"] + ".draft")
        draft.write_text(json.dumps(found))
        draft.rename(task["result"])
    context.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
