"""Custom code: found in a model, and sent to workers that cannot import it."""

import functools
import importlib
import json
import re
import sys
import threading
import types

import keras
import numpy as np
import pytest

import sparkkeras
from sparkkeras.errors import CustomObjectError
from sparkkeras.modeling.archive import custom_objects_of
from sparkkeras.modeling.custom_code import (
    ByValue,
    already_loaded,
    is_own,
)

FACTOR = 3


def tripled(x):
    return x * FACTOR


def soft(x):
    return keras.ops.tanh(x)


def own_loss(y, prediction):
    return keras.ops.mean(keras.ops.square(y - prediction), axis=-1)


def scaled_loss(factor):
    def loss(y, prediction):
        return factor * own_loss(y, prediction)

    return loss


@keras.saving.register_keras_serializable(package="tests")
def registered(x):
    return keras.ops.tanh(x)


class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


def network(activation="relu", extra=(), **compiled):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation=activation), *extra])
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | compiled))
    return model


# By value


@pytest.mark.parametrize("value", [tripled, functools.partial(tripled), lambda x: x * FACTOR])
def test_load_inverts_dump(value):
    packed = ByValue.dump(value, "it")
    assert packed.load()(2) == 6
    assert packed.load() is packed.load()
    assert packed.fresh() is not packed.load()
    assert packed == ByValue.dump(value, "it")
    assert packed != ByValue.dump(scaled_loss(3), "it")


LOCK = threading.Lock()


def locked(x):
    with LOCK:
        return x


@pytest.mark.parametrize(
    ("value", "culprit"),
    [
        ({"fine": tripled, "locked": locked, "also_fine": soft}, "locked"),
        ([tripled, locked], "callbacks[1]"),
        (locked, "it"),
    ],
)
def test_an_error_names_the_part_that_cannot_be_pickled(value, culprit):
    with pytest.raises(CustomObjectError, match=f"pickling {re.escape(culprit)}.*_thread.lock") as caught:
        ByValue.dump(value, "callbacks")
    assert isinstance(caught.value.__cause__, TypeError)


# A local module


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A local module."""
    (tmp_path / "beside_the_script.py").write_text("def scaled(x):\n    return 10 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("beside_the_script")
    sys.modules.pop("beside_the_script", None)


def test_the_registry_of_modules_is_restored(beside):
    from pyspark import cloudpickle

    before = set(cloudpickle.list_registry_pickle_by_value())
    ByValue.dump(beside.scaled, "it")
    with pytest.raises(CustomObjectError):
        ByValue.dump(locked, "it")
    assert set(cloudpickle.list_registry_pickle_by_value()) == before
    cloudpickle.register_pickle_by_value(beside)
    ByValue.dump(beside.scaled, "it")
    cloudpickle.unregister_pickle_by_value(beside)  # fails if it is not registered


def test_a_module_may_be_imported_under_several_names(beside, monkeypatch):
    monkeypatch.setitem(sys.modules, "vendored.beside_the_script", beside)
    packed = ByValue.dump(beside.scaled, "it")
    monkeypatch.delitem(sys.modules, "beside_the_script")
    ByValue.dump(beside.scaled, "it")  # now only under another one
    assert packed.load().__name__ == "scaled"


def test_is_own_distinguishes_local_from_installed_modules(beside):
    assert is_own(beside)
    assert is_own(sys.modules[__name__])
    assert not any(map(is_own, (np, keras, sparkkeras, json, sys, sys.modules["__main__"], "no module")))


# Code of a model


def test_only_custom_code_is_sent():
    two, other = scaled_loss(2), scaled_loss(3)
    two.__name__ = "two"
    for model, expected in (
        (network(), {}),
        (network(soft, [Doubled()], loss=own_loss), {"soft": soft, "Doubled": Doubled, "own_loss": own_loss}),
        (network(loss=own_loss, metrics=[own_loss]), {"own_loss": own_loss}),
        (network(registered), {"tests>registered": registered}),
        (network(loss=two, metrics=[other]), {"two": two, "loss": other}),
    ):
        assert custom_objects_of(model) == expected


# Custom code in files


def _class(name, module=__name__):
    return {"module": module, "class_name": name, "config": {}, "registered_name": name}


def _function(name, module="builtins"):
    return {"module": module, "class_name": "function", "config": name, "registered_name": "function"}


def test_already_imported_code_is_found(monkeypatch):
    class Scripted(Doubled):
        pass

    Scripted.__module__, Scripted.__qualname__ = "__main__", "Scripted"
    monkeypatch.setattr(sys.modules["__main__"], "Scripted", Scripted, raising=False)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation=soft), Doubled(), Scripted()])
    config = keras.saving.serialize_keras_object(model)
    assert already_loaded(config) == {"soft": soft, "Doubled": Doubled, "Scripted": Scripted}


@pytest.mark.parametrize(
    "config",
    [
        _function("system", "posix"),
        _class("Popen", "subprocess"),
        _class("soft"),
        _function("Doubled"),
        _function("pytest"),
        _function("already_loaded"),  # imported here, and not defined
        _class("Missing"),
        _class("Own", "never_imported_by_a_file"),
        _function(["soft"], __name__),
        _class("Doubled", ["x"]),
        {"class_name": "Lambda", "config": {"function": _function("soft"), "arguments": {"path": "x"}}},
    ],
    ids=str,
)
def test_a_file_cannot_refer_to_other_code(config, tmp_path, monkeypatch):
    (tmp_path / "never_imported_by_a_file.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert already_loaded({"config": {"layers": [config]}}) == {}
    assert "never_imported_by_a_file" not in sys.modules


def test_ambiguous_names_are_left_to_the_user(monkeypatch):
    other = types.ModuleType("tests.other_code")
    other.__file__ = __file__
    other.Doubled = type("Doubled", (keras.layers.Layer,), {"__module__": other.__name__})
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert already_loaded([_class("Doubled", other.__name__)]) == {"Doubled": other.Doubled}
    assert already_loaded([_class("Doubled"), _class("Doubled", other.__name__)]) == {}
