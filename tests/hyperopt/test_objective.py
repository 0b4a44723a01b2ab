"""The objectives of trials and their outcomes, in this process."""

import math
from functools import partial

import keras
import numpy as np
import pytest

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.ledger import CONTINUE, PRUNE, STOP
from sparkkeras.hyperopt.objective import (
    EXTRA_LENGTH,
    TRACEBACK_LENGTH,
    CallObjective,
    Fit,
    fit_arguments_of,
    pack_weights,
    run_trial,
    unpack_weights,
)
from sparkkeras.hyperopt.reporting import ReportCallback, report
from sparkkeras.hyperopt.subprocess_task import StopWork
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED
from sparkkeras.modeling.custom_code import ByValue

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
DATA = {"x": X, "y": X[:, :1] * 2}


class Driver:
    """Records reports, and returns the given replies in order."""

    def __init__(self, *replies):
        self.reports, self._replies = [], list(replies)

    def __call__(self, epoch, loss):
        self.reports.append((epoch, loss))
        return self._replies.pop(0) if self._replies else CONTINUE


def build(params):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(params["lr"]), "mse", run_eagerly=True)
    return model


class RaiseAt(keras.callbacks.Callback):
    """Raises an exception at the beginning of an epoch, counted from 1."""

    def __init__(self, error, epoch):
        super().__init__()
        self.error, self.epoch = error, epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch + 1 == self.epoch:
            raise self.error


