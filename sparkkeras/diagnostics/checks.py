"""The checks of a diagnosis: pure functions from descriptions of driver, workers and Spark to findings. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkkeras.diagnostics.findings import ERROR, OK, WARNING, Finding
from sparkkeras.diagnostics.spark_facts import SparkFacts
from sparkkeras.errors import counted
from sparkkeras.spark.cluster import FASTER_SETTINGS

MINIMUM_JAVA = 17
"""The first version of Java that Spark 4 runs on."""

MINIMUM_DISK = 1 << 30
"""With fewer free bytes than this, there is a warning."""

BACKEND_BYTES = 840 << 20
"""What a worker needs for Python, Keras, its backend and a small model: 837 MB with TensorFlow 2.21, 491 MB with JAX."""

STATE_COPIES = 3
"""How many times a worker holds the state of a model while it trains: its variables, gradients, and a message."""


@dataclass(frozen=True)
class Needs:
    """What a training needs.

    Attributes:
        state_bytes: The size of weights and optimizer variables; 0 if unknown.
        data_bytes: The size of the rows on disk; 0 if unknown.
    """

    state_bytes: int = 0
    data_bytes: int = 0


Described = Mapping[str, Any]
"""The description of a process by `sparkkeras.diagnostics.inspection`."""


def check_driver(driver: Described, backend: str, wanted: Callable[[Described], Sequence[str]]) -> Iterator[Finding]:
    """Check the driver's Python, packages and backend.

    Args:
        driver: The description of the driver.
        backend: Keras's backend.
        wanted: Returns the packages that are missing, or have a version that this package does not support, as text.
    """
    python = f"{driver['version']} ({driver['python']})"
    problems = wanted(driver)
    yield Finding(OK, "Python", python)
    for problem in problems:
        yield Finding(
            ERROR, "packages", f"on the driver, {problem}.", "pip install --upgrade sparkkeras installs what fits."
        )
    if not problems:
        yield Finding(OK, "packages", _listed(driver["packages"], backend))
    yield from _check_loaded("backend", "the driver", driver, backend)


def check_java(version: str, error: str) -> Finding:
    """Check the Java that Spark would start.

    Args:
        version: Its version.
        error: Why it does not run; empty if it does.
    """
    install = f"Install Java {MINIMUM_JAVA} or later, and set JAVA_HOME to its folder (which contains bin/java)."
    if error:
        return Finding(ERROR, "Java", f"{error}.", install)
    major = version.split(".")[0]
    if not major.isdigit() or int(major) < MINIMUM_JAVA:
        return Finding(ERROR, "Java", f"version {version}; Spark needs {MINIMUM_JAVA} or later.", install)
    return Finding(OK, "Java", version)


def check_spark(facts: SparkFacts, pyspark: str) -> Iterator[Finding]:
    """Check Spark's version, its slots, and what did not work."""
    kind = "Spark Connect, " if facts.is_remote else ""
    if _minor(facts.version) != _minor(pyspark):
        yield Finding(
            ERROR,
            "Spark",
            f"{facts.version}, but the driver's pyspark is {pyspark}.",
            f"Install the same version: pip install pyspark=={facts.version}; unset SPARK_HOME if it names another Spark.",
        )
    else:
        yield Finding(OK, "Spark", f"{facts.version} ({kind}{facts.master or 'unknown master'})")
    yield from facts.findings
    if facts.workers:
        executors = len(_by_executor(facts.workers))
        yield Finding(OK, "slots", f"{counted(facts.slots, 'slot')} on {counted(executors, 'executor')}")


def check_workers(
    facts: SparkFacts, driver: Described, backend: str, wanted: Callable[[Described], Sequence[str]]
) -> Iterator[Finding]:
    """Check that the executors have what the driver has, that backends load, and that addresses are reachable.

    Args:
        facts: Spark and its workers.
        driver: The description of the driver.
        backend: Keras's backend.
        wanted: See `check_driver`.
    """
    if not facts.workers:
        return
    executors = _by_executor(facts.workers)
    findings = [
        *_check_versions(executors, driver, backend, wanted),
        *(found for name, each in executors.items() for found in _check_executor(name, each, backend)),
    ]
    pythons = sorted({f"{worker['version']} ({worker['python']})" for worker in facts.workers})
    javas = sorted({worker["java"] for worker in facts.workers} - {""})
    described = f"Python {', '.join(pythons)}" + (f", Java {', '.join(javas)}" if javas else "")
    yield Finding(OK, "workers", described)
    yield from findings
    yield from _check_connections(executors, facts)


