"""How an objective tells how far it is, and hears that it is hopeless."""

import math
from contextlib import suppress

import keras
import numpy as np
import pytest

from sparkkeras.hyperopt import report as public_report
from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.ledger import GO_ON, PRUNE, STOP
from sparkkeras.hyperopt.reporting import ReportCallback, Reporter, SearchMistakeError, TrialEnd, report, unknown_metric
from sparkkeras.hyperopt.subprocess_task import StopWork
from sparkkeras.hyperopt.trials import OK, PRUNED, STOPPED


class Driver:
    """Writes down the losses that it is told, and their epochs, and answers in turn."""

    def __init__(self, *answers):
        self.told, self.epochs, self._answers = [], [], list(answers)

    def __call__(self, epoch, loss):
        self.told.append(loss)
        self.epochs.append(epoch)
        return self._answers.pop(0) if self._answers else GO_ON


@pytest.fixture
def trial(monkeypatch):
    """Begins a trial in this process; gives its reporter."""

    def begin(*answers, sign=1.0):
        reporter = Reporter(Driver(*answers), sign)
        monkeypatch.setattr(reporting, "current", reporter)
        return reporter

    return begin


class Weights:
    """What a callback sees of a model."""

    def __init__(self):
        self.stop_training = False
        self.weights = [np.zeros(2)]

    def get_weights(self):
        return self.weights


def ran(callback, *epochs):
    """What becomes of a model whose epochs had these logs; the weights are the number of the epoch, in place."""
    model = Weights()
    callback.set_model(model)
    callback.set_params({"epochs": 99})
    for epoch, logs in enumerate(epochs):
        model.weights[0][:] = epoch + 1
        callback.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    return model


# Outside of a search


def test_outside_of_a_search_nothing_happens():
    assert reporting.current is None
    assert report(0.5, accuracy=0.9) is None
    assert report(math.nan) is None
    callback = ReportCallback("no such metric")
    assert not ran(callback, {"loss": 0.5}, {"loss": math.nan}).stop_training
    assert callback.best_weights is None


def test_the_public_name_is_the_same():
    assert public_report is report


# Reports of an objective


def test_losses_go_to_the_driver_and_figures_to_the_history(trial):
    reporter = trial()
    report(0.5, accuracy=0.75)
    report(np.float32(0.25), accuracy=1)
    assert reporter._tell.told == [0.5, 0.25]
    assert reporter._tell.epochs == [1, 2]
    assert reporter.epoch == 2
    assert reporter.history == {"loss": [0.5, 0.25], "accuracy": [0.75, 1.0]}
    assert all(type(value) is float for values in reporter.history.values() for value in values)
    assert reporter.status == OK
    assert not reporter.should_end


@pytest.mark.parametrize(("sign", "best"), [(1.0, (0.2, 3)), (-1.0, (0.7, 2))])
def test_the_best_value_is_remembered_with_its_epoch(trial, sign, best):
    reporter = trial(sign=sign)
    for value in (0.5, 0.7, 0.2, 0.7, 0.2):
        report(value)
    assert (reporter.best, reporter.best_epoch) == best
    assert reporter._tell.told == [sign * value for value in (0.5, 0.7, 0.2, 0.7, 0.2)]


def test_zero_is_a_value(trial):
    reporter = trial()
    report(0.0)
    report(0.5)
    assert (reporter.best, reporter.best_epoch) == (0.0, 1)


