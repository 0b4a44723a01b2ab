"""The settings of checkpoints."""

import dataclasses
from pathlib import Path

import pytest

from sparkkeras import Checkpoint
from sparkkeras.errors import ConfigurationError, UnknownArgumentError


def test_the_settings():
    given = Checkpoint(Path("runs/a"), every=3, every_seconds=60, keep=1)
    assert dataclasses.asdict(given) == {"path": "runs/a", "every": 3, "every_seconds": 60.0, "keep": 1}
    assert Checkpoint("a") == Checkpoint("a", "epoch", None, 3)


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