class SetWeights(keras.callbacks.Callback):
    """Sets all weights to a given value in each epoch."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def on_train_batch_end(self, batch, logs=None):
        self.model.set_weights([np.full_like(weight, self.values[self.epoch]) for weight in self.model.get_weights()])

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def run_fit(build=build, params=None, data=DATA, *, metric="loss", send=None, seed=3, sign=1.0, has_rows=True, **arguments):
    given, metrics = {"epochs": 3, "batch_size": 8, **arguments}, (metric,) if isinstance(metric, str) else metric
    fit = Fit(ByValue.dump({"model": build, **given}, "arguments"), metrics, has_rows)
    return run_trial(fit, params or {"lr": 0.1}, data, seed, send or Driver(), sign, len(metrics))


def run_objective(function, params=None, *, send=None, sign=1.0, metrics=("loss",), **data):
    call = CallObjective(ByValue.dump(function, "objective"), bool(data), metrics)
    return run_trial(call, params, data.get("data"), 3, send or Driver(), sign, len(metrics))


@pytest.fixture(autouse=True)
def no_trial_is_left():
    """After a trial, reports have no receiver."""
    yield
    assert reporting.current is None


# Fit


def test_callbacks_set_variables_outside_the_model():
    alpha = keras.Variable(1.0)

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            alpha.assign(0.0 if epoch else 1.0)

    def loss(y, predicted):
        return alpha * keras.ops.mean(keras.ops.square(y - predicted))

    def annealed(params):
        model = build(params)
        model.compile("sgd", loss, jit_compile=False)  # JAX would compile the first value into the step
        return model

    history = run_fit(annealed, callbacks=[Anneal()]).history["loss"]
    assert history[0] > 0
    assert history[1:] == [0, 0]


def test_a_tuple_of_inputs_has_the_order_in_which_the_model_was_built():
    def in_a_dict(params):
        b, c, a = (keras.Input((2,), name=name) for name in "bca")
        output = keras.layers.Dense(1)(keras.layers.Concatenate()([a, b, c]))
        model = keras.Model({"b": b, "others": {"c": c, "a": a}}, output)
        model.compile("sgd", "mse")
        return model

    given = {"b": X, "others": {"c": 2 * X, "a": 3 * X}}
    values = [
        run_fit(in_a_dict, data={"x": x, "y": DATA["y"], "validation_data": (x, DATA["y"])}, epochs=1).history["loss"]
        for x in (given, [X, 2 * X, 3 * X], {"b": X, "others/a": 3 * X, "others/c": 2 * X})
    ]
    assert values[0] == values[1] == values[2]


def test_fit_keeps_the_weights_of_its_best_epoch():
    driver = Driver()
    outcome = run_fit(
        metric="val_loss", send=driver, epochs=3, validation_data=(X, X[:, :1]), callbacks=[SetWeights(3.0, 0.5, 2.0)]
    )
    values = outcome.history["val_loss"]
    assert (outcome.status, outcome.value, outcome.best_epoch, outcome.error) == (OK, values[1], 2, "")
    assert set(outcome.history) == {"loss", "val_loss"}
    assert driver.reports == list(enumerate(values, 1))
    assert outcome.suffix == "npz"
    assert [set(weight.ravel()) for weight in unpack_weights(outcome.model)] == [{0.5}, {0.5}]


def test_fit_arguments_may_come_from_hyper_parameters_and_the_builder():
    plain = run_fit(params={"lr": 0.1, "epochs": 2.0, "batch_size": 4.0})
    assert len(plain.history["loss"]) == 2
    from_builder = run_fit(lambda params: (build(params), {"epochs": 4}), {"lr": 0.1, "epochs": 2})
    assert len(from_builder.history["loss"]) == 4
    with_callbacks = run_fit(params={"lr": 0.1, "callbacks": [SetWeights(0.0, 0.0, 0.0)]})
    assert with_callbacks.history["loss"][1] == with_callbacks.history["loss"][2]


@pytest.mark.parametrize(("reply", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_a_pruned_or_stopped_fit_keeps_its_best_epoch(reply, status):
    outcome = run_fit(send=Driver(CONTINUE, reply), epochs=9)
    assert (outcome.status, outcome.best_epoch, len(outcome.history["loss"])) == (status, 2, 2)
    assert outcome.model
    assert outcome.error == ""


@pytest.mark.parametrize(("epoch", "value"), [(1, False), (3, True)])
def test_a_fit_stopped_by_a_signal_keeps_its_best_epoch(epoch, value):
    outcome = run_fit(epochs=9, callbacks=[RaiseAt(StopWork(), epoch)])
    assert (outcome.status, outcome.error, outcome.is_definition_error) == (STOPPED, "", False)
    assert (outcome.value is not None, bool(outcome.model)) == (value, value)
    assert outcome.best_epoch == (2 if value else None)


def test_a_fit_that_diverges_later_keeps_its_best_epoch():
    outcome = run_fit(epochs=5, callbacks=[SetWeights(0.5, math.nan, 0.1, 0.1, 0.1)])
    assert (outcome.status, outcome.best_epoch, outcome.value) == (OK, 2, outcome.history["loss"][1])
    assert outcome.error == "the value of epoch 3 is not finite: training diverged there"
    assert len(outcome.history["loss"]) == 3


def test_a_fit_that_diverges_in_its_first_epoch_fails():
    outcome = run_fit(params={"lr": math.nan}, batch_size=1)
    assert (outcome.status, outcome.value, outcome.model, outcome.is_definition_error) == (FAILED, None, b"", False)
    assert outcome.error == "the value of epoch 1 is not finite: training diverged there"


def test_a_fit_that_raises_fails_with_its_traceback():
    outcome = run_fit(callbacks=[RaiseAt(ValueError("too large\nby far"), 2)])
    assert (outcome.status, outcome.error, outcome.is_definition_error) == (FAILED, "ValueError: too large\nby far", False)
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
    ("given", "message"),
    [
        ({"build": lambda params: None}, "returned None; expected a compiled keras.Model, or"),
        ({"build": lambda params: (build(params), 3)}, "returned .*expected a compiled keras.Model, or"),
        ({"build": lambda params: (build(params), {"epoch": 3})}, "'epoch' as an argument of fit. .*'epochs'"),
        ({"build": not_compiled}, "cannot be trained: .*compile"),
        ({"build": neither}, "is not compiled: call model.compile"),
        ({"build": not_built, "has_rows": False}, "is not built, .*: start the model with keras.Input"),
        ({"metric": "val_loss"}, "metric='val_loss' is not in the logs .*validation_split= or validation_data="),
        ({"epochs": 0}, "metric='loss' is not in the logs"),
        (
            {"data": {**DATA, "validation_data": (X, DATA["y"])}, "validation_split": 0.5},
            "one of validation_split and validation_data",
        ),
        (
            {"data": {"x": X[:, :1], "y": DATA["y"]}},
            "x does not fit the model.s input.*shape .2,., received .*.1,.. Reshape the data.$",
        ),
        ({"build": classifier, "data": {"x": X, "y": np.arange(8) % 4}}, "labels must be .*from 0 to 2, but .*from 0 to 3"),
    ],
    ids=range(11),
)
def test_errors_that_every_trial_would_raise_are_marked_as_definition_errors(given, message):
    outcome = run_fit(**given)
    assert (outcome.status, outcome.is_definition_error) == (FAILED, True)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.error)


def test_an_unbuilt_model_is_built_from_the_rows():
    outcome = run_fit(not_built)
    assert (outcome.status, len(unpack_weights(outcome.model))) == (OK, 2)


def test_epochs_without_validation_are_not_reported():
    driver = Driver()
    outcome = run_fit(metric="val_loss", send=driver, epochs=4, validation_split=0.5, validation_freq=2)
    assert [epoch for epoch, _ in driver.reports] == [2, 4]
    assert outcome.best_epoch in (2, 4)


def test_weights_of_any_type_can_be_packed():
    weights = [
        np.arange(3),
        np.float16([[0.5]]),
        np.zeros((0, 2)),
        keras.ops.convert_to_numpy(keras.ops.ones(2, "bfloat16")),
    ]
    *again, last = unpack_weights(pack_weights(weights))
    assert [(one.dtype, one.tolist()) for one in again] == [(one.dtype, one.tolist()) for one in weights[:-1]]
    assert (last.dtype, last.tolist()) == (np.float32, [1.0, 1.0])


# Functions


def test_an_objective_may_return_a_loss_in_several_forms():
    for given in (0.25, np.float32(0.25), np.array(0.25), {"loss": 0.25}, {"loss": 0.25, "status": "ok"}):
        outcome = run_objective(lambda params, given=given: given)
        assert (outcome.status, outcome.value, outcome.best_epoch) == (OK, 0.25, None)
        assert (outcome.error, outcome.model, outcome.extra) == ("", b"", {})


def test_a_loss_equal_to_the_best_report_has_its_epoch():
    def objective(params, result):
        for value in (0.5, 0.0, 0.75, 0.0):
            report(np.float32(value), accuracy=1 - value)
        return result

    driver = Driver()
    outcome = run_objective(partial(objective, result=0.0), send=driver)
    assert (outcome.value, outcome.best_epoch) == (0.0, 2)
    assert outcome.history == {"loss": [0.5, 0.0, 0.75, 0.0], "accuracy": [0.5, 1.0, 0.25, 1.0]}
    assert driver.reports == [(1, 0.5), (2, 0.0), (3, 0.75), (4, 0.0)]
    assert run_objective(partial(objective, result=-0.1)).best_epoch is None


def test_further_results_of_an_objective_become_json_values_of_limited_length():
    given = {"n": np.int64(3), "a": np.arange(2), "nested": {"b": [1, None]}, "o": {1}, 7: "seven"}
    extra = dict(run_objective(lambda params: {"loss": 0.5, "long": np.zeros(EXTRA_LENGTH), **given}).extra)
    assert len(extra["long"]) < 200
    assert extra.pop("long").endswith("characters: too long to be kept)")
    assert extra == {"n": 3, "a": [0, 1], "nested": {"b": [1, None]}, "o": "{1}", "7": "seven"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"status": "fail", "why": "cold"}, "the objective returned status 'fail': {'why': 'cold'}"),
        (math.nan, "the objective returned the loss nan"),
        ({"loss": -math.inf, "why": "cold"}, "the objective returned the loss -inf"),
    ],
    ids=repr,
)
def test_a_result_without_a_finite_loss_is_a_failure(given, error):
    outcome = run_objective(lambda params: given)
    assert (outcome.status, outcome.value, outcome.is_definition_error) == (FAILED, None, False)
    assert outcome.error.startswith(error)
    if isinstance(given, dict) and "why" in given:
        assert outcome.extra == {"why": "cold"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"loss": 0.5, "model": "m"}, "the objective returned 'm' as its model; expected a keras.Model"),
        ("0.5", "the objective returned '0.5'; expected a number, or a dict with 'loss' and 'status'."),
        (
            None,
            "the objective returned None; expected a number, or a dict with 'loss' and 'status'. Is its return statement",
        ),
        ({}, "the objective returned a dict without the key 'loss' (its keys: none); add 'loss' with a number, or return"),
        ({"loss": "low" * 99}, f"the objective returned '{('low' * 99)[:199]}... (str) as its loss; expected a number."),
        ({"loss": 0.5, "status": "yes"}, "the objective returned the status 'yes'; expected 'ok' (hyperopt.STATUS_OK)"),
        ({"loss": 0.5, "status": "suspended"}, "the objective returned the status 'suspended' (which means that a trial"),
    ],
    ids=repr,
)
def test_an_invalid_result_of_an_objective_is_a_definition_error(given, error):
    outcome = run_objective(lambda params: given)
    assert (outcome.status, outcome.value, outcome.is_definition_error) == (FAILED, None, True)
    assert outcome.error.startswith(error)


@pytest.mark.parametrize("reported", [0.75, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_best_reported_value(reported):
    def objective(params):
        report(0.5)
        report(reported)
        return math.nan

    driver = Driver()
    outcome = run_objective(objective, send=driver)
    assert (outcome.status, outcome.value, outcome.best_epoch, len(outcome.history["loss"])) == (OK, 0.5, 1, 2)
    if reported == math.inf:
        assert driver.reports == [(1, 0.5)]
        assert outcome.error.startswith("the value of epoch 2 is not finite")
    else:
        assert outcome.error == "the objective returned the loss nan"


@pytest.mark.parametrize(("reply", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_a_pruned_or_stopped_objective_keeps_its_best_report(reply, status):
    def objective(params):
        for value in (0.5, 0.75, 0.1):
            report(value)
        return 0.0

    outcome = run_objective(objective, send=Driver(CONTINUE, reply))
    assert (outcome.status, outcome.value, outcome.best_epoch) == (status, 0.5, 1)
    assert outcome.history == {"loss": [0.5, 0.75]}


@pytest.mark.parametrize("reports", [[], [0.5, 0.25]])
def test_an_objective_stopped_by_a_signal_keeps_its_best_report(reports):
    def objective(params):
        for value in reports:
            report(value)
        raise StopWork

    outcome = run_objective(objective)
    assert (outcome.status, outcome.error, outcome.traceback) == (STOPPED, "", "")
    assert (outcome.value, outcome.best_epoch) == ((0.25, 2) if reports else (None, None))


@pytest.mark.parametrize("error", [ZeroDivisionError("text"), SystemExit(3)], ids=["error", "exit"])
def test_an_objective_that_raises_fails(error):
    def objective(params):
        report(0.5)
        raise error

    outcome = run_objective(objective)
    assert (outcome.status, outcome.value, outcome.is_definition_error) == (FAILED, None, False)
    assert outcome.error == f"{type(error).__name__}: {error}"
    assert "in objective" in outcome.traceback
    assert outcome.history == {"loss": [0.5]}


def test_a_long_traceback_keeps_its_end():
    def objective(params):
        raise ValueError("x" * 2 * TRACEBACK_LENGTH + "the end")

    outcome = run_objective(objective)
    assert len(outcome.traceback) == TRACEBACK_LENGTH
    assert outcome.traceback.rstrip().endswith("the end")


def test_keyboard_interrupt_is_not_a_failure_of_the_trial():
    def objective(params):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_objective(objective)


@pytest.mark.parametrize("epochs", [2.5, "3"])
def test_epochs_are_whole_numbers(epochs):
    assert fit_arguments_of({"epochs": 3.0, "batch_size": np.int64(8)}) == {"epochs": 3, "batch_size": 8}
    with pytest.raises(ConfigurationError, match=rf"'epochs' is {epochs!r}, and fit takes whole numbers: use integer"):
        fit_arguments_of({"epochs": epochs})


# Several metrics


class Size(keras.callbacks.Callback):
    """Adds a metric with given values to the logs."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes

    def on_epoch_end(self, epoch, logs=None):
        logs["size"] = self.sizes[epoch]


