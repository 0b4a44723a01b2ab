"""Distributions and spaces of them: their labels, the values that trials get, and what is rejected."""

from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkkeras.errors import ConfigurationError, UnknownArgumentError
from sparkkeras.hyperopt import Search, choice, integer, loguniform, normal, uniform
from sparkkeras.hyperopt.distributions import Quantile
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.values import decode

Pair = namedtuple("Pair", "first second")


def nested():
    return {
        "optimizer": choice(
            {"kind": "sgd", "lr": loguniform(1e-3, 1), "momentum": uniform(0.5, 1)},
            {"kind": "adam", "lr": loguniform(1e-5, 1e-2)},
        ),
        "layers": [choice(32, 64), (integer(1, 3), "relu")],
        "dropout": choice(0.0, uniform(0.1, 0.5)),
        "fixed": [1, (2, {"three": None})],
    }


def suggestions(given, count=40):
    """The hyper-parameters of trials, as workers receive them."""
    space, search = Space(given), Search(given, algo="random", seed=1)
    return [decode(space.encode(search.ask().params), space.objects) for _ in range(count)]


@pytest.mark.parametrize(
    ("distribution", "values"),
    [
        (integer(-1, 2), {-1, 0, 1, 2}),
        (integer(0, 12, step=5), {0, 5, 10}),
        (integer(1, 3, log=True), {1, 2, 3}),
        (uniform(0, 1, step=0.4), {0.0, 0.4, 0.8}),
        (uniform(0, 1, step=1 / 3), {0.0, 1 / 3, 2 / 3, 1.0}),
        (uniform(0, 0.7, step=0.1), {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7}),
        (choice("x", None, 7), {"x", None, 7}),
    ],
)
def test_all_values_occur_and_the_bounds_are_as_likely_as_the_others(distribution, values):
    drawn = [params["a"] for params in suggestions({"a": distribution}, 300)]
    assert set(drawn) == values
    assert {type(value) for value in drawn} == {type(value) for value in values}
    if not getattr(distribution, "log", False):
        assert min(drawn.count(value) for value in values) > 0.6 * 300 / len(values)


@pytest.mark.parametrize(
    ("distribution", "low", "middle", "high"),
    [
        (uniform(-1, 1), -1, 0, 1),
        (loguniform(1e-4, 1), 1e-4, 1e-2, 1),
        (integer(1, 1000, log=True), 1, 32, 1000),
        (normal(100, 1), 90, 100, 110),
    ],
)
def test_half_of_the_values_are_on_each_side_of_the_middle(distribution, low, middle, high):
    values = [params["a"] for params in suggestions({"a": distribution}, 200)]
    assert low <= min(values) < max(values) <= high
    assert 0.4 < np.mean(np.array(values) < middle) < 0.6
    assert {type(value) for value in values} <= {int, float}


def test_labels_are_paths_and_name_the_option_where_a_path_is_shared():
    assert list(Space(nested()).parameters) == [
        "optimizer",
        "optimizer.lr (sgd)",
        "optimizer.momentum",
        "optimizer.lr (adam)",
        "layers.0",
        "layers.1.0",
        "dropout",
        "dropout (uniform)",
    ]
    assert list(Space(choice({"a": uniform(0, 1)}, {"b": 2})).parameters) == ["params", "a"]


def test_trials_get_the_structure_of_the_space_with_values_of_the_chosen_options():
    met = suggestions(nested(), 30)
    for params in met:
        sgd = params["optimizer"]["kind"] == "sgd"
        assert set(params["optimizer"]) == {"kind", "lr"} | ({"momentum"} if sgd else set())
        assert (1e-3 <= params["optimizer"]["lr"] <= 1) if sgd else (1e-5 <= params["optimizer"]["lr"] <= 1e-2)
        assert params["layers"][0] in (32, 64)
        assert isinstance(params["layers"], list)
        assert isinstance(params["layers"][1], tuple)
        assert params["fixed"] == [1, (2, {"three": None})]
    assert {params["dropout"] == 0.0 for params in met} == {True, False}


