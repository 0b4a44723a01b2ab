"""The SparkContext: checks it, sets up its workers, and runs jobs.

Training runs in separate Python workers: Spark has a pool of Python workers for each set of environment variables, and the
one for training is not shared with the user's functions. So the number of processes that import the backend is at most the
number of slots, and the backend is the driver's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkkeras.data.block import INLINE_BYTES
from sparkkeras.data.dataset import DriverAddress, Shared
from sparkkeras.data.local_dataset import LocalRunning, LocalShared
from sparkkeras.data.values import Pickled, ValueFile
from sparkkeras.errors import ClusterError, warn
from sparkkeras.spark import probe, worker_checks
from sparkkeras.spark.job_errors import interruptible, quietly, translated, without_failures
from sparkkeras.spark.settings import Settings, TaskResources, is_local, uses_connect
from sparkkeras.spark.slots import check_slots, slots_of
from sparkkeras.worker.device import Environment, forking_environment, worker_environment

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

R = TypeVar("R")
_environment_lock = threading.RLock()
_log = logging.getLogger(__name__)

TRAINING_WORKERS = {"SPARKKERAS_WORKER": "1", "SPARK_SIMPLIFIED_TRACEBACK": "1"}
"""Environment variables of all training workers. Spark sets the second one itself for functions over DataFrames, by default:
so these and tasks over RDDs run in the same workers, which load Keras and trace a model once."""

_DEFAULT_RESULT_SIZE = "1g"
_PROBED_SLOTS = 64
_LOOKS = 20
_LOOK_SECONDS = 0.05


class Cluster:
    """A running SparkContext.

    Args:
        context: The context of the data; ``None``: the active one, or a new one on this machine.
        environment: Returns the environment variables of training workers.
        resources: The resources of training tasks; ``None``: as Spark is configured.

    Attributes:
        context: The SparkContext.
        task_cores: CPU cores per task, by default ``spark.task.cpus``.
        backend: The Keras backend of tasks that run in child processes: none, since Spark has workers for each backend.
        is_driver_here: Whether this process is Spark's driver.

    Raises:
        ClusterError: The context was stopped, or workers lack Keras or its backend, or run another Python version.
    """

    is_driver_here = True
    backend = None
    _resources: TaskResources | None = None

    def __init__(
        self,
        context: SparkContext | None,
        environment: Environment = worker_environment,
        resources: TaskResources | None = None,
    ) -> None:
        self.context = context or active_context()
        check_running(self.context)
        self._resources, self._of_environment = resources, environment
        self.task_cores = _settings_of(self.context).task_cores if resources is None else resources.cores
        self._environment = {**environment(self.task_cores), **TRAINING_WORKERS}
        worker_checks.equip(self.context, self._probe, self._send_package, self._environment["KERAS_BACKEND"])

    @property
    def settings(self) -> Settings:
        """The settings of Spark."""
        return self.context.getConf()

    @property
    def carried_environment(self) -> Mapping[str, str]:
        """The environment variables to send with each task: none, because Spark sets them for the Python workers."""
        return {}

    @property
    def is_local(self) -> bool:
        """Whether the workers run on this machine and share its files (master ``local[...]``)."""
        return is_local(self.context.master or "")

    @property
    def max_result_bytes(self) -> int:
        """The limit on the size of all results of one job, in bytes (``spark.driver.maxResultSize``); 0: no limit.

        Results that pass through files of this machine have none.
        """
        return 0 if self.is_local else max_result_bytes(self.context)

    @property
    def result_limit(self) -> str:
        """That limit in words, and how to raise it."""
        return f"spark.driver.maxResultSize is {self.max_result_bytes / 1e9:.1f} GB: raise it"

    @property
    def slots(self) -> int:
        """The number of tasks that can currently run at the same time."""
        return max(1, self._slots(0))

    def _slots(self, busy: int) -> int:
        """That number, beside so many busy tasks of the size for which Spark is configured."""
        resources = self._resources
        if resources is None:
            return slots_of(self.context) - busy
        if self.is_local:  # where Spark counts tasks, whatever their size
            return (slots_of(self.context) - busy) * _settings_of(self.context).task_cores // resources.cores
        return resources.slots(self.context) - busy

    @property
    def slots_per_task(self) -> int:
        """How many tasks of the size for which Spark is configured each task takes the place of."""
        return 1 if self._resources is None or self.is_local else self._resources.slots_per_task(self.settings)

    @property
    def task_options(self) -> dict[str, Any]:
        """The arguments of ``DataFrame.mapInArrow`` for training tasks; see `with_resources`."""
        return {} if self._resources is None or self.is_local else {"profile": self._resources.profile()}

    def with_resources(self, rdd: RDD[R]) -> RDD[R]:
        """The RDD, whose tasks get the resources of training tasks. Spark assigns none in local mode."""
        if self._resources is None or self.is_local:
            return rdd
        return rdd.withResources(self._resources.profile())

    def with_task(self, cores: int | None, gpus: int | None, unit: str) -> Cluster:
        """The same cluster, whose tasks have this number of CPU cores and GPUs; ``None``: as Spark is configured.

        Args:
            cores: The CPU cores.
            gpus: The GPUs.
            unit: What runs in a task, for messages: ``"trial"`` if the arguments are called ``cores_per_trial``.

        Raises:
            ConfigurationError: Spark cannot give a task as many cores or GPUs, or allocates executors dynamically.
        """
        if cores is None and gpus is None:
            return self
        resources = TaskResources.of(self.settings, self.slots if self.is_local else None, cores, gpus, unit)
        if not self.is_local:
            resources.slots(self.context)  # raises ConfigurationError if no executor has room for one
        return Cluster(self.context, self._of_environment, resources)

    def forking(self) -> Cluster:
        """The same cluster, with workers that fork a process for each piece of work."""
        return Cluster(self.context, forking_environment, self._resources)

    def await_slots(self, count: int) -> None:
        """Do nothing: `slots` are those of executors that have registered."""

    @property
    def free_slots(self) -> int:
        """The number of tasks that could start at the same time now, at least 1."""
        for _ in range(_LOOKS):  # Spark updates its status asynchronously, so tasks that have just ended may still be listed
            busy = running_tasks(self.context)
            if not busy:
                break
            time.sleep(_LOOK_SECONDS)
        return max(1, self._slots(busy))

    @property
    def driver(self) -> DriverAddress:
        """The address at which tasks reach this process; see `driver_address`."""
        return driver_address(self.context)

    def require(self, module: str, package: str, purpose: str) -> None:
        """Reject workers that lack an optional module.

        Args:
            module: One of `sparkkeras.spark.probe.MODULES`.
            package: Its name for pip.
            purpose: The feature that needs it, in the plural, for the message.

        Raises:
            ClusterError: A worker lacks it.
        """
        worker_checks.check_optional(worker_checks.equipped[self.context], module, package, purpose)

    def _probe(self) -> list[dict[str, Any]]:
        tasks = min(self.slots, _PROBED_SLOTS)
        with self.training_workers():
            rdd = self.context.parallelize(range(tasks), tasks).mapPartitions(probe.probe)
            _ = rdd._jrdd
        return self.collect(rdd)

    def _send_package(self) -> None:
        folder = tempfile.mkdtemp(prefix="sparkkeras-", dir=self.context._temp_dir)  # which Spark removes
        self.context.addPyFile(worker_checks.pack_package(folder))

    def background(self, call: Callable[[], R]) -> SparkRunning[R]:
        """Run a call that starts jobs in a background thread.

        Raises:
            ClusterError: The context was stopped.
            ConfigurationError: Its jobs would never start; see `check_slots`.
        """
        check_running(self.context)
        check_slots(self.context, self.slots_per_task)
        return SparkRunning(self.context, call)

    @contextmanager
    def training_workers(self) -> Iterator[None]:
        """RDDs whose Java object is created inside the ``with`` block run in the Python workers for training.

        Raises:
            ClusterError: The context was stopped.
        """
        check_running(self.context)
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
        """Make a value available to tasks until the end of the ``with`` block.

        Small values travel with the tasks. Others are written to a file if the workers share the driver's disk, since
        Spark's JVM copies a value several times, or else broadcast.

        Raises:
            PicklingError: The value cannot be pickled.
        """
        pickled = Pickled.of(value)
        if pickled.nbytes <= INLINE_BYTES:
            yield LocalShared(value)
        elif self.is_local:
            with self.shared_folder() as folder:
                yield ValueFile.write(pickled, folder)
        else:
            broadcast = self.context.broadcast(value)
            try:
                yield broadcast
            finally:
                quietly(broadcast.destroy)

    def in_rounds(self) -> AbstractContextManager[None]:
        """The context of many jobs over the same rows: nothing to prepare."""
        return nullcontext()

    @contextmanager
    def shared_folder(self) -> Iterator[Path]:
        """The path of a folder for files of driver and workers on this machine; it is removed with its files in the end.

        Tasks of a failed job that still run then cannot write to it.
        """
        folder = Path(self.context._temp_dir) / f"values-{uuid.uuid4().hex}"
        folder.mkdir(0o700, parents=True)  # parents: a cleanup of temporary files may have removed those of a long session
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, value: R) -> Shared[R]:
        """Make a value available to tasks until the SparkContext stops: small values in the closure, others as a broadcast.

        Broadcasts are cached by content: it is unknown when the last DataFrame that uses one is gone, and Spark keeps a file
        for each.
        """
        payload = pickle.dumps(value, 5)
        if len(payload) <= INLINE_BYTES:
            return LocalShared(value)
        digest = hashlib.sha256(payload).digest()
        with _kept_lock:
            for context in [context for context in _kept if context._jsc is None]:
                del _kept[context]
            kept = _kept.setdefault(self.context, {})
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
        check_running(self.context)
        check_slots(self.context, self.slots_per_task)
        try:
            with self.cancellable():
                if partitions is None:
                    found = rdd.collect()
                else:
                    with self.training_workers():
                        built: Any = _Built(rdd)
                    found = list(self.context.runJob(built, _each, partitions))  # without the lock: it may run for hours
        except Exception as error:
            raise translated(error, self.context) from error
        return without_failures(found)

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

    def slots_while_waiting(self) -> tuple[int, int] | None:
        """The numbers of free slots and of all slots, while no task of the call runs; ``None`` when one does."""
        if running_tasks(self._context, self._tag):
            return None
        slots = slots_of(self._context)
        return max(0, slots - running_tasks(self._context)), slots


def max_result_bytes(context: SparkContext) -> int:
    """The limit on the size of all results of one job, in bytes (``spark.driver.maxResultSize``); 0: no limit."""
    return _settings_of(context).max_result_bytes


def driver_address(context: SparkContext) -> DriverAddress:
    """The address at which tasks reach this process: Spark's driver address, or the loopback if Spark runs locally."""
    if is_local(context.master or ""):
        return DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)
    conf = context.getConf()
    host = conf.get("spark.driver.host") or "127.0.0.1"
    listen = conf.get("spark.driver.bindAddress") or host
    return DriverAddress(host.strip("[]"), listen.strip("[]"), is_local=False)  # Spark wants IPv6 addresses in brackets


