"""Reports of a running trial, and the driver's replies."""

import math
from contextlib import suppress

import keras
import numpy as np
import pytest

from sparkkeras.hyperopt import report as public_report
from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.ledger import CONTINUE, PRUNE, STOP
from sparkkeras.hyperopt.reporting import ReportCallback, Reporter, SearchDefinitionError, TrialEnd, report, unknown_metric
from sparkkeras.hyperopt.subprocess_task import StopWork
from sparkkeras.hyperopt.trials import OK, PRUNED, STOPPED


class Driver:
    """Records the reported values and epochs, and returns the given replies in order."""

    def __init__(self, *replies):
        self.values, self.epochs, self._replies = [], [], list(replies)

    def __call__(self, epoch, value):
        self.values.append(value)
        self.epochs.append(epoch)
        return self._replies.pop(0) if self._replies else CONTINUE


@pytest.fixture
def trial(monkeypatch):
    """Starts a trial in this process; returns its reporter."""

    def begin(*replies, sign=1.0):
        reporter = Reporter(Driver(*replies), sign)
        monkeypatch.setattr(reporting, "current", reporter)
        return reporter

    return begin


class FakeModel:
    """The part of a model that the callback uses."""

    def __init__(self):
        self.stop_training = False
        self.weights = [np.zeros(2)]

    def get_weights(self):
        return self.weights


def run_epochs(callback, *epochs):
    """Call the callback for epochs with these logs; returns the model, whose weights equal the number of the epoch."""
    model = FakeModel()
    callback.set_model(model)
    callback.set_params({"epochs": 99})
    for epoch, logs in enumerate(epochs):
        model.weights[0][:] = epoch + 1
        callback.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    return model


# Outside of a search


def test_reports_outside_of_a_search_do_nothing():
    assert reporting.current is None
    assert report(0.5, accuracy=0.9) is None
    assert report(math.nan) is None
    callback = ReportCallback("no such metric")
    assert not run_epochs(callback, {"loss": 0.5}, {"loss": math.nan}).stop_training
    assert callback.best_weights is None


def test_report_is_exported():
    assert public_report is report


# Reports of an objective


def test_losses_go_to_the_driver_and_metrics_to_the_history(trial):
    reporter = trial()
    report(0.5, accuracy=0.75)
    report(np.float32(0.25), accuracy=1)
    assert reporter._send.values == [0.5, 0.25]
    assert reporter._send.epochs == [1, 2]
    assert reporter.epoch == 2
    assert reporter.history == {"loss": [0.5, 0.25], "accuracy": [0.75, 1.0]}
    assert all(type(value) is float for values in reporter.history.values() for value in values)
    assert reporter.status == OK
    assert not reporter.should_end


@pytest.mark.parametrize(("sign", "best"), [(1.0, (0.2, 3)), (-1.0, (0.7, 2))])
def test_the_best_value_is_kept_with_its_epoch(trial, sign, best):
    reporter = trial(sign=sign)
    for value in (0.5, 0.7, 0.2, 0.7, 0.2):
        report(value)
    assert (reporter.best, reporter.best_epoch) == best
    assert reporter._send.values == [0.5, 0.7, 0.2, 0.7, 0.2]


def test_zero_counts_as_a_value(trial):
    reporter = trial()
    report(0.0)
    report(0.5)
    assert (reporter.best, reporter.best_epoch) == (0.0, 1)


