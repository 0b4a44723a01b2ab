"""Checkpoints of synchronous training on in-memory datasets: resumed runs end with the bits of uninterrupted ones."""

import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras import Checkpoint, SparkModel
from sparkkeras.checkpoints.background_writer import BackgroundWriter
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.errors import ConfigurationError, DivergenceError, StorageError, TrainingInterruptedError
from sparkkeras.events import Events, RunResumed
from sparkkeras.modeling import metrics, outside
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.description import description
from sparkkeras.modeling.outside import dump_callbacks
from sparkkeras.modeling.state import ModelState
from sparkkeras.training import callback_states
from sparkkeras.training.checkpointing import CheckpointRecorder
from sparkkeras.training.fit_arguments import ASYNCHRONOUS_MODES
from sparkkeras.training.run import ServerSettings
from sparkkeras.training.saved_run import SavedRun, check_same
from sparkkeras.training.validation import Validation
from sparkkeras.worker.batches import BatchOptions, FitOptions
from tests.conftest import long
from tests.models import VariablesOfWorker, gan
from tests.rpc.test_transports import eventually
from tests.training.runs import (
    BATCH,
    Model,
    RecordedEvents,
    Snapshots,
    X,
    fit,
    noted,
    partitions,
    scaled_by,
    stored_run,
    weights_of,
)

EPOCHS = 3
LAYERS = keras.layers