def test_choices_of_choices():
    space = {"a": choice(choice({"kind": "x", "v": integer(0, 1)}, {"kind": "y", "v": integer(2, 3)}), {"v": integer(4, 5)})}
    assert set(Space(space).parameters) == {"a", "a (choice)", "a.v (choice, x)", "a.v (choice, y)", "a.v ({v=integer})"}
    assert {params["a"]["v"] for params in suggestions(space, 60)} == {0, 1, 2, 3, 4, 5}


def test_options_that_look_alike_are_named_by_their_index():
    space = {"a": choice({"v": normal(0, 1)}, {"v": normal(2, 3)}, {"kind": "b", "v": uniform(4, 5)})}
    assert set(Space(space).parameters) == {"a", "a.v ({v=normal} #0)", "a.v ({v=normal} #1)", "a.v ({kind=b, v=uniform})"}


def test_named_tuples_without_distributions_are_kept():
    for params in suggestions({"a": choice(Pair(1, 2), 3), "b": uniform(0, 1)}, 5):
        assert params["a"] in (Pair(1, 2), 3)
        assert type(params["a"]) in (Pair, int)


@given(
    st.floats(-100, 100),
    st.floats(0.01, 100),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    st.floats(1e-6, 1 - 1e-6),
)
def test_a_value_is_found_again_at_its_quantile(first, width, is_normal, is_log, step, quantile):
    first, width = (first / 20, width / 20) if is_log else (first, width)
    distribution = Quantile(first, width if is_normal else first + width, is_normal, is_log, step)
    value = distribution.value(quantile)
    if step:
        assert value / step == pytest.approx(round(value / step))
    else:
        assert distribution.quantile(value) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choice(), r"choice\(\) has no options: give each as an argument, such as choice\(32, 64\)"),
        (
            lambda: choice([32, 64]),
            r"single option, which is of type list: give each .*choice\(\*options\)",
        ),
        (lambda: choice(np.array([32, 64])), "single option, which is of type ndarray"),
        (lambda: integer(1, 2.5), "integer: high=2.5 is not a whole number; for fractions use uniform"),
        (lambda: integer(4, 4), r"integer\(4, 4\): low must be smaller than high; write a value that is not searched"),
        (lambda: integer(1, 4, step=0), r"integer\(1, 4, step=0\): expected a positive step of at most high - low = 3"),
        (lambda: integer(0, 4, log=True), "integer: low=0 must be positive, since the logarithm"),
        (lambda: integer(1, 4, log="yes"), "log='yes': expected True or False"),
        (lambda: integer(1, 8, step=2, log=True), "step=2 cannot be combined with log=True"),
        (lambda: loguniform(-7, -2), r"loguniform: low=-7.0 must be positive.*unlike in hyperopt"),
        (lambda: normal(0, 0), "normal: stddev=0.0: expected a positive number"),
        (lambda: normal("a", 1), "normal: mean='a' is not a finite number"),
        (lambda: uniform(0, float("inf")), "uniform: high=inf is not a finite number"),
        (lambda: uniform(0, 0.3, step=0.301), r"step=0.301\): expected a positive step of at most high - low = 0.3"),
        (
            lambda: Space({"a": Pair(1, uniform(0, 1))}),
            r"Pair\(\.\.\.\) has distributions, and trials would get a plain",
        ),
        (lambda: Space({"a.b": uniform(0, 1), "a": {"b": uniform(0, 1)}}), "have the name 'a.b': rename one of them"),
    ],
)
def test_errors_name_what_was_given_and_what_was_expected(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_unknown_arguments_are_rejected():
    with pytest.raises(UnknownArgumentError, match="integer takes no argument 'base'"):
        integer(1, 4, base=2)
    with pytest.raises(UnknownArgumentError, match="uniform takes 2 arguments by position"):
        uniform(0, 1, 0.1)
