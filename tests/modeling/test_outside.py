"""Variables outside a model, in a process that stands for driver and worker: each has its own variables."""

import sys
import sysconfig
import types
from weakref import WeakValueDictionary

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.errors import ConfigurationError, CustomObjectError
from sparkkeras.modeling import metrics, outside
from sparkkeras.modeling.archive import ModelArchive, find_outside
from sparkkeras.modeling.description import OUTSIDE, description
from sparkkeras.modeling.outside import dump_callbacks
from sparkkeras.modeling.state import ModelState, ModelWeights
from tests.models import VariablesOfWorker

ALPHA = keras.Variable(1.0, name="alpha")
SCALE = keras.Variable([1.0, 2.0], name="scale")


def annealed(y, predicted):
    return ALPHA * keras.ops.mean(keras.ops.square(y - predicted))


class Weighted(keras.losses.Loss):
    def __init__(self, weight=1.0, name="weighted", **others):
        super().__init__(name=name, **others)
        self.weight = keras.Variable(weight)

    def call(self, y, predicted):
        return self.weight * keras.ops.square(y - predicted)

    def get_config(self):
        return super().get_config() | {"weight": 1.0}


def scaled(x):
    return x * SCALE


class Setting(keras.callbacks.Callback):
    """Sets a variable."""

    def __init__(self, variable):
        super().__init__()
        self.variable = variable


KNOWN = VariablesOfWorker(ALPHA, SCALE)


@pytest.fixture(autouse=True)
def worker(monkeypatch):
    monkeypatch.setattr(outside, "_known", KNOWN)
    yield
    ALPHA.assign(1.0)
    SCALE.assign([1.0, 2.0])


def model(loss=annealed, *layers, jit_compile=False):
    built = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    built.compile("adam", loss, jit_compile=jit_compile)
    return built


def value(variable):
    return keras.ops.convert_to_numpy(variable).tolist()


def unpacked(given):
    """The model on a worker, and the variables outside it."""
    loaded = ModelArchive.pack(given).cached()
    return loaded, [*outside.find(loaded, ModelArchive.pack(given).outside).values()]


def test_values_travel_with_the_state_in_both_directions_and_not_with_the_archive():
    given = model(annealed, keras.layers.Activation(scaled))
    archive, (loaded, variables) = ModelArchive.pack(given), unpacked(given)
    assert len(variables) == 2
    assert not any(each is ALPHA or each is SCALE for each in variables)
    ALPHA.assign(0.5)
    SCALE.assign([3.0, 4.0])
    assert ModelArchive.pack(given) is ModelArchive.pack_to_predict(given) is archive
    ModelState.take(given).put(loaded)
    assert sorted(map(str, map(value, variables))) == ["0.5", "[3.0, 4.0]"]
    for each in variables:
        each.assign(each * 2)
    ModelState.take(loaded).put(given)
    assert (value(ALPHA), value(SCALE)) == (1.0, [6.0, 8.0])
    ALPHA.assign(7.0)
    ModelWeights.take(given).put(loaded)
    assert 7.0 in map(value, variables)


def test_to_predict_only_code_has_the_values_of_variables_that_training_has_not_found():
    def predicted():
        loaded = ModelArchive.pack_to_predict(given).cached()
        ModelWeights.take(given).put(loaded)
        return loaded, loaded.predict_on_batch(np.ones((1, 2), np.float32)).tolist()

    given = keras.Sequential([keras.Input((2,)), keras.layers.Activation(scaled)])
    assert predicted()[1] == [[1.0, 2.0]]
    SCALE.assign([3.0, 4.0])
    assert predicted()[1] == [[3.0, 4.0]]
    given.compile("sgd", "mse", jit_compile=False)
    find_outside(given)  # as fit does
    loaded, _ = predicted()
    SCALE.assign([5.0, 6.0])
    again, rows = predicted()
    assert again is loaded
    assert rows == [[5.0, 6.0]]


class Annealer:
    def __init__(self):
        self.weight, self.itself = keras.Variable(1.0), self


class Helped(Weighted):
    def __init__(self, name="helped", **others):
        super().__init__(name=name, **others)
        self.annealers = [Annealer()]


def test_attributes_of_a_loss_and_of_an_object_in_it_are_found():
    given = model(Helped())
    assert ModelArchive.pack(given).outside == ("model.loss.annealers[0].weight", "model.loss.weight")
    given.loss.weight.assign(0.25)
    given.loss.annealers[0].weight.assign(0.5)
    loaded = ModelArchive.pack(given).cached()
    ModelState.take(given).put(loaded)
    assert (value(loaded.loss.weight), value(loaded.loss.annealers[0].weight)) == (0.25, 0.5)
    with pytest.raises(CustomObjectError, match=r"use self\.model\.loss\.weight"):
        dump_callbacks([Setting(given.loss.weight)], [given])


