"""Hyper-parameter search on Spark: what is found, what is kept, what is survived."""

import contextlib
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import hyperopt
import keras
import numpy as np
import psutil
import pytest
from hyperopt import hp
from hyperopt.early_stop import no_progress_loss

from sparkkeras import ParameterServerOptions, to_data_frame, to_simple_rdd
from sparkkeras.errors import (
    ClusterError,
    ConfigurationError,
    CustomObjectError,
    DataError,
    SearchError,
    UnknownArgumentError,
)
from sparkkeras.hyperopt import ASHAPruner, HyperParamModel, ReportCallback, SparkTrials, report
from tests.conftest import settle

LINE = {"x": hp.uniform("x", -10, 10)}
SPACE = {"units": hp.choice("units", [8, 16, 32]), "lr": hp.loguniform("lr", -7, -3)}


def build(params):
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(params["units"], "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(params["lr"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def parabola(params, data):
    return (params["x"] - 3) ** 2


def search_of(sc, **arguments):
    own = {name: arguments.pop(name) for name in ("num_workers", "transport") if name in arguments}
    # Who is lost is known by its closed connection; a machine that pauses for seconds is not to look like that.
    search = HyperParamModel(sc, server_options=ParameterServerOptions(lease_seconds=100), **own)
    search.minimize(**{"space": LINE, "max_evals": 6, "seed": 1, "verbose": 0, **arguments})
    return search


class TestWhatIsFound:
    @pytest.mark.core
    def test_the_best_model_has_the_weights_of_its_best_epoch(self, sc, digits):
        x, y, x_test, y_test = digits
        search = HyperParamModel(sc)
        best = search.minimize(
            model=build, data=(x, y), space=SPACE, max_evals=6, epochs=6, validation_split=0.2, seed=3, verbose=0
        )
        trial = search.best_trial
        assert search.best_value == min(each.value for each in search.trials) == min(trial.history["val_loss"])
        assert trial.best_epoch == 1 + int(np.argmin(trial.history["val_loss"]))
        assert best.optimizer is not None
        assert best.count_params() == build(search.best_params).count_params()
        held = x[-280:], y[-280:]
        assert best.evaluate(*held, verbose=0)[0] == pytest.approx(trial.value, rel=1e-4)
        assert best.evaluate(x_test, y_test, verbose=0)[1] > 0.85
        assert len(search.trials) == 6
        assert all(each.status == "ok" and each.epochs == 6 and each.seconds > 0 and each.worker for each in search.trials)
        assert {each.worker.split("/")[1] for each in search.trials} == {"0", "1"}

    def test_models_and_an_ensemble_of_the_best(self, sc, digits):
        x, y, x_test, _y_test = digits
        search = search_of(
            sc, model=build, data=(x, y), space=SPACE, max_evals=4, epochs=3, validation_split=0.2, keep_models=3
        )
        models = search.best_models(3)
        ranked = sorted(search.trials, key=lambda trial: trial.value)
        for model, trial in zip(models, ranked, strict=False):
            assert model.evaluate(x[-280:], y[-280:], verbose=0)[0] == pytest.approx(trial.value, rel=1e-4)
        ensemble = search.best_ensemble(3, voting="soft")
        mean = np.mean([model.predict(x_test, verbose=0) for model in models], axis=0)
        np.testing.assert_allclose(ensemble.predict(x_test), mean, atol=1e-5)
        with pytest.raises(ConfigurationError, match="3 of these models were kept"):
            search.best_models(4)
        assert len(search.best_models(3)) == 3

    def test_the_same_seed_and_one_worker_give_the_same_trials(self, sc, digits):
        x, y, *_ = digits
        arguments = {
            "model": build,
            "data": (x, y),
            "space": SPACE,
            "max_evals": 4,
            "epochs": 2,
            "validation_split": 0.2,
            "seed": 11,
            "num_workers": 1,
        }
        first, second = search_of(sc, **arguments), search_of(sc, **arguments)
        told = [[(trial.number, trial.params, trial.history) for trial in search.trials] for search in (first, second)]
        assert told[0] == told[1]
        other = search_of(sc, **{**arguments, "seed": 12})
        assert [trial.params for trial in other.trials] != [trial.params for trial in first.trials]

    @pytest.mark.parametrize("algo", ["random", "anneal", hyperopt.tpe.suggest])
    def test_algorithms(self, sc, algo):
        search = search_of(sc, objective=parabola, algo=algo, max_evals=8)
        assert sorted(trial.number for trial in search.trials) == list(range(8))
        assert len({trial.params["x"] for trial in search.trials}) == 8  # each is drawn from a seed of its own
        assert search.best_value == min((trial.params["x"] - 3) ** 2 for trial in search.trials)

    def test_the_largest_value_is_best_where_it_is_to_be_maximized(self, sc, digits):
        x, y, *_ = digits
        search = search_of(
            sc, model=build, data=(x, y), space=SPACE, max_evals=4, epochs=2, validation_split=0.2, metric="val_accuracy"
        )
        assert search.best_value == max(trial.value for trial in search.trials)
        assert search.best_value == max(search.best_trial.history["val_accuracy"])
        assert search_of(sc, objective=parabola, mode="max").best_value == max(
            (trial.params["x"] - 3) ** 2 for trial in search_of(sc, objective=parabola, mode="max").trials
        )

    def test_http_carries_it_as_well(self, sc):
        assert len(search_of(sc, objective=parabola, transport="http").trials) == 6

    def test_spaces_of_objects_and_conditions(self, sc):
        def objective(params, data):
            assert params["activation"]([-1.0, 2.0]) == params["expected"] or params["activation"] is not None
            return params["layers"]["units"] + len(params["layers"])

        def doubled(values):
            return [2 * value for value in values]

        space = {
            "activation": hp.choice("activation", [doubled, sorted]),
            "expected": [1, (2, 3)],
            "layers": hp.choice("layers", [{"units": 1}, {"units": hp.quniform("wide", 4, 8, 2), "deep": True}]),
        }
        search = search_of(sc, objective=objective, space=space, max_evals=10)
        assert {trial.status for trial in search.trials} == {"ok"}
        assert search.best_value == 2
        assert {trial.params["activation"] for trial in search.trials} == {doubled, sorted}


class TestWhatATrialGets:
    def test_as_many_threads_as_its_task_has_cores(self, sc):
        def objective(params, data):
            import tensorflow as tf

            keras.ops.zeros(3)
            return {
                "loss": 0.0,
                "threads": tf.config.threading.get_intra_op_parallelism_threads(),
                "env": os.environ["NPROC"],
            }

        extra = search_of(sc, objective=objective, max_evals=1).best_trial.extra
        assert (extra["threads"], extra["env"]) == (1, "1")

    def test_nobody_waits_for_the_slowest(self, sc, tmp_path):
        """One trial ends only when all others have: they go through the other worker meanwhile."""

        def objective(params, data):
            slow = tmp_path / "slow"
            try:
                slow.touch(exist_ok=False)
            except FileExistsError:
                (tmp_path / f"done-{params['x']}").touch()
                return params["x"]
            while len(list(tmp_path.glob("done-*"))) < 7:
                time.sleep(0.05)
            return 100.0

        search = search_of(sc, objective=objective, max_evals=8)
        (slow,) = (trial for trial in search.trials if trial.value == 100.0)
        assert [trial.worker for trial in search.trials].count(slow.worker) == 1

    def test_fit_arguments_from_params_and_from_the_builder(self, sc, digits):
        x, y, *_ = digits

        def custom(params):
            return build({"units": 8, "lr": 0.01}), {"validation_data": (x[:50], y[:50])}

        space = {"epochs": hp.choice("epochs", [1, 2]), "batch_size": hp.choice("batch_size", [64, 128])}
        search = search_of(sc, model=custom, data=(x[50:], y[50:]), space=space, max_evals=5, epochs=9)
        assert [trial.epochs for trial in search.trials] == [trial.params["epochs"] for trial in search.trials]
        assert all("val_loss" in trial.history for trial in search.trials)

    def test_callbacks_are_new_in_each_trial(self, sc, digits):
        x, y, *_ = digits
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)
        search = search_of(
            sc, model=build, data=(x, y), space=SPACE, max_evals=3, epochs=9, validation_split=0.2, callbacks=[stopping]
        )
        assert [trial.epochs for trial in search.trials] == [2, 2, 2]

    def test_data_of_every_kind(self, sc, spark, digits):
        x, y, *_ = digits
        x, y = x[:400], y[:400]
        arguments = {"model": build, "space": SPACE, "max_evals": 1, "epochs": 2, "validation_split": 0.25, "num_workers": 1}
        kinds = {
            "arrays": (x, y),
            "dict": {"x": x, "y": y},
            "function": lambda: (x, y),
            "RDD": to_simple_rdd(sc, x, y, num_slices=1),
            "DataFrame": to_data_frame(spark, x, y).coalesce(1),
        }
        values = {name: search_of(sc, data=data, **arguments).best_value for name, data in kinds.items()}
        assert len(set(values.values())) == 1, values

    def test_validation_data_and_weights(self, sc, digits):
        x, y, *_ = digits
        arguments = {"model": build, "space": SPACE, "max_evals": 1, "epochs": 1, "num_workers": 1}
        held = search_of(sc, data=(x, y), validation_data=(x[:9], y[:9]), **arguments)
        in_dict = search_of(sc, data={"x": x, "y": y, "validation_data": (x[:9], y[:9])}, **arguments)
        weighted = search_of(sc, data=(x, y, np.zeros(len(x))), metric="loss", **arguments)
        assert held.best_value == in_dict.best_value
        assert weighted.best_value == 0

    def test_data_that_is_read_with_the_backend(self, sc):
        """A trial could not be forked from a process in which TensorFlow has run; so data is read in a child, too."""

        def read():
            return keras.ops.convert_to_numpy(keras.ops.arange(5)) * 2

        def objective(params, data):
            return float(keras.ops.sum(data))

        assert search_of(sc, objective=objective, data=read, max_evals=2).best_value == 20

    def test_it_is_called_once_in_each_worker(self, sc, tmp_path):
        def read():
            (tmp_path / str(time.time_ns())).touch()
            return 1

        search_of(sc, objective=parabola, data=read, max_evals=6, num_workers=1)
        assert len(list(tmp_path.iterdir())) == 1

    def test_an_objective_may_return_hyperopts_dict_and_a_model(self, sc, digits):
        x, y, *_ = digits

        def objective(params, data):
            model = build(params)
            history = model.fit(*data, epochs=1, verbose=0, callbacks=[ReportCallback("loss")])
            return {
                "loss": history.history["loss"][-1],
                "status": "ok",
                "model": model,
                "seen": np.int64(3),
                "odd": object(),
            }

        search = HyperParamModel(sc)
        best = search.minimize(objective=objective, data=(x, y), space=SPACE, max_evals=3, seed=1, verbose=0)
        assert search.best_trial.extra["seen"] == 3
        assert "object" in search.best_trial.extra["odd"]
        assert search.best_trial.epochs == 1
        assert best.count_params() == build(search.best_params).count_params()
        assert len(search.best_models(2)) == 2


