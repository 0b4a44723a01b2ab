"""One worker without Spark: equal to plain Keras on the same batches, up to rounding errors."""

import itertools
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras.data.block import Block, from_arrays
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.labels import label_ranges
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.labels import check_labels
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.modeling.state import ModelState
from sparkkeras.worker import device
from sparkkeras.worker.batches import BatchOptions, BatchRange, FitOptions
from sparkkeras.worker.predictor import Predictor, join_predictions
from sparkkeras.worker.progress import ProgressReporter
from sparkkeras.worker.trainer import ExchangeResult, HeldOut, LocalTrainer, lasting
from tests.models import regression

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 0.1 * RNG.normal(size=(22, 1))).astype(np.float32)
ROWS = from_arrays(X, Y, None)
BATCH = 4  # 22 rows: five batches and a short one
PLAIN = FitOptions(BATCH, shuffle=False)
WHOLE = BatchRange(epoch=0, rows=22, first=0, last=6)


class Model:
    """A model, its initial state, and a trainer as on a worker."""

    def __init__(self, model):
        self.model = model
        self.archive = ModelArchive.pack(model)  # finds variables outside the model, which are part of the state
        self.state = ModelState.take(model)

    def trainer(self, worker=0):
        return LocalTrainer(self.archive, TaskContext(worker))

    def anew(self):
        """The model in its initial state."""
        self.state.put(self.model)
        self.model.reset_metrics()
        return self.model

    def fit(self, block=ROWS, batch_range=WHOLE, options=PLAIN, state=None, worker=0):
        return self.trainer(worker).fit(state or self.state, copied(block), batch_range, options)

    def predictor(self, options):
        return Predictor(self.archive, self.state, options, schema_of(self.model), TaskContext(0))

    def evaluate(self, blocks, options, worker=0):
        found = self.trainer(worker).evaluate(self.state, map(copied, blocks), options)
        return None if found is None else found[0].metrics

    def trains_as_keras(self, x, y, block, options=PLAIN, **given):
        """Check that an epoch equals one of Keras with these arguments; returns the replica."""
        replica, plain = self.fit(block, options=options), self.anew()
        history = plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **given).history
        assert close(replica.state, plain)
        assert replica.logs == pytest.approx({name: values[0] for name, values in history.items()}, rel=1e-5, abs=1e-6)
        return replica

    def evaluates_as_keras(self, x, y, blocks, options=BatchOptions(BATCH), **given):  # noqa: B008
        """Check that the metrics over workers with a block each equal those of Keras with these arguments."""
        found = [self.evaluate([block], options) for block in blocks]
        expected = self.anew().evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True, **given)
        assert metrics.results(self.model, metrics.merge(found)) == pytest.approx(expected, rel=1e-5)

    def predicts_as_keras(self, x, blocks, options=BatchOptions(BATCH)):  # noqa: B008
        found, expected = predicted(self, blocks, options), self.anew().predict(x, verbose=0)
        assert found.shape == expected.shape
        assert np.allclose(found, expected, rtol=0, atol=1e-6)


def copied(block):
    return Block(block.form, tuple(np.array(array) for array in block.arrays))


@pytest.fixture(scope="module")
def linear():
    """A linear model, trained by Adam, with metrics that cannot be averaged over workers."""
    measured = ["mae", keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()]
    return Model(regression(optimizer=keras.optimizers.Adam(0.05), metrics=measured))


def close(state, model, atol=1e-6):
    other = ModelState.take(model)
    assert np.allclose(state.weights.vector, other.weights.vector, rtol=0, atol=atol)
    assert np.allclose(state.optimizer.vector, other.optimizer.vector, rtol=0, atol=atol)
    assert [int(c) for c in state.optimizer.integer_variables] == [int(c) for c in other.optimizer.integer_variables]
    return True


# Training


@keras.saving.register_keras_serializable()
class Noise(keras.layers.Layer):
    """Draws random numbers in validation, too."""

    def build(self, shape):
        self.generator = keras.random.SeedGenerator(3)

    def call(self, inputs):
        return inputs + keras.random.normal((1,), stddev=0.1, seed=self.generator)


