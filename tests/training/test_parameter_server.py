"""Training through a parameter server, on in-memory datasets without Spark, one worker at a time.

Workers that come one after the other make every value predictable; tests/integration/test_asynchronous.py has real ones.
"""

import gc
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import psutil
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import FilesMissing
from sparkkeras.data.local_dataset import LocalDataset, LocalResults, LocalRunning, LocalStream
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.errors import ConfigurationError, DivergenceError, DriverConnectionError
from sparkkeras.events import Incident
from sparkkeras.modeling import metrics, outside
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.metrics import mean_logs
from sparkkeras.modeling.optimizers import iterations, set_iterations
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.rules import DCASGD, EAMSGD, EASGD, Downpour
from sparkkeras.rpc import inprocess
from sparkkeras.rpc.options import ParameterServerOptions
from sparkkeras.spark.slots import held_slots
from sparkkeras.training import parameter_server
from sparkkeras.training.parameter_server import unmoved_warning
from sparkkeras.training.run import ServerSettings
from sparkkeras.training.validation import Validation
from sparkkeras.worker.batches import BatchOptions
from tests.conftest import long
from tests.models import Gan, VariablesOfWorker, gan
from tests.rpc.test_transports import eventually
from tests.training.runs import BATCH, Model, Snapshots, X, Y, close, fit, partitions, rows


def sgd(**options):
    return keras.optimizers.SGD(**({"learning_rate": 0.02, "momentum": 0.8} | options))


@pytest.fixture(scope="module")
def linear_sgd():
    return Model(optimizer=sgd(nesterov=True))


@pytest.fixture
def linear(linear_sgd):
    """A linear model with SGD and momentum, in its initial state."""
    linear_sgd.reset()
    return linear_sgd


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test, no thread, port or signal handler remains."""
    before = set(threading.enumerate())
    yield
    if keras.backend.backend() != "tensorflow":
        gc.collect()  # a fit that failed leaves a thread for callbacks, which Keras ends with their list
    assert eventually(lambda: set(threading.enumerate()) <= before)
    assert eventually(lambda: psutil.CONN_LISTEN not in [each.status for each in psutil.Process().net_connections("inet")])
    assert inprocess._served == {}


def train(given, dataset, mode="asynchronous", *, transport="inprocess", port=0, options=None, **arguments):
    """Train; return the history, the server's statistics and the recorded rounds."""
    server = ServerSettings(transport, port, ParameterServerOptions(**(options or {})))
    history, rounds = fit(given, dataset, mode, server=server, **arguments)
    return history, server.stats, rounds


def plain(given, epochs, stop=22, **arguments):
    """Train with plain Keras on the first rows."""
    return given.reset().fit(X[:stop], Y[:stop], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments)


# One worker


@pytest.mark.parametrize(
    ("mode", "frequency", "encrypt", "transport"),
    [
        pytest.param("asynchronous", 4, True, "inprocess", marks=pytest.mark.core),
        pytest.param("hogwild", "epoch", False, "inprocess", marks=pytest.mark.core),
        ("asynchronous", 4, True, "socket"),
        ("hogwild", "epoch", False, "http"),
        long("asynchronous", 4, True, "http"),
        long("hogwild", "epoch", False, "socket"),
    ],
)
def test_one_worker_equals_plain_keras_with_every_transport(linear, transport, mode, frequency, encrypt):
    options = {"encrypt": encrypt}
    history, stats, _ = train(
        linear, partitions(22), mode, transport=transport, options=options, frequency=frequency, epochs=3
    )
    found = ModelState.take(linear.model)
    expected = plain(linear, 3).history
    assert close(linear.model, found.weights.vector, found.optimizer.vector)
    assert [int(each) for each in found.optimizer.integer_variables] == [18]
    assert history.history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert history.history["mae"] == pytest.approx(expected["mae"], rel=1e-5)
    assert stats.transport == transport
    assert stats.steps == {0: 18}
    assert stats.staleness == {0: stats.pushes}
    assert stats.pushes == 3 * (2 if frequency == 4 else 1)
    assert (stats.duplicates, stats.rejected_requests) == (0, {})
    assert stats.sent_bytes >= 16
    assert stats.seconds > 0


