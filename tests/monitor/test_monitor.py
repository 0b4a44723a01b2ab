"""The monitor follows trainings, searches, ensembles and functions, and saves them; it never ends a training."""

import copy
import json
import pickle
import urllib.request
import warnings
from contextlib import closing

import hyperopt
import keras
import numpy as np
import pytest

from sparkkeras import (
    ConfigurationError,
    Monitor,
    SparkEnsemble,
    SparkModel,
    SparkRunner,
    StorageError,
    UnknownArgumentError,
)
from sparkkeras.events import RunEnded, RunStarted
from sparkkeras.hyperopt import HyperParamModel, report
from sparkkeras.hyperopt.workers import LocalWorkers
from tests.models import regression
from tests.training.runs import Model, fit, partitions

X, Y = np.ones((64, 3), np.float32), np.ones((64, 1), np.float32)


@pytest.fixture
def monitor(tmp_path):
    with closing(Monitor(save_to=tmp_path / "run.html", verbose=False)) as made:
        yield made


def fit_linear(*callbacks, **given):
    model = regression(run_eagerly=True)
    return model.fit(X, Y, verbose=0, callbacks=callbacks, **given)


@pytest.fixture(scope="module")
def history():
    return fit_linear(epochs=2)


def live(monitor):
    with urllib.request.urlopen(monitor.url + "messages?after=0", timeout=10) as response:
        return json.load(response)["messages"]


def saved(path):
    text = path.read_text("utf-8")
    return json.loads(text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])["messages"]


def of(messages, kind):
    return [each for each in messages if each["type"] == kind]


def test_a_training_of_keras_is_shown_and_saved(monitor, tmp_path):
    fit_linear(monitor, epochs=3, batch_size=8, validation_split=0.25)
    messages = live(monitor)
    assert messages == saved(tmp_path / "run.html")
    (run,) = of(messages, "run")
    assert (run["kind"], run["epochs"], run["settings"]["batches"]) == ("keras", 3, 6)
    epochs = of(messages, "epoch")
    assert [each["epoch"] for each in epochs] == [0, 1, 2]
    assert set(epochs[0]["logs"]) == {"loss", "val_loss", "learning_rate"}
    assert of(messages, "progress")
    assert of(messages, "end")[0]["status"] == "finished"


def test_a_notebook_shows_a_link(monitor):
    assert f'<a href="{monitor.url}"' in monitor._repr_html_()
    monitor.url = """http://host"><script>'&"""
    assert "<script>" not in monitor._repr_html_()
    assert monitor._repr_html_().count('"') == 6


def test_runs_have_the_name_that_the_monitor_has_when_they_begin(tmp_path):
    with closing(Monitor(save_to=tmp_path / "run.html", verbose=False, name="first")) as monitor:
        for name in ("first", "second", None):
            monitor.name = name
            monitor.on_event(RunStarted("fit", "model", {"rule": "mean", "seed": None}, 2))
            monitor.name = "too late for this run"
            monitor.on_event(RunEnded())
        fit_linear(monitor)
        with pytest.raises(ConfigurationError, match="name=' '"):
            monitor.name = " "
        assert monitor.name == "too late for this run"
    runs = of(saved(tmp_path / "run.html"), "run")
    assert [each["name"] for each in runs] == ["first", "second", "model", "too late for this run"]
    assert runs[0]["settings"] == {"rule": "mean"}


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_strategies_report_to_a_monitor(mode, monitor):
    monitor.on_event(RunStarted("fit", "linear", {"mode": mode}, 2))
    fit(Model(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True), partitions(8, 8), mode, epochs=2, callbacks=[monitor])
    monitor.on_event(RunEnded())
    messages = live(monitor)
    assert len(of(messages, "run")) == 1
    assert [each["epoch"] for each in of(messages, "epoch")] == [0, 1]
    assert [each["rows"] for each in of(messages, "workers")] == [[8, 8], [8, 8]]
    assert [each["rows"] for each in of(messages, "epoch")] == [16, 16]
    assert len(of(messages, "updates")) == (2 if mode == "asynchronous" else 0)


