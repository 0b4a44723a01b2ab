"""Workers in step give the weights of plain Keras on the union of their batches. Three processes run most of the cases."""

import itertools

import keras
import numpy as np
import pytest

from sparkkeras.data.block import Block, from_arrays
from sparkkeras.data.local_dataset import LocalStream
from sparkkeras.errors import ClusterError, DataError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.state import ModelState
from sparkkeras.worker.batches import FitOptions
from sparkkeras.worker.lockstep import STREAM_WINDOW
from tests.models import classifier
from tests.worker import groups

pytestmark = pytest.mark.soak  # starts processes that load the backend

BATCH = 8
PLAIN = FitOptions(BATCH, shuffle=False)
UNEVEN = (41, 0, 20)
"""The rows of three workers: six steps, none, and three."""


@pytest.fixture(scope="module")
def three():
    with groups.group_of(3) as processes:
        yield processes


@pytest.fixture
def rows(digits):
    """Rows of digits in parts."""

    def make(counts=UNEVEN):
        x, y = digits[0], digits[1].astype(np.int32)
        return [from_arrays(x[a:b], y[a:b], None) for a, b in itertools.pairwise(np.cumsum((0, *counts)))]

    return make


def small(optimizer="adam", **compiled):
    return classifier(units=16, optimizer=optimizer, **compiled)


