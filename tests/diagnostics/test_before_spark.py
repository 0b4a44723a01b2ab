"""What the doctor finds before it starts Spark, and its command line."""

import json
import socket

import numpy as np
import pytest
from pyspark import SparkContext

from sparkkeras import diagnose
from sparkkeras.diagnostics import doctor, inspection, spark_facts
from sparkkeras.diagnostics.findings import ERROR, Finding
from sparkkeras.errors import ClusterError, ConfigurationError, ModelError

LOADS = """print('{"gpus": [], "seconds": 0.1, "works": true}')"""


@pytest.fixture(autouse=True)
def backend_that_loads(monkeypatch):
    monkeypatch.setattr(inspection, "_LOAD", LOADS)


def command(capsys, *arguments):
    """The exit code, and the parsed output of the command."""
    code = doctor.main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_wrong_java_home(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    code, found = command(capsys, "--master", "local[1]")
    assert (code, found["ok"]) == (1, False)
    [listed] = [each["message"] for each in found["findings"] if each["status"] == ERROR]
    assert f"{tmp_path}/bin/java cannot be run" in listed
    monkeypatch.setattr(SparkContext, "_gateway", None)
    [error] = diagnose().errors
    assert (error.subject, error.message) == ("Java", listed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "port=99999"),
        (["--host", "127.0.0.1:80"], "host='127.0.0.1:80'"),
        (["--start-seconds", "0"], "start_seconds=0.0"),
        (["--conf", "spark.executor.memory"], "expected NAME=VALUE"),
        (["--master", "local", "--remote", "sc://one"], "not allowed with"),
    ],
)
def test_arguments_that_make_no_sense(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["doctor", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [{"bind": 5}, {"start_seconds": 0}, {"spark": "local"}])
def test_arguments_of_diagnose_that_make_no_sense(arguments):
    [(name, value)] = arguments.items()
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}"):
        diagnose(**arguments)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(("kind", "name"), [("spark", "master"), ("sc", "remote")])
def test_a_server_that_does_not_answer(kind, name):
    url = f"{kind}://127.0.0.1:{closed_port()}"
    found = spark_facts.start_spark(**{"master": None, "remote": None, "settings": {}, "seconds": 1.0} | {name: url})
    assert f"{url.partition('//')[2]} does not answer (Connection refused)" in found.message
    assert "Check the address" in found.remedy


@pytest.mark.parametrize("url", ["loacl[2]", "spark://one", "spark://one:x"])
def test_an_address_that_spark_does_not_know(url):
    found = spark_facts.start_spark(url, None, {}, 1.0)
    assert (found.status, found.subject) == (ERROR, "Spark")
    assert found.message.startswith(f"cannot be started with {url}: ")
    assert ("is not host:port" in found.message) == (url[:8] == "spark://")


def test_addresses_that_only_spark_can_check_and_masters_of_which_one_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        masters = f"spark://127.0.0.1:{closed_port()},127.0.0.1:{server.getsockname()[1]}"
        for url in ("", "local[*,4]", "local-cluster[2,1,1024]", "yarn", masters):
            assert spark_facts._unreached_master(url) is None


@pytest.mark.parametrize(
    ("error", "log", "message", "remedy"),
    [
        ("JAVA_GATEWAY_EXITED", 'Exception in thread "main" org.a.B: bad master\n\tat x', "bad master", "settings"),
        (
            "An error occurred while x.\n: java.net.BindException: no\n\tat y",
            "",
            "java.net.BindException: no",
            "bindAddress",
        ),
        ("getSubject is not supported", "", "getSubject", "Java 17 or 21"),
        ("[PACKAGE_NOT_INSTALLED] grpcio must be installed", "", "[PACKAGE_NOT_INSTALLED]", "connect"),
        ("", "", "RuntimeError('')", "settings"),
    ],
)
def test_why_spark_does_not_start(error, log, message, remedy):
    found = spark_facts.not_started(RuntimeError(error), "local[2]", log)
    assert f"local[2]: {message}" in found.message
    assert remedy in found.remedy


def test_what_an_error_advises_is_the_remedy():
    def rejected(text):
        found = Finding.rejected("model", ModelError(text), "Pass another one.")
        return found.message, found.remedy

    assert rejected("the model is not compiled: call compile() first.") == (
        "the model is not compiled.",
        "Call compile() first.",
    )
    assert rejected("it failed: KeyError. Look at x. The traceback:\n\nTraceback") == ("it failed: KeyError.", "Look at x.")
    assert rejected("expected a model") == ("expected a model.", "Pass another one.")
    assert Finding.rejected("workers", ClusterError(), "Look.").message == "ClusterError()."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.zeros((100, 64)), np.zeros(100)), "100 rows, about 50.8 KB"),
        (({"a": np.zeros((10, 2))}, [np.zeros(10)]), "10 rows, about 240 bytes"),
        (lambda worker: None, "a function that reads batches, which are not stored"),
        ((np.zeros(3), np.zeros(2)), "arrays of 2 and 3 rows."),
        ([[1.0, 2.0]], "list [[1.0, 2.0]]."),
        (np.zeros((0, 3)), "has no rows."),
    ],
)
def test_data_in_this_process(data, message):
    finding, size = doctor._check_data(data, None)
    assert (finding.message, finding.status == ERROR) == (message, message.endswith("."))
    assert bool(size) == ("about" in message)
    assert bool(finding.remedy) == (finding.status == ERROR)


def group(used, limit="max", cached=0, **others):
    return {"memory.max": limit, "memory.current": str(used), "memory.stat": f"inactive_file {cached}\nanon 1\n", **others}


@pytest.mark.parametrize(
    ("membership", "folders", "memory", "cores"),
    [
        ("0::/\n", {"": group(10, "100", cached=5), "/other": group(1, "2")}, 95, 8),
        (
            "0::/pod/one\n",
            {"": {}, "/pod": group(10, "50"), "/pod/one": group(10, "30", **{"cpu.max": "150000 100000"})},
            20,
            2,
        ),
        ("0::/pod/one\n", {"/pod": group(10, "50", **{"cpu.max": "100000 100000"}), "/pod/one": group(10)}, 40, 1),
        (
            "9:name=systemd:/x\n4:cpu,memory:/one\n",
            {
                "/memory/one": {
                    "memory.limit_in_bytes": "70",
                    "memory.usage_in_bytes": "20",
                    "memory.stat": "total_inactive_file 5",
                }
            },
            55,
            8,
        ),
    ],
)
def test_limits_of_the_control_groups_around_a_process(monkeypatch, membership, folders, memory, cores):
    files = {f"/sys/fs/cgroup{folder}/{name}": text for folder, of in folders.items() for name, text in of.items()}
    files |= {"/proc/self/cgroup": membership, "/proc/meminfo": "MemFree: 1 kB\n"}
    monkeypatch.setattr(inspection, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(inspection, "_available_on_machine", lambda: [1000])
    monkeypatch.setattr(inspection.os, "sched_getaffinity", lambda process: range(8), raising=False)
    assert (inspection.available_memory(), inspection.cores()) == (memory, cores)
