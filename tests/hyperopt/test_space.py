"""Search spaces: the values that trials get, encoding, digests, what is rejected, and the texts for display."""

import enum
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
from hyperopt import hp
from hypothesis import given
from hypothesis import strategies as st

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt import Search, choice, integer, loguniform, normal, uniform
from sparkkeras.hyperopt.space import Space, describe, shown
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.hyperopt.values import as_text, decode, encode


def one_way(x):
    return x


def another_way(x):
    return -x


class Optimizer:
    def __init__(self, rate):
        self.rate = rate


class Kind(enum.IntEnum):
    SGD = 1
    ADAM = 2


class Pair(NamedTuple):
    one: int
    two: int


THING, ARRAY, PAIR = Optimizer(0.1), np.arange(3), Pair(1, 2)


def nested():
    return {
        "optimizer": choice(
            {"kind": "sgd", "lr": loguniform(1e-3, 1), "momentum": uniform(0.5, 1)},
            {"kind": "adam", "lr": hp.loguniform("lr", -9, -2)},
        ),
        "layers": [choice(32, 64), (integer(1, 3), "relu")],
        "dropout": choice(0.0, uniform(0.1, 0.5)),
        "fixed": (1, "two", [None, 3.0, True]),
    }


def suggestions(given, count=40):
    """The hyper-parameters of trials, as workers receive them."""
    space, search = Space(given), Search(given, algo="random", seed=1)
    return [decode(space.encode(search.ask().params), space.objects) for _ in range(count)]


# Values


def test_all_values_occur_and_are_spread_evenly():
    sets = [
        (integer(-1, 2), {-1, 0, 1, 2}),
        (integer(0, 12, step=5), {0, 5, 10}),
        (integer(1, 3, log=True), {1, 2, 3}),
        (uniform(0, 1, step=1 / 3), {0.0, 1 / 3, 2 / 3, 1.0}),
        (uniform(0, 0.35, step=0.1), {0.0, 0.1, 0.2, 0.3}),
        (choice("x", None, 7), {"x", None, 7}),
    ]
    ranges = [
        (uniform(-1, 1), -1, 0, 1),
        (loguniform(1e-4, 1), 1e-4, 1e-2, 1),
        (integer(1, 1000, log=True), 1, 32, 1000),
        (normal(100, 1), 90, 100, 110),
    ]
    drawn = list(zip(*suggestions([distribution for distribution, *_ in sets + ranges], 300), strict=True))
    for (distribution, values), found in zip(sets, drawn, strict=False):
        assert set(found) == values
        assert {type(value) for value in found} == {type(value) for value in values}
        if not getattr(distribution, "log", False):
            assert min(found.count(value) for value in values) > 0.6 * 300 / len(values)
    for (_, low, middle, high), found in zip(ranges, drawn[len(sets) :], strict=True):
        assert low <= min(found) < max(found) <= high
        assert 0.4 < np.mean(np.array(found) < middle) < 0.6
        assert {type(value) for value in found} <= {int, float}


def test_trials_get_the_structure_of_the_space_with_values_of_the_chosen_options():
    met = suggestions(nested(), 30)
    for params in met:
        sgd = params["optimizer"]["kind"] == "sgd"
        assert set(params["optimizer"]) == {"kind", "lr"} | ({"momentum"} if sgd else set())
        assert params["optimizer"]["lr"] >= 1e-3 or not sgd
        assert params["layers"][0] in (32, 64)
        assert isinstance(params["layers"], list)
        assert isinstance(params["layers"][1], tuple)
        assert params["fixed"] == (1, "two", [None, 3.0, True])
    assert {params["dropout"] == 0.0 for params in met} == {True, False}


def test_choices_of_choices():
    space = {"a": choice(choice({"v": integer(0, 1)}, {"v": integer(2, 3)}), {"v": integer(4, 5)}), "b": choice(PAIR, 3)}
    met = suggestions(space, 60)
    assert {params["a"]["v"] for params in met} == {0, 1, 2, 3, 4, 5}
    assert {type(params["b"]) for params in met} == {Pair, int}


# Encoding


def test_each_object_is_sent_once_and_referred_to_by_index():
    space = Space({"a": hp.choice("a", [THING, one_way]), "b": choice(one_way, another_way, 3), "c": THING})
    assert {id(each) for each in space.objects} == {id(THING), id(one_way), id(another_way)}
    assert len(space.objects) == 3
    encoded = space.encode({"a": THING, "c": one_way})
    elsewhere = [Optimizer(0.5) if each is THING else each for each in space.objects]
    assert decode(encoded, elsewhere)["a"].rate == 0.5
    assert Space(nested()).objects == []


