"""The workers of Spark: forks of a daemon that has imported Keras; and what the doctor finds on set-ups that are broken."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyspark
import pytest

from sparkkeras.diagnostics import inspection
from sparkkeras.diagnostics.doctor import examine_driver, examine_spark
from sparkkeras.diagnostics.spark_facts import Request
from sparkkeras.spark import cluster, worker_checks
from sparkkeras.spark.cluster import Cluster
from sparkkeras.worker import device
from tests.processes import clean_environment
from tests.rpc.test_transports import has_ipv6

# The daemon. Functions for workers are local, hence pickled by value: to import this module takes other modules.


def run(sc, function):
    """The results of a function in two training workers that run at the same time."""

    def together(number):
        Path(folder, str(number)).touch()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        return function(number)

    with tempfile.TemporaryDirectory() as folder, Cluster(sc).training_workers():
        return sc.parallelize(range(2), 2).map(together).collect()


def replace_workers(sc):
    """End all training workers: those of the next `run` are new. A task may have left more than two."""
    started = time.time()
    old = True
    while old:
        with pytest.raises(Exception, match="crashed"):
            run(sc, lambda _: os._exit(1))
        old = min(psutil.Process(each).create_time() for each in run(sc, lambda _: os.getpid())) < started


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_training_workers_are_forks_of_a_daemon_with_keras_and_others_are_not(sc, monkeypatch):
    def looks(_):
        daemon = os.getppid()
        command = Path(f"/proc/{daemon}/cmdline").read_text()
        return "keras" in sys.modules, "sparkkeras.spark.daemon" in command, daemon, os.getpid()

    def ours(_):
        return [name for name in sys.modules if name.startswith("sparkkeras.")]

    monkeypatch.setitem(sc.environment, "SPARKKERAS_WORKER", "")  # as outside tests; see conftest.py
    before = run(sc, looks)
    assert [each[:2] for each in before] == [(True, True)] * 2
    assert [each[:2] for each in sc.parallelize(range(2), 2).map(looks).collect()] == [(False, True)] * 2
    replace_workers(sc)
    assert run(sc, ours) == [[], []]  # the driver may ship another version
    after = run(sc, looks)
    assert {each[3] for each in before}.isdisjoint(each[3] for each in after)
    assert {each[2] for each in before} == {each[2] for each in after}
    assert all(each[0] for each in after)


@pytest.mark.core
def test_every_fork_can_use_the_backend(sc):
    import keras

    def used(_):
        device.prepare(1)
        before = device.is_uninitialized()
        device.initialize_backend()
        return before, device.is_uninitialized()

    initialized = keras.backend.backend() != "torch"  # on CPUs PyTorch has no state that a fork could not use
    for _ in range(2):
        replace_workers(sc)
        assert run(sc, used) == [(True, not initialized)] * 2


@pytest.mark.core
@pytest.mark.skipif(os.environ.get("KERAS_BACKEND") != "jax", reason="JAX compiles")
def test_workers_share_what_jax_compiles(sc):
    def shared(_):
        import jax
        from pyspark import SparkFiles

        device.prepare(1, shared_folder=SparkFiles.getRootDirectory())
        jax.block_until_ready(jax.jit(lambda array: array * 2)(np.ones(3)))
        folder = jax.config.jax_compilation_cache_dir
        return folder, sorted(os.listdir(folder or "/nonexistent"))

    first, second = run(sc, shared)
    assert first[0] == second[0]
    assert first[1]
    assert second[1]


def test_a_backend_that_cannot_be_loaded_is_reported_by_the_workers():
    environment = {**os.environ, "SPARKKERAS_WORKER": "1", "KERAS_BACKEND": "nonsense"}
    command = [sys.executable, "-m", "sparkkeras.spark.daemon", "pyspark.worker"]
    daemon = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert len(daemon.stdout) == 4, daemon.stdout  # only the port
    assert daemon.stderr == b""


def test_a_new_context_uses_the_daemon_if_its_workers_can(monkeypatch):
    given = []
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(pyspark.SparkContext, "_jvm", None)  # a running JVM has its own settings
    monkeypatch.setattr(pyspark.SparkContext, "getOrCreate", lambda conf: given.append(conf))
    monkeypatch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)

    def module():
        cluster.active_context()
        return given.pop().get("spark.python.daemon.module")

    assert module() == "sparkkeras.spark.daemon"
    monkeypatch.setenv("PYSPARK_PYTHON", "/no/such/python")
    assert module() is None
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setattr(worker_checks, "PACKAGE", Path("/another/copy/sparkkeras"))  # which Python cannot import
    assert module() is None


# The doctor

UNREACHABLE = "192.0.2.1"
"""An address that is reserved for documentation (RFC 5737)."""


LOADS = """print('{"gpus": [], "seconds": 0.1, "works": true}')"""
"""Takes the place of the code that loads the backend, where it takes seconds and shows nothing."""


@pytest.fixture(scope="module")
def driver():
    """The description of the driver; its backend is not loaded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inspection, "_LOAD", LOADS)
        described, findings = examine_driver()
    assert {finding.status for finding in findings} == {"ok"}
    return described


