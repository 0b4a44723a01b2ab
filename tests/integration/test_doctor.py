"""The doctor on set-ups that are broken on purpose: it finds and names each."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sparkkeras.diagnostics import inspection
from sparkkeras.diagnostics.doctor import examine_driver, examine_spark
from sparkkeras.diagnostics.spark_facts import Request
from tests.models import classifier
from tests.processes import clean_environment
from tests.rpc.test_transports import has_ipv6

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
        path = tmp_path / f"python-{len(list(tmp_path.iterdir()))}"
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

    def examine(python, **options):
        monkeypatch.setattr(sc, "pythonExec", python)
        findings = list(examine_spark(spark, driver, **options))
        return [f"{finding.subject}: {finding.message}" for finding in findings if finding.status == "error"]

    return examine


def package(folder, name, code):
    """Write a package to a folder that comes first on the path of a worker."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    return folder


def test_a_good_set_up(sc, spark, driver):
    findings = list(examine_spark(spark, driver, classifier(), sc.parallelize(range(10), 2)))
    assert {finding.status for finding in findings} == {"ok"}
    messages = [finding.message for finding in findings]
    assert "2 slots of 1 core on 1 executor" in messages
    assert "workers reach the driver" in messages
    assert any("10 rows" in message for message in messages)


def test_workers_with_another_python(sc, examined, monkeypatch):
    """The driver reports another version, so that the workers reject it like a real one."""
    monkeypatch.setattr(sc, "pythonVer", "3.9")
    [error] = examined(sys.executable)
    assert error.startswith("workers: Spark's workers run another Python version than the driver")


def test_workers_without_keras(loads, examined, python, tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    for name in ("numpy", "numpy.libs", "pyarrow", "pyarrow.libs"):
        for path in Path(sysconfig.get_paths()["platlib"]).glob(f"{name}*"):
            if not (only / path.name).exists():
                (only / path.name).symlink_to(path)
    errors = examined(python(f'export PYTHONPATH="$PYTHONPATH:{only}"', "-S"))
    assert [error for error in errors if "keras is not installed on " in error]
    assert not [error for error in errors if "numpy" in error]


def test_workers_without_sparkkeras(loads, examined, python, tmp_path):
    folder = package(tmp_path / "other", "sparkkeras", "")
    package(folder / "sparkkeras", "spark", "")
    (folder / "sparkkeras" / "spark" / "daemon.py").write_text("from pyspark.daemon import manager\n\nmanager()\n")
    assert examined(python(f"export PYTHONPATH={folder}:$PYTHONPATH", "-P")) == []


def test_too_little_memory(examined, python):
    """As with ``spark.executor.pyspark.memory``."""
    errors = examined(python("ulimit -v 500000"))
    assert [
        error for error in errors if error.startswith("memory: ") and "may use 488.3 MB, and needs about 840.0 MB" in error
    ]
    assert [error for error in errors if error.startswith("worker backend: tensorflow does not load on ")]


def test_a_port_that_is_in_use(loads, examined):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [error] = examined(sys.executable, request=Request(port=port))
    assert error == f"driver: no server can listen on 127.0.0.1:{port}: Address already in use."


def test_a_port_that_is_blocked_for_workers(loads, examined, python, tmp_path):
    """The Python of the workers refuses connections to it, like a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "firewall").mkdir()
    (tmp_path / "firewall" / "sitecustomize.py").write_text(
        "import errno, socket\n"
        "connect = socket.socket.connect\n"
        "def checked(self, address):\n"
        f"    if isinstance(address, tuple) and address[1] == {port}:\n"
        "        raise ConnectionRefusedError(errno.ECONNREFUSED, 'Connection refused')\n"
        "    connect(self, address)\n"
        "socket.socket.connect = checked\n"
    )
    [error] = examined(python(f"export PYTHONPATH={tmp_path}/firewall:$PYTHONPATH"), request=Request(port=port))
    assert f"the driver at 127.0.0.1:{port} (Connection refused) cannot be reached from " in error


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
    assert message == "none has registered with the driver within 3 s."
    assert f"executors do not reach the driver at {UNREACHABLE}" in remedy
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


@pytest.mark.programs
def test_the_command_on_a_good_set_up():
    settings = [
        "--conf=spark.python.daemon.module=sparkkeras.spark.daemon",
        "--conf=spark.python.unix.domain.socket.enabled=true",
    ]
    command = [sys.executable, "-m", "sparkkeras", "doctor", "--json", "--strict", "--master", "local[1]", *settings]
    done = subprocess.run(command, env=clean_environment(), cwd="/", capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), done.stdout
    assert "Spark" in [each["subject"] for each in found["findings"]]
    assert "log4j" not in done.stderr  # findings say what matters of Java's log


@pytest.mark.programs
def test_the_command_where_keras_is_missing(tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    for name in ("numpy", "pyspark", "py4j", "pyarrow"):
        for path in Path(sysconfig.get_paths()["platlib"]).glob(f"{name}*"):
            (only / path.name).symlink_to(path)
    root = Path(__file__).parent.parent.parent
    environment = clean_environment() | {"PYTHONPATH": f"{root}:{only}"}
    command = [sys.executable, "-S", "-m", "sparkkeras", "doctor", "--master", "local[1]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "keras is not installed on the driver." in done.stdout
    assert "1 slot of 1 core on 1 executor" in done.stdout  # it goes on
