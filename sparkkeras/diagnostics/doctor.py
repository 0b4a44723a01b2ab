"""`diagnose`: whether this machine and this cluster can train, and what would be slow or break."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sparkkeras import arguments
from sparkkeras.diagnostics import checks, inspection
from sparkkeras.diagnostics.checks import Described, Needs
from sparkkeras.diagnostics.findings import ERROR, OK, Diagnosis, Finding
from sparkkeras.diagnostics.inspection import Inspection
from sparkkeras.diagnostics.spark_facts import SparkFacts, describe
from sparkkeras.errors import SparkKerasError, counted

if TYPE_CHECKING:
    import keras
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

START_SECONDS = 60.0
"""How long Spark, and the workers of a cluster, may take to start."""


@arguments.known_arguments
def diagnose(
    spark: SparkSession | SparkContext | None = None,
    model: keras.Model | None = None,
    data: Any = None,
    *,
    host: str | None = None,
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
        host: The address at which workers reach the driver; ``None``: that of Spark's settings.
        port: The port of the parameter server that they have to reach; 0: any free one.
        start_seconds: How long Spark, and the executors, may take to start.

    Returns:
        The findings, which print as a list.

    Raises:
        ConfigurationError: ``port`` or ``start_seconds`` is out of range, or ``spark`` is something else.

    Example::

        diagnosis = sparkkeras.diagnose(spark, model, train_df)
        assert diagnosis.is_ok(strict=True)
    """
    from sparkkeras.rpc.options import check_seconds
    from sparkkeras.spark.connect import active_session, check_session

    port = arguments.port("port", port)
    check_seconds("start_seconds", start_seconds)
    session = _session_of(spark) if spark is not None else active_session()
    check_session(session)
    driver, findings = examine_driver()
    return Diagnosis((*findings, *examine_spark(session, driver, model, data, host, port, start_seconds)))


def examine_driver() -> tuple[Described, list[Finding]]:
    """Describe the driver, and check it."""
    backend = backend_name()
    driver = Inspection(backend).here()
    return driver, list(checks.check_driver(driver, backend, unsupported(backend)))


def examine_java(environment: Mapping[str, str]) -> Finding:
    """Check the Java that Spark would start with these environment variables."""
    return checks.check_java(*inspection.run_java(environment))


def examine_spark(
    session: SparkSession,
    driver: Described,
    model: keras.Model | None = None,
    data: Any = None,
    host: str | None = None,
    port: int = 0,
    seconds: float = START_SECONDS,
) -> Iterator[Finding]:
    """Check Spark, its executors and settings, and what model and data need; see `diagnose`."""
    backend = backend_name()
    facts = describe(session, backend, host, port, seconds)
    yield from checks.check_spark(facts, driver["packages"].get("pyspark", ""))
    yield from checks.check_workers(facts, driver, backend, unsupported(backend))
    state_bytes = 0
    if model is not None:
        finding, state_bytes = _check_model(model)
        yield finding
    needs = Needs(state_bytes)
    if data is not None and facts.workers:
        finding, needs = _check_data(data, needs)
        yield finding
    yield from checks.check_resources(facts, driver, needs)
    yield from checks.check_settings(facts, needs, _result_bytes(session, facts))


def backend_name() -> str:
    """Keras's backend: of Keras, if it has been imported, else of the environment variable or of Keras's file."""
    if "keras" in sys.modules:
        with suppress(Exception):
            name: str = sys.modules["keras"].backend.backend()
            return name
    return os.environ.get("KERAS_BACKEND") or inspection.configured_backend()


def unsupported(backend: str) -> Callable[[Described], Sequence[str]]:
    """A function that lists the packages of a process that are missing, or whose versions this package does not support."""
    try:
        requirements = importlib.metadata.requires("sparkkeras") or []
    except importlib.metadata.PackageNotFoundError:  # on the path, and not installed
        requirements = []

    def problems(described: Described) -> list[str]:
        found = [f"{name} is not installed" for name in ("keras", backend) if name not in described["packages"]]
        try:
            from packaging.requirements import Requirement
        except ImportError:  # which Keras installs
            return found
        for text in requirements:
            requirement = Requirement(text)
            version = described["packages"].get(requirement.name)
            if version is None or requirement.marker is not None or requirement.name not in inspection.PACKAGES:
                continue
            if requirement.name in inspection.BACKENDS and requirement.name != backend:
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{requirement.name} {version} is not supported ({requirement.specifier})")
        return found

    return problems


def _session_of(spark: Any) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    return SparkSession(spark) if isinstance(spark, SparkContext) else spark


def _check_model(model: keras.Model) -> tuple[Finding, int]:
    """Check that a model can be trained and sent; also returns the size of its state."""
    from sparkkeras.modeling.archive import ModelArchive
    from sparkkeras.modeling.compilation import check_trainable
    from sparkkeras.modeling.state import ModelState

    try:
        check_trainable(model)
        ModelArchive.pack(model)
    except SparkKerasError as error:
        message, _, advice = str(error).partition(". ")
        return Finding(ERROR, "model", f"{message.rstrip('.')}.", advice), 0
    size = ModelState.take(model).nbytes
    return Finding(OK, "model", f"{model.name}: {size / 1e6:,.1f} MB with optimizer variables"), size


def _check_data(data: Any, needs: Needs) -> tuple[Finding, Needs]:
    """Count the rows, and estimate their size from the first one."""
    if hasattr(data, "count") and hasattr(data, "take"):
        try:
            rows, first = data.count(), data.take(1)
        except Exception as error:
            return Finding(ERROR, "data", f"cannot be read: {str(error).splitlines()[0]}", "Look at the error above."), needs
        each = len(pickle.dumps(first[0], 5)) if first else 0
    elif callable(data):
        return Finding(OK, "data", "a function that reads batches, which are not stored"), needs
    else:
        arrays = data if isinstance(data, (list, tuple)) else [data]
        rows = len(arrays[0]) if len(arrays) else 0
        each = sum(getattr(array, "nbytes", 0) for array in arrays) // max(rows, 1)
    if not rows:
        return Finding(ERROR, "data", "has no rows.", "Pass the data to train on."), needs
    found = Needs(needs.state_bytes, rows * each)
    return Finding(OK, "data", f"{counted(rows, 'row')}, about {rows * each / 1e6:,.1f} MB"), found


def _result_bytes(session: SparkSession, facts: SparkFacts) -> int | None:
    if facts.is_remote:
        return None
    from sparkkeras.spark.cluster import max_result_bytes

    return max_result_bytes(session.sparkContext)
