"""Runs of MLflow, from Keras's calls and from events; with a real store, without Spark."""

import json
import sys
import threading
from pathlib import Path

import keras
import mlflow
import numpy as np
import pytest
from mlflow.models import Model

from sparkkeras import ConfigurationError, MLflowCallback, TrainingInterruptedError, UnknownArgumentError
from sparkkeras import events as happened
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.tracking.mlflow_run import MAX_FAILURES, Outbox
from tests.models import regression

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
Y = X.sum(axis=1, keepdims=True)


def runs(store):
    """All runs of the experiment by name."""
    (experiment,) = [each for each in store.search_experiments() if each.name != "Default"]
    found = store.search_runs([experiment.experiment_id])
    named = {run.info.run_name: run for run in found}
    assert len(named) == len(found)
    return named


def curve(store, run, metric):
    """A metric as ``(step, value)`` pairs."""
    return [(each.step, each.value) for each in store.get_metric_history(run.info.run_id, metric)]


def text(run, file):
    return Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=file)).read_text()


def fit(model, *callbacks, epochs=1, **given):
    """Fit a model for a training of plain Keras."""
    return model.fit(X, Y, epochs=epochs, verbose=0, callbacks=callbacks, **given)


def linear():
    return regression(run_eagerly=True)


def driven(callback, epochs=({"loss": 2.0}, {"loss": 1.0}), error=None, model=None, **settings):
    """Drive a callback as `SparkModel.fit` does."""
    callback.on_event(happened.RunStarted("fit", "regression", settings, epochs=len(epochs)))
    callback.set_model(regression() if model is None else model)
    callback.set_params({"epochs": len(epochs)})
    callback.on_train_begin()
    for epoch, logs in enumerate(epochs):
        callback.on_epoch_end(epoch, logs)
    if error is None:
        callback.on_train_end()
    callback.on_event(happened.RunEnded(error))


