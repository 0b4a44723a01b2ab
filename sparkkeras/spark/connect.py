"""Spark Connect sessions: checks them, sets up their workers, runs jobs, and translates errors.

Spark Connect has no SparkContext: no RDDs, no broadcasts, and no environment variables for workers. Values are sent to tasks
in their closures or, if they are large, as files of the session.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import socket
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sparkkeras.data.block import CHUNK_BYTES
from sparkkeras.data.dataset import DriverAddress, Shared
from sparkkeras.data.local_dataset import LocalRunning, LocalShared
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.spark import probe, worker_checks
from sparkkeras.spark.cluster import STOPPED, Cluster, active_context, check_running
from sparkkeras.spark.job_errors import TaskFailure, translated, without_failures
from sparkkeras.spark.settings import Settings, TaskResources, is_local, task_cores, uses_connect
from sparkkeras.spark.slots import check_free_slots, check_slots, held_slots
from sparkkeras.worker.device import Environment, backend_name, worker_environment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

INLINE_BYTES = CHUNK_BYTES
"""Values up to this size, in bytes, are sent in closures, which Connect limits to 128 MiB."""

RESULT_BYTES = 128 * 1024 * 1024
"""The limit on the results of one job, in bytes. Rounds with more than half of it are merged on the cluster first."""

RESULT = "result binary"
"""The schema of DataFrames of pickled results."""

CELL_BYTES = 16 * 1024 * 1024
"""Results of more bytes are split into rows: Arrow limits a cell to 2 GB, and the server holds whole cells in its heap."""

FILES = "SPARKKERAS_SESSION_FILES"
"""The environment variable with the folder of the session's files, for processes that a worker starts."""

_PROBES = 8