class WeightedMean(keras.metrics.Mean):
    def __init__(self, weight=1.0, name="weighted", **others):
        super().__init__(name=name, **others)
        self.weight, self.resets = keras.Variable(weight), 0

    def update_state(self, y, predicted, sample_weight=None):
        super().update_state(self.weight * keras.ops.square(y - predicted), sample_weight)

    def reset_state(self):
        super().reset_state()
        self.resets += 1


def test_a_variable_that_a_metric_does_not_reset_is_not_its_state():
    given, metric = model("mse"), WeightedMean()
    given.compile("adam", "mse", metrics=[metric])
    zeros = from_arrays(np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32), None)
    loaded, (variable,) = unpacked(given)
    assert metric.resets == 0  # finding variables leaves the metrics of the model alone
    for each in (given, loaded):
        metrics.prepare(each, zeros)
        assert len(metrics.take(each)) == 4  # sums and counts of the loss and the metric
    metric.weight.assign(0.25)
    ModelState.take(given).put(loaded)
    assert value(variable) == 0.25
    metrics.results(given, metrics.merge([metrics.take(loaded)] * 2))
    assert value(metric.weight) == 0.25


class Both(Weighted):
    def __init__(self, name="both", **others):
        super().__init__(name=name, **others)
        self.weight = ALPHA

    def call(self, y, predicted):
        return ALPHA * super().call(y, predicted)


def test_a_variable_that_is_global_and_an_attribute_is_one():
    given = model(Both())
    assert len(ModelArchive.pack(given).outside) == 1
    assert dump_callbacks([Setting(ALPHA)], [given]).fresh()