def test_the_metrics_of_the_best_epoch_count():
    driver = Driver()
    callbacks = [SetWeights(1.0, 0.25, 0.5), Size(7, 8, 9)]
    outcome = run_fit(metric=("loss", "size"), send=driver, callbacks=callbacks)
    best = int(np.argmin([loss for _, loss in driver.reports]))
    assert outcome.values == (driver.reports[best][1], (7.0, 8.0, 9.0)[best])
    assert (outcome.value, outcome.best_epoch) == (outcome.values[0], best + 1)
    assert outcome.history["size"] == [7.0, 8.0, 9.0]


def test_a_second_metric_that_is_missing_or_not_finite():
    outcome = run_fit(metric=("loss", "size"))
    assert outcome.is_definition_error
    assert outcome.error.startswith("metric='size' is not in the logs of fit. Known: 'loss'.")

    outcome = run_fit(metric=("loss", "size"), callbacks=[Size(7, math.nan, 9)])
    assert (outcome.best_epoch, outcome.values[1], len(outcome.history["size"])) == (1, 7.0, 2)
    assert outcome.error == "the value of 'size' in epoch 2 is not finite: the trial ended there"


def test_a_callback_that_reports_more_metrics_than_the_search_has():
    """The trial is pruned with the value of the first one; those that follow may be anything."""

    def objective(params):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for _ in range(2):  # the second call ends at its begin
            model.fit(**DATA, epochs=3, verbose=0, callbacks=[Size(7, math.nan, 9), ReportCallback(("loss", "size"))])
        return 0.5

    outcome = run_objective(objective, send=Driver(CONTINUE, PRUNE))
    assert (outcome.status, outcome.best_epoch, outcome.values) == (PRUNED, 2, (outcome.value,))


