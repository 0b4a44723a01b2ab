"""Starts Spark, inspects its executors, and describes its settings. What does not work becomes a finding."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from sparkkeras import arguments
from sparkkeras.data.dataset import DriverAddress
from sparkkeras.data.local_dataset import LocalRunning
from sparkkeras.diagnostics import inspection
from sparkkeras.diagnostics.findings import ERROR, Finding
from sparkkeras.diagnostics.inspection import Inspection, TokenServer
from sparkkeras.errors import SparkKerasError
from sparkkeras.rpc import addresses
from sparkkeras.rpc.addresses import connect_error, host_and_port
from sparkkeras.rpc.options import ServerOptions, check_seconds
from sparkkeras.spark.activity import executor_addresses
from sparkkeras.spark.cluster import SparkRunning, driver_address
from sparkkeras.spark.connect import RemoteRunning, client_address, is_remote, slots_of_session
from sparkkeras.spark.job_errors import translated
from sparkkeras.spark.settings import is_local, task_cores, worker_ports
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

START_SECONDS = 60.0
"""How long Spark, and the workers of a cluster, may take to start."""

_POLL_SECONDS = 0.05
_CONNECT_PORT = 15002
_WOKEN_TASKS = 64
_CONNECTIONS = 32


@dataclass(frozen=True)
class Request:
    """What a diagnosis tries.

    Attributes:
        host: The address at which workers reach the driver; ``None``: that of Spark's settings.
        bind: The address that the driver's server listens on; see `ServerOptions`.
        port: The port of the driver that workers have to reach; 0: any free port.
        start_seconds: How long Spark, and the executors, may take to start.

    Raises:
        ConfigurationError: A value is out of range.
    """

    host: str | None = None
    bind: str | None = None
    port: int = 0
    start_seconds: float = START_SECONDS

    def __post_init__(self) -> None:
        ServerOptions(host=self.host, bind=self.bind)
        object.__setattr__(self, "port", arguments.port("port", self.port))
        check_seconds("start_seconds", self.start_seconds)


@dataclass(frozen=True)
class SparkFacts:
    """What Spark says of itself and its executors.

    Attributes:
        version: The version of the server or of the driver's Spark.
        master: The master.
        is_remote: Whether it is a session of Spark Connect.
        settings: All settings by name.
        java: The version of the driver's Java; empty if unknown.
        slots: The number of tasks that can run at the same time; 0 if unknown.
        workers: The descriptions of the workers, see `Inspection`; one for each slot.
        findings: What did not work.
        unreached_executors: The executors to which the driver cannot connect, and why.
        is_any_port: Whether the workers try to reach a port of the driver that was chosen at random.
    """

    version: str
    master: str
    is_remote: bool
    settings: Mapping[str, str]
    java: str = ""
    slots: int = 0
    workers: tuple[dict[str, Any], ...] = ()
    findings: tuple[Finding, ...] = ()
    unreached_executors: tuple[str, ...] = ()
    is_any_port: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the workers run on the driver's machine."""
        return is_local(self.master)

    @property
    def is_dynamic(self) -> bool:
        """Whether Spark starts and ends executors as needed. It then runs no barrier stages."""
        return self.is_on("spark.dynamicAllocation.enabled")

    @property
    def task_cores(self) -> int:
        """CPU cores per task."""
        return int(self.settings.get("spark.task.cpus") or 1)

    def is_on(self, name: str, default: bool = False) -> bool:
        """Whether a setting is true."""
        return self.settings.get(name, str(default)).strip().lower() == "true"


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
    problem = _unreached_master(remote or master or settings.get("spark.master", ""))
    if problem:
        return Finding(ERROR, "Spark", f"cannot be started with {where}: {problem[0]}.", problem[1])
    with _standard_error() as log:
        started = in_time(start, seconds)
        log.seek(0)
        written = log.read().decode(errors="replace")
    if isinstance(started, TimeoutError):
        return Finding(
            ERROR,
            "Spark",
            f"cannot be started: no answer from {where} within {seconds:.0f} s.",
            "If this machine is slow, raise --start-seconds (start_seconds= of diagnose). Otherwise check the address, that "
            "the server runs, and that no firewall blocks its port.",
        )
    if isinstance(started, Exception):
        return not_started(started, where, written)
    return started