@pytest.mark.parametrize(("reply", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_report_raises_if_the_trial_should_end(trial, reply, status):
    reporter = trial(CONTINUE, reply)
    report(0.5)
    with pytest.raises(TrialEnd):
        report(0.7)
    assert reporter.status == status
    assert (reporter.best, reporter.best_epoch, reporter.diverged_at) == (0.5, 1, None)
    assert reporter.history == {"loss": [0.5, 0.7]}


def test_the_users_exception_handlers_do_not_catch_the_end_of_a_trial(trial):
    def caught():
        with suppress(Exception):
            report(0.5)

    trial(STOP)
    with pytest.raises(TrialEnd):
        caught()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_ends_the_trial_and_is_not_sent(trial, value):
    reporter = trial()
    report(0.5)
    with pytest.raises(TrialEnd):
        report(value)
    assert reporter._send.values == [0.5]
    assert (reporter.diverged_at, reporter.epoch) == (2, 2)
    assert (reporter.best, reporter.best_epoch, reporter.status) == (0.5, 1, OK)
    assert len(reporter.history["loss"]) == 2


def test_a_trial_that_diverges_in_its_first_epoch_has_no_best_value(trial):
    reporter = trial()
    with pytest.raises(TrialEnd):
        report(math.nan)
    assert (reporter.best, reporter.best_epoch, reporter.diverged_at) == (None, None, 1)


@pytest.mark.parametrize("reply", [PRUNE, STOP])
def test_the_last_epoch_is_not_pruned(reply):
    reporter = Reporter(Driver(reply, reply), 1.0)
    reporter.log({"loss": 0.5})
    reporter.record(0.5, is_last=True)
    assert reporter.status == OK
    reporter.log({"loss": 0.5})
    reporter.record(0.5)
    assert reporter.status != OK


@pytest.mark.parametrize(("reply", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_fit_may_be_called_for_one_epoch_at_a_time(trial, reply, status):
    reporter, callback = trial(CONTINUE, reply), ReportCallback("loss")
    callback.set_model(FakeModel())
    callback.set_params({"epochs": 1})
    for loss in (0.5, 0.4):
        callback.on_train_begin()
        callback.on_epoch_end(0, {"loss": loss})
    assert (reporter.status, callback.model.stop_training) == (OK, False)  # it may have been the last epoch
    with pytest.raises(TrialEnd) as end:
        callback.on_train_begin()
    reporter.end(end.value)
    assert (reporter.status, reporter.best, reporter.best_epoch) == (status, 0.4, 2)


def test_weights_are_kept_before_the_report_which_may_end_the_trial(trial):
    callback = ReportCallback("loss")
    kept = []

    def send(epoch, loss):
        kept.append((callback.best_weights[0].tolist(), loss))
        if epoch == 2:
            raise StopWork
        return CONTINUE

    reporter = trial()
    reporter._send = send
    with pytest.raises(StopWork):
        run_epochs(callback, {"loss": 0.5}, {"loss": 0.4})
    assert kept == [([1.0, 1.0], 0.5), ([2.0, 2.0], 0.4)]
    assert (reporter.best, reporter.best_epoch) == (0.4, 2)


def test_metrics_with_several_values_are_lists(trial):
    reporter = trial()
    run_epochs(ReportCallback("loss"), {"loss": 0.5, "f1_score": np.array([0.25, 1.0], np.float32)})
    assert reporter.history == {"loss": [0.5], "f1_score": [[0.25, 1.0]]}
    with pytest.raises(SearchDefinitionError, match="metric='f1_score' has 2 values.*average="):
        run_epochs(ReportCallback("f1_score"), {"loss": 0.5, "f1_score": np.array([0.25, 1.0], np.float32)})


@pytest.mark.parametrize(("reply", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_trial_end_keeps_the_status_from_the_reply(reply, status):
    reporter = Reporter(Driver(reply), 1.0)
    reporter.log({})
    reporter.record(0.5)
    reporter.end(TrialEnd())
    assert reporter.status == status
    diverged = Reporter(Driver(), 1.0)
    diverged.record(math.nan)
    diverged.end(TrialEnd())
    assert diverged.status == OK


def test_another_exception_means_that_the_trial_was_stopped():
    reporter = Reporter(Driver(), 1.0)
    reporter.log({"loss": 0.5})
    reporter.record(0.5)
    reporter.end(StopWork())
    assert reporter.status == STOPPED
    assert (reporter.best, reporter.should_end) == (0.5, True)


# Reports of fit


def test_fit_reports_its_metric_and_keeps_the_best_weights(trial):
    reporter = trial(sign=-1.0)
    callback = ReportCallback("accuracy")
    model = run_epochs(callback, *({"loss": 1.0, "accuracy": value} for value in (0.5, 0.9, 0.7)))
    assert reporter._send.values == [0.5, 0.9, 0.7]
    assert reporter.history == {"loss": [1.0] * 3, "accuracy": [0.5, 0.9, 0.7]}
    assert (reporter.best, reporter.best_epoch) == (0.9, 2)
    assert not model.stop_training
    assert [list(weight) for weight in callback.best_weights] == [[2.0, 2.0]]


@pytest.mark.parametrize(("reply", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_fit_stops_if_the_trial_should_end(trial, reply, status):
    reporter = trial(CONTINUE, reply)
    model = run_epochs(ReportCallback("loss"), *({"loss": value} for value in (0.5, 0.4, 0.3)))
    assert model.stop_training
    assert reporter.status == status
    assert (reporter.best, reporter.best_epoch, reporter.history) == (0.4, 2, {"loss": [0.5, 0.4]})


def test_fit_stops_where_it_diverges_and_keeps_its_best_weights(trial):
    reporter = trial()
    callback = ReportCallback("loss")
    model = run_epochs(callback, {"loss": 0.5}, {"loss": math.nan}, {"loss": 0.1})
    assert model.stop_training
    assert reporter.diverged_at == 2
    assert reporter.best == 0.5
    assert callback.best_weights[0][0] == 1


def test_other_metrics_may_be_not_finite(trial):
    reporter = trial()
    assert not run_epochs(ReportCallback("val_loss"), {"loss": math.nan, "val_loss": 0.5}).stop_training
    assert reporter.best == 0.5
    assert math.isnan(reporter.history["loss"][0])


def test_an_unknown_metric_is_reported_with_the_known_ones(trial):
    trial()
    with pytest.raises(SearchDefinitionError, match="metric='acc' is not in the logs of fit. Known: 'accuracy', 'loss'"):
        run_epochs(ReportCallback("acc"), {"loss": 0.5, "accuracy": 0.5})
    with pytest.raises(SearchDefinitionError, match="Did you mean 'val_accuracy'"):
        run_epochs(ReportCallback("val_accurracy"), {"val_accuracy": 0.5})


def test_a_missing_validation_metric_suggests_validation_data(trial):
    trial()
    with pytest.raises(SearchDefinitionError, match="need validation data: give validation_split= or validation_data="):
        run_epochs(ReportCallback(), {"loss": 0.5})
    assert "validation_split" not in unknown_metric("val_acc", ["val_loss"])
    assert "validation_split" not in unknown_metric("acc", ["loss"])


def test_epochs_without_validation_are_not_reported(trial):
    reporter = trial()
    run_epochs(ReportCallback(), {"loss": 1.0, "val_loss": 0.5}, {"loss": 0.9}, {"loss": 0.8, "val_loss": 0.4})
    assert reporter._send.values == [0.5, 0.4]
    assert reporter._send.epochs == [1, 3]
    assert (reporter.best_epoch, reporter.epoch) == (3, 3)
    assert reporter.history == {"loss": [1.0, 0.9, 0.8], "val_loss": [0.5, 0.4]}


@pytest.mark.parametrize("frequency", [2, [2, 4]])
def test_validation_may_start_at_a_later_epoch(trial, frequency):
    epochs = [{"loss": 1.0}, {"loss": 0.9, "val_loss": 0.5}, {"loss": 0.8}, {"loss": 0.7, "val_loss": 0.4}]
    reporter = trial()
    run_epochs(ReportCallback("val_loss", frequency), *epochs)
    assert reporter._send.values == [0.5, 0.4]
    assert reporter._send.epochs == [2, 4]
    trial()
    with pytest.raises(SearchDefinitionError, match="metric='val_acc' is not in the logs"):
        run_epochs(ReportCallback("val_acc", frequency), *epochs)


def test_reports_of_keras_fit(trial):
    reporter = trial(CONTINUE, PRUNE)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2), np.float32)
    callback = ReportCallback()
    history = model.fit(x, x[:, :1], epochs=5, validation_split=0.5, callbacks=[callback], verbose=0).history
    assert reporter.history == history
    assert len(history["loss"]) == 2
    assert reporter.status == PRUNED
    for kept, weight in zip(callback.best_weights, model.get_weights(), strict=True):
        assert np.array_equal(kept, weight)


@pytest.mark.parametrize("reply", [PRUNE, STOP])
def test_the_last_epoch_of_fit_is_not_pruned(trial, reply):
    reporter = trial(reply)
    callback = ReportCallback("loss")
    callback.set_model(FakeModel())
    callback.set_params({"epochs": 1})
    callback.on_epoch_end(0, {"loss": 0.5})
    assert reporter.status == OK
