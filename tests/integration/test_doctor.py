"""The doctor on set-ups that are broken on purpose: it finds and names each."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sparkkeras import diagnose
from sparkkeras.diagnostics.doctor import examine_driver, examine_spark
from sparkkeras.errors import ConfigurationError
from tests.models import classifier
from tests.processes import clean_environment

UNREACHABLE = "192.0.2.1"
"""An address that is reserved for documentation (RFC 5737)."""


@pytest.fixture(scope="module")
def driver():
    """The description of the driver."""
    described, findings = examine_driver()
    assert {finding.status for finding in findings} == {"ok"}
    return described


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
    assert "2 slots on 1 executor" in messages
    assert "workers reach the driver" in messages
    assert any("10 rows" in message for message in messages)


def test_workers_with_another_python(sc, examined, monkeypatch):
    """The driver reports another version, so that the workers reject it like a real one."""
    monkeypatch.setattr(sc, "pythonVer", "3.9")
    [error] = examined(sys.executable)
    assert error.startswith("workers: Spark's workers run another Python version than the driver")


def test_workers_whose_python_is_missing(examined):
    [error] = examined("/no/such/python")
    assert "/no/such/python" in error


def test_workers_without_keras(examined, python, tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    for name in ("numpy", "numpy.libs", "pyarrow", "pyarrow.libs"):
        for path in Path(sysconfig.get_paths()["platlib"]).glob(f"{name}*"):
            if not (only / path.name).exists():
                (only / path.name).symlink_to(path)
    errors = examined(python(f'export PYTHONPATH="$PYTHONPATH:{only}"', "-S"))
    assert [error for error in errors if error.endswith("lacks keras.")]
    assert not [error for error in errors if "numpy" in error]


def test_a_backend_that_does_not_load(examined, python, tmp_path):
    code = "raise ImportError('libtensorflow_framework.so.2: cannot open shared object file')"
    broken = package(tmp_path / "broken", "tensorflow", code)
    [error] = examined(python(f"export PYTHONPATH={broken}:$PYTHONPATH"))
    assert error.startswith("worker backend: tensorflow does not load on ")
    assert "ImportError: libtensorflow_framework.so.2" in error


def test_too_little_memory(examined, python):
    """As with ``spark.executor.pyspark.memory``."""
    errors = examined(python("ulimit -v 500000"))
    assert [error for error in errors if error.startswith("memory: ") and "488.3 MB available" in error]
    assert [error for error in errors if error.startswith("worker backend: tensorflow does not load on ")]


def test_a_full_disk(examined, python, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        [error] = examined(python(f"export SPARK_LOCAL_DIRS={folder}"))
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert error.startswith(f"disk: {folder} on ")
    assert "cannot be written to: No space left on device" in error


def test_a_port_that_is_in_use(examined):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [error] = examined(sys.executable, port=port)
    assert error == f"driver: no server can listen on 127.0.0.1:{port}: Address already in use."


def test_a_port_that_is_blocked_for_workers(examined, python, tmp_path):
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
    [error] = examined(python(f"export PYTHONPATH={tmp_path}/firewall:$PYTHONPATH"), port=port)
    assert f"does not reach the driver at 127.0.0.1:{port} (Connection refused)" in error


@pytest.mark.cluster
def test_one_executor_with_another_keras(examined, python, tmp_path):
    other = tmp_path / "other"
    metadata = other / "keras-3.12.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.12.9\n")
    first = f'mkdir {tmp_path}/first 2>/dev/null && export PYTHONPATH="{other}:$PYTHONPATH"'
    [error] = examined(python(first))
    assert error.startswith("worker packages: ")
    assert "has keras 3.12.9, and the driver has 3." in error


def doctor(*arguments, **environment):
    """Run the command like a user; returns the exit code, the findings, and what is on standard error."""
    command = [sys.executable, "-m", "sparkkeras", "doctor", "--json", *arguments]
    done = subprocess.run(
        command, env=clean_environment() | environment, cwd="/", capture_output=True, text=True, timeout=200
    )
    return done.returncode, json.loads(done.stdout)["findings"], done.stderr


def found(findings, status="error"):
    return [f"{each['subject']}: {each['message']}" for each in findings if each["status"] == status]


@pytest.mark.programs
def test_the_command_on_a_good_set_up():
    settings = [
        "--conf=spark.python.daemon.module=sparkkeras.spark.daemon",
        "--conf=spark.python.unix.domain.socket.enabled=true",
    ]
    code, findings, _ = doctor("--master", "local[1]", "--strict", *settings)
    assert (code, found(findings), found(findings, "warning")) == (0, [], [])
    code, findings, _ = doctor("--master", "local[1]", "--strict", "--conf=spark.python.worker.reuse=false")
    assert (code, found(findings)) == (1, [])
    assert any("spark.python.worker.reuse=false" in warning for warning in found(findings, "warning"))


@pytest.mark.programs
def test_a_wrong_java_home(tmp_path):
    code, findings, _ = doctor("--master", "local[1]", JAVA_HOME=str(tmp_path))
    assert (code, found(findings)) == (1, [f"Java: {tmp_path}/bin/java cannot be run: No such file or directory."])


@pytest.mark.programs
def test_a_driver_host_that_executors_do_not_reach():
    settings = [f"--conf=spark.driver.host={UNREACHABLE}", "--conf=spark.driver.bindAddress=0.0.0.0"]
    code, findings, _ = doctor("--master", "local-cluster[1,1,1024]", "--start-seconds=30", *settings)
    assert (code, found(findings)) == (1, ["executors: none has registered with the driver within 30 s."])
    [remedy] = [each["remedy"] for each in findings if each["status"] == "error"]
    assert f"executors do not reach the driver at {UNREACHABLE}" in remedy


@pytest.mark.programs
def test_a_gpu_that_the_backend_does_not_see(tmp_path):
    script = tmp_path / "gpus"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["77"]}'\n""")
    script.chmod(0o755)
    settings = {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
    }
    confs = [f"--conf={name}={value}" for name, value in settings.items()]
    code, findings, stderr = doctor("--master", "local-cluster[1,1,1024]", *confs)
    [error] = found(findings)
    assert code == 1, stderr
    assert "1 GPU (77), and tensorflow sees none." in error


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
    assert "on the driver, keras is not installed." in done.stdout
    assert "1 slot on 1 executor" in done.stdout  # it goes on


def test_nonsense_raises(sc):
    with pytest.raises(ConfigurationError, match=r"port=99999: expected a number from 0 to 65535"):
        diagnose(sc, port=99999)
    with pytest.raises(ConfigurationError, match=r"start_seconds=0"):
        diagnose(sc, start_seconds=0)
    with pytest.raises(ConfigurationError, match=r"spark='local': expected a SparkSession"):
        diagnose("local")
