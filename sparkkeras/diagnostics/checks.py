"""The checks of a diagnosis: pure functions from descriptions of driver, workers and Spark to findings. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sparkkeras.diagnostics.findings import ERROR, OK, WARNING, Finding
from sparkkeras.diagnostics.inspection import BACKENDS
from sparkkeras.diagnostics.spark_facts import SparkFacts
from sparkkeras.errors import counted
from sparkkeras.spark.cluster import FASTER_SETTINGS

MINIMUM_JAVA = 17
"""The first version of Java that Spark 4 runs on."""

MINIMUM_DISK = 1 << 30
"""With fewer free bytes than this, there is a warning."""

STATE_COPIES = 3
"""How many times a worker holds the state of a model while it trains: its variables, gradients, and a message."""

WHERE = "{where}"
"""Stands for the places in a message, which `_grouped` inserts."""

LEAST = "{least}"
"""Stands for the least amount that was found in these places."""

_MOST_NAMES = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Needs:
    """What a training needs.

    Attributes:
        state_bytes: The size of weights and optimizer variables; 0 if unknown.
        data_bytes: The size of the rows on disk; 0 if unknown.
        backend: Keras's backend; empty if unknown.
    """

    state_bytes: int = 0
    data_bytes: int = 0
    backend: str = ""

    @property
    def worker_bytes(self) -> int:
        """The memory of a worker."""
        return BACKENDS.get(self.backend, max(BACKENDS.values())) + STATE_COPIES * self.state_bytes


Described = Mapping[str, Any]
"""The description of a process by `sparkkeras.diagnostics.inspection`."""


Requirements = Callable[[Described], Mapping[str, tuple[str, str]]]
"""Returns the unmet requirements of a process by the name of the package: what is wrong, as a predicate, and what would be
right, for pip."""


def check_driver(driver: Described, backend: str, requirements: Requirements) -> Iterator[Finding]:
    """Check the driver's Python, packages and backend.

    Args:
        driver: The description of the driver.
        backend: Keras's backend.
        requirements: Returns what the driver lacks.
    """
    yield Finding(OK, "Python", f"{driver['version']} ({driver['python']})")
    unmet = requirements(driver)
    for name, (problem, requirement) in unmet.items():
        yield Finding(
            ERROR, "packages", f"{name} {problem} on the driver.", f"Run: {driver['python']} -m pip install '{requirement}'"
        )
    if not unmet:
        yield Finding(OK, "packages", _listed(driver["packages"], backend))
    if backend not in BACKENDS:
        yield Finding(
            ERROR,
            "backend",
            f"Keras's backend is set to {backend!r}, and training works with {', '.join(BACKENDS)}.",
            "Set the environment variable KERAS_BACKEND to one of these, or correct Keras's file keras.json.",
        )
    else:
        yield from _check_backends("backend", [("the driver", driver)], backend)


def check_java(version: str, error: str) -> Finding:
    """Check the Java that Spark would start.

    Args:
        version: Its version; empty if unknown.
        error: Why it does not run; empty if it does.
    """
    install = f"Install Java {MINIMUM_JAVA} or later, and set JAVA_HOME to its folder (which contains bin/java)."
    if error:
        return Finding(ERROR, "Java", f"{error}.", install)
    major = version.split(".")[0]
    if not major.isdigit() or int(major) < MINIMUM_JAVA:
        return Finding(
            ERROR, "Java", f"its version is {version or 'unknown'}; Spark needs {MINIMUM_JAVA} or later.", install
        )
    return Finding(OK, "Java", version)


def check_spark(facts: SparkFacts, pyspark: str) -> Iterator[Finding]:
    """Check Spark's version, its slots, and what did not work."""
    kind = "Spark Connect, " if facts.is_remote else ""
    if _minor(facts.version) != _minor(pyspark):
        yield Finding(
            WARNING if facts.is_remote else ERROR,  # Connect's protocol is meant for other versions, its functions are not
            "Spark",
            f"{facts.version}, but the driver's pyspark is {pyspark}.",
            f"Install the same version: pip install pyspark=={facts.version}"
            + ("." if facts.is_remote else "; unset SPARK_HOME if it names another Spark."),
        )
    else:
        java = f", Java {facts.java}" if facts.java else ""
        yield Finding(OK, "Spark", f"{facts.version} ({kind}{facts.master or 'unknown master'}{java})")
    yield from facts.findings
    yield from _unreached_executors("the driver", facts.unreached_executors)
    if facts.workers:
        executors = counted(len(_by_executor(facts.workers)), "executor")
        more = "; dynamic allocation may start more" if facts.is_dynamic else ""
        cores = counted(facts.task_cores, "core")
        yield Finding(OK, "slots", f"{counted(facts.slots, 'slot')} of {cores} on {executors}{more}")


