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


def run(train, batch_size=10, steps_per_epoch=None):
    found = Run("synchronous", [keras.Sequential()], {"steps_per_epoch": steps_per_epoch})
    found.split, found.options = TrainValidationSplit(train, (0,) * len(train)), FitOptions(batch_size)
    return found


@pytest.mark.parametrize(
    ("train", "steps_per_epoch", "batches"), [((25, 31, 0), None, 4), ((30,), None, 3), ((), None, 0), ((25, 31), 2, 2)]
)
def test_batches_are_those_of_the_worker_with_the_most_batches(train, steps_per_epoch, batches):
    assert run(train, steps_per_epoch=steps_per_epoch).batches == batches


def test_rows_of_streams_are_of_an_unknown_number():
    split = TrainValidationSplit.split([None, 0], 0.0)
    assert (split.train, split.workers, split.validation_spans) == ((None, 0), [0], ((0, 0), (0, 0)))
    assert (run(split.train).num_workers, run(split.train).steps, run(split.train).batches) == (1, None, sys.maxsize)
    assert run(split.train, steps_per_epoch=3).steps == 3


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
        ({"frequency": 3}, 'frequency: "epoch" in the checkpoint, 3 now'),
        ({"gradient_dtype": "float16"}, "gradient_dtype: null in the checkpoint"),
        ({"given": {"validation_split": 0.5}}, "validation_split: 0 in the checkpoint, 0.5 now"),
    ],
)
def test_what_a_checkpoint_belongs_to(changed, reason):
    before, same, other = (SameWork.of(run, {}) for run in (checked(), checked(given={"epochs": 7}), checked(**changed)))
    before.check(same, "path", "name")
    with pytest.raises(ConfigurationError, match=reason):
        before.check(other, "path", "name")


def test_what_validates():
    assert not checked().validates
    for given in ({"validation_data": X}, {"validation_col": "held_out"}, {"validation_split": 0.5}):
        assert checked(given=given).validates
