"""The SparkContext: checks it, sets up its workers, runs jobs, and translates errors.

Training runs in separate Python workers: Spark has a pool of Python workers for each set of environment variables, and the
one for training is not shared with the user's functions. So the number of processes that import the backend is at most the
number of slots, and the backend is the driver's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkkeras import errors
from sparkkeras.data.dataset import DriverAddress, Shared
from sparkkeras.data.local import LocalRunning, LocalShared
from sparkkeras.errors import ClusterError, ConfigurationError, SparkKerasError, WorkerError
from sparkkeras.spark import probe
from sparkkeras.spark.slots import held_slots
from sparkkeras.worker.device import Environment, worker_environment

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

R = TypeVar("R")
_environment_lock = threading.RLock()
equipping = threading.Lock()
"""Held while workers are probed, because two threads may start at the same time."""

_log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent.parent
"""The folder of this package, which is sent to workers that lack it."""

_DEFAULT_RESULT_SIZE = "1g"
_INLINE_BYTES = 64 * 1024
_PROBED_SLOTS = 64
_LOOKS, _LOOK_SECONDS = 20, 0.05


class Cluster:
    """A running SparkContext.

    Args:
        context: The context of the data; ``None``: the active one, or a new one on this machine.
        environment: Returns the environment variables of training workers.

    Attributes:
        context: The SparkContext.
        task_cores: CPU cores per task (``spark.task.cpus``).
        max_result_bytes: The limit on the size of all results of one job, in bytes (``spark.driver.maxResultSize``); 0: no
            limit.

    Raises:
        ClusterError: The context was stopped, or workers lack Keras or its backend, or run another Python version.
    """

    def __init__(self, context: SparkContext | None, environment: Environment = worker_environment) -> None:
        self.context = context or active_context()
        check_running(self.context)
        settings = _settings_of(self.context)
        self.task_cores = settings.task_cores
        self.max_result_bytes = settings.max_result_bytes
        self._environment = {**environment(self.task_cores), "SPARKKERAS_WORKER": "1"}
        _equip(self)

    @property
    def carried_environment(self) -> Mapping[str, str]:
        """The environment variables to send with each task: none, because Spark sets them for the Python workers."""
        return {}

    @property
    def is_local(self) -> bool:
        """Whether the workers run on this machine and share its files (master ``local[...]``)."""
        master = self.context.master or ""
        return master.startswith("local") and not master.startswith("local-cluster")

    @property
    def slots(self) -> int:
        """The number of tasks that can currently run at the same time."""
        return slots_of(self.context)

    @property
    def free_slots(self) -> int:
        """The number of tasks that could start at the same time now, at least 1."""
        for _ in range(_LOOKS):  # Spark updates its status asynchronously, so tasks that have just ended may still be listed
            busy = self._running_tasks()
            if not busy:
                break
            time.sleep(_LOOK_SECONDS)
        return max(1, self.slots - busy)

    def _running_tasks(self) -> int:
        tracker = self.context.statusTracker()
        stages = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
        return sum(stage.numActiveTasks for stage in stages if stage is not None)

    @property
    def driver(self) -> DriverAddress:
        """The address at which tasks reach this process: Spark's driver address, or the loopback if Spark runs locally."""
        if self.is_local:
            return DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)
        conf = self.context.getConf()
        host = conf.get("spark.driver.host") or "127.0.0.1"
        return DriverAddress(host, conf.get("spark.driver.bindAddress") or host, is_local=False)

    def require(self, module: str, package: str, purpose: str) -> None:
        """Reject workers that lack an optional module.

        Args:
            module: One of `sparkkeras.spark.probe.OPTIONAL`.
            package: Its name for pip.
            purpose: The feature that needs it, in the plural, for the message.

        Raises:
            ClusterError: A worker lacks it.
        """
        check_optional(_equipped[self.context], module, package, purpose)

    def background(self, call: Callable[[], R]) -> SparkRunning[R]:
        """Run a call that starts jobs in a background thread.

        Raises:
            ConfigurationError: Its jobs would never start; see `check_slots`.
        """
        check_slots(self.context)
        return SparkRunning(self.context, call)

    @contextmanager
    def training_workers(self) -> Iterator[None]:
        """RDDs whose Java object is created inside the ``with`` block run in the Python workers for training."""
        with _environment_lock:
            # Replace the dict instead of changing it, because threads of the user may be reading it.
            before = self.context.environment
            self.context.environment = {**before, **self._environment}
            try:
                yield
            finally:
                self.context.environment = before

    @contextmanager
    def share(self, value: R) -> Iterator[Shared[R]]:
        """Broadcast a value; the broadcast is destroyed at the end of the ``with`` block."""
        broadcast = self.context.broadcast(value)
        try:
            yield broadcast
        finally:
            quietly(broadcast.destroy)

    def keep(self, value: R) -> Shared[R]:
        """Make a value available to tasks until the SparkContext stops: small values in the closure, others as a broadcast.

        Broadcasts are cached by content: it is unknown when the last DataFrame that uses one is gone, and Spark keeps a file
        for each.
        """
        payload = pickle.dumps(value, 5)
        if len(payload) <= _INLINE_BYTES:
            return LocalShared(value)
        for context in [context for context in _kept if context._jsc is None]:
            del _kept[context]
        kept = _kept.setdefault(self.context, {})
        digest = hashlib.sha256(payload).digest()
        if digest not in kept:
            kept[digest] = self.context.broadcast(value)
        return kept[digest]

    def collect(self, rdd: RDD[R], partitions: Sequence[int] | None = None) -> list[R]:
        """Run a job and collect its results. An interrupt (Ctrl-C) cancels the job.

        Args:
            rdd: The RDD.
            partitions: The partitions to compute; default: all.

        Raises:
            ConfigurationError: The job would never start; see `check_slots`.
            WorkerError: A task failed in all of Spark's attempts; the message contains the worker's traceback.
            SparkKerasError: A task raised an error of this package.
        """
        check_slots(self.context)
        try:
            with self.cancellable():
                if partitions is None:
                    return rdd.collect()
                with self.training_workers():
                    built: Any = _Built(rdd)
                return list(
                    self.context.runJob(built, _each, partitions)
                )  # without the lock: it may run as long as training
        except Exception as error:
            raise translated(error, self.context) from error

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Jobs that run inside the ``with`` block are cancelled by an interrupt (Ctrl-C)."""
        tag = f"sparkkeras-{uuid.uuid4().hex}"
        self.context.addJobTag(tag)
        try:
            with interruptible():
                yield
        except KeyboardInterrupt:
            quietly(lambda: self.context.cancelJobsWithTag(tag))
            raise
        finally:
            quietly(lambda: self.context.removeJobTag(tag))


class _Built:
    """A stand-in for an RDD in `SparkContext.runJob`, which maps its function over the RDD and runs the result.

    PySpark captures the workers' environment variables when it creates the Java object of an RDD. `runJob` would create it
    too late, so it is created here.

    Args:
        rdd: The RDD. Its Java object, with the function of the job, is created by the constructor.
    """

    def __init__(self, rdd: RDD[Any]) -> None:
        self._mapped = rdd.mapPartitions(_each)
        _ = self._mapped._jrdd

    def mapPartitions(self, function: Callable[[Iterable[Any]], Iterable[Any]]) -> RDD[Any]:  # noqa: N802 - an RDD's
        """The RDD that the constructor mapped; ``function`` must be the function of the job."""
        assert function is _each
        return self._mapped


class SparkRunning(LocalRunning[R]):
    """A call in a background thread, whose Spark jobs can be cancelled."""

    def __init__(self, context: SparkContext, call: Callable[[], R]) -> None:
        from pyspark import InheritableThread

        self._context, self._tag = context, f"sparkkeras-{uuid.uuid4().hex}"

        def tagged() -> R:
            context.addJobTag(self._tag)
            return call()

        super().__init__(tagged, InheritableThread)

    def cancel(self) -> None:
        """Cancel the jobs of the call. Does not wait."""
        quietly(lambda: self._context.cancelJobsWithTag(self._tag))


@dataclass(frozen=True)
class _Settings:
    task_cores: int
    max_result_bytes: int


_kept: dict[SparkContext, dict[bytes, Shared[Any]]] = {}
_settings: weakref.WeakKeyDictionary[SparkContext, _Settings] = weakref.WeakKeyDictionary()


def _settings_of(context: SparkContext) -> _Settings:
    """The settings of a context, cached because reading its configuration takes milliseconds."""
    if context not in _settings:
        conf = context.getConf()
        jvm: Any = context._jvm
        size = jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(
            conf.get("spark.driver.maxResultSize", _DEFAULT_RESULT_SIZE)
        )
        _settings[context] = _Settings(int(conf.get("spark.task.cpus", "1") or 1), int(size))
    return _settings[context]


def _each(rows: Iterable[R]) -> Iterable[R]:
    return rows


def active_context() -> SparkContext:
    """The active SparkContext, or a new one on this machine, whose workers run the driver's Python.

    Warns if an earlier context of this process was stopped, because its configuration may not apply to the new one.

    Raises:
        ClusterError: This process uses Spark Connect, which has no SparkContext, or is a worker that runs a task.
    """
    from pyspark import SparkConf, SparkContext, TaskContext

    active: SparkContext | None = SparkContext._active_spark_context
    if active is not None:
        return active
    if TaskContext.get() is not None:
        raise ClusterError(
            "this call starts a Spark job on a worker, inside a task, and only the driver can start jobs. In worker "
            "callbacks, transforms and objectives, use the Keras model in the worker's process (self.model.predict(...))."
        )
    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        raise ClusterError(
            "this call needs a SparkContext, which Spark Connect does not have: pass data as a DataFrame (create one from "
            "arrays with to_data_frame), and a local path for a file."
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setAppName("sparkkeras").setIfMissing("spark.master", "local[*]")
    if conf.get("spark.master", "").startswith("local") and _is_installed(os.environ["PYSPARK_PYTHON"]):
        conf.setIfMissing("spark.python.daemon.module", "sparkkeras.spark.daemon")
    was_stopped = SparkContext._jvm is not None  # the JVM remains after its context was stopped
    context = SparkContext.getOrCreate(conf.setIfMissing("spark.ui.showConsoleProgress", "false"))
    if was_stopped:
        warnings.warn(
            f"the previous Spark session was stopped, so a new one was started with the master {context.master!r}. To "
            "use another master, start a session first (SparkSession.builder.master(...).getOrCreate()).",
            stacklevel=2,
        )
    return context


def _is_installed(python: str) -> bool:
    """Whether a Python can import this installation of the package. The daemon starts before Spark ships any files."""
    code = "import sys, importlib.util as util; sys.stdout.write(util.find_spec('sparkkeras').origin)"
    try:
        process = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, cwd=tempfile.gettempdir(), check=False
        )
    except OSError:  # no such Python, which Spark reports later
        return False
    return process.stdout == str(PACKAGE / "__init__.py")


def check_running(context: SparkContext) -> None:
    """Reject a SparkContext that was stopped.

    Raises:
        ClusterError: The context was stopped.
    """
    if context._jsc is None or context._jsc.sc().isStopped():
        raise ClusterError(STOPPED)


def slots_of(context: SparkContext) -> int:
    """The number of tasks that can currently run at the same time."""
    scala = context._jsc.sc()
    try:
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return max(1, int(scala.maxNumConcurrentTasks(profile)))
    except Exception:  # an internal API of Spark, which may change
        return max(1, context.defaultParallelism)


def check_slots(context: SparkContext) -> None:
    """Reject a job that would deadlock, because another job holds all slots until this thread returns from a callback.

    The tasks of asynchronous training wait for the driver when they are a few epochs ahead of its callbacks, so a callback
    that waits for a slot would wait forever.

    Raises:
        ConfigurationError: No slot is available for the job.
    """
    held = held_slots()
    slots = slots_of(context) if held else 0
    if slots > held or not held:
        return
    fewer = {1: "fewer workers than slots, on a cluster with more slots", 2: "num_workers=1"}.get(
        slots, f"num_workers={slots - 1} or fewer"
    )
    raise ConfigurationError(
        f"this call starts a Spark job inside a callback of an asynchronous fit, which holds all slots ({slots}) until its "
        "callbacks return: the two would wait for each other forever. In callbacks, use the Keras model in the driver's "
        "process (self.model.predict(...), self.model.evaluate(...)), or leave a slot free: train with "
        f"{fewer}."
    )


STOPPED = (
    "the Spark session has been stopped, together with its SparkContext. Start a new one "
    "(SparkSession.builder.getOrCreate()), and create RDDs, DataFrames, SQL functions and searches again."
)
"""The message for calls that use a stopped session or SparkContext."""


_equipped: weakref.WeakKeyDictionary[SparkContext, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The results of `sparkkeras.spark.probe.probe`, one per probed worker."""