@pytest.mark.parametrize(("answer", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_a_trial_that_shall_end_does_not_come_back_from_its_report(trial, answer, status):
    reporter = trial(GO_ON, answer)
    report(0.5)
    with pytest.raises(TrialEnd):
        report(0.7)
    assert reporter.status == status
    assert (reporter.best, reporter.best_epoch, reporter.diverged_at) == (0.5, 1, None)
    assert reporter.history == {"loss": [0.5, 0.7]}


def test_the_end_of_a_trial_is_not_caught_by_the_persons_code(trial):
    def caught():
        with suppress(Exception):
            report(0.5)

    trial(STOP)
    with pytest.raises(TrialEnd):
        caught()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_ends_the_trial_and_stays_here(trial, value):
    reporter = trial()
    report(0.5)
    with pytest.raises(TrialEnd):
        report(value)
    assert reporter._tell.told == [0.5]
    assert (reporter.diverged_at, reporter.epoch) == (2, 2)
    assert (reporter.best, reporter.best_epoch, reporter.status) == (0.5, 1, OK)
    assert len(reporter.history["loss"]) == 2


def test_a_trial_that_diverges_at_once_has_no_best_value(trial):
    reporter = trial()
    with pytest.raises(TrialEnd):
        report(math.nan)
    assert (reporter.best, reporter.best_epoch, reporter.diverged_at) == (None, None, 1)


@pytest.mark.parametrize("answer", [PRUNE, STOP])
def test_who_has_come_to_the_last_epoch_is_not_ended(answer):
    reporter = Reporter(Driver(answer, answer), 1.0)
    reporter.log({"loss": 0.5})
    reporter.take(0.5, is_last=True)
    assert reporter.status == OK
    reporter.log({"loss": 0.5})
    reporter.take(0.5)
    assert reporter.status != OK


@pytest.mark.parametrize(("answer", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_fit_may_be_called_for_one_epoch_at_a_time(trial, answer, status):
    reporter, callback = trial(GO_ON, answer), ReportCallback("loss")
    callback.set_model(Weights())
    callback.set_params({"epochs": 1})
    for loss in (0.5, 0.4):
        callback.on_train_begin()
        callback.on_epoch_end(0, {"loss": loss})
    assert (reporter.status, callback.model.stop_training) == (OK, False)  # it may have been the last one
    with pytest.raises(TrialEnd) as end:
        callback.on_train_begin()
    reporter.end(end.value)
    assert (reporter.status, reporter.best, reporter.best_epoch) == (status, 0.4, 2)


def test_weights_are_kept_before_the_driver_is_told_since_that_may_end_the_trial(trial):
    callback = ReportCallback("loss")
    kept = []

    def tell(epoch, loss):
        kept.append((callback.best_weights[0].tolist(), loss))
        if epoch == 2:
            raise StopWork
        return GO_ON

    reporter = trial()
    reporter._tell = tell
    with pytest.raises(StopWork):
        ran(callback, {"loss": 0.5}, {"loss": 0.4})
    assert kept == [([1.0, 1.0], 0.5), ([2.0, 2.0], 0.4)]
    assert (reporter.best, reporter.best_epoch) == (0.4, 2)


def test_figures_with_several_values_are_lists(trial):
    reporter = trial()
    ran(ReportCallback("loss"), {"loss": 0.5, "f1_score": np.array([0.25, 1.0], np.float32)})
    assert reporter.history == {"loss": [0.5], "f1_score": [[0.25, 1.0]]}
    with pytest.raises(SearchMistakeError, match="metric='f1_score' has 2 values.*average="):
        ran(ReportCallback("f1_score"), {"loss": 0.5, "f1_score": np.array([0.25, 1.0], np.float32)})


@pytest.mark.parametrize(("answer", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_the_end_that_a_trial_was_told_keeps_its_status(answer, status):
    reporter = Reporter(Driver(answer), 1.0)
    reporter.log({})
    reporter.take(0.5)
    reporter.end(TrialEnd())
    assert reporter.status == status
    diverged = Reporter(Driver(), 1.0)
    diverged.take(math.nan)
    diverged.end(TrialEnd())
    assert diverged.status == OK


def test_another_end_means_that_it_was_stopped():
    reporter = Reporter(Driver(), 1.0)
    reporter.log({"loss": 0.5})
    reporter.take(0.5)
    reporter.end(StopWork())
    assert reporter.status == STOPPED
    assert (reporter.best, reporter.should_end) == (0.5, True)


# Reports of fit


def test_fit_reports_its_metric_and_keeps_the_best_weights(trial):
    reporter = trial(sign=-1.0)
    callback = ReportCallback("accuracy")
    model = ran(callback, *({"loss": 1.0, "accuracy": value} for value in (0.5, 0.9, 0.7)))
    assert reporter._tell.told == [-0.5, -0.9, -0.7]
    assert reporter.history == {"loss": [1.0] * 3, "accuracy": [0.5, 0.9, 0.7]}
    assert (reporter.best, reporter.best_epoch) == (0.9, 2)
    assert not model.stop_training
    assert [list(weight) for weight in callback.best_weights] == [[2.0, 2.0]]


@pytest.mark.parametrize(("answer", "status"), [(PRUNE, PRUNED), (STOP, STOPPED)])
def test_fit_ends_when_the_trial_shall_end(trial, answer, status):
    reporter = trial(GO_ON, answer)
    model = ran(ReportCallback("loss"), *({"loss": value} for value in (0.5, 0.4, 0.3)))
    assert model.stop_training
    assert reporter.status == status
    assert (reporter.best, reporter.best_epoch, reporter.history) == (0.4, 2, {"loss": [0.5, 0.4]})


def test_fit_ends_where_it_diverges_and_keeps_what_was_good(trial):
    reporter = trial()
    callback = ReportCallback("loss")
    model = ran(callback, {"loss": 0.5}, {"loss": math.nan}, {"loss": 0.1})
    assert model.stop_training
    assert reporter.diverged_at == 2
    assert reporter.best == 0.5
    assert callback.best_weights[0][0] == 1


def test_another_figure_that_is_not_finite_does_no_harm(trial):
    reporter = trial()
    assert not ran(ReportCallback("val_loss"), {"loss": math.nan, "val_loss": 0.5}).stop_training
    assert reporter.best == 0.5
    assert math.isnan(reporter.history["loss"][0])


def test_a_metric_that_fit_does_not_give_is_told_with_those_that_it_does(trial):
    trial()
    with pytest.raises(SearchMistakeError, match="metric='acc' is not among the figures of fit. Known: 'accuracy', 'loss'"):
        ran(ReportCallback("acc"), {"loss": 0.5, "accuracy": 0.5})
    with pytest.raises(SearchMistakeError, match="Did you mean 'val_accuracy'"):
        ran(ReportCallback("val_accurracy"), {"val_accuracy": 0.5})


def test_where_nothing_is_validated_the_remedy_is_told(trial):
    trial()
    with pytest.raises(SearchMistakeError, match="need rows to validate on: give validation_split= or validation_data="):
        ran(ReportCallback(), {"loss": 0.5})
    assert "validation_split" not in unknown_metric("val_acc", ["val_loss"])
    assert "validation_split" not in unknown_metric("acc", ["loss"])


def test_epochs_without_validation_are_passed_over(trial):
    reporter = trial()
    ran(ReportCallback(), {"loss": 1.0, "val_loss": 0.5}, {"loss": 0.9}, {"loss": 0.8, "val_loss": 0.4})
    assert reporter._tell.told == [0.5, 0.4]
    assert reporter._tell.epochs == [1, 3]
    assert (reporter.best_epoch, reporter.epoch) == (3, 3)
    assert reporter.history == {"loss": [1.0, 0.9, 0.8], "val_loss": [0.5, 0.4]}


@pytest.mark.parametrize("often", [2, [2, 4]])
def test_validation_may_begin_later(trial, often):
    epochs = [{"loss": 1.0}, {"loss": 0.9, "val_loss": 0.5}, {"loss": 0.8}, {"loss": 0.7, "val_loss": 0.4}]
    reporter = trial()
    ran(ReportCallback("val_loss", often), *epochs)
    assert reporter._tell.told == [0.5, 0.4]
    assert reporter._tell.epochs == [2, 4]
    trial()
    with pytest.raises(SearchMistakeError, match="metric='val_acc' is not among"):
        ran(ReportCallback("val_acc", often), *epochs)


def test_fit_of_keras_reports(trial):
    reporter = trial(GO_ON, PRUNE)
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


@pytest.mark.parametrize("answer", [PRUNE, STOP])
def test_the_last_epoch_of_fit_is_not_ended(trial, answer):
    reporter = trial(answer)
    callback = ReportCallback("loss")
    callback.set_model(Weights())
    callback.set_params({"epochs": 1})
    callback.on_epoch_end(0, {"loss": 0.5})
    assert reporter.status == OK