def _check_versions(
    executors: Mapping[str, Sequence[Described]],
    driver: Described,
    backend: str,
    wanted: Callable[[Described], Sequence[str]],
) -> Iterator[Finding]:
    subject, found = "worker packages", False
    for name, workers in executors.items():
        worker = workers[0]
        install = f"Install it for {worker['python']} there, or set PYSPARK_PYTHON to a Python that has it."
        missing = [package for package in ("keras", backend, "numpy", "pyarrow") if package not in worker["packages"]]
        for package in missing:
            found = True
            yield Finding(ERROR, subject, f"{name} lacks {package}.", install)
        for problem in wanted(worker):
            if not any(problem.startswith(f"{package} ") for package in missing) and "sparkkeras" not in problem:
                found = True
                yield Finding(
                    ERROR, subject, f"on {name}, {problem}.", "pip install --upgrade sparkkeras installs what fits."
                )
        for package, version in worker["packages"].items():
            ours = driver["packages"].get(package)
            status = _difference(package, backend, ours, version)
            if status != OK:
                found = True
                yield Finding(
                    status,
                    subject,
                    f"{name} has {package} {version}, and the driver has {ours}.",
                    f"Install the same version everywhere: pip install {package}=={ours}.",
                )
    if not found:
        yield Finding(OK, subject, "the same as on the driver")


def _difference(package: str, backend: str, ours: str | None, theirs: str) -> str:
    """How bad it is that the versions of a package on driver and worker are these."""
    if ours is None or ours == theirs or package not in {"keras", backend, "numpy", "pyspark"}:
        return OK
    if package == "numpy":  # arrays pickled by NumPy 2 cannot be read by NumPy 1
        return ERROR if ours.split(".")[0] != theirs.split(".")[0] else OK
    return ERROR if _minor(ours) != _minor(theirs) and package in {"keras", "pyspark"} else WARNING


def _check_executor(name: str, workers: Sequence[Described], backend: str) -> Iterator[Finding]:
    loaded = [worker for worker in workers if worker["loaded"] is not None][:1]
    for worker in loaded:
        if "keras" in worker["packages"] and backend in worker["packages"]:
            yield from _check_loaded("worker backend", name, worker, backend)


def _check_loaded(subject: str, where: str, described: Described, backend: str) -> Iterator[Finding]:
    """Check that the backend loads, and sees the GPUs that it may use."""
    loaded, granted = described["loaded"], described["granted_gpus"]
    if "error" in loaded:
        installed = [package for package in ("keras", backend) if package in described["packages"]]
        remedy = (
            f"Run: KERAS_BACKEND={backend} {described['python']} -c 'import keras'. Reinstall {backend} if its files are "
            "incomplete; a process that was ended by SIGKILL had too little memory."
            if len(installed) == 2
            else f"pip install keras {backend}"
        )
        yield Finding(ERROR, subject, f"{backend} does not load on {where}: {loaded['error']}.", remedy)
        return
    if granted and len(loaded["gpus"]) < len(granted):
        yield Finding(
            ERROR,
            "GPUs",
            f"Spark grants a task on {where} {counted(len(granted), 'GPU')} ({', '.join(granted)}), and {backend} sees "
            f"{len(loaded['gpus']) or 'none'}.",
            f"Install a build of {backend} for GPUs and a driver that fits it, or check the discovery script "
            "(spark.executor.resource.gpu.discoveryScript).",
        )
        return
    if not granted and loaded["gpus"] and subject != "backend":
        yield Finding(
            WARNING,
            "GPUs",
            f"{backend} sees {counted(len(loaded['gpus']), 'GPU')} on {where}, which Spark does not distribute: all tasks "
            "share them.",
            "Set spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount.",
        )
    gpus = f", {counted(len(loaded['gpus']), 'GPU')}" if loaded["gpus"] else ""
    yield Finding(OK, subject, f"{backend} on {where} loads in {loaded['seconds']:.1f} s{gpus}")


def _check_connections(executors: Mapping[str, Sequence[Described]], facts: SparkFacts) -> Iterator[Finding]:
    tried = {name: workers[0]["reaches_driver"] for name, workers in executors.items()}
    failed = {name: reason for name, reason in tried.items() if reason}
    for name, reason in failed.items():
        yield Finding(
            ERROR,
            "network",
            f"{name} does not reach the driver at {reason}: asynchronous training, searches and SparkRunner would fail.",
            "Set spark.driver.host to an address that executors reach, and port= to one that no firewall blocks.",
        )
    if not failed and any(reason is not None for reason in tried.values()):
        yield Finding(OK, "network", "workers reach the driver")
    unreached = [(name, reason) for name, workers in executors.items() for reason in workers[0]["unreached_workers"]]
    for name, reason in unreached:
        yield Finding(
            ERROR,
            "network",
            f"{name} does not reach the worker at {reason}: all-reduce training and SparkRunner would fail.",
            "Allow connections between the executors on all ports.",
        )
    if len(executors) > 1 and not unreached and facts.settings.get("spark.dynamicAllocation.enabled") != "true":
        yield Finding(OK, "network", "workers reach each other")


def check_resources(facts: SparkFacts, driver: Described, needs: Needs) -> Iterator[Finding]:
    """Check disk and memory of the driver and of each executor against the model and the data."""
    executors = _by_executor(facts.workers)
    share = needs.data_bytes // max(1, len(executors))
    places = {"the driver": ((driver,), 0)} | {name: (tuple(each), share) for name, each in executors.items()}
    for name, (processes, wanted) in places.items():
        yield from _check_disk(name, processes[0]["disk"], wanted)
    for name, workers in executors.items():
        yield _check_memory(name, workers, needs)


