"""The SparkContext as sparkkeras needs it: checked, equipped, with errors in words.

Training runs in Python workers of its own: Spark keeps a pool of them for each set of environment variables, and ours
is not shared with the person's own functions. So as many processes import the backend as there are slots, and no more,
and the backend is the driver's.
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

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

R = TypeVar("R")
_environment_lock = threading.RLock()
equipping = threading.Lock()
"""Held while workers are looked at: two threads may begin at once."""

_log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent.parent
"""The folder of this package, which workers that lack it are sent."""

_DEFAULT_RESULT_SIZE = "1g"
_INLINE_BYTES = 64 * 1024
_PROBED_SLOTS = 64
_LOOKS, _LOOK_SECONDS = 20, 0.05


class Cluster:
    """A running SparkContext.

    Args:
        context: The context that the data lives in; ``None`` takes the active one, or starts one on this machine.
        environment: Gives the environment variables for workers that train on so many CPU cores.

    Attributes:
        context: The SparkContext.
        task_cores: CPU cores for each task (``spark.task.cpus``).
        max_result_bytes: What the results of one job may have altogether (``spark.driver.maxResultSize``); 0 is no bound.

    Raises:
        ClusterError: The context was stopped.
    """

    def __init__(self, context: SparkContext | None, environment: Callable[[int], Mapping[str, str]]) -> None:
        self.context = context or active_context()
        check_running(self.context)
        settings = _settings_of(self.context)
        self.task_cores = settings.task_cores
        self.max_result_bytes = settings.max_result_bytes
        self._environment = {**environment(self.task_cores), "SPARKKERAS_WORKER": "1"}
        _equip(self)

    @property
    def carried_environment(self) -> Mapping[str, str]:
        """The environment variables that workers must be given with each task: none, Spark gives them theirs."""
        return {}

    @property
    def is_local(self) -> bool:
        """Whether the workers are on this machine and share its files (master ``local[...]``)."""
        master = self.context.master or ""
        return master.startswith("local") and not master.startswith("local-cluster")

    @property
    def slots(self) -> int:
        """How many tasks can run at the same time now."""
        return slots_of(self.context)

    @property
    def free_slots(self) -> int:
        """How many tasks could start at the same time now, at least 1."""
        for _ in range(_LOOKS):  # Spark's books are kept by a thread of their own: what has just ended may still stand there
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
        """How tasks reach this process: Spark's own address for the driver, and the loopback where they run beside it."""
        if self.is_local:
            return DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)
        conf = self.context.getConf()
        host = conf.get("spark.driver.host") or "127.0.0.1"
        return DriverAddress(host, conf.get("spark.driver.bindAddress") or host, is_local=False)

    def require(self, module: str, package: str, purpose: str) -> None:
        """Refuse workers that lack a module; see `check_optional`."""
        check_optional(_equipped[self.context], module, package, purpose)

    def background(self, call: Callable[[], R]) -> SparkRunning[R]:
        """Call something that runs jobs in a thread of its own.

        Raises:
            ConfigurationError: Its jobs would never begin; see `check_slots`.
        """
        check_slots(self.context)
        return SparkRunning(self.context, call)

    @contextmanager
    def training_workers(self) -> Iterator[None]:
        """RDDs whose Java side is made in here run in the Python workers that train."""
        with _environment_lock:
            # Another dict, not other entries: threads of the person's may be reading the one that is there.
            before = self.context.environment
            self.context.environment = {**before, **self._environment}
            try:
                yield
            finally:
                self.context.environment = before

    @contextmanager
    def share(self, value: R) -> Iterator[Shared[R]]:
        """Broadcast a value until the context ends."""
        broadcast = self.context.broadcast(value)
        try:
            yield broadcast
        finally:
            quietly(broadcast.destroy)

    def keep(self, value: R) -> Shared[R]:
        """Make a value available to tasks until the context stops: in their functions, or broadcast once if it is larger.

        It cannot be known when the last DataFrame that needs it is gone, and Spark keeps a file for each broadcast.
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
        """Run a job and bring its results here; if it is interrupted, it is cancelled.

        Raises:
            ConfigurationError: The job would never begin; see `check_slots`.
            WorkerError: A task failed as often as Spark tries; the message has the worker's traceback.
            SparkKerasError: A task raised one of ours.
        """
        check_slots(self.context)
        try:
            with self.cancellable():
                if partitions is None:
                    return rdd.collect()
                with self.training_workers():
                    built: Any = _Built(rdd)
                return list(self.context.runJob(built, _each, partitions))  # it may last as long as training does
        except Exception as error:
            raise translated(error, self.context) from error

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Jobs that run in here are cancelled if the person interrupts them."""
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
    """What `SparkContext.runJob` takes as an RDD: it maps its function onto it, and runs what comes of that.

    Spark notes the workers' environment variables when it makes the Java side of an RDD, which runJob would do on its own.

    Args:
        rdd: The RDD; its Java side, with the function of the job, is made here.
    """

    def __init__(self, rdd: RDD[Any]) -> None:
        self._mapped = rdd.mapPartitions(_each)
        _ = self._mapped._jrdd

    def mapPartitions(self, function: Callable[[Iterable[Any]], Iterable[Any]]) -> RDD[Any]:  # noqa: N802 - an RDD's
        """The RDD with the function of the job."""
        assert function is _each
        return self._mapped


