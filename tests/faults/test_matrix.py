"""The matrix of faults: each fault strikes each operation on a real Spark.

docs/contributing/fault-matrix.md says what is expected. All cells run in `scripts/soak`, a cheap one of each kind in the
default suite. ``pytest -s`` prints the measured seconds.
"""

import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.clusters import hosts as network
from tests.faults.driver import Driver
from tests.faults.injection import Probe, seconds_to_next_step
from tests.faults.operations import LEASE_SECONDS, OPERATIONS, attempt
from tests.integration.standalone import SPECULATION, Standalone

CLUSTER = {"spark.task.maxFailures": "2", "spark.decommission.enabled": "true", "spark.storage.decommission.enabled": "true"}

TRAINING = ["synchronous", "asynchronous", "hogwild", "allreduce", "connect"]

RUNNER_ENDS = {"run": ("WorkerError", 40)}
"""`SparkRunner` ends with a named error within these seconds; with a checkpoint, ``resume=True`` continues."""

ERRORS = {
    "process killed": RUNNER_ENDS,
    "worker killed": RUNNER_ENDS,
    "executor killed": RUNNER_ENDS,
    "executor and its disk lost": RUNNER_ENDS,
    "error raised once": RUNNER_ENDS | {"connect": ("WorkerError", 15)},
    "worker stopped": {},
    "executor decommissioned": {},
}
"""For each fault, the operations that end with an error, and within how many seconds; the others have the same result."""


def report(**values):
    """Print measured times."""
    sys.stderr.write(f"\n{json.dumps(values)}\n")


def note(fault, operation, done, **more):
    """Report how an operation has ended; nothing may remain of it."""
    report(fault=fault, operation=operation, result=done.get("error") or "same", seconds=done["seconds"], **more)
    assert done["left"] == {}


