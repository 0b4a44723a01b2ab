"""Whole searches in memory: results, resuming and errors; tests/integration/test_search.py runs searches on Spark."""

import os
import signal
import sqlite3
import threading
import time

import keras
import numpy as np
import optuna
import pytest
from hyperopt import hp
from hyperopt.early_stop import no_progress_loss

from sparkkeras import ParameterServerOptions
from sparkkeras.errors import (
    ConfigurationError,
    CustomObjectError,
    DataError,
    SearchError,
    StorageError,
    UnknownArgumentError,
)
from sparkkeras.hyperopt import (
    HyperModel,
    HyperParameters,
    HyperParamModel,
    ReportCallback,
    Search,
    report,
)
from sparkkeras.hyperopt.arguments import sign_of
from sparkkeras.hyperopt.workers import LocalWorkers

LINE = {"x": hp.uniform("x", -10, 10)}
SPACE = {"units": hp.choice("units", [8, 16, 32]), "lr": hp.loguniform("lr", -3, 0)}


def build(params):
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(params["units"], "relu"), keras.layers.Dense(10, "softmax")]
    )
    optimizer = keras.optimizers.SGD(params["lr"])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], run_eagerly=True)
    return model


class Quick(keras.Sequential):
    """A model that fits without training: its second epoch is the best, and all weights equal the loss of the epoch."""

    def fit(self, x, y, *, epochs, callbacks, validation_split=0.0, validation_data=None, **others):
        callbacks = keras.callbacks.CallbackList(callbacks, model=self, epochs=epochs)
        callbacks.on_train_begin()
        for epoch in range(epochs):
            loss = float(self.optimizer.learning_rate) * (0.5, 0.25, 0.75)[epoch % 3]
            self.set_weights([np.full_like(weight, loss) for weight in self.get_weights()])
            logs = {"loss": loss, "accuracy": 1 - loss}
            if validation_split or validation_data is not None:
                logs |= {f"val_{name}": value for name, value in logs.items()}
            callbacks.on_epoch_end(epoch, logs)
            if self.stop_training:
                break


def quick(params):
    model = Quick([keras.Input((64,)), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(params.get("lr", 0.1)), "sparse_categorical_crossentropy")
    return model


def losses_of(models):
    """The losses in the weights of quick models."""
    return [model.get_weights()[0][0, 0] for model in models]


def parabola(params, data):
    return (params["x"] - 3) ** 2


@pytest.fixture(scope="module")
def rows(digits):
    """80 rows of 64 features; the last 16 are for validation."""
    x, y, *_ = digits
    return x[:80], y[:80]


def search_of(**arguments):
    search = HyperParamModel(LocalWorkers())
    search.minimize(**{"space": LINE, "max_evals": 6, "seed": 1, "verbose": 0, **arguments})
    return search


def fits_of(rows, **arguments):
    """A search that fits quick models for two epochs each."""
    given = {
        "model": quick,
        "data": rows,
        "space": SPACE,
        "max_evals": 3,
        "epochs": 2,
        "batch_size": 64,
        "validation_split": 0.2,
    }
    return search_of(**{**given, **arguments})


class TestResults:
    def test_the_models_of_the_best_trials_are_kept(self, rows):
        search = fits_of(rows, max_evals=6, epochs=3, keep_models=3)
        assert {trial.best_epoch for trial in search.trials} == {2}
        values = sorted(trial.value for trial in search.trials)
        assert losses_of(search.best_models(3)) == pytest.approx(values[:3])
        assert losses_of([search.best_model]) == pytest.approx([search.best_value])
        with pytest.raises(ConfigurationError, match="only 3 of the"):
            search.best_models(4)

    def test_the_same_seed_gives_the_same_trials(self, rows):
        first, second = (fits_of(rows, model=build, seed=11, max_evals=2, epochs=1) for _ in range(2))
        trials = [[(trial.number, trial.params, trial.history) for trial in search.trials] for search in (first, second)]
        assert trials[0] == trials[1]

    def test_a_function_that_chooses_nothing_is_noticed(self, rows):
        with pytest.warns(UserWarning, match="hp.Int"):
            fits_of(rows, model=HyperModel(lambda hp: quick({})), space=None, max_evals=2)

    def test_hyperband_prunes_by_the_epochs_of_fit(self, rows):
        search = fits_of(rows, epochs=4, max_evals=6, pruner="hyperband")
        assert {(trial.status, trial.epochs < 4) for trial in search.trials} == {("pruned", True), ("ok", False)}

    def test_maximizing_a_metric(self, rows):
        search = fits_of(rows, metric="val_accuracy")
        assert search.best_value == max(trial.value for trial in search.trials)
        assert search.best_value == max(search.best_trial.history["val_accuracy"])
        assert list(search.best_trial.intermediate_values) == search.best_trial.history["val_accuracy"]


class TestTrialInputs:
    def test_each_trial_has_new_callbacks(self, rows):
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)
        search = fits_of(rows, max_evals=2, epochs=9, callbacks=[stopping])
        assert [trial.epochs for trial in search.trials] == [2, 2]

    def test_data_of_every_kind_is_read_once(self, rows, tmp_path):
        x, y = rows

        def read():
            (tmp_path / str(time.time_ns())).touch()
            return x, y

        kinds = ((x, y), {"x": x, "y": y}, read)
        values = [fits_of(data, model=build, max_evals=2, epochs=1).best_value for data in kinds]
        assert len(set(values)) == 1, values
        assert len(list(tmp_path.iterdir())) == 1

    def test_validation_data_and_weights(self, rows):
        x, y = rows
        one = {"model": build, "max_evals": 1, "epochs": 1, "validation_split": 0.0}
        held, in_dict = {"validation_data": (x[:9], y[:9])}, {"x": x, "y": y, "validation_data": (x[:9], y[:9])}
        assert fits_of((x, y), **held, **one).best_value == fits_of(in_dict, **one).best_value
        assert fits_of((x, y, np.zeros(len(x))), metric="loss", **one).best_value == 0
        with pytest.raises(DataError, match="both in the dict"):
            fits_of(in_dict, **held, **one)

    def test_an_objective_may_return_hyperopts_dict_and_a_model(self, rows):
        def objective(params, data):
            model = build(params)
            history = model.fit(*data, batch_size=64, epochs=1, verbose=0, callbacks=[ReportCallback("loss")])
            return {"loss": history.history["loss"][-1], "status": "ok", "model": model, "seen": np.int64(3)}

        search = search_of(objective=objective, data=rows, space=SPACE, max_evals=2)
        assert (search.best_trial.extra, search.best_trial.epochs) == ({"seen": 3}, 1)
        assert search.best_model.count_params() == build(search.best_params).count_params()

    def test_an_objective_receives_data_if_there_is_any(self):
        def objective(params, folds=3):
            return folds

        assert search_of(objective=objective, max_evals=1).best_value == 3
        assert search_of(objective=objective, data=5, max_evals=1).best_value == 5
        assert search_of(objective=lambda params: 7.0, data=5, max_evals=1).best_value == 7


