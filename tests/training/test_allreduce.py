"""All-reduce training without processes: what the driver changes, rows of several partitions, arguments that do not fit."""

import pickle
from contextlib import ExitStack
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, ModelError, SparkModel
from sparkkeras.data import files
from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalDataset, LocalStream
from sparkkeras.data.values import DelayedValue
from sparkkeras.modeling import metrics
from sparkkeras.modeling.reductions import check_mean_over_rows
from sparkkeras.training.allreduce import Change, Plan, RankEpoch, Streams, _RankRows, _without_padding
from sparkkeras.training.worker_reports import Report
from sparkkeras.training.worker_validation import ValidationPlan
from sparkkeras.weights import Flat
from sparkkeras.worker.batches import BatchOptions
from tests.models import classifier
from tests.training.jobs import Model, X, Y, fit, partitions


def flat(*values, steps=1):
    return Flat(np.array(values, np.float32), (np.array(steps, np.int64),))


@pytest.mark.parametrize("after", [flat(1, 2, 3, 4), flat(1, 2, 3, 5), flat(9, 8, 7, 6), flat(1, 2, 3, 4, steps=7)])
def test_a_change_restores_the_vector(after):
    before = flat(1, 2, 3, 4)
    change = pickle.loads(pickle.dumps(Change.between(before, after)))
    applied = change.applied(before)
    np.testing.assert_array_equal(applied.vector, after.vector)
    assert applied.integer_variables == after.integer_variables
    np.testing.assert_array_equal(before.vector, [1, 2, 3, 4])


def test_a_change_holds_only_what_is_new():
    change = Change.between(flat(*range(100)), flat(*range(99), 5))
    assert (change.places.tolist(), change.values.tolist()) == ([99], [5])


def block(start, stop):
    return from_arrays(np.arange(start, stop, dtype=np.float32).reshape(-1, 1), np.arange(start, stop, dtype=np.int32), None)


def plan(rows, spec):
    return Plan(range(1), (tuple(range(len(rows))),), rows, spec, 10, None, 1)


def test_a_rank_trains_on_the_rows_of_several_partitions(tmp_path):
    parts = [files.write([rows], number, tmp_path / "stored") for number, rows in enumerate((block(0, 5), block(5, 9)))]
    with ExitStack() as stack:
        part = _RankRows.open(plan((3, 4), block(0, 1).spec), 0, parts, stack)
        assert part.count == 7
        assert part.rows.arrays[1].tolist() == [0, 1, 2, 5, 6, 7, 8]
        held_out = part.held_out(ValidationPlan(BatchOptions(2), ((3, 5), (4, 4)), ()))
        assert [each.arrays[1].tolist() for each in held_out] == [[3, 4]]
        assert len(list((tmp_path / "stored").iterdir())) == 3
    assert len(list((tmp_path / "stored").iterdir())) == 2


def test_a_rank_without_rows_has_an_empty_block():
    empty = files.Handle(0, "", 0, None)
    part = _RankRows.open(plan((0,), block(0, 1).spec), 0, [empty], ExitStack())
    assert (part.rows.rows, part.count) == (0, 0)
    assert part.rows.spec == block(0, 1).spec


def test_streams_are_read_in_turn():
    streams = Streams((LocalStream((block(0, 2), block(2, 3))), LocalStream((block(3, 5),))))
    assert [each.arrays[1].tolist() for each in streams.blocks(0, 0)] == [[0, 1], [3, 4], [2]]


def test_values_that_a_train_step_returns_for_padding_are_left_out():
    model = Model(optimizer="sgd").model
    model.reset_metrics()
    model.train_on_batch(X[:8], Y[:8])
    state, values = metrics.take(model), dict(model.get_metrics_result())

    def of(logs):
        return RankEpoch(Report(0, 8, 2, 1.0, 0.1, logs, True), state, None, None, False)

    custom = of({"loss": 9.0, "own": 9.0})
    assert _without_padding(model, custom, 2) is custom.report
    assert _without_padding(model, custom, 3).logs == {"loss": pytest.approx(float(values["loss"])), "own": None}
    plain = of({"loss": 9.0, "mae": 9.0})
    assert _without_padding(model, plain, 3) is plain.report