CONSTANTS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([THING, Kind.SGD, one_way])
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())


@given(
    st.recursive(
        CONSTANTS,
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
        max_leaves=12,
    )
)
def test_structures_are_restored_exactly(value):
    objects = [THING, Kind.SGD, one_way]
    assert repr(decode(json.loads(json.dumps(encode(value, objects))), objects)) == repr(value)


class Settings(dict):
    """A subclass of dict."""


@pytest.mark.parametrize("value", [MappingProxyType({"a": 1}), Settings(a=1), Pair(1, 2), Kind.SGD, {"x"}], ids=str)
def test_values_that_json_cannot_preserve_are_encoded_as_objects(value):
    """JSON would convert it to a plain type."""
    encoded = json.loads(json.dumps(encode({"a": [value, 1]}, [THING, value])))
    assert decode(encoded, [THING, value])["a"][0] is value
    with pytest.raises(ConfigurationError, match="computed within the space"):
        encode({"a": value}, [])


# Digests


DIGEST = """
import sys
sys.path.insert(0, {folder!r})
import test_space
from sparkkeras.hyperopt.space import Space
print(Space(test_space.nested()).digest, Space(test_space.objects_of_all_kinds()).digest)
"""


def objects_of_all_kinds():
    names = {f"name {number}" for number in range(20)}  # their order differs between processes
    return {
        "a": hp.choice("a", [THING, one_way, Optimizer, {"x": ARRAY}, lambda x: x, names, frozenset(names), {1, "a"}]),
        "b": hp.pchoice("b", [(1.0, Kind.ADAM)]),
    }


@pytest.mark.programs
def test_a_digest_is_the_same_in_another_process():
    code = DIGEST.format(folder=str(Path(__file__).parent))
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "KERAS_BACKEND": "jax"},  # the backend that loads fastest
        )
        for seed in ("1", "2")
    ]
    ((digest, _),) = {tuple(other.communicate()[0].split()) for other in others}
    assert digest == Space(nested()).digest


def test_different_spaces_have_different_digests():
    nodes = [
        uniform(0, 1),
        uniform(0, 2),
        uniform(0, 1, step=0.5),
        hp.uniform("b", 0, 1),
        choice(1, 2),
        choice(2, 1),
        choice("1", 2),
        hp.pchoice("a", [(0.4, 1), (0.6, 2)]),
        choice(one_way, 2),
        choice(another_way, 2),
        choice({"x", "y"}, 2),
        choice({"x", "z"}, 2),
        choice({"x": "y"}, 2),
    ]
    spaces = [*({"a": node} for node in nodes), {"b": hp.uniform("a", 0, 1)}, {"a": uniform(0, 1), "c": 1}]
    assert len({Space(each).digest for each in spaces}) == len(spaces)