def test_loss_threshold_and_early_stop():
    assert len(search_of(objective=parabola, loss_threshold=1000, max_evals=50).trials) == 1
    stopped = search_of(objective=lambda params, data: 1.0, early_stop_fn=no_progress_loss(4), max_evals=50)
    assert 4 <= len(stopped.trials) < 7
    assert "early_stop_fn" in stopped.reason


def test_a_function_in_the_style_of_keras_tuner(rows):
    """Trials define their hyper-parameters while they run."""

    def tuned(hp):
        layers = [keras.Input((64,))]
        for number in range(hp.Int("layers", 1, 2)):
            layers.append(keras.layers.Dense(hp.Int(f"units_{number}", 8, 16, step=8)))
        model = Quick([*layers, keras.layers.Dense(10, hp.Fixed("activation", "softmax"))])
        rate = hp.Float("lr", 1e-3, 1, sampling="log")
        model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
        return model

    search = fits_of(rows, model=tuned, space=None, keep_models="all", max_evals=6)
    assert {("units_1" in trial.params) == (trial.params["layers"] == 2) for trial in search.trials} == {True}
    assert search.best_value == pytest.approx(0.25 * search.best_params["lr"])
    for trial in search.trials:
        assert tuned(HyperParameters(trial.params)).count_params() == search.model_of(trial.number).count_params()
    assert losses_of([search.best_model]) == pytest.approx([search.best_value])


def test_too_many_failures_are_an_error_with_the_first_one():
    def objective(params, data):
        if params["x"] < 0:
            raise KeyError("no such thing")
        return params["x"]

    with pytest.raises(SearchError, match="failed.*no such thing"):
        search_of(objective=objective, max_evals=8, max_failures=0)


def test_an_unknown_metric_ends_the_search(rows):
    with pytest.raises(ConfigurationError, match="Did you mean 'val_loss'"):
        fits_of(rows, metric="val_los", mode="min", max_evals=99)