def objective(params):
    if params["act"] == "bad":
        raise ValueError("no such activation")
    for epoch in range(2):
        report(params["x"] ** 2 + 1 - epoch / 2)
    return params["x"] ** 2


def test_a_search_reports_its_trials(monitor, tmp_path):
    space = {"x": hyperopt.hp.loguniform("x", -3, 0), "act": hyperopt.hp.choice("act", ["relu", "bad"])}
    search = HyperParamModel(LocalWorkers())
    search.minimize(
        objective=lambda params, _: objective(params), space=space, max_evals=8, seed=1, verbose=0, monitor=monitor
    )
    messages = saved(tmp_path / "run.html")
    (run,) = of(messages, "run")
    assert (run["kind"], run["metric"], run["minimizes"], run["max_trials"]) == ("search", "loss", True, 8)
    assert run["parameters"] == [
        {"name": "act", "options": ["relu", "bad"], "is_log": False},
        {"name": "x", "options": [], "is_log": True},
    ]
    trials = of(messages, "trial")
    assert sorted(each["trial"] for each in trials) == list(range(8))
    assert {(each["status"], each["params"]["act"], len(each["values"])) for each in trials} == {
        ("ok", "relu", 2),
        ("failed", "bad", 0),
    }
    for each in trials:
        assert each["value"] == (None if each["traceback"] else pytest.approx(each["params"]["x"] ** 2))


def test_a_function_reports_its_ranks(monitor):
    def work(word):
        import sys

        sys.stdout.write(f"{word}\n")

    SparkRunner(2, local_mode=True).run(work, "hello", monitor=monitor)
    messages = live(monitor)
    assert (of(messages, "run")[0]["kind"], of(messages, "run")[0]["name"]) == ("function", "work")
    assert {each["rank"] for each in of(messages, "rank") if each["state"] == "finished"} == {0, 1}
    assert {(each["rank"], each["text"]) for each in of(messages, "output")} == {(0, "hello\n"), (1, "hello\n")}
    assert of(messages, "end")[0]["status"] == "finished"


def test_a_failure_is_shown_and_saved(monitor, tmp_path):
    class Raises(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("a callback of the user")

    with pytest.raises(RuntimeError), monitor:
        fit_linear(monitor, Raises())
    (end,) = of(saved(tmp_path / "run.html"), "end")
    assert (end["status"], end["error"]) == ("failed", "RuntimeError: a callback of the user")
    assert "on_epoch_end" in end["traceback"]


def test_a_run_that_has_not_reported_its_end_is_stopped(monitor, tmp_path):
    monitor.set_model(regression())
    monitor.set_params({"epochs": 2, "steps": 2})
    monitor.on_train_begin()
    monitor.on_train_begin()
    monitor.close()
    assert [each["status"] for each in of(saved(tmp_path / "run.html"), "end")] == ["stopped", "stopped"]
    monitor.close()


def test_a_monitor_shows_one_run_at_a_time(monitor):
    monitor.on_event(RunStarted("search", "first"))
    with pytest.raises(ConfigurationError, match="shows another run"):
        monitor.on_event(RunStarted("fit", "second"))
    monitor.on_event(RunEnded())
    monitor.on_event(RunStarted("fit", "third"))


def test_histories_are_saved_and_compared(history, tmp_path):
    Monitor.save(history, tmp_path / "one.html")
    Monitor.save({"small": history, "large": history}, str(tmp_path / "two.html"))
    assert [each["logs"]["loss"] for each in of(saved(tmp_path / "one.html"), "epoch")] == history.history["loss"]
    messages = saved(tmp_path / "two.html")
    assert [each["name"] for each in of(messages, "run")] == ["small", "large"]
    assert len({each["run"] for each in messages}) == 2
    assert len(of(messages, "epoch")) == 4


def test_a_page_that_cannot_be_written_is_a_warning_and_hides_no_error_of_the_block(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()

    def block():
        with Monitor(save_to=folder / "run.html", verbose=0) as monitor:
            monitor.on_event(RunStarted("fit", "model"))
            folder.rmdir()
            monitor.on_event(RunEnded())
            raise ZeroDivisionError

    with pytest.warns(UserWarning, match="was not saved: .*folder"), pytest.raises(ZeroDivisionError):
        block()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"port": 70_000}, ConfigurationError, "port=70000"),
        ({"port": "run.html"}, ConfigurationError, r"Monitor\(save_to='run\.html'\)"),
        ({"host": ""}, ConfigurationError, "host=''"),
        ({"save_to": "run.png"}, ConfigurationError, "must end in .html"),
        ({"save_to": "/no/such/folder/run.html"}, StorageError, "does not exist"),
        ({"verbose": "loud"}, ConfigurationError, "verbose='loud'"),
        ({"prot": 1}, UnknownArgumentError, "'port'"),
    ],
)
def test_bad_arguments_are_errors_before_a_run(arguments, error, words):
    with pytest.raises(error, match=words):
        Monitor(**arguments)


