"""`diagnose`: whether this machine and this cluster can train, and what would be slow or break."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sparkkeras import arguments
from sparkkeras.diagnostics import checks, inspection
from sparkkeras.diagnostics.checks import Described, Needs, Requirements, Unmet
from sparkkeras.diagnostics.findings import ERROR, OK, Diagnosis, Finding
from sparkkeras.diagnostics.inspection import Inspection
from sparkkeras.diagnostics.spark_facts import START_SECONDS, Request, describe, not_started
from sparkkeras.errors import SparkKerasError, counted
from sparkkeras.spark.cluster import max_result_bytes
from sparkkeras.spark.connect import active_session, check_session, is_remote
from sparkkeras.spark.job_errors import translated
from sparkkeras.spark.settings import uses_connect

if TYPE_CHECKING:
    import keras
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


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

    def unmet(described: Described) -> dict[str, Unmet]:
        packages = described["packages"]
        found = {name: Unmet("is not installed", name) for name in least if name not in packages}
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
                found[name] = Unmet("is not installed", f"{name}{specifier}")
            elif version is not None and not specifier.contains(version, prereleases=True):
                found[name] = Unmet(f"{version} is not supported", f"{name}{specifier}")
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
