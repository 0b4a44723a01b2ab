"""The checks of a diagnosis: pure functions from descriptions of driver, workers and Spark to findings. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

_MOST_NAMES = 3


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


class Unmet(NamedTuple):
    """A requirement on a package that a process does not meet.

    Attributes:
        problem: What is wrong, as a predicate.
        requirement: What would be right, for pip.
    """

    problem: str
    requirement: str


Requirements = Callable[[Described], Mapping[str, Unmet]]
"""Returns the unmet requirements of a process, by the name of the package."""


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
    elif {"keras", backend} <= set(driver["packages"]):
        finding = _check_loaded("backend", driver, backend) or _loads("backend", [("the driver", driver)], backend)
        yield from _grouped([("the driver", finding)])


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
    yield from _grouped(_check_java_of_workers(firsts, facts.java))
    differences = [*_grouped(_check_packages(firsts, driver, backend, requirements))]
    yield from differences or [Finding(OK, "worker packages", "the same as on the driver")]
    yield from _check_backends(executors, backend)
    yield from _check_connections(firsts, facts)


def _check_java_of_workers(workers: Sequence[tuple[str, Described]], ours: str) -> Iterator[tuple[str, Finding]]:
    for name, worker in workers:
        if ours and worker["java"] and worker["java"].split(".")[0] != ours.split(".")[0]:
            yield (
                name,
                Finding(
                    WARNING,
                    "workers",
                    f"Java {worker['java']} on {WHERE}, and {ours} on the driver.",
                    "Install the same version of Java everywhere, and set JAVA_HOME to its folder.",
                ),
            )


def _check_packages(
    workers: Sequence[tuple[str, Described]], driver: Described, backend: str, requirements: Requirements
) -> Iterator[tuple[str, Finding]]:
    for name, worker in workers:
        for package, (problem, requirement) in requirements(worker).items():
            if package != "sparkkeras":  # which the driver ships
                remedy = (
                    f"Run there: {worker['python']} -m pip install '{requirement}', or set PYSPARK_PYTHON to a Python that "
                    "has it."
                )
                yield name, Finding(ERROR, "worker packages", f"{package} {problem} on {WHERE}.", remedy)
        for package, version in worker["packages"].items():
            ours = driver["packages"].get(package)
            status = _difference(package, backend, ours, version)
            if status != OK:
                yield (
                    name,
                    Finding(
                        status,
                        "worker packages",
                        f"{package} {version} on {WHERE}, and {ours} on the driver.",
                        f"Install the same version everywhere: pip install {package}=={ours}.",
                    ),
                )


def _difference(package: str, backend: str, ours: str | None, theirs: str) -> str:
    """How bad it is that the versions of a package on driver and worker are these."""
    if ours is None or ours == theirs or package not in {"keras", backend, "numpy", "pyspark"}:
        return OK
    if package == "numpy":  # arrays pickled by NumPy 2 cannot be read by NumPy 1
        return ERROR if ours.split(".")[0] != theirs.split(".")[0] else OK
    return ERROR if _minor(ours) != _minor(theirs) and package in {"keras", "pyspark"} else WARNING


def _check_backends(executors: Mapping[str, Sequence[Described]], backend: str) -> Iterator[Finding]:
    problems: list[tuple[str, Finding]] = []
    loaded: dict[int, list[tuple[str, Described]]] = {}
    for name, workers in executors.items():
        for worker in [worker for worker in workers if worker["loaded"] is not None][:1]:
            if not {"keras", backend} <= set(worker["packages"]):
                continue
            finding = _check_loaded("worker backend", worker, backend)
            if finding is not None:
                problems.append((name, finding))
            if finding is None or finding.status != ERROR:
                loaded.setdefault(len(worker["loaded"]["gpus"]), []).append((name, worker))
    yield from _grouped(problems)
    for places in loaded.values():
        yield from _grouped((name, _loads("worker backend", places, backend)) for name, _ in places)


def _loads(subject: str, places: Sequence[tuple[str, Described]], backend: str) -> Finding:
    """The finding that the backend loads in these places, which see equally many GPUs."""
    loaded = [described["loaded"] for _, described in places]
    most = "up to " if len(places) > 1 else ""
    gpus = counted(len(loaded[0]["gpus"]), "GPU") if loaded[0]["gpus"] else "no GPU"
    seconds = max(each["seconds"] for each in loaded)
    return Finding(OK, subject, f"{backend} loads in {most}{seconds:.1f} s on {WHERE}, and sees {gpus}")


def _check_loaded(subject: str, described: Described, backend: str) -> Finding | None:
    """The problem of a process in which the backend does not load, or sees other GPUs than it may use."""
    loaded, granted = described["loaded"], described["granted_gpus"]
    if "error" in loaded:
        return Finding(
            ERROR,
            subject,
            f"{backend} does not load on {WHERE}: {loaded['error']}.",
            f"Run there: KERAS_BACKEND={backend} {described['python']} -c 'import keras'. Reinstall {backend} if its files "
            "are incomplete; if SIGKILL ended the process, compare its memory with what is available there.",
        )
    if len(loaded["gpus"]) < len(granted):
        return Finding(
            ERROR,
            "GPUs",
            f"Spark grants a task on {WHERE} {counted(len(granted), 'GPU')} ({', '.join(granted)}), and {backend} sees "
            f"{len(loaded['gpus']) or 'none'}.",
            f"Install a build of {backend} for GPUs and a driver that fits it, or check the discovery script "
            "(spark.executor.resource.gpu.discoveryScript).",
        )
    if not granted and loaded["gpus"] and subject != "backend":
        return Finding(
            WARNING,
            "GPUs",
            f"{backend} sees {counted(len(loaded['gpus']), 'GPU')} on {WHERE}, which Spark does not distribute: all tasks "
            "share them.",
            "Set spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount.",
        )
    return None


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
    chosen = " The doctor chose this port at random." if facts.is_any_port else ""
    tested = " Test this port with --port (port= of diagnose)." if facts.is_any_port else ""
    yield from _grouped(
        (
            name,
            Finding(
                ERROR,
                "network",
                f"the driver at {reason} cannot be reached from {WHERE}: asynchronous and all-reduce training, searches "
                f"and SparkRunner would fail.{chosen}",
                "Set spark.driver.host (or host= of server_options) to an address that executors reach, and port= to one "
                f"that no firewall blocks.{tested}",
            ),
        )
        for name, reason in failed
    )
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


def check_resources(facts: SparkFacts, driver: Described, needs: Needs) -> Iterator[Finding]:
    """Check the disks of the driver and of the executors, and the cores and the memory of these, against model and data.

    Executors on the same machine share its disk, cores and memory.
    """
    machines: dict[str, list[Described]] = {}
    for worker in facts.workers:
        machines.setdefault(worker["host"], []).append(worker)
    disks = [(name, each[0]["disk"], needs.data_bytes * len(each) // len(facts.workers)) for name, each in machines.items()]
    if not (facts.is_local and machines):  # else it is the driver's machine
        disks.insert(0, ("the driver", driver["disk"], 0))
    yield from _check_disks(disks)
    yield from _check_cores(machines, facts)
    yield from _check_memory(machines, needs)


def _check_disks(disks: Sequence[tuple[str, Mapping[str, Any], int]]) -> Iterator[Finding]:
    problems: list[tuple[str, Finding]] = []
    enough: dict[str, list[tuple[str, int]]] = {}
    clean = "Free some space, or set spark.local.dir (SPARK_LOCAL_DIRS on a cluster) to a folder on another disk."
    for name, disk, wanted in disks:
        folder, free = _without_random_part(disk["folder"]), disk["free"]
        if disk["error"]:
            message = f"{folder} on {WHERE} cannot be written to: {disk['error']}."
        elif free < wanted:
            message = f"{folder} on {WHERE} has {size(free)} free, and its rows need about {size(wanted)}."
        elif free - wanted < MINIMUM_DISK:
            problems.append((name, Finding(WARNING, "disk", f"{folder} on {WHERE} has only {size(free)} free.", clean)))
            continue
        else:
            enough.setdefault(folder, []).append((name, free))
            continue
        problems.append((name, Finding(ERROR, "disk", message, clean)))
    for folder, places in enough.items():
        least = "at least " if len(places) > 1 else ""
        free = min(free for _, free in places)
        yield Finding(OK, "disk", f"{least}{size(free)} free in {folder} on {_named([name for name, _ in places])}")
    yield from _grouped(problems)


def _without_random_part(folder: str) -> str:
    """The folder that a user knows, of one that Spark has made in it."""
    return re.sub(r"(?<=.)/(spark|executor|blockmgr)-[0-9a-f]{8}-[0-9a-f-]{27}(/.*)?$", "", folder)


def _check_cores(machines: Mapping[str, Sequence[Described]], facts: SparkFacts) -> Iterator[Finding]:
    found = []
    for name, workers in machines.items():
        cores, used = min(worker["cores"] for worker in workers), len(workers) * facts.task_cores
        if used > cores:
            message = f"{counted(cores, 'core')} on {WHERE}, where Spark's tasks use {used} at the same time."
            remedy = "Give executors fewer cores (spark.executor.cores, local[N]): training is not faster with more."
            found.append((name, Finding(WARNING, "cores", message, remedy)))
        else:
            found.append((name, Finding(OK, "cores", f"{cores} on {WHERE}, of which Spark's tasks use {used}")))
    yield from _grouped(found)


def _check_memory(machines: Mapping[str, Sequence[Described]], needs: Needs) -> Iterator[Finding]:
    each = needs.worker_bytes
    problems: list[tuple[str, Finding]] = []
    enough: dict[int, list[tuple[str, int]]] = {}
    for name, workers in machines.items():
        tasks = len(workers)
        limit = min((worker["memory_limit"] for worker in workers if worker["memory_limit"] is not None), default=None)
        free = min((worker["memory"] for worker in workers if worker["memory"] is not None), default=None)
        if limit is not None and limit < each:
            message = f"each worker on {WHERE} may use {size(limit)}, and needs about {size(each)}."
            remedy = "Raise spark.executor.pyspark.memory, which the tasks of an executor share, or remove it."
            problems.append((name, Finding(ERROR, "memory", message, remedy)))
        if free is None:
            problems.append((name, Finding(OK, "memory", f"unknown on {WHERE}")))
        elif free < each * tasks:
            message = f"{size(free)} available on {WHERE}; {_needed(tasks, each)}."
            remedy = (
                "Give executors more memory outside of Java (spark.executor.memoryOverhead), or run fewer tasks at the same "
                "time (spark.executor.cores, spark.task.cpus)."
            )
            problems.append((name, Finding(ERROR if free < each else WARNING, "memory", message, remedy)))
        else:
            enough.setdefault(tasks, []).append((name, free))
    for tasks, places in enough.items():
        least = "at least " if len(places) > 1 else ""
        free = min(free for _, free in places)
        names = _named([name for name, _ in places])
        yield Finding(OK, "memory", f"{least}{size(free)} available on {names}; {_needed(tasks, each)}")
    yield from _grouped(problems)


def _needed(tasks: int, each: int) -> str:
    return f"1 worker needs about {size(each)}" if tasks == 1 else f"{tasks} workers need about {tasks} x {size(each)}"


def check_settings(facts: SparkFacts, needs: Needs, result_bytes: int | None) -> Iterator[Finding]:
    """Check Spark's settings for what is slow or breaks.

    Args:
        facts: Spark and its settings.
        needs: What the training needs.
        result_bytes: ``spark.driver.maxResultSize`` in bytes; 0: no limit; ``None`` if unknown.
    """
    settings = facts.settings
    found = [*_slow_settings(facts), *_risky_settings(facts, needs, result_bytes)]
    yield from found
    if not found and settings:
        yield Finding(OK, "settings", "none that is slow or breaks")


_WHY_FASTER = {
    "spark.python.daemon.module": "each new Python worker loads Keras and its backend, which takes seconds",
    "spark.python.unix.domain.socket.enabled": "Java and Python workers exchange data over TCP, which is slower",
}


def _slow_settings(facts: SparkFacts) -> Iterator[Finding]:
    for name, value in {} if facts.is_remote else FASTER_SETTINGS.items():
        if name == "spark.python.daemon.module" and not all("sparkkeras" in worker["packages"] for worker in facts.workers):
            continue  # it starts before Spark ships the package
        given = facts.settings.get(name)
        if given is None or given.lower() == "false":
            problem = f"{name} is {given or 'not set'}: {_WHY_FASTER[name]}."
            yield Finding(WARNING, "settings", problem, f"Start Spark with --conf {name}={value}")
    if not facts.is_on("spark.python.worker.reuse", True):
        yield Finding(
            WARNING,
            "settings",
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


def _risky_settings(facts: SparkFacts, needs: Needs, result_bytes: int | None) -> Iterator[Finding]:
    settings = facts.settings
    for name, problem, remedy in _RISKY:
        if facts.is_on(name):
            yield Finding(WARNING, "settings", f"{name}=true: {problem}", remedy)
    if settings.get("spark.task.maxFailures") == "1" and not facts.is_local:
        yield Finding(
            WARNING,
            "settings",
            "spark.task.maxFailures=1: one lost worker ends the training.",
            "Use the default, 4.",
        )
    if result_bytes and result_bytes < needs.state_bytes and not facts.is_local and not facts.is_remote:
        yield Finding(
            ERROR,
            "settings",
            f"spark.driver.maxResultSize is {size(result_bytes)}, and the model's state has {size(needs.state_bytes)}.",
            f"Start Spark with --conf spark.driver.maxResultSize={-(-2 * needs.state_bytes >> 20)}m, or 0 for no limit.",
        )
    limits = {"spark.executor.memoryOverhead", "spark.executor.memoryOverheadFactor", "spark.executor.pyspark.memory"}
    if facts.master.startswith(("yarn", "k8s")) and not limits & set(settings):
        yield Finding(
            WARNING,
            "settings",
            f"spark.executor.memoryOverhead is not set: {facts.master.partition(':')[0]} ends executors whose workers "
            f"use more than about a tenth of the executor's memory, and each needs about {size(needs.worker_bytes)}.",
            "Set it to that for each slot of an executor, plus what the data needs.",
        )
    host = settings.get("spark.driver.host", "")
    if not facts.is_remote and facts.master.startswith(("spark:", "yarn", "k8s")) and _is_loopback(host):
        yield Finding(
            WARNING,
            "settings",
            f"spark.driver.host={host}: executors on other machines do not reach the driver there.",
            "Set it to the name or address of this machine in the cluster's network.",
        )


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1", "[::1]"} or host.startswith("127.")


def _grouped(found: Iterable[tuple[str, Finding]]) -> Iterator[Finding]:
    """Findings with the names of places for `WHERE`. What is found in several places becomes one finding."""
    places: dict[Finding, list[str]] = {}
    for name, finding in found:
        places.setdefault(finding, []).append(name)
    for finding, names in places.items():
        yield replace(finding, message=finding.message.replace(WHERE, _named(names)))


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