@pytest.mark.parametrize("rule", ["dynsgd", DCASGD(0.5), "downpour"])
def test_with_one_worker_staleness_correcting_rules_equal_plain_keras(linear, rule):
    train(linear, partitions(22), rule=rule, frequency=2, epochs=2)
    found = ModelState.take(linear.model).weights.vector
    plain(linear, 2)
    assert close(linear.model, found)


@pytest.mark.parametrize(
    "rule",
    [long("downpour"), long("agn"), "dynsgd", long("easgd"), "eamsgd", "dcasgd", long(EASGD(0.5)), long(EAMSGD(1.0))],
    ids=str,
)
def test_every_rule_learns(linear, rule):
    history, _, _ = train(linear, partitions(20, 20), rule=rule, frequency=2, epochs=12, shuffle=True)
    assert history.history["loss"][-1] < 0.3 * history.history["loss"][0]
    assert linear.model.evaluate(X[:40], Y[:40], verbose=0)[0] < 0.3 * history.history["loss"][0]


def test_statistics_equal_those_of_plain_keras():
    given = Model(keras.layers.BatchNormalization(momentum=0.7), optimizer=sgd())
    train(given, partitions(22), epochs=3, frequency=2)
    found = ModelState.take(given.model)
    plain(given, 3)
    assert close(given.model, found.weights.vector, found.optimizer.vector)


