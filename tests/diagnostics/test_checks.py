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


def problems(findings):
    return [(finding.status, finding.message) for finding in findings if finding.status != OK]


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
    assert problems(found) == []
    messages = [finding.message for finding in found]
    assert "2 slots of 1 core on 2 executors" in messages
    assert "workers reach each other" in messages
    assert (
        "tensorflow loads in up to 3.0 s on one (executor process 7) and one (executor process 8), and sees no GPU"
        in messages
    )
    assert "at least 100.0 GB free in /tmp on the driver and one" in messages
    assert "4 on one, of which Spark's tasks use 2" in messages
    assert Diagnosis(tuple(found)).summary() == "No problems found."


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        ("1.8.0_392", "", "its version is 1.8.0_392; Spark needs 17 or later."),
        ("", "", "its version is unknown; Spark needs 17 or later."),
        ("", "/no/bin/java cannot be run", "/no/bin/java cannot be run."),
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
        ("numpy", "1.26.4", ERROR),
        ("numpy", "2.0.0", OK),
        ("pyspark", "4.1.0", ERROR),
    ],
)
def test_a_worker_with_another_version(package, version, status):
    found = of_workers(described(), described(executor=8, packages=PACKAGES | {package: version}))
    message = f"{package} {version} on one (executor process 8), and {PACKAGES[package]} on the driver."
    assert problems(found) == ([] if status == OK else [(status, message)])


def test_a_worker_without_keras():
    lacking = {name: version for name, version in PACKAGES.items() if name != "keras"}
    worker = described(host="two", packages=lacking, loaded={"error": "No module named 'keras'"})
    found = of_workers(worker, requirements=doctor.requirements("tensorflow"))
    assert problems(found) == [(ERROR, "keras is not installed on two.")]  # once: not that it does not load, too
    assert "/usr/bin/python3 -m pip install 'keras" in found[1].remedy


def test_a_backend_that_does_not_exist():
    found = list(checks.check_driver(described(), "theano", doctor.requirements("theano")))
    assert problems(found) == [
        (ERROR, "Keras's backend is set to 'theano', and training works with tensorflow, jax, torch.")
    ]
    assert not any("pip install" in finding.remedy for finding in found)


def test_what_executors_have_in_common_is_one_line():
    lacking = {name: version for name, version in PACKAGES.items() if name != "numpy"}
    workers = [described(host=f"host{number}", packages=lacking) for number in range(6)]
    found = of_workers(*workers, requirements=doctor.requirements("tensorflow"))
    assert problems(found) == [(ERROR, "numpy is not installed on host0, host1, host2 and 3 others.")]


def test_a_version_that_is_not_supported():
    lacks = doctor.requirements("tensorflow")
    assert lacks(described(packages={**PACKAGES, "pandas": "3.0.0"})) == {
        "pandas": ("3.0.0 is not supported", "pandas<3,>=2.2")
    }
    assert "jax" in doctor.requirements("jax")(described())
    worker = described(packages=PACKAGES | {"pyarrow": "10.0"})
    assert problems(of_workers(worker, requirements=lacks)) == [(ERROR, "pyarrow 10.0 is not supported on one.")]


def test_workers_with_another_java():
    found = of_workers(described(), described(host="two", java="21.0.2"))
    assert problems(found) == [(WARNING, "Java 21.0.2 on two, and 17.0.15 on the driver.")]
    assert problems(of_workers(described(java="17.0.1"))) == []


def test_a_backend_that_does_not_load():
    found = of_workers(described(loaded={"error": "ImportError: libcudart.so"}))
    assert problems(found) == [(ERROR, "tensorflow does not load on one: ImportError: libcudart.so.")]


def test_gpus_that_the_backend_does_not_see():
    found = of_workers(described(granted_gpus=["0", "1"], loaded=LOADED | {"gpus": ["GPU:0"]}))
    assert problems(found) == [(ERROR, "Spark grants a task on one 2 GPUs (0, 1), and tensorflow sees 1.")]
    assert problems(of_workers(described(granted_gpus=["0"], loaded=LOADED | {"gpus": ["GPU:0"]}))) == []


def test_gpus_that_spark_does_not_distribute():
    found = of_workers(described(loaded=LOADED | {"gpus": ["GPU:0"]}))
    assert problems(found)[0][0] == WARNING
    assert "1 GPU on one, which Spark does not distribute" in problems(found)[0][1]


def test_connections_that_fail():
    found = of_workers(
        described(
            reaches_driver="10.0.0.1:77 (timed out)", unreached_workers=["10.0.0.2:5 (refused)", "10.0.0.3:6 (refused)"]
        ),
        described(host="two", unreached_workers=["10.0.0.1:4 (refused)"]),
    )
    assert [message.split(": ")[0] for _, message in problems(found)] == [
        "the driver at 10.0.0.1:77 (timed out) cannot be reached from one",
        "workers on one and two cannot connect to 3 other workers, such as the one at 10.0.0.2:5 (refused)",
    ]
    assert problems(found)[0][1].endswith(": asynchronous and all-reduce training, searches and SparkRunner would fail.")
    assert "workers reach the driver" not in [finding.message for finding in found]
    assert "workers reach the driver" not in [finding.message for finding in of_workers(described(reaches_driver=None))]


def test_a_port_of_the_driver_that_was_chosen_at_random():
    facts = spark(described(reaches_driver="10.0.0.1:77 (timed out)"))
    for chosen in (False, True):
        facts = dataclasses.replace(facts, is_any_port=chosen)
        *_, found = checks.check_workers(facts, described(), "tensorflow", nothing_lacks)
        assert ("at random" in found.message, "--port" in found.remedy) == (chosen, chosen)


