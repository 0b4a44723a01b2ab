"""Display names and values of hyper-parameters, the same in progress lines, tables and plots."""

import functools
from enum import Enum

import numpy as np
import pytest
from hyperopt import hp, rand
from hyperopt.pyll import scope

from sparkkeras.hyperopt import choice, uniform
from sparkkeras.hyperopt.parameters import as_text, describe_params, format_number, make_distinct, parameters_of, shorten
from sparkkeras.hyperopt.space import Space


def a_function():
    pass


class Thing:
    pass


class Kind(Enum):
    SGD = 1


def nested():
    """A space whose labels differ from its keys, and whose options share a key."""
    return {
        "rate": hp.loguniform("lr", -7, -2),
        "optimizer": hp.choice(
            "opt",
            [
                {"kind": "sgd", "lr": hp.uniform("lr_sgd", 0, 1), "momentum": hp.quniform("m", 0, 100, 10)},
                {"kind": "adam", "lr": hp.uniform("lr_adam", 0, 1)},
            ],
        ),
        "layers": [{"units": hp.choice("u0", [32, 64])}, {"units": hp.choice("u1", [None, True, (1, 2)])}],
    }


NAMES = {
    "lr": "rate",
    "opt": "optimizer",
    "lr_sgd": "optimizer.lr (lr_sgd)",
    "lr_adam": "optimizer.lr (lr_adam)",
    "m": "optimizer.momentum",
    "u0": "layers.0.units",
    "u1": "layers.1.units",
}


# Names


def test_names_are_paths_in_the_hyper_parameters():
    assert {each.label: each.name for each in Space(nested()).parameters} == NAMES
    labels = [each.label for each in parameters_of(nested())]
    assert labels.index("opt") + 1 == labels.index("lr_sgd")  # parameters of options follow their choice


@pytest.mark.parametrize(
    ("space", "names"),
    [
        (hp.uniform("x", 0, 1), ["x"]),
        ([hp.uniform("x", 0, 1), hp.uniform("y", 0, 1)], ["0", "1"]),
        (hp.choice("m", [{"k": hp.uniform("x", 0, 1)}, {"d": 1}]), ["m", "k"]),
        ({1: hp.uniform("x", 0, 1), 2: {"a": hp.uniform("y", 0, 1)}}, ["1", "2.a"]),
        ({"a": scope.int(hp.quniform("x", 1, 8, 1)) + 1}, ["a"]),
        ({"a": hp.uniform("x", 0, 1) * hp.uniform("y", 0, 1)}, ["a (x)", "a (y)"]),
        ({"a": hp.choice("c", [hp.uniform("x", 0, 1), hp.choice("y", [1, 2])])}, ["a", "a (x)", "a (y)"]),
    ],
    ids=range(7),
)
def test_names_in_spaces_of_every_structure(space, names):
    assert [each.name for each in parameters_of(space)] == names


def test_a_parameter_that_occurs_twice_has_one_name():
    shared = hp.uniform("x", 0, 1)
    assert [each.name for each in parameters_of({"a": shared, "b": {"c": shared}})] == ["a"]


def test_names_of_distributions_are_their_labels():
    """Options are named by their first string as it was written, although hyperopt sorts the keys of a dict."""
    space = Space(
        {
            "optimizer": choice(
                {"kind": "sgd", "decay": "cosine", "lr": uniform(0, 1)},
                {"kind": "adam", "decay": "none", "lr": uniform(0, 1)},
            ),
            "rate": choice(0.5, hp.uniform("rate (x)", 0, 1)),
        }
    )
    assert {each.label: each.name for each in space.parameters} == {
        "optimizer": "optimizer",
        "optimizer.lr (sgd)": "optimizer.lr (sgd)",
        "optimizer.lr (adam)": "optimizer.lr (adam)",
        "rate": "rate",
        "rate (x)": "rate (rate (x))",
    }
    assert {each.label: each.options for each in space.parameters if each.options} == {
        "optimizer": ("sgd", "adam"),
        "rate": ("0.5", "rate (x)"),
    }


# Values