@pytest.fixture
def loads(monkeypatch):
    """The workers do not load the backend."""
    monkeypatch.setattr(inspection, "_LOAD", LOADS)


@pytest.fixture
def python(tmp_path):
    """Makes a Python for workers from shell commands that run before it, and from its options."""

    def make(commands="", options=""):
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\n{commands}\nexec {sys.executable} {options} "$@"\n')
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def examined(sc, spark, driver, monkeypatch):
    """Examines Spark with another Python on the workers; returns the errors as lines."""

    # Else the daemon of each Python would load Keras first, which takes seconds and shows nothing.
    without = {name: value for name, value in sc.environment.items() if name != "SPARKKERAS_WORKER"}
    monkeypatch.setattr(sc, "environment", without)

    def examine(python=sys.executable, **options):
        monkeypatch.setattr(sc, "pythonExec", python)
        findings = list(examine_spark(spark, driver, **options))
        return [f"{finding.subject}: {finding.message}" for finding in findings if finding.status == "error"]

    return examine


def only(folder, *names):
    """A folder with the packages of these names, for a Python that does not look elsewhere (-S)."""
    folder.mkdir()
    for name in names:
        for path in Path(sysconfig.get_paths()["platlib"]).glob(f"{name}*"):
            (folder / path.name).symlink_to(path)
    return folder


def test_a_good_set_up(sc, spark, driver):
    from tests.models import classifier

    findings = list(examine_spark(spark, driver, classifier(), sc.parallelize(range(10), 2)))
    assert {finding.status for finding in findings} == {"ok"}
    messages = [finding.message for finding in findings]
    assert {"2 slots of 1 core on 1 executor", "workers reach the driver"} <= set(messages)
    assert any("10 rows" in message for message in messages)


def test_workers_with_another_python(sc, examined, monkeypatch):
    """The driver reports another version, so that the workers reject it like a real one."""
    monkeypatch.setattr(sc, "pythonVer", "3.9")
    [error] = examined()
    assert "another Python version" in error


def test_workers_without_keras(loads, examined, python, tmp_path):
    folder = only(tmp_path / "only", "numpy", "pyarrow")
    errors = examined(python(f'export PYTHONPATH="$PYTHONPATH:{folder}"', "-S"))
    assert [error for error in errors if "keras is not installed" in error]
    assert not [error for error in errors if "numpy" in error]


def test_workers_without_sparkkeras(loads, examined, python, tmp_path):
    daemon = tmp_path / "sparkkeras" / "spark" / "daemon.py"
    daemon.parent.mkdir(parents=True)
    for folder in daemon.parents[:2]:
        (folder / "__init__.py").touch()
    daemon.write_text("from pyspark.daemon import manager\n\nmanager()\n")
    assert examined(python(f"export PYTHONPATH={tmp_path}:$PYTHONPATH", "-P")) == []


def test_too_little_memory(examined, python):
    """As with ``spark.executor.pyspark.memory``."""
    errors = examined(python("ulimit -v 500000"))
    assert [error for error in errors if error.startswith("memory: ") and "may use 488.3 MB" in error]
    assert [error for error in errors if error.startswith("worker backend: tensorflow does not load")]


def test_a_port_that_is_in_use(loads, examined):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [error] = examined(request=Request(port=port))
    assert f"listen on 127.0.0.1:{port}" in error


def test_a_port_that_is_blocked_for_workers(loads, examined, python, tmp_path):
    """The Python of the workers refuses connections to it, like a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, socket\n"
        "connect = socket.socket.connect\n"
        "def checked(self, address):\n"
        f"    if isinstance(address, tuple) and address[1] == {port}:\n"
        "        raise ConnectionRefusedError(errno.ECONNREFUSED, 'Connection refused')\n"
        "    connect(self, address)\n"
        "socket.socket.connect = checked\n"
    )
    [error] = examined(python(f"export PYTHONPATH={tmp_path}:$PYTHONPATH"), request=Request(port=port))
    assert f"the driver at 127.0.0.1:{port} (Connection refused)" in error


CLUSTERS = f"""
import json, sys
from pyspark import SparkContext
from pyspark.sql import SparkSession
from sparkkeras.diagnostics import inspection
from sparkkeras.diagnostics.doctor import examine_driver, examine_spark
from sparkkeras.diagnostics.spark_facts import Request