class TestEarlyEnds:
    def test_asha_ends_hopeless_trials_and_reports_arrive(self, sc):
        def objective(params, data):
            for epoch in range(27):
                time.sleep(0.01)
                report(abs(params["x"]) + 1 / (epoch + 1), other=epoch)
            return abs(params["x"]) + 1 / 27

        search = search_of(sc, objective=objective, pruner=ASHAPruner(3, 1), max_evals=14)
        statuses = [trial.status for trial in search.trials]
        assert statuses.count("pruned") >= 5
        assert statuses.count("ok") >= 1
        for trial in search.trials:
            assert trial.epochs in {1, 3, 9, 27}
            assert len(trial.history["other"]) == trial.epochs
            assert trial.value == min(trial.history["loss"])

    def test_a_pruned_fit_ends_at_its_epoch(self, sc, digits):
        class Never:
            def should_prune(self, losses, others):
                return len(losses) == 2

        x, y, *_ = digits
        search = search_of(
            sc, model=build, data=(x, y), space=SPACE, max_evals=2, epochs=9, validation_split=0.2, pruner=Never()
        )
        assert [(trial.status, trial.epochs) for trial in search.trials] == [("pruned", 2), ("pruned", 2)]
        assert search.best_model is not None

    def test_timeout_keeps_what_was_reported(self, sc):
        def objective(params, data):
            for _ in range(3000):
                report(params["x"])
                time.sleep(0.1)
            return params["x"]

        search = search_of(sc, objective=objective, timeout=5)
        assert "timeout=5" in search.reason
        assert {trial.status for trial in search.trials} == {"stopped"}
        assert all(trial.value == trial.params["x"] for trial in search.trials if trial.epochs)

    def test_a_fit_that_is_stopped_hands_its_best_model_over(self, sc, digits, tmp_path):
        """Its second epoch would take for ever."""

        class Slow(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    (tmp_path / str(os.getpid())).touch()
                    time.sleep(300)

        x, y, *_ = digits
        search = HyperParamModel(sc)

        def stop():
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.05)
            search._found.ledger.stop("that is enough")

        threading.Thread(target=stop, daemon=True).start()
        best = search.minimize(
            model=build,
            data=(x, y),
            space=SPACE,
            max_evals=9,
            epochs=2,
            validation_split=0.2,
            callbacks=[Slow()],
            seed=1,
            verbose=0,
        )
        assert {(trial.status, trial.epochs) for trial in search.trials} == {("stopped", 1)}
        assert best.evaluate(x[-280:], y[-280:], verbose=0)[0] == pytest.approx(search.best_value, rel=1e-4)

    def test_loss_threshold_and_early_stop(self, sc):
        search = search_of(sc, objective=parabola, loss_threshold=1000, max_evals=50)
        assert len(search.trials) < 5
        stopped = search_of(sc, objective=lambda params, data: 1.0, early_stop_fn=no_progress_loss(4), max_evals=50)
        assert 4 <= len(stopped.trials) < 9  # and those that were running
        assert "early_stop_fn" in stopped.reason


