"""The checks of the doctor, on descriptions of processes and of Spark that are made up."""

import dataclasses
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkkeras.diagnostics import checks, doctor, inspection
from sparkkeras.diagnostics.checks import Needs
from sparkkeras.diagnostics.findings import ERROR, OK, WARNING, Diagnosis, Finding
from sparkkeras.diagnostics.spark_facts import SparkFacts
from sparkkeras.spark.cluster import FASTER_SETTINGS
from tests.rpc.test_transports import has_ipv6

GB = 1 << 30
PACKAGES = {"keras": "3.15.1", "tensorflow": "2.21.0", "numpy": "2.4.6", "pyarrow": "26.0.1", "pyspark": "4.3.0"}
NO_NEEDS = Needs()
OTHER_DISK = {"folder": "/data", "free": 90 * GB, "error": ""}
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
        "cores": 4,
        "memory": 16 * GB,
        "memory_limit": None,
        "disk": {"folder": "/tmp", "free": 100 * GB, "error": ""},
        "reaches_driver": "",
        "unreached_workers": [],
        "unreached_executors": [],
        "loaded": LOADED,
    } | changed


def spark(*workers, master="spark://host:7077", is_remote=False, **settings):
    given = FASTER_SETTINGS | {name.replace("_", "."): value for name, value in settings.items()}
    return SparkFacts("4.3.0", master, is_remote, given, "17.0.15", len(workers), workers)


def nothing_lacks(_):
    return {}


def of_workers(*workers, requirements=nothing_lacks):
    return list(checks.check_workers(spark(*workers), described(), "tensorflow", requirements))


def of_resources(*workers, needs=NO_NEEDS, **options):
    return list(checks.check_resources(spark(*workers, **options), described(), needs))


def of_settings(needs=NO_NEEDS, most=None, **settings):
    return list(checks.check_settings(spark(described(), **settings), needs, most))


def check_problems(findings, *expected):
    """The problems have these statuses, and these words are in their messages."""
    found = [finding for finding in findings if finding.status != OK]
    assert [finding.status for finding in found] == [status for status, *_ in expected], found
    for finding, (_, *words) in zip(found, expected, strict=True):
        for word in words:
            assert word in finding.message


def test_a_good_set_up_has_no_problems():
    facts = spark(described(), described(executor=8))
    found = [
        *checks.check_driver(described(), "tensorflow", nothing_lacks),
        checks.check_java("17.0.15", ""),
        *checks.check_spark(facts, "4.3.0"),
        *checks.check_workers(facts, described(), "tensorflow", nothing_lacks),
        *checks.check_resources(facts, described(), Needs(50 << 20, GB)),
        *checks.check_settings(facts, Needs(50 << 20), GB),
    ]
    check_problems(found)
    assert Diagnosis(tuple(found)).summary() == "No problems found."
    messages = "\n".join(finding.message for finding in found)
    for words in (
        "2 slots of 1 core on 2 executors",
        "workers reach each other",
        "loads in up to 3.0 s on one (executor process 7) and one (executor process 8), and sees no GPU",
        "at least 100.0 GB free in /tmp on the driver and one",
        "4 on one, of which Spark's tasks use 2",
    ):
        assert words in messages


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        ("1.8.0_392", "", "1.8.0_392"),
        ("", "", "unknown"),
        ("", "/no/bin/java cannot be run", "/no/bin/java cannot be run"),
    ],
)
def test_java_is_too_old_or_missing(version, error, words):
    found = checks.check_java(version, error)
    check_problems([found], (ERROR, words))
    assert "JAVA_HOME" in found.remedy