def running_tasks(context: SparkContext, tag: str | None = None) -> int:
    """The number of tasks that run: those of jobs with a tag, or of all."""
    tracker = context.statusTracker()
    stages: Iterable[int] = tracker.getActiveStageIds()
    if tag is not None:
        scala: Any = context._jsc.sc()  # PySpark's tracker does not know tags
        jobs = (tracker.getJobInfo(job) for job in scala.statusTracker().getJobIdsForTag(tag))
        stages = [stage for job in jobs if job is not None for stage in job.stageIds]
    found = (tracker.getStageInfo(stage) for stage in stages)
    return sum(stage.numActiveTasks for stage in found if stage is not None)


@dataclass(frozen=True)
class _ContextSettings:
    task_cores: int
    max_result_bytes: int


_kept: dict[SparkContext, dict[bytes, Shared[Any]]] = {}
_kept_lock = threading.Lock()
_settings: weakref.WeakKeyDictionary[SparkContext, _ContextSettings] = weakref.WeakKeyDictionary()


def _settings_of(context: SparkContext) -> _ContextSettings:
    """The settings of a context, cached because reading its configuration takes milliseconds."""
    if context not in _settings:
        conf = context.getConf()
        jvm: Any = context._jvm
        size = jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(
            conf.get("spark.driver.maxResultSize", _DEFAULT_RESULT_SIZE)
        )
        _settings[context] = _ContextSettings(int(conf.get("spark.task.cpus", "1") or 1), int(size))
    return _settings[context]


