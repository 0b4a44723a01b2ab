"""The conformance suite of strategies, on in-memory datasets; a new strategy is a name in STRATEGIES."""

from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest

from sparkkeras.data.local_dataset import LocalDataset, LocalStream
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.errors import DataError, DivergenceError
from sparkkeras.modeling import metrics, outside
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.outside import dump_callbacks
from sparkkeras.modeling.state import ModelState
from sparkkeras.scoring import inference
from sparkkeras.training.fit_arguments import ASYNCHRONOUS_MODES
from sparkkeras.training.validation import Validation
from sparkkeras.worker.batches import BatchOptions
from tests.models import VariablesOfWorker
from tests.training.runs import BATCH, IN_MEMORY, Model, Snapshots, X, Y, close, fit, partitions, plain, rows, weights_of

TOGETHER = [*IN_MEMORY, "allreduce"]
STRATEGIES = [*TOGETHER, "independent"]


def params(modes):
    # Hogwild is the asynchronous strategy with a store without locks; test_parameter_server has its specific tests.
    # All-reduce training starts a process for each worker.
    return [pytest.param(mode, marks=pytest.mark.soak if mode in ("hogwild", "allreduce") else ()) for mode in modes]


@pytest.fixture(params=params(STRATEGIES))
def strategy(request):
    return with_frequency(request)


@pytest.fixture(params=params(TOGETHER))
def mode(request):
    """A strategy whose workers train one model together."""
    return with_frequency(request)


def with_frequency(request):
    if request.param == "allreduce" and request.node.callspec.params.get("frequency", "epoch") != "epoch":
        pytest.skip("refused by SparkModel")
    return request.param


# All strategies


def test_training_learns(linear, strategy):
    history, _ = fit(linear, partitions(20, 20, 20), strategy, epochs=12, shuffle=True)
    losses = history.history["loss"]
    assert losses[-1] < 0.3 * losses[0]
    assert linear.model.evaluate(X, Y, verbose=0)[0] < 0.3 * losses[0]


@pytest.mark.parametrize("frequency", ["epoch", 3])
def test_one_worker_equals_plain_keras(linear, strategy, frequency):
    """Also if a second fit continues."""
    mine, theirs = Snapshots(), Snapshots()
    callbacks = [] if strategy == "independent" else [mine]
    (first, _), (second, _) = (
        fit(linear, partitions(22), strategy, initial_epoch=start, epochs=stop, frequency=frequency, callbacks=callbacks)
        for start, stop in ((0, 2), (2, 3))
    )
    found = ModelState.take(linear.model)
    assert linear.model.history is second
    assert (first.epoch, second.epoch) == ([0, 1], [2])
    expected = plain(linear, 3, callbacks=[theirs]).history
    assert close(linear.model, found.weights.vector, found.optimizer.vector)
    assert [int(each) for each in found.optimizer.integer_variables] == [18]
    np.testing.assert_allclose(mine.weights, theirs.weights[: len(mine.weights)], rtol=0, atol=1e-6)
    assert set(first.history) == set(expected)
    for name, values in expected.items():
        losses = first.history[name] + second.history[name]
        assert losses == pytest.approx(values, rel=1e-5)
        assert {type(each) for each in losses} == {float}


def test_all_reduce_with_one_worker_equals_plain_keras(linear):
    test_one_worker_equals_plain_keras(linear, "allreduce", "epoch")


def test_the_same_seed_gives_bit_identical_weights(linear, strategy):
    def run(seed):
        linear.reset()
        fit(linear, partitions(20, 13, 27), strategy, epochs=2, frequency=2, shuffle=True, seed=seed)
        return weights_of(linear.model).tobytes()

    assert run(7) == run(7)
    assert run(7) != run(8)


# Strategies whose workers train one model together


def test_each_worker_with_rows_has_its_own_history(linear, mode):
    histories, arguments = [{"worker": "of an earlier fit"}], {"epochs": 4, "initial_epoch": 2, "frequency": 1}
    history, _ = fit(linear, partitions(None, 20, None, 10, 0), mode, histories=histories, **arguments)
    assert histories.pop(0) == {"worker": "of an earlier fit"}
    found = [(entry["epoch"], entry["worker"], entry["rows"]) for entry in histories]
    assert found == [(2, 1, 20), (2, 3, 10), (3, 1, 20), (3, 3, 10)]
    assert all(set(entry) == {"worker", "epoch", "rows", "seconds", "loss", "mae"} for entry in histories)
    assert all(entry["seconds"] > 0 for entry in histories)
    losses = np.array([entry["loss"] for entry in histories]).reshape(2, 2)
    assert history.history["loss"] == pytest.approx(losses @ [20 / 30, 10 / 30], rel=1e-5)