@pytest.fixture(scope="module")
def scheduled():
    """Dropout, batch statistics, and a learning rate schedule."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 40)
    layers = (LAYERS.Dense(4, "relu"), LAYERS.BatchNormalization(), LAYERS.Dropout(0.3))
    return Model(*layers, optimizer=keras.optimizers.Adam(schedule))


@pytest.fixture(scope="module")
def averaged_once():
    return Model(LAYERS.Dropout(0.3), optimizer=keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5))


@pytest.fixture
def averaged(averaged_once):
    """A moving average of the weights, which replaces them at the end of training; in its initial state."""
    averaged_once.reset()
    return averaged_once


@pytest.fixture
def at_once(monkeypatch):
    """Checkpoints are written at once, so that none is replaced by a newer one."""
    monkeypatch.setattr(BackgroundWriter, "submit", BackgroundWriter._attempt)


def train(
    given,
    path,
    *,
    resume=False,
    dataset=None,
    every=1,
    seconds=None,
    keep=100,
    callbacks=(),
    mode="synchronous",
    **arguments,
):
    """Train with checkpoints; returns the history."""
    dataset = dataset or partitions(8, 5)
    recorder = CheckpointRecorder.open(Checkpoint(path, every, seconds, keep), resume, mode)
    settings = {"epochs": EPOCHS, "frequency": 1, "shuffle": True, "callbacks": callbacks} | arguments
    return fit(given, dataset, mode, recorder=recorder, **settings)[0]


def validated(dataset=None):
    """Arguments for validation on a part of the rows of each partition."""
    dataset = dataset or partitions(8, 5)
    split = TrainValidationSplit.split([handle.rows for handle in dataset.handles], 0.2)
    validation = Validation(dataset, BatchOptions(BATCH), 1, split.validation_spans)
    return {"dataset": dataset, "split": split, "validation": validation}


def bits(given):
    state = ModelState.take(given.model)
    integers = [each.tolist() for flat in (state.weights, state.optimizer) for each in flat.integer_variables]
    return state.weights.vector.tobytes(), state.optimizer.vector.tobytes(), integers


def cut(whole, path, number):
    """A folder with the first ``number`` checkpoints of another folder, as after a kill -9."""
    names = stored(whole).names()[::-1]
    path.mkdir()
    for name in names[:number]:
        shutil.copytree(whole / name, path / name)
    return len(names)


def stored(path):
    return CheckpointStore(str(path))


def newest(path):
    return SavedRun.newest(stored(path))


class Own(keras.callbacks.Callback):
    """A callback with a state of its own, which stops training."""

    def __init__(self):
        super().__init__()
        self.seen = {"epochs": [], "weights": None}

    def on_epoch_end(self, epoch, logs=None):
        self.seen["epochs"].append(epoch)
        self.seen["weights"] = self.model.get_weights()[0]
        self.model.stop_training = len(self.seen["epochs"]) == EPOCHS - 1

    def get_state(self):
        return self.seen

    def set_state(self, state):
        self.seen = state


def plain(folder):
    return []


def all_of_keras(folder):
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.001, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.2, cooldown=1, factor=0.5),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True),
        keras.callbacks.TensorBoard(folder / "logs"),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        Own(),
    ]


def states(callbacks):
    names = ("wait", "best", "best_epoch", "stopped_epoch", "cooldown_counter")
    found = [{name: vars(callback)[name] for name in names if name in vars(callback)} for callback in callbacks]
    seen = [callback.seen["epochs"] for callback in callbacks if isinstance(callback, Own)]
    return found, seen


@pytest.mark.parametrize(
    ("model", "make", "mode", "rule", "numbers"),
    [
        ("averaged", all_of_keras, "synchronous", "slowmo", (2, 3)),
        ("averaged", all_of_keras, "allreduce", None, (3,)),
        ("scheduled", plain, "asynchronous", None, (1,)),
        long("averaged", plain, "asynchronous", "dcasgd", None),
        long("scheduled", plain, "hogwild", None, None),
        long("averaged", all_of_keras, "synchronous", "slowmo", None),
        long("averaged", all_of_keras, "allreduce", None, None),
        long("averaged", plain, "two ranks", None, None),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(request, at_once, tmp_path, model, make, mode, rule, numbers):
    """From checkpoints in the middle of an epoch and at its end, with dropout, validation, schedules and callbacks."""
    given = request.getfixturevalue(model)
    if mode == "allreduce":  # a rank that is alone, in rounds of two steps
        chosen = {"mode": "allreduce", "every": 2, **validated(partitions(13))}
    elif mode in ASYNCHRONOUS_MODES:  # in memory, the second worker begins when the first one has ended
        chosen = {"mode": mode, "every": "epoch"}
    else:
        chosen = {"mode": "allreduce" if mode == "two ranks" else mode, **validated()}

    def run(name, **arguments):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        given.reset()
        callbacks, histories, rule_state = make(folder), [], {}
        history = train(
            given,
            folder / "run",
            callbacks=callbacks,
            rule=rule,
            rule_state=rule_state,
            histories=histories,
            **chosen,
            **arguments,
        )
        log = (folder / "log.csv").read_text() if make is all_of_keras else ""
        rows = [(entry["epoch"], entry["worker"], entry["rows"], entry["loss"]) for entry in histories]
        kept = {name: value.tobytes() for name, value in rule_state.items()}
        return bits(given), history.history, history.epoch, states(callbacks), log, rows, kept

    expected = run("whole")
    assert len(expected[2]) == EPOCHS - (make is all_of_keras)
    count = len(stored(tmp_path / "whole" / "run").names())
    assert count == len(expected[2]) * (1 if mode in ASYNCHRONOUS_MODES else 2)  # there are two rounds in an epoch
    for number in numbers or range(1, count + 1):
        folder = tmp_path / f"from {number}"
        folder.mkdir()
        cut(tmp_path / "whole" / "run", folder / "run", number)
        if make is all_of_keras:
            shutil.copy(tmp_path / "whole" / "log.csv", folder)  # with lines from after the checkpoint
        assert run(f"from {number}", resume=True) == expected, number


def test_the_model_of_a_checkpoint(tmp_path):
    """Keras loads its file, also where the model is sent without values, as large ones are."""
    layers = [LAYERS.Dense(600), LAYERS.BatchNormalization(), LAYERS.Dense(600)]
    given = Model(*layers, optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), run_eagerly=True)
    train(given, tmp_path, dataset=partitions(8), epochs=1, archive=given.archive)
    restored = SparkModel.from_checkpoint(tmp_path)
    assert bits(restored) == bits(given)
    restored.save(tmp_path / "saved.keras")
    loaded = keras.saving.load_model(tmp_path / "saved.keras")
    np.testing.assert_allclose(loaded(X), given.model(X), rtol=1e-5)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX trains with one optimizer only")
def test_the_model_of_a_checkpoint_has_the_optimizers_that_a_step_has_built(tmp_path):
    given = SimpleNamespace(model=gan())
    archive = ModelArchive.pack(given.model)  # before the rows are known
    metrics.prepare(given.model, partitions(8).blocks[0][:1])
    train(given, tmp_path, dataset=partitions(8), epochs=1, archive=archive)
    assert bits(SparkModel.from_checkpoint(tmp_path)) == bits(given)


@pytest.mark.soak
def test_more_epochs_continue_from_before_the_end_of_training(tmp_path, averaged):
    """At the end, the moving averages replace the weights; a longer training goes on with the weights themselves."""
    expected = train(averaged, tmp_path / "whole").history, bits(averaged)
    averaged.reset()
    train(averaged, tmp_path / "run", epochs=2)
    result = bits(averaged)
    averaged.reset()
    newest(tmp_path / "run").restore_result(averaged.model)
    assert bits(averaged) == result
    averaged.reset()
    assert (train(averaged, tmp_path / "run", resume=True).history, bits(averaged)) == expected


def test_a_completed_run_trains_nothing(tmp_path, averaged):
    history, expected = train(averaged, tmp_path, callbacks=[Own()]), bits(averaged)  # stops before the last epoch
    averaged.reset()
    recorder = CheckpointRecorder.open(Checkpoint(tmp_path), True, "synchronous")
    assert recorder.is_complete(EPOCHS)
    own, histories, listener = Own(), [], RecordedEvents()
    more = {"given": {"callbacks": [own]}, "histories": histories, "events": Events([listener])}
    found = recorder.restore_result(stored_run([averaged.model], partitions(8, 5), FitOptions(BATCH), **more))
    (told,) = listener.of(RunResumed)
    assert re.search("ended after 2 epochs, and epochs=1.*larger epochs=", told.text)
    assert (found.history, found.epoch, bits(averaged)) == (history.history, history.epoch, expected)
    assert [entry["epoch"] for entry in histories] == [0, 0, 1, 1]
    assert own.seen["epochs"] == [0, 1]


def failing(rounds, error):
    """A dataset that raises an error when training reaches a round."""
    left = iter(range(rounds))

    class Failing(LocalDataset):
        def train(self, task):
            if next(left, None) is None:
                error()
            return super().train(task)

    return Failing(partitions(8, 5).blocks)


def raising(kind):
    def raised():
        raise kind

    return raised


def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # the signal ends this


@pytest.mark.core
@pytest.mark.parametrize("kind", [KeyboardInterrupt, long(OSError)])
def test_interrupted_twice(tmp_path, scheduled, kind):
    """Ctrl-C, or an error, and SIGTERM end training with a checkpoint of the last round, from which it continues."""
    handler = signal.getsignal(signal.SIGTERM)
    scheduled.reset()
    expected = train(scheduled, tmp_path / "whole", **validated()).history, bits(scheduled)
    path = tmp_path / "run"
    scheduled.reset()
    with pytest.raises(kind):
        train(scheduled, path, every="epoch", **validated(failing(1, raising(kind))))
    assert newest(path).progress.rounds == 1
    scheduled.reset()
    with pytest.raises(TrainingInterruptedError, match=f"epoch 2, after 1 batch.*{path}/checkpoint-.*resume=True"):
        train(scheduled, path, every="epoch", resume=True, **validated(failing(2, terminated)))
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not any(thread.name.startswith("sparkkeras-checkpoints") for thread in threading.enumerate())
    scheduled.reset()
    found = train(scheduled, path, every="epoch", resume=True, **validated()).history, bits(scheduled)
    assert found == expected


class StopsWorker(keras.callbacks.Callback):
    """Stops the worker with the fewer rows in its first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.params["steps"] == 2