def _unreached_master(url: str) -> tuple[str, str] | None:
    """Why the master or the Spark Connect server of a URL cannot be reached, and a remedy; ``None`` if unknown."""
    kind, separator, rest = url.partition("://")
    if not url or re.fullmatch(r"local(\[.*\])?|local-cluster\[.*\]|yarn", url) or (separator and kind == "k8s"):
        return None
    if not separator or kind not in ("spark", "sc"):
        known = "local[N], spark://host:port, yarn, k8s://host:port, or with --remote sc://host:port"
        return "it is no address of Spark", f"Choose {known}."
    reasons = []
    for address in rest.partition("/")[0].partition(";")[0].split(","):  # of several masters, one is enough
        host, _, port = address.rpartition(":")
        if kind == "sc" and not host:
            host, port = address, str(_CONNECT_PORT)
        if not host or not port.isdigit() or int(port) > 65535:
            return f"{address!r} is not host:port", f"Write the address as {kind}://host:port."
        reason = connect_error(host.strip("[]"), int(port))
        if not reason:
            return None
        reasons.append(f"{host}:{port} does not answer ({reason})")
    server = "the master" if kind == "spark" else "the Spark Connect server"
    return ", ".join(reasons), f"Check the address, that {server} runs there, and that no firewall blocks the port."