def check_workers(facts: SparkFacts, driver: Described, backend: str, requirements: Requirements) -> Iterator[Finding]:
    """Check that the executors have what the driver has, that backends load, and that addresses are reachable.

    Args:
        facts: Spark and its workers.
        driver: The description of the driver.
        backend: Keras's backend.
        requirements: Returns what a worker lacks.
    """
    if not facts.workers:
        return
    executors = _by_executor(facts.workers)
    pythons = sorted({f"{worker['version']} ({worker['python']})" for worker in facts.workers})
    javas = sorted({worker["java"] for worker in facts.workers} - {""})
    described = f"Python {', '.join(pythons)}" + (f", Java {', '.join(javas)}" if javas else "")
    yield Finding(OK, "workers", described)
    firsts = [(name, workers[0]) for name, workers in executors.items()]
    yield from _grouped(firsts, lambda worker: _check_java_of_worker(worker, facts.java))
    differences = [*_grouped(firsts, lambda worker: _check_packages(worker, driver, backend, requirements))]
    yield from differences or [Finding(OK, "worker packages", "the same as on the driver")]
    loaded = [(name, [worker for worker in workers if worker["loaded"] is not None]) for name, workers in executors.items()]
    yield from _check_backends("worker backend", [(name, workers[0]) for name, workers in loaded if workers], backend)
    yield from _check_connections(firsts, facts)


def _check_java_of_worker(worker: Described, ours: str) -> Iterator[Finding]:
    if ours and worker["java"] and worker["java"].split(".")[0] != ours.split(".")[0]:
        yield Finding(
            WARNING,
            "workers",
            f"Java {worker['java']} on {WHERE}, and {ours} on the driver.",
            "Install the same version of Java everywhere, and set JAVA_HOME to its folder.",
        )


def _check_packages(worker: Described, driver: Described, backend: str, requirements: Requirements) -> Iterator[Finding]:
    for package, (problem, requirement) in requirements(worker).items():
        if package != "sparkkeras":  # which the driver ships
            install = f"Run there: {worker['python']} -m pip install '{requirement}'"
            remedy = f"{install}, or set PYSPARK_PYTHON to a Python that has it."
            yield Finding(ERROR, "worker packages", f"{package} {problem} on {WHERE}.", remedy)
    for package, version in worker["packages"].items():
        ours = driver["packages"].get(package)
        status = _difference(package, backend, ours, version)
        if status != OK:
            message = f"{package} {version} on {WHERE}, and {ours} on the driver."
            remedy = f"Install the same version everywhere: pip install {package}=={ours}."
            yield Finding(status, "worker packages", message, remedy)


def _difference(package: str, backend: str, ours: str | None, theirs: str) -> str:
    """How bad it is that the versions of a package on driver and worker are these."""
    if ours is None or ours == theirs or package not in {"keras", backend, "numpy", "pyspark"}:
        return OK
    if package == "numpy":  # arrays pickled by NumPy 2 cannot be read by NumPy 1
        return ERROR if ours.split(".")[0] != theirs.split(".")[0] else OK
    return ERROR if _minor(ours) != _minor(theirs) and package in {"keras", "pyspark"} else WARNING


def _check_backends(subject: str, places: Iterable[tuple[str, Described]], backend: str) -> Iterator[Finding]:
    """Check processes in which the backend was loaded, and list those in which it does, by the number of their GPUs."""
    places = [(name, each) for name, each in places if {"keras", backend} <= set(each["packages"])]
    yield from _grouped(places, lambda each: _check_loaded(subject, each, backend))
    loaded: dict[int, list[tuple[str, float]]] = {}
    for name, each in places:
        if all(finding.status != ERROR for finding in _check_loaded(subject, each, backend)):
            loaded.setdefault(len(each["loaded"]["gpus"]), []).append((name, each["loaded"]["seconds"]))
    for gpus, found in loaded.items():
        names, seconds = zip(*found, strict=True)
        most = f"{'up to ' if len(found) > 1 else ''}{max(seconds):.1f} s on {_named(names)}"
        yield Finding(OK, subject, f"{backend} loads in {most}, and sees {counted(gpus, 'GPU') if gpus else 'no GPU'}")


