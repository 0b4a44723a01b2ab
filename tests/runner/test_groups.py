"""How the driver ends a group whose tasks fail, hang or are cancelled, without tasks."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.data.local_dataset import LocalRunning
from sparkkeras.errors import ClusterError, DriverConnectionError, SparkKerasError, StorageError, WorkerError
from sparkkeras.runner import groups
from sparkkeras.runner.group import _LOST, RankFailure, RankGroup
from sparkkeras.runner.groups import Ranks, failed, run_group
from sparkkeras.runner.hosts import Host, Parts
from sparkkeras.runner.rank import Placement


class Hosts:
    """Starts what a test says, given the address of the driver."""

    driver = DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)
    ports = None

    def __init__(self, start):
        self._start = start

    def start(self, host, handles):
        return self._start(host.driver)


def ranks(start):
    return Ranks(Hosts(start), None, Parts())


class Tasks:
    """Tasks that end when they are cancelled, as Spark's do: with an error that says so."""

    def __init__(self, done=False, error=None):
        self.done, self.error = done, error or ClusterError("the Spark job was cancelled")

    def cancel(self):
        self.done = True

    def result(self):
        assert self.done
        raise self.error


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(groups, "STOP_SECONDS", (0.05, 0.05))
    group = RankGroup(1)
    group.join(0, 1, "host", 1)
    return group


def test_tasks_that_do_not_end_are_cancelled_and_that_is_not_the_cause(group):
    group.fail(RankFailure(0, "ValueError: on purpose"))
    tasks = Tasks()
    with pytest.raises(WorkerError, match="on purpose"):
        run_group(group, ranks(lambda address: tasks))
    assert tasks.done
    assert group.is_stopping


def lose(group):
    group.disconnect(0)


def start_and_lose(group):
    """Then a driver that was stopped for longer than hosts wait goes on, and may start the ranks again."""
    group.start(0)
    group.disconnect(0)


def fail(group):
    group.fail(RankFailure(0, "ValueError: on purpose"))
    group.end(0, "exit code 1")


@pytest.mark.parametrize(
    ("happens", "error", "words"),
    [
        (lose, ClusterError("the Spark job was cancelled"), "was cancelled"),
        (lose, WorkerError("a task failed on a worker: OSError: no space left", "Traceback ..."), "no space left"),
        (lose, StorageError("no space left"), "no space left"),
        (lose, DriverConnectionError("received no reply"), "no reply"),
        (lose, WorkerError("a worker process died"), "its worker died"),
        (lose, RuntimeError(), "its worker died"),
        (start_and_lose, DriverConnectionError("received no reply"), "its worker died"),
        (fail, StorageError("no space left"), "on purpose"),
    ],
)
def test_an_error_of_the_task_is_the_cause_if_it_says_more(group, happens, error, words):
    happens(group)
    with pytest.raises(SparkKerasError, match=words) as raised:
        run_group(group, ranks(lambda address: Tasks(True, error)))
    assert raised.value is error or raised.value.__cause__ is error


def test_an_error_of_a_worker_is_the_cause_although_spark_starts_the_rank_again():
    """After its second attempt, the job ends without an error."""

    class Fails:
        @property
        def value(self):
            raise OSError("no space left")

    def start(address):
        def run():
            for attempt in (1, 2):
                host = Host(Fails(), address, 1, together=True)
                with contextlib.suppress(OSError):
                    host.run(Placement(0, attempt, "here", 1), lambda main, variables: None, {})

        return LocalRunning(run)

    with pytest.raises(WorkerError, match="rank 0 .*no space left"):
        run_group(RankGroup(1), ranks(start))


def test_failures_have_remedies():
    independent = RankGroup(1, together=False)
    assert "the master local[N]" in str(failed(independent, RankFailure(0, _LOST, is_death=True)))
    failure = RankFailure(0, "ModuleNotFoundError: No module named 'mine'", "Traceback ...")
    with pytest.raises(WorkerError, match="install it .*SparkContext.addPyFile"):
        raise failed(RankGroup(1), failure)


