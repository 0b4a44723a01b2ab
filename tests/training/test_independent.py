"""Independent training of ensemble members, on in-memory datasets without Spark."""

import random

import keras
import numpy as np
import pytest

from sparkkeras.data.block import concatenate
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalDataset, LocalRows, LocalShared
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.data.reader import Reader
from sparkkeras.errors import ConfigurationError, DivergenceError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelState
from sparkkeras.training.independent import AllRows, BootstrapRows, IndependentStrategy, Member, PartitionRows, TrainMember
from sparkkeras.training.validation import Validation
from sparkkeras.worker.batch_reader import BatchReader, WorkerBatches
from sparkkeras.worker.batches import BatchOptions, FitOptions
from tests.training.runs import BATCH, X, Y, partitions, rows, stored_run, weights_of


def linear(seed=0, optimizer=None, **compiled):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(1, name="y")], name="linear")
    model.compile(optimizer or keras.optimizers.Adam(0.05), "mse", metrics=["mae"], **compiled)
    metrics.prepare(model, rows(X[:1], Y[:1]).spec.zeros())
    return model


def quick(seed=0, optimizer=None):
    """Like `linear`, but compiled to run fast for a few steps: without graphs, whose tracing takes longer than the steps."""
    return linear(seed, optimizer or keras.optimizers.SGD(0.05), run_eagerly=True)


def train(
    models,
    dataset,
    sampling="all",
    *,
    epochs=2,
    shuffle=True,
    seed=1,
    callbacks=None,
    validation=None,
    split=0.0,
    steps_per_epoch=None,
):
    """Train; return the histories."""
    parts = TrainValidationSplit.split([handle.rows for handle in dataset.handles], split)
    options = FitOptions(
        BATCH, None, shuffle=shuffle, seed=seed, callbacks=callbacks and ByValue.dump(callbacks, "callbacks")
    )
    if split:
        validation = Validation(dataset, BatchOptions(BATCH), spans=parts.validation_spans)
    given = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
    run = stored_run(models, dataset, options, mode="independent", split=parts, validation=validation, given=given)
    IndependentStrategy(sampling, seed).train(run, range(epochs))
    return [model.history for model in models]


def fit_plainly(model, rows, epochs, **arguments):
    """Train with plain Keras on some of the rows; return the history."""
    return model.fit(X[rows], Y[rows], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments).history


def alike(history, expected):
    """Whether a history has the values of one of Keras."""
    found = history.history
    return set(found) == set(expected) and all(found[name] == pytest.approx(expected[name], rel=1e-5) for name in expected)


def test_a_member_on_all_rows_equals_plain_keras():
    def make():
        averaged = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)
        return [linear(0), linear(1, averaged)]

    models, plain = make(), make()
    histories = train(models, partitions(20, None, 13), epochs=3, shuffle=False)
    for model, other, history in zip(models, plain, histories, strict=True):
        assert alike(history, fit_plainly(other, slice(33), 3))
        np.testing.assert_allclose(weights_of(model), weights_of(other), atol=1e-6)
        assert int(model.optimizer.iterations) == 27
        assert history.epoch == [0, 1, 2]
        assert history.model is model
        assert model.history is history


@pytest.mark.core
def test_validation_equals_plain_keras():
    held_out = partitions(10, 7)
    model, plain = linear(), linear()
    (history,) = train([model], partitions(20), epochs=4, shuffle=False, validation=Validation(held_out, BatchOptions(5), 2))
    rows = concatenate(held_out.blocks)
    assert alike(history, fit_plainly(plain, slice(20), 4, validation_data=(rows.x, rows.y), validation_freq=2))
    assert len(history.history["val_loss"]) == 2
    np.testing.assert_allclose(weights_of(model), weights_of(plain), atol=1e-6)


@pytest.mark.parametrize(
    ("sampling", "rows", "held_out"),
    [
        ("all", [np.r_[0:15, 20:29]] * 2, [np.r_[15:20, 29:32]] * 2),
        ("partition", [np.r_[0:15], np.r_[20:29]], [np.r_[15:20], np.r_[29:32]]),
    ],
    ids=["all", "partition"],
)
def test_each_member_trains_and_validates_on_its_rows(sampling, rows, held_out):
    models = [linear(0), linear(0)]
    histories = train(models, partitions(20, 12), sampling, shuffle=False, split=0.25)
    for model, history, trained, validated in zip(models, histories, rows, held_out, strict=True):
        plain = linear(0)
        assert alike(history, fit_plainly(plain, trained, 2, validation_data=(X[validated], Y[validated])))
        np.testing.assert_allclose(weights_of(model), weights_of(plain), atol=1e-6)


def test_members_have_different_rows_and_a_seed_reproduces_them():
    def run(seed):
        models = [quick(0), quick(0)]
        train(models, partitions(8, 5), "bootstrap", seed=seed)
        return [weights_of(model) for model in models]

    first, again, other = run(1), run(1), run(2)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], other[0])


def test_a_member_does_not_depend_on_the_others():
    alone, several = [quick(0)], [quick(0), quick(1)]
    for models in (alone, several):
        train(models, partitions(8, 5), "bootstrap")
    assert np.array_equal(weights_of(alone[0]), weights_of(several[0]))


# Rows