def _check_loaded(subject: str, described: Described, backend: str) -> Iterator[Finding]:
    """The problem of a process in which the backend does not load, or sees other GPUs than it may use."""
    loaded, granted = described["loaded"], described["granted_gpus"]
    if "error" in loaded:
        yield Finding(
            ERROR,
            subject,
            f"{backend} does not load on {WHERE}: {loaded['error']}.",
            f"Run there: KERAS_BACKEND={backend} {described['python']} -c 'import keras'. Reinstall {backend} if its files "
            "are incomplete; if SIGKILL ended the process, compare its memory with what is available there.",
        )
    elif len(loaded["gpus"]) < len(granted):
        yield Finding(
            ERROR,
            "GPUs",
            f"Spark grants a task on {WHERE} {counted(len(granted), 'GPU')} ({', '.join(granted)}), and {backend} sees "
            f"{len(loaded['gpus']) or 'none'}.",
            f"Install a build of {backend} for GPUs and a driver that fits it, or check the discovery script "
            "(spark.executor.resource.gpu.discoveryScript).",
        )
    elif not granted and loaded["gpus"] and subject != "backend":
        yield Finding(
            WARNING,
            "GPUs",
            f"{backend} sees {counted(len(loaded['gpus']), 'GPU')} on {WHERE}, which Spark does not distribute: all tasks "
            "share them.",
            "Set spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount.",
        )


def _unreached_executors(name: str, reasons: Sequence[str]) -> Iterator[Finding]:
    if reasons:
        yield Finding(
            ERROR,
            "network",
            f"{name} cannot connect to {counted(len(reasons), 'executor')}, such as the one at {reasons[0]}: Spark hangs or "
            "fails where it sends data between them.",
            "Set spark.blockManager.port to a port that is open from the driver to the executors and between these, and one "
            "more for each further executor on a machine.",
        )


def _check_connections(workers: Sequence[tuple[str, Described]], facts: SparkFacts) -> Iterator[Finding]:
    for name, worker in workers:
        yield from _unreached_executors(name, worker["unreached_executors"])
    tried = [(name, worker["reaches_driver"]) for name, worker in workers if worker["reaches_driver"] is not None]
    failed = [(name, reason) for name, reason in tried if reason]
    yield from _grouped(failed, lambda reason: _unreached_driver(reason, facts.is_any_port))
    if tried and not failed:
        yield Finding(OK, "network", "workers reach the driver")
    unreached = [(name, worker["unreached_workers"]) for name, worker in workers if worker["unreached_workers"]]
    if unreached:
        others = sum(len(reasons) for _, reasons in unreached)
        yield Finding(
            ERROR,
            "network",
            f"workers on {_named([name for name, _ in unreached])} cannot connect to {counted(others, 'other worker')}, "
            f"such as the one at {unreached[0][1][0]}: all-reduce training and SparkRunner would fail.",
            "Open the ports of spark.sparkkeras.worker.ports (by default any) between the executors, and with JAX and "
            "PyTorch also those of net.ipv4.ip_local_port_range.",
        )
    elif len(workers) > 1 and not facts.is_dynamic:
        yield Finding(OK, "network", "workers reach each other")


def _unreached_driver(reason: str, is_any_port: bool) -> Iterator[Finding]:
    chosen = " The doctor chose this port at random." if is_any_port else ""
    tested = " Test this port with --port (port= of diagnose)." if is_any_port else ""
    yield Finding(
        ERROR,
        "network",
        f"the driver at {reason} cannot be reached from {WHERE}: asynchronous and all-reduce training, searches and "
        f"SparkRunner would fail.{chosen}",
        "Set spark.driver.host (or host= of server_options) to an address that executors reach, and port= to one that no "
        f"firewall blocks.{tested}",
    )


