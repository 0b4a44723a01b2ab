"""The settings of checkpoints, and the thread that writes them."""

import dataclasses
import threading
from pathlib import Path

import pytest

from sparkkeras import Checkpoint
from sparkkeras.checkpoints.background_writer import BackgroundWriter
from sparkkeras.errors import ConfigurationError, UnknownArgumentError


def test_the_settings():
    given = Checkpoint(Path("runs/a"), every=3, every_seconds=60, keep=1)
    assert dataclasses.asdict(given) == {"path": "runs/a", "every": 3, "every_seconds": 60.0, "keep": 1}
    assert Checkpoint("a") == Checkpoint("a", "epoch", None, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.keep = 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": ""}, "path='': expected a path"),
        ({"every": 0}, 'every=0: expected "epoch" or a positive whole number of rounds'),
        ({"every": "batch"}, "every='batch': expected"),
        ({"every_seconds": 0}, "every_seconds=0: expected a positive number of seconds or None"),
        ({"every_seconds": "1"}, "every_seconds='1': expected"),
        ({"keep": 0}, "keep=0: expected a positive whole number"),
    ],
    ids=str,
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Checkpoint(**{"path": "a", **arguments})


def test_unknown_settings():
    with pytest.raises(UnknownArgumentError, match="Checkpoint takes no argument 'evry'.*Did you mean 'every'"):
        Checkpoint("a", evry=2)


class Slow:
    """Writes an item when it may, and fails for some."""

    def __init__(self, *failures):
        self.may, self.began, self.written, self.failures = threading.Event(), threading.Event(), [], list(failures)

    def __call__(self, item):
        self.began.set()
        assert self.may.wait(10)
        if self.failures and self.failures.pop(0):
            raise OSError(f"no space for {item}")
        self.written.append(item)


def test_a_newer_item_replaces_the_one_that_waits():
    slow = Slow()
    writer = BackgroundWriter(slow)
    writer.submit(1)
    assert slow.began.wait(10)
    writer.submit(2)
    writer.submit(3)
    slow.may.set()
    assert writer.close() is None
    assert slow.written == [1, 3]
    assert not any(thread.name.startswith("sparkkeras-checkpoints") for thread in threading.enumerate())


def test_the_last_item_is_tried_twice_and_errors_are_reported():
    slow = Slow(True, True, True)
    slow.may.set()
    writer = BackgroundWriter(slow)
    writer.submit(1)
    assert str(writer.close()) == "no space for 1"
    assert str(writer.new_error()) == "no space for 1"
    assert writer.new_error() is None
    writer = BackgroundWriter(slow)
    writer.submit(2)
    assert writer.close() is None
    assert slow.written == [2]
    assert BackgroundWriter(slow).close() is None


def test_an_error_of_an_earlier_item_does_not_count_in_the_end():
    slow = Slow(True)
    writer = BackgroundWriter(slow)
    writer.submit(1)
    assert slow.began.wait(10)
    writer.submit(2)
    slow.may.set()
    assert writer.close() is None
    assert slow.written == [2]
    assert str(writer.new_error()) == "no space for 1"
