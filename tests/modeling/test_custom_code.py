"""Custom code: found in a model, and sent to workers that cannot import it."""

import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import keras
import numpy as np
import pytest

import sparkkeras
from sparkkeras.errors import CustomObjectError
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import (
    ByValue,
    already_loaded,
    check_same_code,
    code_of,
    custom_objects,
    is_builtin,
    is_own,
    lookup_names,
)
from sparkkeras.modeling.state import ModelState

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


class Counter(keras.metrics.Metric):
    def __init__(self, name="counter", **options):
        super().__init__(name=name, **options)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y, prediction, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "float32"))

    def result(self):
        return self.count


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


class Sums(keras.regularizers.Regularizer):
    def __call__(self, x):
        return keras.ops.sum(x)

    def get_config(self):
        return {}


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


def test_fresh_returns_a_new_object():
    packed = ByValue.dump([], "it")
    packed.fresh().append(1)
    assert packed.fresh() == []


LOCK = threading.Lock()


def locked(x):
    with LOCK:
        return x


@pytest.mark.parametrize(
    ("value", "culprit"),
    [
        ({"fine": tripled, "locked": locked, "also_fine": soft}, "locked"),
        ([tripled, locked], "callbacks[1]"),
        ((locked, tripled), "callbacks[0]"),
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

HELPER = """
SHIFT = 1

def shifted(x):
    return x + SHIFT
"""

BESIDE = """
import keras
import {helper}
from {helper} import shifted as renamed

SCALE = 10

def scaled(x):
    return {helper}.shifted(x) * SCALE

def twice(x):
    return renamed(renamed(x))

class Scaled(keras.layers.Layer):
    def __init__(self, factor, **options):
        super().__init__(**options)
        self.factor = factor

    def call(self, x):
        return scaled(x) * self.factor

    def get_config(self):
        return {{**super().get_config(), "factor": self.factor}}
"""

ELSEWHERE = """
import importlib.util, json, pickle, sys
from pathlib import Path

folder = Path(sys.argv[1])
assert importlib.util.find_spec("beside_the_script") is None
assert importlib.util.find_spec("helper_of_it") is None
functions = pickle.loads((folder / "functions").read_bytes()).load()
archive, state = pickle.loads((folder / "model").read_bytes())
model = archive.unpack()
state.put(model)
import numpy as np
print(json.dumps([
    functions["scaled"](4),
    functions["twice"](4),
    model.predict(np.ones((2, 3), "float32"), verbose=0).tolist(),
]))
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A local module, and another one that it imports."""
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "helper_of_it.py").write_text(HELPER)
    (folder / "beside_the_script.py").write_text(BESIDE.format(helper="helper_of_it"))
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("beside_the_script")
    for name in ("beside_the_script", "helper_of_it"):
        sys.modules.pop(name, None)


@pytest.mark.programs
def test_a_local_module_is_sent_to_a_process_that_lacks_it(beside, tmp_path):
    import pickle

    model = keras.Sequential([keras.Input((3,)), beside.Scaled(2.0), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    functions = ByValue.dump({"scaled": beside.scaled, "twice": beside.twice}, "the functions")
    (tmp_path / "functions").write_bytes(pickle.dumps(functions))
    (tmp_path / "model").write_bytes(pickle.dumps((ModelArchive.pack(model), ModelState.take(model))))
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    home = str(Path(sparkkeras.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "elsewhere.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": home},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    scaled, twice, predicted = json.loads(done.stdout.splitlines()[-1])
    assert (scaled, twice) == (50, 6)
    assert np.allclose(predicted, model.predict(np.ones((2, 3), np.float32), verbose=0), atol=1e-6)


def test_the_registry_of_modules_is_restored(beside):
    from pyspark import cloudpickle

    before = set(cloudpickle.list_registry_pickle_by_value())
    ByValue.dump(beside.scaled, "it")
    assert set(cloudpickle.list_registry_pickle_by_value()) == before
    assert "beside_the_script" not in before
    cloudpickle.register_pickle_by_value(beside)
    try:
        ByValue.dump(beside.scaled, "it")
        assert "beside_the_script" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(beside)
    with pytest.raises(CustomObjectError):
        ByValue.dump(locked, "it")
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


def test_a_module_may_be_imported_under_several_names(beside, monkeypatch):
    monkeypatch.setitem(sys.modules, "vendored.beside_the_script", beside)
    packed = ByValue.dump(beside.scaled, "it")
    monkeypatch.delitem(sys.modules, "beside_the_script")
    ByValue.dump(beside.scaled, "it")  # now only under another one
    assert packed.load().__name__ == "scaled"


def test_is_own_distinguishes_local_from_installed_modules(beside):
    assert is_own(beside)
    assert is_own(sys.modules[__name__])
    assert not any(is_own(module) for module in (np, keras, sparkkeras, json, os, sys, pytest, functools))
    assert not is_own(sys.modules["__main__"])
    assert not is_own("no module")


# Finding code in a model


def test_code_of_finds_all_code_of_a_model():
    code = code_of(
        network(
            activation=soft,
            extra=[Doubled(), keras.layers.Dense(2, kernel_regularizer=Sums())],
            loss=own_loss,
            metrics=[Counter()],
            optimizer=keras.optimizers.SGD(Halving()),
        )
    )
    found = [value for value in code.values() if not is_builtin(value)]
    assert set(found) == {soft, Doubled, Sums, own_loss, Counter, Halving}
    assert keras.layers.Dense in code.values()
    assert any(path.endswith("activation") and value is soft for path, value in code.items())


def test_code_in_dicts_lists_and_nested_models():
    inner = keras.Sequential([keras.Input((3,)), Doubled()], name="inner")
    inputs = keras.Input((3,))
    model = keras.Model(
        inputs, {"a": keras.layers.Dense(1, name="a")(inner(inputs)), "b": keras.layers.Dense(1, name="b")(inputs)}
    )
    model.compile(optimizer="sgd", loss={"a": own_loss, "b": "mse"}, metrics={"a": [Counter()], "b": ["mae"]})
    assert {Doubled, own_loss, Counter} <= set(code_of(model).values())


def test_cyclic_references_are_handled():
    loss = keras.losses.Huber()
    loss.also = [loss, {"again": loss}, soft]
    assert soft in code_of(network(loss=loss)).values()


def names_in(model):
    def strings(value):
        if isinstance(value, dict):
            return set().union(*map(strings, value.values()))
        if isinstance(value, list):
            return set().union(*map(strings, value))
        return {value} if isinstance(value, str) else set()

    return strings(keras.saving.serialize_keras_object(model))


def needed(model):
    return custom_objects(code_of(model), names_in(model))


def test_only_custom_code_is_sent():
    assert needed(network()) == {}
    assert needed(network(activation=soft, extra=[Doubled()], loss=own_loss)) == {
        "soft": soft,
        "Doubled": Doubled,
        "own_loss": own_loss,
    }


def test_one_function_in_two_places_is_accepted():
    assert needed(network(loss=own_loss, metrics=[own_loss])) == {"own_loss": own_loss}


def test_registered_code_has_its_registered_name():
    assert lookup_names(registered) == ["tests>registered", "registered"]
    assert needed(network(activation=registered)) == {"tests>registered": registered}


def test_two_functions_with_the_same_name_raise_an_error_with_both_places():
    with pytest.raises(CustomObjectError) as caught:
        needed(network(loss=scaled_loss(2), metrics=[scaled_loss(3)]))
    message = str(caught.value)
    assert message.startswith("two different objects of the model have the name 'loss'")
    assert "compiled loss" in message
    assert "metrics[0]" in message
    assert "__name__" in message


def test_two_functions_with_different_names_are_accepted():
    two, three = scaled_loss(2), scaled_loss(3)
    two.__name__, three.__name__ = "two", "three"
    assert needed(network(loss=two, metrics=[three])) == {"two": two, "three": three}


@pytest.mark.parametrize(
    ("compiled", "place"),
    [
        ({"loss": lambda y, prediction: own_loss(y, prediction)}, "compiled loss"),
        ({"metrics": [lambda y, prediction: own_loss(y, prediction)]}, "compiled metrics"),
    ],
)
def test_a_lambda_in_the_compile_arguments_raises_an_error(compiled, place):
    with pytest.raises(CustomObjectError) as caught:
        custom_objects(code_of(network(**compiled)), set())
    assert str(caught.value).startswith(place)
    assert "is a lambda" in str(caught.value)
    assert "Define it with def" in str(caught.value)


@pytest.mark.parametrize("value", [keras.layers.Dense, keras.activations.relu, np.mean, len, dict, functools.partial])
def test_code_of_keras_is_builtin(value):
    assert is_builtin(value)


@pytest.mark.parametrize("value", [soft, Doubled, ByValue, pytest.raises])
def test_custom_code_is_not_builtin(value):
    assert not is_builtin(value)


def test_the_same_code_passes_the_check():
    check_same_code({"a": soft, "b": keras.layers.Dense}, {"a": soft, "b": keras.layers.Dense, "c": tripled})
    check_same_code({"a": soft}, {})


def test_other_code_raises_an_error_with_both_names():
    with pytest.raises(CustomObjectError) as caught:
        check_same_code({"model._layers[1].activation": soft}, {"model._layers[1].activation": keras.activations.relu})
    message = str(caught.value)
    assert message.startswith("model._layers[1].activation is ")
    assert f"{__name__}.soft" in message
    assert "relu in its place" in message
    with pytest.raises(CustomObjectError, match=r"layers\[0\] \(its class\) is"):
        check_same_code({"layers[0].__class__": Doubled}, {"layers[0].__class__": keras.layers.Dense})


# Custom code in files


class Quadrupled(keras.layers.Layer):
    def call(self, x):
        return 4 * x


def slanted(x):
    return keras.ops.maximum(x, 0.1 * x)


def _class(name, module=__name__, registered=None):
    return {"module": module, "class_name": name, "config": {}, "registered_name": registered or name}


def _function(name, module="builtins"):
    return {"module": module, "class_name": "function", "config": name, "registered_name": "function"}


def test_already_imported_code_is_found():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation=slanted), Quadrupled()])
    config = keras.saving.serialize_keras_object(model)
    assert already_loaded(config) == {"slanted": slanted, "Quadrupled": Quadrupled}


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
        _function("call", "subprocess"),
        _function("mean_squared_error"),
        _function("run"),
        _class("Popen", "subprocess"),
        _class("Dense", "keras.layers"),
        _class("slanted"),
        _function("Quadrupled"),
        _class("keras"),
        _function("pytest"),
        _function("already_loaded"),  # imported here, and not defined
        _function("param", "pytest"),  # of an installed package
        _class("Missing"),
        _class("Quadrupled", "tests.not_there"),
        {"class_name": "function", "config": ["slanted"], "registered_name": "slanted", "module": __name__},
        {"class_name": ["Quadrupled"], "config": {}, "registered_name": "Quadrupled", "module": __name__},
        {"class_name": "Quadrupled", "config": {}, "registered_name": None, "module": __name__},
        {"class_name": "Quadrupled", "config": {}, "registered_name": "Quadrupled", "module": ["x"]},
        {"class_name": "Lambda", "config": {"function": _function("slanted"), "arguments": {"path": "x"}}},
        None,
        "slanted",
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
    other.Quadrupled = type("Quadrupled", (keras.layers.Layer,), {"__module__": other.__name__})
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert already_loaded([_class("Quadrupled", other.__name__)]) == {"Quadrupled": other.Quadrupled}
    assert already_loaded([_class("Quadrupled"), _class("Quadrupled", other.__name__)]) == {}
