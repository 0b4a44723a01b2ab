"""Lines that stay, and one below them that changes; what a log, a terminal and a notebook get."""

import io
from types import SimpleNamespace

import pytest

from sparkkeras.progress import status_line
from sparkkeras.progress.status_line import StatusLine
from tests.terminals import Terminal, manual_clock, write_to


@pytest.fixture
def clock(monkeypatch):
    return manual_clock(monkeypatch)


@pytest.fixture
def terminal(monkeypatch):
    return write_to(Terminal(), monkeypatch)


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


def test_what_begins_is_shown_at_once_and_until_it_ends(clock, terminal):
    status = StatusLine(1)
    status.update("packing")
    with status.showing("storing"):
        assert terminal.line == "storing"
    assert terminal.line == ""


def test_a_terminal_gets_one_line_that_is_replaced(clock, terminal):
    status = StatusLine(1)
    status.update("loading")
    clock.now += 1
    status.update("half")
    status.write("done")
    assert terminal.getvalue() == "loading\r\033[Khalf\r\033[Kdone\n"


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


def test_a_notebook_gets_blanks_in_place_of_the_terminals_sequence(clock, monkeypatch):
    class OutStream(io.StringIO):
        __module__ = "ipykernel.iostream"

    stream = write_to(OutStream(), monkeypatch)
    status = StatusLine(1)
    status.update("loading")
    status.clear()
    assert stream.getvalue() == "loading\r       \r"


def test_a_line_of_a_notebook_is_complete(clock, monkeypatch):
    class OutStream(io.StringIO):
        __module__ = "ipykernel.iostream"

    stream = write_to(OutStream(), monkeypatch)
    StatusLine(1).update("metric: 0.1 - " * 20)
    assert stream.getvalue() == "metric: 0.1 - " * 20


@pytest.mark.parametrize(("verbose", "expected"), [(0, ""), (2, "line\n")])
def test_verbose(verbose, expected, terminal):
    status = StatusLine(verbose)
    status.update("changing")
    status.write("line")
    status.clear()
    assert terminal.getvalue() == expected