def installed(*names, **versions):
    """Packages without those of these names, and in these versions."""
    return {name: version for name, version in (PACKAGES | versions).items() if name not in names}


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("keras", "3.14.0", ERROR),
        ("keras", "3.15.0", WARNING),
        ("numpy", "1.26.4", ERROR),
        ("numpy", "2.0.0", OK),
        ("pyspark", "4.1.0", ERROR),
    ],
)
def test_a_worker_with_another_version(package, version, status):
    found = of_workers(described(), described(executor=8, packages=installed(**{package: version})))
    words = f"{package} {version} on one (executor process 8)", f"{PACKAGES[package]} on the driver"
    check_problems(found, *([] if status == OK else [(status, *words)]))


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        # Once: not that it does not load, too.
        ([described(host="two", packages=installed("keras"), loaded={"error": "no"})], ("keras is not installed on two",)),
        ([described(packages=installed(pyarrow="10.0"))], ("pyarrow 10.0 is not supported on one",)),
        (
            [described(host=f"host{number}", packages=installed("numpy")) for number in range(6)],
            ("numpy", "host0, host1, host2 and 3 others"),
        ),
    ],
)
def test_packages_that_workers_lack(workers, words):
    found = of_workers(*workers, requirements=doctor.requirements("tensorflow"))
    check_problems(found, (ERROR, *words))
    assert "/usr/bin/python3 -m pip install '" in next(each.remedy for each in found if each.status == ERROR)


def test_packages_that_the_driver_lacks():
    lacks = doctor.requirements("tensorflow")(described(packages={**PACKAGES, "pandas": "3.0.0"}))
    assert lacks == {"pandas": ("3.0.0 is not supported", "pandas<3,>=2.2")}
    assert "jax" in doctor.requirements("jax")(described())
    found = list(checks.check_driver(described(), "theano", doctor.requirements("theano")))
    check_problems(found, (ERROR, "'theano'", "tensorflow, jax, torch"))
    assert not any("pip install" in finding.remedy for finding in found)


GPU = LOADED | {"gpus": ["GPU:0"]}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([described(), described(host="two", java="21.0.2")], [(WARNING, "Java 21.0.2 on two", "17.0.15 on the driver")]),
        ([described(java="17.0.1")], []),
        ([described(loaded={"error": "ImportError: libcudart.so"})], [(ERROR, "does not load on one", "libcudart.so")]),
        ([described(granted_gpus=["0", "1"], loaded=GPU)], [(ERROR, "on one 2 GPUs (0, 1)", "sees 1")]),
        ([described(granted_gpus=["0"], loaded=GPU)], []),
        ([described(loaded=GPU)], [(WARNING, "1 GPU on one", "does not distribute")]),
        (
            [
                described(
                    reaches_driver="10.0.0.1:77 (timed out)",
                    unreached_workers=["10.0.0.2:5 (refused)", "10.0.0.3:6 (refused)"],
                ),
                described(host="two", unreached_workers=["10.0.0.1:4 (refused)"]),
            ],
            [
                (ERROR, "the driver at 10.0.0.1:77 (timed out)", "from one: ", "searches and SparkRunner"),
                (ERROR, "workers on one and two", "3 other workers", "10.0.0.2:5 (refused)"),
            ],
        ),
        (
            [described(unreached_executors=["two:35010 (timed out)"]), described(host="two")],
            [(ERROR, "one cannot connect to 1 executor", "two:35010 (timed out)")],
        ),
    ],
)
def test_backends_gpus_and_connections_of_workers(workers, expected):
    found = of_workers(*workers)
    check_problems(found, *expected)
    reached = workers[0]["reaches_driver"] == ""
    assert ("workers reach the driver" in [finding.message for finding in found]) == reached


def test_connections_of_the_driver():
    facts = spark(described(reaches_driver="10.0.0.1:77 (timed out)"))
    for chosen in (False, True):
        facts = dataclasses.replace(facts, is_any_port=chosen)
        *_, found = checks.check_workers(facts, described(), "tensorflow", nothing_lacks)
        assert ("at random" in found.message, "--port" in found.remedy) == (chosen, chosen)
    facts = dataclasses.replace(spark(), unreached_executors=("one:35010 (timed out)", "two:35010 (timed out)"))
    found = checks.check_spark(facts, facts.version)
    check_problems(found, (ERROR, "the driver cannot connect to 2 executors", "one:35010 (timed out)"))
    assert "workers reach the driver" not in [finding.message for finding in of_workers(described(reaches_driver=None))]


