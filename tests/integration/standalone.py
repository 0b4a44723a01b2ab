"""A standalone Spark on this machine: a master and two workers at different addresses, and drivers that use it.

Spark starts speculative copies on another host than the first attempt, so ``local-cluster`` has none. A driver is a
separate process, so that this session's SparkContext is not affected: it calls a function, named by module, with a
SparkContext and arguments compatible with JSON, and returns its result.
"""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import clean_environment

ROOT = Path(__file__).parent.parent.parent
HOSTS = ("127.0.0.2", "127.0.0.3")
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
}
START_SECONDS = 150.0  # a worker that was cut off for long asks for its master again after up to 90 seconds


class Standalone:
    """A master and two workers with one core each; a context manager.

    Args:
        folder: For logs and the workers' files.
        master: The address of the master.
        hosts: The addresses of the workers.
        prefixes: For an address, the words before commands that run there.
        driver: The address of drivers.
        cores: Of each worker.
        rest_port: Of the master's REST API, which is off by default.
    """

    def __init__(self, folder, master="127.0.0.1", hosts=HOSTS, prefixes=None, cores=1, rest_port=None, driver="127.0.0.1"):
        self.folder = Path(folder)
        self.master, self.hosts, self.prefixes, self.driver = master, hosts, prefixes or {}, driver
        self.cores, self.rest_port = cores, rest_port
        self.url = ""
        self._processes = []

    def __enter__(self):
        try:
            log = self._start("master", self.master, "master.Master", "--port", "0", "--host", self.master)
            self.url = self._await(log, r"Starting Spark master at (spark://\S+)")
            work = str(self.folder / "work")
            logs = [
                self._start(
                    *(host, host, "worker.Worker", "--host", host),
                    *("-c", str(self.cores), "-m", "1g", "-d", work, self.url),
                )
                for host in self.hosts
            ]
            for log in logs:
                self._await(log, r"(Successfully registered with master)")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        import psutil

        found = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                found += [parent, *parent.children(recursive=True)]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self._processes:
            process.wait()

    def run(self, function, settings, seconds=240, executors=2, **arguments):
        """Call a function in a separate driver process when it has so many executors, and return its result."""
        module, result = function.__module__, self.folder / f"{function.__name__}-{time.time_ns()}.json"
        task = {
            "module": module,
            "function": function.__name__,
            "master": self.url,
            "settings": {"spark.driver.host": self.driver} | settings,
            "arguments": arguments,
            "result": str(result),
            "executors": executors,
        }
        environment = _environment(self.driver) | {"PYSPARK_PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        program = [sys.executable, "-m", "tests.integration.standalone", json.dumps(task)]
        command = [*self.prefixes.get(self.driver, []), *program]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads(result.read_text())

    def _start(self, name, address, kind, *arguments):
        import pyspark

        log = self.folder / f"{name}.log"
        home = Path(pyspark.__file__).parent
        command = [
            *self.prefixes.get(address, []),
            str(home / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{kind}",
            "--webui-port",
            "0",
            *arguments,
        ]
        environment = _environment(address) | {"SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "512m"}
        if self.rest_port:
            rest = f"-Dspark.master.rest.enabled=true -Dspark.master.rest.port={self.rest_port}"
            environment["SPARK_MASTER_OPTS"] = rest
        with log.open("wb") as file:
            self._processes.append(
                subprocess.Popen(
                    command, cwd=self.folder, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
                )
            )
        return log

    def _await(self, log, pattern):
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(pattern, log.read_text(errors="replace"))):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.05)
        return found[1]


def _environment(address):
    """The environment variables of a Spark process at an address."""
    return clean_environment() | {"SPARK_LOCAL_IP": address, "SPARK_DAEMON_JAVA_OPTS": os.environ["SPARK_SUBMIT_OPTS"]}


def main(task):
    """Run as the driver process."""
    from pyspark import SparkConf, SparkContext

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.task.maxFailures": "2",
        "spark.python.daemon.module": "sparkkeras.spark.daemon",
    } | task["settings"]
    conf = SparkConf().setMaster(task["master"]).setAppName(task["function"]).setAll(settings.items())
    context = SparkContext(conf=conf)
    context.setLogLevel("OFF")
    deadline = time.monotonic() + START_SECONDS
    while context._jsc.sc().getExecutorMemoryStatus().size() < 1 + task["executors"]:
        assert time.monotonic() < deadline, "the executors have not come"
        time.sleep(0.05)
    function = getattr(importlib.import_module(task["module"]), task["function"])
    try:
        Path(task["result"]).write_text(json.dumps(function(context, **task["arguments"])))
    finally:
        context.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
