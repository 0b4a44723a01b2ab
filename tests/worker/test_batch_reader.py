"""Batches that a user's function reads: kinds of datasets, and errors."""

import random
import threading
from types import SimpleNamespace

import keras
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.errors import DataError
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.state import ModelState
from sparkkeras.sources.reader_dataset import ReadBatches
from sparkkeras.worker.batch_reader import BatchReader, WorkerBatches
from sparkkeras.worker.batches import BatchOptions, BatchRange, FitOptions
from sparkkeras.worker.predictor import Predictor
from sparkkeras.worker.trainer import LocalTrainer
from tests.models import regression

X = np.arange(36, dtype=np.float32).reshape(12, 3)
Y = X[:, :1] * 2
SCHEMA = Schema((InputSpec("x", (3,), floating=True),), (InputSpec("y", (1,), floating=True),))


class Numbered(keras.utils.PyDataset):
    """Batches of 4 rows."""

    def __init__(self, ended=None, **options):
        super().__init__(**options)
        self.ended, self.threads = ended, set()

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.threads.add(threading.get_ident())
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]

    def on_epoch_end(self):
        if self.ended is not None:
            self.ended.append(True)


def reader(make, labelled=True, worker=0, num_workers=1, **options):
    """A reader whose function is not pickled, so that a test sees its effects."""
    function = SimpleNamespace(load=lambda: make)
    return WorkerBatches(BatchReader(function, num_workers, Reader(SCHEMA, labelled), **options), worker)


def batches(make, **given):
    return list(reader(make, **given).blocks())


def tf_dataset(worker, num_workers):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


MAKES = {
    "generator": lambda worker, num_workers: ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 12, 4)),
    "list": lambda worker, num_workers: [(X[:4], Y[:4]), [X[4:8], Y[4:8]], (X[8:], Y[8:])],
    "tensors": lambda worker, num_workers: [(keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y))],
    "sparse matrices": lambda worker, num_workers: [(sparse.csr_matrix(X), Y)],
    "tf.data": tf_dataset,
}


@pytest.mark.parametrize("kind", MAKES)
def test_every_kind_of_batches_becomes_blocks(kind):
    found = batches(MAKES[kind])
    assert np.array_equal(np.concatenate([block.x for block in found]), X)
    assert np.array_equal(np.concatenate([block.y for block in found]), Y)
    assert np.array_equal(reader(MAKES[kind]).open().x, X)


def test_the_function_receives_the_worker_the_number_of_workers_and_the_epoch():
    (block,) = batches(lambda worker, n: [(X[worker::n], Y[worker::n])], worker=2, num_workers=4)
    assert block.x[0, 0] == 6

    def make(worker, num_workers, factor=1, *, epoch):
        yield X * factor * epoch, Y

    assert [next(reader(make).blocks(*epoch)).x[0, 1] for epoch in ((), (1,), (5,))] == [0, 1, 5]


def test_a_py_dataset_loads_in_its_threads_and_ends_its_epoch():
    ended = []
    dataset = Numbered(ended, workers=2, max_queue_size=2)
    assert np.array_equal(np.concatenate([block.x for block in batches(lambda worker, n: dataset)]), X)
    assert ended
    assert threading.get_ident() not in dataset.threads


def test_features_alone_are_enough_for_predictions():
    for batch in (X, (X,), [X, Y, Y[:, 0]]):
        (block,) = batches(lambda worker, n, batch=batch: [batch], labelled=False)
        assert np.array_equal(block.x, X)
        assert block.y is None


def test_batches_without_rows_are_omitted():
    assert [block.rows for block in batches(lambda worker, n: [(X[:0], Y[:0]), (X, Y)])] == [12]
    assert reader(lambda worker, n: []).open() is None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ((X, Y), "returned a tuple"),
        ([(X, Y, Y, Y)], "a batch is a tuple"),
        ([(X[:5], Y)], "batch 0 .* worker 0: .* number of rows"),
        (pd.DataFrame(X), "DataFrame.* Yield pieces"),
        (keras.ops.convert_to_tensor(X), "Yield arrays batch by batch"),
        ([(X, Y), X], r"batch 1 .* labels .* yield \(x, y\)"),
        ([(X, Y), (X[:, :2], Y)], r"batch 1 .* \(3,\) to shape \(2,\)"),
        (zip(X, Y, strict=True), "shape of a single row"),
        ([(np.where(X == 5, np.nan, X), Y)], "NaN"),
    ],
)
def test_what_is_not_a_batch_is_reported(made, message):
    with pytest.raises(DataError, match=message):
        batches(lambda worker, n: made)


class Endless(Numbered):
    @property
    def num_batches(self):
        return None


