"""The structure of search spaces: encoding, digests, constants, and the names and texts for display."""

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
from sparkkeras.hyperopt import choice, normal, uniform
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


THING, ARRAY = Optimizer(0.1), np.arange(3)


def nested():
    return {
        "lr": hp.loguniform("lr", -9, -2),
        "units": hp.choice("units", [32, 64, 128]),
        "optimizer": hp.choice(
            "optimizer",
            [{"kind": "sgd", "momentum": hp.uniform("momentum", 0.5, 1)}, {"kind": "adam", "deep": [hp.randint("n", 3)]}],
        ),
        "fixed": (1, "two", None, 3.0, True),
    }


# Encoding


def test_each_object_is_sent_once_and_referred_to_by_index():
    space = Space({"a": hp.choice("a", [THING, one_way]), "b": choice(one_way, another_way, 3), "c": THING})
    assert len(space.objects) == 3
    assert {id(each) for each in space.objects} == {id(THING), id(one_way), id(another_way)}
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


@pytest.mark.parametrize(
    "value",
    [MappingProxyType({"a": 1}), Settings(a=1), Pair(1, 2), Kind.SGD, {"x"}, THING],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_cannot_preserve_are_encoded_as_objects(value):
    """JSON would convert it to a plain type."""
    encoded = encode({"a": [value, 1]}, [THING, value])
    assert encoded == {"dict": [["a", {"list": [{"object": 0 if value is THING else 1}, 1]}]]}
    assert decode(json.loads(json.dumps(encoded)), [THING, value])["a"][0] is value
    with pytest.raises(ConfigurationError, match="is computed within the space"):
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
    spaces = [
        {"a": uniform(0, 1)},
        {"a": uniform(0, 2)},
        {"a": uniform(0, 1, step=0.5)},
        {"a": hp.uniform("b", 0, 1)},
        {"b": hp.uniform("a", 0, 1)},
        {"a": choice(1, 2)},
        {"a": choice(2, 1)},
        {"a": choice("1", 2)},
        {"a": hp.pchoice("a", [(0.4, 1), (0.6, 2)])},
        {"a": choice(one_way, 2)},
        {"a": choice(another_way, 2)},
        {"a": choice({"x", "y"}, 2)},
        {"a": choice({"x", "z"}, 2)},
        {"a": choice({"x": "y"}, 2)},
        {"a": uniform(0, 1), "c": 1},
    ]
    assert len({Space(each).digest for each in spaces}) == len(spaces)


# Constants, and spaces that are rejected


@pytest.mark.parametrize("space", [{}, {"units": [32, 64]}, "units"], ids=repr)
def test_spaces_without_hyper_parameters_are_rejected(space):
    with pytest.raises(ConfigurationError, match="has no hyper-parameter to choose"):
        Space(space)


@pytest.mark.parametrize(
    ("space", "name"),
    [
        ({"units": [32, 64], "lr": uniform(0, 1)}, "units"),
        ({"optimizer": {"kind": ["sgd", "adam"]}, "lr": uniform(0, 1)}, "optimizer.kind"),
        ({"units": list(range(20)), "lr": uniform(0, 1)}, "units"),
    ],
)
def test_a_list_that_is_perhaps_meant_as_a_choice_gives_a_warning(space, name):
    with pytest.warns(
        UserWarning, match=rf"'{name}' is the list .* write choice\((32, 64|'sgd', 'adam'|\*items)\)"
    ) as caught:
        Space(space)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "constant", [(32, 64), [32], [uniform(0, 1), 3], choice([32, 64], [64]), choice({"units": [32, 64]}, None), [np.ones(2)]]
)
def test_other_constants_give_no_warning(constant):
    Space({"constant": constant, "lr": uniform(0, 1)})


# Display


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
    adam = {"optimizer": "adam", "optimizer.lr (adam)": 1e-9, "u": 0.5}
    assert describe(space.parameters, Trial(0, {}, chosen=adam)) == ("optimizer=adam optimizer.lr (adam)=1e-9 u=(1, 2)")
    assert shown({}, Trial(0, {"x": 4}, chosen={"x": 2})) == {"x": 4}  # of a trial that defined it in an earlier search


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["relu", None, True, 0.001, 1 / 3], ("relu", "None", "True", "0.001", "0.3333")),
        ([one_way, dict, THING, Kind.SGD], ("one_way", "dict", "Optimizer", "SGD")),
        ([(1, 2), [3], [], ""], ("(1, 2)", "(3)", "()", "''")),
        ([1, "1", Optimizer(1), Optimizer(2)], ("1 #0", "1 #1", "Optimizer #2", "Optimizer #3")),
        ([{"kind": "sgd", "m": 0.5}, {"m": 0.1}], ("sgd", "{m=0.1}")),
        ([{"act": "relu", "units": 8}, {"act": "relu", "units": 16}], ("{act=relu, units=8}", "{act=relu, units=16}")),
    ],
    ids=range(6),
)
def test_options_have_unique_names(options, names):
    assert Space({"a": choice(*options)}).parameters["a"].options == names


def test_options_of_expressions_have_the_names_of_their_labels():
    hyper = Space({"a": hp.choice("a", [hp.uniform("x", 0, 1), hp.choice("y", [1, 2]), [64, hp.uniform("z", 0, 1)]])})
    assert hyper.parameters["a"].options == ("x", "y", "(64, z)")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (1e-9, "1e-9"),
        (2e7, "2e7"),
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