class TestFailures:
    def test_a_trial_that_raises_is_recorded(self, sc):
        def objective(params, data):
            if params["x"] < 0:
                raise KeyError("no such thing")
            return params["x"]

        search = search_of(sc, objective=objective, max_evals=8)
        failed = [trial for trial in search.trials if trial.status == "failed"]
        assert failed
        assert all("KeyError: 'no such thing'" in trial.error and "objective(params" in trial.traceback for trial in failed)
        assert all(trial.value is None for trial in failed)
        with pytest.raises(SearchError, match=r"failed trials|trials failed.*no such thing"):
            search_of(sc, objective=objective, max_evals=8, max_failures=0)

    def test_if_all_fail_the_search_does(self, sc):
        def objective(params, data):
            raise ValueError("hopeless")

        with pytest.raises(SearchError, match="3 of 3 trials failed.*hopeless"):
            search_of(sc, objective=objective, max_evals=3)

    def test_nan_is_no_value(self, sc, digits):
        x, y, *_ = digits

        def diverging(params):
            model = build({"units": 8, "lr": 0.01})
            model.compile(keras.optimizers.SGD(1e30 if params["x"] < 3 else 0.1), "sparse_categorical_crossentropy")
            return model

        search = search_of(sc, model=diverging, data=(x, y), metric="loss", epochs=3, max_evals=5)
        diverged = [trial for trial in search.trials if trial.params["x"] < 3]
        assert diverged
        for trial in diverged:
            assert "not finite" in trial.error
            assert trial.epochs < 3
        assert all(trial.status == "ok" for trial in search.trials if trial.params["x"] >= 3)
        assert np.isfinite(search.best_value)

    @pytest.mark.parametrize(
        ("builder", "message"),
        [
            (lambda params: None, "returned None; expected a compiled keras.Model"),
            (lambda params: keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)]), "not compiled"),
            (lambda params: (build({"units": 8, "lr": 0.1}), {"epoch": 3}), "'epoch' as an argument of fit.*epochs"),
            (lambda params: (build({"units": 8, "lr": 0.1}), 3), "expected a compiled keras.Model"),
        ],
    )
    def test_builders_that_build_nothing(self, sc, digits, builder, message):
        x, y, *_ = digits
        with pytest.raises((SearchError, ConfigurationError), match=message):
            search_of(sc, model=builder, data=(x, y), max_evals=2, metric="loss")

    def test_a_metric_that_is_none(self, sc, digits):
        x, y, *_ = digits
        with pytest.raises(ConfigurationError, match="'val_los' is not among.*Did you mean 'val_loss'"):
            search_of(
                sc, model=build, data=(x, y), space=SPACE, metric="val_los", mode="min", validation_split=0.2, max_evals=99
            )
        with pytest.raises(ConfigurationError, match="need rows to validate on"):
            search_of(sc, model=build, data=(x, y), space=SPACE, max_evals=99)

    def test_a_killed_trial_is_given_out_again_and_counts_once(self, sc, tmp_path):
        mark = tmp_path / "killed"

        def objective(params, data):
            if params["x"] < 0:
                with contextlib.suppress(FileExistsError):  # one trial only, though two may be here at once
                    mark.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return params["x"]

        search = search_of(sc, objective=objective, max_evals=8)
        assert mark.exists()
        assert sorted(trial.number for trial in search.trials) == list(range(8))
        assert sorted(trial.attempts for trial in search.trials) == [1] * 7 + [2]
        assert all(trial.status == "ok" for trial in search.trials)

    def test_a_trial_that_always_kills_its_process_fails(self, sc):
        def objective(params, data):
            if params["x"] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return params["x"]

        search = search_of(sc, objective=objective, max_evals=6)
        failed = [trial for trial in search.trials if trial.params["x"] < 0]
        assert failed
        assert all(trial.status == "failed" and trial.attempts == 3 and "SIGKILL" in trial.error for trial in failed)

    def test_a_killed_worker(self, sc, tmp_path):
        """In ``local[2]`` Spark tries no task again, so the driver begins another job."""
        mark = tmp_path / "killed"

        def objective(params, data):
            with contextlib.suppress(FileExistsError):
                mark.touch(exist_ok=False)
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
            return params["x"]

        search = search_of(sc, objective=objective, max_evals=8)
        assert sorted(trial.number for trial in search.trials) == list(range(8))
        assert all(trial.status == "ok" for trial in search.trials)
        assert max(trial.attempts for trial in search.trials) >= 2

    def test_a_trial_that_always_kills_its_worker(self, sc):
        def objective(params, data):
            if params["x"] < 0:
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
            return params["x"]

        search = search_of(sc, objective=objective, max_evals=3, num_workers=1, seed=8)
        failed = [trial for trial in search.trials if trial.params["x"] < 0]
        assert failed
        assert all((trial.status, trial.attempts) == ("failed", 3) for trial in failed)
        assert len(search.trials) == 3

    @pytest.mark.cluster
    def test_a_killed_executor(self, sc, tmp_path):
        mark = tmp_path / "killed"

        def objective(params, data):
            if params["x"] < 0:
                with contextlib.suppress(FileExistsError):
                    mark.touch(exist_ok=False)
                    executor = next(p for p in psutil.Process().parents() if "java" in p.name())
                    executor.kill()
                    time.sleep(60)
            time.sleep(0.2)
            return params["x"]

        search = search_of(sc, objective=objective, max_evals=10)
        assert mark.exists()
        assert sorted(trial.number for trial in search.trials) == list(range(10))
        assert all(trial.status == "ok" for trial in search.trials)

    def test_a_job_that_is_cancelled_is_not_begun_again(self, sc, tmp_path):
        def objective(params, data):
            (tmp_path / "begun").touch()
            time.sleep(60)

        def cancel():
            while not (tmp_path / "begun").exists():
                time.sleep(0.05)
            sc.cancelAllJobs()

        threading.Thread(target=cancel, daemon=True).start()
        with pytest.raises(ClusterError, match="the Spark job was cancelled"):
            search_of(sc, objective=objective)

    def test_nothing_is_left(self, sc, digits):
        x, y, *_ = digits
        search_of(sc, objective=parabola, max_evals=20)  # the workers are there
        before = len(threading.enumerate())
        children = len(psutil.Process().children(recursive=True))
        descriptors = psutil.Process().num_fds()
        search = search_of(sc, model=build, data=(x, y), space=SPACE, epochs=1, metric="loss", max_evals=3)
        folder = Path(search._found.journal.folder)
        assert folder.is_dir()
        del search
        gc.collect()
        assert not folder.exists()
        assert len(threading.enumerate()) <= before
        assert len(psutil.Process().children(recursive=True)) <= children
        assert psutil.Process().num_fds() <= descriptors + 3
        settle(sc)
        assert sc.statusTracker().getActiveJobsIds() == []

    @pytest.mark.parametrize(("count", "growth"), [(20, 1.03), pytest.param(50, 1.1, marks=pytest.mark.soak)])
    def test_a_workers_memory_does_not_grow(self, sc, digits, count, growth):
        x, y, *_ = digits

        def objective(params, data):
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2048, "relu"), keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.fit(*data, epochs=1, verbose=0, batch_size=512)
            memory = psutil.Process(os.getppid()).memory_info()
            return {"loss": params["x"], "memory": memory.rss - memory.shared, "pid": os.getppid()}

        trials = search_of(sc, objective=objective, data=(x, y), num_workers=1, max_evals=count, algo="random").trials
        assert len({trial.extra["pid"] for trial in trials}) == 1
        memory = [trial.extra["memory"] for trial in trials]
        assert memory[-1] <= growth * memory[4], [round(each / 1e6) for each in memory]