@pytest.mark.core
@pytest.mark.parametrize("epochs", [1, 5])
def test_training_alone_is_the_same_without_the_fit_of_keras(epochs):
    """Which a callback needs. The last of five epochs is not validated; averaged weights replace the others at the end."""
    layers = [keras.Input((3,)), keras.layers.Dropout(0.3, seed=1), keras.layers.BatchNormalization(), Noise()]
    model = keras.Sequential([*layers, keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.Adam(0.05, use_ema=True), "sparse_categorical_crossentropy", metrics=["accuracy"])
    rows = from_arrays(X, (Y[:, 0] > 0).astype(np.int32), None)
    given, found = Model(model), []
    for callbacks in (None, ByValue.dump([keras.callbacks.Callback()], "callbacks")):
        options = FitOptions(BATCH, class_weight={0: 1.0, 1: 3.0}, callbacks=callbacks)
        trained, *rest = given.trainer().fit_alone(
            given.state, rows, epochs, options, 7, HeldOut(rows[15:], BatchOptions(3)), 2
        )
        found.append((trained.get_weights(), *rest))
    (ours, *counted), (theirs, *expected) = found
    assert all(map(np.array_equal, ours, theirs))
    assert counted == expected
    assert (counted[0], len(counted[1])) == (epochs, 2 if epochs == 1 else 4)


@pytest.mark.core
@pytest.mark.parametrize("epoch_bytes", [1, 1 << 20])
def test_fit_equals_keras_fit(linear, monkeypatch, epoch_bytes):
    """Whether TensorFlow gets all rows at once or in pieces."""
    monkeypatch.setattr(device, "EPOCH_BYTES", epoch_bytes)
    replica = linear.trains_as_keras(X, Y, ROWS)
    assert (replica.worker, replica.rows, replica.steps) == (0, 22, 6)
    assert metrics.results(linear.model, replica.metrics) == pytest.approx(replica.logs, rel=1e-6)
    assert replica.learning_rate == pytest.approx(0.05)
    assert replica.seconds > 0
    assert replica.is_finite


def test_a_replica_is_independent_of_the_state_and_of_later_training(linear):
    begun = linear.state.weights.vector.copy()
    replica = linear.fit()
    weights, sums = replica.state.weights.vector.copy(), [array.copy() for array in replica.metrics]
    linear.fit(state=replica.state)
    assert np.array_equal(linear.state.weights.vector, begun)
    assert np.array_equal(replica.state.weights.vector, weights)
    assert all(map(np.array_equal, replica.metrics, sums))


def test_batch_ranges_add_up_to_the_epoch(linear):
    options = FitOptions(BATCH, shuffle=True, seed=5)
    whole = linear.fit(options=options)
    one = linear.fit(batch_range=BatchRange(0, 22, 0, 2), options=options)
    other = linear.fit(batch_range=BatchRange(0, 22, 2, 99), options=options, state=one.state)
    assert np.array_equal(other.state.weights.vector, whole.state.weights.vector)
    assert np.array_equal(other.state.optimizer.vector, whole.state.optimizer.vector)
    assert (one.rows, other.rows, one.steps, other.steps) == (8, 14, 2, 4)
    metrics.prepare(linear.model, ROWS)
    merged = metrics.results(linear.model, metrics.merge([one.metrics, other.metrics]))
    assert merged == pytest.approx(whole.logs, rel=1e-6)


@pytest.mark.core
def test_what_is_random_depends_only_on_seed_worker_and_epoch():
    """The order of rows, numbers that a transform draws, and dropout masks."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    given, numbered = Model(model), from_arrays(X, np.arange(22, dtype=np.float32)[:, None], None)

    def run(seed=1, worker=0, epoch=0, shuffle=True):
        batches, drawn = [], []

        def transform(x, y):
            batches.append(y.ravel().astype(int).tolist())
            drawn.append(np.random.random())
            return x, y * 0

        options = FitOptions(BATCH, SimpleNamespace(load=lambda: transform), shuffle=shuffle, seed=seed)
        replica = given.fit(numbered, BatchRange(epoch, 22, 0, 6), options, worker=worker)
        return batches, drawn, replica.state.weights.vector.tolist()

    one = run()
    assert run() == one
    assert sorted(row for batch in one[0] for row in batch) == list(range(22))
    for other in (run(seed=2), run(worker=1), run(epoch=1)):
        assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))
    batches, _, weights = run(shuffle=False)
    assert batches == [list(range(start, min(start + 4, 22))) for start in range(0, 22, 4)]
    assert run(seed=2, shuffle=False)[2] != weights


def test_without_rows_there_is_no_replica_and_there_are_no_metrics_and_predictions(linear):
    for batch_range in (BatchRange(0, 0, 0, 6), BatchRange(0, 8, 2, 4)):
        assert linear.fit(batch_range=batch_range) is None
    for blocks in ([], [ROWS[:0]]):
        assert linear.evaluate(blocks, BatchOptions(BATCH)) is None
    assert list(linear.predictor(BatchOptions(BATCH)).in_parts([])) == []


def test_callbacks_run_as_new_copies(linear):
    class Halve(keras.callbacks.Callback):
        begun = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.begun += 1
            assert (epoch, self.begun) == (3, 1)
            self.model.optimizer.learning_rate = 0.025

    options = FitOptions(BATCH, shuffle=False, callbacks=ByValue.dump([Halve()], "worker_callbacks"))
    for _ in range(2):
        replica = linear.fit(batch_range=BatchRange(3, 22, 0, 6), options=options)
    assert replica.learning_rate == pytest.approx(0.025)


@pytest.mark.core
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="other backends read variables in each step")
def test_a_callback_that_changes_a_variable_which_jax_has_compiled_is_an_error():
    weight = keras.Variable(1.0, name="weight")

    def weighted(y, predicted):
        return weight * keras.ops.mean(keras.ops.square(y - predicted))

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            weight.assign(0.0)

    given = Model(regression(loss=weighted, jit_compile=True))
    with pytest.raises(ConfigurationError, match="changed the variable 'weight'"):
        given.trainer().fit(given.state, copied(ROWS), WHOLE, PLAIN, callbacks=[Anneal()])


def test_rows_are_counted_up_to_an_early_stop(linear):
    """Replicas are weighted by their number of rows."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch >= 1

    replica = linear.trainer().fit(linear.state, copied(ROWS), WHOLE, PLAIN, callbacks=[Stop()])
    plain = linear.anew()
    plain.fit(X[:8], Y[:8], batch_size=BATCH, shuffle=False, verbose=0)
    assert close(replica.state, plain)
    assert (replica.rows, replica.steps) == (8, 2)


def test_rows_are_counted_up_to_a_stop_by_the_server(linear):
    class Stopping:
        keeps_optimizer = False
        every, stopped = 2, False

        def __call__(self, weights, point, optimizer=None):
            return ExchangeResult(weights, stop=True)

    replica = linear.trainer().fit(linear.state, copied(ROWS), WHOLE, PLAIN, exchange=Stopping())
    assert (replica.rows, replica.steps, replica.stopped) == (8, 2, True)


def test_a_diverged_replica_is_not_finite(linear):
    assert not linear.fit(from_arrays(X, np.full_like(Y, 1e30), None)).is_finite


def at_a_cache_line(array):
    """A copy aligned to a cache line, like a memory-mapped file: a backend may use such memory without a copy."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    found = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[:] = array
    return found


@pytest.mark.core
def test_the_rows_are_not_changed():
    """They belong to the user or another task, or are in a read-only file: writing to it kills the process."""
    inputs = keras.Input((16,))  # the first operations are elementwise: a backend may compute them in place
    first = [keras.layers.Normalization(mean=1.0, variance=2.0)(inputs), keras.layers.Activation("relu")(inputs)]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(first)))
    model.compile("sgd", "mse")
    x = RNG.normal(size=(61, 16)).astype(np.float32)
    given = from_arrays(*map(at_a_cache_line, (x, x.sum(1, keepdims=True), x[:, 0] ** 2)))
    before, mine, options = copied(given), Model(model), FitOptions(16, shuffle=False)
    for call in (
        lambda: mine.trainer().fit(mine.state, given, BatchRange(0, 61, 0, 99), options),
        lambda: mine.trainer().evaluate(mine.state, iter([given]), options),
        lambda: mine.predictor(options).predict(from_arrays(given.x, None, None)),
    ):
        for _ in range(3):
            call()
        assert all(map(np.array_equal, given.arrays, before.arrays))


# Steps per execution


@pytest.mark.core
def test_functions_for_several_steps_and_for_one_are_kept(linear):
    class EachBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    found = []
    for callbacks in ([], [EachBatch()]) * 2:
        linear.trainer().fit(linear.state, copied(ROWS), WHOLE, PLAIN, callbacks=callbacks)
        model = linear.archive.cached()
        found.append((model.steps_per_execution, model.train_function))
    assert found[:2] == found[2:]
    assert found[1][0] == 1
    assert found[0][0] == 1 if keras.backend.backend() == "torch" else found[0][0] > 1


def test_callbacks_of_a_long_training_may_add_to_the_logs(linear):
    class Add(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["added"] = 1.5

    assert linear.trainer().fit(linear.state, copied(ROWS), WHOLE, PLAIN, callbacks=lasting([Add()])).logs["added"] == 1.5


# Class weights


NUMBERS = RNG.integers(0, 3, 22)


def test_class_weights_of_one_hot_labels():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(0.5), "categorical_crossentropy", weighted_metrics=["accuracy"], run_eagerly=True)
    hot, weights = keras.utils.to_categorical(NUMBERS, 3), {0: 0.0, 2: 4.0}
    options = FitOptions(BATCH, shuffle=False, class_weight=weights)
    Model(model).trains_as_keras(X, hot, from_arrays(X, hot, None), options, class_weight=weights)


@pytest.mark.core
def test_class_weights_of_one_output_work_as_in_keras(linear):
    labels, weights = np.array([-1.0, 0.1, 0.9], np.float32)[NUMBERS][:, None], {0: 0.25, 1: 3.0}
    options = FitOptions(BATCH, shuffle=False, class_weight=weights)
    linear.trains_as_keras(X, labels, from_arrays(X, labels, None), options, class_weight=weights)


# Evaluation


@pytest.mark.core
def test_weighted_evaluation_over_workers_works_as_in_keras(linear):
    """tests/integration/test_inference.py has metrics of classes."""
    weight = np.linspace(0, 3, 22).astype(np.float32)
    block = from_arrays(X, Y, weight)
    linear.evaluates_as_keras(X, Y, [block[:1], block[1:9], block[9:]], sample_weight=weight)


def test_evaluation_uses_the_given_weights(linear):
    """Not those that training left in the process, and the other way around."""
    replica = linear.fit()
    linear.evaluates_as_keras(X, Y, [ROWS])
    assert np.array_equal(ModelState.take(linear.archive.cached()).weights.vector, linear.state.weights.vector)
    assert np.array_equal(linear.fit().state.weights.vector, replica.state.weights.vector)


def test_features_that_do_not_fit_raise_an_error(linear):
    narrow = from_arrays(X[:, :2], Y, None)
    for attempt in (lambda: linear.evaluate([narrow], BatchOptions(BATCH)), lambda: predicted(linear, [narrow])):
        with pytest.raises(DataError, match=r"\(3,\), received rows .* \(2,\)"):
            attempt()


# Metric state


def test_metric_states_are_added_in_float64():
    large, small = (np.array(2.0**24, np.float32),), (np.array(1.0, np.float32),)
    assert metrics.merge([large, small, small]) == (2.0**24 + 2,)
    assert large[0] == 2.0**24
    assert metrics.merge([]) == ()


def test_a_different_number_of_metric_variables_raises_an_error(linear):
    with pytest.raises(DataError, match="1 metric variables"):
        metrics.results(linear.model, (np.zeros(1),))


# Prediction


def predicted(given, blocks, options=BatchOptions(BATCH)):  # noqa: B008
    return join_predictions(list(given.predictor(options).in_parts(map(copied, blocks))))


@pytest.mark.core
def test_incomplete_batches_among_others_are_predicted_in_order(monkeypatch):
    """JAX compiles the model for each number of rows, so some do not count, and it predicts several batches at once."""
    given = Model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="sizes"))
    dense, sizes, is_jax = keras.layers.Dense.call, set(), keras.backend.backend() == "jax"
    spy = lambda self, inputs, training=None: [sizes.add(inputs.shape[0]), dense(self, inputs)][1]  # noqa: E731
    monkeypatch.setattr(keras.layers.Dense, "call", spy)
    rows = np.random.default_rng(0).normal(size=(201, 3)).astype(np.float32)
    blocks = [from_arrays(part, None, None) for part in np.split(rows, [59, 59, 70])]  # each leaves a batch of 3, or none
    found = list(given.predictor(BatchOptions(8)).batches(blocks))
    assert (len(found) < 27) == is_jax
    if keras.backend.backend() != "tensorflow":  # which does not know the size
        assert {size for size in sizes if size and size <= 11} == {8, 4 if is_jax else 3}
    assert np.allclose(np.concatenate(found), given.anew().predict(rows, verbose=0), rtol=0, atol=1e-6)


@pytest.mark.core
def test_batches_of_a_slow_reader_are_predicted_as_they_come(linear, monkeypatch):
    predictor = linear.predictor(BatchOptions(4))
    predictor.predict(from_arrays(X[:4], None, None))  # which loads the model
    monkeypatch.setattr("sparkkeras.worker.predictor.CALL_SECONDS", 0.1)
    read = []

    def blocks():
        for number in range(3):
            time.sleep(0.11)
            read.append(number)
            yield from_arrays(X[:4], None, None)

    assert [len(read) for _ in predictor.batches(blocks())] == [1, 2, 3]


@pytest.mark.core
def test_a_model_predicts_after_a_failure_in_the_middle(linear, monkeypatch):
    """The next task of the process uses the same model."""
    block = from_arrays(np.ones((64, 3), np.float32), None, None)
    predicted(linear, [block])  # so that there is a model with a function
    model, calls = linear.archive.cached(block.spec.ranks[0]), itertools.count()
    function = model.predict_function

    def fails(*arguments):
        if next(calls) == 2:
            raise MemoryError
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(model, "predict_function", fails)
        with pytest.raises(MemoryError):
            predicted(linear, [block])
    linear.predicts_as_keras(block.x, [block])


def test_predictions_are_streamed(linear, monkeypatch):
    """Memory does not grow with the partition: pieces of the input and parts of the output have a bounded size."""
    monkeypatch.setattr("sparkkeras.worker.batches.BLOCK_BYTES", 12 * BATCH)  # a batch
    monkeypatch.setattr("sparkkeras.worker.predictor.HELD_BYTES", 8 * BATCH)  # the predictions of two
    given = [0]

    def blocks():
        for start in range(0, 22, 2 * BATCH):
            given[0] += 1
            yield from_arrays(X[start : start + 2 * BATCH], None, None)

    parts = linear.predictor(BatchOptions(BATCH)).in_parts(blocks())
    assert len(next(parts)) == 2 * BATCH
    assert given == [1]
    assert [len(part) for part in parts] == [8, 6]


# Outputs without a loss


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("y", [Y, {"size": Y}], ids=["array", "dict"])
def test_labels_for_only_the_output_with_a_loss_work_as_in_keras(y):
    inputs = keras.Input((3,))
    outputs = [keras.layers.Dense(2, name="free")(inputs), keras.layers.Dense(1, name="size")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", [None, "mse"], run_eagerly=True)
    given, block = Model(model), from_arrays(X, y, None)
    check_labels(model, block.spec, label_ranges(block))
    given.trains_as_keras(X, y, block)
    given.evaluates_as_keras(X, y, [block])


def test_inputs_in_order_reach_those_of_a_model_with_a_dict():
    """Keras sorts the keys; the order is that in which the model was built."""
    b, a = keras.Input((3,), name="b"), keras.Input((3,), name="a")
    model = keras.Model({"b": b, "a": a}, keras.layers.Dense(1)(keras.layers.concatenate([10 * b, a])))
    model.compile("sgd", "mse", run_eagerly=True)
    x, rows = {"b": X, "a": X[::-1]}, from_arrays((X, X[::-1]), Y, None)
    given, options = Model(model), FitOptions(BATCH, shuffle=False, input_structure=input_structure(model))
    given.predicts_as_keras(x, [rows], options)
    given.evaluates_as_keras(x, Y, [rows], options)
    given.trains_as_keras(x, Y, rows, options)


class Undeclared(keras.Model):
    """A model that takes rows of any rank."""

    def __init__(self, **given):
        super().__init__(**given)
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


def test_rows_of_two_ranks_are_predicted_in_one_process():
    """TensorFlow would trace one model for both, for inputs of unknown rank, which a layer does not take."""
    model = Undeclared()
    model(X)
    mine = Model(model)
    for x in (X, X[:, None], X):
        predicted = mine.predictor(BatchOptions(BATCH)).predict(from_arrays(x, None, None))
        np.testing.assert_allclose(predicted, model.predict_on_batch(X).reshape(predicted.shape), rtol=1e-5)


def test_rows_are_reported_while_a_block_is_evaluated_or_predicted(linear, monkeypatch):
    rows, options = from_arrays(np.tile(X, (100, 1)), np.tile(Y, (100, 1)), None), BatchOptions(BATCH, progress="a driver")
    for call in (linear.evaluate, lambda blocks, options: list(linear.predictor(options).batches(blocks))):
        reports = []
        monkeypatch.setattr(ProgressReporter, "update", lambda self, rows, logs=None, noted=reports: noted.append(rows))
        call([rows], options)
        assert reports[-1] == rows.rows
        assert len(reports) >= 3
        assert reports == sorted(reports)
