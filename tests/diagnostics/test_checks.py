"""The checks of the doctor, on descriptions of processes and of Spark that are made up."""

import dataclasses
import json

import pytest

from sparkkeras.diagnostics import checks, doctor, inspection
from sparkkeras.diagnostics.checks import Needs
from sparkkeras.diagnostics.findings import ERROR, OK, WARNING, Diagnosis, Finding
from sparkkeras.diagnostics.spark_facts import SparkFacts
from sparkkeras.spark.cluster import FASTER_SETTINGS

GB = 1 << 30
PACKAGES = {"keras": "3.15.1", "tensorflow": "2.21.0", "numpy": "2.4.6", "pyarrow": "26.0.1", "pyspark": "4.3.0"}
LOADED = {"backend": "tensorflow", "gpus": [], "seconds": 3.0}


def described(host="one", executor=7, packages=PACKAGES, **changed):
    return {
        "host": host,
        "executor": executor,
        "python": "/usr/bin/python3",
        "version": "3.11.7",
        "java": "17.0.15",
        "packages": {"sparkkeras": "0.1.0", **packages},
        "granted_gpus": [],
        "memory": 16 * GB,
        "disk": {"folder": "/tmp", "free": 100 * GB, "error": ""},
        "reaches_driver": "",
        "unreached_workers": [],
        "loaded": LOADED,
    } | changed


def spark(*workers, master="spark://host:7077", is_remote=False, **settings):
    given = FASTER_SETTINGS | {name.replace("_", "."): value for name, value in settings.items()}
    return SparkFacts("4.3.0", master, is_remote, given, len(workers), workers)


def nothing_wanted(_):
    return []


def of_workers(*workers, wanted=nothing_wanted):
    return list(checks.check_workers(spark(*workers), described(), "tensorflow", wanted))


def problems(findings):
    return [(finding.status, finding.message) for finding in findings if finding.status != OK]


def test_a_good_set_up_has_no_problems():
    facts = spark(described(), described(executor=8))
    found = [
        *checks.check_driver(described(), "tensorflow", nothing_wanted),
        checks.check_java("17.0.15", ""),
        *checks.check_spark(facts, "4.3.0"),
        *checks.check_workers(facts, described(), "tensorflow", nothing_wanted),
        *checks.check_resources(facts, described(), Needs(50 << 20, GB)),
        *checks.check_settings(facts, Needs(50 << 20), GB),
    ]
    assert problems(found) == []
    assert "2 slots on 2 executors" in [finding.message for finding in found]
    assert "workers reach each other" in [finding.message for finding in found]
    assert Diagnosis(tuple(found)).summary() == "No problems found."


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        ("11.0.2", "", "version 11.0.2; Spark needs 17 or later."),
        ("1.8.0_392", "", "version 1.8.0_392; Spark needs 17 or later."),
        ("", "", "version ; Spark needs 17 or later."),
        (
            "",
            "/no/bin/java cannot be run: No such file or directory",
            "/no/bin/java cannot be run: No such file or directory.",
        ),
    ],
)
def test_java_is_too_old_or_missing(version, error, message):
    found = checks.check_java(version, error)
    assert (found.status, found.message) == (ERROR, message)
    assert "JAVA_HOME" in found.remedy


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("keras", "3.14.0", ERROR),
        ("keras", "3.15.0", WARNING),
        ("tensorflow", "2.20.0", WARNING),
        ("numpy", "1.26.4", ERROR),
        ("numpy", "2.0.0", OK),
        ("pyspark", "4.1.0", ERROR),
        ("pyarrow", "20.0.0", OK),
    ],
)
def test_a_worker_with_another_version(package, version, status):
    found = of_workers(described(), described(executor=8, packages=PACKAGES | {package: version}))
    message = f"one (executor process 8) has {package} {version}, and the driver has {PACKAGES[package]}."
    assert problems(found) == ([] if status == OK else [(status, message)])


def test_a_worker_without_keras():
    lacking = {name: version for name, version in PACKAGES.items() if name != "keras"}
    found = of_workers(described(host="two", packages=lacking, loaded={"error": "No module named 'keras'"}))
    assert problems(found) == [(ERROR, "two lacks keras.")]