@keras.saving.register_keras_serializable(package="tests_of_parameter_server")
class Counting(keras.layers.Layer):
    """Counts training calls in an integer weight."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x


def test_integer_weights_count_all_batches():
    given = Model(Counting(), keras.layers.Dropout(0.2, seed=3), optimizer=sgd())
    train(given, partitions(22), epochs=2, frequency=2)
    assert int(given.model.layers[0].calls) == 12
    train(given, partitions(8, 20), epochs=1)  # two workers, one after the other, continue from 12
    assert int(given.model.layers[0].calls) == 12 + 2 + 5


def test_sample_weights_are_applied(linear):
    weight = np.linspace(0, 2, 22).astype(np.float32)
    history, _, _ = train(linear, LocalDataset((rows(X[:22], Y[:22], weight),)), epochs=2, frequency=3)
    found = ModelState.take(linear.model).weights.vector
    expected = plain(linear, 2, sample_weight=weight)
    assert close(linear.model, found)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)


def test_moving_averages_replace_the_weights_at_the_end():
    given = Model(optimizer=sgd(use_ema=True, ema_momentum=0.5))
    train(given, partitions(20), epochs=2, frequency=2)
    found = ModelState.take(given.model).weights.vector
    plain(given, 2, 20)
    assert close(given.model, found)


def test_a_second_fit_continues_with_optimizer_variables_steps_and_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=3, decay_rate=0.7)
    given = Model(optimizer=sgd(learning_rate=schedule))
    for epoch in range(2):
        history, stats, _ = train(given, partitions(22), initial_epoch=epoch, epochs=epoch + 1, frequency=2)
        assert history.epoch == [epoch]
        assert stats.steps == {0: 6}
    found = ModelState.take(given.model)
    plain(given, 2)
    assert close(given.model, found.weights.vector, found.optimizer.vector)
    assert int(found.optimizer.integer_variables[0]) == 12


# Workers that run one after the other


def test_workers_that_run_one_after_the_other_continue_each_others_weights(linear):
    """Each worker starts from the weights of the previous one with fresh optimizer variables, whose mean is kept."""
    histories = []
    history, stats, _ = train(linear, partitions(20, 8), epochs=2, frequency=2, histories=histories)
    found = ModelState.take(linear.model)
    slots, losses = [], []
    model = linear.reset()
    beginning = linear.state.optimizer
    for start, stop in ((0, 20), (20, 28)):
        ModelState(ModelState.take(model).weights, beginning).put(model)
        trained = model.fit(X[start:stop], Y[start:stop], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        losses.append(trained.history["loss"])
        slots.append(ModelState.take(model).optimizer.vector)
    assert close(model, found.weights.vector)
    mean = np.average(slots, axis=0, weights=[20, 8])
    np.testing.assert_allclose(found.optimizer.vector, mean, rtol=0, atol=1e-6)
    assert [int(each) for each in found.optimizer.integer_variables] == [10]  # those of the worker with the most steps
    for epoch in range(2):
        own = [entry["loss"] for entry in histories if entry["epoch"] == epoch]
        assert own == pytest.approx([each[epoch] for each in losses], rel=1e-5)
        assert history.history["loss"][epoch] == pytest.approx(np.average(own, weights=[20, 8]), rel=1e-5)
    assert stats.steps == {0: 10, 1: 4}


@pytest.mark.parametrize("frequency", [1, long(2), 3, long(4), 5, long(7), "epoch"])
def test_windows_restart_in_each_epoch_and_no_step_is_lost(linear, frequency):
    _, stats, rounds = train(linear, partitions(18, 7, None), epochs=3, frequency=frequency)  # five batches, and two
    every = 5 if frequency == "epoch" else frequency
    assert stats.pushes == 3 * (-(-5 // every) + -(-2 // every))
    assert stats.steps == {0: 15, 1: 6}
    assert sum(seen for seen, _ in rounds) == 3 * 25
    assert rounds[-1][1] == 1.0


@pytest.mark.parametrize(("steps", "pushes", "taken"), [(2, 2, [8, 7]), (3, 3, [12, 7]), (99, 4, [18, 7])])
def test_steps_per_epoch_limits_an_epoch(linear, steps, pushes, taken):
    histories = []
    _, stats, _ = train(linear, partitions(18, 7), frequency=2, steps_per_epoch=steps, histories=histories)
    assert [entry["rows"] for entry in histories] == taken
    assert stats.pushes == pushes
    assert stats.steps == {0: min(steps, 5), 1: 2}


def test_a_staleness_bound_does_not_block_workers_that_run_one_after_the_other(linear):
    options = {"max_staleness": 0}
    history, stats, _ = train(linear, partitions(3, None, 40, 1), epochs=3, frequency=1, options=options)
    assert len(history.epoch) == 3
    assert stats.steps == {0: 3, 2: 30, 3: 3}


@dataclass(frozen=True)
class Clipped:
    """A custom rule that records its calls."""

    notes: str
    most: float = 0.05
    modes = frozenset({"asynchronous", "hogwild"})

    def init(self, center):
        return {"applies": np.zeros_like(center)}

    def exchange(self, local, base, center, window):
        sent = np.clip(local - base, -self.most, self.most)
        with open(self.notes, "a") as file:
            file.write(f"{window.steps} {window.rows} {window.learning_rate:.3f} {window.num_workers}\n")
        return sent, center + sent

    def apply(self, center, state, update, staleness):
        assert np.abs(update.sent).max() <= np.float32(self.most)
        assert staleness == 0
        state["applies"] += update.steps
        center += update.sent


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_custom_rule_gets_windows_and_keeps_its_state(linear, tmp_path, mode):
    rule, state = Clipped(str(tmp_path / "notes")), {}
    train(linear, partitions(18, 7), mode, rule=rule, rule_state=state, frequency=3)
    windows = ["3 12 0.020 1", "2 6 0.020 1", "2 7 0.020 1"]
    assert (tmp_path / "notes").read_text().splitlines() == windows
    assert state["applies"].tolist() == [7, 7, 7, 7]
    train(linear, partitions(18, 7), mode, rule=rule, rule_state=state, frequency=3)
    assert state["applies"].tolist() == [14, 14, 14, 14]


class Losing(LocalDataset):
    """A dataset where the files of some partitions are missing until these are read again from their source."""

    lost = frozenset({1})

    def train(self, task):
        whole = LocalDataset.train(self, task)

        def without():
            from sparkkeras.data.dataset import TaskContext

            found = []
            for number, block in enumerate(self.blocks):

                def given(number=number, block=block):
                    if number in self.lost:
                        raise FilesMissing("gone")
                    yield block

                try:
                    found.append(list(task(TaskContext(number, 10**6 + number), given())))
                except FilesMissing:
                    found.append([])
            return found

        return ReadAgain(without, whole)


@dataclass(frozen=True)
class ReadAgain(LocalResults):
    whole: LocalResults

    def from_source(self, partitions):
        return self.whole.from_source(partitions)


class Incidents(keras.callbacks.Callback):
    """Keeps the kinds of the incidents."""

    def __init__(self):
        super().__init__()
        self.kinds = []

    def on_event(self, event):
        self.kinds += [event.kind] if isinstance(event, Incident) else []


def test_a_partition_with_missing_files_is_trained_from_its_source(linear):
    histories, incidents = [], Incidents()
    _, stats, _ = train(linear, Losing(partitions(20, 8).blocks), epochs=2, histories=histories, callbacks=[incidents])
    assert incidents.kinds == ["repair", "takeover"]
    found = ModelState.take(linear.model).weights.vector
    assert stats.steps == {0: 10, 1: 4}
    assert [(entry["epoch"], entry["worker"]) for entry in histories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    linear.reset()
    train(linear, partitions(20, 8), epochs=2)
    assert close(linear.model, found)


class Again(LocalDataset):
    """A dataset that retries a failed task once, as Spark does."""

    def train(self, task):
        from sparkkeras.data.dataset import TaskContext

        def attempts():
            found = []
            for number, block in enumerate(self.blocks):
                with suppress(RuntimeError):
                    found.append(list(task(TaskContext(number, 10**6 + number), iter((block,)))))
                    continue
                found.append(list(task(TaskContext(number, 2 * 10**6 + number), iter((block,)))))
            return found

        return LocalResults(attempts)


@pytest.mark.parametrize("stream", [False, True])
def test_an_attempt_that_takes_over_keeps_the_progress_of_the_previous_one(tmp_path, stream):
    mark = tmp_path / "mark"

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3 and not mark.exists():
                mark.touch()
                raise RuntimeError("on purpose")

    given = Model(optimizer=sgd(momentum=0.0))
    callbacks = ByValue.dump([Fail()], "callbacks")
    parts = partitions(22).blocks
    if stream:
        parts = (LocalStream(tuple(parts[0].batches(BATCH))),)
    history, stats, _ = train(given, Again(parts), epochs=2, frequency=1, worker_callbacks=callbacks)
    assert (stats.takeovers, stats.pushes, stats.steps) == (1, 12, {0: 12})
    found = ModelState.take(given.model).weights.vector
    expected = plain(given, 2)
    assert close(given.model, found)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)


# Logs, weights and callbacks on the driver


def test_callbacks_get_the_weights_of_their_epoch(linear):
    mine, theirs = Snapshots(), Snapshots()
    train(linear, partitions(22), epochs=4, frequency=2, callbacks=[mine])
    plain(linear, 4, callbacks=[theirs])
    np.testing.assert_allclose(mine.weights, theirs.weights, rtol=0, atol=1e-6)


def test_callbacks_get_the_largest_number_of_steps_of_a_worker(linear):
    seen = []

    class Iterations(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(int(self.model.optimizer.iterations))

    train(linear, partitions(18, 7), epochs=2, frequency=2, callbacks=[Iterations()])
    assert seen == [5, 10]


@keras.saving.register_keras_serializable("tests_of_parameter_server")
class Uneven(Gan):
    """Applies one optimizer twice as often as the other."""

    def train_step(self, data):
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply([0 * weight for weight in weights], weights)
        return super().train_step(data)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras passes one optimizer to a train_step of JAX")
def test_each_optimizer_has_its_own_number_of_iterations(tmp_path):
    mark, seen = tmp_path / "mark", []

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2 and not mark.exists():
                mark.touch()
                raise RuntimeError("on purpose")

    class Iterations(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(iterations(self.model))

    given = SimpleNamespace(model=gan(Uneven))
    metrics.prepare(given.model, from_arrays(X[:1], None, None).spec.zeros())
    set_iterations(given.model, [10, 20])
    callbacks = ByValue.dump([Fail()], "callbacks")
    blocks = [from_arrays(X[:12].copy(), None, None)]
    _, stats, _ = train(given, Again(blocks), epochs=2, frequency=1, worker_callbacks=callbacks, callbacks=[Iterations()])
    assert stats.takeovers == 1
    assert [*seen, iterations(given.model)] == [[16, 23], [22, 26], [22, 26]]


@pytest.mark.parametrize("own", [False, True])
def test_validation_uses_the_weights_of_its_epoch(linear, own):
    """The worker is several epochs ahead of the driver, whose callback is slow."""
    dataset = partitions(22)
    parts = TrainValidationSplit.split([handle.rows for handle in dataset.handles], 0.2)
    held_out = LocalDataset((rows(X[17:19], Y[17:19]), None, rows(X[19:20], Y[19:20]), rows(X[20:22], Y[20:22])))
    validation = (
        Validation(held_out, BatchOptions(BATCH), 2)
        if own
        else Validation(dataset, BatchOptions(BATCH), 2, parts.validation_spans)
    )
    validated = []

    class Validated(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert ("val_loss" in logs) == ((epoch + 1) % 2 == 0)
            if (epoch + 1) % 2 == 0:
                validated.append(self.model.evaluate(X[17:22], Y[17:22], verbose=0))

    history, stats, _ = train(
        linear, dataset, epochs=6, split=parts, validation=validation, callbacks=[Validated()], frequency=2, shuffle=True
    )
    assert stats.steps == {0: 30}  # 17 rows, five batches
    found = list(zip(history.history["val_loss"], history.history["val_mae"], strict=True))
    assert len(found) == 3
    np.testing.assert_allclose(found, validated, rtol=1e-5)


@dataclass
class Noted:
    """A file that callbacks on the driver and on workers write to."""

    path: Path

    def callback(self, wait_for=None, stop_at=None, stop_at_batch=None):
        path = str(self.path)

        class Notes(keras.callbacks.Callback):
            epoch = None

            def say(self, *words):
                with open(path, "a") as file:
                    file.write(" ".join(map(str, words)) + "\n")

            def on_train_begin(self, logs=None):
                self.say("begin")

            def on_epoch_begin(self, epoch, logs=None):
                import time
                from pathlib import Path

                self.epoch = epoch
                while wait_for is not None and not Path(f"{wait_for}-{epoch}").exists():
                    time.sleep(0.01)

            def on_train_batch_end(self, batch, logs=None):
                if (self.epoch, batch) == (stop_at, stop_at_batch):
                    self.model.stop_training = True

            def on_epoch_end(self, epoch, logs=None):
                self.say(epoch, round(float(self.model.optimizer.learning_rate), 6))
                if epoch == stop_at and stop_at_batch is None:
                    self.model.stop_training = True

            def on_train_end(self, logs=None):
                self.say("end")

        return ByValue.dump([Notes()], "worker_callbacks")

    def read(self):
        return self.path.read_text().split("\n")[:-1]


@pytest.fixture
def noted(tmp_path):
    return Noted(tmp_path / "notes")


def test_a_learning_rate_set_by_a_callback_reaches_workers_at_the_next_exchange(linear, noted, tmp_path):
    """The worker waits for the driver before each epoch, so it gets the rate in that epoch or in the next."""
    rates = [0.02, 0.01, 0.004, 0.002]

    class Rate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = rates[epoch]
            (tmp_path / f"mark-{epoch}").touch()

    train(
        linear, partitions(22), epochs=4, frequency=1, callbacks=[Rate()], worker_callbacks=noted.callback(tmp_path / "mark")
    )
    found = [float(line.split()[1]) for line in noted.read()[1:-1]]
    assert len(found) == 4
    for epoch, rate in enumerate(found):
        assert rate in rates[max(0, epoch - 1) : epoch + 1]
    assert float(linear.model.optimizer.learning_rate) == pytest.approx(rates[-1])


def test_worker_callbacks_keep_their_state_across_epochs(linear, noted):
    train(linear, partitions(8), epochs=3, frequency=1, worker_callbacks=noted.callback())
    assert noted.read() == ["begin", "0 0.02", "1 0.02", "2 0.02", "end"]


def test_a_callback_that_stops_a_worker_does_not_stop_others(linear, noted):
    """Each worker has a copy of the callback. The first stops before the second begins, so epochs end with the second's."""
    histories = []
    history, stats, _ = train(
        linear, partitions(18, 7), epochs=5, worker_callbacks=noted.callback(stop_at=1), histories=histories
    )
    assert noted.read() == ["begin", "0 0.02", "1 0.02", "end"] * 2
    assert history.epoch == [0, 1]
    assert [(entry["epoch"], entry["worker"]) for entry in histories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert stats.steps == {0: 10, 1: 4}


def test_a_worker_may_stop_within_an_epoch(linear, noted):
    histories = []
    history, stats, _ = train(
        linear,
        partitions(22),
        epochs=5,
        frequency=3,
        worker_callbacks=noted.callback(stop_at=1, stop_at_batch=3),
        histories=histories,
    )
    assert history.epoch == [0, 1]
    assert stats.steps == {0: 10}
    assert [entry["rows"] for entry in histories] == [22, 16]
    assert int(linear.model.optimizer.iterations) == 10


def test_backup_and_restore(linear, tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        train(linear, partitions(22), epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path), Interrupt()])
    history, stats, _ = train(linear, partitions(22), epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert history.epoch == [2, 3]
    assert stats.steps == {0: 12}


# Failures


@pytest.mark.parametrize(
    ("where", "transport"),
    [
        *((where, "inprocess") for where in ("worker", "callback", "rows")),
        *(("worker", transport) for transport in ("socket", "http")),
        *(long(where, transport) for where in ("callback", "rows") for transport in ("socket", "http")),
    ],
)
def test_after_a_failure_the_next_fit_works(linear, transport, where):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise (KeyboardInterrupt if where == "callback" else RuntimeError)("on purpose")

    dataset, given = partitions(20, 8), {}
    if where == "rows":
        dataset = LocalDataset((dataset.blocks[0], rows(X[20:28], np.full((8, 1), np.nan, np.float32))))
    else:
        given = {"callbacks": [Fail()]} if where == "callback" else {"worker_callbacks": ByValue.dump([Fail()], "callbacks")}
    kind = {"worker": RuntimeError, "callback": KeyboardInterrupt, "rows": DivergenceError}[where]
    with pytest.raises(kind) as caught:
        train(linear, dataset, transport=transport, epochs=3, **given)
    if where == "rows":
        assert str(caught.value).startswith("training diverged in epoch 1 on worker 1: its update is not finite")
        assert "smaller learning rate" in str(caught.value)
    if where != "callback":
        assert np.array_equal(ModelState.take(linear.model).weights.vector, linear.state.weights.vector)
    assert np.isfinite(ModelState.take(linear.model).weights.vector).all()
    history, _, _ = train(linear, partitions(20, 8), transport=transport, epochs=2)
    assert np.isfinite(history.history["loss"]).all()


def test_interrupting_the_driver_cancels_the_job(linear):
    """A worker that hangs would not notice the end of training, so the driver cancels the job."""
    cancelled = []

    class Watched(LocalRunning):
        def cancel(self):
            cancelled.append(self.done)

    class Watching(LocalDataset):
        def background(self, call):
            return Watched(call)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(linear, Watching(partitions(20).blocks), epochs=2, callbacks=[Interrupt()])
    assert len(cancelled) == 1


def test_divergence_keeps_the_weights_of_the_last_finished_epoch(linear):
    """The worker's learning rate explodes in its third epoch."""

    class Explode(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.optimizer.learning_rate = 1e38

    snapshots = Snapshots()
    explode = ByValue.dump([Explode()], "worker_callbacks")
    with pytest.raises(DivergenceError, match="in epoch 3 on worker 0: its update is not finite"):
        train(linear, partitions(22), epochs=5, frequency=2, callbacks=[snapshots], worker_callbacks=explode)
    assert len(snapshots.weights) <= 2
    last = snapshots.weights[-1] if snapshots.weights else linear.state.weights.vector
    assert np.array_equal(ModelState.take(linear.model).weights.vector, last)


@dataclass(frozen=True)
class Exploding(Downpour):
    def apply(self, center, state, update, staleness):
        center[:] = np.inf


def test_a_rule_that_computes_infinite_weights_is_reported(linear):
    with pytest.raises(DivergenceError, match=r"Exploding\(\) \w+ weights that are not finite in epoch 1"):
        train(linear, partitions(8), rule=Exploding())
    assert np.array_equal(ModelState.take(linear.model).weights.vector, linear.state.weights.vector)


@dataclass(frozen=True)
class Sending(Downpour):
    """A rule that sends an invalid update."""

    what: str = "nothing"

    def exchange(self, local, base, center, window):
        return {"nothing": None, "short": local[:2]}[self.what], center


@pytest.mark.parametrize(
    ("what", "words"), [("nothing", "It returned None"), ("short", r"It returned an array of shape \(2,\)")]
)
def test_a_rule_that_sends_an_invalid_update_is_reported(linear, what, words):
    with pytest.raises(ConfigurationError, match=rf"must return two vectors of shape \(4,\): .*{words}"):
        train(linear, partitions(8), rule=Sending(what))


@dataclass(frozen=True)
class Returning(Downpour):
    def apply(self, center, state, update, staleness):
        return center + update.sent


def test_a_rule_that_does_not_apply_in_place_is_reported(linear):
    with pytest.raises(ConfigurationError, match="returned something from apply: it must change"):
        train(linear, partitions(8), rule=Returning())


@pytest.mark.parametrize("transport", ["socket", "http"])
def test_a_port_in_use_is_reported_and_a_free_one_is_used(linear, transport):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=f"cannot listen on port {port} of 127.0.0.1: .*in use.*Pass another port="
        ):
            train(linear, partitions(8), transport=transport, port=port)
    for _ in range(2):  # the same port again, immediately
        _, stats, _ = train(linear, partitions(8), transport=transport, port=port)
        assert stats.pushes == 1


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "192.0.2.1",
            "cannot listen on 192.0.2.1: .*The address has to be one of this machine.*Set bind= of server_options",
        ),
        ("no-such-machine.invalid", "'no-such-machine.invalid', which this machine cannot resolve.*Check host= and bind="),
    ],
)
@pytest.mark.parametrize("transport", ["socket", "http"])
def test_the_address_of_another_machine_is_rejected(linear, transport, address, words):
    for name in ("host", "bind"):
        with pytest.raises(ConfigurationError, match=words):
            train(linear, partitions(8), transport=transport, options={name: address})