class RemoteCluster:
    """A Spark Connect session.

    Args:
        session: The session of the data.
        environment: Returns the environment variables of training workers for a number of CPU cores per task.
        resources: The resources of training tasks; ``None``: as Spark is configured.

    Attributes:
        session: The session.
        task_cores: CPU cores per task, by default ``spark.task.cpus``.
        backend: The Keras backend of the tasks, if they run in child processes, since the workers have that of this process.
        carried_environment: The environment variables to send with each task, which sets them in its process.
        max_result_bytes: The limit on the size of all results of one job, in bytes.
        result_limit: That limit in words.
        is_driver_here: Whether this process is Spark's driver: that is the server.
        is_lost: Whether the server did not reply. Each further request would wait for minutes.

    Raises:
        ClusterError: Workers lack Keras or its backend, or run another Python version.
    """

    max_result_bytes = RESULT_BYTES
    result_limit = f"With Spark Connect, {RESULT_BYTES / 1e6:.0f} MB is the limit"
    is_driver_here = False
    _resources: TaskResources | None = None
    _profile: Any = None

    def __init__(
        self,
        session: SparkSession,
        environment: Environment = worker_environment,
        resources: TaskResources | None = None,
    ) -> None:
        self.session = session
        self.is_lost = False
        self._resources, self._of_environment = resources, environment
        self._profile = None if resources is None or self.is_local else resources.profile()
        if self._profile is not None:
            try:
                _ = self._profile.id  # makes it on the server, with the session of this thread
            except RuntimeError as error:
                raise ConfigurationError(
                    "cores_per_worker= and gpus_per_worker= with Spark Connect need the thread in which the session was "
                    f"created: call this function there. {error}"
                ) from error
        self.task_cores = task_cores(session.conf) if resources is None else resources.cores
        self.carried_environment: Mapping[str, str] = {**environment(self.task_cores), "SPARKKERAS_WORKER": "1"}
        backend = self.carried_environment["KERAS_BACKEND"]
        self.backend = None if backend == backend_name() else backend
        worker_checks.equip(session, self._probe, self._send_package, backend)

    @property
    def settings(self) -> Settings:
        """The settings of the session."""
        return self.session.conf

    @property
    def is_local(self) -> bool:
        """Whether all workers run on the machine of the server, and share its files."""
        return is_local(self.session.conf.get("spark.master", "") or "")

    @property
    def slots(self) -> int:
        """The number of tasks that can run at the same time; see `slots_of_session`.

        Raises:
            ConfigurationError: The job that counts them would never start; see `check_slots_for`.
        """
        check_slots_for(self.session)
        slots = slots_of_session(self.session, self.task_cores)
        if self._resources is None:
            _slots[self.session] = slots
        return slots

    @property
    def slots_per_task(self) -> int:
        """See `Cluster.slots_per_task`."""
        return 1 if self._resources is None or self.is_local else self._resources.slots_per_task(self.settings)

    @property
    def task_options(self) -> dict[str, Any]:
        """The arguments of ``mapInArrow`` for training tasks. Spark assigns no resources in local mode."""
        return {} if self._profile is None else {"profile": self._profile}

    @property
    def free_slots(self) -> int:
        """The same as `slots`: a client does not see which of them are free."""
        return self.slots

    @property
    def driver(self) -> DriverAddress:
        """The address at which tasks reach this process; see `client_address`."""
        return client_address(self.session)

    def require(self, module: str, package: str, purpose: str) -> None:
        """Reject workers that lack an optional module; see `Cluster.require`."""
        worker_checks.check_optional(worker_checks.equipped[self.session], module, package, purpose)

    def _probe(self) -> list[dict[str, Any]]:
        frame = self.session.range(0, _PROBES, 1, _PROBES)
        backend = self.carried_environment["KERAS_BACKEND"]
        return self.collect(frame.mapInArrow(functools.partial(probe.probe_batches, backend), RESULT))

    def _send_package(self) -> None:
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
            self.session.addArtifacts(worker_checks.pack_package(folder), pyfile=True)

    def with_task(self, cores: int | None, gpus: int | None, unit: str) -> RemoteCluster:
        """See `Cluster.with_task`. Spark finds out in the first job whether an executor has room for such a task."""
        if cores is None and gpus is None:
            return self
        local_slots = self.slots if self.is_local else None
        resources = TaskResources.of(self.settings, local_slots, cores, gpus, unit)
        return RemoteCluster(self.session, self._of_environment, resources)

    def forking(self) -> RemoteCluster:
        """This cluster: its workers fork no processes."""
        return self

    def await_slots(self, count: int) -> None:
        """Wait until so many tasks can run at the same time, in a barrier stage without work.

        The number of slots that queries see is not enough: Spark reports at least two, also with one executor left.
        """
        numbers = self.session.range(0, count, 1, count)
        self.collect(numbers.mapInArrow(_ignored, RESULT, barrier=True))

    def training_workers(self) -> AbstractContextManager[None]:
        """Do nothing: Spark Connect has no separate Python workers for training."""
        return nullcontext()

    @contextmanager
    def in_rounds(self) -> Iterator[None]:
        """The context of many queries over the same rows: the server does not cache their plans, with their values.

        Threads may share a session: the first one turns the cache off, and the last one restores the setting.
        """
        session = self.session
        with _plan_caches_lock:
            users, before = _plan_caches.get(session, (0, ""))
            if not users:
                before = session.conf.get(PLAN_CACHE, "true") or "true"
                with suppress(Exception):  # a server may not permit setting it
                    session.conf.set(PLAN_CACHE, "false")
            _plan_caches[session] = users + 1, before
        try:
            yield
        finally:
            with _plan_caches_lock:
                users, before = _plan_caches[session]
                _plan_caches[session] = users - 1, before
                if users == 1 and not self.is_lost:
                    with suppress(Exception):
                        session.conf.set(PLAN_CACHE, before)

    def share(self, value: T) -> AbstractContextManager[Shared[T]]:
        """See `keep`: nothing is removed before the session ends."""
        return nullcontext(self.keep(value))

    def keep(self, value: T) -> Shared[T]:
        """Make a value available to tasks: in their closures or, if it is large, as a file of the session."""
        payload = pickle.dumps(value, 5)
        if len(payload) <= INLINE_BYTES:
            return LocalShared(value)
        digest = hashlib.sha256(payload).hexdigest()
        sent = _sent.setdefault(self.session, set())
        name = f"sparkkeras-{digest}"
        if digest not in sent:
            with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
                path = Path(folder) / name
                path.write_bytes(payload)
                self.session.addArtifacts(str(path), file=True)
            sent.add(digest)
        return FileShared(name)

    def cancellable(self) -> AbstractContextManager[None]:
        """Queries that run inside the ``with`` block are cancelled by an interrupt (Ctrl-C)."""
        return cancelled_by_interrupt(self.session)

    def background(self, call: Callable[[], T]) -> RemoteRunning[T]:
        """Run a call that starts queries in a background thread."""
        return RemoteRunning(self.session, call)

    def collect(self, frame: DataFrame) -> list[Any]:
        """Run a job and collect its results. An interrupt (Ctrl-C) cancels the job.

        Args:
            frame: A DataFrame whose column ``result`` contains pickled results.

        Raises:
            ConfigurationError: The job would never start; see `check_slots_for`.
            WorkerError: A task failed; the message contains the worker's traceback.
            SparkKerasError: A task raised an error of this package.
        """
        check_slots_for(self.session, self.slots_per_task)
        try:
            with self.cancellable():
                found = list(unpack_cells(row["result"] for row in frame.collect()))
        except Exception as error:
            raise translated(error) from error
        return without_failures(found)