def test_a_bootstrap_sample_has_as_many_rows_drawn_with_replacement():
    sample = BootstrapRows(AllRows((LocalRows(rows(X, Y)),), ((0, 50),)), seed=3)
    first, again, other = (sample.of(member, None) for member in (0, 0, 1))
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.x, other.x)
    for each in (first, other):
        found = {tuple(row) for row in each.x}
        assert each.rows == 50
        assert 0.5 * 50 < len(found) < 0.8 * 50  # 1 - 1/e of them, about
        assert found <= {tuple(row) for row in X[:50]}  # no validation rows
        assert all(np.array_equal(y, Y[np.flatnonzero((x == X).all(1))[0]]) for x, y in zip(each.x, each.y, strict=True))


def test_empty_partitions_contribute_no_rows():
    filled, empty = LocalRows(rows(X, Y)), LocalRows(None)
    assert BootstrapRows(AllRows((empty, empty), ((0, 0), (0, 3))), 0).of(0, None) is None
    assert AllRows((filled, empty), ((2, 4), (0, 0))).of(0, None).rows == 2
    assert PartitionRows(((0, 3), (2, 2))).of(1, rows(X, Y)) is None
    assert PartitionRows(((0, 3),)).of(0, None) is None


# Callbacks


def test_each_member_has_its_own_callbacks_for_all_epochs():
    models = [quick(), quick(0, keras.optimizers.SGD(0.0))]
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1)
    histories = train(models, partitions(20), epochs=3, split=0.5, callbacks=[stop])
    assert [history.epoch for history in histories] == [[0, 1, 2], [0, 1]]


def test_early_stopping_sees_validation_and_restores_the_best():
    model, best = quick(), quick()
    worse = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=1, restore_best_weights=True)
    (history,) = train([model], partitions(20), epochs=9, split=0.5, callbacks=[worse])
    assert history.epoch == [0, 1]  # the loss decreases, but mode="max" counts that as worse
    train([best], partitions(20), epochs=1, split=0.5)
    assert np.array_equal(weights_of(model), weights_of(best))


# Failures


def test_a_diverging_member_is_reported_and_no_member_is_changed():
    models = [quick(0), quick(1, keras.optimizers.SGD(1e30))]
    before = [weights_of(model) for model in models]
    with pytest.raises(DivergenceError, match=r"member 1 diverged in epoch \d"):
        train(models, partitions(20), epochs=3)
    assert all(np.array_equal(weights_of(model), vector) for model, vector in zip(models, before, strict=True))


@pytest.mark.parametrize("sizes", [(20, None), (20, 0), (10, 10, 10)], ids=str)
def test_too_few_partitions_for_the_members_are_reported(sizes):
    with pytest.raises(ConfigurationError, match="each of the 2 members needs a partition with training rows"):
        train([linear(0), linear(1)], partitions(*sizes), "partition")


def test_members_that_exceed_the_result_limit_are_rejected_before_training():
    class Bounded(LocalDataset):
        max_result_bytes = 50

        def run(self, task):
            raise AssertionError("nothing may run")

    with pytest.raises(ConfigurationError, match=r"2 members return .* spark\.driver\.maxResultSize"):
        train([linear(0), linear(1)], Bounded(partitions(20).blocks))


class Shuffled:
    """A function that reads batches in a random order, not pickled."""

    def load(self):
        return self

    def __call__(self, worker, num_workers):
        starts = list(range(0, 40, BATCH))
        random.shuffle(starts)
        return [(X[start : start + BATCH], Y[start : start + BATCH]) for start in starts]


@pytest.mark.core
@pytest.mark.parametrize("reads", [False, True])
def test_a_repeated_attempt_gives_the_same_result(reads):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    metrics.prepare(model, rows(X[:1], Y[:1]).spec.zeros())
    member = LocalShared(Member(ModelArchive.pack(model), ModelState.take(model)))
    sample = BootstrapRows(AllRows((LocalRows(rows(X, Y)),), ((0, 60),)), 4)
    if reads:
        stream = WorkerBatches(BatchReader(Shuffled(), 1, Reader(schema_of(model))), 0)
        sample = AllRows((stream,), ((0, None),))
    task = TrainMember((member, member), LocalShared(FitOptions(BATCH, seed=4)), range(2), None, sample, None)
    first, again = (next(task(TaskContext(1, attempt), iter(()))) for attempt in (0, 7))
    assert np.array_equal(first.state.weights.vector, again.state.weights.vector)
    assert np.array_equal(first.state.optimizer.vector, again.state.optimizer.vector)
    assert first.logs == again.logs


# Stateful models


def stateful():
    layers = [keras.Input((3,), batch_size=BATCH), keras.layers.Reshape((3, 1)), keras.layers.LSTM(1, stateful=True)]
    model = keras.Sequential(layers, name="stateful")
    model.compile("sgd", "mse")
    return model


def held_out(rows, batch_size=BATCH):
    return {"validation": Validation(partitions(*rows), BatchOptions(batch_size), 1)}


@pytest.mark.parametrize(
    ("sampling", "sizes", "given", "reason"),
    [
        ("partition", (12, 13), {}, r"partition 1 has 13 rows for training.*rows of each partition.*num_workers="),
        ("all", (12, 13), {}, r"there are 25 rows for training.*Leave rows out, or set steps_per_epoch=\.$"),
        ("partition", (8, 8), {"split": 0.1, "steps_per_epoch": 1}, "partition 0 has 1 row for validation"),
        ("partition", (8, 8), held_out((3, 6)), "there are 9 rows for validation"),
        ("all", (8, 8), held_out((8,), 8), "but validation_batch_size=8"),
    ],
)
def test_members_with_a_fixed_batch_size_need_whole_batches(sampling, sizes, given, reason):
    with pytest.raises(ConfigurationError, match=reason):
        train([linear(), stateful()], partitions(*sizes), sampling, **given)