@pytest.mark.parametrize("transport", ["socket", "http"])
def test_workers_that_cannot_reach_the_driver_are_reported_before_training(linear, transport, noted):
    options = {"host": "192.0.2.1", "bind": "127.0.0.1", "timeout": 1}
    words = rf"workers cannot connect to the driver at {transport}://192\.0\.2\.1:\d+: .*bind='0\.0\.0\.0'"
    with pytest.raises(DriverConnectionError, match=words):
        train(linear, partitions(8), transport=transport, options=options, worker_callbacks=noted.callback())
    assert not noted.path.exists()


def test_a_host_name_of_this_machine_works(linear):
    _, stats, _ = train(linear, partitions(8), transport="socket", options={"host": "localhost"})
    assert stats.pushes == 1


def test_the_history_of_a_run_without_an_epoch_is_empty(linear):
    history, stats, _ = train(linear, partitions(8), initial_epoch=3, epochs=3)
    assert history.epoch == []
    assert stats == replace(stats, pushes=0, steps={})


def test_logs_that_are_vectors_are_averaged():
    @dataclass(frozen=True)
    class Report:
        worker: int
        rows: int
        logs: dict
        seconds: float = 1.0

    found = mean_logs(
        [
            Report(0, 1, {"f1": [1.0, 2.0], "loss": 1.0, "many": None}),
            Report(1, 3, {"f1": [5.0, 6.0], "loss": 3.0, "many": None}),
        ]
    )
    assert found["f1"].tolist() == [4.0, 5.0]
    assert found["loss"] == 2.5
    assert found["many"] is None


