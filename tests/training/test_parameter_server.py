"""Training through a parameter server, on in-memory datasets without Spark, one worker at a time.

Workers that come one after the other make every value predictable; tests/integration/test_asynchronous.py has real ones.
"""

import gc
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import keras
import numpy as np
import psutil
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import FilesMissing, TaskContext
from sparkkeras.data.local_dataset import LocalDataset, LocalResults, LocalStream
from sparkkeras.errors import ConfigurationError, DivergenceError, DriverConnectionError
from sparkkeras.events import Incident
from sparkkeras.modeling import metrics, outside
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.metrics import mean_logs
from sparkkeras.modeling.optimizers import iterations, set_iterations
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.rules import DCASGD, Downpour
from sparkkeras.rpc import inprocess
from sparkkeras.rpc.options import ParameterServerOptions
from sparkkeras.training import parameter_server
from sparkkeras.training.run import ServerSettings
from tests.models import Gan, VariablesOfWorker, gan
from tests.rpc.test_transports import eventually
from tests.training.runs import (
    BATCH,
    Model,
    RecordedEvents,
    Snapshots,
    X,
    Y,
    close,
    fit,
    noted,
    partitions,
    plain,
    scaled_by,
    weights_of,
)


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


# One worker


@pytest.mark.core
@pytest.mark.parametrize(
    ("mode", "transport", "frequency", "encrypt"),
    [("asynchronous", "socket", 4, True), ("hogwild", "http", "epoch", False)],
)
def test_one_worker_equals_plain_keras_with_every_transport(linear, tmp_path, mode, transport, frequency, encrypt):
    calls, options = tmp_path / "calls", {"encrypt": encrypt}
    arguments = {"transport": transport, "options": options, "frequency": frequency, "worker_callbacks": noted(calls)}
    history, stats, _ = train(linear, partitions(22), mode, epochs=3, **arguments)
    epochs = "".join(f"epoch{epoch} {'batch ' * 6}end " for epoch in range(3))
    assert calls.read_text() == f"train {epochs}trained "
    found = ModelState.take(linear.model)
    expected = plain(linear, 3).history
    assert close(linear.model, found.weights.vector, found.optimizer.vector)
    assert history.history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert (stats.transport, stats.steps) == (transport, {0: 18})
    assert stats.pushes == 3 * (2 if frequency == 4 else 1)
    assert (stats.staleness, stats.duplicates, stats.rejected_requests) == ({0: stats.pushes}, 0, {})
    assert stats.sent_bytes >= 16
    assert stats.seconds > 0


@pytest.mark.parametrize("rule", ["dynsgd", DCASGD(0.5)])
def test_with_one_worker_staleness_correcting_rules_equal_plain_keras(linear, rule):
    train(linear, partitions(22), rule=rule, frequency=2, epochs=2)
    found = weights_of(linear.model)
    plain(linear, 2)
    assert close(linear.model, found)


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
    given = Model(Counting(), keras.layers.Dropout(0.2, seed=3), optimizer=sgd(), run_eagerly=True)
    train(given, partitions(22), epochs=2, frequency=2)
    assert int(given.model.layers[0].calls) == 12
    train(given, partitions(8, 20), epochs=1)  # two workers, one after the other, continue from 12
    assert int(given.model.layers[0].calls) == 12 + 2 + 5


# Workers that run one after the other


