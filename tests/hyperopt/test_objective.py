"""What a trial does and how that is told, in this process."""

import math
from functools import partial

import keras
import numpy as np
import pytest

from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.ledger import GO_ON, PRUNE, STOP
from sparkkeras.hyperopt.objective import (
    EXTRA_LENGTH,
    TRACEBACK_LENGTH,
    Call,
    Fit,
    packed_weights,
    run_trial,
    unpacked_weights,
)
from sparkkeras.hyperopt.reporting import ReportCallback, TrialEnd, report
from sparkkeras.hyperopt.subprocess_task import StopWork
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED
from sparkkeras.modeling.archive import load_bytes
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.worker import device

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
DATA = {"x": X, "y": X[:, :1] * 2}


class Driver:
    """Writes down what it is told, and answers in turn."""

    def __init__(self, *answers):
        self.told, self._answers = [], list(answers)

    def __call__(self, epoch, loss):
        self.told.append((epoch, loss))
        return self._answers.pop(0) if self._answers else GO_ON


def build(params):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(params["lr"]), "mse", run_eagerly=True)
    return model


class Ends(keras.callbacks.Callback):
    """Raises something at the begin of an epoch, counted from 1."""

    def __init__(self, error, epoch):
        super().__init__()
        self.error, self.epoch = error, epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch + 1 == self.epoch:
            raise self.error