def test_a_version_that_is_not_supported():
    found = doctor.unsupported("tensorflow")(described(packages=PACKAGES | {"keras": "3.13.1", "numpy": "1.20.0"}))
    assert [each.split(" is ")[0] for each in found] == ["keras 3.13.1", "numpy 1.20.0"]
    assert doctor.unsupported("jax")(described()) == ["jax is not installed"]
    wanted = doctor.unsupported("tensorflow")
    worker = described(packages=PACKAGES | {"pyarrow": "10.0"})
    assert "pyarrow 10.0 is not supported" in problems(of_workers(worker, wanted=wanted))[0][1]


def test_a_backend_that_does_not_load():
    found = of_workers(described(loaded={"error": "ImportError: libcudart.so"}))
    assert problems(found) == [(ERROR, "tensorflow does not load on one: ImportError: libcudart.so.")]


def test_gpus_that_the_backend_does_not_see():
    found = of_workers(described(granted_gpus=["0", "1"], loaded=LOADED | {"gpus": ["GPU:0"]}))
    assert problems(found) == [(ERROR, "Spark grants a task on one 2 GPUs (0, 1), and tensorflow sees 1.")]
    found = of_workers(described(granted_gpus=["0"]))
    assert problems(found) == [(ERROR, "Spark grants a task on one 1 GPU (0), and tensorflow sees none.")]
    assert problems(of_workers(described(granted_gpus=["0"], loaded=LOADED | {"gpus": ["GPU:0"]}))) == []


def test_gpus_that_spark_does_not_distribute():
    found = of_workers(described(loaded=LOADED | {"gpus": ["GPU:0"]}))
    assert problems(found)[0][0] == WARNING
    assert "1 GPU on one, which Spark does not distribute" in problems(found)[0][1]


def test_connections_that_fail():
    found = of_workers(
        described(reaches_driver="10.0.0.1:77 (timed out)", unreached_workers=["10.0.0.2:5 (refused)"]),
        described(host="two"),
    )
    assert [message.split(":")[0] for _, message in problems(found)] == [
        "one does not reach the driver at 10.0.0.1",
        "one does not reach the worker at 10.0.0.2",
    ]


def test_disk():
    full = {"folder": "/tmp", "free": 0, "error": "No space left on device"}
    small = {"folder": "/tmp", "free": GB // 2, "error": ""}
    facts = spark(described(disk=full), described(host="two", disk=small))
    found = list(checks.check_resources(facts, described(), Needs()))
    assert problems(found) == [
        (ERROR, "/tmp on one cannot be written to: No space left on device."),
        (WARNING, "/tmp on two has only 512.0 MB free."),
    ]
    found = list(checks.check_resources(spark(described(), described(host="two")), described(), Needs(0, 250 * GB)))
    assert problems(found) == [
        (ERROR, f"/tmp on {name} has 100.0 GB free, and its rows need about 125.0 GB.") for name in ("one", "two")
    ]


def test_memory():
    few = spark(*[described(memory=GB)] * 2)
    assert problems(checks.check_resources(few, described(), Needs())) == [
        (WARNING, "one has 1.0 GB available, and 2 workers there need about 1.6 GB (840.0 MB each).")
    ]
    [(status, message)] = problems(checks.check_resources(few, described(), Needs(GB)))
    assert (status, message.rpartition(", ")[2]) == (ERROR, "and 2 workers there need about 7.6 GB (3.8 GB each).")
    assert problems(checks.check_resources(spark(described(memory=None)), described(), Needs(GB))) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spark_speculation": "true"}, "spark.speculation=true"),
        ({"spark_dynamicAllocation_enabled": "true"}, "spark.dynamicAllocation.enabled=true"),
        ({"spark_python_worker_reuse": "false"}, "spark.python.worker.reuse=false"),
        ({"spark_task_maxFailures": "1"}, "spark.task.maxFailures=1"),
        ({"spark_driver_host": "localhost"}, "spark.driver.host=localhost"),
        ({"spark_python_daemon_module": "pyspark.daemon"}, ""),
    ],
)
def test_settings_that_cost_or_break(settings, message):
    found = list(checks.check_settings(spark(described(), **settings), Needs(), None))
    if message:
        assert [(finding.status, finding.message.startswith(message)) for finding in found] == [(WARNING, True)]
    else:
        assert problems(found) == []  # a daemon of the user's


def test_faster_settings_are_advised():
    facts = dataclasses.replace(spark(described()), settings={})
    [found] = checks.check_settings(facts, Needs(), None)
    assert all(f"{name}={value}" in found.remedy for name, value in FASTER_SETTINGS.items())
    bare = described()
    del bare["packages"]["sparkkeras"]  # Spark ships it, after the daemon has started
    [found] = checks.check_settings(dataclasses.replace(facts, workers=(bare,)), Needs(), None)
    assert "daemon" not in found.remedy