def test_workers_that_run_one_after_the_other_continue_each_others_weights(linear):
    """Each worker starts from the weights of the previous one with fresh optimizer variables, whose mean is kept."""
    _, stats, _ = train(linear, partitions(20, 8), epochs=2, frequency=2)
    found, slots = ModelState.take(linear.model), []
    model, beginning = linear.reset(), linear.state.optimizer
    for start, stop in ((0, 20), (20, 28)):
        ModelState(ModelState.take(model).weights, beginning).put(model)
        model.fit(X[start:stop], Y[start:stop], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        slots.append(ModelState.take(model).optimizer.vector)
    assert close(model, found.weights.vector)
    mean = np.average(slots, axis=0, weights=[20, 8])
    np.testing.assert_allclose(found.optimizer.vector, mean, rtol=0, atol=1e-6)
    assert [int(each) for each in found.optimizer.integer_variables] == [10]  # those of the worker with the most steps
    assert stats.steps == {0: 10, 1: 4}


@dataclass(frozen=True)
class Noting(Downpour):
    """Writes its windows to a file."""

    notes: str = ""

    def exchange(self, local, base, center, window):
        with open(self.notes, "a") as file:
            file.write(f"{window.steps} {window.rows} {window.learning_rate:.3f} {window.num_workers}\n")
        return super().exchange(local, base, center, window)


def test_windows_restart_in_each_epoch_and_no_step_is_lost(linear, tmp_path):
    rule = Noting(notes=str(tmp_path / "notes"))
    _, stats, rounds = train(linear, partitions(24, 7, None), epochs=2, frequency=3, rule=rule)  # six batches, and two
    found = (tmp_path / "notes").read_text().splitlines()
    assert found == ["3 12 0.020 1"] * 4 + ["2 7 0.020 1"] * 2
    assert stats.pushes == 6
    assert stats.steps == {0: 12, 1: 4}
    assert sum(seen for seen, _ in rounds) == 2 * 31
    assert rounds[-1][1] == 1.0


class Losing(LocalDataset):
    """A dataset where the files of a partition are missing until it is read again from its source."""

    def train(self, task):
        def without():
            found = []
            for number in range(self.num_partitions):
                try:
                    found.append(list(task(TaskContext(number, 10**6 + number), self._rows(number))))
                except FilesMissing:
                    found.append([])
            return found

        return ReadAgain(without, LocalDataset.train(self, task))

    def _rows(self, number):
        if number == 1:
            raise FilesMissing("gone")
        yield self.blocks[number]


@dataclass(frozen=True)
class ReadAgain(LocalResults):
    whole: LocalResults

    def from_source(self, partitions):
        return self.whole.from_source(partitions)


def test_a_partition_with_missing_files_is_trained_from_its_source(linear):
    histories, seen = [], RecordedEvents()
    _, stats, _ = train(linear, Losing(partitions(20, 8).blocks), epochs=2, histories=histories, callbacks=[seen])
    assert [incident.kind for incident in seen.of(Incident)] == ["repair", "takeover"]
    found = weights_of(linear.model)
    assert stats.steps == {0: 10, 1: 4}
    assert [(entry["epoch"], entry["worker"]) for entry in histories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    linear.reset()
    train(linear, partitions(20, 8), epochs=2)
    assert close(linear.model, found)


class Again(LocalDataset):
    """A dataset of one partition that retries a failed task once, as Spark does."""

    def train(self, task):
        def attempts():
            with suppress(RuntimeError):
                return [list(task(TaskContext(0, 10**6), iter(self.blocks)))]
            return [list(task(TaskContext(0, 2 * 10**6), iter(self.blocks)))]

        return LocalResults(attempts)


@pytest.mark.parametrize("stream", [False, True])
def test_an_attempt_that_takes_over_keeps_the_progress_of_the_previous_one(tmp_path, stream):
    mark = tmp_path / "mark"

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3 and not mark.exists():
                mark.touch()
                raise RuntimeError("on purpose")

    given = Model(optimizer=sgd(momentum=0.0), run_eagerly=True)
    callbacks = ByValue.dump([Fail()], "callbacks")
    parts = partitions(22).blocks
    if stream:
        parts = (LocalStream(tuple(parts[0].batches(BATCH))),)
    history, stats, _ = train(given, Again(parts), epochs=2, frequency=1, worker_callbacks=callbacks)
    assert (stats.takeovers, stats.pushes, stats.steps) == (1, 12, {0: 12})
    found = weights_of(given.model)
    expected = plain(given, 2)
    assert close(given.model, found)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)


# Logs, weights and callbacks on the driver


@keras.saving.register_keras_serializable("tests_of_parameter_server")
class Uneven(Gan):
    """Applies one optimizer twice as often as the other."""

    def train_step(self, data):
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply([0 * weight for weight in weights], weights)
        return super().train_step(data)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras passes one optimizer to a train_step of JAX")
def test_each_optimizer_has_its_own_number_of_iterations():
    given = SimpleNamespace(model=gan(Uneven))
    dataset = LocalDataset((from_arrays(X[:12].copy(), None, None),))
    metrics.prepare(given.model, dataset.blocks[0].spec.zeros())
    set_iterations(given.model, [10, 20])
    train(given, dataset, epochs=2, frequency=1)
    assert iterations(given.model) == [22, 26]


class Waiting(keras.callbacks.Callback):
    """Waits until the driver has begun the epoch, and writes the learning rate at its end to a file."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_begin(self, epoch, logs=None):
        assert eventually(lambda: (self.folder / f"mark-{epoch}").exists())

    def on_epoch_end(self, epoch, logs=None):
        with (self.folder / "rates").open("a") as file:
            file.write(f"{float(self.model.optimizer.learning_rate):.3f}\n")


def test_a_learning_rate_set_by_a_callback_reaches_workers_at_the_next_exchange(linear, tmp_path):
    """The worker waits for the driver before each epoch, so it gets the rate in that epoch or in the next."""
    rates = [0.02, 0.01, 0.004, 0.002]

    class Rate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = rates[epoch]
            (tmp_path / f"mark-{epoch}").touch()

    waiting = ByValue.dump([Waiting(tmp_path)], "worker_callbacks")
    train(linear, partitions(22), epochs=4, frequency=1, callbacks=[Rate()], worker_callbacks=waiting)
    found = [float(line) for line in (tmp_path / "rates").read_text().splitlines()]
    assert len(found) == 4
    for epoch, rate in enumerate(found):
        assert rate in rates[max(0, epoch - 1) : epoch + 1]
    assert float(linear.model.optimizer.learning_rate) == pytest.approx(rates[-1])


class Stop(keras.callbacks.Callback):
    """Stops its worker after two batches of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1):
            self.model.stop_training = True