def _each(rows: Iterable[R]) -> Iterable[R]:
    return rows


def active_context(otherwise: str = "") -> SparkContext:
    """The active SparkContext, or a new one on this machine, whose workers run the driver's Python.

    Warns if an earlier context of this process was stopped, because its configuration may not apply to the new one.

    Args:
        otherwise: What to do if Spark cannot be started, for the message.

    Raises:
        ClusterError: This process uses Spark Connect, which has no SparkContext, or is a worker that runs a task; or Spark
            cannot be started.
    """
    from pyspark import SparkConf, SparkContext, TaskContext

    active: SparkContext | None = SparkContext._active_spark_context
    if active is not None and not uses_connect():
        return active
    if TaskContext.get() is not None:
        raise ClusterError(
            "this call starts a Spark job on a worker, inside a task, and only the driver can start jobs. In worker "
            "callbacks, transforms and objectives, use the Keras model in the worker's process (self.model.predict(...))."
        )
    if uses_connect():
        raise ClusterError(
            "this call needs a SparkContext, which Spark Connect does not have: pass data as a DataFrame (create one from "
            "arrays with to_data_frame)."
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setAppName("sparkkeras").setIfMissing("spark.master", "local[*]")
    if conf.get("spark.master", "").startswith("local"):
        for name, value in FASTER_SETTINGS.items():
            if name != "spark.python.daemon.module" or _is_installed(os.environ["PYSPARK_PYTHON"]):
                conf.setIfMissing(name, value)
    was_stopped = SparkContext._jvm is not None  # the JVM remains after its context was stopped
    try:
        context = SparkContext.getOrCreate(conf.setIfMissing("spark.ui.showConsoleProgress", "false"))
    except Exception as error:
        raise ClusterError(
            f"Spark cannot be started: {type(error).__name__}: {error}. It needs Java 17 or later (JAVA_HOME) and a master "
            f"that it reaches: python -m sparkkeras doctor names the cause. {otherwise}".rstrip()
        ) from error
    if was_stopped:
        warn(
            f"the previous Spark session was stopped, so a new one was started with the master {context.master!r}. To "
            "use another master, start a session first (SparkSession.builder.master(...).getOrCreate())."
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
    return process.stdout == str(worker_checks.PACKAGE / "__init__.py")


def check_running(context: SparkContext) -> None:
    """Reject a SparkContext that was stopped.

    Raises:
        ClusterError: The context was stopped.
    """
    if context._jsc is None or context._jsc.sc().isStopped():
        raise ClusterError(STOPPED)


STOPPED = (
    "the Spark session has been stopped, together with its SparkContext. Start a new one "
    "(SparkSession.builder.getOrCreate()), and create RDDs, DataFrames, SQL functions and searches again."
)
"""The message for calls that use a stopped session or SparkContext."""


FASTER_SETTINGS = {
    "spark.python.daemon.module": "sparkkeras.spark.daemon",
    "spark.python.unix.domain.socket.enabled": "true",
}
"""Settings with which Python workers start, and tasks send data, faster. A context has them from its start."""


def missing_settings() -> dict[str, str]:
    """Those of `FASTER_SETTINGS` that the active SparkContext lacks and could have; empty after the first call for it."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or context in _advised or context not in worker_checks.equipped or uses_connect():
        return {}
    _advised.add(context)
    conf = context.getConf()
    missing = {name: value for name, value in FASTER_SETTINGS.items() if conf.get(name, "false") == "false"}
    if not all(worker["package"] for worker in worker_checks.equipped[context]):
        # The daemon starts before Spark ships the package.
        missing.pop("spark.python.daemon.module", None)
    return missing


_advised: weakref.WeakSet[SparkContext] = weakref.WeakSet()
"""The contexts for which `missing_settings` was called."""


def start_workers() -> None:
    """Probe the workers of the active SparkContext in the background, so that they load Keras while the driver goes on.

    Once per context. Does not wait, and leaves errors to the first job.
    """
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or context in _starting:
        return
    _starting.add(context)

    def start() -> None:
        with suppress(Exception):
            Cluster(context)

    threading.Thread(target=start, name="sparkkeras-start", daemon=True).start()


_starting: weakref.WeakSet[SparkContext] = weakref.WeakSet()
"""The contexts for which `start_workers` was called."""
