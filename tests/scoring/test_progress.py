"""The progress of evaluations and predictions on a terminal."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.scoring.inference import dataset_with_progress
from tests.terminals import Terminal, manual_clock, write_to


@pytest.fixture
def clock(monkeypatch):
    return manual_clock(monkeypatch)


@pytest.fixture
def terminal(monkeypatch):
    return write_to(Terminal(), monkeypatch)


ELSEWHERE = DriverAddress("192.0.2.1", "192.0.2.1", is_local=False)
"""An address on which this machine cannot listen, so that no worker reports progress."""


class Rows:
    """A source of 100 rows."""

    block = SimpleNamespace(rows=100)

    def __init__(self, terminal, clock, fails=False):
        self.terminal, self.clock, self.fails = terminal, clock, fails

    @contextmanager
    def dataset(self, slices):
        self.shown = self.terminal.line
        self.clock.now += 1
        if self.fails:
            raise OSError
        yield SimpleNamespace(slices=slices, driver=ELSEWHERE)


def test_the_line_shows_each_phase_and_is_removed_at_the_end(clock, terminal):
    rows = Rows(terminal, clock)
    with dataset_with_progress(lambda: terminal.line, rows, 3, "Predicting", 1) as (shown_while_packing, dataset, target):
        assert (shown_while_packing, dataset.slices, target) == ("Packing the model ...", 3, None)
        assert terminal.line == "Predicting ..."
    assert (rows.shown, terminal.line) == ("Starting workers, and storing rows ...", "")


def test_the_line_is_removed_if_rows_cannot_be_stored(clock, terminal):
    rows = Rows(terminal, clock, fails=True)
    with pytest.raises(OSError), dataset_with_progress(object, rows, None, "Predicting", "auto"):
        pass
    assert terminal.line == ""


def test_nothing_is_shown_if_nobody_wants_it(clock, terminal):
    with dataset_with_progress(object, Rows(terminal, clock), None, "Predicting", 0) as (_, _, target):
        assert target is None
    assert terminal.getvalue() == ""