class TestResume:
    def test_going_on_repeats_nothing(self, sc, tmp_path, digits):
        x, y, *_ = digits
        arguments = {
            "model": build,
            "data": (x, y),
            "space": SPACE,
            "epochs": 2,
            "validation_split": 0.2,
            "save_to": tmp_path / "search",
            "keep_models": 2,
        }
        first = search_of(sc, max_evals=3, **arguments)
        second = search_of(sc, max_evals=5, **arguments)
        told = {trial.number: trial for trial in second.trials}
        assert sorted(told) == [0, 1, 2, 3, 4]
        assert [told[trial.number] for trial in first.trials] == first.trials
        assert second.best_models(2)[0].evaluate(x[-280:], y[-280:], verbose=0)[0] == pytest.approx(
            second.best_value, rel=1e-4
        )
        assert len(list((tmp_path / "search" / "models").iterdir())) == 2
        third = search_of(sc, max_evals=5, **arguments)
        assert third.trials == second.trials
        with pytest.raises(ConfigurationError, match="holds another search.*metric"):
            search_of(sc, max_evals=5, **{**arguments, "metric": "loss"})

    def test_data_that_cannot_be_read_any_more_costs_no_trials(self, sc, tmp_path, digits):
        x, y, *_ = digits
        file = tmp_path / "there"
        file.touch()

        def read():
            file.read_bytes()
            return x, y

        arguments = {"model": build, "data": read, "space": SPACE, "metric": "loss", "save_to": tmp_path / "search"}
        search_of(sc, max_evals=2, **arguments)
        file.unlink()
        with pytest.raises(ConfigurationError, match="the function that reads the data failed: FileNotFoundError"):
            search_of(sc, max_evals=9, **arguments)
        file.touch()
        assert [trial.status for trial in search_of(sc, max_evals=4, **arguments).trials] == ["ok"] * 4

    def test_objects_of_the_space_are_each_models_own(self, sc, digits, tmp_path):
        x, y, *_ = digits
        layer = keras.layers.Dense(8, "relu")

        def build(params):
            model = keras.Sequential([keras.Input((64,)), params["layer"], keras.layers.Dense(10, "softmax")])
            model.compile(keras.optimizers.SGD(params["lr"]), "sparse_categorical_crossentropy")
            return model

        def space(layer):
            return {"layer": hp.choice("layer", [layer]), "lr": hp.uniform("lr", 0.01, 0.5)}

        arguments = {"model": build, "data": (x, y), "epochs": 2, "metric": "loss", "save_to": tmp_path / "search"}
        search = search_of(sc, space=space(layer), max_evals=2, **arguments)
        one, other = search.best_models(2)
        assert not layer.built
        assert not np.allclose(one.get_weights()[0], other.get_weights()[0])
        another = keras.layers.Dense(8, "relu")  # it has another name
        again = search_of(sc, space=space(another), max_evals=3, **arguments)
        assert len(again.trials) == 3

    def test_what_was_stopped_or_mistaken_is_run_anew(self, sc, tmp_path, digits):
        x, y, *_ = digits

        def objective(params, data):
            if slow.exists():
                report(params["x"])
                time.sleep(60)
            return params["x"]

        slow = tmp_path / "slow"
        slow.touch()
        arguments = {"objective": objective, "save_to": tmp_path / "search", "max_evals": 4}
        assert {trial.status for trial in search_of(sc, timeout=6, **arguments).trials} == {"stopped"}
        slow.unlink()
        search = search_of(sc, **arguments)
        assert [trial.status for trial in search.trials] == ["ok"] * 4
        arguments = {"model": build, "data": (x, y), "space": SPACE, "max_evals": 1, "save_to": tmp_path / "other"}
        with pytest.raises(ConfigurationError, match="is not among"):
            search_of(sc, metric="val_loss", **arguments)
        assert len(search_of(sc, metric="loss", **arguments).trials) == 1

    def test_an_early_stop_is_remembered(self, sc, tmp_path):
        def ended(max_evals):
            return search_of(
                sc,
                objective=lambda params, data: 1.0,
                early_stop_fn=no_progress_loss(3),
                save_to=tmp_path / "search",
                max_evals=max_evals,
                num_workers=1,
            )

        first = ended(20)
        assert len(first.trials) < 8
        assert ended(30).trials == first.trials

    def test_a_call_that_is_refused_changes_nothing(self, sc, tmp_path):
        arguments = {"objective": parabola, "space": LINE, "max_evals": 3, "seed": 1, "verbose": 0}
        search = HyperParamModel(sc)
        search.minimize(**arguments, save_to=tmp_path / "search")
        before = search.best_trial
        with pytest.raises(ConfigurationError, match="mode differs"):
            search.minimize(**arguments, mode="max", save_to=tmp_path / "search")
        assert search.best_trial == before

    def test_other_folders_are_left_alone(self, sc, tmp_path):
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(ConfigurationError, match=r"holds other things .thesis\.tex"):
            search_of(sc, objective=parabola, save_to=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_killed_driver(self, sc, tmp_path):
        script = tmp_path / "driver.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import os, signal, sys, time
                from hyperopt import hp
                from pyspark import SparkConf, SparkContext
                from sparkkeras.hyperopt import HyperParamModel

                def objective(params, data):
                    with open({str(tmp_path / "runs")!r}, "a") as runs:
                        runs.write(repr(params["x"]) + chr(10))
                    time.sleep(0.1)
                    return params["x"]

                def stop(trials, *given):
                    if len(trials.trials) == 5:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return False, given

                context = SparkContext(conf=SparkConf().setMaster("local[2]").set("spark.ui.enabled", "false"))
                search = HyperParamModel(context)
                search.minimize(objective=objective, space={{"x": hp.uniform("x", -10, 10)}}, max_evals=9, seed=5, verbose=0,
                                save_to={str(tmp_path / "search")!r}, early_stop_fn=stop)
                """
            )
        )

        killed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        recorded = [json.loads(path.read_text()) for path in (tmp_path / "search" / "trials").glob("*.json")]
        assert len(recorded) >= 5

        def objective(params, data):
            with (tmp_path / "runs").open("a") as runs:
                runs.write(f"{params['x']!r}\n")
            return params["x"]

        search = search_of(sc, objective=objective, max_evals=9, seed=5, save_to=tmp_path / "search")
        assert sorted(trial.number for trial in search.trials) == list(range(9))
        runs = (tmp_path / "runs").read_text().splitlines()
        for trial in recorded:
            assert runs.count(repr(trial["chosen"]["x"])) == 1


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "give one of model= .* and objective="),
            ({"objective": parabola, "model": build}, "give one of"),
            ({"objective": 3}, "objective=3: expected a function"),
            ({"objective": parabola, "max_evals": None}, "give max_evals="),
            ({"objective": parabola, "max_evals": 0}, "max_evals=0: expected a positive whole number"),
            ({"objective": parabola, "timeout": -1}, "timeout=-1: expected a positive number"),
            ({"objective": parabola, "algo": "bayes"}, "algo='bayes' is not known.*'tpe'"),
            ({"objective": parabola, "pruner": "medain"}, "Did you mean 'median'"),
            ({"objective": parabola, "mode": "best"}, "mode='best' is not known"),
            ({"objective": parabola, "keep_models": -1}, "keep_models=-1"),
            ({"objective": parabola, "space": {}}, "leaves nothing to choose"),
            ({"objective": parabola, "space": {"x": [1, 2]}}, "leaves nothing to choose"),
            ({"objective": parabola, "seed": -3}, "seed=-3"),
            ({"objective": parabola, "loss_threshold": "low"}, "loss_threshold='low'"),
            ({"objective": parabola, "epochs": 3}, "epochs= goes with model="),
            ({"objective": parabola, "early_stop_fn": 3}, "early_stop_fn=3: expected a function"),
            ({"objective": lambda: 1}, r"expected a function of \(params, data\)"),
            ({"objective": parabola, "save_to": 3}, "save_to=3: expected a path"),
            ({"objective": parabola, "features": "a"}, "data is no DataFrame"),
            ({"model": lambda: 1, "data": ([[1.0]], [1.0])}, r"build\(params\)"),
            ({"model": build, "metric": "val_niceness"}, "does not tell whether it shall be small or large"),
            ({"model": build, "data": list, "validation_data": 3}, "let the function return a dict"),
            ({"model": build, "callbacks": [1]}, "expected keras.callbacks.Callback objects"),
            ({"model": build, "class_weight": "balanced"}, "class_weight='balanced': expected a dict"),
        ],
    )
    def test_is_told_before_anything_starts(self, sc, arguments, message):
        with pytest.raises(ConfigurationError, match=message):
            search_of(sc, **arguments)

    def test_data_that_is_none(self, sc, digits):
        x, y, *_ = digits
        for data, message in [
            (None, "data is None"),
            (x, "expected .x, y."),
            ((x, y[:5]), "same number of rows"),
            ((x, None), "no labels"),
            ({"x": x, "labels": y}, "the key 'labels'"),
            ((np.full_like(x, np.nan), y), "NaN|finite"),
            ((x[:0], y[:0]), "no rows"),
        ]:
            with pytest.raises(DataError, match=message):
                search_of(sc, model=build, data=data, space=SPACE)
        with pytest.raises(ConfigurationError, match="one of validation_split and validation_data"):
            search_of(sc, model=build, data=(x, y), validation_data=(x, y), validation_split=0.5, space=SPACE)
        with pytest.raises(ConfigurationError, match="is a model; expected a function"):
            search_of(sc, model=build({"units": 8, "lr": 0.1}), data=(x, y), space=SPACE)

    def test_data_that_does_not_fit_the_model(self, sc, digits):
        """Only a trial can tell, and the first one does."""
        x, y, *_ = digits
        for data, message in [((x, y + 100), "has the label 109|labels"), ((x[:, :5], y), "shape")]:
            search = HyperParamModel(sc)
            with pytest.raises(ConfigurationError, match=message):
                search.minimize(model=build, data=data, space=SPACE, max_evals=50, metric="loss", seed=1, verbose=0)
            assert len(search.trials) <= 2

    def test_pruners_and_stop_functions_that_raise(self, sc):
        class Broken:
            def should_prune(self, losses, others):
                return 1 / 0

        def objective(params, data):
            report(1.0)
            return 1.0

        with pytest.raises(ConfigurationError, match="the pruner .*ZeroDivisionError"):
            search_of(sc, objective=objective, pruner=Broken())
        with pytest.raises(ConfigurationError, match="early_stop_fn .*ZeroDivisionError"):
            search_of(sc, objective=objective, early_stop_fn=lambda trials: 1 / 0)

    def test_an_objective_gets_data_if_there_are_any(self, sc):
        def objective(params, folds=3):
            return folds

        assert search_of(sc, objective=objective, max_evals=1).best_value == 3
        assert search_of(sc, objective=objective, data=5, max_evals=1).best_value == 5
        assert search_of(sc, objective=lambda params: 7.0, data=5, max_evals=1).best_value == 7

    @pytest.mark.parametrize(
        ("metric", "is_large_good"),
        [
            ("val_accuracy", True),
            ("val_auc_1", True),
            ("val_mean_io_u", True),
            ("f1_score", True),
            ("val_top_k_categorical_accuracy", True),
            ("val_account_mae", False),
            ("accuracy_loss", False),
            ("val_mean_squared_error", False),
            ("val_false_positives", False),
            ("val_error_accuracy", True),
            ("val_false_alarm_auc", True),
            ("precision_loss", False),
        ],
    )
    def test_what_a_metrics_name_tells(self, metric, is_large_good):
        from sparkkeras.hyperopt.checks import sign_of

        assert (sign_of(metric, "auto") < 0) == is_large_good
        assert sign_of(metric, "max") < 0 < sign_of(metric, "min")

    def test_what_cannot_travel(self, sc):
        lock = threading.Lock()
        with pytest.raises(CustomObjectError, match="objective cannot be sent"):
            search_of(sc, objective=lambda params, data: lock.locked())

    def test_unknown_arguments(self, sc):
        with pytest.raises(UnknownArgumentError, match="takes no argument 'max_eval'.*Did you mean 'max_evals'"):
            HyperParamModel(sc).minimize(objective=parabola, space=LINE, max_eval=3)
        with pytest.raises(ConfigurationError, match="server_options: max_staleness is of asynchronous training"):
            HyperParamModel(sc, server_options=ParameterServerOptions(max_staleness=3))
        with pytest.raises(ConfigurationError, match="sc='local'"):
            HyperParamModel("local")

    def test_rows_that_are_too_many(self, sc, monkeypatch):
        from sparkkeras.cluster import Cluster

        def full(self, rdd, partitions=None):
            raise ClusterError("... spark.driver.maxResultSize ...")

        rdd = to_simple_rdd(sc, np.zeros((4, 64), "float32"), np.zeros(4))
        search_of(sc, objective=parabola)
        monkeypatch.setattr(Cluster, "collect", full)
        with pytest.raises(ConfigurationError, match="more than spark.driver.maxResultSize allows.*a function that reads"):
            search_of(sc, model=build, data=rdd, space=SPACE)

    def test_more_workers_than_slots(self, sc):
        with pytest.warns(UserWarning, match="num_workers=9, but Spark has 2 free slots"):
            search_of(sc, objective=parabola, num_workers=9)

    def test_nothing_to_look_at_yet(self, sc):
        search = HyperParamModel(sc)
        assert search.trials == []
        for ask in (lambda: search.best_params, lambda: search.best_model):
            with pytest.raises(SearchError, match="call minimize first"):
                ask()
        for ask in (lambda: search.plot("search.png"), search.best_models, lambda: search.model_of(0)):
            with pytest.raises(SearchError, match="call minimize first"):
                ask()


class TestHyperoptsFmin:
    def test_spark_trials(self, sc):
        def objective(params, more=None):
            assert more is None
            return {"loss": (params["x"] - 3) ** 2, "status": "ok", "note": "here"}

        trials = SparkTrials(parallelism=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            best = hyperopt.fmin(
                objective, LINE, hyperopt.tpe.suggest, 12, trials=trials, rstate=np.random.default_rng(1), verbose=False
            )
        assert len(trials.trials) == 12
        assert set(best) == {"x"}
        assert trials.best_trial["result"]["loss"] == min(trials.losses()) == (best["x"] - 3) ** 2
        assert trials.best_trial["result"]["note"] == "here"
        assert trials.argmin == best
        assert trials.search.best_params == best

    def test_going_on_and_pickling(self, sc, tmp_path):
        def found(max_evals):
            trials = SparkTrials(parallelism=2, save_to=tmp_path / "search")
            hyperopt.fmin(lambda params: params["x"], LINE, hyperopt.rand.suggest, max_evals, trials=trials, verbose=False)
            return trials

        first, second = found(3), found(5)
        assert len(second.trials) == 5
        assert {trial["misc"]["vals"]["x"][0] for trial in first.trials} <= {
            trial["misc"]["vals"]["x"][0] for trial in second.trials
        }
        assert pickle.loads(pickle.dumps(second)).losses() == second.losses()

    def test_failures_do_not_end_it(self, sc):
        def objective(params):
            if params["x"] < 0:
                raise ValueError
            return params["x"]

        trials = SparkTrials(parallelism=2)
        hyperopt.fmin(
            objective, LINE, hyperopt.rand.suggest, 8, trials=trials, rstate=np.random.default_rng(1), verbose=False
        )
        assert {"ok", "fail"} == set(trials.statuses())


def test_progress_and_picture(sc, capsys, tmp_path):
    search = search_of(sc, objective=parabola, verbose=2)
    out = capsys.readouterr().out
    assert "Searching on 2 workers" in out
    assert all(f"trial {number} " in out for number in range(6))
    assert "6/6 trials - best loss" in out
    search.plot(tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