def test_executors_that_are_not_reached_on_the_port_of_spark():
    found = of_workers(described(unreached_executors=["two:35010 (timed out)"]), described(host="two"))
    assert problems(found) == [
        (
            ERROR,
            "one cannot connect to 1 executor, such as the one at two:35010 (timed out): Spark hangs or fails where it "
            "sends data between them.",
        )
    ]
    facts = dataclasses.replace(spark(), unreached_executors=("one:35010 (timed out)", "two:35010 (timed out)"))
    ((_, message),) = problems(list(checks.check_spark(facts, facts.version)))
    assert message.startswith("the driver cannot connect to 2 executors, such as the one at one:35010 (timed out)")


def of_resources(*workers, needs=NO_NEEDS, **options):
    return problems(checks.check_resources(spark(*workers, **options), described(), needs))


def test_disk():
    full = {"folder": "/tmp", "free": 0, "error": "No space left on device"}
    small = {"folder": "/tmp/blockmgr-07a16de4-3a0c-4cdb-ba93-aa1a885b8fe1", "free": GB // 2, "error": ""}
    assert of_resources(described(disk=full), described(host="two", disk=small)) == [
        (ERROR, "/tmp on one cannot be written to: No space left on device."),
        (WARNING, "/tmp on two has only 512.0 MB free."),
    ]
    assert of_resources(described(), described(host="two"), needs=Needs(0, 250 * GB)) == [
        (ERROR, "/tmp on one and two has 100.0 GB free, and its rows need about 125.0 GB.")
    ]


@pytest.mark.parametrize(("backend", "needed"), [("jax", "530.0"), ("?", "870.0")])
def test_what_a_worker_needs_depends_on_the_backend(backend, needed):
    found = of_resources(described(memory=GB // 10), needs=Needs(10 << 20, 0, backend))
    assert found == [(ERROR, f"102.4 MB available on one; 1 worker needs about {needed} MB.")]


def test_executors_on_one_machine_share_it():
    workers = [described(executor=number, cores=1, memory=GB) for number in (7, 8)]
    assert of_resources(*workers, needs=Needs(0, 150 * GB)) == [
        (ERROR, "/tmp on one has 100.0 GB free, and its rows need about 150.0 GB."),
        (WARNING, "1 core on one, where Spark's tasks use 2 at the same time."),
        (WARNING, "1.0 GB available on one; 2 workers need about 2 x 840.0 MB."),
    ]


def test_the_driver_s_disk_is_not_that_of_a_local_master_s_workers_twice():
    for master, disks in (("local[2]", 1), ("spark://host:7077", 2)):
        found = checks.check_resources(spark(described(disk=OTHER_DISK), master=master), described(), Needs())
        assert sum(finding.subject == "disk" for finding in found) == disks


def test_cores():
    assert of_resources(*[described()] * 4, spark_task_cpus="2") == [
        (WARNING, "4 cores on one, where Spark's tasks use 8 at the same time.")
    ]


def test_memory():
    few = [described(memory=GB)] * 2
    assert of_resources(*few) == [(WARNING, "1.0 GB available on one; 2 workers need about 2 x 840.0 MB.")]
    assert of_resources(*few, needs=Needs(GB)) == [(ERROR, "1.0 GB available on one; 2 workers need about 2 x 3.8 GB.")]
    assert of_resources(described(memory=None), needs=Needs(GB)) == []


def test_memory_that_each_worker_is_limited_to():
    """Unlike the memory of a machine, its workers do not share it."""
    assert of_resources(*[described(memory_limit=GB)] * 2) == []
    assert of_resources(*[described(memory_limit=GB)] * 2, needs=Needs(GB)) == [
        (ERROR, "each worker on one may use 1.0 GB, and needs about 3.8 GB.")
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spark_speculation": "True"}, "spark.speculation=true"),
        ({"spark_dynamicAllocation_enabled": "true"}, "spark.dynamicAllocation.enabled=true"),
        ({"spark_python_worker_reuse": "false"}, "spark.python.worker.reuse=false"),
        ({"spark_task_maxFailures": "1"}, "spark.task.maxFailures=1"),
        ({"spark_driver_host": "[::1]"}, "spark.driver.host=[::1]"),
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
    found = checks.check_settings(facts, Needs(), None)
    assert [each.remedy for each in found] == [
        f"Start Spark with --conf {each}={FASTER_SETTINGS[each]}" for each in FASTER_SETTINGS
    ]
    off = spark(described(), spark_python_unix_domain_socket_enabled="false")
    assert problems(checks.check_settings(off, Needs(), None))[0][1].startswith(
        "spark.python.unix.domain.socket.enabled is false"
    )
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
    for enough in (3 << 20, 0, None):  # 0: no limit
        assert problems(checks.check_settings(spark(described()), Needs(3 << 20), enough)) == []
    assert problems(checks.check_settings(spark(described(), master="local[2]"), Needs(3 << 20), 1)) == []


def test_containers_need_memory_outside_of_java():
    found = list(checks.check_settings(spark(described(), master="k8s://host"), Needs(), None))
    assert "spark.executor.memoryOverhead is not set: k8s ends executors" in problems(found)[0][1]
    for name in ("memoryOverhead", "memoryOverheadFactor", "pyspark_memory"):
        given = spark(described(), master="k8s://host", **{f"spark_executor_{name}": "2"})
        assert problems(checks.check_settings(given, Needs(), None)) == []


def test_spark_of_another_version_than_pyspark():
    for is_remote, status in ((False, ERROR), (True, WARNING)):
        found = list(checks.check_spark(spark(described(), is_remote=is_remote), "4.1.1"))
        assert problems(found) == [(status, "4.3.0, but the driver's pyspark is 4.1.1.")]


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
