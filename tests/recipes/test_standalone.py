"""The recipes for standalone clusters and Spark Connect, on two workers whose ``python3`` has no packages.

The environment for them is packed as a user does it. It has JAX, which is a fifth of the size of TensorFlow.
"""

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from tests.integration.standalone import HOSTS, Standalone
from tests.processes import clean_environment, free_port
from tests.rpc.test_transports import eventually

pytestmark = [pytest.mark.programs, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"
MODES = ("synchronous", "asynchronous", "allreduce")
IN_SYSTEM = sys.base_prefix in ("/usr", "/usr/local")
"""Whether this Python is that of the operating system, which cannot be packed."""


def run(*command, seconds=600, **variables):
    """Run a command as a user does who has activated the environment of this Python, with JAX as the backend."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = clean_environment() | {"PATH": path, "KERAS_BACKEND": "jax", "PYTHON": sys.executable} | variables
    del environment["PYSPARK_PYTHON"]
    command = [str(argument) for argument in command]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


def succeed(*command, **variables):
    done = run(*command, **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "environment.tar.gz"
    succeed("bash", RECIPES / "pack.sh", path, *(["--without-python"] if IN_SYSTEM else []))
    return path


@pytest.fixture(scope="module")
def properties(tmp_path_factory):
    """The settings of a recipe, with one worker on each of two small machines."""
    folder = tmp_path_factory.mktemp("settings")
    small = {
        "spark.executor.memory": "512m",
        "spark.cores.max": "2",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
    }

    def write(recipe, **more):
        path = folder / f"{recipe}.conf"
        given = small | {name.replace("_", "."): value for name, value in more.items()}
        added = "".join(f"\n{name} {value}" for name, value in given.items())
        path.write_text((RECIPES / recipe / "spark-defaults.conf").read_text() + added + "\n")
        return path

    return write


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A standalone cluster with the REST API, whose workers find a python3 without packages, and no file of ours."""
    folder = tmp_path_factory.mktemp("cluster")
    bare = folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    path = f"PATH={bare}/bin:/usr/bin:/bin"
    prefix = ["env", "--unset=PYTHONPATH", "--unset=PYSPARK_PYTHON", "--unset=KERAS_BACKEND", path]
    with Standalone(folder, prefixes=dict.fromkeys(HOSTS, prefix), cores=2, rest_port=free_port()) as standalone:
        yield standalone


def check_output(output, *, backend, workers=2):
    accuracy = float(re.search(r"Accuracy +([\d.]+)% of the rows", output)[1])
    assert accuracy > 90, output
    assert f"Backend     {backend}, {workers} workers" in output
    return re.findall(r"Worker +(\S+)", output)


def test_without_an_archive_the_error_names_the_python_of_the_workers(cluster, properties):
    # The daemon of the settings is a module of sparkkeras, which these workers lack.
    settings = ["--properties-file", properties("standalone", spark_python_daemon_module="pyspark.daemon")]
    done = run("spark-submit", "--master", cluster.url, *settings, RECIPES / "train.py")
    assert done.returncode == 1
    assert "Spark's workers lack keras and jax" in done.stdout  # spark-submit sends all output of Python there
    assert f"{cluster.folder}/bare/bin/python3" in done.stdout


@pytest.mark.parametrize("mode", MODES)
def test_client_mode_with_a_packed_environment(cluster, archive, properties, tmp_path, mode):
    submit = ["bash", RECIPES / "standalone" / "submit.sh", cluster.url, archive]
    saved = tmp_path / "model.keras"
    output = succeed(*submit, "--mode", mode, "--save", saved, PROPERTIES=str(properties("standalone")))
    pythons = check_output(output, backend=f"jax, {mode}")
    assert len(pythons) == 2  # one on each worker of the cluster
    for python in pythons:
        assert re.fullmatch(rf"{cluster.folder}/work/app-\S+/\d/environment/bin/python3\S*", python)
    assert saved.exists()


def test_the_rest_api_runs_the_driver_on_a_worker(cluster, archive, properties, tmp_path):
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "environment", filter="fully_trusted")
    api = f"http://127.0.0.1:{cluster.rest_port}"
    python = tmp_path / "environment" / "bin" / "python3"
    submit = ["bash", RECIPES / "standalone" / "submit-rest.sh", api, cluster.url, python]
    settings = {"PROPERTIES": str(properties("standalone"))}
    driver, state = succeed(*submit, RECIPES / "train.py", "--workers", "1", **settings).split()
    assert state == "FINISHED"
    output = (cluster.folder / "work" / driver / "stdout").read_text()
    (used,) = check_output(output, backend="jax, synchronous", workers=1)
    assert Path(used).resolve() == python.resolve()
    assert "127.0.0." in (cluster.folder / "work" / driver / "stderr").read_text()

    done = run(*submit, tmp_path / "missing.py", **settings)
    assert done.stdout.split()[1] in ("FAILED", "ERROR")
    assert done.returncode == 1


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A new environment with what a client of Spark Connect needs."""
    folder = tmp_path_factory.mktemp("client") / "environment"
    requirements = [f"{name}=={version(name.split('[')[0])}" for name in ("pyspark[connect]", "keras", "jax")]
    succeed("bash", RECIPES / "connect" / "make-client.sh", folder, *requirements)
    return folder


@pytest.fixture(scope="module")
def server(cluster, archive, properties, tmp_path_factory):
    """The port of a Connect server with the archive."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    settings = properties("connect", spark_connect_grpc_binding_port=str(port), spark_log_level="INFO")
    environment = clean_environment() | {"PROPERTIES": str(settings), "SPARK_LOG_DIR": str(folder)}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SPARK_PID_DIR": str(folder)}
    for name in ("PYTHONPATH", "PYSPARK_PYTHON", "KERAS_BACKEND"):
        environment.pop(name, None)
    command = ["bash", RECIPES / "connect" / "start-server.sh", cluster.url, archive]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        started = "Spark Connect server started"
        assert eventually(lambda: started in log.read_text(errors="replace"), 120), log.read_text(errors="replace")[-3000:]
        yield port
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
        process.wait()


@pytest.mark.parametrize(("mode", "sends"), [("synchronous", True), ("synchronous", False), ("allreduce", False)])
def test_spark_connect_from_another_environment(client, server, archive, mode, sends):
    program = [client / "bin" / "python3", RECIPES / "train.py", "--mode", mode]
    url = {"SPARK_REMOTE": f"sc://127.0.0.1:{server}", "PATH": "/usr/bin:/bin", "PYTHONPATH": ""}
    output = succeed(*program, *(["--archive", archive] if sends else []), **url)
    pythons = check_output(output, backend=f"jax, {mode}")
    assert f"Driver      {client}/bin/python3" in output
    assert len(pythons) == 2
    # In the folder of the session, or above it, where the server's archive is.
    inside = r"[\da-f-]{36}/environment" if sends else r"[\da-f-]{36}/\.\./environment"
    assert all(re.search(rf"/app-\S+/\d/{inside}/bin/python3", python) for python in pythons), pythons


def test_the_client_has_only_what_the_recipe_names(client):
    program = "import importlib.metadata as m; print([each.name for each in m.distributions()])"
    listed = succeed(client / "bin" / "python3", "-c", program, PYTHONPATH="")
    assert "sparkkeras" in listed
    assert not {"tensorflow", "flask", "hyperopt", "google-crc32c"} & set(re.findall(r"'([\w-]+)'", listed))