def test_a_rule_that_changes_nothing_is_reported(linear):
    @dataclass(frozen=True)
    class Rebinding(Downpour):
        def apply(self, center, state, update, staleness):
            center = center + update.sent

    with pytest.warns(UserWarning, match="the weights did not change by 2 updates.*must change center in place"):
        train(linear, partitions(8), rule=Rebinding(), epochs=1, frequency=1)
    assert unmoved_warning(Downpour(), 1).startswith(
        "the weights did not change by 1 update: the learning rate may be too small"
    )


def test_callbacks_can_read_how_many_slots_training_occupies(linear):
    held = []

    def note(*_):
        held.append(held_slots())

    names = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")
    callback = keras.callbacks.LambdaCallback(**dict.fromkeys(names, note))
    train(linear, partitions(22), epochs=2, callbacks=[callback])
    assert held == [0, 0, 1, 1, 1, 0]  # before the job begins, between its epochs, and after it
    assert held_slots() == 0


# Weights that callbacks of the driver set


class Shifting(keras.callbacks.Callback):
    """Adds 100 to the weights of the last layer at the beginning of an epoch, when ``ended`` has that many epochs."""

    def __init__(self, epoch, ended, at_least):
        super().__init__()
        self.epoch, self.ended, self.at_least = epoch, ended, at_least

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            assert eventually(lambda: len(self.ended) >= self.at_least)
            layer = self.model.layers[-1]
            layer.set_weights([each + 100 for each in layer.get_weights()])


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
@pytest.mark.parametrize(("epoch", "ended"), [(1, 1), (3, 3), (1, 4)], ids=["at once", "last epoch", "workers are ahead"])
def test_weights_that_a_callback_sets_are_changed_once(monkeypatch, mode, epoch, ended):
    given = Model(optimizer=keras.optimizers.SGD(0.0))
    seen, kept, keep = Snapshots(), [], parameter_server._ServedTraining._keep_epoch

    def noting(self, number):
        kept.append(number)
        return keep(self, number)

    monkeypatch.setattr(parameter_server._ServedTraining, "_keep_epoch", noting)
    shifting = Shifting(epoch, kept, ended)
    fit(given, partitions(8, 8), mode, epochs=4, frequency=1, callbacks=[shifting, seen])
    begun = given.state.weights.vector
    assert [np.unique(each - begun).round(3).tolist() for each in seen.weights] == [[0.0]] * epoch + [[100.0]] * (4 - epoch)