def unions(blocks, window=None):
    """The batches of all workers in each step, as one: those of each worker are spread evenly over the steps of a window."""
    counts = [-(-block.rows // BATCH) for block in blocks]
    window = window or max(counts)
    for start in range(0, max(counts), window):
        left = [min(max(count - start, 0), window) for count in counts]
        for step in range(max(left)):
            cuts = [[start + at * own // max(left) for at in (step, step + 1)] for own in left]
            yield joined([block[first * BATCH : last * BATCH] for block, (first, last) in zip(blocks, cuts, strict=True)])


def joined(parts):
    columns = zip(*(part.arrays for part in parts), strict=True)
    return Block(parts[0].form, tuple(map(np.concatenate, columns)))


def plain(model, blocks, epochs=2, window=None):
    """Plain Keras on the unions; returns the metrics of the last epoch."""
    for _ in range(epochs):
        total, rows = {}, 0
        for batch in unions(blocks, window):
            sides = (batch.x, batch.y, batch.sample_weight)
            x, y, weight = (list(side) if isinstance(side, tuple) else side for side in sides)
            model.reset_metrics()
            logs = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
            total = {name: total.get(name, 0) + float(value) * batch.rows for name, value in logs.items()}
            rows += batch.rows
    return {name: value / rows for name, value in total.items()}


def trained(processes, model, blocks, epochs=2, gradient_dtype=None, callbacks=((), (), ())):
    """The replicas of the last epoch by rank, which are equal to the last bit."""
    state, size = ModelState.take(model), len(blocks)
    before, after = (ModelArchive.pack(model), state), (PLAIN, epochs, gradient_dtype)
    same = [[[value] * size for value in values] for values in (before, after)]
    found = [replicas[-1] for replicas in processes.run(groups.train, *same[0], blocks, *same[1], callbacks[:size])]
    first = found[0].state
    for replica in found[1:]:
        assert np.array_equal(replica.state.weights.vector, first.weights.vector)
        assert np.array_equal(replica.state.optimizer.vector, first.optimizer.vector)
    assert not np.array_equal(first.weights.vector, state.weights.vector)
    return found


def difference(replicas, model):
    """The largest difference from the weights and optimizer variables of a model."""
    mine, theirs = replicas[0].state, ModelState.take(model)
    assert list(map(int, mine.optimizer.integer_variables)) == list(map(int, theirs.optimizer.integer_variables))
    return max(
        np.abs(mine.weights.vector - theirs.weights.vector).max(),
        np.abs(mine.optimizer.vector - theirs.optimizer.vector).max(initial=0),
    )


def equals_keras(processes, model, blocks):
    """Check that workers train like plain Keras; returns their replicas."""
    replicas = trained(processes, model, blocks)
    expected = plain(model, blocks)
    assert difference(replicas, model) < 1e-5
    found = metrics.results(model, metrics.merge(replica.metrics for replica in replicas))
    for name in found.keys() & {"loss", "accuracy", "kind_accuracy", "values_mae"}:  # the padding does not count
        assert found[name] == pytest.approx(expected[name], abs=1e-5)
    return replicas


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.8)


def loss_scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10, dynamic_growth_steps=3)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, use_ema=True),
    "clipnorm": lambda: keras.optimizers.SGD(schedule(), clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "loss_scale": lambda: loss_scaled(keras.optimizers.Adam(0.01, clipnorm=0.1)),
    "several": lambda: loss_scaled(keras.optimizers.SGD(schedule(), clipnorm=0.05, gradient_accumulation_steps=2)),
}


def values(rank):
    return [np.float64(1 / 3) + rank, np.arange(5, dtype=np.uint8) + rank, np.full((2, 3), rank - 2**40), np.empty((0, 2))]


def test_processes_exchange_values(three):
    expected = list(zip(*map(values, range(3)), strict=True))
    for gathered, data in three.run(groups.gather, list(map(values, range(3)))):
        for found, given in zip(gathered, expected, strict=True):
            assert {each.dtype for each in found} == {given[0].dtype}
            assert np.array_equal(found, given)
        assert data == [b"", b"x", b"xx"]


def test_one_worker(rows):
    with groups.group_of(1) as processes:
        equals_keras(processes, small(OPTIMIZERS["clipnorm"]()), rows((41,)))


@pytest.mark.parametrize("units", [150, 4200])
def test_gradients_that_are_summed_on_their_way(three, rows, units):
    """Those of the other tests are gathered; a large one here travels alone."""
    equals_keras(three, classifier(units=units, optimizer=OPTIMIZERS["sgd"]()), rows())


def lookups(optimizer):
    """An embedding of which each row of data looks up several rows, some of them several times, and a small one."""
    keras.utils.set_random_seed(3)
    words, size = keras.Input((6,), dtype="int32", name="words"), keras.Input((), dtype="int32", name="size")
    word_vectors = keras.layers.Embedding(40, 4, name="word_vectors")(words)
    both = [keras.layers.GlobalAveragePooling1D()(word_vectors), keras.layers.Embedding(3, 2, name="sizes")(size)]
    joined = keras.layers.Concatenate()(both)
    outputs = [keras.layers.Dense(3, "softmax", name="kind")(joined), keras.layers.Dense(1, name="values")(joined)]
    model = keras.Model([words, size], outputs, name="lookups")
    losses = ["sparse_categorical_crossentropy", "mse"]
    model.compile(optimizer, losses, loss_weights=[1.0, 0.3], metrics=[["accuracy"], ["mae"]])
    return model


def words(counts):
    """Words that all workers look up, and words of one of them; with weights for each output."""
    random = np.random.default_rng(5)
    blocks = []
    for rank, rows in enumerate(counts):
        common, own = random.integers(1, 6, (rows, 4)), random.integers(10 + 9 * rank, 19 + 9 * rank, (rows, 2))
        x = np.concatenate([common, own], axis=1).astype(np.int32), random.integers(0, 3, rows).astype(np.int32)
        y = random.integers(0, 3, rows).astype(np.int32), random.normal(size=(rows, 1)).astype(np.float32)
        weight = random.uniform(0, 3, rows).astype(np.float32)
        blocks.append(from_arrays(x, y, (weight, weight**2), 2, 2))
    return blocks


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), lambda: keras.optimizers.RMSprop(0.01, momentum=0.5)])
def test_uneven_workers_with_embeddings_and_weights_of_several_outputs(three, make):
    replicas = equals_keras(three, lookups(make()), words(UNEVEN))
    assert [(replica.steps, replica.rows) for replica in replicas] == [(6, 41), (0, 0), (3, 20)]