@pytest.mark.parametrize("mode", ["asynchronous", long("hogwild")])
def test_all_workers_train_the_epochs_that_are_added(at_once, tmp_path, averaged, mode):
    """Also those that had completed the first ones before the last worker did."""
    train(averaged, tmp_path, mode=mode, every="epoch", epochs=2)
    averaged.reset()
    server = ServerSettings("inprocess")
    history = train(averaged, tmp_path, mode=mode, every="epoch", epochs=4, resume=True, server=server)
    assert history.epoch == [0, 1, 2, 3]
    assert server.stats.steps == {0: 8, 1: 8}


def test_epochs_that_end_together_have_one_checkpoint(at_once, tmp_path, averaged):
    """Of the last one: the weights have its updates, which must not be made again."""
    server, callbacks = ServerSettings("inprocess"), ByValue.dump([StopsWorker()], "worker_callbacks")
    arguments = {"mode": "asynchronous", "every": "epoch", "dataset": partitions(12, 8), "server": server}
    train(averaged, tmp_path, worker_callbacks=callbacks, **arguments)
    assert server.stats.steps == {0: 9, 1: 2}
    found = [stored(tmp_path)._read(name).value.progress for name in stored(tmp_path).names()]
    parts = [(each.part.epoch, each.finished, each.workers.partitions[1].left) for each in found]
    assert parts == [(3, True, True), (1, False, False)]