@pytest.mark.parametrize("what", ["moving_mean", "momentum"])
def test_what_workers_keep_cannot_be_set_by_a_callback(what):
    given = Model(keras.layers.BatchNormalization(), optimizer=keras.optimizers.SGD(0.01, momentum=0.5))

    def set_variables(epoch, logs):
        for variable in [*given.model.weights, *given.model.optimizer.variables]:
            if what in variable.path:
                variable.assign(variable + 1)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=set_variables)
    with pytest.raises(ConfigurationError, match=f'a callback has changed \'.*{what}.*mode="synchronous"'):
        fit(given, partitions(8), "asynchronous", epochs=2, callbacks=[callback])
    given.reset()
    fit(given, partitions(8), "asynchronous", epochs=1, callbacks=[callback])  # nothing is trained after it
    given.reset()
    fit(given, partitions(8), "synchronous", epochs=2, callbacks=[callback])


@pytest.mark.parametrize("size", [parameter_server.MAX_SETTINGS, 4])
def test_a_large_variable_outside_the_model_can_be_used_but_not_changed(monkeypatch, size):
    table = keras.Variable(np.ones(size, np.float32))

    monkeypatch.setattr(outside, "_known", VariablesOfWorker(table))

    def scaled(y, predicted):
        return keras.ops.mean(table) * keras.ops.mean(keras.ops.square(y - predicted))

    def fitted(*callbacks):
        given = Model(optimizer=keras.optimizers.SGD(0.01))
        given.model.compile(keras.optimizers.SGD(0.01), scaled, jit_compile=False)
        metrics.prepare(given.model, rows(X[:1], Y[:1]).spec.zeros())
        ModelArchive.pack(given.model)
        fit(given, partitions(8), "asynchronous", epochs=3, callbacks=callbacks)
        return float(given.model.optimizer.learning_rate)

    changes = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: table.assign(table * 2))
    assert fitted(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)) == pytest.approx(0.01 / 8)
    if size > 4:
        with pytest.raises(ConfigurationError, match=f"may have {size} values, and these have {size + 1}: use smaller"):
            fitted(changes)
    else:
        assert fitted(changes) == pytest.approx(0.01)
        assert keras.ops.convert_to_numpy(table).tolist() == [8.0] * size
