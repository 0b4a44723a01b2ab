"""The state of a group, with a clock that only moves when a test moves it."""

import pytest

from sparkkeras.rpc.transport import Call
from sparkkeras.runner import group as group_module
from sparkkeras.runner.exchanges import BARRIER, Kind, OutOfStepError
from sparkkeras.runner.group import RankFailure, RankGroup
from sparkkeras.runner.service import GroupService


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def group(clock):
    """Two ranks that have joined."""
    group = RankGroup(2, clock=clock)
    assert group.join(0, 7, "a", 1) is None
    assert group.join(1, 8, "::1", 2) == group.join(0, 7, "a", 1) == ("a:1", "[::1]:2")
    return group


def test_time_counts_from_the_start_of_the_last_rank(group, clock):
    group.start(1)
    clock.now += 5
    assert group.seconds == 0
    group.start(0)
    clock.now += 2
    assert group.seconds == 2


def test_the_first_failure_counts(group, clock):
    group.fail(RankFailure(1, "ValueError: one"))
    group.fail(RankFailure(0, "ValueError: two"))
    assert group.failure() is None
    clock.now += group_module.SETTLE_SECONDS
    assert group.failure() == RankFailure(1, "ValueError: one")


def test_a_rank_that_died_is_the_cause_of_errors_before(group):
    group.fail(RankFailure(0, "RuntimeError: connection closed by peer"))
    group.end(0, "its process ended with the exit code 1")
    group.end(1, "killed")
    assert group.failure() == RankFailure(1, "killed", is_death=True)


def test_what_fails_while_the_group_stops_does_not_count(group):
    group.stop()
    group.fail(RankFailure(0, "RuntimeError"))
    group.end(0, "killed")
    group.end(1, "killed")
    assert group.failure() is None
    assert group.may_exit


def test_a_rank_that_ends_with_its_result_has_not_failed(group):
    group.expect(0, [3])
    group.receive(0, 0, 0, memoryview(b"abc"))
    group.complete(0)
    group.end(0, "exit code 0")
    assert group.failure() is None
    assert group.unfinished == [1]
    assert bytes(group.result(0)[0]) == b"abc"


def test_processes_exit_together(group):
    """JAX ends the processes that lose the one with its coordinator, and those of other ranks may still train."""
    assert not group.may_exit
    group.complete(0)
    assert not group.may_exit
    group.give(1, 1, Kind(BARRIER), b"")
    with pytest.raises(OutOfStepError, match="rank 0 has ended without it"):
        group.take(1)
    group.complete(1)
    assert group.may_exit


def test_a_lost_connection_may_come_back(group, clock):
    group.disconnect(1)
    clock.now += group_module.RECONNECT_SECONDS / 2
    group.heartbeat(1)
    clock.now += group_module.RECONNECT_SECONDS
    assert group.failure() is None
    group.disconnect(1)
    clock.now += group_module.RECONNECT_SECONDS
    group.failure()
    clock.now += group_module.SETTLE_SECONDS
    assert "its worker died" in group.failure().error


def test_ranks_that_spark_starts_again_have_failed_and_do_not_run_twice(group, clock):
    group.disconnect(1)
    clock.now += 0.5
    group.disconnect(0)
    assert group.join(0, 9, "a", 3) is None
    assert group.join(1, 10, "b", 4) is None
    assert group.join(0, 9, "a", 3) is None
    clock.now += group_module.SETTLE_SECONDS
    assert group.failure() == RankFailure(1, "its worker died, or lost the connection to the driver", is_death=True)


def test_a_silent_worker_is_lost(group, clock):
    clock.now += group_module.SILENT_SECONDS
    group.heartbeat(0)
    group.failure()
    clock.now += group_module.SETTLE_SECONDS
    group.heartbeat(0)
    assert group.failure().rank == 1
    assert "sent nothing for 10 seconds" in group.failure().error


def test_silence_does_not_count_while_the_driver_is_paused(group, clock):
    """After Ctrl-Z and fg, the driver may look at the ranks before its threads have read their heartbeats."""
    assert group.failure() is None
    clock.now += 60
    assert group.failure() is None
    assert group.failure() is None
    for _ in range(25):
        clock.now += 0.5
        group.heartbeat(0)
        group.failure()
    assert group.failure().rank == 1


def test_a_group_has_ended_with_its_last_host(group):
    group.end(0, "exit code 0")
    assert not group.has_ended
    group.disconnect(1)
    assert group.has_ended


def test_independent_ranks_may_start_again(clock):
    group = RankGroup(2, together=False, clock=clock)
    assert group.join(0, 1, "a", 0) == ()
    group.start(0)
    group.disconnect(0)
    clock.now += 100
    assert group.failure() is None
    assert group.join(0, 2, "b", 0) == ()
    assert not group.is_current(0, 1)
    assert group.is_current(0, 2)
    assert group.host(0) == "b"


def test_a_second_attempt_does_not_replace_one_that_runs(clock):
    """With spark.speculation=true, Spark starts slow tasks a second time, and ends those that come in second."""
    group = RankGroup(2, together=False, clock=clock)
    service = GroupService(group)

    def join(rank, attempt):
        return service(
            Call("join", {"rank": rank, "attempt": attempt, "host": "b", "port": 0}, memoryview(b""), "peer")
        ).fields

    assert join(0, 1) == {}
    clock.now += group_module.SILENT_SECONDS - 1
    assert join(0, 2) == {"wait": True, "stop": False}
    group.heartbeat(0)
    clock.now += 2
    assert join(0, 2) == {"wait": True, "stop": False}
    assert group.is_current(0, 1)
    group.complete(0)
    assert join(0, 2) == {"wait": False, "stop": True}
    group.disconnect(0)
    assert join(0, 2) == {"wait": False, "stop": True}
    assert group.failure(is_final=True) is None
    join(1, 3)
    clock.now += group_module.SILENT_SECONDS
    assert join(1, 4) == {}
    assert group.is_current(1, 4)


def test_results_arrive_in_pieces():
    group = RankGroup(1)
    with pytest.raises(ValueError, match="has announced no result"):
        group.receive(0, 0, 0, memoryview(b"he"))
    group.expect(0, [5, 0, 100])
    group.receive(0, 0, 0, memoryview(b"he"))
    group.receive(0, 0, 2, memoryview(b"llo"))
    group.receive(0, 2, 99, memoryview(b"!"))
    with pytest.raises(ValueError):
        group.receive(0, 0, 4, memoryview(b"no"))
    with pytest.raises(IndexError):
        group.receive(0, 3, 0, memoryview(b"no"))
    parts = group.result(0)
    assert [len(part) for part in parts] == [5, 0, 100]
    assert bytes(parts[0]) == b"hello"
    assert parts[2][99] == ord("!")


PEER = RankFailure(0, "sparkkeras.worker.collectives.group.PeerLostError: the process of rank 1 does not answer")
ABORT = RankFailure(0, "its process was killed by SIGABRT", is_death=True)
KILL = RankFailure(1, "its process was killed by SIGKILL", is_death=True)
RAISED = RankFailure(1, "ValueError: on purpose")


@pytest.mark.parametrize(
    ("reported", "cause"),
    [
        ([PEER, KILL], KILL),
        ([RAISED, ABORT], RAISED),
        ([ABORT, PEER], ABORT),
        ([ABORT, KILL], KILL),
    ],
)
def test_consequences_of_a_failure_are_not_its_cause(reported, cause):
    group = RankGroup(2)
    for failure in reported:
        group.fail(failure)
    assert group.failure(is_final=True) == cause