def test_callbacks_are_called_as_in_keras(linear, mode):
    calls = []

    def end(epoch, logs):
        calls.append((epoch, sorted(logs)))
        linear.model.stop_training = epoch == 1

    noting = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: calls.append("train begins"),
        on_epoch_begin=lambda epoch, logs: calls.append(epoch),
        on_epoch_end=end,
        on_train_end=lambda logs: calls.append("train ends"),
    )
    history, _ = fit(linear, partitions(20, 10), mode, epochs=9, frequency=2, callbacks=[noting])
    assert calls == ["train begins", 0, (0, ["loss", "mae"]), 1, (1, ["loss", "mae"]), "train ends"]
    assert history.epoch == [0, 1]


def test_divergence_names_the_worker_with_the_bad_rows(linear, mode):
    blocks = list(partitions(20, 10, 10).blocks)
    blocks[1] = rows(blocks[1].x, np.full_like(blocks[1].y, np.nan))
    where = "" if mode == "allreduce" else " on worker 1"  # the common gradients make all weights NaN
    with pytest.raises(DivergenceError, match=rf"diverged in epoch 1{where}: "):
        fit(linear, LocalDataset(tuple(blocks)), mode)
    assert np.array_equal(weights_of(linear.model), linear.state.weights.vector)


def test_divergence_keeps_the_weights_of_the_last_finished_epoch(linear, mode):
    seen, exploding = Snapshots(), ByValue.dump([Snapshots(blow_up=2)], "worker_callbacks")
    with pytest.raises(DivergenceError, match="diverged in epoch 3"):
        fit(linear, partitions(20), mode, epochs=5, frequency=2, callbacks=[seen], worker_callbacks=exploding)
    assert len(seen.weights) == 2 or mode in ASYNCHRONOUS_MODES
    assert np.array_equal(weights_of(linear.model), [linear.state.weights.vector, *seen.weights][-1])