def test_results_that_are_larger_than_spark_allows():
    [found] = checks.check_settings(spark(described()), Needs(3 << 20), 1 << 20)
    assert (found.status, found.message) == (
        ERROR,
        "spark.driver.maxResultSize is 1.0 MB, and the model's state has 3.0 MB.",
    )
    assert "spark.driver.maxResultSize=6m" in found.remedy


def test_containers_need_memory_outside_of_java():
    found = list(checks.check_settings(spark(described(), master="k8s://host"), Needs(), None))
    assert "spark.executor.memoryOverhead is not set: k8s ends executors" in problems(found)[0][1]
    given = {"spark_executor_memoryOverhead": "2g"}
    assert problems(checks.check_settings(spark(described(), master="k8s://host", **given), Needs(), None)) == []


def test_spark_of_another_version_than_pyspark():
    found = list(checks.check_spark(spark(described()), "4.1.1"))
    assert problems(found) == [(ERROR, "4.3.0, but the driver's pyspark is 4.1.1.")]


def test_a_diagnosis_counts_prints_and_becomes_json():
    diagnosis = Diagnosis(
        (Finding(OK, "Java", "17"), Finding(WARNING, "disk", "is small.", "Free some."), Finding(ERROR, "Spark", "x"))
    )
    assert diagnosis.summary() == "Found 1 error and 1 warning."
    assert str(diagnosis).splitlines() == [
        "ok       Java             17",
        "warning  disk             is small.",
        "                          -> Free some.",
        "error    Spark            x",
        "",
        "Found 1 error and 1 warning.",
    ]
    assert json.loads(diagnosis.to_json())["findings"][1] == {
        "status": "warning",
        "subject": "disk",
        "message": "is small.",
        "remedy": "Free some.",
    }
    assert [Diagnosis(diagnosis.findings[:end]).is_ok(strict) for end in (1, 2, 3) for strict in (False, True)] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_server_is_reached_if_it_sends_its_token():
    with inspection.serving("127.0.0.1", 0, "token") as port:
        assert inspection.unreached(inspection.Server("127.0.0.1", port, "token")) == ""
        other = inspection.unreached(inspection.Server("127.0.0.1", port, "another"))
        assert other == f"127.0.0.1:{port} (another server answers there)"
    assert "refused" in inspection.unreached(inspection.Server("127.0.0.1", port, "token"))


def test_java_of_the_environment(tmp_path):
    version, error = inspection.run_java({"JAVA_HOME": str(tmp_path)})
    assert (version, error) == ("", f"{tmp_path}/bin/java cannot be run: No such file or directory")
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019' >&2\n")
    java.chmod(0o755)
    assert inspection.run_java({"JAVA_HOME": str(tmp_path)}) == ("11.0.2", "")
    java.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    assert inspection.run_java({"JAVA_HOME": str(tmp_path)}) == ("", f"{java} exits with 3: broken")


def test_the_backend_of_keras_s_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert inspection.configured_backend() == "tensorflow"
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    assert inspection.configured_backend() == "jax"
    (tmp_path / "keras.json").write_text("damaged")
    assert inspection.configured_backend() == "tensorflow"


def test_a_process_that_crashes_while_it_loads(monkeypatch):
    monkeypatch.setattr(inspection, "_LOAD", "import os; os.kill(os.getpid(), 9)")
    assert inspection.load_backend("jax") == {"error": "the process that loads it was ended by SIGKILL"}
    monkeypatch.setattr(inspection, "_LOAD", "print('x'); raise ImportError('no symbol')")
    assert inspection.load_backend("jax") == {"error": "ImportError: no symbol"}
    monkeypatch.setattr(inspection, "_LOAD", "import time; time.sleep(60)")
    monkeypatch.setattr(inspection, "LOAD_SECONDS", 0.2)
    assert inspection.load_backend("jax") == {"error": "loading it takes more than 0 s"}


def test_a_folder_that_cannot_be_written(tmp_path):
    found = inspection.free_disk(str(tmp_path / "absent"))
    assert found["error"] == "No such file or directory"
    found = inspection.free_disk(str(tmp_path))
    assert found["error"] == ""
    assert found["free"] > 0