class TestResume:
    def test_resuming_repeats_no_trial(self, rows, tmp_path):
        arguments = {"save_to": tmp_path / "search", "keep_models": 2}
        first = fits_of(rows, max_evals=3, **arguments)
        second = fits_of(rows, max_evals=5, **arguments)
        trials = second.trials
        assert [trial.number for trial in trials] == [0, 1, 2, 3, 4]
        assert trials[:3] == first.trials
        assert losses_of(second.best_models(2)) == pytest.approx(sorted(trial.value for trial in trials)[:2])
        assert len(list((tmp_path / "search" / "models").iterdir())) == 2
        assert fits_of(rows, max_evals=5, **arguments).trials == trials
        with pytest.raises(ConfigurationError, match="another search.*metric"):
            second.minimize(model=quick, data=rows, space=SPACE, max_evals=9, metric="loss", verbose=0, **arguments)
        assert second.trials == trials  # a rejected call changes nothing

    def test_unreadable_data_fails_no_trials(self, rows, tmp_path):
        file = tmp_path / "exists"

        def read():
            file.read_bytes()
            return rows

        arguments = {"metric": "loss", "epochs": 1, "save_to": tmp_path / "search"}
        with pytest.raises(ConfigurationError, match="data failed: FileNotFoundError"):
            fits_of(read, max_evals=9, **arguments)
        file.touch()
        assert [trial.status for trial in fits_of(read, max_evals=2, **arguments).trials] == ["ok"] * 2

    def test_each_model_has_copies_of_the_objects_in_the_space(self, rows, tmp_path):
        def build(params):
            model = keras.Sequential([keras.Input((64,)), params["layer"], keras.layers.Dense(10, "softmax")])
            model.compile(keras.optimizers.SGD(params["lr"]), "sparse_categorical_crossentropy", run_eagerly=True)
            return model

        def fits(layer, max_evals):
            space = {"layer": hp.choice("layer", [layer]), "lr": hp.uniform("lr", 0.01, 0.5)}
            given = {"model": build, "metric": "loss", "epochs": 1, "save_to": tmp_path / "search"}
            return fits_of(rows, space=space, max_evals=max_evals, **given)

        layer, another = keras.layers.Dense(8, "relu", name="first"), keras.layers.Dense(8, "relu")  # with a generated name
        one, other = fits(layer, 2).best_models(2)
        assert not layer.built
        assert not np.allclose(one.get_weights()[0], other.get_weights()[0])
        assert [trial.params["layer"] for trial in fits(another, 3).trials] == [another] * 3

    def test_trials_stopped_by_a_timeout_have_their_best_report_and_run_again(self, tmp_path):
        slow = tmp_path / "slow"
        slow.touch()

        def objective(params, data):
            while slow.exists():
                report(params["x"])
                time.sleep(0.05)
            return params["x"]

        arguments = {"objective": objective, "save_to": tmp_path / "search", "max_evals": 4}
        stopped = search_of(timeout=0.3, **arguments)
        assert "timeout=0.3" in stopped.reason
        (trial,) = stopped.trials
        assert (trial.status, trial.value) == ("stopped", trial.params["x"])
        slow.unlink()
        assert [trial.status for trial in search_of(**arguments).trials] == ["ok"] * 4

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_killed_driver(self, tmp_path):
        """A fork of this process is the driver that is killed; nothing here uses the backend."""

        def objective(params, data):
            with (tmp_path / "runs").open("a") as runs:
                runs.write(f"{params['x']!r}\n")
            return params["x"]

        def stop(trials, *given):
            if len(trials.trials) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return False, given

        arguments = {"objective": objective, "max_evals": 9, "save_to": tmp_path / "search"}
        driver = os.fork()
        if driver == 0:
            try:
                search_of(early_stop_fn=stop, **arguments)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1]) == -signal.SIGKILL
        with Search(LINE, save_to=tmp_path / "search") as opened:
            recorded = [repr(trial.params["x"]) for trial in opened.trials if trial.status == "ok"]
        assert len(recorded) == 5
        assert [trial.number for trial in search_of(**arguments).trials] == list(range(9))
        runs = (tmp_path / "runs").read_text().splitlines()
        assert [runs.count(x) for x in recorded] == [1] * 5