@pytest.mark.parametrize(
    ("history", "words"),
    [({"loss": [1.0]}, "expected"), ({}, "is empty"), (keras.callbacks.History(), "nothing was trained")],
)
def test_bad_histories(tmp_path, history, words):
    with pytest.raises(ConfigurationError, match=f"history: .*{words}"):
        Monitor.save(history, tmp_path / "a.html")


@pytest.mark.parametrize("monitor", [5, Monitor, [object()]])
def test_other_objects_are_no_monitors(monitor):
    with pytest.raises(ConfigurationError, match="monitor="):
        SparkRunner(1, local_mode=True).run(print, monitor=monitor)


def test_batches_of_a_spark_model_cause_no_warning(monitor):
    from sparkkeras.training.callbacks import check_callbacks

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_callbacks([monitor], regression())


def test_the_address_is_printed_and_a_closed_monitor_warns(tmp_path, capsys):
    path = tmp_path / "run.html"
    for given, printed, warned in (
        ({}, "", "is closed"),
        ({"save_to": path}, f" (saved to {str(path)!r} when a run ends)", "is added to"),
    ):
        with Monitor(**given) as monitor:
            assert capsys.readouterr().out == f"Monitor: {monitor.url}{printed}\n"
            assert repr(monitor) == f"Monitor(url={monitor.url!r})"
        with pytest.warns(UserWarning, match=warned):
            monitor.on_event(RunStarted("fit", "model"))
        assert repr(monitor).endswith("closed)")


def test_paths_of_users_and_uris(sc, history, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Monitor.save(history, "~/mine.html")
    assert (tmp_path / "mine.html").exists()
    Monitor.save(history, f"file://{tmp_path}/other.html")
    assert "<html" in (tmp_path / "other.html").read_text()
    with pytest.raises(ConfigurationError, match="'hdfs://a/x' must end"):
        Monitor.save(history, "hdfs://a/x")
    with pytest.raises(StorageError, match="nothing"):  # before a run
        Monitor(save_to="nothing://a/x.html")


def test_a_monitor_is_not_sent_to_workers(monitor):
    for dump in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ConfigurationError, match="not worker_callbacks"):
            dump(monitor)
    for call, words in (
        (lambda: SparkModel(regression()).fit(X, Y, worker_callbacks=[monitor]), "callbacks="),
        (lambda: SparkModel(regression()).fit(X, Y, monitor=monitor), r"callbacks=\[monitor\]"),
        (lambda: SparkEnsemble([regression()], voting="average").fit(X, Y, callbacks=[monitor]), "as monitor="),
    ):
        with pytest.raises(ConfigurationError, match=words):
            call()


def test_a_saved_file_compares_several_trainings(tmp_path):
    path = tmp_path / "runs.html"
    with Monitor(save_to=path, verbose=False) as monitor:
        for kind, compares in (("fit", False), ("keras", True), ("search", False)):
            monitor.on_event(RunStarted(kind, "model"))
            monitor.on_event(RunEnded())
            assert ('"select":"all"' in path.read_text()) == compares