class RemoteRunning(LocalRunning[T]):
    """A call in a background thread, whose queries can be cancelled."""

    def __init__(self, session: SparkSession, call: Callable[[], T]) -> None:
        self._session, self._tag = session, f"sparkkeras-{uuid.uuid4().hex}"

        def tagged() -> T:
            session.addTag(self._tag)
            return call()

        super().__init__(tagged)

    def cancel(self) -> None:
        """Cancel the queries of the call. Does not wait."""
        with suppress(Exception):  # the server may be gone
            self._session.interruptTag(self._tag)


def _ignored(batches: Iterator[Any]) -> Iterator[Any]:
    """No results for the rows of a partition."""
    for _ in batches:
        pass
    return iter(())


@contextmanager
def cancelled_by_interrupt(session: SparkSession) -> Iterator[None]:
    """An interrupt (Ctrl-C) within the ``with`` block cancels the queries of this thread that were started in it."""
    tag = f"sparkkeras-{uuid.uuid4().hex}"
    session.addTag(tag)
    try:
        yield
    except KeyboardInterrupt:
        session.interruptTag(tag)
        raise
    finally:
        session.removeTag(tag)


PLAN_CACHE = "spark.connect.session.planCache.enabled"
"""Whether the server caches plans."""

_plan_caches: weakref.WeakKeyDictionary[SparkSession, tuple[int, str]] = weakref.WeakKeyDictionary()
"""The number of threads that need the cache off in each session, and the setting before the first one."""

_plan_caches_lock = threading.Lock()
_sent: weakref.WeakKeyDictionary[SparkSession, set[str]] = weakref.WeakKeyDictionary()
_slots: weakref.WeakKeyDictionary[SparkSession, int] = weakref.WeakKeyDictionary()
"""The number of slots of each session when they were counted last: while all are held, they cannot be counted."""

_MOST_SLOTS = 1 << 16


@dataclass(frozen=True)
class FileShared(Generic[T]):
    """A value in a file of the session."""

    name: str

    @property
    def value(self) -> T:
        """The value, read once per process."""
        loaded: T = _read(self.name)
        return loaded


@functools.lru_cache(maxsize=4)
def _read(name: str) -> Any:
    return pickle.loads((Path(session_files()) / name).read_bytes())


def session_files() -> str:
    """The folder of the session's files, in a task or in a process that one has started."""
    from pyspark import SparkFiles

    return os.environ.get(FILES) or SparkFiles.getRootDirectory()