def test_validation_uses_the_weights_of_its_epoch(linear, mode):
    """A worker of a parameter server is several epochs ahead of the driver."""
    sizes, held_out = ((20,), slice(16, 20)) if mode in ASYNCHRONOUS_MODES else ((20, 10), [*range(16, 20), 28, 29])
    dataset, parts, expected = partitions(*sizes), TrainValidationSplit.split(sizes, 0.2), []
    validation = Validation(dataset, BatchOptions(BATCH), 2, parts.validation_spans)

    class Validated(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert ("val_loss" in logs) == (epoch % 2 == 1)
            if epoch % 2 == 1:
                expected.append(self.model.evaluate(X[held_out], Y[held_out], verbose=0))

    arguments = {"split": parts, "validation": validation, "callbacks": [Validated()], "shuffle": True}
    history, _ = fit(linear, dataset, mode, epochs=4, frequency=2, **arguments)
    found = list(zip(history.history["val_loss"], history.history["val_mae"], strict=True))
    assert len(found) == 2
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_validation_rows_are_not_trained_on(linear, mode):
    dataset = partitions(20, 10)
    parts = TrainValidationSplit.split([handle.rows for handle in dataset.handles], 0.2)
    fit(linear, dataset, mode, split=parts, epochs=2)
    found = weights_of(linear.model)
    linear.reset()
    fit(linear, LocalDataset((rows(X[:16], Y[:16]), rows(X[20:28], Y[20:28]))), mode, epochs=2)
    assert np.array_equal(weights_of(linear.model), found)


@keras.saving.register_keras_serializable(package="tests_of_averaging")
class CustomStep(keras.Sequential):
    """A custom ``train_step`` that returns values in addition to Keras's metrics."""

    def train_step(self, data):
        super().train_step(data)
        return {"largest": keras.ops.max(keras.ops.abs(data[1]))}


@pytest.fixture(scope="module")
def custom():
    return Model(optimizer="sgd", kind=CustomStep)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a train_step is written for one backend")
def test_logs_of_a_custom_train_step_reach_the_history(custom, mode):
    custom.reset()
    history, _ = fit(custom, partitions(4), mode, epochs=2)
    found = weights_of(custom.model)
    expected = plain(custom, 2, 4).history
    assert close(custom.model, found)
    assert set(history.history) == set(expected) == {"largest"}
    assert history.history["largest"] == pytest.approx(expected["largest"], rel=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a train_step is written for one backend")
def test_logs_of_a_custom_train_step_in_step_with_others_are_about_rows_of_the_worker(custom):
    def of_workers(dataset):
        histories = []
        history, _ = fit(custom, dataset, "allreduce", histories=histories)
        return [record["largest"] for record in histories], history.history["largest"]

    custom.reset()
    first, second = (float(np.abs(Y[part]).max()) for part in (slice(4, 8), slice(44, 48)))
    each, mean = of_workers(partitions(8, 40))
    assert each == pytest.approx([first, second])
    assert mean == pytest.approx([(8 * first + 40 * second) / 48])
    # The steps of a stream are known in parts only: the last one of the first worker is padding.
    each, mean = of_workers(streamed(in_batches(0, 8), in_batches(8, 48)))
    assert each == [None, pytest.approx(second)]
    assert mean == pytest.approx([second])


# Rows that are read anew in each epoch


def streamed(*partitions):
    """A dataset of streams; each partition is a list of slices of the rows, the batches."""
    return LocalDataset(tuple(LocalStream(tuple(rows(X[part], Y[part]) for part in parts)) for parts in partitions))


def in_batches(start, stop, size=BATCH):
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


@pytest.mark.parametrize("frequency", ["epoch", 2])
def test_a_stream_trains_like_stored_rows(linear, strategy, frequency):
    if (strategy, frequency) == ("synchronous", 2):
        pytest.skip("refused by SparkModel.fit")
    arguments = {"epochs": 3, "frequency": frequency}
    expected, _ = fit(linear, partitions(22), strategy, **arguments)
    stored = ModelState.take(linear.model)
    linear.reset()
    histories, seen = [], keras.callbacks.Callback()
    history, _ = fit(linear, streamed(in_batches(0, 22)), strategy, histories=histories, callbacks=[seen], **arguments)
    assert close(linear.model, stored.weights.vector, stored.optimizer.vector)
    assert all(history.history[name] == pytest.approx(values, rel=1e-5) for name, values in expected.history.items())
    if strategy != "independent":
        assert [record["rows"] for record in histories] == [22, 22, 22]
        assert seen.params["steps"] is None


def test_optimizer_variables_of_streams_are_weighted_by_their_rows(mode):
    if mode == "allreduce":
        pytest.skip("they are the same on all workers")
    given = Model(optimizer=keras.optimizers.Adam(0.0), run_eagerly=True)  # the moments depend on the rows only

    def moments(*parts):
        given.reset()
        fit(given, streamed(*parts), mode)
        return ModelState.take(given.model).optimizer.vector

    long, short = in_batches(0, 40), in_batches(40, 42)
    np.testing.assert_allclose(moments(long, short), (40 * moments(long) + 2 * moments(short)) / 42, rtol=1e-4, atol=1e-7)


def test_steps_per_epoch_ends_a_stream(linear, mode):
    histories, seen = [], keras.callbacks.Callback()
    arguments = {"epochs": 2, "steps_per_epoch": 3, "histories": histories, "callbacks": [seen]}
    fit(linear, streamed(in_batches(0, 40)), mode, **arguments)
    assert [record["rows"] for record in histories] == [12, 12]
    assert int(linear.model.optimizer.iterations) == 6
    assert seen.params["steps"] == 3


def test_labels_of_a_stream_are_checked(strategy):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    classes = np.array([0, 1, 7])
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    metrics.prepare(model, rows(X[:1], classes[:1]).spec.zeros())
    stream = LocalStream((rows(X[:2], classes[:2]), rows(X[2:3], classes[2:])))
    with pytest.raises(DataError, match="7"):
        fit(SimpleNamespace(model=model), LocalDataset((stream,)), strategy)


def test_batches_of_a_stream_that_differ_are_reported(linear, strategy):
    stream = LocalStream((rows(X[:4], Y[:4]), rows(X[4:8], Y[4:8], np.ones(4, np.float32))))
    with pytest.raises(DataError, match="to .'x', 'y', 'sample_weight'"):
        fit(linear, LocalDataset((stream,)), strategy)


def test_a_stream_without_batches_in_a_later_epoch_is_reported(linear, mode):
    class OfOneEpoch(LocalStream):
        def blocks(self, epoch=0, seed=0):
            yield from self.batches if epoch == 0 else ()

    stream = OfOneEpoch((rows(X[:4], Y[:4]),))
    with pytest.raises(DataError, match="no worker has|fewer rows"):
        fit(linear, LocalDataset((stream,)), mode, epochs=2)


# Variables outside the model


ALPHA = keras.Variable(1.0)


def annealed(y, predicted):
    return ALPHA * keras.ops.mean(keras.ops.square(y - predicted))


class Annealing(keras.callbacks.Callback):
    """Sets a variable at the beginning of each epoch."""

    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def on_epoch_begin(self, epoch, logs=None):
        self.variable.assign(1 / (epoch + 1))


@pytest.fixture(scope="module")
def annealed_once():
    with mock.patch.object(outside, "_known", VariablesOfWorker(ALPHA)):
        yield Model(optimizer=keras.optimizers.SGD(0.05), loss=annealed, jit_compile=False)


@pytest.fixture
def annealing(annealed_once):
    """A model whose loss has a factor, 1 before and after a test."""
    annealed_once.reset()
    yield annealed_once
    ALPHA.assign(1.0)


@pytest.mark.core
@pytest.mark.parametrize("frequency", ["epoch", 2])
def test_a_callback_on_a_worker_sets_a_variable_outside_the_model(annealing, strategy, frequency):
    dumped = dump_callbacks([Annealing(ALPHA)], [annealing.model])
    history, _ = fit(annealing, partitions(22), strategy, epochs=3, frequency=frequency, worker_callbacks=dumped)
    left = float(keras.ops.convert_to_numpy(ALPHA))
    found = weights_of(annealing.model)
    expected = plain(annealing, 3, callbacks=[Annealing(ALPHA)]).history
    assert history.history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert close(annealing.model, found)
    assert left == pytest.approx(1 / 3)


@pytest.mark.core
def test_a_callback_on_the_driver_sets_a_variable_outside_the_model(annealing, mode):
    seen = []
    at_end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(float(keras.ops.convert_to_numpy(ALPHA)))
    )
    callbacks, validation = [Annealing(ALPHA), at_end], Validation(partitions(22), BatchOptions(BATCH))
    arguments = {"epochs": 4, "frequency": 1, "validation": validation, "callbacks": callbacks}
    found = fit(annealing, partitions(22), mode, **arguments)[0].history
    assert seen == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    if mode in ASYNCHRONOUS_MODES:  # from the next exchange on
        assert found["loss"][-1] < 0.5 * found["loss"][0] / 3
        return
    expected = plain(annealing, 4, callbacks=callbacks, validation_data=(X[:22], Y[:22])).history
    for name in ("loss", "val_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_callback_on_a_rank_of_all_reduce_training_sets_a_variable_outside_the_model(annealing):
    test_a_callback_on_a_worker_sets_a_variable_outside_the_model(annealing, "allreduce", "epoch")


# Weights that callbacks of the driver set


@pytest.mark.parametrize("mode", ["synchronous", "allreduce"])
def test_weights_and_optimizer_variables_that_a_callback_sets_are_used_as_in_keras(linear, mode):
    """Among them the learning rate."""

    class Halving(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for variable in [*self.model.trainable_weights, *self.model.optimizer.variables[1:]]:
                variable.assign(variable * 0.5)

    fit(linear, partitions(22), mode, epochs=3, callbacks=[Halving()])
    found = ModelState.take(linear.model)
    plain(linear, 3, callbacks=[Halving()])
    assert close(linear.model, found.weights.vector, found.optimizer.vector)


class Spread(keras.Sequential):
    """Reports a value of the last batch besides its metrics."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return found | {"spread": keras.ops.max(y_pred) - keras.ops.min(y_pred)}


@pytest.fixture(scope="module")
def spread():
    return Model(optimizer=keras.optimizers.SGD(0.05), kind=Spread)


@pytest.mark.core
def test_values_of_compute_metrics_are_validated_as_in_keras(spread, strategy):
    spread.reset()
    validation = Validation(partitions(14), BatchOptions(BATCH))
    found = fit(spread, partitions(22), strategy, epochs=2, validation=validation)[0].history
    expected = plain(spread, 2, validation_data=(X[:14], Y[:14])).history
    assert set(found) == set(expected) == {f"{part}{name}" for part in ("", "val_") for name in ("loss", "mae", "spread")}
    assert all(found[name] == pytest.approx(expected[name], rel=1e-4) for name in expected)
    logs = spread.model.evaluate(X[:14], Y[:14], verbose=0, return_dict=True)
    assert inference.reported(spread.model, logs, False, 0) == spread.model.evaluate(X[:14], Y[:14], verbose=0)