real, inspection._LOAD = inspection._LOAD, {LOADS!r}
driver, _ = examine_driver()
for settings in json.loads(sys.argv[1]):
    if "spark.executor.resource.gpu.amount" in settings:
        inspection._LOAD = real
    builder = SparkSession.builder.master("local-cluster[1,1,1024]").config(map=settings)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    found = examine_spark(spark, driver, request=Request(start_seconds=float(settings["start_seconds"])))
    print(json.dumps([[each.status, each.message, each.remedy] for each in found]))
    spark.stop()
"""
"""Examines clusters with settings of the driver that only a new SparkContext takes."""


def found_on(clusters, **environment):
    """The findings on clusters with these settings, as lists."""
    command = [sys.executable, "-c", CLUSTERS, json.dumps(clusters)]
    given = clean_environment() | environment
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]


@pytest.mark.programs
def test_clusters_without_executors_with_those_that_start_later_and_with_gpus(tmp_path):
    script = tmp_path / "gpus"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["77"]}'\n""")
    script.chmod(0o755)
    unreachable = {"spark.driver.host": UNREACHABLE, "spark.driver.bindAddress": "0.0.0.0", "start_seconds": "3"}
    idle = {
        "spark.driver.host": "127.0.0.1",
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "start_seconds": "60",
    }
    gpus = {
        "spark.driver.host": "127.0.0.1",
        "spark.dynamicAllocation.enabled": "false",
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
        "start_seconds": "60",
    }
    not_reached, started_later, unseen = found_on([unreachable, idle, gpus])
    [(message, remedy)] = [(message, remedy) for status, message, remedy in not_reached if status == "error"]
    assert "none has registered" in message
    assert f"do not reach the driver at {UNREACHABLE}" in remedy
    assert not [message for status, message, _ in started_later if status == "error"]
    assert "1 slot of 1 core on 1 executor; dynamic allocation may start more" in [each[1] for each in started_later]
    [error] = [message for status, message, _ in unseen if status == "error"]
    assert "1 GPU (77), and tensorflow sees none." in error


@pytest.mark.programs
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_addresses_of_ipv6():
    java = "-Djava.net.preferIPv6Addresses=true"
    settings = {
        "spark.master": "local-cluster[2,1,1024]",
        "spark.driver.host": "[::1]",
        "spark.driver.bindAddress": "[::1]",
        "spark.executor.extraJavaOptions": java,
        "start_seconds": "60",
    }
    environment = {"SPARK_LOCAL_IP": "::1", "SPARK_PREFER_IPV6": "true"}
    [found] = found_on([settings], **environment, SPARK_SUBMIT_OPTS=f"{os.environ['SPARK_SUBMIT_OPTS']} {java}")
    assert not [message for status, message, _ in found if status == "error"]
    assert {"workers reach the driver", "workers reach each other"} <= {message for _, message, _ in found}


def doctor(*arguments, options=(), **environment):
    command = [sys.executable, *options, "-m", "sparkkeras", "doctor", "--master", "local[1]", *arguments]
    given = clean_environment() | environment
    return subprocess.run(command, env=given, cwd="/", capture_output=True, text=True, timeout=200)


@pytest.mark.programs
def test_the_command_on_a_good_set_up():
    settings = [
        "--conf=spark.python.daemon.module=sparkkeras.spark.daemon",
        "--conf=spark.python.unix.domain.socket.enabled=true",
    ]
    done = doctor("--json", "--strict", *settings)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), done.stdout
    assert "Spark" in [each["subject"] for each in found["findings"]]
    assert "log4j" not in done.stderr  # findings say what matters of Java's log


@pytest.mark.programs
def test_the_command_where_keras_is_missing(tmp_path):
    folder = only(tmp_path / "only", "numpy", "pyspark", "py4j", "pyarrow")
    done = doctor(options=["-S"], PYTHONPATH=f"{Path(__file__).parent.parent.parent}:{folder}")
    assert done.returncode == 1
    assert "keras is not installed on the driver." in done.stdout
    assert "1 slot of 1 core on 1 executor" in done.stdout  # it goes on