class Sets(keras.callbacks.Callback):
    """Gives the weights a value in each epoch."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def on_train_batch_end(self, batch, logs=None):
        self.model.set_weights([np.full_like(weight, self.values[self.epoch]) for weight in self.model.get_weights()])

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def fitted(build=build, params=None, data=DATA, *, metric="loss", tell=None, seed=3, sign=1.0, has_rows=True, **arguments):
    given = {"epochs": 3, "batch_size": 8, **arguments}
    fit = Fit(ByValue.dump(build, "build"), ByValue.dump(given, "arguments"), metric, has_rows)
    return run_trial(fit, params or {"lr": 0.1}, data, seed, tell or Driver(), sign)


def called(function, params=None, *, tell=None, sign=1.0, **data):
    call = Call(ByValue.dump(function, "objective"), bool(data))
    return run_trial(call, params, data.get("data"), 3, tell or Driver(), sign)


@pytest.fixture(autouse=True)
def no_trial_is_left():
    """What is reported after a trial goes nowhere."""
    yield
    assert reporting.current is None


# Fit


def test_a_fit_has_the_weights_of_its_best_epoch():
    driver = Driver()
    outcome = fitted(
        metric="val_loss", tell=driver, epochs=3, validation_data=(X, X[:, :1]), callbacks=[Sets(3.0, 0.5, 2.0)]
    )
    values = outcome.history["val_loss"]
    assert (outcome.status, outcome.value, outcome.best_epoch, outcome.error) == (OK, values[1], 2, "")
    assert set(outcome.history) == {"loss", "val_loss"}
    assert driver.told == list(enumerate(values, 1))
    assert outcome.suffix == "npz"
    assert [set(weight.ravel()) for weight in unpacked_weights(outcome.model)] == [{0.5}, {0.5}]


def test_what_the_builder_says_goes_before_what_the_search_was_given():
    def with_own(params):
        return build(params), {"validation_data": (X, X[:, :1] * 7)}

    data = {**DATA, "validation_data": (X, X[:, :1])}
    given = fitted(data=data, metric="val_loss", callbacks=[Sets(0.0, 0.0, 0.0)])
    own = fitted(with_own, data=data, metric="val_loss", callbacks=[Sets(0.0, 0.0, 0.0)])
    assert own.value == pytest.approx(49 * given.value, rel=1e-4)


def test_where_large_values_are_good_those_are_kept():
    driver = Driver()
    outcome = fitted(tell=driver, sign=-1.0, callbacks=[Sets(3.0, 0.5, 2.0)])
    values = outcome.history["loss"]
    assert outcome.value == max(values)
    assert outcome.best_epoch == values.index(max(values)) + 1
    assert driver.told == [(epoch, -value) for epoch, value in enumerate(values, 1)]


def test_a_seed_makes_a_trial_what_it_is():
    one, same, other = (fitted(seed=seed) for seed in (3, 3, 4))
    assert one.history == same.history
    assert one.model == same.model
    assert one.history != other.history


def test_hyper_parameters_and_the_builder_say_how_to_fit():
    plain = fitted(params={"lr": 0.1, "epochs": 2.0, "batch_size": 4.0})
    assert len(plain.history["loss"]) == 2
    own = fitted(lambda params: (build(params), {"epochs": 4}), {"lr": 0.1, "epochs": 2})
    assert len(own.history["loss"]) == 4
    with_callbacks = fitted(params={"lr": 0.1, "callbacks": [Sets(0.0, 0.0, 0.0)]})
    assert with_callbacks.history["loss"][1] == with_callbacks.history["loss"][2]


@pytest.mark.parametrize(("answer", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_a_fit_that_is_told_to_end_has_what_it_came_to(answer, status):
    outcome = fitted(tell=Driver(GO_ON, answer), epochs=9)
    assert (outcome.status, outcome.best_epoch, len(outcome.history["loss"])) == (status, 2, 2)
    assert outcome.model
    assert outcome.error == ""


@pytest.mark.parametrize(("epoch", "value"), [(1, False), (3, True)])
def test_a_fit_that_is_stopped_has_what_it_came_to(epoch, value):
    outcome = fitted(epochs=9, callbacks=[Ends(StopWork(), epoch)])
    assert (outcome.status, outcome.error, outcome.is_mistake) == (STOPPED, "", False)
    assert (outcome.value is not None, bool(outcome.model)) == (value, value)
    assert outcome.best_epoch == (2 if value else None)


def test_a_fit_that_diverges_later_keeps_what_was_good():
    outcome = fitted(epochs=5, callbacks=[Sets(0.5, math.nan, 0.1, 0.1, 0.1)])
    assert (outcome.status, outcome.best_epoch, outcome.value) == (OK, 2, outcome.history["loss"][1])
    assert outcome.error == "the value of epoch 3 is not finite: training diverged there"
    assert len(outcome.history["loss"]) == 3


def test_a_fit_that_diverges_at_once_has_failed():
    outcome = fitted(params={"lr": math.nan}, batch_size=1)
    assert (outcome.status, outcome.value, outcome.model, outcome.is_mistake) == (FAILED, None, b"", False)
    assert outcome.error == "the value of epoch 1 is not finite: training diverged there"


def test_a_fit_that_raises_has_failed_with_its_traceback():
    outcome = fitted(callbacks=[Ends(ValueError("too large\nby far"), 2)])
    assert (outcome.status, outcome.error, outcome.is_mistake) == (FAILED, "ValueError: too large\nby far", False)
    assert "on_epoch_begin" in outcome.traceback
    assert len(outcome.history["loss"]) == 1


def not_compiled(params):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def not_built(params):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def neither(params):
    return keras.Sequential([keras.layers.Dense(1)])


def classifier(params):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    return model


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"build": lambda params: None}, "returned None; expected a compiled keras.Model, or"),
        ({"build": lambda params: (build(params), 3)}, "returned .*expected a compiled keras.Model, or"),
        ({"build": lambda params: (build(params), {"epoch": 3})}, "'epoch' as an argument of fit. .*'epochs'"),
        ({"build": lambda params: (build(params), {"verbose": 1})}, "'verbose' as an argument of fit"),
        ({"build": not_compiled}, "cannot be trained: .*compile"),
        ({"build": neither}, "is not compiled: call model.compile"),
        ({"build": not_built, "has_rows": False}, "is not built, .*: begin it with keras.Input"),
        ({"metric": "val_loss"}, "metric='val_loss' is not among .*validation_split= or validation_data="),
        ({"metric": "accuracy"}, "metric='accuracy' is not among the figures of fit. Known: 'loss'"),
        ({"epochs": 0}, "metric='loss' is not among"),
        (
            {"data": {**DATA, "validation_data": (X, DATA["y"])}, "validation_split": 0.5},
            "one of validation_split and validation_data",
        ),
        (
            {"data": {"x": X[:, :1], "y": DATA["y"]}},
            "x does not fit the model.s input .*shape .2,., received .*.1,.. Reshape the data.$",
        ),
        ({"build": classifier, "data": {"x": X, "y": np.arange(8) % 4}}, "labels must be .*from 0 to 2, but .*from 0 to 3"),
    ],
    ids=range(13),
)
def test_mistakes_that_all_trials_would_meet(given, words):
    outcome = fitted(**given)
    assert (outcome.status, outcome.is_mistake) == (FAILED, True)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(outcome.error)


def test_a_model_that_is_not_built_is_built_by_the_rows():
    outcome = fitted(not_built)
    assert (outcome.status, len(unpacked_weights(outcome.model))) == (OK, 2)


@pytest.mark.parametrize("inputs", [{"x": [X, X]}, {"x": {"a": X, "b": X}}, {"sample_weight": np.ones(8)}], ids=list)
def test_data_of_every_form_is_fitted(inputs):
    def several(params):
        a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
        given = {"a": a, "b": b} if isinstance(inputs["x"], dict) else [a, b]
        model = keras.Model(given, keras.layers.Dense(1)(keras.layers.Concatenate()([a, b])))
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    outcome = fitted(several if "x" in inputs else build, data={**DATA, **inputs})
    assert (outcome.status, outcome.error) == (OK, "")


def test_epochs_without_validation_are_no_harm():
    driver = Driver()
    outcome = fitted(metric="val_loss", tell=driver, epochs=4, validation_split=0.5, validation_freq=2)
    assert [epoch for epoch, _ in driver.told] == [2, 4]
    assert outcome.best_epoch in (2, 4)


def test_weights_travel_whatever_their_types():
    weights = [np.arange(3, dtype=np.int64), np.float16([[0.5]]), np.zeros((0, 2), np.float32), np.float32(1.5)]
    again = unpacked_weights(packed_weights([*weights, keras.ops.convert_to_numpy(keras.ops.ones((2,), "bfloat16"))]))
    assert [(one.dtype, one.tolist()) for one in again[:-1]] == [(one.dtype, one.tolist()) for one in weights]
    assert (again[-1].dtype, again[-1].tolist()) == (np.float32, [1.0, 1.0])


# Functions


def test_a_function_returns_a_loss():
    for given in (0.25, np.float32(0.25), np.array(0.25), {"loss": 0.25}, {"loss": 0.25, "status": "ok"}):
        outcome = called(lambda params, given=given: given)
        assert (outcome.status, outcome.value, outcome.best_epoch) == (OK, 0.25, None)
        assert (outcome.error, outcome.model, outcome.extra) == ("", b"", {})


def test_a_function_gets_hyper_parameters_and_data():
    assert called(lambda params: params["x"] * 2, {"x": 3}).value == 6
    assert called(lambda params, data: params["x"] * data, {"x": 3}, data=5).value == 15


def test_a_value_of_an_epoch_has_its_number():
    def objective(params, result):
        for value in (0.5, 0.25, 0.75):
            report(value, accuracy=1 - value)
        return result

    driver = Driver()
    outcome = called(partial(objective, result=0.25), tell=driver)
    assert (outcome.value, outcome.best_epoch) == (0.25, 2)
    assert outcome.history == {"loss": [0.5, 0.25, 0.75], "accuracy": [0.5, 0.75, 0.25]}
    assert driver.told == [(1, 0.5), (2, 0.25), (3, 0.75)]
    assert called(partial(objective, result=0.1)).best_epoch is None


def test_the_backend_is_started_for_models_that_are_fitted_only(monkeypatch):
    started = []
    monkeypatch.setattr(device, "wake", lambda: started.append(1))
    assert called(lambda params: 0.5).value == 0.5
    assert started == []
    assert fitted(epochs=1).status == OK
    assert started == [1]


def test_what_else_a_function_returns_is_kept_where_json_knows_it():
    extra = called(
        lambda params: {"loss": 0.5, "n": np.int64(3), "a": np.arange(2), "nested": {"b": [1, None]}, "o": {1}, 7: "seven"}
    ).extra
    assert extra == {"n": 3, "a": [0, 1], "nested": {"b": [1, None]}, "o": "{1}", "7": "seven"}


def test_what_is_too_long_is_cut():
    outcome = called(
        lambda params: {"loss": 0.5, "long": "x" * EXTRA_LENGTH, "array": np.zeros(EXTRA_LENGTH), "short": "x" * 1000}
    )
    assert outcome.value == 0.5
    assert len(outcome.extra["short"]) == 1000
    for name in ("long", "array"):
        assert len(outcome.extra[name]) < 200
        assert outcome.extra[name].endswith("characters: too long to be kept)")


def test_a_model_that_a_function_returns_is_kept_whole():
    def objective(params):
        model = build(params)
        model.set_weights([np.full_like(weight, 0.5) for weight in model.get_weights()])
        return {"loss": 0.5, "model": model, "note": "x"}

    outcome = called(objective, {"lr": 0.1})
    assert (outcome.suffix, outcome.extra) == ("keras", {"note": "x"})
    assert [set(weight.ravel()) for weight in load_bytes(outcome.model, {}, safe_mode=True).get_weights()] == [{0.5}, {0.5}]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"loss": 0.5, "model": "m"}, "ConfigurationError: the objective returned 'm' as its model; expected a keras.Model"),
        ({"status": "fail", "why": "cold"}, "the objective returned status 'fail': {'why': 'cold'}"),
        (math.nan, "the objective returned the loss nan"),
        ({"loss": -math.inf, "why": "cold"}, "the objective returned the loss -inf"),
    ],
    ids=repr,
)
def test_what_is_no_loss_is_a_failure(given, error):
    outcome = called(lambda params: given)
    assert (outcome.status, outcome.value, outcome.is_mistake) == (FAILED, None, False)
    assert outcome.error.startswith(error)
    if isinstance(given, dict) and "why" in given:
        assert outcome.extra == {"why": "cold"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("0.5", "the objective returned '0.5'; expected a number, or a dict with 'loss' and 'status'."),
        (None, "the objective returned None; expected a number, or a dict with 'loss' and 'status'. Has it no return"),
        ([1, 2], "the objective returned [1, 2]; expected a number"),
        ({}, "the objective returned a dict without the key 'loss' (its keys: none); add it, a number, or return"),
        ({"a": 1, "lost": 2}, "the objective returned a dict without the key 'loss' (its keys: 'a', 'lost'); add it"),
        ({"loss": None}, "the objective returned None as its loss; expected a number."),
        ({"loss": "low" * 99}, f"the objective returned '{('low' * 99)[:199]}... (str) as its loss; expected a number."),
        ({"loss": 0.5, "status": "yes"}, "the objective returned the status 'yes'; expected 'ok' (hyperopt.STATUS_OK)"),
        ({"loss": 0.5, "status": True}, "the objective returned the status True; expected 'ok'"),
        ({"loss": 0.5, "status": "suspended"}, "the objective returned the status 'suspended' (which is for trials that"),
    ],
    ids=repr,
)
def test_what_no_objective_may_return_is_a_mistake(given, error):
    outcome = called(lambda params: given)
    assert (outcome.status, outcome.value, outcome.is_mistake) == (FAILED, None, True)
    assert outcome.error.startswith(error)


def test_a_loss_that_is_no_number_after_good_ones_leaves_these():
    def objective(params):
        report(0.5)
        report(0.75)
        return math.nan

    outcome = called(objective)
    assert (outcome.status, outcome.value, outcome.best_epoch) == (OK, 0.5, 1)
    assert outcome.error == "the objective returned the loss nan"


@pytest.mark.parametrize(("answer", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_a_function_that_is_told_to_end_has_what_it_reported(answer, status):
    def objective(params):
        for value in (0.5, 0.75, 0.1):
            report(value)
        return 0.0

    outcome = called(objective, tell=Driver(GO_ON, answer))
    assert (outcome.status, outcome.value, outcome.best_epoch) == (status, 0.5, 1)
    assert outcome.history == {"loss": [0.5, 0.75]}


@pytest.mark.parametrize("reports", [[], [0.5, 0.25]])
def test_a_function_that_is_stopped_has_what_it_reported(reports):
    def objective(params):
        for value in reports:
            report(value)
        raise StopWork

    outcome = called(objective)
    assert (outcome.status, outcome.error, outcome.traceback) == (STOPPED, "", "")
    assert (outcome.value, outcome.best_epoch) == ((0.25, 2) if reports else (None, None))


@pytest.mark.parametrize("error", [ZeroDivisionError("words"), SystemExit(3)], ids=["error", "exit"])
def test_a_function_that_raises_has_failed(error):
    def objective(params):
        report(0.5)
        raise error

    outcome = called(objective)
    assert (outcome.status, outcome.value, outcome.is_mistake) == (FAILED, None, False)
    assert outcome.error == f"{type(error).__name__}: {error}"
    assert "in objective" in outcome.traceback
    assert outcome.history == {"loss": [0.5]}


def test_of_a_long_traceback_the_end_is_told():
    def objective(params):
        raise ValueError("x" * 2 * TRACEBACK_LENGTH + "the end")

    outcome = called(objective)
    assert len(outcome.traceback) == TRACEBACK_LENGTH
    assert outcome.traceback.rstrip().endswith("the end")


def test_a_function_that_fits_may_have_its_metric_reported():
    def objective(params, data, metric):
        callback = ReportCallback(metric)
        model = build(params)
        model.fit(**data, epochs=3, verbose=0, callbacks=[callback])
        return {"loss": min(model.history.history["loss"]), "model": model}

    driver = Driver()
    outcome = called(partial(objective, metric="loss"), {"lr": 0.1}, data=DATA, tell=driver)
    assert (outcome.status, outcome.suffix) == (OK, "keras")
    assert len(driver.told) == 3
    wrong = called(partial(objective, metric="accuracy"), {"lr": 0.1}, data=DATA)
    assert (wrong.status, wrong.is_mistake) == (FAILED, True)
    assert wrong.error.startswith("metric='accuracy' is not among the figures of fit. Known: 'loss'")


def test_an_interruption_is_nobodys_failure():
    def objective(params):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called(objective)


def test_the_end_of_a_trial_may_be_meant_by_the_person():
    def objective(params):
        report(0.5)
        raise TrialEnd

    assert called(objective).value == 0.5
