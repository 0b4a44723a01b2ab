"""What is shown of a training: lines that stay, and one that changes, in a log, a terminal and a notebook."""

import io
from types import SimpleNamespace

import pytest

from sparkkeras.events import (
    EpochEnded,
    EpochMeasured,
    EpochStarted,
    Incident,
    MemberTrained,
    PhaseStarted,
    RowsTrained,
    RunEnded,
    RunResumed,
    RunStarted,
    SparkTasks,
    Updates,
    WorkerProgress,
    WorkersChanged,
)
from sparkkeras.progress import status_line
from sparkkeras.progress.renderer import Progress
from sparkkeras.progress.status_line import StatusLine
from tests.terminals import Terminal, manual_clock, write_to


@pytest.fixture
def clock(monkeypatch):
    return manual_clock(monkeypatch)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return write_to(Terminal(), monkeypatch)


def shown(verbose, *events, kind="fit"):
    progress = Progress(verbose)
    for event in (RunStarted(kind, "model", epochs=3), *events):
        progress.on_event(event)
    return progress


def test_a_line_shows_the_phases_and_then_the_rows_of_the_epoch(clock, terminal):
    progress = shown(1, PhaseStarted("Storing rows"), SparkTasks(0, 4))
    assert terminal.line == "Storing rows ..."
    clock.now += 1
    progress.on_event(SparkTasks(3, 4))
    assert terminal.line == "Storing rows ... 3 of 4 tasks"
    for event in (WorkersChanged(2, (100, 300)), PhaseStarted("Loading Keras"), EpochStarted(0)):
        progress.on_event(event)
    assert terminal.line == "Loading Keras ..."
    clock.now += 12
    progress.on_event(WorkerProgress(0, 0, 100, 2.0, {"loss": 0.5}))
    line = "[=====...............] 2 workers - 2.0s + 11.0s start-up - 50 rows/s - about 6.0s left - loss: 0.5000"
    assert terminal.line == line
    clock.now += 1
    progress.on_event(SparkTasks(1, 2))
    assert terminal.line == line
    progress.on_event(RowsTrained(400, 1.0, 10.0))
    progress.on_event(EpochEnded(0, {"loss": 0.25}))
    progress.on_event(RunEnded())
    assert terminal.line == ""
    lasting = [line.rpartition("\r\033[K")[2] for line in terminal.getvalue().split("\n")]
    end = "2 workers - 3.0s + 11.0s start-up - 133 rows/s - loss: 0.2500"
    assert lasting[:3] == ["Training on 2 workers.", "Epoch 1/3", end]


def test_unknown_rows_are_counted(clock, terminal):
    progress = shown(1, WorkersChanged(1, (None,)), EpochStarted(0))
    clock.now += 2
    progress.on_event(WorkerProgress(0, 0, 1500, 2.0))
    assert terminal.line == "1,500 rows 1 worker - 2.0s - 750 rows/s"


def test_a_phase_ends_when_workers_begin(clock, terminal):
    progress = shown(1, PhaseStarted("Storing rows"), WorkersChanged(2), kind="search")
    clock.now += 1
    progress.on_event(SparkTasks(1, 2))
    assert terminal.line == ""


def test_what_happens_to_a_run_has_lines(capsys):
    shown(
        2,
        RunResumed("Continues."),
        Incident("retry", "a task failed"),
        Incident("warning", "which is also a warning"),
        WorkersChanged(2),
        MemberTrained(1, range(2), [{"loss": 2.0}, {"loss": 1.0}]),
        kind="ensemble",
    )
    assert capsys.readouterr().out.splitlines() == [
        "Continues.",
        "A task failed.",
        "Training 2 members.",
        "Member 1 - 2 epochs - loss: 1.0000",
    ]


def test_an_epoch_of_a_parameter_server_has_its_own_measurement(clock, capsys):
    progress = shown(2, WorkersChanged(2, (10, 10)), EpochStarted(0))
    clock.now += 9.0
    updates = Updates(15, 5.0, {0: 14, 3: 1}, 0.2, 3)
    for event in (EpochMeasured(0, 300, 3.0, 6.0, updates), EpochEnded(0, {"loss": 0.5})):
        progress.on_event(event)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "2 workers - 3.0s + 6.0s start-up - 100 rows/s - 5 updates/s - staleness 0.2 mean, 3 max - loss: 0.5000"
    )


def test_progress_shows_how_many_workers_remain(capsys):
    progress = shown(2, WorkersChanged(2, (10, 10)), WorkersChanged(2, (10, 10)))
    assert capsys.readouterr().out == "Training on 2 workers.\n"
    progress.on_event(WorkersChanged(1, (20,)))
    progress.on_event(EpochEnded(1, {"loss": 0.5}))
    assert [line.partition(" - ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Training continues on 1 worker.",
        "1 worker",
    ]


# --- the lines


def test_a_log_gets_a_line_a_minute_of_what_would_change(clock, capsys):
    status = StatusLine(1)
    status.write("begins")
    for second in range(150):
        clock.now = 100.0 + second
        status.update(f"after {second}")
    status.write("ended")
    assert capsys.readouterr().out.splitlines() == ["begins", "after 10", "after 70", "after 130", "ended"]


def test_a_log_gets_a_line_at_once_and_one_of_whatever_begins(clock, capsys):
    status = StatusLine(1)
    status.update("packing")
    status.update("packing more")
    with status.showing("storing"):
        clock.now += 59
        status.update("half stored")
    clock.now += 1
    status.update("all stored")
    assert capsys.readouterr().out.splitlines() == ["packing", "storing", "all stored"]


def test_a_terminal_gets_one_line_that_is_replaced(clock, terminal):
    status = StatusLine(1)
    status.update("loading")
    clock.now += 1
    status.update("half")
    with status.showing("storing"):
        assert terminal.line == "storing"
    assert terminal.line == ""
    status.write("done")
    assert terminal.getvalue() == "loading\r\033[Khalf\r\033[Kstoring\r\033[Kdone\n"


def test_a_line_changes_ten_times_a_second_at_most(clock, terminal):
    status = StatusLine(1)
    for step in range(1000):
        clock.now = 100.0 + step / 1000
        status.update(str(step))
    assert 9 <= terminal.getvalue().count("\r") <= 10


def test_a_line_that_changes_fits_into_the_terminal(clock, terminal, monkeypatch):
    monkeypatch.setattr(status_line.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=10))
    StatusLine(1).update("0123456789abcdef")
    assert terminal.getvalue() == "012345678"


def test_a_notebook_gets_complete_lines_and_blanks_in_place_of_the_terminals_sequence(clock, monkeypatch):
    class OutStream(io.StringIO):
        __module__ = "ipykernel.iostream"

    stream, line = write_to(OutStream(), monkeypatch), "metric: 0.1 - " * 20
    status = StatusLine(1)
    status.update(line)
    status.clear()
    assert stream.getvalue() == f"{line}\r{' ' * len(line)}\r"


@pytest.mark.parametrize(("verbose", "expected"), [(0, ""), (2, "line\n")])
def test_verbose(verbose, expected, terminal):
    status = StatusLine(verbose)
    status.update("changing")
    status.write("line")
    status.clear()
    assert terminal.getvalue() == expected
