"""Interrupts that py4j turns into other errors are raised as KeyboardInterrupt; jobs that would deadlock raise an error."""

import threading
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext, TaskContext

from sparkkeras.errors import ClusterError, ConfigurationError, WorkerError
from sparkkeras.spark import cluster as cluster_module
from sparkkeras.spark import worker_checks
from sparkkeras.spark.cluster import Cluster, active_context, missing_settings
from sparkkeras.spark.job_errors import interruptible, quietly
from sparkkeras.spark.slots import FEW_BATCHES, MANY_PARTITIONS, holding_slots, warn_of_partitions

DAEMON = {"spark.python.daemon.module": "sparkkeras.spark.daemon"}
SOCKETS = {"spark.python.unix.domain.socket.enabled": "true"}


class Java:
    """The part of a JavaSparkContext that knows whether it was stopped."""

    def __init__(self, is_stopped=False):
        self.is_stopped = is_stopped

    def sc(self):
        return self

    def isStopped(self):
        return self.is_stopped


class Context:
    """The part of a SparkContext that cancels jobs."""

    def __init__(self):
        self.cancelled = []
        self._jsc = Java()

    def addJobTag(self, tag):
        self.tag = tag

    def removeJobTag(self, tag):
        pass

    def cancelJobsWithTag(self, tag):
        self.cancelled.append(tag)


class Jobs:
    """An RDD whose job fails."""

    def __init__(self, error):
        self.collect = error


def broken():
    """The behaviour of py4j when an interrupt occurs during a call to Java."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise Py4JError("Gateway must be connected to send cancel cmd.")  # noqa: B904


def failing():
    raise Py4JError("no Java")


@pytest.fixture
def cluster():
    made = Cluster.__new__(Cluster)
    made.context = Context()
    return made


def test_an_interrupt_that_breaks_a_call_to_java_cancels_the_job(cluster):
    with pytest.raises(KeyboardInterrupt):
        cluster.collect(Jobs(broken))
    assert cluster.context.cancelled == [cluster.context.tag]


def test_other_errors_are_unchanged(cluster):
    def stopped():
        cluster.context._jsc = Java(is_stopped=True)
        failing()

    with pytest.raises(Exception, match="SparkContext was stopped"):
        cluster.collect(Jobs(stopped))
    assert cluster.context.cancelled == []


def test_an_interrupt_during_cleanup_is_not_lost():
    with pytest.raises(KeyboardInterrupt):
        quietly(broken)
    quietly(failing)


def test_an_interrupt_that_was_already_caught_does_not_count():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(Py4JError), interruptible():
            failing()


def stops():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise RuntimeError("stopped early") from None


def translates():
    try:
        broken()
    except Py4JError as error:
        raise WorkerError("Spark could not finish the job") from error


@pytest.mark.parametrize(("call", "error"), [(stops, RuntimeError), (translates, KeyboardInterrupt)])
def test_an_interrupt_replaces_an_error_of_py4j_and_not_one_of_a_callback(call, error):
    with pytest.raises(error), interruptible():
        call()


def test_a_shared_folder_is_private_and_needs_no_folder_that_a_cleanup_may_remove(cluster, tmp_path):
    cluster.context._temp_dir = str(tmp_path / "removed")
    with cluster.shared_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.parametrize(("master", "limit"), [("local[2]", 0), ("local-cluster[2,1,1024]", 7)])
def test_only_results_from_other_machines_have_a_limit(cluster, monkeypatch, master, limit):
    monkeypatch.setattr(cluster_module, "_settings_of", lambda context: SimpleNamespace(max_result_bytes=7))
    cluster.context.master = master
    assert cluster.max_result_bytes == limit


@pytest.mark.parametrize(("slots", "remedy"), [(3, "num_workers=2 or fewer"), (1, "on a cluster with")])
def test_a_job_that_would_deadlock_raises_an_error(cluster, slots, remedy):
    cluster.context.defaultParallelism = slots
    elsewhere = []
    with holding_slots(slots):
        for call in (lambda: begins(cluster), lambda: cluster.background(list)):
            with pytest.raises(ConfigurationError, match=rf"all slots \({slots}\).*{remedy}"):
                call()
        thread = threading.Thread(target=lambda: elsewhere.append(begins(cluster)))  # no job waits for this thread
        thread.start()
        thread.join(60)
    assert elsewhere == [True]
    assert begins(cluster)


def test_slots_held_by_nested_callbacks_add_up(cluster):
    cluster.context.defaultParallelism = 3
    with holding_slots(2):
        assert begins(cluster)
        with pytest.raises(ConfigurationError, match="all slots"), holding_slots(1):
            begins(cluster)
        assert begins(cluster)


def begins(cluster):
    """Whether a job starts."""
    return cluster.collect(Jobs(lambda: [True])) == [True]


class Partitions:
    """An RDD that, like PySpark's, captures the workers' environment variables when its Java object is created."""

    def __init__(self, context, function=None):
        self.context, self.function, self._java = context, function, None

    def mapPartitions(self, function):
        return Partitions(self.context, function)

    @property
    def _jrdd(self):
        if self._java is None:
            self._java = dict(self.context.environment)
        return self._java


def test_a_job_on_some_partitions_does_not_change_the_environment_of_other_threads(cluster):
    def run_job(rdd, function, partitions):
        mapped = rdd.mapPartitions(function)  # as PySpark does
        environments.append(mapped._jrdd)
        assert cluster.context.environment == {"MINE": "1"}
        others.append(in_time(enter))
        return mapped.function(partitions)

    def enter():
        with cluster.training_workers():
            pass

    environments, others = [], []
    cluster.context.environment = {"MINE": "1"}
    cluster.context.runJob = run_job
    cluster._environment = {"SPARKKERAS_WORKER": "1"}
    assert cluster.collect(Partitions(cluster.context), [1, 2]) == [1, 2]
    assert environments == [{"MINE": "1", "SPARKKERAS_WORKER": "1"}]
    assert others == [True]


def in_time(call):
    """Whether another thread can make a call, which this thread does not block."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