@dataclass(frozen=True)
class CapturesErrors:
    """Calls a function on a partition, and yields its error, if any, as a `TaskFailure`."""

    call: Callable[[int, Iterable[Any]], Iterable[Any]]

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of the function."""
        try:
            yield from self.call(partition, rows)
        except Exception as error:
            yield TaskFailure.of(error)


@dataclass(frozen=True)
class Part:
    """A part of a pickled result that is too large for one cell."""

    data: bytes
    is_last: bool


def pack_cells(result: Any, most: int) -> Iterator[bytes]:
    """Pickle a result into cells with at most ``most`` bytes of it in each."""
    packed = pickle.dumps(result, 5)
    if len(packed) <= most:
        yield packed
        return
    for start in range(0, len(packed), most):
        yield pickle.dumps(Part(packed[start : start + most], start + most >= len(packed)), 5)


def unpack_cells(cells: Iterable[bytes]) -> Iterator[Any]:
    """Unpickle the results in cells; the inverse of `pack_cells`."""
    parts: list[bytes] = []
    for cell in cells:
        found = pickle.loads(cell)
        if not isinstance(found, Part):
            yield found
            continue
        parts.append(found.data)
        if found.is_last:
            yield pickle.loads(b"".join(parts))
            parts.clear()


AnyCluster = Cluster | RemoteCluster
"""The cluster of a dataset."""


def cluster_of(given: Any, environment: Environment = worker_environment) -> AnyCluster:
    """The cluster of a SparkSession, of Spark Connect or not, or of a SparkContext.

    Raises:
        ClusterError: The session was stopped, or workers lack Keras or its backend, or run another Python version.
    """
    if hasattr(given, "parallelize"):
        return Cluster(given, environment)
    if is_remote(given):
        check_session(given)
        return RemoteCluster(given, environment)
    return Cluster(given.sparkContext, environment)


def active_cluster(environment: Environment = worker_environment, otherwise: str = "") -> AnyCluster:
    """The cluster of the active session of Spark Connect, else of the active SparkContext, else of a new one.

    Args:
        environment: Returns the environment variables of training workers.
        otherwise: What to do if Spark cannot be started, for the message.

    Raises:
        ClusterError: Spark cannot be started, or workers lack a requirement.
    """
    session = active_remote_session()
    return Cluster(active_context(otherwise), environment) if session is None else RemoteCluster(session, environment)


def active_settings() -> Settings | None:
    """The settings of the active session of Spark Connect, else of the active SparkContext; ``None`` if there is none."""
    from pyspark import SparkContext

    session, context = active_remote_session(), SparkContext._active_spark_context
    if session is not None:
        return session.conf
    return None if context is None else context.getConf()


def check_session(session: SparkSession) -> None:
    """Reject a session that was stopped.

    Raises:
        ClusterError: The session was stopped.
        ConfigurationError: It is not a session.
    """
    if not hasattr(session, "createDataFrame"):
        raise ConfigurationError(f"spark={session!r}: expected a SparkSession, such as SparkSession.builder.getOrCreate().")
    if not is_remote(session):
        check_running(session.sparkContext)
    elif cast(Any, session).is_stopped:
        raise ClusterError(STOPPED)


def slots_of_session(session: SparkSession, task_cores: int) -> int:
    """The number of tasks that can run at the same time: by default, Spark divides data into a partition for each core.

    Args:
        session: The session.
        task_cores: CPU cores per task.
    """
    numbered = f"SELECT spark_partition_id() AS number FROM range({_MOST_SLOTS})"
    last = session.sql(f"SELECT max(number) FROM ({numbered})").collect()[0][0]
    return max(1, (int(last) + 1) // task_cores)


def check_slots_for(session: SparkSession, per_task: int = 1) -> None:
    """Reject a job that would never start; see `sparkkeras.spark.slots.check_slots`.

    Raises:
        ConfigurationError: No slot is available for the job.
    """
    if not is_remote(session):
        check_slots(session.sparkContext, per_task)
    elif session in _slots and held_slots():
        check_free_slots(_slots[session], per_task)


def is_remote(session: SparkSession) -> bool:
    """Whether a session is a Spark Connect session."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def active_session() -> SparkSession:
    """The active SparkSession, else one for the active SparkContext, else a new one on this machine."""
    from pyspark.sql import SparkSession

    return active_remote_session() or SparkSession.getActiveSession() or SparkSession(active_context())


def active_remote_session() -> SparkSession | None:
    """The active Spark Connect session, in a thread that has none the default one; ``None`` if this process has neither."""
    if not uses_connect():
        return None
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql.connect.session import SparkSession

    try:
        found: Any = SparkSession.active()
    except PySparkRuntimeError:
        return None
    return found  # type: ignore[no-any-return]


NO_DRIVER = (
    "asynchronous and hogwild training need a Spark driver in this process, which Spark Connect does not provide: use "
    'mode="synchronous" or "allreduce", or run the script on the cluster itself (spark-submit).'
)


def check_driver() -> None:
    """Reject asynchronous training with Spark Connect, before data is read.

    Raises:
        ConfigurationError: This process uses Spark Connect.
    """
    if active_remote_session() is not None:
        raise ConfigurationError(NO_DRIVER)


def client_address(session: SparkSession) -> DriverAddress:
    """The address of this machine in the network of the Spark Connect server.

    Raises:
        ClusterError: The server's name cannot be resolved.
    """
    server = session.client.host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise ClusterError(
            f"the Spark Connect server {server!r} cannot be resolved from here ({error}), so the address at which its "
            "workers reach this process is unknown: use a host name or an IP address in the URL of the session."
        ) from error
    return DriverAddress(host, host, is_local=ip_address(host).is_loopback)