@pytest.mark.parametrize(("dtype", "error"), [("float16", 5e-4), ("bfloat16", 5e-3)])
def test_gradients_travel_in_half_precision(three, rows, dtype, error):
    for make, blocks, largest in (small, rows(), error), (lookups, words(UNEVEN), 5e-3):
        model = make(keras.optimizers.SGD(0.1))
        model.name += dtype  # processes keep a model with the way in which its gradients travel
        replicas = trained(three, model, blocks, gradient_dtype=dtype)
        plain(model, blocks)
        assert 1e-7 < difference(replicas, model) < largest


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras supports one step only")
def test_several_steps_in_an_execution(three, rows):
    equals_keras(three, small(steps_per_execution=2), rows())


def test_mixed_precision(three, rows):
    half = keras.layers.Dense(16, "relu", dtype=keras.DTypePolicy("mixed_float16"))
    model = keras.Sequential([keras.Input((64,)), half, keras.layers.Dense(10, "softmax")], name="mixed")
    model.compile(OPTIMIZERS["loss_scale"](), "sparse_categorical_crossentropy")
    replicas = trained(three, model, rows())
    plain(model, rows())
    assert difference(replicas, model) < 2e-3


def test_batch_statistics_are_averaged_and_padding_changes_nothing(three, rows):
    normalization = keras.layers.BatchNormalization(momentum=0.5)
    frozen = keras.layers.Dense(10, trainable=False)
    model = keras.Sequential([keras.Input((64,)), normalization, keras.layers.Dropout(0.5), frozen], name="statistics")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    blocks, kernel = rows(), frozen.get_weights()[0]
    replicas = trained(three, model, blocks, epochs=1)
    means = []
    for block in (blocks[0], blocks[2]):
        mean = np.zeros(64)
        for start in range(0, block.rows, BATCH):
            mean = 0.5 * mean + 0.5 * block.x[start : start + BATCH].mean(0)
        means.append(mean)
    replicas[0].state.put(model)
    assert np.allclose(
        keras.ops.convert_to_numpy(normalization.moving_mean), (41 * means[0] + 20 * means[1]) / 61, atol=1e-5
    )
    assert np.array_equal(frozen.get_weights()[0], kernel)
    assert replicas[1].metrics
    assert not any(array.any() for array in replicas[1].metrics)


def test_streams_of_different_lengths(three, rows):
    blocks = rows((75, 0, 20))
    streams = [LocalStream(tuple(block.batches(BATCH))) for block in blocks]
    model = small()
    replicas = trained(three, model, streams)
    plain(model, blocks, window=STREAM_WINDOW)
    assert difference(replicas, model) < 1e-5
    assert [replica.rows for replica in replicas] == [75, 0, 20]


def test_a_callback_of_one_worker_stops_all_at_the_end_of_the_epoch(three, rows):
    callbacks = [(groups.StopAt(stops),) for stops in (False, False, True)]
    replicas = trained(three, small(), rows(), epochs=1, callbacks=callbacks)
    assert [replica.stopped for replica in replicas] == [True, True, True]
    assert [replica.rows for replica in replicas] == [41, 0, 20]


def test_replicas_that_differ_are_an_error(three, rows):
    with pytest.raises(ClusterError, match=r"workers \[1\] differ"):
        trained(three, small(), rows(), callbacks=((), (groups.Shift(),), ()))


def test_rows_that_differ_between_workers_are_an_error(three, rows):
    blocks = rows()
    blocks[2] = from_arrays(blocks[2].x, blocks[2].y.astype(np.float32), None)
    with pytest.raises(DataError, match="worker 2 .* y changes"):
        trained(three, small(), blocks)
    with pytest.raises(DataError, match="no worker has"):
        trained(three, small(), rows((0, 0, 0)))