def test_describe_params_returns_one_line():
    space = Space(nested())
    sgd = {"lr": 0.00123456, "opt": 0, "lr_sgd": 0.5, "m": 30.0, "u0": 1, "u1": 2}
    assert describe_params(space.parameters, sgd) == (
        "layers.0.units=64 layers.1.units=(1, 2) optimizer=sgd optimizer.lr (lr_sgd)=0.5 optimizer.momentum=30 rate=0.001235"
    )
    adam = {"lr": 0.1, "opt": 1, "lr_adam": 1e-9, "u0": 0, "u1": 0}
    assert describe_params(space.parameters, adam) == (
        "layers.0.units=32 layers.1.units=None optimizer=adam optimizer.lr (lr_adam)=1e-9 rate=0.1"
    )


def test_values_are_the_ones_that_the_trial_receives():
    space = Space(
        {
            "a": scope.int(hp.quniform("a", 1, 8, 1)) + 1,
            "b": 2 ** hp.randint("b", 8),
            "c": scope.getitem(["x", "y"], hp.randint("c", 2)),
            "d": hp.choice("d", ["relu", a_function]),
        }
    )
    for seed in range(5):
        chosen = space.suggest(rand.suggest, 0, (), seed, 1.0)
        params = space.params(chosen)
        assert {each.name: each.text(chosen) for each in space.parameters} == {
            name: as_text(value) for name, value in params.items()
        }


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["relu", "tanh", None, True, 0.001, 1 / 3], ("relu", "tanh", "None", "True", "0.001", "0.3333")),
        ([a_function, dict, Thing(), Kind.SGD], ("a_function", "dict", "Thing", "SGD")),
        ([(1, 2), [3], [], {}, ""], ("(1, 2)", "(3)", "()", "{}", "''")),
        ([1, "1", Thing(), Thing()], ("1 #0", "1 #1", "Thing #2", "Thing #3")),
        ([{"kind": "sgd", "m": 0.5}, {"m": 0.1}], ("sgd", "{m=0.1}")),
        ([{"act": "relu", "units": 8}, {"act": "relu", "units": 16}], ("{act=relu, units=8}", "{act=relu, units=16}")),
        ([{"k": hp.uniform("x", 0, 1)}, {"k": hp.uniform("y", 0, 1), "deep": True}], ("{k}", "{deep=True}")),
        ([hp.uniform("x", 0, 1), hp.choice("y", [1, 2]), [64, hp.uniform("z", 0, 1)]], ("x", "y", "(64, z)")),
    ],
    ids=range(8),
)
def test_names_of_options(options, names):
    choice, *_ = parameters_of({"a": hp.choice("a", options)})
    assert choice.options == names
    assert [choice.text({"a": index}) for index in range(len(options))] == list(names)
    weighted, *_ = parameters_of({"a": hp.pchoice("a", [(1 / len(options), option) for option in options])})
    assert weighted.options == names


# Text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (12345.0, "12345"),
        (1e-9, "1e-9"),
        (2e7, "2e7"),
        (np.float32(0.5), "0.5"),
        (float("inf"), "inf"),
        ("two\nlines", "two lines"),
        ({"a": (1, "x"), "f": a_function}, "{a=(1, x), f=a_function}"),
        (functools.partial(a_function), "partial"),
    ],
)
def test_values_as_text(value, text):
    assert as_text(value) == text


def test_long_texts_are_abbreviated_in_the_middle():
    assert shorten("x" * 10, 10) == "x" * 10
    assert shorten("abcdefghijk", 6) == "abc…jk"
    (choice,) = parameters_of({"a": hp.choice("a", ["x" * 40])})
    assert describe_params([choice], {"a": 0}) == f"a={'x' * 12}…{'x' * 11}"


def test_distinct_texts_stay_distinct():
    assert make_distinct(["a", "b", "a"]) == ("a #0", "b", "a #2")
    assert make_distinct(["resnet_frozen_weights", "resnet_tuned_weights", "none"], 10) == ("…frozen…", "…tuned…", "none")
    assert make_distinct(["a" * 20, "a" * 20], 10) == ("aaaaa…aaaa #0", "aaaaa…aaaa #1")


def test_numbers_are_formatted_briefly():
    assert [format_number(value) for value in (1e-5, 0.003, 200.0, 12345.6)] == ["1e-5", "0.003", "200", "1.235e4"]
