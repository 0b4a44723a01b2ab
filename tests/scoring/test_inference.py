"""Determining the shapes of transformed rows, on the driver or on the workers, and the progress on a terminal."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from sparkkeras import ConfigurationError
from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import DriverAddress
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.scoring.inference import (
    dataset_with_progress,
    transformed_spec_of_zeros,
    transformed_spec_on_driver,
    transformed_spec_on_workers,
)
from sparkkeras.worker.batches import BatchOptions
from tests.terminals import Terminal, manual_clock, write_to


def picks(x, y):
    """Requires a first value that is not 0, like a lookup by key."""
    assert (x[:, 0] > 0).all(), "no such row"
    return x[:, 1:].astype("int32"), y


OPTIONS = BatchOptions(4, ByValue.dump(picks, "transform"))


def block(first):
    return from_arrays(np.full((6, 3), first, np.float32), np.zeros((6, 1), np.float32), None)


def test_a_transform_that_fails_on_zeros_is_checked_on_rows():
    assert transformed_spec_of_zeros(block(1.0).spec, OPTIONS) is None
    seen = transformed_spec_on_driver(block(1.0), OPTIONS)
    assert [(leaf.shape, str(leaf.dtype)) for leaf in seen.leaves] == [((2,), "int32"), ((1,), "float32")]
    assert transformed_spec_on_workers(LocalDataset((None, block(1.0), block(2.0))), OPTIONS) == seen


def test_a_transform_that_fails_on_rows_raises_an_error():
    where = r"in line \d+ of test_inference\.py"
    with pytest.raises(ConfigurationError, match=f"{where} .*first 4 rows.*no such row"):
        transformed_spec_on_driver(block(0.0), OPTIONS)
    with pytest.raises(ConfigurationError, match=f"{where} .*partition 1.*no such row"):
        transformed_spec_on_workers(LocalDataset((block(1.0), block(0.0))), OPTIONS)


# Progress


class Rows:
    """A source of 100 rows, on an address on which this machine cannot listen: no worker reports progress."""

    block = SimpleNamespace(rows=100)

    def __init__(self, monkeypatch, fails=False):
        self.clock, self.terminal = manual_clock(monkeypatch), write_to(Terminal(), monkeypatch)
        self.fails = fails

    @contextmanager
    def dataset(self, slices):
        self.shown = self.terminal.line
        self.clock.now += 1
        if self.fails:
            raise OSError
        yield SimpleNamespace(slices=slices, driver=DriverAddress("192.0.2.1", "192.0.2.1", is_local=False))


def test_the_line_shows_each_phase_and_is_removed_at_the_end(monkeypatch):
    rows = Rows(monkeypatch)
    terminal = rows.terminal
    with dataset_with_progress(lambda: terminal.line, rows, 3, "Predicting", 1) as (shown_while_packing, dataset, target):
        assert (shown_while_packing, dataset.slices, target) == ("Packing the model ...", 3, None)
        assert terminal.line == "Predicting ..."
    assert (rows.shown, terminal.line) == ("Starting workers, and storing rows ...", "")


def test_the_line_is_removed_if_rows_cannot_be_stored(monkeypatch):
    rows = Rows(monkeypatch, fails=True)
    with pytest.raises(OSError), dataset_with_progress(object, rows, None, "Predicting", "auto"):
        pass
    assert rows.terminal.line == ""


def test_nothing_is_shown_if_nobody_wants_it(monkeypatch):
    rows = Rows(monkeypatch)
    with dataset_with_progress(object, rows, None, "Predicting", 0) as (_, _, target):
        assert target is None
    assert rows.terminal.getvalue() == ""
