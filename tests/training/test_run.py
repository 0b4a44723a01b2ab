"""The number of batches and rows of a run."""

import sys

import keras
import pytest

from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.errors import ConfigurationError
from sparkkeras.parameter.rules import make_rule
from sparkkeras.training.run import Run
from sparkkeras.training.saved_run import SameWork
from sparkkeras.worker.batches import FitOptions
from tests.models import regression
from tests.training.runs import BATCH, X, partitions, stored_run


@pytest.mark.parametrize(
    ("train", "steps_per_epoch", "batches", "steps"),
    [((25, 31, 0), None, 4, 4), ((), None, 0, 0), ((25, 31), 2, 2, 2), ((None, 0), None, sys.maxsize, None)],
)
def test_batches_are_those_of_the_worker_with_the_most_batches(train, steps_per_epoch, batches, steps):
    run = Run("synchronous", [keras.Sequential()], {"steps_per_epoch": steps_per_epoch})
    run.split, run.options = TrainValidationSplit.split(train, 0.0), FitOptions(10)
    assert (run.batches, run.steps) == (batches, steps)


def checked(**fields):
    return stored_run([regression()], partitions(8), FitOptions(BATCH, seed=5), **fields)


def test_a_run_shows_its_settings_and_arguments():
    shown = checked(settings={"mode": "synchronous", "rule": None}, given={"class_weight": {1: 2.0}}).started()
    assert (shown.kind, shown.name, shown.epochs) == ("fit", "regression", 1)
    assert list(shown.settings)[:2] == ["mode", "batch_size"]
    assert (shown.settings["seed"], shown.settings["class_weight"], shown.settings["optimizer"]) == (5, {"1": 2.0}, "SGD")
    assert checked(mode="independent").started().kind == "ensemble"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mode": "allreduce"}, 'mode: "synchronous" in the checkpoint, "allreduce" now'),
        ({"rule": make_rule("slowmo", "synchronous")}, r"rule\.name"),
        ({"frequency": 3}, "frequency"),
        ({"gradient_dtype": "float16"}, "gradient_dtype"),
        ({"given": {"validation_split": 0.5}}, "validation_split"),
    ],
)
def test_what_a_checkpoint_belongs_to(changed, reason):
    before, same, other = (SameWork.of(run, {}) for run in (checked(), checked(given={"epochs": 7}), checked(**changed)))
    before.check(same, "path", "name")
    with pytest.raises(ConfigurationError, match=reason):
        before.check(other, "path", "name")


def test_what_validates():
    assert not checked().validates
    for given in ({"validation_data": X}, {"validation_col": "out"}, {"validation_split": 0.5}):
        assert checked(given=given).validates