def test_a_callback_stops_its_worker_within_an_epoch_and_does_not_stop_others(linear):
    """Each worker has a copy of the callback. The first stops before the second begins, so epochs end with the second's."""
    histories, stop = [], ByValue.dump([Stop()], "worker_callbacks")
    arguments = {"frequency": 3, "worker_callbacks": stop, "histories": histories}
    history, stats, _ = train(linear, partitions(18, 7), epochs=5, **arguments)
    assert history.epoch == [0, 1]
    found = [(entry["epoch"], entry["worker"], entry["rows"]) for entry in histories]
    assert found == [(0, 0, 18), (0, 1, 7), (1, 0, 8), (1, 1, 7)]
    assert stats.steps == {0: 7, 1: 4}
    assert int(linear.model.optimizer.iterations) == 7


# Failures


@pytest.mark.parametrize(("where", "transport"), [("worker_callbacks", "socket"), ("callbacks", "http")])
def test_after_a_failure_the_next_fit_works(linear, transport, where):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("on purpose")

    failing = [Fail()] if where == "callbacks" else ByValue.dump([Fail()], where)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(linear, partitions(20, 8), transport=transport, epochs=3, **{where: failing})
    if where == "worker_callbacks":
        assert np.array_equal(weights_of(linear.model), linear.state.weights.vector)
    history, _, _ = train(linear, partitions(20, 8), transport=transport, epochs=2)
    assert np.isfinite(history.history["loss"]).all()


class Exploding(Downpour):
    def apply(self, center, state, update, staleness):
        center[:] = np.inf


class Sending(Downpour):
    def exchange(self, local, base, center, window):
        return local[:2], center


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (Exploding(), DivergenceError, r"Exploding\(\).*not finite in epoch 1"),
        (Sending(), ConfigurationError, r"\(4,\).* returned .* \(2,\)"),
    ],
)
def test_a_rule_that_cannot_be_applied_is_reported(linear, rule, error, words):
    with pytest.raises(error, match=words):
        train(linear, partitions(8), rule=rule)
    assert np.array_equal(weights_of(linear.model), linear.state.weights.vector)


def test_a_port_in_use_is_reported_and_a_free_one_is_used(linear):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{port} of 127.0.0.1: .*in use.*port="):
            train(linear, partitions(8), transport="socket", port=port)
    for transport in ("socket", "http"):  # the same port again, immediately
        _, stats, _ = train(linear, partitions(8), transport=transport, port=port, options={"host": "localhost"})
        assert stats.pushes == 1