def test_a_copy_in_the_process_of_the_driver_uses_its_variables(monkeypatch):
    monkeypatch.setattr(outside, "_known", WeakValueDictionary())
    gamma = keras.Variable(1.0)

    def closed(y, predicted):
        return gamma * keras.ops.mean(keras.ops.square(y - predicted))

    given = model(closed)
    copy = ModelArchive.pack(given).unpack_to_train()  # as KerasEstimator makes it
    assert copy.loss is not closed
    assert copy.loss.__closure__[0].cell_contents is gamma
    state = ModelState.take(given)
    gamma.assign(3.0)
    state.put(copy)
    assert value(gamma) == 1.0


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Imports the modules of an installed package, ``ourlib``, from their sources."""

    def imported(**sources):
        for name, source in {"": "", **sources}.items():
            folder = sysconfig.get_paths()["purelib"]
            module = types.ModuleType(f"ourlib.{name}" if name else "ourlib")
            module.__file__, module.__path__ = f"{folder}/ourlib/{name or '__init__'}.py", []
            monkeypatch.setitem(sys.modules, module.__name__, module)
            exec(source, vars(module))
            if name:
                setattr(sys.modules["ourlib"], name, module)
        return module

    return imported


SQUARES = "keras.ops.mean(keras.ops.square(y - p))"


def check_found(given, name, variable):
    assert ModelArchive.pack(given).outside == (name,)
    assert unpacked(given)[1][0] is variable  # workers import the module, too
    assert dump_callbacks([Setting(variable)], [given]).fresh()[0].variable is variable


@pytest.mark.parametrize(
    ("state", "used", "name"),
    [
        (
            "W = {'kl': [keras.Variable(1.0)]}",
            "def weight():\n  from ourlib import state\n  return state.W['kl'][0]",
            "W['kl'][0]",
        ),
        (
            "class A:\n  class B:\n    kl = keras.Variable(1.0)",
            "import ourlib\ndef weight(): return ourlib.state.A.B.kl",
            "A.B.kl",
        ),
        (
            "class State:\n  def __init__(self): self.kl = keras.Variable(1.0)\nSTATE = State()",
            "from ourlib import state\ndef weight(): return state.STATE.kl",
            "STATE.kl",
        ),
    ],
)
def test_a_variable_of_an_installed_package_is_found(installed, state, used, name):
    losses = installed(
        state=f"import keras\n{state}", losses=f"import keras\n{used}\ndef loss(y, p): return weight() * {SQUARES}"
    )
    check_found(model(losses.loss), f"ourlib.state:{name}", eval(name, vars(sys.modules["ourlib.state"])))


def test_a_variable_of_a_class_in_an_installed_package_is_found(installed):
    losses = installed(
        losses="import keras\nclass Base(keras.Loss):\n  weight = keras.Variable(1.0)\n"
        f"class Weighted(Base):\n  def call(self, y, p): return self.weight * {SQUARES}\n"
    )
    check_found(model(losses.Weighted()), "ourlib.losses:Base.weight", losses.Base.weight)


def test_a_variable_of_a_function_that_own_code_calls_in_an_installed_package_is_found(installed):
    losses = installed(losses="import keras\nBETA = keras.Variable(1.0)\nB = [BETA]\ndef weight(): return B[0] * BETA\n")

    def loss(y, p):
        return losses.weight() * keras.ops.square(y - p)

    check_found(model(loss), "ourlib.losses:BETA", losses.BETA)


def test_a_variable_that_a_worker_does_not_find_in_an_installed_package(installed):
    losses = installed(losses=f"import keras\nW = {{}}\ndef loss(y, p): return W['kl'] * {SQUARES}")
    losses.W["kl"] = keras.Variable(1.0)
    given = model(losses.loss)
    names = ModelArchive.pack(given).outside
    losses.W.clear()
    with pytest.raises(CustomObjectError, match=r"W\['kl'\] .* ourlib\.losses"):
        outside.find(given, names)


def with_own_code(monkeypatch, source):
    """A model with the loss of a module of the user, and the module."""
    module = types.ModuleType("own_losses")
    module.__file__ = "/home/user/own_losses.py"
    monkeypatch.setitem(sys.modules, "own_losses", module)
    exec(f"import keras\n{source}", vars(module))
    given = model(module.loss)
    find_outside(given)
    return given, module


def test_a_state_is_restored_by_names_in_code(monkeypatch):
    made = [
        with_own_code(monkeypatch, f"{source}\nclass A:\n  weight = keras.Variable(1.0)\ndef loss(y, p): return {used}")
        for source, used in (
            ("B = keras.Variable(2.0)\nC = {'kl': keras.Variable(3.0)}", f"A.weight * {SQUARES} + B * C['kl']"),
            ("C = {'kl': keras.Variable(0.0)}\nB = keras.Variable(0.0)", f"C['kl'] * B + {SQUARES} * A.weight"),
            ("C = {'kl': keras.Variable(0.0)}\nD = keras.Variable(0.0)", f"C['kl'] * D + {SQUARES} * A.weight"),
        )
    ]
    given, restored, renamed = (description(each) for each, _ in made)
    assert [name for name, *_ in given[OUTSIDE]] == ["A.weight", "B", "C['kl']"]
    assert restored[OUTSIDE] == given[OUTSIDE]
    assert renamed != given
    ModelState.take(made[0][0]).put(made[1][0])
    assert [value(each) for each in (made[1][1].B, made[1][1].C["kl"])] == [2.0, 3.0]


def test_variables_with_the_same_name_in_code_are_numbered():
    def scaling(weight):
        return lambda x: weight * x

    first, second = scaling(keras.Variable(1.0)), scaling(keras.Variable(2.0))

    def loss(y, predicted):
        return first(second(keras.ops.mean(keras.ops.square(y - predicted))))

    find_outside(given := model(loss))
    assert [name for name, *_ in description(given)[OUTSIDE]] == ["weight", "weight (2)"]


def test_a_weight_of_the_model_in_its_custom_code_is_refused():
    given = model("mse")
    kernel = given.layers[0].kernel

    def penalized(y, predicted):
        return keras.ops.mean(keras.ops.square(y - predicted)) + keras.ops.sum(keras.ops.square(kernel))

    given.compile("sgd", penalized)
    with pytest.raises(CustomObjectError, match="its weight '.*kernel'"):
        ModelArchive.pack(given)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="other backends read variables in each step")
def test_a_change_that_jax_would_ignore_is_refused():
    given = model(jit_compile="auto")
    archive = ModelArchive.pack(given)
    unchanging = outside.Unchanging(given)
    unchanging.check()
    ALPHA.assign(0.5)
    with pytest.raises(ConfigurationError, match="changed the variable 'alpha'"):
        unchanging.check()
    with pytest.raises(ConfigurationError, match="refer to .* 'alpha'"):
        dump_callbacks([Setting(ALPHA)], [given])
    assert ModelArchive.pack(given).digest != archive.digest  # of the next fit
    given = model()
    ModelArchive.pack(given)
    unchanging = outside.Unchanging(given)
    ALPHA.assign(0.25)
    unchanging.check()
    dump_callbacks([Setting(ALPHA)], [given])