class Nowhere:
    """Workers that a search must not use."""

    free_slots = in_child_processes = driver = None

    def dataset(self, count):
        raise AssertionError("the search began")

    background = keep = copied = check_connection = dataset


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({}, "exactly one of"),
            ({"objective": 3}, "objective=3"),
            ({"objective": parabola, "max_evals": None}, "give max_evals="),
            ({"objective": parabola, "max_evals": 0}, "max_evals=0"),
            ({"objective": parabola, "mode": "best"}, "mode='best'"),
            ({"objective": parabola, "keep_models": "some"}, "keep_models='some'"),
            ({"objective": parabola, "loss_threshold": "low"}, "loss_threshold='low'"),
            ({"objective": parabola, "epochs": 3}, "epochs= works only"),
            ({"objective": parabola, "space": (np.zeros(999),)}, r"space=\(array\(.{0,99}\) has no"),
            ({"objective": lambda: 1}, r"\(params, data\)"),
            ({"objective": parabola, "features": "a"}, "data is None"),
            ({"model": lambda: 1, "data": ([[1.0]], [1.0])}, r"build\(params\)"),
            ({"model": build, "metric": "val_niceness"}, "cannot infer"),
            ({"model": build, "data": list, "validation_data": 3}, "return a dict"),
            ({"model": build, "data": lambda worker, num_workers: None}, "without arguments .*'worker'"),
        ],
    )
    def test_arguments_are_checked_before_the_search_starts(self, arguments, words):
        with pytest.raises(ConfigurationError, match=words):
            HyperParamModel(Nowhere()).minimize(**{"space": LINE, "max_evals": 6, "verbose": 0, **arguments})

    def test_invalid_data_is_reported(self, rows):
        x, y = rows
        for data, words in (
            (None, "data is None"),
            ({"x": x, "labels": y}, "'labels'"),
            ((np.full_like(x, np.nan), y), "NaN"),
            ((x[:0], y[:0]), "no rows"),
        ):
            with pytest.raises(DataError, match=words):
                fits_of(data)
        with pytest.raises(ConfigurationError, match="one of validation_split"):
            fits_of((x, y), validation_data=(x, y))
        with pytest.raises(ConfigurationError, match="is a model"):
            fits_of((x, y), model=build({"units": 8, "lr": 0.1}))

    def test_the_direction_is_inferred_from_the_name_of_a_metric(self):
        for metric in ("val_accuracy", "val_auc_1", "val_mean_io_u", "val_false_alarm_auc"):
            assert sign_of(metric, "auto") < 0
            assert sign_of(metric, "max") < 0 < sign_of(metric, "min")
        for metric in ("val_account_mae", "accuracy_loss", "val_false_positives"):
            assert sign_of(metric, "auto") > 0

    def test_an_objective_that_cannot_be_sent(self):
        lock = threading.Lock()
        with pytest.raises(CustomObjectError, match="objective"):
            search_of(objective=lambda params, data: lock.locked())

    def test_unknown_arguments(self):
        with pytest.raises(UnknownArgumentError, match="Did you mean 'max_evals'"):
            HyperParamModel().minimize(objective=parabola, space=LINE, max_eval=3)
        with pytest.raises(ConfigurationError, match="server_options: ParameterServerOptions"):
            HyperParamModel(server_options=ParameterServerOptions(max_staleness=3))
        with pytest.raises(ConfigurationError, match="sc='local'"):
            HyperParamModel("local")

    def test_more_workers_than_slots(self):
        search = HyperParamModel(LocalWorkers(), num_workers=9)
        with pytest.warns(UserWarning, match="num_workers=9.* no more than 1") as caught:
            search.minimize(objective=parabola, space=LINE, max_evals=1, seed=1, verbose=0)
        assert [warning.filename for warning in caught] == [__file__]

    def test_there_are_no_results_before_the_first_search(self):
        search = HyperParamModel()
        assert search.trials == []
        for access in (lambda: search.best_params, lambda: search.plot("search.png"), search.best_models):
            with pytest.raises(SearchError, match="minimize first"):
                access()


def test_progress_is_written(capsys):
    search_of(objective=lambda params: 1.0, max_evals=1, verbose=2)
    assert "trial 0 loss 1 x=" in capsys.readouterr().out


def test_several_searches_share_a_storage(tmp_path):
    url = f"sqlite:///{tmp_path}/search.db"

    def search(max_evals, **given):
        return search_of(objective=lambda params: params["lr"], space=SPACE, max_evals=max_evals, storage=url, **given)

    search(2, seed=1)
    other = search(3, seed=None)
    assert (other.seed, [trial.number for trial in other.trials]) == (1, [0, 1, 2])
    study = optuna.load_study(study_name="sparkkeras", storage=url)
    running = study.ask()  # of another program, which this one does not repeat
    assert [trial.number for trial in search(4).trials] == [0, 1, 2, 4]
    assert study.trials[running.number].state.name == "RUNNING"
    with pytest.raises(ConfigurationError, match="another search: its seed"):
        search(7, seed=2)


@pytest.mark.parametrize("table", ["trial_intermediate_values", "trial_user_attributes"])
def test_a_database_that_fails_ends_the_search(tmp_path, table):
    def objective(params):
        with sqlite3.connect(tmp_path / "search.db") as database:
            database.execute(f"drop table {table}")
        report(0.5)
        return 1.0

    with pytest.raises(StorageError, match=f"storage=.* no such table: {table}"):
        search_of(objective=objective, space=SPACE, max_evals=2, storage=f"sqlite:///{tmp_path}/search.db")


@pytest.mark.parametrize("given", ["postgresql://me:secret@nowhere/db", 7])
def test_storages_that_cannot_be_opened_are_rejected(given):
    with pytest.raises(ConfigurationError, match="storage=.* URL of") as caught:
        search_of(objective=parabola, storage=given)
    assert "secret" not in str(caught.value)