class Interrupt(keras.callbacks.Callback):
    """Sends SIGINT at the begin of a batch of one epoch, once, and gives the driver time to handle it.

    It first waits for the checkpoint of the epoch before: the driver may still handle the end of this one.
    """

    def __init__(self, epoch, batch, folder):
        super().__init__()
        self.at, self.folder = (epoch, batch), folder
        self.epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            assert eventually(lambda: list(self.folder.glob("*/manifest.json")))
            time.sleep(0.2)
            signal.raise_signal(signal.SIGINT)
            time.sleep(1)


@pytest.mark.parametrize("mode", ["asynchronous", long("hogwild")])
def test_an_interrupt_keeps_the_updates_of_an_epoch_that_has_not_ended(tmp_path, averaged, mode):
    """The checkpoint has all updates; the model in this process keeps what it keeps without checkpoints."""
    server, callbacks = ServerSettings("inprocess"), ByValue.dump([Interrupt(1, 3, tmp_path)], "worker_callbacks")
    arguments = {"mode": mode, "every": "epoch", "dataset": partitions(20), "server": server}
    with pytest.raises(KeyboardInterrupt):
        train(averaged, tmp_path, worker_callbacks=callbacks, **arguments)
    saved = newest(tmp_path).progress
    assert (saved.part.epoch, saved.part.batches, saved.workers.partitions[0].steps) == (1, 3, 8)
    assert int(averaged.model.optimizer.iterations) == 5
    averaged.reset()
    histories = []
    history = train(averaged, tmp_path, resume=True, histories=histories, **arguments)
    assert history.epoch == [0, 1, 2]
    assert server.stats.steps == {0: 15}
    assert int(averaged.model.optimizer.iterations) == 15
    assert [entry["rows"] for entry in histories] == [20, 20, 20]


@pytest.mark.soak
def test_no_checkpoint_of_a_round_that_diverged(tmp_path, averaged):
    with pytest.raises(DivergenceError):
        train(averaged, tmp_path, every="epoch", callbacks=[Snapshots(blow_up=2)], dataset=partitions(8))
    assert newest(tmp_path).progress.part.epoch == 2


def test_a_sigterm_that_was_hidden_and_one_before_the_first_round(tmp_path, averaged):
    """Python hides exceptions of finalizers, in which the signal may arrive."""

    def hide(epoch, logs):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)

    early = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: signal.raise_signal(signal.SIGTERM))
    for callback, resume in ((keras.callbacks.LambdaCallback(on_epoch_end=hide), False), (early, True)):
        averaged.reset()
        with pytest.raises(TrainingInterruptedError, match="in epoch 2"):
            train(averaged, tmp_path, every="epoch", resume=resume, callbacks=[callback])
    assert len(stored(tmp_path).names()) == 1