@pytest.mark.parametrize("java", [None, Java(is_stopped=True)])
def test_a_context_that_was_stopped_runs_nothing(cluster, java):
    cluster.context._jsc = java
    for call in (lambda: begins(cluster), lambda: cluster.background(list), cluster.training_workers().__enter__):
        with pytest.raises(ClusterError, match="session has been stopped"):
            call()


def test_spark_that_cannot_start_has_a_remedy(monkeypatch):
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkContext, "getOrCreate", Mock(side_effect=RuntimeError("[JAVA_GATEWAY_EXITED]")))
    with pytest.raises(ClusterError, match=r"JAVA_GATEWAY_EXITED.*sparkkeras doctor .*Or not\.$"):
        active_context("Or not.")


def test_a_task_cannot_start_jobs(monkeypatch):
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(TaskContext, "get", classmethod(lambda cls: cls))
    with pytest.raises(ClusterError, match=r"inside a task.*self\.model\.predict"):
        active_context()


@pytest.mark.parametrize(("package", "expected"), [("digest", DAEMON | SOCKETS), ("", SOCKETS)])
def test_settings_that_make_spark_faster_are_listed_once_if_the_context_lacks_them(monkeypatch, package, expected):
    context = Mock(getConf=lambda: {"spark.python.unix.domain.socket.enabled": "false"})
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)
    assert missing_settings() == {}, "the workers are not known yet"
    monkeypatch.setitem(worker_checks.equipped, context, [{"package": "digest"}, {"package": package}])
    assert missing_settings() == expected
    assert missing_settings() == {}


def test_the_context_of_a_connect_server_in_this_process_is_not_used(monkeypatch):
    server = object()
    monkeypatch.setattr(worker_checks, "equipped", {server: []})
    monkeypatch.setattr(SparkContext, "_active_spark_context", server)
    assert active_context() is server
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(ClusterError, match="needs a SparkContext"):
        active_context()
    assert missing_settings() == {}


def test_many_small_partitions_cause_a_warning_with_their_number_and_size():
    with pytest.warns(UserWarning, match="64 partitions.*32 rows.*num_workers=2"):
        warn_of_partitions(64, 2, 1, 32)


@pytest.mark.parametrize(("workers", "batches"), [(2 * MANY_PARTITIONS, 1), (64, FEW_BATCHES + 1), (2, 1)])
def test_few_or_large_partitions_cause_no_warning(workers, batches):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_partitions(workers, 2, batches, 32)