# Constants, and spaces that are rejected


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: choice(), "no options"),
        (lambda: choice(np.array([32, 64])), "type ndarray"),
        (lambda: integer(1, 2.5), "high=2.5"),
        (lambda: integer(4, 4), "low must be smaller"),
        (lambda: integer(1, 4, step=0), "positive step"),
        (lambda: integer(0, 4, log=True), "low=0 must be positive"),
        (lambda: integer(1, 4, log="yes"), "log='yes'"),
        (lambda: integer(1, 8, step=2, log=True), "cannot be combined"),
        (lambda: loguniform(-7, -2), "unlike in hyperopt"),
        (lambda: normal(0, 0), "stddev=0.0"),
        (lambda: normal("a", 1), "mean='a'"),
        (lambda: uniform(0, float("inf")), "high=inf"),
        (lambda: uniform(0, 0.3, step=0.301), "positive step"),
        (lambda: uniform(0, 1, 0.1), "2 arguments by position"),
        (lambda: Space({"a": Pair(1, uniform(0, 1))}), r"Pair\(\.\.\.\)"),
        (lambda: Space({"a.b": uniform(0, 1), "a": {"b": uniform(0, 1)}}), "the name 'a.b'"),
        (lambda: Space({"units": [32, 64]}), "no hyper-parameter"),
    ],
)
def test_errors_name_what_was_given_and_what_was_expected(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize(
    ("space", "name", "shown"),
    [
        ({"optimizer": {"kind": ["sgd", "adam"]}, "lr": uniform(0, 1)}, "optimizer.kind", "'sgd', 'adam'"),
        ({"units": list(range(20)), "lr": uniform(0, 1)}, "units", r"\*items"),
    ],
)
def test_a_list_that_is_perhaps_meant_as_a_choice_gives_a_warning(space, name, shown):
    with pytest.warns(UserWarning, match=rf"'{name}' .* choice\({shown}\)") as caught:
        Space(space)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("error")
def test_other_constants_give_no_warning():
    options = choice([32, 64], [64], {"units": [32, 64]})
    Space({"a": (32, 64), "b": [32], "c": [uniform(0, 1), 3], "d": options, "e": [np.ones(2)]})


# Display


@pytest.mark.parametrize(
    ("space", "labels"),
    [
        (nested(), "optimizer, optimizer.lr, optimizer.momentum, lr, layers.0, layers.1.0, dropout, dropout (uniform)"),
        (choice({"a": uniform(0, 1)}, {"b": 2}), "params, a"),
        (
            {
                "a": choice(
                    choice({"kind": "x", "v": uniform(0, 1)}, {"kind": "y", "v": uniform(0, 1)}), {"v": integer(4, 5)}
                )
            },
            "a, a (choice), a.v (choice, x), a.v (choice, y), a.v ({v=integer})",
        ),
        (
            {"a": choice({"v": normal(0, 1)}, {"v": normal(2, 3)}, {"kind": "b", "v": uniform(4, 5)})},
            "a, a.v ({v=normal} #0), a.v ({v=normal} #1), a.v ({kind=b, v=uniform})",
        ),
    ],
    ids=range(4),
)
def test_labels_are_paths_and_name_the_option_where_a_path_is_shared(space, labels):
    assert ", ".join(Space(space).parameters) == labels


def test_hyper_parameters_are_described_in_one_line():
    space = Space(
        {
            "rate": hp.loguniform("lr", -7, -2),
            "optimizer": choice(
                {"kind": "sgd", "decay": "cosine", "lr": uniform(0, 1), "momentum": uniform(0, 100, step=10)},
                {"kind": "adam", "decay": "cosine", "lr": uniform(0, 1)},
            ),
            "units": hp.pchoice("u", [(0.5, None), (0.5, (1, 2))]),
            "scale": normal(0, 1),
        }
    )
    sgd = {"lr": 0.00123456, "optimizer": "sgd", "optimizer.lr (sgd)": 0.5, "optimizer.momentum": 3, "u": 0.7, "scale": 0.5}
    assert describe(space.parameters, Trial(0, {}, chosen=sgd)) == (
        "lr=0.001235 optimizer=sgd optimizer.lr (sgd)=0.5 optimizer.momentum=30 u=(1, 2) scale=0"
    )
    adam = {"optimizer": "adam", "optimizer.lr (adam)": 1e-9}
    assert describe(space.parameters, Trial(0, {}, chosen=adam)) == "optimizer=adam optimizer.lr (adam)=1e-9"
    assert shown({}, Trial(0, {"x": 4}, chosen={"x": 2})) == {"x": 4}  # of a trial that defined it in an earlier search


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (choice("relu", None, True, 1 / 3, (1, 2), [3], ""), ("relu", "None", "True", "0.3333", "(1, 2)", "(3)", "''")),
        (choice(one_way, dict, THING, Kind.SGD), ("one_way", "dict", "Optimizer", "SGD")),
        (choice(1, "1", Optimizer(1), Optimizer(2)), ("1 #0", "1 #1", "Optimizer #2", "Optimizer #3")),
        (choice({"kind": "sgd", "m": 0.5}, {"m": 0.1}), ("sgd", "{m=0.1}")),
        (choice({"act": "relu", "units": 8}, {"act": "relu", "units": 16}), ("{act=relu, units=8}", "{act=relu, units=16}")),
        (
            hp.choice("a", [hp.uniform("x", 0, 1), hp.choice("y", [1, 2]), [64, hp.uniform("z", 0, 1)]]),
            ("x", "y", "(64, z)"),
        ),
    ],
    ids=range(6),
)
def test_options_have_unique_names(node, names):
    assert Space({"a": node}).parameters["a"].options == names


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (1e-9, "1e-9"),
        (np.float32(0.5), "0.5"),
        (float("inf"), "inf"),
        ("two\nlines", "two lines"),
        ({"a": (1, "x"), "f": one_way}, "{a=(1, x), f=one_way}"),
        (functools.partial(one_way), "partial"),
    ],
)
def test_values_as_text(value, text):
    assert as_text(value) == text


def test_long_texts_are_abbreviated_in_the_middle():
    assert as_text("x" * 24, short=True) == "x" * 24
    assert as_text("a" * 20 + "b" * 20, short=True) == f"{'a' * 12}…{'b' * 11}"
