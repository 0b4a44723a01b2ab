"""`diagnose`, and ``python -m sparkkeras doctor``: whether this machine and this cluster can train, and what breaks."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from sparkkeras import arguments
from sparkkeras.diagnostics import checks, inspection
from sparkkeras.diagnostics.checks import Described, Needs, Requirements
from sparkkeras.diagnostics.findings import ERROR, OK, Diagnosis, Finding
from sparkkeras.diagnostics.inspection import Inspection
from sparkkeras.diagnostics.spark_facts import BACKGROUND, START_SECONDS, Request, describe, not_started, start_spark
from sparkkeras.errors import ConfigurationError, SparkKerasError, counted
from sparkkeras.spark.cluster import max_result_bytes
from sparkkeras.spark.connect import active_session, check_session, is_remote
from sparkkeras.spark.job_errors import translated
from sparkkeras.spark.settings import uses_connect

if TYPE_CHECKING:
    import keras
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


DESCRIPTION = """Check whether this machine and a Spark cluster can train with sparkkeras, and find what would be slow or
break. The exit code is 1 if there is an error, with --strict also if there is a warning."""


@arguments.known_arguments
def diagnose(
    spark: SparkSession | SparkContext | None = None,
    model: keras.Model | None = None,
    data: Any = None,
    *,
    host: str | None = None,
    bind: str | None = None,
    port: int = 0,
    start_seconds: float = START_SECONDS,
) -> Diagnosis:
    """Check whether driver and executors can train, and find what would be slow or break.

    It runs one Spark job on all slots, which loads the backend once on each executor, in processes that end then. Problems
    are findings, not exceptions.

    Args:
        spark: The session, also of Spark Connect, or the SparkContext. ``None``: the active one, or a new one on this
            machine.
        model: A compiled model: whether it can be sent to workers, and what memory it needs.
        data: What would be passed to `SparkModel.fit`: what disk it needs. Spark counts the rows of RDDs and DataFrames.
        host: The address at which workers reach the driver, as in `ServerOptions`; ``None``: that of Spark's settings.
        bind: The address that the driver listens on, as in `ServerOptions`.
        port: The port of the parameter server that they have to reach; 0: any free one.
        start_seconds: How long Spark, and the executors, may take to start.

    Returns:
        The findings, which print as a list.

    Raises:
        ConfigurationError: ``host``, ``bind``, ``port`` or ``start_seconds`` is out of range, or ``spark`` is something
            else.
        ClusterError: ``spark`` has been stopped.

    Example::

        diagnosis = sparkkeras.diagnose(spark, model, train_df)
        assert diagnosis.is_ok(strict=True)
    """
    request = Request(host, bind, port, start_seconds)
    if spark is not None:
        check_session(_session_of(spark))
    driver, findings = examine_driver()
    session, more = (_session_of(spark), []) if spark is not None else _active_session()
    findings.extend(more)
    if session is not None:
        findings.extend(examine_spark(session, driver, model, data, request))
    return Diagnosis(tuple(findings))


def examine_driver() -> tuple[Described, list[Finding]]:
    """Describe the driver, and check it."""
    backend = backend_name()
    driver = Inspection(backend).here()
    return driver, list(checks.check_driver(driver, backend, requirements(backend)))


def examine_java(environment: Mapping[str, str]) -> Finding:
    """Check the Java that Spark would start with these environment variables."""
    return checks.check_java(*inspection.run_java(environment))


def examine_spark(
    session: SparkSession,
    driver: Described,
    model: keras.Model | None = None,
    data: Any = None,
    request: Request | None = None,
) -> Iterator[Finding]:
    """Check Spark, its executors and settings, and what model and data need; see `diagnose`."""
    backend = backend_name()
    facts = describe(session, backend, request or Request())
    yield from checks.check_spark(facts, driver["packages"].get("pyspark", ""))
    yield from checks.check_workers(facts, driver, backend, requirements(backend))
    state_bytes = 0
    if model is not None:
        finding, state_bytes = _check_model(model)
        yield finding
    data_bytes = 0
    if data is not None and (facts.workers or not _is_on_cluster(data)):
        finding, data_bytes = _check_data(data, session)
        yield finding
    needs = Needs(state_bytes, data_bytes, backend)
    yield from checks.check_resources(facts, driver, needs)
    result_bytes = None if facts.is_remote else max_result_bytes(session.sparkContext)
    yield from checks.check_settings(facts, needs, result_bytes)


def backend_name() -> str:
    """Keras's backend: of Keras, if it has been imported, else of the environment variable or of Keras's file."""
    if "keras" in sys.modules:
        with suppress(Exception):
            name: str = sys.modules["keras"].backend.backend()
            return name
    return os.environ.get("KERAS_BACKEND") or inspection.configured_backend()


def requirements(backend: str) -> Requirements:
    """A function that lists what a process lacks of the packages that this one requires with a backend."""
    try:
        listed = importlib.metadata.requires("sparkkeras") or []
    except importlib.metadata.PackageNotFoundError:  # on the path, and not installed
        listed = []
    least = ("keras", backend, "numpy", "pyarrow") if backend in inspection.BACKENDS else ("keras", "numpy", "pyarrow")

    def unmet(described: Described) -> dict[str, tuple[str, str]]:
        packages = described["packages"]
        found = {name: ("is not installed", name) for name in least if name not in packages}
        try:
            from packaging.requirements import Requirement
        except ImportError:  # which Keras installs
            return found
        for requirement in map(Requirement, listed):
            name, version, specifier = requirement.name, packages.get(requirement.name), requirement.specifier
            is_ours = name in inspection.PACKAGES and (name not in inspection.BACKENDS or name == backend)
            if not is_ours or requirement.marker is not None:
                continue
            if name in found:
                found[name] = ("is not installed", f"{name}{specifier}")
            elif version is not None and not specifier.contains(version, prereleases=True):
                found[name] = (f"{version} is not supported", f"{name}{specifier}")
        return found

    return unmet


def _session_of(spark: Any) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    return SparkSession(spark) if isinstance(spark, SparkContext) else spark


def _active_session() -> tuple[SparkSession | None, list[Finding]]:
    """The active session or a new one on this machine, and what was found before it starts; ``None`` if it does not."""
    from pyspark import SparkContext

    findings = []
    has_java = SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ
    if not has_java and not uses_connect():
        findings.append(examine_java(os.environ))
        if findings[0].status == ERROR:
            return None, findings
    try:
        return active_session(), findings
    except Exception as error:
        return None, [*findings, not_started(error, "the master of Spark's configuration")]


def _check_model(model: keras.Model) -> tuple[Finding, int]:
    """Check that a model can be trained and sent; also returns the size of its state."""
    from sparkkeras.modeling.archive import ModelArchive
    from sparkkeras.modeling.compilation import check_trainable
    from sparkkeras.modeling.state import ModelState

    try:
        check_trainable(model)
        ModelArchive.pack(model)
    except SparkKerasError as error:
        return Finding.rejected("model", error, "Pass a compiled keras.Model."), 0
    size = ModelState.take(model).nbytes
    return Finding(OK, "model", f"{model.name}: {checks.size(size)} with optimizer variables"), size


def _is_on_cluster(data: Any) -> bool:
    """Whether Spark has the rows."""
    from pyspark import RDD
    from pyspark.sql import DataFrame

    return isinstance(data, (RDD, DataFrame))


def _check_data(data: Any, session: SparkSession) -> tuple[Finding, int]:
    """Count the rows, and estimate the size of all; also returns this size in bytes."""
    if _is_on_cluster(data):
        try:
            rows, first = data.count(), data.take(1)
        except Exception as error:
            found = translated(error, None if is_remote(session) else session.sparkContext)
            return Finding.rejected("data", found, "Correct what computes the rows."), 0
        size = rows * len(pickle.dumps(tuple(first[0]) if isinstance(first[0], tuple) else first[0], 5)) if first else 0
    elif callable(data):
        return Finding(OK, "data", "a function that reads batches, which are not stored"), 0
    else:
        arrays = _arrays(data)
        lengths = sorted({len(array) for array in arrays})
        if len(lengths) != 1:
            counts = (
                f"arrays of {' and '.join(map(str, lengths))} rows" if lengths else f"{type(data).__name__} {data!r:.60}"
            )
            expected = "Pass what SparkModel.fit takes: a DataFrame, an RDD, arrays of equal length, or a function."
            return Finding(ERROR, "data", f"{counts}.", expected), 0
        rows, size = lengths[0], sum(array.nbytes for array in arrays)
    if not rows:
        return Finding(ERROR, "data", "has no rows.", "Pass the data to train on."), 0
    return Finding(OK, "data", f"{counted(rows, 'row')}, about {checks.size(size)}"), size


def _arrays(data: Any) -> list[Any]:
    """The arrays in nested tuples, lists and dicts; none if there is something else."""
    if hasattr(data, "to_numpy"):
        data = data.to_numpy()
    if isinstance(data, (tuple, list)):
        parts = [_arrays(part) for part in data]
    elif isinstance(data, Mapping):
        parts = [_arrays(part) for part in data.values()]
    else:
        return [data] if getattr(data, "shape", ()) and hasattr(data, "nbytes") else []
    return [array for part in parts for array in part] if all(parts) else []


# The command line


def run() -> NoReturn:
    """Run the command of this process, and exit."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130  # as a shell reports a command that was interrupted
    if any(thread.name == BACKGROUND for thread in threading.enumerate()):
        os._exit(code)  # what did not end in time has threads that Python would wait for
    sys.exit(code)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with these words, by default those of the process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sparkkeras", description="Tools of sparkkeras.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor")
    doctor = commands.add_parser("doctor", help="check this machine and a Spark cluster", description=DESCRIPTION)
    where = doctor.add_mutually_exclusive_group()
    where.add_argument("--master", metavar="URL", help="Spark's master (default: of Spark's configuration, else local[*])")
    where.add_argument("--remote", metavar="URL", help="a Spark Connect server, such as sc://host:15002")
    doctor.add_argument(
        "--conf", metavar="NAME=VALUE", action="append", default=[], type=_setting, help="a setting of Spark; repeatable"
    )
    doctor.add_argument("--host", help="the address at which workers reach this machine (default: of Spark's settings)")
    doctor.add_argument("--bind", help="the address that this machine listens on (default: of Spark's settings)")
    doctor.add_argument("--port", type=int, default=0, help="the port that workers have to reach (default: any free one)")
    doctor.add_argument(
        "--start-seconds",
        type=float,
        default=START_SECONDS,
        metavar="S",
        help="how long Spark, and the executors, may take to start (%(default)g)",
    )
    doctor.add_argument("--json", action="store_true", help="print a JSON object")
    doctor.add_argument("--strict", action="store_true", help="warnings count as errors")
    given = parser.parse_args(words)
    try:
        request = Request(given.host, given.bind, given.port, given.start_seconds)
    except ConfigurationError as error:
        doctor.error(str(error))
    findings: list[Finding] = []
    for finding in _findings(given, request):
        findings.append(finding)
        if not given.json:
            _print(str(finding))
    diagnosis = Diagnosis(tuple(findings))
    _print(diagnosis.to_json(given.strict) if given.json else f"\n{diagnosis.summary()}")
    return 0 if diagnosis.is_ok(given.strict) else 1


def _findings(given: argparse.Namespace, request: Request) -> Iterator[Finding]:
    """The findings, in the order of the checks; stops at what makes further checks impossible."""
    driver, findings = examine_driver()
    yield from findings
    if "pyspark" not in driver["packages"]:
        yield Finding(ERROR, "Spark", "pyspark is not installed.", "pip install pyspark")
        return
    if given.remote is None:
        java = examine_java(os.environ)
        yield java
        if java.status == ERROR:
            return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = start_spark(given.master, given.remote, dict(given.conf), request.start_seconds)
    if isinstance(session, Finding):
        yield session
        return
    try:
        if given.remote is None:
            session.sparkContext.setLogLevel("OFF")  # its errors become findings
        yield from examine_spark(session, driver, request=request)
    finally:
        session.stop()


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, such as spark.executor.memory=4g")
    return name, value