def test_a_signal_or_an_error_without_a_checkpoint_and_after_training(tmp_path, scheduled):
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        scheduled.reset()
        with pytest.raises(OSError):
            train(scheduled, tmp_path, dataset=failing(0, raising(OSError)))
        with pytest.raises(TrainingInterruptedError, match="there is no checkpoint"):
            train(scheduled, tmp_path, dataset=failing(0, lambda: signal.raise_signal(signal.SIGTERM)))
        assert received == list(tmp_path.iterdir()) == []
        recorder = CheckpointRecorder.open(Checkpoint(tmp_path), False, "synchronous")
        original = recorder._writer.close
        recorder._writer.close = lambda: (signal.raise_signal(signal.SIGTERM), original())[1]
        fit(scheduled, partitions(20), recorder=recorder)  # ends as usual, and then the handler gets its signal
        assert received == [signal.SIGTERM]
        assert len(stored(tmp_path).names()) == 1
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.soak
def test_how_often_checkpoints_are_written(at_once, tmp_path, averaged, monkeypatch):
    def rounds(name, **arguments):
        averaged.reset()
        train(averaged, tmp_path / name, dataset=partitions(12), **arguments)
        store = stored(tmp_path / name)
        return [store._read(name).value.progress.rounds for name in store.names()[::-1]]

    assert rounds("epoch", every="epoch") == [3, 6, 9]
    assert rounds("every 2", every=2) == [2, 4, 6, 8, 9]
    assert rounds("keep", every=1, keep=2) == [8, 9]
    assert rounds("seconds", every=100, seconds=1e-9) == list(range(1, 10))


def test_a_store_that_fails(at_once, tmp_path, averaged, monkeypatch):
    real = CheckpointStore.write

    def trained(name, failing):
        """Train; returns the number of checkpoints."""
        writes = []

        def write(self, *arguments):
            writes.append(self)
            if len(writes) in failing:
                raise StorageError("the disk is full")
            return real(self, *arguments)

        monkeypatch.setattr(CheckpointStore, "write", write)
        averaged.reset()
        train(averaged, tmp_path / name, every="epoch")
        return len(stored(tmp_path / name).names())

    with pytest.warns(UserWarning, match="training continues: the disk"):
        assert trained("some", [1, EPOCHS]) == EPOCHS - 1  # the last one is tried again
    with (
        pytest.warns(UserWarning, match="training continues"),
        pytest.raises(StorageError, match="training was completed.*disk"),
    ):
        trained("always", range(100))
    assert not np.array_equal(weights_of(averaged.model), averaged.state.weights.vector)


def test_training_does_not_wait_for_a_slow_store(tmp_path, averaged, monkeypatch):
    """The first write ends after the last epoch; of the states in between, only the last one is written."""
    trained = threading.Event()
    write, close = CheckpointStore.write, BackgroundWriter.close

    def write_later(self, *arguments):
        assert trained.wait(60)
        return write(self, *arguments)

    def close_now(self):
        trained.set()
        return close(self)

    monkeypatch.setattr(CheckpointStore, "write", write_later)
    monkeypatch.setattr(BackgroundWriter, "close", close_now)
    train(averaged, tmp_path, every="epoch")
    store = stored(tmp_path)
    assert len(store.names()) == 2
    assert store.newest().value.progress.finished


def test_all_reduce_continues_with_other_rounds_of_which_worker_callbacks_see_nothing(tmp_path, averaged):
    arguments = {"mode": "allreduce", "dataset": partitions(13)}
    train(averaged, tmp_path / "run", every=3, epochs=2, worker_callbacks=noted(tmp_path / "calls"), **arguments)
    epochs = "epoch0 batch batch batch batch end epoch1 batch batch batch batch end"
    assert (tmp_path / "calls").read_text() == f"train {epochs} trained "
    with pytest.warns(UserWarning, match="every=3, .* every='epoch'"):
        assert train(averaged, tmp_path / "run", resume=True, every="epoch", **arguments).epoch == [0, 1, 2]
    of_unknown_length = {"every": 2, "split": TrainValidationSplit((None,), (0,))}
    with pytest.raises(ConfigurationError, match='function.*Use every="epoch"'):
        train(averaged, tmp_path / "other", **of_unknown_length, **arguments)


@pytest.mark.skipif(not hasattr(keras.callbacks, "OrbaxCheckpoint"), reason="an earlier version of Keras")
def test_the_state_of_orbax_checkpoints():
    kind = keras.callbacks.OrbaxCheckpoint
    before, after = kind.__new__(kind), kind.__new__(kind)  # Orbax need not be installed
    before.best = 0.5
    callback_states.put(callback_states.take([before]), [after])
    assert after.best == 0.5


