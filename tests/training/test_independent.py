"""Independent training of ensemble members, on in-memory datasets without Spark."""

import random

import keras
import numpy as np
import pytest

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
from tests.models import regression
from tests.training.runs import BATCH, X, Y, partitions, rows, stored_run, weights_of


def quick(seed=0, optimizer=None):
    """A linear model that runs fast for a few steps: without graphs, whose tracing takes longer than the steps."""
    model = regression(seed=seed, optimizer=optimizer or keras.optimizers.SGD(0.05), metrics=["mae"], run_eagerly=True)
    metrics.prepare(model, rows(X[:1], Y[:1]).spec.zeros())
    return model


def train(
    models,
    dataset,
    sampling="all",
    *,
    epochs=2,
    shuffle=True,
    callbacks=None,
    validation=None,
    split=0.0,
    frequency=1,
    steps_per_epoch=None,
):
    """Train; return the histories."""
    parts = TrainValidationSplit.split([handle.rows for handle in dataset.handles], split)
    dumped = callbacks and ByValue.dump(callbacks, "callbacks")
    options = FitOptions(BATCH, None, shuffle=shuffle, seed=1, callbacks=dumped)
    if split:
        validation = Validation(dataset, BatchOptions(BATCH), frequency, parts.validation_spans)
    given = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
    run = stored_run(models, dataset, options, mode="independent", split=parts, validation=validation, given=given)
    IndependentStrategy(sampling, 1).train(run, range(epochs))
    return [model.history for model in models]


@pytest.mark.parametrize(
    ("sampling", "sizes", "rows", "held_out"),
    [
        ("all", (8, None, 4), [np.r_[0:6, 8:11]], [np.r_[6:8, 11]]),
        ("partition", (8, 4), [np.r_[0:6], np.r_[8:11]], [np.r_[6:8], np.r_[11:12]]),
    ],
    ids=["all", "partition"],
)
def test_each_member_trains_and_validates_on_its_rows(sampling, sizes, rows, held_out):
    def model():
        return quick(0, keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9))

    models = [model() for _ in rows]
    train(models, partitions(*sizes), sampling, shuffle=False, split=0.25, frequency=2)
    given = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "validation_freq": 2, "verbose": 0}
    for member, trained, validated in zip(models, rows, held_out, strict=True):
        plain, found = model(), member.history
        expected = plain.fit(X[trained], Y[trained], validation_data=(X[validated], Y[validated]), **given).history
        assert found.model is member
        assert set(found.history) == set(expected)
        for name, values in expected.items():
            assert found.history[name] == pytest.approx(values, rel=1e-5)
        np.testing.assert_allclose(weights_of(member), weights_of(plain), atol=1e-6)


def test_a_member_has_rows_of_its_own_whatever_the_others_are():
    alone, several = [quick(0)], [quick(0), quick(0)]
    for models in (alone, several):
        train(models, partitions(8, 5), "bootstrap")
    assert np.array_equal(weights_of(alone[0]), weights_of(several[0]))
    assert not np.array_equal(weights_of(several[0]), weights_of(several[1]))


# Rows


def test_a_bootstrap_sample_has_as_many_rows_drawn_with_replacement():
    sample = BootstrapRows(AllRows((LocalRows(rows(X, Y)),), ((0, 50),)), seed=3)
    first, again, other = (sample.of(member, None) for member in (0, 0, 1))
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.x, other.x)
    for each in (first, other):
        drawn = [int(np.flatnonzero((x == X).all(1))[0]) for x in each.x]
        assert np.array_equal(each.y, Y[drawn])
        assert len(drawn) == 50
        assert 0.5 * 50 < len(set(drawn)) < 0.8 * 50  # 1 - 1/e of them, about
        assert max(drawn) < 50  # no validation rows


def test_a_partition_may_have_no_rows_to_validate_on():
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
    with pytest.raises(DivergenceError, match="member 1 diverged"):
        train(models, partitions(20), epochs=1)
    assert all(np.array_equal(weights_of(model), vector) for model, vector in zip(models, before, strict=True))


@pytest.mark.parametrize("sizes", [(20, None), (10, 10, 10)], ids=str)
def test_too_few_partitions_for_the_members_are_reported(sizes):
    with pytest.raises(ConfigurationError, match="each of the 2 members"):
        train([quick(0), quick(1)], partitions(*sizes), "partition")


def test_members_that_exceed_the_result_limit_are_rejected_before_training():
    class Bounded(LocalDataset):
        max_result_bytes = 50

        def run(self, task):
            raise AssertionError("nothing may run")

    with pytest.raises(ConfigurationError, match=r"spark\.driver\.maxResultSize"):
        train([quick(0), quick(1)], Bounded(partitions(20).blocks))


class Shuffled:
    """A function that reads batches in a random order, not pickled."""

    def load(self):
        return self

    def __call__(self, worker, num_workers):
        starts = list(range(0, 40, BATCH))
        random.shuffle(starts)
        return [(X[start : start + BATCH], Y[start : start + BATCH]) for start in starts]


@pytest.mark.core
def test_a_repeated_attempt_gives_the_same_result():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    metrics.prepare(model, rows(X[:1], Y[:1]).spec.zeros())
    member = LocalShared(Member(ModelArchive.pack(model), ModelState.take(model)))
    stream = WorkerBatches(BatchReader(Shuffled(), 1, Reader(schema_of(model))), 0)
    sample = BootstrapRows(AllRows((stream,), ((0, None),)), 4)
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


@pytest.mark.parametrize(
    ("sampling", "sizes", "given", "reason"),
    [
        ("partition", (12, 13), {}, "partition 1 has 13 rows for training"),
        ("all", (12, 13), {}, "25 rows for training.*set steps_per_epoch="),
        ("partition", (8, 8), {"split": 0.1, "steps_per_epoch": 1}, "1 row for validation"),
        ("partition", (8, 8), {"validation": Validation(partitions(3, 6), BatchOptions(BATCH), 1)}, "9 rows for validation"),
        ("all", (8, 8), {"validation": Validation(partitions(8), BatchOptions(8), 1)}, "validation_batch_size=8"),
    ],
)
def test_members_with_a_fixed_batch_size_need_whole_batches(sampling, sizes, given, reason):
    with pytest.raises(ConfigurationError, match=reason):
        train([quick(), stateful()], partitions(*sizes), sampling, **given)
