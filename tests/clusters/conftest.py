"""A Hadoop cluster, and applications on it as users submit them. Skipped where Maven cannot get Hadoop.

Nothing is installed on the nodes: they get the Python of the packed environment from HDFS.
"""

import os
import re
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters.hadoop import Hadoop, MissingError, jars
from tests.processes import SHORT_LIVED_JAVA, clean_environment

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "yarn"
BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")
OVERHEAD = "1536m" if BACKEND == "jax" else "2g"  # YARN counts shared memory for each process of an all-reduce worker

SMALL = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": OVERHEAD,
    "spark.driver.memory": "512m",
    "spark.driver.memoryOverhead": OVERHEAD,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.yarn.archive": "hdfs:///spark/jars.zip",
    "spark.yarn.appMasterEnv.KERAS_BACKEND": BACKEND,
}
"""Settings beside those of the recipe: two executors of one core on nodes of 6 GB."""

ARCHIVE = "hdfs:///spark/environment.tar.gz"


class Application:
    """A program that ``spark-submit`` runs on YARN.

    Args:
        hadoop: The cluster.
        command: The command.
        output: The file for its output.
        environment: Its environment variables.
    """

    def __init__(self, hadoop, command, output, environment):
        self._hadoop, self._output = hadoop, output
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)

    @property
    def output(self):
        """What was printed so far: by spark-submit, and in client mode by the program."""
        return self._output.read_text(errors="replace")

    @property
    def id(self):
        """The name that YARN gave to the application; waits for it."""
        deadline = time.monotonic() + 120
        while not (found := re.search(r"Submitted application (application_\d+_\d+)", self.output)):
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, self.output[-3000:]
            time.sleep(0.2)
        return found[1]

    @property
    def log(self):
        """All output of its containers."""
        return self._hadoop.log(self.id)

    def succeed(self, seconds=900):
        """Wait until it has ended well, and return all output."""
        code = self.process.wait(timeout=seconds)
        assert code == 0, f"{self.output[-3000:]}\n{self.log[-9000:]}"
        return f"{self.output}\n{self.log}"


class Submit:
    """Submits programs; the applications that still run are killed at the end."""

    def __init__(self, hadoop, folder):
        self._hadoop, self._folder = hadoop, folder
        self._started = []

    def recipe(self, *arguments, **settings):
        """Run ``recipes/yarn/submit.sh``, in cluster mode."""
        return self._start(["bash", RECIPE / "submit.sh", ARCHIVE, *arguments], settings)

    def program(self, path, *arguments, mode="cluster", master="yarn", **settings):
        """Run ``spark-submit`` with the recipe's settings."""
        submit = ["spark-submit", "--master", master, "--deploy-mode", mode]
        if master == "yarn":
            submit += ["--archives", f"{ARCHIVE}#environment"]
        if mode == "client":
            submit += ["--conf", f"spark.pyspark.driver.python={sys.executable}"]
        return self._start([*submit, "--properties-file", self.properties(settings), path, *arguments], settings, mode)

    def properties(self, settings):
        """A file with the recipe's settings, and those of the tests; ``a_b`` stands for ``a.b`` in names."""
        java = " ".join([SHORT_LIVED_JAVA, *self._hadoop.java_options])
        given = SMALL | {"spark.driver.extraJavaOptions": java, "spark.executor.extraJavaOptions": java}
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        path = self._folder / f"{time.time_ns()}.conf"
        added = "".join(f"\n{name} {value}" for name, value in given.items())
        path.write_text((RECIPE / "spark-defaults.conf").read_text() + added + "\n")
        return path

    def environment(self, mode="cluster"):
        """The environment variables of a user, who has activated the environment of this Python."""
        environment = {name: value for name, value in clean_environment().items() if not name.startswith("SPARK_LOCAL_")}
        for name in ("PYSPARK_PYTHON", "PYTHONPATH"):
            environment.pop(name, None)
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "KERAS_BACKEND": BACKEND}
        if mode == "client":
            environment["PYTHONPATH"] = str(ROOT)
        options = " ".join([SHORT_LIVED_JAVA, *self._hadoop.java_options])
        return environment | {"HADOOP_CONF_DIR": str(self._hadoop.conf), "SPARK_SUBMIT_OPTS": options}

    def stop(self):
        for application in self._started:
            if application.process.poll() is None:
                self._hadoop.client("yarn.client.cli.ApplicationCLI", "-kill", application.id, check=False)
                application.process.kill()
                application.process.wait()

    def _start(self, command, settings, mode="cluster"):
        environment = self.environment(mode) | {"PROPERTIES": str(self.properties(settings))}
        output = self._folder / f"{time.time_ns()}.out"
        self._started.append(Application(self._hadoop, [str(word) for word in command], output, environment))
        return self._started[-1]


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """The packed environment."""
    path = tmp_path_factory.mktemp("packed") / "environment.tar.gz"
    environment = os.environ | {"PYTHON": sys.executable, "KERAS_BACKEND": BACKEND}
    done = subprocess.run(["bash", ROOT / "recipes" / "pack.sh", path], env=environment, capture_output=True, text=True)
    if "cannot be moved" in done.stderr:
        pytest.skip(f"this Python cannot be packed: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return path


@contextmanager
def running(request, folder, **options):
    """A running cluster, with Spark's jars and the packed environment on HDFS."""
    try:
        cluster = Hadoop(folder, **options)
    except MissingError as error:
        pytest.skip(f"Hadoop is missing: {error}")
    archive = request.getfixturevalue("archive")
    packed = folder / "jars.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for jar in jars().glob("*.jar"):
            file.write(jar, jar.name)
    with cluster:
        cluster.fs("-mkdir", "-p", "/spark")
        cluster.fs("-D", "dfs.replication=1", "-put", packed, archive, "/spark")
        packed.unlink()
        yield cluster


@pytest.fixture(scope="session")
def hadoop(tmp_path_factory, request):
    """A cluster that believes everyone's name."""
    with running(request, tmp_path_factory.mktemp("hadoop")) as cluster:
        yield cluster


@pytest.fixture
def submit(hadoop, tmp_path):
    submit = Submit(hadoop, tmp_path)
    yield submit
    submit.stop()