def _equip(cluster: Cluster) -> None:
    """Probe the workers, once per context, and ship this package if one lacks it or has another version.

    Raises:
        ClusterError: Workers lack Keras or its backend, or run another Python version.
    """
    with equipping:
        if cluster.context in _equipped:
            return
        found = _probe(cluster)
        check_workers(found)
        if not is_current(found):
            # In the temporary folder of the context, which Spark removes.
            folder = tempfile.mkdtemp(prefix="sparkkeras-", dir=cluster.context._temp_dir)  # type: ignore[attr-defined]
            cluster.context.addPyFile(pack_package(folder))
        _equipped[cluster.context] = found


def check_workers(found: Iterable[Mapping[str, Any]]) -> None:
    """Reject workers that cannot train.

    Args:
        found: The results of `sparkkeras.spark.probe.probe`, one per worker.

    Raises:
        ClusterError: Workers lack Keras or its backend.
    """
    for worker in found:
        if worker["missing"]:
            raise ClusterError(
                f"Spark's workers lack {' and '.join(worker['missing'])}: {worker['python']} (Python {worker['version']}) "
                f"on {worker['host']}. Install it there (pip install {' '.join(worker['missing'])}), or run the workers "
                "with a Python that has it: set the environment variable PYSPARK_PYTHON (with spark-submit, also "
                f"spark.pyspark.python) before the SparkContext starts. The driver runs {sys.executable}."
            )


