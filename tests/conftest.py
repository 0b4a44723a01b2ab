"""Fixtures: one SparkContext at a time, ``local[2]`` for most tests, two executor processes for tests marked ``cluster``."""

import gc
import os
import signal
import sys
import uuid
import warnings
from pathlib import Path

from tests.processes import SHORT_LIVED_JAVA

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it reports its use over the network
os.environ.setdefault("SPARK_SUBMIT_OPTS", SHORT_LIVED_JAVA)
os.environ.setdefault("SPARKKERAS_KEPT_MODELS", "16")  # in workers, which see more models in tests than in real use
os.environ["PYSPARK_PYTHON"] = sys.executable
# Executor processes import the package from here, as if it were installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
)

import numpy as np
import pytest

gc.set_threshold(20_000, 20, 50)  # a full collection takes half a second, with Keras and its traced models in memory

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a background job of a shell; tests of Ctrl-C need the handler
    signal.signal(signal.SIGINT, signal.default_int_handler)

SOAK = bool(os.environ.get("SPARKKERAS_SOAK"))


def long(*values):
    """Parameters of a test that only run in `scripts/soak`."""
    return pytest.param(*values, marks=pytest.mark.soak)


# A process cannot have a SparkContext and a Connect session: tests/integration/test_connect.py runs these in another one.
collect_ignore = ["connect"]


SLOW = (
    "tests/test_examples.py",
    "tests/test_docs.py",
    "tests/integration/test_ml_estimator.py",
    "tests/integration/test_deployment.py",
)
"""Files with tests that take a minute: they run early, so that with several processes none waits for another at the end."""


def pytest_addoption(parser):
    parser.addoption("--finished", type=Path, help="skip the tests listed in this file, and append those that pass")


def pytest_configure(config):
    if config.getoption("--finished") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Finished(config.getoption("--finished")))


class Finished:
    """Records the tests that have passed, so that an interrupted run can be resumed.

    A test has passed only after its teardown, in which fixtures check for leaks such as remaining threads and files.
    """

    def __init__(self, path):
        self._path = path
        self._passed = {}

    def pytest_runtest_logreport(self, report):
        passed = self._passed.setdefault(report.nodeid, set())
        if report.outcome != "failed":
            passed.add(report.when)
        if report.when == "teardown":
            del self._passed[report.nodeid]
            if passed == {"setup", "call", "teardown"}:
                with self._path.open("a") as file:
                    file.write(report.nodeid + "\n")


def pytest_collection_modifyitems(config, items):
    """Deselect soak tests, and sort the others: tests without Spark, slow files, tests with Spark, those marked ``cluster``.

    The last ones need executor processes; in this order, each kind of SparkContext starts only once. With several processes
    (pytest-xdist) each has its own context, and all tests of a file run in the same process.
    """
    path = config.getoption("--finished")
    finished = set(path.read_text().splitlines()) if path and path.exists() else set()
    deselected = [item for item in items if item.nodeid in finished or (item.get_closest_marker("soak") and not SOAK)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in set(deselected)]

    def position(item):
        if item.get_closest_marker("cluster"):
            return 3
        if item.nodeid.split("::")[0] in SLOW:
            return 1
        return 2 if "sc" in getattr(item, "fixturenames", ()) else 0

    items.sort(key=position)


class Contexts:
    """Starts SparkContexts by master, at most one at a time."""

    def __init__(self):
        self._master = None
        self._context = None

    def get(self, master):
        if master != self._master or self._context is None or self._context._jsc is None:
            self.stop()
            self._context = self._start(master)
            self._master = master
        return self._context

    def stop(self):
        if self._context is not None:
            from pyspark.sql import SparkSession

            (SparkSession._instantiatedSession or self._context).stop()  # else the next context gets this session
        self._context = self._master = None

    @staticmethod
    def _start(master):
        from pyspark import SparkConf, SparkContext

        from sparkkeras.spark.cluster import TRAINING_WORKERS
        from sparkkeras.worker import device

        conf = SparkConf().setMaster(master).setAppName("sparkkeras tests")
        for key, value in {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.driver.memory": "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.executor.extraJavaOptions": SHORT_LIVED_JAVA,
            "spark.task.maxFailures": "2",
            "spark.decommission.enabled": "true",  # tests/faults sends the signal
            "spark.sql.shuffle.partitions": "4",
            "spark.python.daemon.module": "sparkkeras.spark.daemon",  # scripts in test_models run without it
        }.items():
            conf.set(key, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = SparkContext(conf=conf)
        context.setLogLevel("OFF")
        # Run functions of test modules in the workers that train: other workers would load Keras to import such a module.
        context.environment |= device.worker_environment(1) | TRAINING_WORKERS
        return context


@pytest.fixture
def hadoop_uri(sc, tmp_path):
    """The URI by which a file system of Hadoop has ``tmp_path``; pyarrow opens it only with Hadoop's native client."""
    table = uuid.uuid4().hex
    sc._jsc.hadoopConfiguration().set(f"fs.viewfs.mounttable.{table}.link./data", tmp_path.as_uri())
    return f"viewfs://{table}/data"


@pytest.fixture(scope="session")
def contexts():
    """The SparkContexts of this test run."""
    contexts = Contexts()
    yield contexts
    contexts.stop()


def settle(sc):
    """Wait until Spark has processed the events of all completed jobs and stages."""
    sc._jsc.sc().listenerBus().waitUntilEmpty()


@pytest.fixture(autouse=True)
def seeded():
    """Make initial weights and names of layers the same in every test, so that workers can reuse their traced models."""
    if "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session(free_memory=False)
        sys.modules["keras"].utils.set_random_seed(0)


@pytest.fixture
def sc(request, contexts):
    """A SparkContext: ``local[2]``, or two executor processes for tests marked ``cluster``."""
    context = contexts.get("local-cluster[2,1,1024]" if request.node.get_closest_marker("cluster") else "local[2]")
    settle(context)
    return context


@pytest.fixture
def spark(sc):
    """A new SparkSession on the context, with separate settings and views for each test."""
    from pyspark.sql import SparkSession

    shared = SparkSession(sc)
    yield shared.newSession()
    shared._jvm.SparkSession.setActiveSession(shared._jsparkSession)


@pytest.fixture(scope="session")
def digits():
    """Real handwritten digits as (x_train, y_train, x_test, y_test); x in [0, 1], shape (rows, 64)."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]