class Drivers:
    """Drivers with the same settings: one with a SparkContext, one that is a client of Spark Connect.

    They are started when they are used, one at a time if ``exclusive``, because each takes all cores of its master.
    """

    def __init__(self, folder, *arguments, exclusive=False, **settings):
        self._folder, self._arguments, self._settings, self._exclusive = folder, arguments, settings, exclusive
        self._drivers = {}

    def __enter__(self):
        return self

    def of(self, operation):
        connect = operation == "connect"
        if connect not in self._drivers:
            if self._exclusive:
                self.close()
            folder = self._folder / ("connect" if connect else "classic")
            folder.mkdir(exist_ok=True)
            self._drivers[connect] = Driver(folder, *self._arguments, connect=connect, **self._settings).__enter__()
        return self._drivers[connect]

    def run(self, operation, *arguments, **options):
        return self.of(operation).run(operation, *arguments, **options)

    def close(self):
        while self._drivers:
            self._drivers.popitem()[1].__exit__()

    def __exit__(self, *_):
        self.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Drivers with two executor processes, which Spark replaces."""
    with Drivers(tmp_path_factory.mktemp("cluster"), **CLUSTER) as drivers:
        yield drivers


@pytest.fixture(scope="module")
def expected(tmp_path_factory, cluster):
    """The results without a fault, by operation."""
    found = {}

    def result(operation):
        if operation not in found:
            done = cluster.run(operation, Probe(str(tmp_path_factory.mktemp(operation))))
            assert "result" in done, done
            assert done["left"] == {}
            found[operation] = done["result"]
        return found[operation]

    return result


def check(fault, operation, folder, done, expected):
    assert done["left"] == {}
    assert (folder / "fault").exists(), "the fault did not strike"
    at = float((folder / "fault").read_text().split()[0])
    if operation in ERRORS.get(fault, {}):
        error, seconds = ERRORS[fault][operation]
        report(fault=fault, operation=operation, error=done.get("error"), seconds=round(done["ended"] - at, 1))
        assert done.get("error") == error, done
        assert done["ended"] - at < seconds
    else:
        next_step = seconds_to_next_step(folder)
        report(fault=fault, operation=operation, next_step=next_step, end=round(done["ended"] - at, 1), of=done["seconds"])
        if (fault, operation) == ("error raised once", "search"):  # the trial fails, and the search goes on
            assert [trial for trial in done["result"] if trial[0] == "ok"] == [
                trial for trial in expected if trial[1] in {each[1] for each in done["result"] if each[0] == "ok"}
            ]
            assert len(done["result"]) == len(expected)
        else:
            assert done.get("result") == expected, done


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", ERRORS)
def test_a_fault_on_an_executor(cluster, expected, tmp_path, fault, operation):
    probe = Probe(str(tmp_path), fault, unit=None if operation == "search" else 0)
    before = expected(operation)
    check(fault, operation, tmp_path, cluster.run(operation, probe), before)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("worker killed", "hogwild"),
        ("worker stopped", "asynchronous"),
        ("error raised once", "evaluate"),
        ("executor decommissioned", "predict"),
        ("executor and its disk lost", "asynchronous"),
    ],
)
def test_one_fault_of_each_kind(sc, tmp_path, fault, operation):
    """Kinds that no other test of the default suite has."""
    (tmp_path / "before").mkdir()
    before = attempt(sc, operation, Probe(str(tmp_path / "before")))
    check(fault, operation, tmp_path, attempt(sc, operation, Probe(str(tmp_path), fault)), before["result"])


# --- The driver ------------------------------------------------------------------------------------------------------

RESUMED = ["synchronous", "asynchronous", "hogwild", "allreduce", "search", "ensemble", "run", "connect"]
"""The operations that write what they have done; the others start anew."""


def strike(driver, operation, folder, step, **options):
    """Start an operation, and return the path of its result when a step is reached."""
    result = driver.begin(operation, Probe(str(folder), "outside", None if operation == "search" else 0, step), **options)
    limit = time.monotonic() + 120
    while not (folder / "fault").exists():
        assert not result.exists(), result.read_text()
        assert driver.process.poll() is None, driver.log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < limit
        time.sleep(0.01)
    return result


def await_end(processes, seconds):
    """Wait until processes have ended; returns the seconds."""
    started = time.monotonic()
    _, alive = psutil.wait_procs(processes, seconds)
    assert alive == []
    return round(time.monotonic() - started, 1)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_driver_that_is_killed(expected, tmp_path, operation):
    """kill -9; executors and workers end, and the next process resumes."""
    before = expected(operation)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    options = {"path": str(tmp_path / "kept")} if operation in RESUMED else {}
    step = 40 if operation in TRAINING else 12
    connect = operation == "connect"
    with Driver(first, connect=connect, **CLUSTER) as driver:
        strike(driver, operation, first, step, **options)
        processes = driver.processes()
        driver.process.kill()
        driver.process.wait()
        gone = await_end(processes, 30)
    with Driver(second, connect=connect, **CLUSTER) as driver:
        done = driver.run(operation, Probe(str(second)), **options)
    made = sum(len(path.read_text().splitlines()) for path in second.glob("step-*"))
    note("driver killed", operation, done, processes_gone=gone, steps_after=made)
    assert done.get("result") == before, done


@contextlib.contextmanager
def stopped(process):
    """The driver and its JVM are stopped within this context."""
    driver = psutil.Process(process.pid)
    both = [driver, *(each for each in driver.children() if "java" in each.name())]
    for each in both:
        each.suspend()
    try:
        yield
    finally:
        for each in reversed(both):
            each.resume()


@pytest.mark.cluster
def test_a_driver_that_is_stopped_and_killed(sc, tmp_path):
    """In the default suite: for longer than leases last, and then with -9, after which the next process resumes."""
    folders = [tmp_path / name for name in ("before", "stopped", "killed", "resumed")]
    for folder in folders:
        folder.mkdir()
    before, stop, kill, resume = folders
    options = {"path": str(tmp_path / "kept")}
    expected = attempt(sc, "synchronous", Probe(str(before)))["result"]
    with Driver(tmp_path, "local[2]") as driver:
        result = strike(driver, "asynchronous", stop, 12)
        with stopped(driver.process):
            time.sleep(LEASE_SECONDS + 1)
        done = driver.end(result)
        assert (done["result"]["steps"], done["left"]) == ({"0": 45, "1": 45}, {})
        strike(driver, "synchronous", kill, 40, **options)
        processes = driver.processes()
        driver.process.kill()
        driver.process.wait()
        await_end(processes, 30)
    with Driver(resume, "local[2]") as driver:
        done = driver.run("synchronous", Probe(str(resume)), **options)
    assert len((resume / "step-0").read_text().splitlines()) < 45
    assert (done["result"], done["left"]) == (expected, {})


DRIVER_STOPPED_SECONDS = 60


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_driver_that_is_stopped_for_a_minute(cluster, expected, tmp_path, operation):
    driver = cluster.of(operation)

    def stop():
        with stopped(driver.process):
            time.sleep(DRIVER_STOPPED_SECONDS)

    check_outlives("driver stopped", driver, operation, tmp_path, expected, stop)


def check_outlives(fault, driver, operation, folder, expected, disturb):
    """An operation that was disturbed for some time ends as if it was not; a function may end with an error."""
    before = expected(operation)
    result = strike(driver, operation, folder, 12)
    disturb()
    continued = time.time()
    done = driver.end(result)
    note(fault, operation, done, end=round(done["ended"] - continued, 1))
    if operation == "run":
        assert done.get("error") in (None, "WorkerError", "DriverConnectionError"), done
    else:
        assert done.get("result") == before, done


# --- Speculation, the network, dynamic allocation --------------------------------------------------------------------


@contextlib.contextmanager
def standalone(folder, **settings):
    """Drivers of a standalone Spark with two workers."""
    with Standalone(folder) as spark, Drivers(folder, spark.url, exclusive=True, **settings) as drivers:
        yield drivers


@pytest.fixture(scope="module")
def speculative(tmp_path_factory):
    with standalone(tmp_path_factory.mktemp("speculative"), **SPECULATION) as drivers:
        yield drivers


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_speculative_copies_of_a_slow_task(speculative, expected, tmp_path, operation):
    before = expected(operation)
    probe = Probe(str(tmp_path), "speculation", unit=None if operation == "search" else 0)
    check("speculation", operation, tmp_path, speculative.run(operation, probe), before)


CUT_SECONDS = 12.0


@pytest.fixture(scope="module")
def divided(contexts, tmp_path_factory):
    """The hosts of a standalone Spark, and drivers on one of them."""
    if reason := network.missing():
        pytest.skip(reason)
    contexts.stop()
    folder = tmp_path_factory.mktemp("divided")
    with network.Hosts(folder) as hosts, network.cluster(folder, hosts) as spark:
        settings = {"prefix": hosts.command("driver"), "spark.driver.host": hosts.addresses["driver"]}
        with Drivers(folder, spark.url, exclusive=True, **settings) as drivers:
            yield hosts, drivers


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_network_that_is_cut_and_restored(divided, expected, tmp_path, operation):
    """For longer than leases last."""
    hosts, drivers = divided

    def cut():
        hosts.cut("worker1")
        time.sleep(CUT_SECONDS)
        hosts.mend("worker1")

    check_outlives("network cut", drivers.of(operation), operation, tmp_path, expected, cut)


DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.timeout": "1s",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "1s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
}


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    with standalone(tmp_path_factory.mktemp("dynamic"), **DYNAMIC) as drivers:
        yield drivers


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_dynamic_allocation(dynamic, expected, tmp_path, operation):
    """It takes away all executors between the rounds of synchronous training."""
    before = expected(operation)
    options = {"pause": 12.0} if operation in ("synchronous", "connect") else {}
    done = dynamic.run(operation, Probe(str(tmp_path)), **options)
    note("dynamic allocation", operation, done)
    if operation in ("allreduce", "run"):
        assert done.get("error") == "ConfigurationError", done
    elif operation in ("asynchronous", "hogwild"):  # with the slots that there are when training starts
        assert done["result"]["rows"] == before["rows"], done
        assert sum(done["result"]["steps"].values()) == sum(before["steps"].values()), done
    else:
        assert done.get("result") == before, done
    if options:
        assert "0" in (tmp_path / "executors").read_text().split()


# --- Full disks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of some bytes; needs root."""
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.soak
@pytest.mark.parametrize("operation", [*TRAINING, "ensemble", "run"])
def test_a_full_disk_where_rows_are_stored(expected, tmp_path, operation):
    """Each of two partitions has 6 MB; then smaller data is trained on."""
    before = expected(operation)
    probe = Probe(str(tmp_path))
    with (
        small_disk(tmp_path / "disk", "8m") as disk,
        Driver(tmp_path, "local[2]", operation == "connect", **{"spark.local.dir": str(disk)}) as driver,
    ):
        done = driver.run(operation, probe, count=24_000)
        note("disk full: rows", operation, done)
        assert done.get("error") == "StorageError", done
        assert "No space left on device" in done["message"]
        assert driver.run(operation, probe).get("result") == before


