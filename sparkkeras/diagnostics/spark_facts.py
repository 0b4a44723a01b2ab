"""Starts Spark, inspects its executors, and describes its settings. What does not work becomes a finding."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.diagnostics import inspection
from sparkkeras.diagnostics.findings import ERROR, Finding
from sparkkeras.diagnostics.inspection import Inspection, Server
from sparkkeras.errors import SparkKerasError
from sparkkeras.spark.cluster import SparkRunning, driver_address
from sparkkeras.spark.connect import RemoteRunning, is_remote, slots_of_session, task_cores
from sparkkeras.spark.job_errors import translated
from sparkkeras.spark.master import is_local
from sparkkeras.spark.slots import slots_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

R = TypeVar("R")

MOST_TASKS = 512
"""No more slots than this are inspected."""

SETTLING_SECONDS = 2.0
"""Executors have started when their number does not change for so long."""

BACKGROUND = "sparkkeras-in-time"
"""The name of the threads of `in_time`."""

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class SparkFacts:
    """What Spark says of itself and its executors.

    Attributes:
        version: The version of the server or of the driver's Spark.
        master: The master.
        is_remote: Whether it is a session of Spark Connect.
        settings: All settings by name.
        slots: The number of tasks that can run at the same time; 0 if unknown.
        workers: The descriptions of the workers, see `Inspection`; one for each slot.
        findings: What did not work.
    """

    version: str
    master: str
    is_remote: bool
    settings: Mapping[str, str]
    slots: int = 0
    workers: tuple[dict[str, Any], ...] = ()
    findings: tuple[Finding, ...] = field(default=())

    @property
    def is_local(self) -> bool:
        """Whether the workers run on the driver's machine."""
        return is_local(self.master)


def start_spark(
    master: str | None, remote: str | None, settings: Mapping[str, str], seconds: float
) -> SparkSession | Finding:
    """Start a session, or say why that does not work.

    Args:
        master: The master; ``None``: that of Spark's configuration, else ``local[*]``.
        remote: The URL of a Spark Connect server in place of a master.
        settings: Further settings.
        seconds: How long it may take.
    """
    from pyspark.sql import SparkSession

    def start() -> SparkSession:
        builder: Any = SparkSession.builder.appName("sparkkeras doctor")
        if remote is None:
            builder = builder.config("spark.ui.showConsoleProgress", "false")
            if master is not None:
                builder = builder.master(master)
        else:
            builder = builder.remote(remote)
        for name, value in settings.items():
            builder = builder.config(name, value)
        session: SparkSession = builder.getOrCreate()
        if remote is not None:
            _ = session.version  # connects
        return session

    where = remote or master or "the master of Spark's configuration"
    started = in_time(start, seconds)
    if isinstance(started, TimeoutError):
        return Finding(
            ERROR,
            "Spark",
            f"cannot be started: no answer from {where} within {seconds:.0f} s.",
            "Check the address, that the server runs, and that no firewall blocks its port.",
        )
    if isinstance(started, Exception):
        reason, remedy = _reason(started)
        return Finding(ERROR, "Spark", f"cannot be started with {where}: {reason}", remedy)
    return started


def _reason(error: Exception) -> tuple[str, str]:
    """The reason why Spark could not be started, and a remedy."""
    text = str(error)
    causes = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(("at ", "..."))]
    first = next((line for line in causes if not line.startswith("An error occurred while calling")), repr(error))
    first = first.removeprefix(": ")
    if "JAVA_GATEWAY_EXITED" in text or "Java gateway process exited" in text:
        return "Java ends with an error, which it prints on standard error.", "Check the master and the settings."
    if any(
        name in text for name in ("BindException", "UnresolvedAddress", "UnknownHost", "Cannot assign requested address")
    ):
        return first, (
            "spark.driver.host has to be a name or an address of this machine that the executors reach; set "
            "spark.driver.bindAddress=0.0.0.0 if this machine does not have that address itself."
        )
    if "All masters are unresponsive" in text:
        return first, "Check the address of the master, and that it runs."
    return first, "Check the master, and spark-defaults.conf."


def describe(session: SparkSession, backend: str, host: str | None, port: int, seconds: float) -> SparkFacts:
    """Describe Spark, and inspect its executors.

    Args:
        session: The session.
        backend: Keras's backend.
        host: The address at which workers reach the driver; ``None``: that of Spark's settings.
        port: The port of the driver that they have to reach; 0: any free port.
        seconds: How long workers may take to start.
    """
    if is_remote(session):
        return _describe_remote(session, backend, host, port, seconds)
    context = session.sparkContext
    settings = dict(context.getConf().getAll())
    facts = SparkFacts(context.version, context.master or "", False, settings)
    if not _executors_started(context, facts, seconds):
        return replace(facts, findings=(_no_executor(settings, seconds),))
    facts = replace(facts, slots=slots_of(context))
    with _token_server(driver_address(context), host, port) as (server, findings):
        facts = replace(facts, findings=findings)
        is_barrier = settings.get("spark.dynamicAllocation.enabled", "false") != "true"
        tasks = min(facts.slots, MOST_TASKS)
        rdd: Any = context.parallelize(range(tasks), tasks)
        task = Inspection(backend, server, is_barrier).on_partition
        mapped = rdd.barrier().mapPartitionsWithIndex(task) if is_barrier else rdd.mapPartitionsWithIndex(task)
        return _with_workers(facts, lambda call: SparkRunning(context, call), mapped.collect, seconds, context)