@pytest.mark.parametrize(
    ("transport", "name", "address", "words"),
    [
        ("socket", "host", "192.0.2.1", "one of this machine.*Set bind="),
        ("socket", "bind", "no-such-machine.invalid", "cannot resolve"),
    ],
)
def test_the_address_of_another_machine_is_rejected(linear, transport, name, address, words):
    with pytest.raises(ConfigurationError, match=words):
        train(linear, partitions(8), transport=transport, options={name: address})


def test_workers_that_cannot_reach_the_driver_are_reported_before_training(linear, tmp_path):
    options = {"host": "192.0.2.1", "bind": "127.0.0.1", "timeout": 1}
    with pytest.raises(DriverConnectionError, match=r"192\.0\.2\.1:\d+: .*bind="):
        train(linear, partitions(8), transport="socket", options=options, worker_callbacks=noted(tmp_path / "calls"))
    assert not (tmp_path / "calls").exists()


def test_the_history_of_a_run_without_an_epoch_is_empty(linear):
    history, stats, _ = train(linear, partitions(8), initial_epoch=3, epochs=3)
    assert history.epoch == []
    assert stats == replace(stats, pushes=0, steps={})


def test_logs_that_are_vectors_are_averaged():
    rows = ((1, [1.0, 2.0], None), (3, [5.0, 6.0], None))
    found = mean_logs([SimpleNamespace(rows=count, logs={"f1": f1, "many": many}) for count, f1, many in rows])
    assert found["f1"].tolist() == [4.0, 5.0]
    assert found["many"] is None


def test_a_rule_that_changes_nothing_is_reported(linear):
    class Rebinding(Downpour):
        def apply(self, center, state, update, staleness):
            center = center + update.sent

    with pytest.warns(UserWarning, match="2 updates.*change center in place"):
        train(linear, partitions(8), rule=Rebinding(), epochs=1, frequency=1)


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


@pytest.mark.parametrize(("epoch", "ended"), [(1, 1), (3, 3), (1, 4)], ids=["at once", "last epoch", "workers are ahead"])
def test_weights_that_a_callback_sets_are_changed_once(monkeypatch, epoch, ended):
    given = Model(optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
    seen, kept, keep = Snapshots(), [], parameter_server._ServedTraining._keep_epoch

    def noting(self, number):
        kept.append(number)
        return keep(self, number)

    monkeypatch.setattr(parameter_server._ServedTraining, "_keep_epoch", noting)
    train(given, partitions(8, 8), epochs=4, frequency=1, callbacks=[Shifting(epoch, kept, ended), seen])
    begun = given.state.weights.vector
    assert [np.unique(each - begun).round(3).tolist() for each in seen.weights] == [[0.0]] * epoch + [[100.0]] * (4 - epoch)


def test_what_workers_keep_cannot_be_set_by_a_callback():
    given = Model(keras.layers.BatchNormalization(), optimizer=sgd(), run_eagerly=True)

    def set_variables(epoch, logs):
        for variable in [*given.model.weights, *given.model.optimizer.variables]:
            if what in variable.path:
                variable.assign(variable + 1)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=set_variables)
    for what in ("moving_mean", "momentum"):
        given.reset()
        with pytest.raises(ConfigurationError, match=f'changed .*{what}.*mode="synchronous"'):
            train(given, partitions(8), epochs=2, callbacks=[callback])
    given.reset()
    train(given, partitions(8), epochs=1, callbacks=[callback])  # nothing is trained after it


def test_a_large_variable_outside_the_model_can_be_used_but_not_changed(monkeypatch):
    size = parameter_server.MAX_SETTINGS
    small, large = (keras.Variable(np.ones(each, np.float32)) for each in (4, size))
    monkeypatch.setattr(outside, "_known", VariablesOfWorker(small, large))

    def fitted(table, *callbacks):
        given = scaled_by(table)
        train(given, partitions(8), epochs=2, callbacks=callbacks)
        return float(given.model.optimizer.learning_rate)

    def changing(table):
        return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: table.assign(table * 2))

    assert fitted(large, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)) == pytest.approx(0.05 / 4)
    with pytest.raises(ConfigurationError, match=f"{size} values.* {size + 1}"):
        fitted(large, changing(large))
    assert fitted(small, changing(small)) == pytest.approx(0.05)
    assert keras.ops.convert_to_numpy(small).tolist() == [4.0] * 4