def check_optional(found: Iterable[Mapping[str, Any]], module: str, package: str, purpose: str) -> None:
    """Reject workers that lack an optional module.

    Args:
        found: The results of `sparkkeras.spark.probe.probe`, one per worker.
        module: One of `sparkkeras.spark.probe.OPTIONAL`.
        package: Its name for pip.
        purpose: The feature that needs it, in the plural, for the message.

    Raises:
        ClusterError: A worker lacks it.
    """
    for worker in found:
        if module in worker["missing_optional"]:
            raise ClusterError(
                f"{purpose} need {package} on Spark's workers, and {worker['python']} (Python {worker['version']}) on "
                f"{worker['host']} lacks it. Install it there: pip install {package}."
            )


def is_current(found: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all workers have this version of the package."""
    ours = probe.package_digest(PACKAGE)
    return all(worker["package"] == ours for worker in found)


def _probe(cluster: Cluster) -> list[dict[str, Any]]:
    from pyspark import cloudpickle

    tasks = min(cluster.slots, _PROBED_SLOTS)
    cloudpickle.register_pickle_by_value(probe)  # the workers may lack this package
    try:
        with cluster.training_workers():
            rdd = cluster.context.parallelize(range(tasks), tasks).mapPartitions(probe.probe)
            _ = rdd._jrdd
        return cluster.collect(rdd)
    finally:
        cloudpickle.unregister_pickle_by_value(probe)


def pack_package(folder: str) -> str:
    """Write this package as a zip file to a folder; returns its path."""
    target = str(Path(folder) / "sparkkeras.zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in {".py", ".typed"}:
                archive.write(path, Path("sparkkeras") / path.relative_to(PACKAGE))
    return target


def translated(error: Exception, context: SparkContext | None = None) -> Exception:
    """Translate an error of Spark: to the error of this package that a worker raised, or to one with its traceback."""
    if isinstance(error, SparkKerasError):
        return error
    text = str(error)
    if "PYTHON_VERSION_MISMATCH" in text:
        return ClusterError(
            "Spark's workers run another Python version than the driver, which runs "
            f"{sys.executable} (Python {'.'.join(map(str, sys.version_info[:3]))}). Before the SparkContext starts, set the "
            "environment variable PYSPARK_PYTHON (with spark-submit, also spark.pyspark.python) to a Python of that version "
            "with Keras installed."
        )
    if "maxResultSize" in text:
        return ClusterError(
            "the results of the job are larger than spark.driver.maxResultSize allows: raise it (for instance "
            "spark.driver.maxResultSize=4g) when the SparkContext starts."
        )
    traceback = worker_traceback(text)
    if not traceback:
        alone = _PACKAGE_ERROR.search(text)  # without a traceback; see `sparkkeras.sources.frame.OverColumns`
        if alone:
            raised = _package_error(_until_java(text, alone.start(1)))
            if raised:
                return raised
        stopped = context is not None and (context._jsc is None or context._jsc.sc().isStopped())
        if stopped:
            return ClusterError("the SparkContext was stopped while a job was running.")
        if re.search(r"\bJob \d+ cancelled\b", text):
            return ClusterError("the Spark job was cancelled, for instance by SparkContext.cancelAllJobs or in Spark's UI.")
        if _WORKER_DIED.search(text):
            return WorkerError(_worker_died(text, None if context is None else context.master))
        return WorkerError(f"Spark could not finish the job: {text.strip().splitlines()[0] if text.strip() else error!r}")
    missing = _MISSING_MODULE.search(traceback.rstrip().rpartition("\n")[2])
    if missing:
        return WorkerError(
            f"Spark's workers lack the Python module {missing[1]!r}: install it on the workers (in the Python of "
            f"PYSPARK_PYTHON), or ship it with SparkContext.addPyFile. The traceback:\n\n{traceback}",
            traceback,
        )
    raised = _package_error(traceback)
    return raised or WorkerError(f"a task failed on a worker. Its traceback:\n\n{traceback}", traceback)


def worker_traceback(text: str) -> str:
    """The Python traceback in a message of Spark, without PySpark's frames; empty if there is none."""
    start = text.find(_TRACEBACK)
    if start < 0:
        return ""
    lines = _until_java(text, start).splitlines()
    kept, skipping = [], False
    for line in lines:
        if line.startswith("  File "):
            skipping = "/pyspark.zip/" in line or "/pyspark/" in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def _worker_died(text: str, master: str | None) -> str:
    """The message for a worker process that died without a Python error.

    Args:
        text: Spark's message.
        master: Spark's master; ``None`` if unknown.
    """
    is_local = master is not None and master.startswith("local") and not master.startswith("local-cluster")
    attempts = re.search(r"failed (\d+) times", text)
    times = "" if attempts is None else f" (attempts at the task: {attempts[1]})"
    help_ = ["smaller batches (batch_size=)", "fewer concurrent tasks per machine"]
    if is_local:
        slots = re.match(r"local\[(\d+|\*)", str(master))
        fewer = "local[2]" if slots is None or slots[1] == "*" else f"local[{int(slots[1]) // 2}]"
        if slots is not None and slots[1] != "1":
            help_[1] += f" (fewer slots than the master {master!r} has, such as {fewer})"
    else:
        help_[1] += " (fewer cores per executor, or a larger spark.task.cpus)"
        help_.append("more off-heap memory for the executors (spark.executor.memoryOverhead)")
    retries = ""
    if is_local and attempts is not None and attempts[1] == "1":
        retries = " With the master local[N], Spark runs a task only once; with local[N,4], up to four times."
    lost = next((line.strip() for line in text.splitlines() if _WORKER_DIED.search(line)), "")
    return (
        f"a worker process died while it ran a task, without a Python error{times}. The usual reason is memory: the "
        "operating system kills processes (kill -9) when memory runs out, and reports it in its log (dmesg). Possible "
        f"solutions: {'; '.join(help_)}.{retries} Spark's message: {lost}"
    )


_WORKER_DIED = re.compile(r"Python worker exited unexpectedly|ExecutorLostFailure|Container killed")


def _until_java(text: str, start: int) -> str:
    """The Python part of a message of Spark from ``start``, without the Java stack trace after it."""
    end = re.compile(r"\n\tat |\n\nJVM stacktrace:").search(text, start)
    return re.sub(r"\s*SQLSTATE: \w+\s*$", "", text[start : None if end is None else end.start()]).strip()


_PACKAGE_ERROR = re.compile(r"(?:^|Python worker: )(sparkkeras\.errors\.\w+: )", re.MULTILINE)  # Connect: in the same line
_MISSING_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'")
_TRACEBACK = "Traceback (most recent call last):"


def _package_error(traceback: str) -> SparkKerasError | None:
    """The error at the end of a worker's traceback, if it is one of this package."""
    last = traceback.rpartition(_TRACEBACK)[2].splitlines()
    for number, line in enumerate(last):
        if line.startswith("sparkkeras.errors."):
            name, _, message = line.removeprefix("sparkkeras.errors.").partition(": ")
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, SparkKerasError):
                return kind("\n".join([message, *last[number + 1 :]]).strip())
    return None


def quietly(call: Callable[[], Any]) -> None:
    """Call a cleanup function and only log its errors, because Spark may already be stopped. Interrupts are raised."""
    try:
        with interruptible():
            call()
    except Exception:
        _log.debug("cleanup failed", exc_info=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise an interrupt (Ctrl-C) as KeyboardInterrupt, even if py4j has replaced it by an error of its own.

    PySpark's SIGINT handler calls Java, possibly in the middle of another call to Java, which breaks the connection. While
    py4j handles the KeyboardInterrupt, it closes that connection, which fails with a ``Py4JError``.
    """
    handled = sys.exception()  # an interrupt that was already caught does not count
    try:
        yield
    except Exception as error:
        if _hides_interrupt(error, handled):
            raise KeyboardInterrupt from error
        raise


def _hides_interrupt(error: BaseException | None, handled: BaseException | None) -> bool:
    """Whether py4j raised the error, or one in its chain of contexts, while it handled a KeyboardInterrupt."""
    from py4j.protocol import Py4JError

    while error is not None and error is not handled:
        before = error.__context__
        if isinstance(error, Py4JError) and isinstance(before, KeyboardInterrupt) and before is not handled:
            return True
        error = before
    return False