def check_resources(facts: SparkFacts, driver: Described, needs: Needs) -> Iterator[Finding]:
    """Check the disks of the driver and of the executors, and the cores and the memory of these, against model and data.

    Executors on the same machine share its disk, cores and memory.
    """
    machines: dict[str, list[Described]] = {}
    for worker in facts.workers:
        machines.setdefault(worker["host"], []).append(worker)
    disks = [
        (name, (each[0]["disk"], needs.data_bytes * len(each) // len(facts.workers))) for name, each in machines.items()
    ]
    if not (facts.is_local and machines):  # else it is the driver's machine
        disks.insert(0, ("the driver", (driver["disk"], 0)))
    yield from _grouped(disks, lambda disk: _check_disk(*disk))
    yield from _grouped(machines.items(), lambda workers: _check_cores(workers, facts.task_cores))
    yield from _grouped(machines.items(), lambda workers: _check_memory(workers, needs.worker_bytes))


def _check_disk(disk: Mapping[str, Any], wanted: int) -> Iterator[Finding]:
    folder, free = _without_random_part(disk["folder"]), disk["free"]
    clean = "Free some space, or set spark.local.dir (SPARK_LOCAL_DIRS on a cluster) to a folder on another disk."
    if disk["error"]:
        yield Finding(ERROR, "disk", f"{folder} on {WHERE} cannot be written to: {disk['error']}.", clean)
    elif free < wanted:
        message = f"{folder} on {WHERE} has {size(free)} free, and its rows need about {size(wanted)}."
        yield Finding(ERROR, "disk", message, clean)
    elif free - wanted < MINIMUM_DISK:
        yield Finding(WARNING, "disk", f"{folder} on {WHERE} has only {size(free)} free.", clean)
    else:
        yield _Enough(OK, "disk", f"{LEAST} free in {folder} on {WHERE}", amount=free)


def _without_random_part(folder: str) -> str:
    """The folder that a user knows, of one that Spark has made in it."""
    return re.sub(r"(?<=.)/(spark|executor|blockmgr)-[0-9a-f]{8}-[0-9a-f-]{27}(/.*)?$", "", folder)


def _check_cores(workers: Sequence[Described], task_cores: int) -> Iterator[Finding]:
    cores, used = min(worker["cores"] for worker in workers), len(workers) * task_cores
    if used > cores:
        message = f"{counted(cores, 'core')} on {WHERE}, where Spark's tasks use {used} at the same time."
        remedy = "Give executors fewer cores (spark.executor.cores, local[N]): training is not faster with more."
        yield Finding(WARNING, "cores", message, remedy)
    else:
        yield Finding(OK, "cores", f"{cores} on {WHERE}, of which Spark's tasks use {used}")


def _check_memory(workers: Sequence[Described], each: int) -> Iterator[Finding]:
    tasks = len(workers)
    limit = min((worker["memory_limit"] for worker in workers if worker["memory_limit"] is not None), default=None)
    free = min((worker["memory"] for worker in workers if worker["memory"] is not None), default=None)
    if limit is not None and limit < each:
        message = f"each worker on {WHERE} may use {size(limit)}, and needs about {size(each)}."
        remedy = "Raise spark.executor.pyspark.memory, which the tasks of an executor share, or remove it."
        yield Finding(ERROR, "memory", message, remedy)
    if free is None:
        yield Finding(OK, "memory", f"unknown on {WHERE}")
    elif free < each * tasks:
        message = f"{size(free)} available on {WHERE}; {_needed(tasks, each)}."
        remedy = (
            "Give executors more memory outside of Java (spark.executor.memoryOverhead), or run fewer tasks at the same "
            "time (spark.executor.cores, spark.task.cpus)."
        )
        yield Finding(ERROR if free < each else WARNING, "memory", message, remedy)
    else:
        yield _Enough(OK, "memory", f"{LEAST} available on {WHERE}; {_needed(tasks, each)}", amount=free)


def _needed(tasks: int, each: int) -> str:
    return f"1 worker needs about {size(each)}" if tasks == 1 else f"{tasks} workers need about {tasks} x {size(each)}"


def check_settings(facts: SparkFacts, needs: Needs, result_bytes: int | None) -> Iterator[Finding]:
    """Check Spark's settings for what is slow or breaks.

    Args:
        facts: Spark and its settings.
        needs: What the training needs.
        result_bytes: ``spark.driver.maxResultSize`` in bytes; 0: no limit; ``None`` if unknown.
    """
    found = [Finding(WARNING, "settings", *each) for each in (*_slow_settings(facts), *_risky_settings(facts, needs))]
    if result_bytes and result_bytes < needs.state_bytes and not facts.is_local and not facts.is_remote:
        problem = f"spark.driver.maxResultSize is {size(result_bytes)}, and the model's state has {size(needs.state_bytes)}."
        least = f"{-(-2 * needs.state_bytes >> 20)}m"
        remedy = f"Start Spark with --conf spark.driver.maxResultSize={least}, or 0 for no limit."
        found.append(Finding(ERROR, "settings", problem, remedy))
    if not found and facts.settings:
        found.append(Finding(OK, "settings", "none that is slow or breaks"))
    yield from found


_WHY_FASTER = {
    "spark.python.daemon.module": "each new Python worker loads Keras and its backend, which takes seconds",
    "spark.python.unix.domain.socket.enabled": "Java and Python workers exchange data over TCP, which is slower",
}


def _slow_settings(facts: SparkFacts) -> Iterator[tuple[str, str]]:
    """Problems and remedies."""
    for name, value in {} if facts.is_remote else FASTER_SETTINGS.items():
        if name == "spark.python.daemon.module" and not all("sparkkeras" in worker["packages"] for worker in facts.workers):
            continue  # it starts before Spark ships the package
        given = facts.settings.get(name)
        if given is None or given.lower() == "false":
            yield f"{name} is {given or 'not set'}: {_WHY_FASTER[name]}.", f"Start Spark with --conf {name}={value}"
    if not facts.is_on("spark.python.worker.reuse", True):
        yield (
            "spark.python.worker.reuse=false: each task starts a new Python, which loads Keras (seconds in each round).",
            "Remove the setting.",
        )


_RISKY = (
    (
        "spark.speculation",
        "Spark starts second attempts of slow tasks, which take slots and memory.",
        "Set it to false for training, unless the cluster has slow machines and free slots.",
    ),
    (
        "spark.dynamicAllocation.enabled",
        "executors that are idle between rounds are removed, and their rows are written again; Spark runs no barrier "
        "stages, which all-reduce training and SparkRunner need.",
        "Set it to false, or spark.dynamicAllocation.minExecutors to the number of executors.",
    ),
)
"""Settings that break something if they are true: name, what happens, and the remedy."""


def _risky_settings(facts: SparkFacts, needs: Needs) -> Iterator[tuple[str, str]]:
    """Problems and remedies."""
    settings = facts.settings
    for name, problem, remedy in _RISKY:
        if facts.is_on(name):
            yield f"{name}=true: {problem}", remedy
    if settings.get("spark.task.maxFailures") == "1" and not facts.is_local:
        yield "spark.task.maxFailures=1: one lost worker ends the training.", "Use the default, 4."
    limits = {"spark.executor.memoryOverhead", "spark.executor.memoryOverheadFactor", "spark.executor.pyspark.memory"}
    if facts.master.startswith(("yarn", "k8s")) and not limits & set(settings):
        yield (
            f"spark.executor.memoryOverhead is not set: {facts.master.partition(':')[0]} ends executors whose workers "
            f"use more than about a tenth of the executor's memory, and each needs about {size(needs.worker_bytes)}.",
            "Set it to that for each slot of an executor, plus what the data needs.",
        )
    host = settings.get("spark.driver.host", "")
    if not facts.is_remote and facts.master.startswith(("spark:", "yarn", "k8s")) and _is_loopback(host):
        yield (
            f"spark.driver.host={host}: executors on other machines do not reach the driver there.",
            "Set it to the name or address of this machine in the cluster's network.",
        )


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1", "[::1]"} or host.startswith("127.")


@dataclass(frozen=True)
class _Enough(Finding):
    """A finding whose message has the least amount of several places for `LEAST`, in bytes."""

    amount: int = field(default=0, compare=False)


def _grouped(places: Iterable[tuple[str, T]], check: Callable[[T], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds in places, with their names for `WHERE`. What is found in several places becomes one finding."""
    found: dict[Finding, list[tuple[str, Finding]]] = {}
    for name, place in places:
        for finding in check(place):
            found.setdefault(finding, []).append((name, finding))
    for finding, each in sorted(found.items(), key=lambda item: not isinstance(item[0], _Enough)):
        message = finding.message.replace(WHERE, _named([name for name, _ in each]))
        amounts = [same.amount for _, same in each if isinstance(same, _Enough)]
        if amounts:
            message = message.replace(LEAST, f"{'at least ' if len(amounts) > 1 else ''}{size(min(amounts))}")
        yield Finding(finding.status, finding.subject, message, finding.remedy)


def _named(names: Sequence[str]) -> str:
    """Names as a list, shortened if there are many."""
    if len(names) > _MOST_NAMES + 1:
        names = [*names[:_MOST_NAMES], f"{len(names) - _MOST_NAMES} others"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _by_executor(workers: Sequence[Described]) -> dict[str, list[Described]]:
    """The workers by the name of their executor, which has its process ID if there are several on one machine."""
    found: dict[tuple[str, int], list[Described]] = {}
    for worker in workers:
        found.setdefault((worker["host"], worker["executor"]), []).append(worker)
    hosts = [host for host, _ in found]
    return {
        host if hosts.count(host) == 1 else f"{host} (executor process {process})": each
        for (host, process), each in found.items()
    }


def _listed(packages: Mapping[str, str], backend: str) -> str:
    names = dict.fromkeys(("keras", backend, "numpy", "pyarrow", "pyspark", "sparkkeras"))
    return ", ".join(f"{name} {packages[name]}" for name in names if name in packages)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def size(count: int) -> str:
    """A number of bytes for a message."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
