"""Functions build(hp) of KerasTuner: the space that is recorded, and the models of trials."""

import copy
from dataclasses import astuple

import keras
import pytest

from sparkkeras.errors import ConfigurationError, UnknownArgumentError
from sparkkeras.hyperopt import HyperModel, HyperParamModel
from sparkkeras.hyperopt.distributions import Choice, Integer, LogUniform, Uniform
from sparkkeras.hyperopt.workers import LocalWorkers


def build(hp):
    model = keras.Sequential([keras.Input((64,))])
    for number in range(hp.Int("layers", 1, 3)):
        model.add(keras.layers.Dense(hp.Int(f"units_{number}", 8, 24, step=8), hp.Choice("activation", ["relu", "tanh"])))
    if hp.Boolean("dropout"):
        model.add(keras.layers.Dropout(hp.Float("rate", 0.1, 0.5, step=0.1)))
    model.add(keras.layers.Dense(hp.Fixed("classes", 10), "softmax"))
    with hp.conditional_scope("dropout", [True]):
        optimizer = keras.optimizers.Adam(hp.Float("lr", 1e-4, 1e-1, sampling="log", default=1e-3))
    assert hp.get("classes") == 10
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True)
    return model


def described(space):
    return {name: (type(each), *astuple(each)) for name, each in space.items()}


def test_the_space_has_the_hyper_parameters_of_branches_and_loops():
    assert described(HyperModel(build).space) == {
        "layers": (Integer, 1, 3, 1, False),
        "units_0": (Integer, 8, 24, 8, False),
        "units_1": (Integer, 8, 24, 8, False),
        "units_2": (Integer, 8, 24, 8, False),
        "activation": (Choice, ("relu", "tanh")),
        "dropout": (Choice, (False, True)),
        "rate": (Uniform, 0.1, 0.5, 0.1),
        "lr": (LogUniform, 1e-4, 1e-1),
    }


def test_branches_within_branches_are_found():
    def nested(hp):
        if hp.Choice("a", ["x", "y"], default="y") == "x" and hp.Choice("b", [1, 2, 3]) == 3:
            hp.Int("c", 1, 9, sampling="log")

    assert described(HyperModel(nested).space) == {
        "a": (Choice, ("x", "y")),
        "b": (Choice, (1, 2, 3)),
        "c": (Integer, 1, 9, 1, True),
    }


def test_trials_build_the_model_of_their_values(digits):
    x, y, *_ = digits
    search = HyperParamModel(LocalWorkers())
    best = search.minimize(
        model=HyperModel(build), data=(x[:80], y[:80]), max_evals=4, validation_split=0.2, seed=1, verbose=0
    )
    assert {trial.status for trial in search.trials} == {"ok"}
    params = search.best_params
    dense = [layer for layer in best.layers if isinstance(layer, keras.layers.Dense)]
    assert [layer.units for layer in dense] == [*(params[f"units_{each}"] for each in range(params["layers"])), 10]
    assert {layer.activation.__name__ for layer in dense[:-1]} == {params["activation"]}
    assert any(isinstance(layer, keras.layers.Dropout) for layer in best.layers) == params["dropout"]
    assert float(best.optimizer.learning_rate) == pytest.approx(params["lr"])


def test_equal_bounds_are_not_searched():
    def fixed(hp):
        return hp.Int("n", 1, 1), hp.Float("x", 0.5, 0.5), hp.Int("units", 1, 2), hp.get("n")

    model = HyperModel(fixed)
    assert list(model.space) == ["units"]
    assert model({"units": 2}) == (1, 0.5, 2, 1)


def test_the_hyper_parameters_can_be_copied():
    def build(hp):
        return hp.Int("n", 1, 2), copy.deepcopy(hp).Int("n", 1, 2)

    assert HyperModel(build)({"n": 2}) == (2, 2)


def test_an_object_with_a_method_build_is_accepted():
    class Tuned:
        def build(self, hp):
            return hp.Int("n", 1, 2)

    model = HyperModel(Tuned())
    assert list(model.space) == ["n"]
    assert model({"n": 2}) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda hp: hp.get("units"), r"hp.get\('units'\): there is no such hyper-parameter. Known: none"),
        (lambda hp: hp.Int("n", 1, 9, sampling="reverse_log"), "sampling='reverse_log' of 'n' is not supported: expected"),
        (lambda hp: hp.Int("n", 1, 9, 2, "log"), r"hp.Int\('n'\): step=2 cannot be combined with sampling='log'"),
        (lambda hp: hp.Choice("c", []), r"hp.Choice\('c'\): values=\[\] has no value to choose"),
        (lambda hp: hp.name_scope("a"), "hp.name_scope is not supported. Known: 'Boolean', 'Choice', .*'conditional_scope'"),
        (lambda hp: hp.Float("x", 0.1, 1, 0.1, "log"), r"hp.Float\('x'\): step=0.1 cannot be combined with sampling='log'"),
        (lambda hp: hp.Int("n", 9, 1), r"integer\(9, 1\): low must be smaller than high"),
    ],
)
def test_what_cannot_be_searched_is_rejected_before_the_search(function, message):
    with pytest.raises(ConfigurationError, match=message):
        HyperModel(function)


def test_a_hyper_parameter_that_was_not_found_is_named():
    def hidden(hp):
        if hp.Float("x", 0, 1) > 0.5:
            hp.Int("units", 1, 2)

    model = HyperModel(hidden)
    with pytest.raises(ConfigurationError, match="hp has no 'units': .* Define it before the branch that uses it"):
        model({"x": 0.7})


def test_arguments_are_checked():
    for given in (3, None, keras.Model, keras.Sequential()):
        with pytest.raises(ConfigurationError, match="expected a function of hp, or an object with a method build"):
            HyperModel(given)
    with pytest.raises(UnknownArgumentError, match="HyperModel takes no argument 'space'"):
        HyperModel(build, space={})
    with pytest.raises(ConfigurationError, match=r"space= is missing.*model=HyperModel\(build\)"):
        HyperParamModel(LocalWorkers()).minimize(model=build, data=([[1.0]], [0]), max_evals=1)


def test_a_name_with_two_meanings_is_an_error():
    def build(hp):
        return hp.Int("a", 1, 5), hp.Float("a", 0.1, 0.2)

    with pytest.raises(
        ConfigurationError, match=r"'a' twice, as integer\(1, 5, 1, False\) and as uniform\(0\.1, 0\.2, None\)"
    ):
        HyperModel(build)


def test_a_model_without_hyper_parameters_is_an_error():
    with pytest.raises(ConfigurationError, match=r"uses no hyper-parameter: define some with hp\.Int"):
        HyperModel(lambda hp: None)