FULL = {"folder": "/tmp", "free": 0, "error": "No space left on device"}
SMALL = {"folder": "/tmp/blockmgr-07a16de4-3a0c-4cdb-ba93-aa1a885b8fe1", "free": GB // 2, "error": ""}
FEW = [described(memory=GB)] * 2
LIMITED = [described(memory_limit=GB)] * 2
TWO_EXECUTORS = [described(executor=number, cores=1, memory=GB) for number in (7, 8)]


@pytest.mark.parametrize(
    ("workers", "needs", "expected"),
    [
        (
            [described(disk=FULL), described(host="two", disk=SMALL)],
            NO_NEEDS,
            [(ERROR, "/tmp on one", "No space left"), (WARNING, "/tmp on two", "512.0 MB")],
        ),
        (
            [described(), described(host="two")],
            Needs(0, 250 * GB),
            [(ERROR, "/tmp on one and two", "100.0 GB", "125.0 GB")],
        ),
        ([described(memory=GB // 10)], Needs(10 << 20, 0, "jax"), [(ERROR, "102.4 MB", "530.0 MB")]),
        ([described(memory=GB // 10)], Needs(10 << 20, 0, "?"), [(ERROR, "102.4 MB", "870.0 MB")]),
        (  # executors on one machine share it
            TWO_EXECUTORS,
            Needs(0, 150 * GB),
            [(ERROR, "/tmp on one", "150.0 GB"), (WARNING, "1 core on one", "use 2"), (WARNING, "1.0 GB", "2 x 840.0 MB")],
        ),
        (FEW, NO_NEEDS, [(WARNING, "1.0 GB available on one", "2 x 840.0 MB")]),
        (FEW, Needs(GB), [(ERROR, "1.0 GB available on one", "2 x 3.8 GB")]),
        ([described(memory=None)], Needs(GB), []),
        (LIMITED, NO_NEEDS, []),  # unlike the memory of a machine, its workers do not share it
        (LIMITED, Needs(GB), [(ERROR, "each worker on one", "1.0 GB", "3.8 GB")]),
    ],
)
def test_disks_cores_and_memory(workers, needs, expected):
    check_problems(of_resources(*workers, needs=needs), *expected)


def test_tasks_of_several_cores():
    check_problems(of_resources(*[described()] * 4, spark_task_cpus="2"), (WARNING, "4 cores on one", "use 8"))


def test_the_driver_s_disk_is_not_that_of_a_local_master_s_workers_twice():
    for master, disks in (("local[2]", 1), ("spark://host:7077", 2)):
        found = of_resources(described(disk=OTHER_DISK), master=master)
        assert sum(finding.subject == "disk" for finding in found) == disks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spark_speculation": "True"}, "spark.speculation=true"),
        ({"spark_dynamicAllocation_enabled": "true"}, "spark.dynamicAllocation.enabled=true"),
        ({"spark_python_worker_reuse": "false"}, "spark.python.worker.reuse=false"),
        ({"spark_python_unix_domain_socket_enabled": "false"}, "unix.domain.socket.enabled is false"),
        ({"spark_task_maxFailures": "1"}, "spark.task.maxFailures=1"),
        ({"spark_driver_host": "[::1]"}, "spark.driver.host=[::1]"),
        ({"spark_python_daemon_module": "pyspark.daemon"}, ""),  # a daemon of the user's
        ({"master": "k8s://host"}, "spark.executor.memoryOverhead is not set"),  # containers have limits
        ({"master": "k8s://host", "spark_executor_memoryOverhead": "2"}, ""),
        ({"master": "k8s://host", "spark_executor_memoryOverheadFactor": "2"}, ""),
        ({"master": "k8s://host", "spark_executor_pyspark_memory": "2"}, ""),
    ],
)
def test_settings_that_cost_or_break(settings, words):
    check_problems(of_settings(**settings), *([(WARNING, words)] if words else []))


def test_faster_settings_are_advised():
    facts = dataclasses.replace(spark(described()), settings={})
    found = checks.check_settings(facts, Needs(), None)
    assert [each.remedy for each in found] == [
        f"Start Spark with --conf {each}={FASTER_SETTINGS[each]}" for each in FASTER_SETTINGS
    ]
    bare = described()
    del bare["packages"]["sparkkeras"]  # Spark ships it, after the daemon has started
    [found] = checks.check_settings(dataclasses.replace(facts, workers=(bare,)), Needs(), None)
    assert "daemon" not in found.remedy


def test_results_that_are_larger_than_spark_allows():
    [found] = of_settings(Needs(3 << 20), 1 << 20)
    check_problems([found], (ERROR, "spark.driver.maxResultSize is 1.0 MB", "3.0 MB"))
    assert "spark.driver.maxResultSize=6m" in found.remedy
    for enough in (3 << 20, 0, None):  # 0: no limit
        check_problems(of_settings(Needs(3 << 20), enough))
    check_problems(of_settings(Needs(3 << 20), 1, master="local[2]"))


def test_spark_of_another_version_than_pyspark():
    for is_remote, status in ((False, ERROR), (True, WARNING)):
        check_problems(checks.check_spark(spark(described(), is_remote=is_remote), "4.1.1"), (status, "4.3.0", "4.1.1"))


def test_a_diagnosis_counts_prints_and_becomes_json():
    diagnosis = Diagnosis(
        (Finding(OK, "Java", "17"), Finding(WARNING, "disk", "is small.", "Free some."), Finding(ERROR, "Spark", "x"))
    )
    assert diagnosis.summary() == "Found 1 error and 1 warning."
    assert str(diagnosis).splitlines()[:3] == [
        "ok       Java             17",
        "warning  disk             is small.",
        "                          -> Free some.",
    ]
    given = {"status": "warning", "subject": "disk", "message": "is small.", "remedy": "Free some."}
    assert json.loads(diagnosis.to_json())["findings"][1] == given
    assert [Diagnosis(diagnosis.findings[:end]).is_ok(strict) for end in (1, 2, 3) for strict in (False, True)] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        pytest.param("::1", "[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")),
    ],
)
def test_a_server_is_reached_if_it_sends_its_token(host, shown):
    with inspection.serving(host, (0,), "token") as port:
        assert inspection.unreached(inspection.TokenServer(host, port, "token")) == ""
        other = inspection.unreached(inspection.TokenServer(host, port, "another"))
        assert other == f"{shown}:{port} (another server answers there)"
        with ThreadPoolExecutor(1) as pool:
            assert inspection.unreached_executors([(host, port)], pool) == []
    assert "refused" in inspection.unreached(inspection.TokenServer(host, port, "token"))
    with ThreadPoolExecutor(1) as pool:
        assert inspection.unreached_executors([(host, port)], pool) == [f"{shown}:{port} (Connection refused)"]


def test_a_port_is_free_again_when_a_server_has_ended():
    port = 0
    for _ in range(2):
        with inspection.serving("127.0.0.1", (port,), "token") as port:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                assert connection.makefile("rb").read() == b"token\n"  # until the server closes the connection


def test_too_few_ports_are_named_with_their_setting():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match=rf"no port from {taken} to {taken} .* is free .*spark.sparkkeras.worker.ports"):
            inspection.serving("127.0.0.1", range(taken, taken + 1), "token").__enter__()


def test_java_of_the_environment(tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    options = "#!/bin/sh\necho 'Picked up JAVA_TOOL_OPTIONS: -Da=\"b\"' >&2\n"
    java.write_text(f"{options}echo 'openjdk version \"21.0.2\" 2024' >&2\n")
    java.chmod(0o755)
    assert inspection.run_java({"JAVA_HOME": str(tmp_path)}) == ("21.0.2", "")
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
    monkeypatch.setattr(inspection, "_LOAD", "import time; time.sleep(60)")
    monkeypatch.setattr(inspection, "LOAD_SECONDS", 0.2)
    assert inspection.load_backend("jax") == {"error": "loading it takes more than 0 s"}


def test_a_folder_that_cannot_be_written(tmp_path):
    found = inspection.free_disk(str(tmp_path / "absent"))
    assert found["error"] == "No such file or directory"
    found = inspection.free_disk(str(tmp_path))
    assert found["error"] == ""
    assert found["free"] > 0