class Unpickled:
    """Counts how often it is unpickled."""

    count = 0

    def __setstate__(self, state):
        Unpickled.count += 1

    def __getstate__(self):
        return {"a": 1}


def test_a_delayed_value_is_unpickled_when_it_is_used():
    delayed = pickle.loads(pickle.dumps(DelayedValue(Unpickled())))
    again = pickle.loads(pickle.dumps(delayed))
    assert Unpickled.count == 0
    assert delayed.value is delayed.value
    assert isinstance(again.value, Unpickled)
    assert Unpickled.count == 2


def test_the_default_frequency_is_that_of_the_mode():
    spark_model = SparkModel(classifier())
    assert spark_model.frequency == "epoch"
    spark_model.mode = "allreduce"
    assert spark_model.frequency == 1
    assert SparkModel(classifier(), "allreduce", "batch").frequency == 1
    assert SparkModel(classifier(), **spark_model.get_config()).get_config() == spark_model.get_config()
    assert spark_model.get_config()["frequency"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frequency": 5}, "frequency=5 does not fit mode='allreduce', which averages the gradients of every batch"),
        ({"frequency": "epoch"}, "frequency='epoch' does not fit mode='allreduce'"),
        ({"rule": "average"}, "rule='average' does not apply to mode='allreduce'"),
        ({"gradient_dtype": "float8"}, "gradient_dtype='float8' is not known. Known: 'bfloat16', 'float16'"),
        ({"max_restarts": -1}, "max_restarts=-1: expected a whole number of at least 0"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        SparkModel(classifier(), "allreduce", **arguments)


def test_arguments_of_another_mode_are_checked_in_fit():
    spark_model = SparkModel(classifier(), frequency=5)
    spark_model.mode = "allreduce"
    with pytest.raises(ConfigurationError, match="frequency=5 does not fit mode='allreduce'"):
        spark_model.fit(np.zeros((4, 64)), np.zeros(4))


def test_a_loss_that_is_no_mean_over_rows_is_an_error():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    with pytest.raises(ModelError, match="ignore_class=0: it divides by the number of labels of a batch"):
        SparkModel(classifier(loss=loss), "allreduce").fit(np.zeros((4, 64)), np.zeros(4))


@pytest.mark.parametrize(
    ("loss", "instead"),
    [
        ("dice", "keras.losses.Dice"),
        (keras.losses.Tversky(axis=(0, 1)), "keras.losses.Tversky"),
        (keras.losses.Circle(), "a loss that is a mean over rows"),
    ],
)
def test_a_loss_of_the_whole_batch_is_an_error(loss, instead):
    with pytest.raises(ModelError, match=rf"compares the rows of a batch with each other.* use {instead}"):
        check_mean_over_rows(classifier(loss=loss))
    check_mean_over_rows(classifier(loss=keras.losses.Dice(axis=1)))


def test_dynamic_allocation_is_an_error_before_data_is_read(monkeypatch):
    active = SimpleNamespace(getConf=lambda: {"spark.dynamicAllocation.enabled": "true"})
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", active)
    with pytest.raises(ConfigurationError, match=r'SPARK-24942\): set it to false .* or use mode="synchronous"'):
        SparkModel(classifier(), "allreduce").fit(np.zeros((4, 64)), np.zeros(4))


def test_datasets_without_a_cluster_are_an_error():
    assert isinstance(partitions(4), LocalDataset)
    model = Model(optimizer="sgd")
    with pytest.raises(ConfigurationError, match="Spark Connect does not provide"):
        fit(model, partitions(4), "allreduce", epochs=1)