class TestFit:
    def test_a_plain_fit_is_a_run_with_parameters_metrics_history_and_model(self, store):
        model, callback = linear(), MLflowCallback(registered_model_name="ours", input_example=X[:2])
        history = fit(model, callback, epochs=3, validation_data=(X, Y))
        run = runs(store)["regression"]
        assert (run.info.run_id, run.info.status) == (callback.run_id, "FINISHED")
        assert run.data.params["optimizer_learning_rate"] == "0.05000000074505806"
        assert run.data.params["epochs"] == "3"
        assert run.data.tags["keras.backend"] == keras.backend.backend()
        for metric in ("loss", "val_loss"):
            assert curve(store, run, metric) == list(enumerate(history.history[metric]))
        assert json.loads(text(run, "history.json")) == {"epoch": [0, 1, 2], "history": history.history}
        assert "y (Dense)" in text(run, "model_summary.txt")
        (version,) = store.search_model_versions("name='ours'")
        assert version.run_id == callback.run_id
        loaded = mlflow.pyfunc.load_model(f"models:/ours/{version.version}")
        np.testing.assert_allclose(loaded.predict(X), model.predict(X, verbose=0), rtol=1e-6)
        np.testing.assert_allclose(Model.load(callback.model_uri).load_input_example(callback.model_uri), X[:2])
        assert mlflow.active_run() is None

    def test_the_active_run_is_used_and_stays_active_unless_another_one_is_given(self, store):
        with mlflow.start_run(run_name="mine") as mine:
            callback = MLflowCallback(log_model=False)
            driven(callback)
            given = store.create_run(mine.info.experiment_id, run_name="given")
            for run in (given, given.info.run_id):
                driven(MLflowCallback(run=run, log_model=False))
            assert mlflow.active_run().info.run_id == mine.info.run_id == callback.run_id
            found = runs(store)
        assert [found[name].info.status for name in ("mine", "given")] == ["RUNNING"] * 2
        assert curve(store, found["mine"], "loss") == [(0, 2.0), (1, 1.0)]
        assert len(curve(store, found["given"], "loss")) == 4

    @pytest.mark.parametrize(
        ("error", "status"),
        [(ValueError("no"), "FAILED"), (TrainingInterruptedError("SIGTERM"), "KILLED")],
    )
    def test_an_error_ends_the_run_without_a_model(self, store, error, status):
        callback = MLflowCallback()
        driven(callback, error=error)
        run = runs(store)["regression"]
        assert run.info.status == status
        assert type(error).__name__ in run.data.tags["sparkkeras.error"]
        assert callback.model_uri is None
        assert curve(store, run, "loss") == [(0, 2.0), (1, 1.0)]

    def test_a_run_of_a_failed_plain_fit_is_failed_when_the_next_one_begins(self, store):
        class Fails(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise RuntimeError

        callback, model = MLflowCallback(log_model=False), linear()
        with pytest.raises(RuntimeError):
            fit(model, callback, Fails())
        failed = callback.run_id
        fit(model, callback)
        assert store.get_run(failed).info.status == "FAILED"
        assert store.get_run(callback.run_id).info.status == "FINISHED"

    def test_nested_settings_and_values_that_are_not_numbers(self, store):
        logs = {"loss": np.float32("nan"), "f1": np.array([0.25, 0.5]), "none": None, "name": "text", "a(b)": 1}
        settings = {"mode": "synchronous", "options": {"port": 1, "host": None}, "text": "x" * 9000}
        driven(MLflowCallback(log_model=False), epochs=[logs], **settings)
        run = runs(store)["regression"]
        params = run.data.params
        assert (params["mode"], params["options.port"], params["options.host"]) == ("synchronous", "1", "None")
        assert len(params["text"]) == 500
        assert np.isnan(run.data.metrics.pop("loss"))
        assert run.data.metrics == {"f1_0": 0.25, "f1_1": 0.5, "a_b_": 1}
        assert json.loads(text(run, "history.json"))["history"]["f1"] == [[0.25, 0.5]]

    def test_what_happens_besides_epochs(self, store):
        callback = MLflowCallback(log_model=False)
        callback.on_event(happened.RunStarted("fit", "regression", epochs=4))
        updates = happened.Updates(8, 2.0, {0: 8}, 1.5, 3)
        for event in (
            happened.RunResumed("from epoch 3", [0, 1], [{"loss": 4.0}, {"loss": 3.0}]),
            happened.EpochMeasured(2, rows=100, seconds=4.0, startup_seconds=0.0, updates=updates),
            happened.CheckpointWritten("/saved", 3, 0.1),
            happened.Incident("retry", "task 3 failed"),
            happened.Incident("executor", "one was lost"),
            happened.RowsTrained(5, 0.5),
        ):
            callback.on_event(event)
        callback.on_epoch_end(2, {"loss": 2.0})
        callback.on_event(happened.RunEnded())
        run = runs(store)["regression"]
        assert curve(store, run, "loss") == [(0, 4.0), (1, 3.0), (2, 2.0)]
        assert curve(store, run, "rows_per_second") == [(2, 25.0)]
        assert curve(store, run, "mean_staleness") == [(2, 1.5)]
        assert run.data.tags["sparkkeras.checkpoint"] == "/saved"
        assert run.data.tags["sparkkeras.incidents"] == "2"
        assert text(run, "incidents.txt") == "retry: task 3 failed\nexecutor: one was lost"
        assert json.loads(text(run, "history.json")) == {"epoch": [0, 1, 2], "history": {"loss": [4.0, 3.0, 2.0]}}

    def test_a_run_that_is_continued_gets_no_epoch_twice(self, store):
        with mlflow.start_run(run_name="mine"):
            driven(MLflowCallback(log_model=False))
            callback = MLflowCallback(log_model=False)
            callback.on_event(happened.RunStarted("fit", "regression", epochs=2))
            callback.on_event(happened.RunResumed("from epoch 2", [0, 1], [{"loss": 2.0}, {"loss": 1.0}]))
            callback.on_epoch_end(2, {"loss": 0.5})
            callback.on_event(happened.RunEnded())
        assert curve(store, runs(store)["mine"], "loss") == [(0, 2.0), (1, 1.0), (2, 0.5)]


class TestSearch:
    def started(self, **changed):
        kind = {"kind": "search", "name": "search", "metric": "val_loss", "max_trials": 4}
        return happened.RunStarted(**(kind | changed))

    def test_each_trial_is_a_nested_run(self, store):
        callback = MLflowCallback()
        callback.on_event(self.started(settings={"algo": "tpe"}))

        def changed(number, units=8, **result):
            trial = Trial(number, {"units": units}, **result)
            callback.on_event(happened.TrialChanged(trial, {"units": units, "optimizer": "adam"}))

        changed(0)
        changed(0, intermediate_values=[0.5])
        changed(1, units=16, intermediate_values=[0.9])
        changed(0, intermediate_values=[0.5, 0.25])
        history = {"val_loss": [0.5, 0.25], "loss": [0.6, 0.3]}
        changed(0, status="ok", value=0.25, best_epoch=2, history=history, intermediate_values=[0.5, 0.25], worker="host 0")
        changed(1, units=16, status="pruned", value=0.9, best_epoch=1, intermediate_values=[0.9])
        changed(2, status="failed", error="ValueError: no", traceback="Traceback: no")
        changed(3)
        callback.on_event(happened.RunEnded())

        found = runs(store)
        parent = found["search"]
        assert parent.info.status == "FINISHED"
        assert parent.data.params == {
            "metric": "val_loss",
            "max_trials": "4",
            "algo": "tpe",
            "best_units": "8",
            "best_optimizer": "adam",
        }
        assert parent.data.metrics == {"best_val_loss": 0.25}
        assert parent.data.tags["sparkkeras.best_run_id"] == found["trial 0"].info.run_id
        statuses = {name: run.info.status for name, run in found.items() if name != "search"}
        assert statuses == {"trial 0": "FINISHED", "trial 1": "KILLED", "trial 2": "FAILED", "trial 3": "KILLED"}
        for name in statuses:
            assert found[name].data.tags["mlflow.parentRunId"] == parent.info.run_id
        best = found["trial 0"]
        assert best.data.params == {"units": "8", "optimizer": "adam"}
        assert curve(store, best, "val_loss") == [(0, 0.5), (1, 0.25)]
        assert curve(store, best, "loss") == [(0, 0.6), (1, 0.3)]
        assert curve(store, best, "best_val_loss") == [(1, 0.25)]
        assert best.data.tags["sparkkeras.worker"] == "host 0"
        assert found["trial 1"].data.tags["sparkkeras.status"] == "pruned"
        assert found["trial 2"].data.tags["sparkkeras.error"] == "ValueError: no"
        assert text(found["trial 2"], "traceback.txt") == "Traceback: no"

    def test_events_from_several_threads_with_a_metric_to_maximize(self, store):
        callback = MLflowCallback()
        callback.on_event(self.started(metric="val_accuracy", minimizes=False))

        def work(number):
            for epoch in range(5):
                trial = Trial(number, {}, intermediate_values=[float(number)] * (epoch + 1))
                callback.on_event(happened.TrialChanged(trial, {"number": number}))
            callback.on_event(happened.TrialChanged(Trial(number, {}, status="ok", value=float(number)), {}))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = threading.Thread(target=callback.on_event, args=(happened.RunEnded(),))  # not the thread that has begun
        ended.start()
        ended.join()
        found = runs(store)
        assert {run.info.status for run in found.values()} == {"FINISHED"}
        for number in range(4):
            run = found[f"trial {number}"]
            assert curve(store, run, "val_accuracy") == [(epoch, float(number)) for epoch in range(5)]
            assert run.data.params == {"number": str(number)}
        assert found["search"].data.metrics == {"best_val_accuracy": 3}
        assert found["search"].data.params["best_number"] == "3"

    def test_members_of_an_ensemble_are_nested_runs(self, store):
        callback = MLflowCallback()
        callback.on_event(happened.RunStarted("ensemble", "ensemble", {"members": 2}))
        callback.on_event(happened.MemberTrained(1, [0, 1], [{"loss": 2.0}, {"loss": 1.0}]))
        callback.on_event(happened.MemberTrained(0, [0], [{"loss": 3.0}]))
        callback.on_event(happened.RunEnded())
        found = runs(store)
        assert sorted(found) == ["ensemble", "member 0", "member 1"]
        assert curve(store, found["member 1"], "loss") == [(0, 2.0), (1, 1.0)]
        assert found["member 0"].data.tags["mlflow.parentRunId"] == found["ensemble"].info.run_id


class TestErrors:
    def test_mlflow_is_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "mlflow", None)
        with pytest.raises(ConfigurationError, match=r"pip install sparkkeras\[mlflow\]"):
            MLflowCallback()

    def test_arguments(self, store):
        with pytest.raises(UnknownArgumentError, match="log_model"):
            MLflowCallback(log_models=True)
        for arguments, words in (({"run": 3}, "run=3"), ({"registered_model_name": ""}, "registered_model_name")):
            with pytest.raises(ConfigurationError, match=words):
                MLflowCallback(**arguments)
        with pytest.raises(ConfigurationError, match="run='gone'"):
            MLflowCallback(run="gone").set_model(regression())

    def test_a_store_that_cannot_be_opened_is_a_warning(self, store, tmp_path):
        (tmp_path / "file").write_text("")
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/file/mlflow.db")
        with pytest.warns(UserWarning, match="MLflow: .* Training goes on") as caught:
            history = fit(linear(), MLflowCallback(), epochs=2)
        assert sum("MLflow: " in str(each.message) for each in caught) == 1
        assert len(history.history["loss"]) == 2

    def test_a_run_that_is_deleted_during_training_is_one_warning(self, store):
        class Deletes(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    mlflow.MlflowClient().delete_run(mlflow.active_run().info.run_id)

        callback = MLflowCallback()
        with pytest.warns(UserWarning, match="'active' state") as caught:
            fit(linear(), callback, Deletes(), epochs=8)
        assert sum("MLflow: " in str(each.message) for each in caught) == 1

    def test_a_model_that_cannot_be_saved_is_a_warning_and_the_run_ends(self, store):
        model = regression()
        model.get_config = lambda: {"lock": threading.Lock()}
        with pytest.warns(UserWarning, match="MLflow: "):
            driven(MLflowCallback(), model=model)
        assert runs(store)["regression"].info.status == "FINISHED"

    def test_parameters_that_a_run_has_already(self, store):
        with mlflow.start_run(run_name="mine"):
            driven(MLflowCallback(log_model=False), batch_size=1)
            with pytest.warns(UserWarning, match="parameter batch_size='1'"):
                driven(MLflowCallback(log_model=False), batch_size=2, new=3)
        assert runs(store)["mine"].data.params["new"] == "3"
        assert len(curve(store, runs(store)["mine"], "loss")) == 4


class TestSlowStores:
    def test_training_does_not_wait_for_the_store(self, store, monkeypatch):
        """The store answers only when training is at its end."""
        at_end, log_batch = threading.Event(), type(store).log_batch

        def waits(client, *args, **options):
            assert at_end.wait(60)
            return log_batch(client, *args, **options)

        monkeypatch.setattr(type(store), "log_batch", waits)
        ends = keras.callbacks.LambdaCallback(on_train_end=lambda logs: at_end.set())
        callback = MLflowCallback(log_model=False)
        fit(linear(), ends, callback, epochs=3)
        assert len(store.get_metric_history(callback.run_id, "loss")) == 3

    def test_a_store_is_lost_after_some_failures_in_a_row(self):
        outbox, made = Outbox(None), []

        def fail():
            raise OSError("out of reach")

        for _ in range(MAX_FAILURES):
            outbox.put(fail)
            outbox.put(lambda: made.append(threading.current_thread()))
        outbox.wait()
        assert (len(made), outbox.is_lost) == (MAX_FAILURES, False)
        assert not any(thread.is_alive() for thread in made)
        for _ in range(MAX_FAILURES):
            outbox.put(fail)
        outbox.put(lambda: made.append("another"))
        outbox.wait()
        assert (len(made), outbox.is_lost) == (MAX_FAILURES, True)
        assert [str(outbox.take_error()) for _ in range(2)] == ["out of reach", "None"]
