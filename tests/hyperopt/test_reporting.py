"""Reports of a running trial, and the driver's replies."""

import math
from contextlib import suppress

import numpy as np
import pytest

from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.ledger import CONTINUE, PRUNE, STOP
from sparkkeras.hyperopt.reporting import ReportCallback, Reporter, SearchDefinitionError, TrialEnd, report
from sparkkeras.hyperopt.subprocess_task import StopWork
from sparkkeras.hyperopt.trials import OK, PRUNED, STOPPED


class Driver:
    """Records the reported epochs, and returns the given replies in order."""

    def __init__(self, *replies):
        self.epochs, self._replies = [], list(replies)

    def __call__(self, epoch, value):
        self.epochs.append(epoch)
        return self._replies.pop(0) if self._replies else CONTINUE


@pytest.fixture
def trial(monkeypatch):
    """Starts a trial in this process; returns its reporter."""

    def begin(*replies):
        reporter = Reporter(Driver(*replies), 1.0)
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


# Reports of an objective


def test_the_users_exception_handlers_do_not_catch_the_end_of_a_trial(trial):
    def caught():
        with suppress(Exception):
            report(0.5)

    trial(STOP)
    with pytest.raises(TrialEnd):
        caught()


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


# Reports of fit


def test_other_metrics_may_be_not_finite(trial):
    reporter = trial()
    assert not run_epochs(ReportCallback("val_loss"), {"loss": math.nan, "val_loss": 0.5}).stop_training
    assert reporter.best == 0.5
    assert math.isnan(reporter.history["loss"][0])


@pytest.mark.parametrize(("frequency", "validated"), [(2, [2, 4]), ([2, 3], [2, 3]), (1, [1, 3])])
def test_epochs_without_validation_are_not_reported(trial, frequency, validated):
    epochs = [{"loss": 1.0, **({"val_loss": 1 / epoch} if epoch in validated else {})} for epoch in range(1, 5)]
    reporter = trial()
    run_epochs(ReportCallback("val_loss", frequency), *epochs)
    assert reporter._send.epochs == validated
    assert (reporter.best_epoch, len(reporter.history["loss"])) == (validated[-1], 4)
    trial()
    with pytest.raises(SearchDefinitionError, match="metric='val_acc' is not in the logs"):
        run_epochs(ReportCallback("val_acc", frequency), *epochs)