class SparkRunning(LocalRunning[R]):
    """A thread whose jobs can be cancelled."""

    def __init__(self, context: SparkContext, call: Callable[[], R]) -> None:
        from pyspark import InheritableThread

        self._context, self._tag = context, f"sparkkeras-{uuid.uuid4().hex}"

        def tagged() -> R:
            context.addJobTag(self._tag)
            return call()

        super().__init__(tagged, InheritableThread)

    def cancel(self) -> None:
        """As `Running.cancel`: the jobs are cancelled."""
        quietly(lambda: self._context.cancelJobsWithTag(self._tag))


@dataclass(frozen=True)
class _Settings:
    task_cores: int
    max_result_bytes: int


_kept: dict[SparkContext, dict[bytes, Shared[Any]]] = {}
_settings: weakref.WeakKeyDictionary[SparkContext, _Settings] = weakref.WeakKeyDictionary()


def _settings_of(context: SparkContext) -> _Settings:
    """What a context was started with. Reading its configuration takes milliseconds, so it is read once."""
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
    """The active SparkContext, or a new one on this machine whose workers run this very Python.

    It warns where the person has stopped one: what was configured there may not hold for the new one.
    """
    from pyspark import SparkConf, SparkContext

    active: SparkContext | None = SparkContext._active_spark_context
    if active is not None:
        return active
    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        raise ClusterError(
            "this needs a SparkContext, and Spark Connect has none: give a DataFrame (to_data_frame makes one of "
            "arrays), and a path of this machine where a file is meant."
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setAppName("sparkkeras").setIfMissing("spark.master", "local[*]")
    if conf.get("spark.master", "").startswith("local") and _is_installed(os.environ["PYSPARK_PYTHON"]):
        conf.setIfMissing("spark.python.daemon.module", "sparkkeras.spark.daemon")
    was_stopped = SparkContext._jvm is not None  # there is a JVM, and no context in it any more
    context = SparkContext.getOrCreate(conf.setIfMissing("spark.ui.showConsoleProgress", "false"))
    if was_stopped:
        warnings.warn(
            f"the earlier Spark session was stopped, so a new one is started, with the master {context.master!r}. To "
            "use another one, start it before (SparkSession.builder.master(...).getOrCreate()).",
            stacklevel=2,
        )
    return context


def _is_installed(python: str) -> bool:
    """Whether a Python finds this very package by itself: Spark's daemon is there before files come from the driver."""
    code = "import sys, importlib.util as util; sys.stdout.write(util.find_spec('sparkkeras').origin)"
    try:
        said = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tempfile.gettempdir(), check=False)
    except OSError:  # there is no such Python: Spark says so
        return False
    return said.stdout == str(PACKAGE / "__init__.py")


def check_running(context: SparkContext) -> None:
    """Refuse a SparkContext that was stopped.

    Raises:
        ClusterError: It was.
    """
    if context._jsc is None or context._jsc.sc().isStopped():
        raise ClusterError(STOPPED)


def slots_of(context: SparkContext) -> int:
    """How many tasks can run at the same time now."""
    scala = context._jsc.sc()
    try:
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return max(1, int(scala.maxNumConcurrentTasks(profile)))
    except Exception:  # internal to Spark, so it may go or move
        return max(1, context.defaultParallelism)


