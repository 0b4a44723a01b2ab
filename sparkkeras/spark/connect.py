"""A session of Spark Connect as sparkkeras needs it: checked, equipped, with errors in words.

There is no SparkContext behind it: no RDDs, no broadcasts, and no environment variables for workers. What tasks need travels
in their functions, and as files of the session where it is large.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import tempfile
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sparkkeras import errors
from sparkkeras.data.dataset import Shared
from sparkkeras.data.local import LocalShared
from sparkkeras.errors import ClusterError, SparkKerasError
from sparkkeras.spark import probe
from sparkkeras.spark.cluster import (
    STOPPED,
    Cluster,
    active_context,
    check_optional,
    check_running,
    check_slots,
    check_workers,
    equipping,
    is_current,
    pack_package,
    translated,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

INLINE_BYTES = 32 * 1024 * 1024
"""Values up to this size travel in functions, of which Connect takes 128 MiB at most."""

RESULT_BYTES = 128 * 1024 * 1024
"""Half of this may come to the driver from all workers of a round; more is brought together on the cluster."""

RESULT = "result binary"
"""The schema of frames of pickled results."""

CELL_BYTES = 16 * 1024 * 1024
"""A result that is larger lies in several rows: a cell of Arrow ends at 2 GB, and goes through the server's heap whole."""

_PROBES = 8


class RemoteCluster:
    """A session of Spark Connect.

    Args:
        session: The session that the data lives in.
        environment: Gives the environment variables for workers that train on so many CPU cores.

    Attributes:
        session: The session.
        task_cores: CPU cores for each task (``spark.task.cpus``).
        carried_environment: The environment variables that tasks set for their process.
        max_result_bytes: What the results of one job may have altogether.

    Raises:
        ClusterError: Workers lack Keras or its backend, or run another Python.
    """

    max_result_bytes = RESULT_BYTES

    def __init__(self, session: SparkSession, environment: Callable[[int], Mapping[str, str]]) -> None:
        self.session = session
        self.task_cores = int(session.conf.get("spark.task.cpus", "1") or 1)
        self.carried_environment: Mapping[str, str] = {**environment(self.task_cores), "SPARKKERAS_WORKER": "1"}
        _equip(self)

    def require(self, module: str, package: str, purpose: str) -> None:
        """As `Cluster.require`."""
        check_optional(_equipped[self.session], module, package, purpose)

    def training_workers(self) -> AbstractContextManager[None]:
        """All Python workers are alike here."""
        return nullcontext()

    def keep(self, value: T) -> Shared[T]:
        """Make a value available to tasks: in their functions, or as a file that goes when the session ends."""
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

    def collect(self, frame: DataFrame) -> list[Any]:
        """Run a job over a frame whose column ``result`` has pickled results, and bring these here.

        Raises:
            WorkerError: A task failed; the message has the worker's traceback.
            SparkKerasError: A task raised one of ours.
        """
        tag = f"sparkkeras-{uuid.uuid4().hex}"
        self.session.addTag(tag)
        try:
            found = list(unpack_cells(row["result"] for row in frame.collect()))
        except KeyboardInterrupt:
            self.session.interruptTag(tag)
            raise
        except Exception as error:
            raise translated(error) from error
        finally:
            self.session.removeTag(tag)
        for item in found:
            if isinstance(item, Failure):
                raise item.error()
        return found


