"""Callbacks are checked on the driver before training starts."""

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, SparkEnsemble, SparkModel
from sparkkeras.events import EpochMeasured, Updates
from sparkkeras.modeling import metrics
from sparkkeras.parameter.exchange import ParameterServerStats
from sparkkeras.training.callbacks import check_directions, check_monitors, check_names
from sparkkeras.training.parameter_server import measured
from tests.models import regression

EarlyStopping, ReduceLROnPlateau = keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau
X, Y = np.zeros((8, 3), np.float32), np.zeros((8, 1), np.float32)
NAMES = ("loss", "mae")
EAGER = {"run_eagerly": True}


class Adds(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["added"] = 1.0


@pytest.mark.parametrize(
    ("callback", "validates", "words"),
    [
        (EarlyStopping("val_los"), True, r"EarlyStopping\(monitor='val_los'\).*'loss', 'mae', 'val_loss'.*mean 'val_loss'"),
        (keras.callbacks.ModelCheckpoint("a.keras", "acc", save_best_only=True), True, "monitor='acc'.*Known"),
        (EarlyStopping("learning_rate"), True, "Known"),
        (EarlyStopping("val_mae"), False, "'val_mae'.*pass validation_split="),
    ],
)
def test_an_unknown_monitor_is_reported_with_the_known_names(callback, validates, words):
    with pytest.raises(ConfigurationError, match=words):
        check_names("callbacks", [EarlyStopping("loss"), callback, Adds()], NAMES, validates=validates)


class Computes(EarlyStopping):
    """Computes its monitored value itself."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {"computed": 1.0})


class Looks(EarlyStopping):
    def get_monitor_value(self, logs):
        return 1.0


@pytest.mark.parametrize(
    "callbacks",
    [
        [EarlyStopping(), ReduceLROnPlateau("val_mae"), EarlyStopping("mae")],
        [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate), EarlyStopping("learning_rate")],
        [ReduceLROnPlateau(), EarlyStopping("learning_rate")],
        [keras.callbacks.ModelCheckpoint("{epoch}.keras", "nothing")],  # saves every epoch, regardless of its monitor
        [Adds(), EarlyStopping("added")],
        [Computes("computed")],
        [Looks("elsewhere")],
        [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added=1)), EarlyStopping("added")],
    ],
)
def test_monitors_that_may_exist_are_accepted(callbacks):
    check_names("callbacks", callbacks, NAMES, validates=True)


class CustomStep(keras.Sequential):
    def train_step(self, data):
        return {"anything": 1.0}


def test_without_known_names_every_monitor_with_a_direction_is_accepted():
    model = CustomStep([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    check_monitors([model], {}, [EarlyStopping("anything", mode="min")], [], False, False)
    with pytest.raises(ConfigurationError, match="monitor='anything'.*Set mode="):
        check_monitors([model], {}, [EarlyStopping("anything")], [], False, False)


def two_outputs():
    inputs = keras.Input((3,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("near", "far")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", **EAGER, metrics={"far": ["mae", keras.metrics.RootMeanSquaredError(name="root")]})
    return model


@pytest.mark.core
@pytest.mark.parametrize(
    ("build", "names"),
    [
        (
            lambda: regression(metrics=["acc", keras.metrics.AUC(name="area"), keras.losses.mean_absolute_error], **EAGER),
            {"loss", "acc", "area", "mean_absolute_error"},
        ),
        (two_outputs, {"loss", "near_loss", "far_loss", "far_mae", "far_root"}),
    ],
)
def test_metric_names_are_known_before_training_and_equal_those_of_keras(build, names):
    model = build()
    assert set(metrics.log_names(metrics.with_names(model, {}))) == names
    assert metrics.log_names(model) is None  # its own metrics are chosen by the labels
    y = dict.fromkeys(("near", "far"), Y) if build is two_outputs else Y
    assert set(model.fit(X, y, verbose=0).history) == names
    assert set(metrics.log_names(model)) == names
    assert metrics.with_names(model, {}) is model


def test_fit_checks_callbacks_before_spark_is_needed():
    plain, measured = regression(), regression(metrics=[offset])
    stop = EarlyStopping("offset")
    for callbacks, words in (
        ({"callbacks": EarlyStopping("val_los")}, "val_los"),
        ({"worker_callbacks": EarlyStopping()}, "pass it as callbacks="),
        ({"callbacks": stop}, "'offset', mode='auto'"),
        ({"worker_callbacks": stop}, "'offset', mode='auto'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            SparkModel(measured).fit(X, Y, validation_split=0.5, **callbacks)
    with pytest.raises(ConfigurationError, match="monitor='offset'.*Known: 'loss'"):
        SparkEnsemble([plain, measured], voting="average").fit(X, Y, worker_callbacks=stop)


def test_time_before_the_first_epoch_with_a_parameter_server_is_start_up():
    first, second = ParameterServerStats(seconds=12.0, pushes=20), ParameterServerStats(seconds=13.0, pushes=50)
    assert measured(0, None, first, 100, 2.0) == EpochMeasured(0, 100, 2.0, 10.0, Updates(20, 10.0, {}, 0.0, 0))
    assert measured(1, first, second, 100, 0.5) == EpochMeasured(1, 100, 1.0, 0.0, Updates(30, 30.0, {}, 0.0, 0))


def offset(y_true, y_pred):
    return keras.ops.mean(y_pred - y_true)


@pytest.mark.core
def test_auto_mode_needs_a_metric_with_a_known_direction():
    measured = ["mae", "acc", offset, keras.metrics.MeanMetricWrapper(offset, name="total")]
    known = metrics.with_names(regression(metrics=measured), {"offset": offset})
    for callback in (EarlyStopping("offset", mode="max"), EarlyStopping("val_mae"), ReduceLROnPlateau("acc")):
        check_directions("callbacks", [callback], known)
        assert callback.monitor_op is None  # the callback is unchanged: Keras runs its own check later
    saving = keras.callbacks.ModelCheckpoint("a.keras", "total", save_best_only=True)
    for callback in (EarlyStopping("val_offset"), ReduceLROnPlateau("offset"), saving):
        with pytest.raises(ConfigurationError, match=f"'{callback.monitor}'.*Set mode="):
            check_directions("worker_callbacks", [callback], known)
    with pytest.raises(ConfigurationError, match="far_mae"):
        check_directions("callbacks", [EarlyStopping("far_mae")], metrics.with_names(two_outputs(), {}))