@pytest.mark.parametrize("make", [lambda *_: Endless(), lambda *worker: tf_dataset(*worker).repeat()])
def test_batches_without_end_need_a_limit(make):
    with pytest.raises(DataError, match="without end: set steps_per_epoch="):
        batches(make)
    limited = reader(make, may_be_endless=True)
    assert next(limited.blocks()).rows == 4
    with pytest.raises(DataError, match="without end"):
        limited.open()


def test_an_exception_of_the_function_says_where_it_was_raised():
    def fails(worker, num_workers):
        yield X, Y
        raise ValueError("bad record")

    with pytest.raises(ValueError, match="bad record") as raised:
        batches(fails, worker=2, num_workers=4)
    assert raised.value.__notes__ == ["Raised by the reader of worker 2, in batch 1."]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="uses tensors of TensorFlow")
def test_ragged_tensors_are_reported():
    import tensorflow as tf

    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(DataError, match="batch 0 .* Pad sequences"):
        batches(lambda worker, n: tf.data.Dataset.from_tensors((ragged, [[1.0], [2.0]])))


class Notes:
    """A transform, not pickled, that notes the first value of each batch, and draws from the global generators."""

    def __init__(self):
        self.seen = []

    def load(self):
        return self

    def __call__(self, x, y):
        self.seen.append(int(x[0, 0]))
        random.random()
        np.random.random()
        return x, y


def shuffled(worker, num_workers):
    """Single rows in an order that is drawn at the beginning and in between."""
    starts = list(range(12))
    while starts:
        random.shuffle(starts)
        for _ in range(3):
            start = starts.pop(np.random.randint(len(starts)))
            yield X[start : start + 1], Y[start : start + 1]


@pytest.fixture(scope="module")
def linear():
    """Trains a linear model in its initial state on a range of batches."""
    model = regression()
    state, archive = ModelState.take(model), ModelArchive.pack(model)

    def fit(make, batch_range, options, callbacks=()):
        return LocalTrainer(archive, TaskContext(0)).fit(
            state, reader(make), batch_range, options, callbacks=list(callbacks)
        )

    return fit


def test_a_task_that_resumes_reads_the_remaining_batches_in_the_same_order(linear):
    def seen(*ranges, epoch=0, seed=3):
        notes = Notes()
        for first, last in ranges:
            linear(shuffled, BatchRange(epoch, 12, first, last), FitOptions(4, notes, seed=seed))
        return notes.seen

    all_batches = seen((0, 12))
    assert sorted(all_batches) == list(range(0, 36, 3))
    assert seen((0, 5), (5, 12)) == seen((0, 1), (1, 12)) == all_batches
    assert all_batches != seen((0, 12), epoch=1)
    assert all_batches != seen((0, 12), seed=4)


class Stop(keras.callbacks.Callback):
    """Ends an epoch after its first batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


def test_readers_are_closed_when_an_epoch_ends_early(linear):
    closed = []

    def make(worker, num_workers):
        try:
            for _ in range(50):
                yield X[:4], Y[:4]
        finally:
            closed.append(True)

    before = threading.active_count()
    for make_batches in (make, lambda worker, num_workers: Numbered(workers=2, max_queue_size=2)):
        assert linear(make_batches, BatchRange(0, None, 0, 100), FitOptions(4), [Stop()]).steps == 1
        linear(make_batches, BatchRange(0, None, 0, 2), FitOptions(4))
    assert closed == [True, True]
    assert threading.active_count() == before


def test_a_task_that_leaves_batches_closes_the_reader():
    ended = []

    class Ending(Numbered):
        def __del__(self):
            ended.append(True)

    before = threading.active_count()
    kept = []  # what a task may leave behind, for instance in a traceback

    def task(context, blocks):
        kept.append(blocks)
        yield next(blocks).rows

    assert list(ReadBatches(task, 1)(0, [reader(lambda worker, n: Ending(workers=2))])) == [4]
    assert (ended, threading.active_count()) == ([True], before)


def batch_rows(y_true, y_pred):
    """The number of rows in a batch; Keras reports the mean over batches."""
    return keras.ops.cast(keras.ops.shape(y_pred)[0], "float32")


def test_evaluation_and_prediction_keep_the_batches():
    model = regression(metrics=[batch_rows])
    rows = from_arrays(X, Y, None)
    state, archive, options = ModelState.take(model), ModelArchive.pack(model), BatchOptions(4, in_batches=True)
    found, _, _ = LocalTrainer(archive, TaskContext(0)).evaluate(state, iter((rows[:5], rows[5:])), options)
    assert found.logs["batch_rows"] == 6
    predictor = Predictor(archive, state, options, SCHEMA, TaskContext(0))
    assert [len(predicted) for predicted in predictor.batches([from_arrays(X, None, None)])] == [12]
