"""Custom code: found in a model, and sent to workers that cannot import it."""

import functools
import importlib
import json
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
    check_same_code,
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


@pytest.mark.parametrize(
    "value", [tripled, functools.partial(tripled), lambda x: x * FACTOR], ids=["function", "partial", "lambda"]
)
def test_load_inverts_dump(value):
    packed = ByValue.dump(value, "it")
    assert packed.load()(2) == 6
    assert packed.load() is packed.load()
    assert packed.fresh() is not packed.load()


def test_the_same_value_has_the_same_payload():
    assert ByValue.dump(tripled, "it") == ByValue.dump(tripled, "it")
    assert ByValue.dump(scaled_loss(2), "it") != ByValue.dump(scaled_loss(3), "it")


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
    with pytest.raises(CustomObjectError) as caught:
        ByValue.dump(value, "callbacks")
    message = str(caught.value)
    assert message.startswith(f"callbacks cannot be sent to the workers, since pickling {culprit}")
    assert "TypeError: cannot pickle '_thread.lock' object" in message
    assert "inside the function that uses them" in message
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
    try:
        ByValue.dump(beside.scaled, "it")
        assert "beside_the_script" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(beside)


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
    two, three = scaled_loss(2), scaled_loss(3)
    two.__name__, three.__name__ = "two", "three"
    for model, expected in (
        (network(), {}),
        (network(soft, [Doubled()], loss=own_loss), {"soft": soft, "Doubled": Doubled, "own_loss": own_loss}),
        (network(loss=own_loss, metrics=[own_loss]), {"own_loss": own_loss}),
        (network(registered), {"tests>registered": registered}),
        (network(loss=two, metrics=[three]), {"two": two, "three": three}),
    ):
        assert custom_objects_of(model) == expected


def test_other_code_raises_an_error_with_both_names():
    with pytest.raises(CustomObjectError, match=rf"^layers\[0\] \(its class\) is {__name__}.Doubled, .*Dense in its place"):
        check_same_code({"layers[0].__class__": Doubled}, {"layers[0].__class__": keras.layers.Dense})


# Custom code in files


def _class(name, module=__name__, registered=None):
    return {"module": module, "class_name": name, "config": {}, "registered_name": registered or name}


def _function(name, module="builtins"):
    return {"module": module, "class_name": "function", "config": name, "registered_name": "function"}


def test_already_imported_code_is_found():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation=soft), Doubled()])
    config = keras.saving.serialize_keras_object(model)
    assert already_loaded(config) == {"soft": soft, "Doubled": Doubled}


def test_code_of_the_script_is_found(monkeypatch):
    class Scripted(keras.layers.Layer):
        pass

    Scripted.__module__, Scripted.__qualname__ = "__main__", "Scripted"
    monkeypatch.setattr(sys.modules["__main__"], "Scripted", Scripted, raising=False)
    assert keras.saving.serialize_keras_object(Scripted())["module"] is None
    assert already_loaded(keras.saving.serialize_keras_object(Scripted())) == {"Scripted": Scripted}


@pytest.mark.parametrize(
    "config",
    [
        _function("system", "posix"),
        _function("mean_squared_error"),
        _class("Popen", "subprocess"),
        _class("Dense", "keras.layers"),
        _class("soft"),
        _function("Doubled"),
        _function("pytest"),
        _function("already_loaded"),  # imported here, and not defined
        _function("param", "pytest"),  # of an installed package
        _class("Missing"),
        _class("Doubled", "tests.not_there"),
        {"class_name": "function", "config": ["soft"], "registered_name": "soft", "module": __name__},
        {"class_name": "Doubled", "config": {}, "registered_name": "Doubled", "module": ["x"]},
        {"class_name": "Lambda", "config": {"function": _function("soft"), "arguments": {"path": "x"}}},
    ],
    ids=str,
)
def test_a_file_cannot_refer_to_other_code(config):
    assert already_loaded({"config": {"layers": [config]}}) == {}


def test_a_file_causes_no_import(tmp_path, monkeypatch):
    (tmp_path / "never_imported_by_a_file.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert already_loaded(_class("Own", "never_imported_by_a_file")) == {}
    assert "never_imported_by_a_file" not in sys.modules


def test_ambiguous_names_are_left_to_the_user(monkeypatch):
    other = types.ModuleType("tests.other_code")
    other.__file__ = __file__
    other.Doubled = type("Doubled", (keras.layers.Layer,), {"__module__": other.__name__})
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert already_loaded([_class("Doubled", other.__name__)]) == {"Doubled": other.Doubled}
    assert already_loaded([_class("Doubled"), _class("Doubled", other.__name__)]) == {}