@pytest.mark.parametrize("returned", [(0.5, 7), np.array([0.5, 7.0]), {"loss": [np.float32(0.5), 7]}])
def test_an_objective_may_return_several_losses(returned):
    outcome = run_objective(lambda params: returned, metrics=("loss", "size"))
    assert (outcome.status, outcome.value, outcome.values) == (OK, 0.5, (0.5, 7.0))


@pytest.mark.parametrize("returned", [0.5, (0.5,), (0.5, "7"), "ab", {"loss": {"a": 1, "b": 2}}])
def test_an_objective_must_return_a_number_for_each_metric(returned):
    outcome = run_objective(lambda params: returned, metrics=("loss", "size"))
    assert outcome.is_definition_error
    assert "expected a sequence of 2 numbers (loss, size)" in outcome.error


def test_one_of_several_losses_that_is_not_finite():
    outcome = run_objective(lambda params: (0.5, math.nan), metrics=("loss", "size"))
    assert (outcome.status, outcome.value, outcome.values) == (FAILED, None, ())
    assert outcome.error == "the objective returned the loss (0.5, nan)"


def test_reports_of_an_objective_are_of_the_first_metric():
    def objective(params):
        for loss in (0.5, 0.25, 0.75):
            report(loss, size=3)
        return 0.25, 3

    driver = Driver()
    outcome = run_objective(objective, send=driver, metrics=("loss", "size"))
    assert (outcome.values, outcome.best_epoch, len(driver.reports)) == ((0.25, 3.0), 2, 3)
    stopped = run_objective(objective, send=Driver(CONTINUE, STOP), metrics=("loss", "size"))
    assert (stopped.status, stopped.value) == (STOPPED, None)  # the others are unknown
