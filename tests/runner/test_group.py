"""The state of a group, with a clock that only moves when a test moves it."""

import pytest

from sparkkeras.events import Events, OutputWritten, RankChanged, RankReported, RunEnded, RunStarted
from sparkkeras.progress.renderer import Progress
from sparkkeras.rpc.transport import Call
from sparkkeras.runner import group as group_module
from sparkkeras.runner.exchanges import BARRIER, Kind, OutOfStepError
from sparkkeras.runner.group import RankFailure, RankGroup
from sparkkeras.runner.service import GroupService
from tests.terminals import Terminal, manual_clock, write_to


@pytest.fixture
def clock(monkeypatch):
    return manual_clock(monkeypatch)


@pytest.fixture
def group(clock):
    """Two ranks that have joined."""
    group = RankGroup(2, clock=lambda: clock.now)
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


def test_what_fails_while_the_group_stops_does_not_count(group):
    group.stop()
    group.fail(RankFailure(0, "RuntimeError"))
    group.end(0, "killed")
    group.end(1, "killed")
    assert group.failure() is None
    assert group.may_exit


def test_processes_exit_together(group):
    """JAX ends the processes that lose the one with its coordinator, and those of other ranks may still train."""
    assert not group.may_exit
    group.complete(0)
    assert not group.may_exit
    group.give(1, 1, Kind(BARRIER), b"")
    with pytest.raises(OutOfStepError, match="rank 0 has ended"):
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
    assert "nothing for 10 seconds" in group.failure().error


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


def test_independent_ranks_may_start_again(clock):
    group = RankGroup(2, together=False, clock=lambda: clock.now)
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
    group = RankGroup(2, together=False, clock=lambda: clock.now)
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


PEER = RankFailure(0, "sparkkeras.worker.collectives.group.PeerLostError: the process of rank 1 does not answer")
ABORT = RankFailure(0, "its process was killed by SIGABRT", is_death=True)
KILL = RankFailure(1, "its process was killed by SIGKILL", is_death=True)
CLOSED = RankFailure(0, "RuntimeError: connection closed by peer")
RAISED = RankFailure(1, "ValueError: on purpose")


@pytest.mark.parametrize(
    ("reported", "cause"),
    [
        ([PEER, KILL], KILL),
        ([CLOSED, KILL], KILL),
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


# What is emitted and shown: output, reports, states, and the line with the progress


class Display:
    """The progress of a group, from its events."""

    def __init__(self, group, heard, verbose):
        self.progress = Progress(verbose)
        self.events = Events([self.progress, heard])
        self.group = group
        self.progress.on_event(RunStarted("function", "train", {"num_workers": group.size}))

    def update(self):
        for event in self.group.news():
            self.events.emit(event)
        self.progress.refresh()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return write_to(Terminal(), monkeypatch)


class Listener(list):
    on_event = list.append


@pytest.fixture
def heard():
    return Listener()


@pytest.fixture
def display(group, clock, terminal, heard):
    return Display(group, heard, 1)


def test_a_line_shows_what_the_ranks_do(group, display, clock, terminal):
    display.update()
    assert terminal.line == "0 of 2 ranks started - 0.0s"
    group.start(0)
    clock.now += 1.5
    display.update()
    assert terminal.line == "1 of 2 ranks started - 1.5s"
    group.start(1)
    for epoch in (0, 1, 2):
        clock.now += 10
        group.console.report(RankReported(0, epoch, 10, {"loss": 1 / (epoch + 1)}))
        group.console.report(RankReported(1, epoch, 10, {"loss": 9.0}))
        display.update()
    assert terminal.line == "2 ranks running - epoch 3 of 10 - 31.5s - about 1m 10s left - loss: 0.3333"
    clock.now += 4
    group.complete(0)
    display.update()
    assert terminal.line.startswith("1 of 2 ranks finished - epoch 3 of 10 - 35.5s - about 1m 06s left - loss")
    display.events.emit(RunEnded())
    assert terminal.line == ""


def test_output_stays_above_the_line_and_all_is_emitted(group, display, clock, terminal, heard):
    display.update()
    clock.now += 1
    group.start(1)
    group.console.add(1, ["one", "two"])
    report = RankReported(0, 0, None, {"loss": 0.5})
    group.console.report(report)
    display.update()
    assert terminal.getvalue().split("\r\033[K")[1].splitlines()[:3] == ["[1] one", "[1] two", "[0] epoch 1  loss: 0.5"]
    assert terminal.line.startswith("1 of 2 ranks started")
    assert heard == [
        OutputWritten(1, "one\ntwo\n"),
        OutputWritten(0, "epoch 1  loss: 0.5\n"),
        RankChanged(1, "started", "::1"),
        report,
    ]


@pytest.mark.parametrize(("verbose", "written"), [(2, "[0] one\n"), (0, "")])
def test_without_a_line_output_is_written_or_only_emitted(group, clock, terminal, heard, verbose, written):
    display = Display(group, heard, verbose)
    group.console.add(0, ["one"])
    display.update()
    assert (terminal.getvalue(), heard) == (written, [OutputWritten(0, "one\n")])


def test_a_rank_that_spark_starts_again_is_an_event(clock, terminal, heard):
    group = RankGroup(2, together=False)
    display = Display(group, heard, 2)
    for attempt, host in ((1, "a"), (2, "b"), (3, "b")):
        group.join(0, attempt, host, 0)
        group.start(0)
        display.update()
        display.update()
        group.disconnect(0)
    group.join(0, 4, "c", 0)
    display.update()  # it has not started there
    assert heard == [RankChanged(0, "started", host) for host in ("a", "b", "b")]


def test_the_end_of_training_is_not_that_of_the_function(group, display, clock, terminal):
    for epoch in (1, 2, 3):  # which should have been 0, 1, 2
        clock.now += 1
        group.console.report(RankReported(0, epoch, 3, {}))
        display.update()
    assert terminal.line == "0 of 2 ranks started - epoch 4 - 3.0s"
