"""`GridValue`: values in a param grid that JSON cannot hold."""

import json

import pytest
from pyspark.ml.tuning import ParamGridBuilder

from sparkkeras import ConfigurationError, DiLoCo
from sparkkeras.ml import GridValue, KerasEstimator
from tests.ml import parts
from tests.models import classifier


def test_values_that_json_cannot_hold_are_wrapped_and_unwrapped():
    small, large = classifier(units=2), classifier(units=4)
    estimator = KerasEstimator()
    grid = (
        ParamGridBuilder().addGrid(estimator.model, [small, large]).addGrid(estimator.rule, [DiLoCo(momentum=0.5)]).build()
    )
    assert [type(value) for value in grid[0].values()] == [GridValue, GridValue]
    assert [estimator.copy(values).getModel() for values in grid] == [small, large]
    assert estimator.copy(grid[1]).getRule() == DiLoCo(momentum=0.5)
    assert estimator.setModel(grid[1][estimator.model]).getModel() is large


def test_values_that_json_can_hold_are_not_wrapped():
    estimator = KerasEstimator()
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.1]).addGrid(estimator.thresholds, [None, [0.5, 1]]).build()
    values = [list(each.values()) for each in grid]
    assert values == [[0.1, None], [0.1, [0.5, 1.0]]]
    assert json.loads(json.dumps(values)) == values
    (weighted,) = ParamGridBuilder().addGrid(estimator.class_weight, [{0: 1, 1: 2}]).build()
    assert weighted[estimator.class_weight].value == {0: 1.0, 1: 2.0}  # JSON would turn the keys into strings


def test_a_grid_checks_its_values():
    with pytest.raises(ConfigurationError, match="transform='halved'"):
        ParamGridBuilder().addGrid(KerasEstimator().transform, [parts.halved, "halved"]).build()