@contextmanager
def _standard_error() -> Iterator[IO[bytes]]:
    """Collect what this process, and Java that starts meanwhile, write to standard error: Spark's log is no finding."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        before = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(before, 2)
            os.close(before)


def not_started(error: Exception, where: str, log: str = "") -> Finding:
    """The finding that Spark could not be started.

    Args:
        error: The error.
        where: The master.
        log: What Java has written on standard error; empty if unknown.
    """
    if isinstance(error, SparkKerasError):
        return Finding.rejected("Spark", error, "Start a session first (SparkSession.builder.getOrCreate()).")
    reason, remedy = _reason(str(error) or repr(error), log)
    return Finding(ERROR, "Spark", f"cannot be started with {where}: {reason.rstrip('.')}.", remedy)


def _reason(text: str, log: str) -> tuple[str, str]:
    """The reason why Spark could not be started, and a remedy."""
    causes = [line.strip().removeprefix(": ") for line in text.splitlines()]
    first = next((line for line in causes if line and not line.startswith(("at ", "...", "An error occurred while"))), text)
    if "JAVA_GATEWAY_EXITED" in text or "Java gateway process exited" in text:
        first = _java_error(log) or "Java ends with an error, which it prints on standard error"
    if any(
        name in text for name in ("BindException", "UnresolvedAddress", "UnknownHost", "Cannot assign requested address")
    ):
        return first, (
            "spark.driver.host has to be a name or an address of this machine that the executors reach; set "
            "spark.driver.bindAddress=0.0.0.0 if this machine does not have that address itself."
        )
    if "All masters are unresponsive" in text:
        return first, "Check the address of the master, and that it runs."
    if "getSubject is not supported" in text + log:
        return first, "Use Java 17 or 21, and set JAVA_HOME to its folder: this Spark does not run on a later one."
    if "PACKAGE_NOT_INSTALLED" in text or "No module named" in text:
        return first, "Install what Spark needs here: pip install 'sparkkeras[connect]' for Spark Connect, else pyspark."
    return first, "Check the master, the settings, and spark-defaults.conf."


def _java_error(log: str) -> str:
    """The first error in what Java has written; empty if there is none."""
    lines = [line.strip() for line in log.splitlines()]
    found = (line for line in lines if re.match(r"(Exception in thread|Error|Unrecognized|Invalid)\b", line))
    return re.sub(r'^Exception in thread "[^"]*" (\S+\.\w+: )?', "", next(found, ""))


def describe(session: SparkSession, backend: str, request: Request) -> SparkFacts:
    """Describe Spark, and inspect its executors.

    Args:
        session: The session.
        backend: Keras's backend.
        request: The address and port that workers have to reach, and how long they may take to start.
    """
    facts, seconds = replace(_settings_of(session), is_any_port=not request.port), request.start_seconds
    context = None if facts.is_remote else session.sparkContext
    try:
        ports = worker_ports(facts.settings)
    except SparkKerasError as error:
        return replace(facts, findings=(Finding.rejected("settings", error, "Correct the setting."),))
    slots: int | Exception
    executors: tuple[tuple[str, int], ...] = ()
    try:
        if context is None:
            slots = in_time(lambda: slots_of_session(session, task_cores(session.conf)), seconds)
            if not isinstance(slots, Exception):
                address = client_address(session)
        elif _executors_started(context, facts, seconds):
            slots, address = slots_of(context), driver_address(context)
            if not facts.is_local:
                executors = executor_addresses(context)
        else:
            return replace(facts, findings=(_no_executor(facts.settings, seconds),))
    except SparkKerasError as error:
        slots = error
    if isinstance(slots, Exception):
        return replace(facts, findings=(_not_run(slots, seconds),))
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        unreached = inspection.unreached_executors(executors, pool)
    with _token_server(address, request) as (server, findings):
        facts = replace(facts, slots=slots, findings=findings, unreached_executors=tuple(unreached))
        described = Inspection(backend, server, not facts.is_dynamic, ports, executors)
        return _with_workers(facts, _running(session, context, described, min(slots, MOST_TASKS)), seconds, context)


def _running(session: SparkSession, context: SparkContext | None, task: Inspection, tasks: int) -> LocalRunning[Any]:
    """Start the inspection as a job that can be cancelled."""
    from pyspark import cloudpickle

    for module in (inspection, addresses):  # which workers may lack
        cloudpickle.register_pickle_by_value(module)
    if context is None:
        frame = session.range(0, tasks, 1, tasks).mapInArrow(task.on_batches, "result string", barrier=task.is_barrier)
        return RemoteRunning(session, lambda: [json.loads(row["result"]) for row in frame.collect()])
    rdd: Any = context.parallelize(range(tasks), tasks)
    mapped = (rdd.barrier() if task.is_barrier else rdd).mapPartitionsWithIndex(task.on_partition)
    return SparkRunning(context, mapped.collect)


def _settings_of(session: SparkSession) -> SparkFacts:
    if is_remote(session):
        settings = dict(cast(Any, session.conf).getAll)
        return SparkFacts(session.version, settings.get("spark.master", ""), True, settings)
    context = session.sparkContext
    java = str(cast(Any, context._jvm).java.lang.System.getProperty("java.version"))
    return SparkFacts(context.version, context.master or "", False, dict(context.getConf().getAll()), java)


def _no_executor(settings: Mapping[str, str], seconds: float) -> Finding:
    address = f"{settings.get('spark.driver.host', '?')}:{settings.get('spark.driver.port', '?')}"
    return Finding(
        ERROR,
        "executors",
        f"none has registered with the driver within {seconds:.0f} s.",
        "Either the cluster has no room for one (spark.executor.memory, spark.executor.cores; see what its UI shows), or "
        f"executors do not reach the driver at {address}: set spark.driver.host to an address that they reach.",
    )


def _with_workers(facts: SparkFacts, job: LocalRunning[Any], seconds: float, context: SparkContext | None) -> SparkFacts:
    """Wait for the inspection."""
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
            "Other jobs may use all slots: look at Spark's UI. Or executors cannot connect to each other on "
            "spark.blockManager.port: open it between them.",
        )
    return Finding.rejected("workers", error, "Look at the logs of the executors.")


def _executors_started(context: SparkContext, facts: SparkFacts, seconds: float) -> bool:
    """Wait until executors have started, unless Spark runs on this machine. Returns whether there is one."""
    if facts.is_local:
        return True
    scala: Any = context._jsc.sc()
    deadline = time.monotonic() + seconds
    count, since = 0, time.monotonic()
    with _tasks_waiting(context) if facts.is_dynamic else nullcontext():
        while time.monotonic() < deadline and not (count and time.monotonic() - since > SETTLING_SECONDS):
            now = int(scala.getExecutorMemoryStatus().size()) - 1  # without the driver
            if now != count:
                count, since = now, time.monotonic()
            time.sleep(_POLL_SECONDS)
    return count > 0


@contextmanager
def _tasks_waiting(context: SparkContext) -> Iterator[None]:
    """Run a job without work in the background: with dynamic allocation, Spark starts executors for tasks that wait."""
    numbers: Any = context.parallelize(range(_WOKEN_TASKS), _WOKEN_TASKS)
    job = SparkRunning(context, numbers._jrdd.count)  # in Java: the Python of workers may be missing
    try:
        yield
    finally:
        if not job.done:
            job.cancel()


@contextmanager
def _token_server(driver: DriverAddress, request: Request) -> Iterator[tuple[TokenServer | None, tuple[Finding, ...]]]:
    """Serve a token where asynchronous training and searches serve workers, or say why that fails."""
    served, port = driver.served_at(request.host, request.bind), request.port
    token = secrets.token_hex(16)
    stack = ExitStack()
    try:
        bound = stack.enter_context(inspection.serving(served.listen, (port,), token))
    except OSError as error:
        remedy = (
            "Choose another port=, or 0 for any free one."
            if port
            else "The address has to be one of this machine's; set spark.driver.bindAddress=0.0.0.0 (or bind= of "
            "server_options) if workers reach it by another one."
        )
        yield (
            None,
            (
                Finding(
                    ERROR,
                    "driver",
                    f"no server can listen on {host_and_port(served.listen, port)}: {error.strerror or error}.",
                    remedy,
                ),
            ),
        )
        return
    with stack:
        yield TokenServer(served.host, bound, token), ()


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