JAX = "F1124 02:39:32.9904 client.h:80] Terminating process because the JAX distributed service detected fatal errors. "
UNHEALTHY = f"{JAX}UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (f"step 7\n{UNHEALTHY}\n1\n2\nThe tasks have crashed.\n7", "JAX ended it, since the process of rank 1, 2 does"),
        (f"{UNHEALTHY}\n/job:jax_worker/replica:0/task:3\nThe tasks", "JAX ended it, since the process of rank 3 does"),
        (f"{JAX}DEADLINE_EXCEEDED\n\nRPC: /CoordinationService/Heartbeat", "JAX ended it, since the process of rank 0 does"),
        (f"{JAX}ABORTED: unexpectedly tried to connect", "JAX ended it, for the reason in its output"),
        ("free(): invalid pointer", ""),
    ],
)
def test_why_jax_has_ended_a_process(output, reason):
    group = RankGroup(4)
    group.console.add(0, output.splitlines())
    message, _, _ = str(failed(group, RankFailure(0, "killed by SIGABRT", is_death=True))).partition("output of")
    assert reason in message
    assert ("JAX" in message) == bool(reason)


class WaitingTasks(Tasks):
    """Tasks that wait for slots until the driver has looked at them often."""

    def __init__(self, looks, *slots):
        self.looks, self.slots, self.error = looks, iter(slots), ClusterError("the Spark job was cancelled")

    @property
    def done(self):
        self.looks -= 1
        return self.looks <= 0

    def cancel(self):
        self.looks = 0

    def slots_while_waiting(self):
        return next(self.slots, None)


@pytest.fixture
def fast(monkeypatch):
    """The driver looks at tasks once a second, and needs no time for it."""
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda seconds: None))
    monkeypatch.setattr(RankGroup, "wait", lambda group, seconds: None)


def test_a_group_that_waits_for_slots_warns_seldom(fast):
    with pytest.warns(UserWarning, match="2 ranks together") as caught, pytest.raises(ClusterError, match="cancelled"):
        run_group(RankGroup(2), ranks(lambda address: WaitingTasks(1000, (1, 4), (1, 4), (0, 4), (4, 4))))
    expected = ["10 seconds: 1 of 4", "30 seconds: 1 of 4", "90 seconds: 0 of 4"]
    assert [text in str(each.message) for text, each in zip(expected, caught, strict=True)] == [True] * 3


def test_a_group_whose_slots_are_lost_ends(fast, recwarn):
    back = WaitingTasks(1000, (0, 1), (2, 2), (0, 1), (2, 2))
    with pytest.raises(ClusterError, match="cancelled"):
        run_group(RankGroup(2), ranks(lambda address: back))
    with pytest.raises(WorkerError, match="only 1 slot left"):
        run_group(RankGroup(2), ranks(lambda address: WaitingTasks(1000, (0, 1), (1, 1))))
    assert not recwarn.list


def test_a_group_that_waits_without_knowing_the_slots_warns(monkeypatch):
    """Spark Connect does not say how many slots are free."""
    monkeypatch.setattr(groups, "WAIT_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="has not started any"), pytest.raises(ClusterError, match="cancelled"):
        run_group(RankGroup(2), ranks(lambda address: Tasks(done=True)))


def test_a_group_that_has_joined_does_not_wait_for_slots(group, monkeypatch, recwarn):
    monkeypatch.setattr(groups, "WAIT_SECONDS", 0.0)
    group.disconnect(0)
    with pytest.raises(ClusterError, match="was cancelled"):
        run_group(group, ranks(lambda address: WaitingTasks(1, (0, 4))))
    assert not recwarn.list


def test_a_rank_that_does_not_start_while_another_one_waits_is_named(fast, monkeypatch):
    group = RankGroup(2)
    group.join(0, 1, "host", 1)
    monkeypatch.setattr(RankGroup, "failure", lambda group, is_final: None)
    with pytest.warns(UserWarning, match="rank 1 .*spark.blockManager.port") as caught, pytest.raises(ClusterError):
        run_group(group, ranks(lambda address: WaitingTasks(100, None)))
    assert len(caught) == 1
