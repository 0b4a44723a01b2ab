"""The objectives of trials, their reports and their outcomes, in this process."""

import math
from contextlib import suppress

import keras
import numpy as np
import pytest

from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.ledger import CONTINUE, PRUNE, STOP
from sparkkeras.hyperopt.objective import (
    EXTRA_LENGTH,
    CallObjective,
    Fit,
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
    """Records reports, and replies with the given replies or raises them, in order."""

    def __init__(self, *replies):
        self.reports, self._replies = [], list(replies)

    def __call__(self, epoch, loss):
        self.reports.append((epoch, loss))
        reply = self._replies.pop(0) if self._replies else CONTINUE
        if isinstance(reply, BaseException):
            raise reply
        return reply


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
    """Sets all weights to a given value in each epoch; the last one counts for all later epochs."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def on_epoch_begin(self, epoch, logs=None):
        self.value = self.values[min(epoch, len(self.values) - 1)]

    def on_train_batch_end(self, batch, logs=None):
        self.model.set_weights([np.full_like(weight, self.value) for weight in self.model.get_weights()])


class Logs(keras.callbacks.Callback):
    """Adds a metric with a given value to the logs of each epoch, unless it is ``None``."""

    def __init__(self, name, *values):
        super().__init__()
        self.name, self.values = name, values

    def on_epoch_end(self, epoch, logs=None):
        if self.values[epoch] is not None:
            logs[self.name] = self.values[epoch]


def run_fit(build=build, params=None, data=DATA, *, metric="loss", send=None, seed=3, sign=1.0, has_rows=True, **arguments):
    given, metrics = {"epochs": 3, "batch_size": 8, **arguments}, (metric,) if isinstance(metric, str) else metric
    fit = Fit(ByValue.dump({"model": build, **given}, "arguments"), metrics, has_rows)
    return run_trial(fit, params or {"lr": 0.1}, data, seed, send or Driver(), sign, len(metrics))


def run_objective(function, params=None, *, send=None, sign=1.0, metrics=("loss",), **data):
    call = CallObjective(ByValue.dump(function, "objective"), bool(data), metrics)
    return run_trial(call, params, data.get("data"), 3, send or Driver(), sign, len(metrics))


def assert_error(outcome, words, is_of_every_trial=False):
    """Check that the trial has an error with these words, or none."""
    assert words in outcome.error
    assert bool(words) == bool(outcome.error)
    assert outcome.is_definition_error == is_of_every_trial


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
        model.compile("sgd", loss, run_eagerly=True)  # JAX would compile the first value into the step
        return model

    history = run_fit(annealed, callbacks=[Anneal()]).history["loss"]
    assert history[0] > 0
    assert history[1:] == [0, 0]


def test_a_tuple_of_inputs_has_the_order_in_which_the_model_was_built():
    def in_a_dict(params):
        b, c, a = (keras.Input((2,), name=name) for name in "bca")
        output = keras.layers.Dense(1)(keras.layers.Concatenate()([a, b, c]))
        model = keras.Model({"b": b, "others": {"c": c, "a": a}}, output)
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    given = {"b": X, "others": {"c": 2 * X, "a": 3 * X}}
    values = [
        run_fit(in_a_dict, data={"x": x, "y": DATA["y"], "validation_data": (x, DATA["y"])}, epochs=1).history
        for x in (given, [X, 2 * X, 3 * X], {"b": X, "others/a": 3 * X, "others/c": 2 * X})
    ]
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize("last", [CONTINUE, StopWork()], ids=["ends", "is stopped during the report"])
def test_fit_keeps_the_weights_of_its_best_epoch(last):
    driver = Driver(CONTINUE, last)
    given = {"validation_data": (X, X[:, :1]), "callbacks": [SetWeights(3.0, 0.5, 2.0)]}
    outcome = run_fit(metric="val_loss", send=driver, **given)
    values = outcome.history["val_loss"]
    assert (outcome.status, outcome.error) == (OK if last == CONTINUE else STOPPED, "")
    assert (outcome.value, outcome.best_epoch) == (values[1], 2)
    assert set(outcome.history) == {"loss", "val_loss"}
    assert driver.reports == list(enumerate(values, 1))
    assert outcome.suffix == "npz"
    assert [set(weight.ravel()) for weight in unpack_weights(outcome.model)] == [{0.5}, {0.5}]


def test_fit_arguments_may_come_from_hyper_parameters_and_the_builder():
    plain = run_fit(params={"lr": 0.1, "epochs": 2.0, "batch_size": 4.0, "callbacks": [SetWeights(0.0)]}, epochs=1)
    from_builder = run_fit(lambda params: (build(params), {"epochs": 4}), {"lr": 0.1, "epochs": 2})
    assert (len(plain.history["loss"]), len(from_builder.history["loss"])) == (2, 4)
    assert set(unpack_weights(plain.model)[0].ravel()) == {0.0}


@pytest.mark.parametrize(
    ("given", "status", "best_epoch", "epochs", "error"),
    [
        ({"send": Driver(CONTINUE, PRUNE)}, PRUNED, 2, 2, ""),
        ({"send": Driver(CONTINUE, STOP)}, STOPPED, 2, 2, ""),
        ({"callbacks": [RaiseAt(StopWork(), 1)]}, STOPPED, None, 0, ""),
        ({"callbacks": [RaiseAt(StopWork(), 3)]}, STOPPED, 2, 2, ""),
        ({"callbacks": [SetWeights(0.5, math.nan)]}, OK, 2, 3, "epoch 3 is not finite"),
        ({"params": {"lr": math.nan}, "batch_size": 1}, FAILED, None, 1, "epoch 1 is not finite"),
        ({"callbacks": [RaiseAt(ValueError("too large\nby far"), 2)]}, FAILED, None, 1, "ValueError: too large\nby far"),
    ],
    ids=range(7),
)
def test_a_fit_that_ends_early_keeps_its_best_epoch(given, status, best_epoch, epochs, error):
    outcome = run_fit(epochs=9, **given)
    losses = outcome.history.get("loss", [])
    assert (outcome.status, outcome.best_epoch, len(losses)) == (status, best_epoch, epochs)
    assert outcome.value == (losses[best_epoch - 1] if best_epoch else None)
    assert bool(outcome.model) == bool(best_epoch)
    assert_error(outcome, error)


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
        ({"build": lambda params: None}, "returned None"),
        ({"build": lambda params: (build(params), {"epoch": 3})}, "'epoch'"),
        ({"build": not_compiled}, "cannot be trained"),
        ({"build": neither}, "model.compile"),
        ({"build": not_built, "has_rows": False}, "keras.Input"),
        ({"metric": "val_loss"}, "validation_split="),
        ({"epochs": 0}, "metric='loss'"),
        ({"params": {"lr": 0.1, "epochs": 2.5}}, "'epochs' is 2.5"),
        ({"data": {**DATA, "validation_data": (X, DATA["y"])}, "validation_split": 0.5}, "one of validation_split"),
        ({"data": {"x": X[:, :1], "y": DATA["y"]}}, "Reshape"),
        ({"build": classifier, "data": {"x": X, "y": np.arange(8) % 4}}, "from 0 to 3"),
    ],
    ids=range(11),
)
def test_errors_that_every_trial_would_raise_are_marked_as_definition_errors(given, words):
    outcome = run_fit(**given)
    assert outcome.status == FAILED
    assert_error(outcome, words, is_of_every_trial=True)


def test_an_unbuilt_model_is_built_from_the_rows():
    outcome = run_fit(not_built)
    assert (outcome.status, len(unpack_weights(outcome.model))) == (OK, 2)


@pytest.mark.parametrize(
    ("given", "validated"),
    [
        ({"validation_split": 0.5, "validation_freq": 2}, [2, 4]),
        ({"validation_split": 0.5, "validation_freq": [2, 3]}, [2, 3]),
        ({"callbacks": [Logs("val_loss", 1.0, None, 0.5, None)]}, [1, 3]),
    ],
    ids=range(3),
)
def test_epochs_without_validation_are_not_reported(given, validated):
    driver = Driver()
    outcome = run_fit(metric="val_loss", send=driver, epochs=4, **given)
    assert [epoch for epoch, _ in driver.reports] == validated
    assert outcome.best_epoch in validated
    assert len(outcome.history["loss"]) == 4


def test_weights_of_any_type_can_be_packed():
    weights = [np.arange(3), np.zeros((0, 2)), keras.ops.convert_to_numpy(keras.ops.ones(2, "bfloat16"))]
    packed = [(each.dtype, each.tolist()) for each in unpack_weights(pack_weights(weights))]
    assert packed == [(np.int64, [0, 1, 2]), (np.float64, []), (np.float32, [1.0, 1.0])]


# Functions


INVALID = "an error of every trial"


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (np.float32(0.25), OK, ""),
        ({"loss": np.array(0.25), "status": "ok"}, OK, ""),
        ({"status": "fail", "why": "cold"}, FAILED, "'fail'"),
        ({"loss": -math.inf, "why": "cold"}, FAILED, "loss -inf"),
        ({"loss": 0.5, "model": "m"}, INVALID, "'m' as its model"),
        (None, INVALID, "return statement"),
        ({}, INVALID, "key 'loss'"),
        ({"loss": "5" * 300}, INVALID, "... (str)"),
        ({"loss": 0.5, "status": "suspended"}, INVALID, "has not ended"),
    ],
    ids=range(9),
)
def test_an_objective_may_return_a_loss_in_several_forms(given, status, words):
    outcome = run_objective(lambda params: given)
    assert outcome.status == (FAILED if status == INVALID else status)
    assert (outcome.value, outcome.best_epoch, outcome.model) == (0.25 if status == OK else None, None, b"")
    assert outcome.extra == ({"why": "cold"} if status == FAILED else {})
    assert_error(outcome, words, status == INVALID)


def test_a_loss_equal_to_the_best_report_has_its_epoch():
    def objective(params):
        for value in (0.5, 0.0, 0.75, 0.0):
            report(np.float32(value), accuracy=1 - value)
        return params

    driver = Driver()
    outcome = run_objective(objective, 0.0, send=driver)
    assert (outcome.value, outcome.best_epoch) == (0.0, 2)
    assert outcome.history == {"loss": [0.5, 0.0, 0.75, 0.0], "accuracy": [0.5, 1.0, 0.25, 1.0]}
    assert driver.reports == [(1, 0.5), (2, 0.0), (3, 0.75), (4, 0.0)]
    assert run_objective(objective, -0.1).best_epoch is None


def test_further_results_of_an_objective_become_json_values_of_limited_length():
    given = {"n": np.int64(3), "a": np.arange(2), "nested": {"b": [1, None]}, "o": {1}, 7: "seven"}
    extra = dict(run_objective(lambda params: {"loss": 0.5, "long": np.zeros(EXTRA_LENGTH), **given}).extra)
    assert len(extra.pop("long")) < 200
    assert extra == {"n": 3, "a": [0, 1], "nested": {"b": [1, None]}, "o": "{1}", "7": "seven"}


@pytest.mark.parametrize(
    ("reports", "end", "replies", "status", "best", "error"),
    [
        ([0.75, 0.5, 0.8], 0.0, [CONTINUE, PRUNE], PRUNED, (0.5, 2), ""),
        ([0.75, 0.5], StopWork(), [], STOPPED, (0.5, 2), ""),
        ([0.75, 0.5], math.nan, [], OK, (0.5, 2), "the loss nan"),
        ([0.75, math.inf], 0.0, [], OK, (0.75, 1), "epoch 2 is not finite"),
        ([0.75, 0.5], SystemExit(3), [], FAILED, (None, None), "SystemExit: 3"),
    ],
    ids=range(5),
)
def test_an_objective_that_ends_early_keeps_its_best_report(reports, end, replies, status, best, error):
    def objective(params):
        for value in reports:
            report(value)
        if isinstance(end, BaseException):
            raise end
        return end

    outcome = run_objective(objective, send=Driver(*replies))
    assert (outcome.status, (outcome.value, outcome.best_epoch)) == (status, best)
    assert outcome.history == {"loss": reports[:2]}
    assert ("in objective" in outcome.traceback) == (status == FAILED)
    assert_error(outcome, error)


def test_keyboard_interrupt_is_not_a_failure_of_the_trial():
    def objective(params):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_objective(objective)


# Several metrics


def test_the_metrics_of_the_best_epoch_count():
    driver = Driver()
    outcome = run_fit(metric=("loss", "size"), send=driver, callbacks=[SetWeights(1.0, 0.25, 0.5), Logs("size", 7, 8, 9)])
    losses = [loss for _, loss in driver.reports]
    assert outcome.values == (min(losses), (7.0, 8.0, 9.0)[np.argmin(losses)])
    assert (outcome.value, outcome.best_epoch) == (min(losses), np.argmin(losses) + 1)
    assert outcome.history["size"] == [7.0, 8.0, 9.0]


def test_a_second_metric_that_is_missing_or_not_finite():
    assert_error(run_fit(metric=("loss", "size")), "metric='size'", is_of_every_trial=True)
    outcome = run_fit(metric=("loss", "size"), callbacks=[Logs("size", 7, math.nan, 9)])
    assert (outcome.best_epoch, outcome.values[1], len(outcome.history["size"])) == (1, 7.0, 2)
    assert_error(outcome, "'size' in epoch 2")


def test_a_callback_that_reports_more_metrics_than_the_search_has():
    """The trial is pruned with the value of the first one; those that follow may be anything."""

    def objective(params):
        model = build({"lr": 0.01})
        for _ in range(2):  # the second call ends at its begin
            model.fit(
                **DATA, epochs=3, verbose=0, callbacks=[Logs("size", 7, math.nan, 9), ReportCallback(("loss", "size"))]
            )
        return 0.5

    outcome = run_objective(objective, send=Driver(CONTINUE, PRUNE))
    assert (outcome.status, outcome.best_epoch, outcome.values) == (PRUNED, 2, (outcome.value,))


@pytest.mark.parametrize(
    ("returned", "status", "words"),
    [
        (np.array([0.5, 7.0]), OK, ""),
        ({"loss": [np.float32(0.5), 7]}, OK, ""),
        ((0.5, math.nan), FAILED, "(0.5, nan)"),
        *((each, INVALID, "(loss, size)") for each in ((0.5,), (0.5, "7"), "ab")),
    ],
    ids=range(6),
)
def test_an_objective_may_return_several_losses(returned, status, words):
    outcome = run_objective(lambda params: returned, metrics=("loss", "size"))
    assert outcome.status == (FAILED if status == INVALID else status)
    assert (outcome.value, outcome.values) == ((0.5, (0.5, 7.0)) if status == OK else (None, ()))
    assert_error(outcome, words, status == INVALID)


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


# The callback


def test_reports_outside_of_a_search_do_nothing():
    assert report(math.nan, accuracy=0.9) is None
    callback = ReportCallback("no such metric")
    build({"lr": 0.1}).fit(**DATA, verbose=0, callbacks=[callback])
    assert callback.best_weights is None


def test_the_users_exception_handlers_do_not_catch_the_end_of_a_trial():
    def objective(params):
        with suppress(Exception):
            report(0.5)
        raise AssertionError("the trial continues")

    assert run_objective(objective, send=Driver(STOP)).status == STOPPED


def test_fit_may_be_called_for_one_epoch_at_a_time():
    def objective(epochs):
        model, callback = build({"lr": 0.01}), ReportCallback("loss")
        for _ in range(epochs):
            model.fit(**DATA, batch_size=8, verbose=0, callbacks=[callback])
        return 7.0

    outcome = run_objective(objective, 9, send=Driver(CONTINUE, PRUNE))
    assert (outcome.status, outcome.best_epoch, len(outcome.history["loss"])) == (PRUNED, 2, 2)
    assert run_objective(objective, 2, send=Driver(CONTINUE, PRUNE)).status == OK  # it was the last epoch


def test_other_metrics_may_be_lists_or_not_finite():
    given = {"epochs": 1, "callbacks": [Logs("f1_score", np.array([0.25, 1.0], np.float32)), Logs("other", math.nan)]}
    outcome = run_fit(**given)
    assert (outcome.status, outcome.error, outcome.history["f1_score"]) == (OK, "", [[0.25, 1.0]])
    assert "'f1_score' has 2 values" in run_fit(metric="f1_score", **given).error