def _check_disk(name: str, disk: Mapping[str, Any], wanted: int) -> Iterator[Finding]:
    folder, free = disk["folder"], disk["free"]
    clean = "Free some space, or set spark.local.dir to a folder on another disk."
    if disk["error"]:
        yield Finding(ERROR, "disk", f"{folder} on {name} cannot be written to: {disk['error']}.", clean)
    elif free < wanted:
        yield Finding(
            ERROR, "disk", f"{folder} on {name} has {_size(free)} free, and its rows need about {_size(wanted)}.", clean
        )
    elif free - wanted < MINIMUM_DISK:
        yield Finding(WARNING, "disk", f"{folder} on {name} has only {_size(free)} free.", clean)
    else:
        yield Finding(OK, "disk", f"{_size(free)} free in {folder} on {name}")


def _check_memory(name: str, workers: Sequence[Described], needs: Needs) -> Finding:
    known = [worker["memory"] for worker in workers if worker["memory"] is not None]
    if not known:
        return Finding(OK, "memory", f"unknown on {name}")
    tasks = len(workers)
    each = BACKEND_BYTES + STATE_COPIES * needs.state_bytes
    free = min(known)
    needed = f"{counted(tasks, 'worker')} there need about {_size(each * tasks)} ({_size(each)} each)"
    if free < each * tasks:
        return Finding(
            ERROR if free < each else WARNING,
            "memory",
            f"{name} has {_size(free)} available, and {needed}.",
            "Give executors more memory outside of Java (spark.executor.memoryOverhead, spark.executor.pyspark.memory), or "
            "run fewer tasks at the same time (spark.executor.cores, spark.task.cpus).",
        )
    return Finding(OK, "memory", f"{_size(free)} available on {name}; {needed}")


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


def _slow_settings(facts: SparkFacts) -> Iterator[Finding]:
    settings = facts.settings
    if not facts.is_remote:
        slow = {name: value for name, value in FASTER_SETTINGS.items() if settings.get(name, "false") == "false"}
        if not all("sparkkeras" in worker["packages"] for worker in facts.workers):
            slow.pop("spark.python.daemon.module", None)  # it starts before Spark ships the package
        if slow:
            yield Finding(
                WARNING,
                "settings",
                "Python workers start, or exchange data with Java, more slowly than they could.",
                f"Start Spark with {' '.join(f'--conf {name}={value}' for name, value in slow.items())}",
            )
    if settings.get("spark.python.worker.reuse", "true") == "false":
        yield Finding(
            WARNING,
            "settings",
            "spark.python.worker.reuse=false: each task starts a new Python, which loads Keras (seconds in each round).",
            "Remove the setting.",
        )


_RISKY = (
    (
        "spark.speculation",
        "true",
        "Spark starts second attempts of slow tasks, which take slots and memory.",
        "Set it to false for training, unless the cluster has slow machines and free slots.",
    ),
    (
        "spark.dynamicAllocation.enabled",
        "true",
        "executors that are idle between rounds are removed, and their rows are written again; Spark runs no barrier "
        "stages, which all-reduce training and SparkRunner need.",
        "Set it to false, or spark.dynamicAllocation.minExecutors to the number of executors.",
    ),
)
"""Settings that break something: name, value, what happens, and the remedy."""


def _risky_settings(facts: SparkFacts, needs: Needs, result_bytes: int | None) -> Iterator[Finding]:
    settings = facts.settings
    for name, value, problem, remedy in _RISKY:
        if settings.get(name) == value:
            yield Finding(WARNING, "settings", f"{name}={value}: {problem}", remedy)
    if settings.get("spark.task.maxFailures") == "1" and not facts.is_local:
        yield Finding(
            WARNING,
            "settings",
            "spark.task.maxFailures=1: one lost worker ends the training.",
            "Use the default, 4.",
        )
    if result_bytes and 0 < result_bytes < needs.state_bytes and not facts.is_local and not facts.is_remote:
        yield Finding(
            ERROR,
            "settings",
            f"spark.driver.maxResultSize is {_size(result_bytes)}, and the model's state has {_size(needs.state_bytes)}.",
            f"Start Spark with --conf spark.driver.maxResultSize={-(-2 * needs.state_bytes >> 20)}m, or 0 for no limit.",
        )
    limit = settings.get("spark.executor.memoryOverhead")
    if facts.master.startswith(("yarn", "k8s")) and limit is None and settings.get("spark.executor.pyspark.memory") is None:
        yield Finding(
            WARNING,
            "settings",
            f"spark.executor.memoryOverhead is not set: {facts.master.partition(':')[0]} ends executors whose workers "
            f"use more than about a tenth of the executor's memory, and each needs about {_size(BACKEND_BYTES)}.",
            "Set it to that for each slot of an executor, plus what model and data need.",
        )
    host = settings.get("spark.driver.host", "")
    if not facts.is_remote and facts.master.startswith(("spark:", "yarn", "k8s")) and host in {"localhost", "127.0.0.1"}:
        yield Finding(
            WARNING,
            "settings",
            f"spark.driver.host={host}: executors on other machines do not reach the driver there.",
            "Set it to the name or address of this machine in the cluster's network.",
        )


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


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
