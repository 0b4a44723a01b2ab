"""One Spark at a time: a local one for most tests, two executor processes for those that need them."""

import gc
import os
import signal
import sys
import warnings
from pathlib import Path

from tests.processes import SHORT_LIVED_JAVA

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("SPARK_SUBMIT_OPTS", SHORT_LIVED_JAVA)
os.environ.setdefault("SPARKKERAS_KEPT_MODELS", "16")  # of workers, which see more models than those of a person do
os.environ["PYSPARK_PYTHON"] = sys.executable
# Executors of their own import the package from here, as they would an installed one.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
)

import numpy as np
import pytest

gc.set_threshold(20_000, 20, 50)  # a full collection takes half a second with Keras and its traced models in memory

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started by a shell in the background; tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SOAK = bool(os.environ.get("SPARKKERAS_SOAK"))


def long(*values):
    """Values of a parametrized test that only `scripts/soak` runs."""
    return pytest.param(*values, marks=pytest.mark.soak)


# A process cannot hold a SparkContext and a session of Connect: tests/integration/test_connect.py runs these in another one.
collect_ignore = ["connect"]


SLOW = (
    "tests/test_examples.py",
    "tests/test_docs.py",
    "tests/integration/test_ml_pipeline.py",
    "tests/integration/test_deployment.py",
)
"""Files of which a test takes a minute: they begin early, so that no process waits for the other one in the end."""


def pytest_addoption(parser):
    parser.addoption("--finished", type=Path, help="leave out the tests that this file names, and add those that pass")


def pytest_configure(config):
    if config.getoption("--finished") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Finished(config.getoption("--finished")))


class Finished:
    """Writes down which tests have passed, so that a run that was cut off goes on with the others.

    A test has passed with its teardown, in which fixtures look for what it has left behind.
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
    """Leave out long versions; run what needs no Spark first, then what takes long.

    What needs executors of its own comes last: one context is started for each kind. With several processes (pytest-xdist)
    each has its own context, and a file's tests run in one of them.
    """
    path = config.getoption("--finished")
    finished = set(path.read_text().splitlines()) if path and path.exists() else set()
    left_out = [item for item in items if item.nodeid in finished or (item.get_closest_marker("soak") and not SOAK)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]

    def turn(item):
        if item.get_closest_marker("cluster"):
            return 3
        if item.nodeid.split("::")[0] in SLOW:
            return 1
        return 2 if "sc" in getattr(item, "fixturenames", ()) else 0

    items.sort(key=turn)


class Contexts:
    """At most one running SparkContext."""

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

            (SparkSession._instantiatedSession or self._context).stop()  # a session left behind would be the next context's
        self._context = self._master = None

    @staticmethod
    def _start(master):
        from pyspark import SparkConf, SparkContext

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
            "spark.sql.shuffle.partitions": "4",
            "spark.python.daemon.module": "sparkkeras.spark.daemon",  # scripts of test_models do without
        }.items():
            conf.set(key, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = SparkContext(conf=conf)
        context.setLogLevel("OFF")
        # Functions of test modules run in the workers that train: others would load Keras to import such a module.
        context.environment |= device.worker_environment(1) | {"SPARKKERAS_WORKER": "1"}
        return context


@pytest.fixture(scope="session")
def contexts():
    """The contexts of this run."""
    contexts = Contexts()
    yield contexts
    contexts.stop()


def settle(sc):
    """Wait until what has ended no longer stands in Spark's books."""
    sc._jsc.sc().listenerBus().waitUntilEmpty()


@pytest.fixture(autouse=True)
def seeded():
    """The same initial weights in every run, and the same names of layers: workers know such a model and keep it traced."""
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
    """A SparkSession of the test's own, on that context: its settings and views are nobody else's."""
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