class Rates(keras.callbacks.LearningRateScheduler):
    """Halves the learning rate in each epoch, and puts its variable into the logs."""

    def __init__(self):
        super().__init__(lambda epoch, rate: rate / 2)
        self.rates = {}

    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = self.model.optimizer.learning_rate
        self.rates[epoch] = round(float(logs["rate"]), 6)


SIZES, REVERSED = partitions(4, 4, 5), LocalDataset((partitions(8).blocks[0], partitions(8, 5).blocks[1][::-1]))


def test_other_partitions_in_the_middle_of_an_epoch(at_once, tmp_path, averaged):
    """Training continues from the end of an epoch, or trains batches again; the learning rate is changed once."""
    expected = Rates()
    train(averaged, tmp_path / "run", callbacks=[expected])  # two rounds in an epoch
    for number, (dataset, kept, words) in enumerate(
        (
            (SIZES, 2, "workers had 8, 5 rows"),
            (SIZES, 1, "first 1 batch of epoch 2"),
            (REVERSED, 2, "same in another order"),  # as after a shuffle of Spark
        )
    ):
        path, found = tmp_path / str(number), Rates()
        cut(tmp_path / "run", path, 3)
        for name in stored(path).names()[kept:]:
            shutil.rmtree(path / name)
        averaged.reset()
        with pytest.warns(UserWarning, match=words):
            history = train(averaged, path, resume=True, dataset=dataset, callbacks=[found])
        assert found.rates == {epoch: expected.rates[epoch] for epoch in (1, 2)}
        assert [round(float(rate), 6) for rate in history.history["rate"]] == list(expected.rates.values())
        assert int(averaged.model.optimizer.iterations) == 2 + 2 * 2 + (kept == 1)


def test_a_variable_outside_the_model_continues_with_its_value(at_once, tmp_path, averaged):
    alpha = keras.Variable(1.0)
    given = scaled_by(alpha)
    halving = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: alpha.assign(alpha * 0.5))
    expected, final = train(given, tmp_path / "run", callbacks=[halving]).history, bits(given)
    cut(tmp_path / "run", tmp_path / "cut", 2)
    given.reset()
    assert float(alpha) == 1.0
    assert train(given, tmp_path / "cut", callbacks=[halving], resume=True).history == expected
    assert bits(given) == final
    assert float(alpha) == 0.5**EPOCHS
    saved = newest(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="1 variable outside"):
        saved.restore_result(averaged.model)


class Halving(keras.callbacks.Callback):
    """Halves a variable of a worker in each epoch, after the first one when the driver has written a checkpoint."""

    def __init__(self, variable, folder):
        super().__init__()
        self.variable, self.folder = variable, folder

    def on_epoch_begin(self, epoch, logs=None):
        assert not epoch or eventually(lambda: list(self.folder.glob("*/manifest.json")))
        self.variable.assign(self.variable * 0.5)


def test_workers_continue_with_their_own_variable_unless_the_driver_has_set_it(at_once, monkeypatch, tmp_path):
    alpha = keras.Variable(1.0)
    monkeypatch.setattr(outside, "_known", VariablesOfWorker(alpha))
    given = scaled_by(alpha)

    def trained(path, hook, resume=False):
        def set_once(epoch, logs):
            if epoch == (hook == "on_epoch_begin"):
                alpha.assign(3.0)

        alpha.assign(1.0)
        given.reset()
        callbacks = [keras.callbacks.LambdaCallback(**{hook: set_once})] if hook else []
        on_workers = dump_callbacks([Halving(alpha, path)], [given.model])
        settings = {"mode": "asynchronous", "every": "epoch", "dataset": partitions(8), "worker_callbacks": on_workers}
        train(given, path, resume=resume, callbacks=callbacks, **settings)
        return float(alpha)

    for hook, expected in (("on_epoch_end", 3), ("on_epoch_begin", 3), (None, 0.5**EPOCHS)):
        whole, part = tmp_path / f"run {hook}", tmp_path / f"cut {hook}"
        assert trained(whole, hook) == pytest.approx(expected)
        cut(whole, part, 1)
        assert trained(part, hook, resume=True) == pytest.approx(expected)