def _no_executor(settings: Mapping[str, str], seconds: float) -> Finding:
    address = f"{settings.get('spark.driver.host', '?')}:{settings.get('spark.driver.port', '?')}"
    return Finding(
        ERROR,
        "executors",
        f"none has registered with the driver within {seconds:.0f} s.",
        "Either the cluster has no room for one (spark.executor.memory, spark.executor.cores; see what its UI shows), or "
        f"executors do not reach the driver at {address}: set spark.driver.host to an address that they reach.",
    )


def _describe_remote(session: SparkSession, backend: str, host: str | None, port: int, seconds: float) -> SparkFacts:
    from sparkkeras.runner.connect_hosts import client_address

    settings = dict(cast(Any, session.conf).getAll)
    facts = SparkFacts(session.version, settings.get("spark.master", ""), True, settings)
    slots = in_time(lambda: slots_of_session(session, task_cores(session)), seconds)
    if isinstance(slots, Exception):
        return replace(facts, findings=(_not_run(slots, seconds),))
    facts = replace(facts, slots=slots)
    frame = session.range(0, slots, 1, slots)
    try:
        address = client_address(session)
    except SparkKerasError as error:
        return replace(facts, findings=(_not_run(error, seconds),))
    with _token_server(address, host, port) as (server, findings):
        facts = replace(facts, findings=findings)
        task = Inspection(backend, server, True).on_batches
        mapped = frame.mapInArrow(task, "result string", barrier=True)

        def collect() -> list[dict[str, Any]]:
            return [json.loads(row["result"]) for row in mapped.collect()]

        return _with_workers(facts, lambda call: RemoteRunning(session, call), collect, seconds, None)


def _with_workers(
    facts: SparkFacts,
    running: Callable[[Callable[[], Any]], Any],
    collect: Callable[[], list[dict[str, Any]]],
    seconds: float,
    context: SparkContext | None,
) -> SparkFacts:
    """Run the inspection as a job that can be cancelled."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(inspection)
    job = running(collect)
    try:
        found = in_time(job.result, seconds + inspection.LOAD_SECONDS)
    finally:
        if not job.done:
            job.cancel()
    if isinstance(found, Exception):
        error = found if isinstance(found, TimeoutError) else translated(found, context)
        return replace(facts, findings=(*facts.findings, _not_run(error, seconds)))
    return replace(facts, workers=tuple(found))


def _not_run(error: Exception, seconds: float) -> Finding:
    """The finding that tasks do not run."""
    if isinstance(error, TimeoutError):
        return Finding(
            ERROR,
            "workers",
            f"tasks do not run to their end within {seconds + inspection.LOAD_SECONDS:.0f} s.",
            "Other jobs may use all slots: look at Spark's UI.",
        )
    if isinstance(error, SparkKerasError):
        message, _, advice = str(error).partition(". ")
        return Finding(ERROR, "workers", f"{message.rstrip('.')}.", advice.partition("\n")[0])
    return Finding(ERROR, "workers", str(error).splitlines()[0], "Look at the logs of the executors.")


def _executors_started(context: SparkContext, facts: SparkFacts, seconds: float) -> bool:
    """Wait until executors have started, unless Spark runs on this machine. Returns whether there is one."""
    if facts.is_local:
        return True
    scala: Any = context._jsc.sc()
    deadline = time.monotonic() + seconds
    count, since = 0, time.monotonic()
    while time.monotonic() < deadline and not (count and time.monotonic() - since > SETTLING_SECONDS):
        now = int(scala.getExecutorMemoryStatus().size()) - 1  # without the driver
        if now != count:
            count, since = now, time.monotonic()
        time.sleep(_POLL_SECONDS)
    return count > 0


@contextmanager
def _token_server(driver: DriverAddress, host: str | None, port: int) -> Iterator[tuple[Server | None, tuple[Finding, ...]]]:
    """Serve a token where asynchronous training and searches serve workers, or say why that fails."""
    reached, listen = (host, "0.0.0.0") if host else (driver.host, driver.listen)
    token = secrets.token_hex(16)
    stack = ExitStack()
    try:
        bound = stack.enter_context(inspection.serving(listen, port, token))
    except OSError as error:
        remedy = (
            "Choose another port=, or 0 for any free one."
            if port
            else "Set spark.driver.host to an address of this machine, or spark.driver.bindAddress=0.0.0.0."
        )
        yield (
            None,
            (Finding(ERROR, "driver", f"no server can listen on {listen}:{port}: {error.strerror or error}.", remedy),),
        )
        return
    with stack:
        yield Server(reached, bound, token), ()


def in_time(call: Callable[[], R], seconds: float) -> R | Exception:
    """The result of a call, or its error; ``TimeoutError`` if it takes longer, and goes on in the background."""
    outcome: list[R | Exception] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name=BACKGROUND, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else TimeoutError()
