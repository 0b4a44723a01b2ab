"""What is emitted and shown of a group: output, reports, states, and the line with the progress."""

import pytest

from sparkkeras.events import Events, OutputWritten, RankChanged, RankReported, RunEnded, RunStarted
from sparkkeras.progress.renderer import Progress
from sparkkeras.runner.group import RankGroup
from tests.terminals import Terminal, manual_clock, write_to


class Listener(list):
    on_event = list.append


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
def clock(monkeypatch):
    return manual_clock(monkeypatch)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return write_to(Terminal(), monkeypatch)


@pytest.fixture
def heard():
    return Listener()


@pytest.fixture
def group(clock):
    group = RankGroup(2, clock=lambda: clock.now)
    for rank in range(2):
        group.join(rank, 0, f"host{rank}", 1)
    return group


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
        RankChanged(1, "started", "host1"),
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