def check_slots(context: SparkContext) -> None:
    """Refuse a job that this thread would wait for while another one keeps all slots until this thread returns.

    The tasks of asynchronous training wait for the driver when a few epochs have ended that its callbacks have not seen, so
    a callback that waits for a slot would wait for ever.

    Raises:
        ConfigurationError: There is no slot for it.
    """
    held = held_slots()
    slots = slots_of(context) if held else 0
    if slots > held or not held:
        return
    fewer = f"num_workers={slots - 1}, or less" if slots > 1 else "fewer workers than slots, on a cluster with more of them"
    raise ConfigurationError(
        f"this call needs a Spark job, and the asynchronous fit whose callback makes it keeps all slots ({slots}) until its "
        "callbacks return: the two would wait for each other for ever. Within callbacks use the Keras model in the driver's "
        "process (self.model.predict(...), self.model.evaluate(...)), or leave a slot free: train with "
        f"{fewer}."
    )


STOPPED = (
    "the Spark session has been stopped, and its SparkContext with it. Start a new one "
    "(SparkSession.builder.getOrCreate()); RDDs, DataFrames, SQL functions and searches of the old one must be made again."
)
"""What to say to who uses a session or a SparkContext that was stopped."""


_equipped: weakref.WeakKeyDictionary[SparkContext, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
"""What `sparkkeras.spark.probe` said of each worker."""


def _equip(cluster: Cluster) -> None:
    """Look at what the workers have, once for each context, and ship this package to those that lack it.

    Raises:
        ClusterError: Workers lack Keras or its backend, or run another Python.
    """
    with equipping:
        if cluster.context in _equipped:
            return
        found = _probe(cluster)
        check_workers(found)
        if not is_current(found):
            # In the context's own temporary folder, which Spark removes.
            folder = tempfile.mkdtemp(prefix="sparkkeras-", dir=cluster.context._temp_dir)  # type: ignore[attr-defined]
            cluster.context.addPyFile(pack_package(folder))
        _equipped[cluster.context] = found


def check_workers(found: Iterable[Mapping[str, Any]]) -> None:
    """Refuse workers that cannot do what will be asked of them; ``found`` is what `sparkkeras.spark.probe` says of each.

    Raises:
        ClusterError: Workers lack Keras or its backend.
    """
    for worker in found:
        if worker["missing"]:
            raise ClusterError(
                f"Spark's workers lack {' and '.join(worker['missing'])}: {worker['python']} (Python {worker['version']}) "
                f"on {worker['host']}. Install it there (pip install {' '.join(worker['missing'])}), or let the workers "
                "run a Python that has it: set the environment variable PYSPARK_PYTHON (with spark-submit also "
                f"spark.pyspark.python) before the SparkContext starts. The driver runs {sys.executable}."
            )


def check_optional(found: Iterable[Mapping[str, Any]], module: str, package: str, purpose: str) -> None:
    """Refuse workers that lack a module which one function needs.

    Args:
        found: What `sparkkeras.spark.probe` says of each worker.
        module: One of `sparkkeras.spark.probe.OPTIONAL`.
        package: What pip calls it.
        purpose: What needs it, for the message.

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
    """Whether all workers have this very package."""
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
    """This package as a zip in a folder."""
    target = str(Path(folder) / "sparkkeras.zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in {".py", ".typed"}:
                archive.write(path, Path("sparkkeras") / path.relative_to(PACKAGE))
    return target


def translated(error: Exception, context: SparkContext | None = None) -> Exception:
    """An error of Spark in words: ours as it was raised on the worker, else the worker's traceback."""
    if isinstance(error, SparkKerasError):
        return error
    text = str(error)
    if "PYTHON_VERSION_MISMATCH" in text:
        return ClusterError(
            "Spark's workers run another Python version than the driver, which is "
            f"{sys.executable} (Python {'.'.join(map(str, sys.version_info[:3]))}). Set the "
            "environment variable PYSPARK_PYTHON (with spark-submit also spark.pyspark.python) to a Python of that version "
            "that has Keras, before the SparkContext starts."
        )
    if "maxResultSize" in text:
        return ClusterError(
            "the results of the job are larger than spark.driver.maxResultSize allows: raise it (for instance "
            "spark.driver.maxResultSize=4g) when the SparkContext starts."
        )
    traceback = worker_traceback(text)
    if not traceback:
        alone = _OWN_ERROR.search(text)  # without a traceback; see `sparkkeras.sources.frame.OverColumns`
        if alone:
            own = _own_error(_until_java(text, alone.start(1)))
            if own:
                return own
        stopped = context is not None and (context._jsc is None or context._jsc.sc().isStopped())
        if stopped:
            return ClusterError("the SparkContext was stopped while a job was running.")
        if re.search(r"\bJob \d+ cancelled\b", text):
            return ClusterError("the Spark job was cancelled, by SparkContext.cancelAllJobs or the like, or in Spark's UI.")
        if _WORKER_DIED.search(text):
            return WorkerError(_worker_died(text, None if context is None else context.master))
        return WorkerError(f"Spark could not finish the job: {text.strip().splitlines()[0] if text.strip() else error!r}")
    missing = _MISSING_MODULE.search(traceback.rstrip().rpartition("\n")[2])
    if missing:
        return WorkerError(
            f"Spark's workers lack the Python module {missing[1]!r}: install it where they run (in the Python that "
            f"PYSPARK_PYTHON names), or ship it with SparkContext.addPyFile. The traceback:\n\n{traceback}",
            traceback,
        )
    own = _own_error(traceback)
    return own or WorkerError(f"a task failed on a worker. Its traceback:\n\n{traceback}", traceback)


def worker_traceback(text: str) -> str:
    """The Python traceback in a message of Spark's, without Spark's own frames; empty where there is none."""
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
    """What to say of a process that ended without an error of its own.

    Args:
        text: Spark's message.
        master: Spark's master; ``None`` where it is not known.
    """
    is_local = master is not None and master.startswith("local") and not master.startswith("local-cluster")
    attempts = re.search(r"failed (\d+) times", text)
    times = "" if attempts is None else f" (attempts at the task: {attempts[1]})"
    help_ = ["smaller batches (batch_size=)", "fewer tasks at the same time on a machine"]
    if is_local:
        help_[1] += f" (fewer slots than the master {master!r} has, such as local[2])"
    else:
        help_[1] += " (fewer cores an executor, or a larger spark.task.cpus)"
        help_.append("more memory for what is not Java's (spark.executor.memoryOverhead)")
    retries = ""
    if is_local and attempts is not None and attempts[1] == "1":
        retries = " Spark tries a task once in local[N]: with the master local[N,4] it tries it four times."
    lost = next((line.strip() for line in text.splitlines() if _WORKER_DIED.search(line)), "")
    return (
        f"a worker process died while it ran a task, without a Python error{times}. The usual reason is memory: the system "
        f"kills processes (kill -9) when there is none left, and its log (dmesg) says so. What helps: {'; '.join(help_)}."
        f"{retries} Spark's message: {lost}"
    )


_WORKER_DIED = re.compile(r"Python worker exited unexpectedly|ExecutorLostFailure|Container killed")


def _until_java(text: str, start: int) -> str:
    """What Python said from a place in a message of Spark's on, without what Java adds behind it."""
    end = re.compile(r"\n\tat |\n\nJVM stacktrace:").search(text, start)
    return re.sub(r"\s*SQLSTATE: \w+\s*$", "", text[start : None if end is None else end.start()]).strip()


_OWN_ERROR = re.compile(r"(?:^|Python worker: )(sparkkeras\.errors\.\w+: )", re.MULTILINE)  # Connect puts it into a line
_MISSING_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'")
_TRACEBACK = "Traceback (most recent call last):"


def _own_error(traceback: str) -> SparkKerasError | None:
    """The error that ended a worker's traceback, if it is one of ours."""
    last = traceback.rpartition(_TRACEBACK)[2].splitlines()
    for number, line in enumerate(last):
        if line.startswith("sparkkeras.errors."):
            name, _, message = line.removeprefix("sparkkeras.errors.").partition(": ")
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, SparkKerasError):
                return kind("\n".join([message, *last[number + 1 :]]).strip())
    return None


def quietly(call: Callable[[], Any]) -> None:
    """Tidy up, even where Spark is gone already. An interrupt comes out of it."""
    try:
        with interruptible():
            call()
    except Exception:
        _log.debug("could not tidy up", exc_info=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Have an interrupt (Ctrl-C) come out as KeyboardInterrupt, also where py4j has made an error of its own of it.

    PySpark's handler of SIGINT calls Java, perhaps in the middle of another call to Java, which breaks the connection. py4j
    then closes that connection while it handles the KeyboardInterrupt, which fails with a ``Py4JError``.
    """
    handled = sys.exception()  # an interrupt that was caught before is over
    try:
        yield
    except Exception as error:
        if _hides_interrupt(error, handled):
            raise KeyboardInterrupt from error
        raise


def _hides_interrupt(error: BaseException | None, handled: BaseException | None) -> bool:
    """Whether py4j raised an error, or one that this one comes from, while it handled a KeyboardInterrupt."""
    from py4j.protocol import Py4JError

    while error is not None and error is not handled:
        before = error.__context__
        if isinstance(error, Py4JError) and isinstance(before, KeyboardInterrupt) and before is not handled:
            return True
        error = before
    return False