def test_what_has_changed_since_the_checkpoint(tmp_path, averaged, scheduled):
    """The rate with which training began is kept: the first script is accepted after one with another has continued."""
    train(averaged, tmp_path, epochs=1, every="epoch", callbacks=[Own()])
    before = sorted(each.name for each in tmp_path.iterdir())
    for given, more, message in (
        (averaged, {"dataset": partitions(8, 4), "epochs": 2}, "other data.*rows: 13.*12 now"),
        (scheduled, {}, r"another model.*model\.config\.layers\[1\]"),
        (averaged, {"resume": False}, "pass resume=True"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            train(given, tmp_path, **{"resume": True} | more)
    assert sorted(each.name for each in tmp_path.iterdir()) == before
    averaged.model.optimizer.learning_rate = 0.3
    with (
        pytest.warns(UserWarning, match="learning rate 0.3.* 0.05"),
        pytest.warns(UserWarning, match="state of Own, but callbacks="),
    ):
        train(averaged, tmp_path, epochs=2, every="epoch", resume=True)
    assert newest(tmp_path).work.rates == {"learning_rate": pytest.approx(0.05)}


def test_differences_are_named_with_both_values():
    stored = {"batch_size": 32, "layers": [{"units": 3}], "rule": "average", "empty": {}}
    check_same(stored, {"batch_size": 32, "layers": ({"units": 3},), "rule": "average", "empty": {}}, "a", "b")
    message = (
        r"batch_size: 32 in the checkpoint, 64 now; layers\[0\].units: 3 in the checkpoint, 4 now; "
        r'rule: "average" in the checkpoint, nothing now; empty: {} in the checkpoint, nothing now; and 1 difference more'
    )
    with pytest.raises(ConfigurationError, match=f"checkpoint-1 in 'runs/a' .*{message}"):
        check_same(stored, {"batch_size": 64, "layers": [{"units": 4}, {"units": 5}]}, "runs/a", "checkpoint-1")
    with pytest.raises(ConfigurationError, match="rate: 0.01 in"):
        check_same({"rate": 0.009999999776482582}, {"rate": 0.5}, "a", "b")


def test_a_model_that_is_built_again_has_the_same_description():
    def build():
        x = keras.Input((4, 4, 1))
        y = keras.ops.relu(LAYERS.Add()([x, LAYERS.RandomCrop(4, 4)(x)]))  # draws its own seed
        model = keras.Model(x, LAYERS.Dense(1)(y))
        model.compile("adam", "mse", metrics=["mae"])
        return model

    assert description(build()) == description(build())


@pytest.mark.parametrize(
    ("checkpoint", "resume", "mode", "message"),
    [
        (None, True, "synchronous", "resume=True: pass checkpoint="),
        ("runs/a", False, "synchronous", "checkpoint='runs/a': expected"),
        (Checkpoint("a", 5), False, "hogwild", r"every=5\): in mode='hogwild'"),
    ],
)
def test_arguments_that_do_not_fit(checkpoint, resume, mode, message):
    with pytest.raises(ConfigurationError, match=message):
        CheckpointRecorder.open(checkpoint, resume, mode)


def test_callbacks_that_cannot_be_resumed(tmp_path, averaged):
    class Half(keras.callbacks.Callback):
        def get_state(self):
            return {}

    class Bad(Own):
        def get_state(self):
            return {"model": self.model}

    adds = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(picture=averaged))
    for callback, message in (
        (keras.callbacks.BackupAndRestore(tmp_path / "backup"), "BackupAndRestore and checkpoint="),
        (Half(), r"Half.*get_state\(\) and set_state"),
        (Bad(), r"Bad.get_state\(\)\['model'\] cannot"),
        (adds, r"logs\['picture'\] cannot be stored"),
    ):
        averaged.reset()
        with pytest.raises(ConfigurationError, match=message):
            train(averaged, tmp_path / type(callback).__name__, callbacks=[callback])