_sent: weakref.WeakKeyDictionary[SparkSession, set[str]] = weakref.WeakKeyDictionary()
_equipped: weakref.WeakKeyDictionary[SparkSession, list[dict[str, Any]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class FileShared(Generic[T]):
    """A value in a file of the session."""

    name: str

    @property
    def value(self) -> T:
        """The value, read once for each process."""
        loaded: T = _read(self.name)
        return loaded


@functools.lru_cache(maxsize=4)
def _read(name: str) -> Any:
    from pyspark import SparkFiles

    return pickle.loads((Path(SparkFiles.getRootDirectory()) / name).read_bytes())


@dataclass(frozen=True)
class Failure:
    """What ended a task. It travels as a result: Connect cannot carry long messages of errors."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure behind an exception that is being handled."""
        return cls(type(error).__name__, str(error), traceback.format_exc())

    def error(self) -> Exception:
        """The error again, if it is one of ours, else one that reports it."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, SparkKerasError):
            return kind(self.message)
        return translated(RuntimeError(self.traceback))


@dataclass(frozen=True)
class CapturesErrors:
    """Calls a function over a partition, and yields what ends it as a `Failure`."""

    call: Callable[[int, Iterable[Any]], Iterable[Any]]

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """What the function yields."""
        try:
            yield from self.call(partition, rows)
        except Exception as error:
            yield Failure.of(error)


@dataclass(frozen=True)
class Part:
    """A stretch of a pickled result that is too large for one cell."""

    data: bytes
    is_last: bool


def pack_cells(result: Any, most: int) -> Iterator[bytes]:
    """A result as the cells that it lies in, with ``most`` bytes of it in each."""
    packed = pickle.dumps(result, 5)
    if len(packed) <= most:
        yield packed
        return
    for start in range(0, len(packed), most):
        yield pickle.dumps(Part(packed[start : start + most], start + most >= len(packed)), 5)


def unpack_cells(cells: Iterable[bytes]) -> Iterator[Any]:
    """The results that lie in cells."""
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


def _equip(cluster: RemoteCluster) -> None:
    """Look at what the workers have, once for each session, and ship this package to those that lack it."""
    with equipping:
        if cluster.session in _equipped:
            return
        found = _probe(cluster)
        check_workers(found)
        if not is_current(found):
            with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
                cluster.session.addArtifacts(pack_package(folder), pyfile=True)
        _equipped[cluster.session] = found


def _probe(cluster: RemoteCluster) -> list[dict[str, Any]]:
    from pyspark import cloudpickle

    frame = cluster.session.range(0, _PROBES, 1, _PROBES)
    backend = cluster.carried_environment["KERAS_BACKEND"]
    cloudpickle.register_pickle_by_value(probe)  # the workers may lack this package
    try:
        return cluster.collect(frame.mapInArrow(functools.partial(probe.probe_batches, backend), RESULT))
    finally:
        cloudpickle.unregister_pickle_by_value(probe)


AnyCluster = Cluster | RemoteCluster
"""Where data lives."""


def cluster_of(session: SparkSession, environment: Callable[[int], Mapping[str, str]]) -> AnyCluster:
    """The cluster behind a session, whichever way this process reaches it.

    Raises:
        ClusterError: It was stopped, or its workers lack something.
    """
    if is_remote(session):
        check_session(session)
        return RemoteCluster(session, environment)
    return Cluster(session.sparkContext, environment)


def check_session(session: SparkSession) -> None:
    """Refuse a session that was stopped.

    Raises:
        ClusterError: It was.
    """
    if not is_remote(session):
        check_running(session.sparkContext)
    elif cast(Any, session).is_stopped:
        raise ClusterError(STOPPED)


def check_slots_for(session: SparkSession) -> None:
    """Refuse a job of a session that would never begin; no training keeps slots behind Spark Connect.

    Raises:
        ConfigurationError: See `sparkkeras.spark.cluster.check_slots`.
    """
    if not is_remote(session):
        check_slots(session.sparkContext)


def is_remote(session: SparkSession) -> bool:
    """Whether a session is one of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def active_session() -> SparkSession:
    """The active SparkSession, or one on the active SparkContext, or a new one on this machine."""
    from pyspark.sql import SparkSession

    return active_remote_session() or SparkSession.getActiveSession() or SparkSession(active_context())


def active_remote_session() -> SparkSession | None:
    """The active session of Spark Connect, where this process works through one."""
    if "SPARK_CONNECT_MODE_ENABLED" not in os.environ:
        return None
    from pyspark.sql.connect.session import SparkSession

    found: Any = SparkSession.getActiveSession()
    return found  # type: ignore[no-any-return]