@pytest.mark.soak
@pytest.mark.parametrize("operation", RESUMED)
def test_a_full_disk_where_checkpoints_are_written(cluster, expected, tmp_path, operation):
    before = expected(operation) if operation == "run" else None
    with small_disk(tmp_path / "disk", {"run": "4k", "search": "8k"}.get(operation, "16k")) as disk:
        done = cluster.run(operation, Probe(str(tmp_path)), path=str(disk / "run"))
    note("disk full: checkpoints", operation, done)
    if operation == "run":  # whose results would be lost
        assert done.get("result") == before, done
        assert any("No space left on device" in warning for warning in done["warnings"])
    else:
        assert done.get("error") == "StorageError", done
        assert "No space left on device" in done["message"]


@pytest.mark.soak
@pytest.mark.parametrize("operation", [*TRAINING, "ensemble", "run"])
@pytest.mark.parametrize("store", ["once", "slow", "always"])
def test_a_store_of_checkpoints_that_fails_or_is_slow(cluster, expected, tmp_path, store, operation):
    before = expected(operation)
    done = cluster.run(operation, Probe(str(tmp_path)), path=str(tmp_path / "run"), store=store)
    note(f"store: {store}", operation, done)
    fails = any("the store does not respond" in warning for warning in done["warnings"])
    if store == "always" and operation != "run":
        assert done.get("error") == "StorageError", done
        assert fails == (operation != "ensemble")  # which writes before it trains
    else:
        assert done.get("result") == before, done
        assert fails == (store != "slow")


# --- Again and again -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def persistent(tmp_path_factory):
    with Drivers(tmp_path_factory.mktemp("persistent"), **CLUSTER | {"spark.task.maxFailures": "1000"}) as drivers:
        yield drivers


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", TRAINING)
def test_200_epochs_with_a_kill_every_few_seconds(persistent, tmp_path, operation):
    quiet, struck = tmp_path / "quiet", tmp_path / "struck"
    quiet.mkdir(), struck.mkdir()
    options = {"max_restarts": 1000} if operation == "allreduce" else {}
    before = persistent.run(operation, Probe(str(quiet)), 900, epochs=200, **options)
    probe = Probe(str(struck), "worker killed", None, every=8.0)
    done = persistent.run(operation, probe, 1700, epochs=200, **options)
    kills = len(list(struck.glob("fault-*")))
    note("a kill every few seconds", operation, done, kills=kills, without=before["seconds"])
    assert kills > 5
    assert done.get("result") == before["result"], done
