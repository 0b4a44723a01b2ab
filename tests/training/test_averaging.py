"""Synchronous averaging, on in-memory datasets without Spark."""

import keras
import numpy as np
import pytest

from sparkkeras.data import local_dataset
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.rules import Average, SlowMo
from sparkkeras.training import worker_reports
from sparkkeras.training.worker_reports import merges_on_workers
from tests.training.runs import BATCH, Model, X, Y, close, fit, partitions, plain, weights_of


@pytest.fixture(scope="module")
def normalized():
    return Model(keras.layers.BatchNormalization(), optimizer=keras.optimizers.SGD(0.05, momentum=0.5), run_eagerly=True)


def test_weights_statistics_and_optimizer_variables_are_averaged_by_rows(normalized):
    states = []
    for start, stop in ((0, 20), (20, 28)):
        model = normalized.reset()
        model.fit(X[start:stop], Y[start:stop], batch_size=BATCH, shuffle=False, verbose=0)
        states.append(ModelState.take(model))
    weights, slots = (
        np.average([getattr(state, part).vector for state in states], axis=0, weights=[20, 8])
        for part in ("weights", "optimizer")
    )
    model = normalized.reset()
    fit(normalized, partitions(20, 8), rule=SlowMo(momentum=0.5, alpha=0.5))
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    expected = (normalized.state.weights.vector + weights) / 2  # alpha is a half
    expected[trainable:] = weights[trainable:]  # for every rule
    assert len(weights) == trainable + 6
    assert close(model, expected, slots)


def test_averaging_after_each_batch_equals_keras_on_the_union_of_the_batches():
    given = Model(optimizer=keras.optimizers.SGD(0.05), run_eagerly=True)
    fit(given, partitions(20, 20), frequency=1, epochs=2)
    found = weights_of(given.model)
    order = np.arange(40).reshape(2, 5, BATCH).swapaxes(0, 1).ravel()
    given.reset().fit(X[order], Y[order], batch_size=2 * BATCH, epochs=2, shuffle=False, verbose=0)
    assert close(given.model, found)


def test_steps_per_epoch_limits_an_epoch(linear):
    _, rounds = fit(linear, partitions(18, 7), frequency=2, steps_per_epoch=3)
    assert rounds == [(8 + 7, pytest.approx(2 / 3)), (4, 1)]
    assert int(linear.model.optimizer.iterations) == 3
    with pytest.warns(UserWarning, match="steps_per_epoch=99.*5 batches"):
        _, rounds = fit(linear, partitions(18, 7), frequency=2, steps_per_epoch=99)
    assert sum(rows for rows, _ in rounds) == 18 + 7


def test_rows_that_a_source_no_longer_returns_are_not_counted(linear):
    """A partition that was read again has fewer rows than at the split."""
    histories = []
    fit(linear, partitions(18, 7), split=TrainValidationSplit((18, 13), (0, 0)), histories=histories)
    assert [entry["rows"] for entry in histories] == [18, 7]
    found = weights_of(linear.model)
    linear.reset()
    fit(linear, partitions(18, 7))
    assert np.array_equal(weights_of(linear.model), found)


def test_the_rule_is_applied_once_per_round_and_keeps_its_state(linear):
    applied = []

    class Noting(Average):
        def init(self, center):
            return {"applies": np.zeros_like(center)}

        def apply(self, center, state, update, staleness):
            applied.append((update.steps, update.rows, update.num_workers, staleness, update.learning_rate))
            state["applies"] += 1
            assert not np.array_equal(center, update.sent)
            super().apply(center, state, update, staleness)

    state = {}
    fit(linear, partitions(18, 7), frequency=3, epochs=2, rule=Noting(), rule_state=state)
    rate = pytest.approx(0.05)
    assert applied == [(3, 19, 2, 0, rate), (2, 6, 1, 0, rate)] * 2
    fit(linear, partitions(18, 7), rule=Noting(), rule_state=state)
    assert state["applies"].tolist() == [5, 5, 5, 5]


def test_moving_averages_replace_the_weights_at_the_end():
    given = Model(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5), run_eagerly=True)
    fit(given, partitions(8), epochs=2)
    found = weights_of(given.model)
    plain(given, 2, 8)
    assert close(given.model, found)


# Merged on the workers

MB = 1024 * 1024


@pytest.mark.parametrize(
    ("workers", "replica_bytes", "max_result_bytes", "expected"),
    [
        (64, 4 * MB, 0, False),
        (65, 1000, 0, True),
        (2, 129 * MB, 0, True),
        (4, 10 * MB, 80 * MB, False),
        (4, 10 * MB, 79 * MB, True),  # more than half of what Spark lets a job return
    ],
)
def test_many_or_large_replicas_are_merged_on_the_workers(workers, replica_bytes, max_result_bytes, expected):
    assert merges_on_workers(workers, replica_bytes, max_result_bytes) is expected


def test_merged_on_the_workers_the_mean_has_the_same_bits(linear, monkeypatch):
    dataset, found = partitions(None, 20, None, None, 7, 13), []
    for limit in (worker_reports.MAX_WORKERS, 0):
        monkeypatch.setattr(worker_reports, "MAX_WORKERS", limit)
        monkeypatch.setattr(local_dataset, "PIECE_BYTES", 8)
        linear.reset()
        history, _ = fit(linear, dataset, epochs=2)
        state = ModelState.take(linear.model)
        found.append((state.weights.vector.tobytes(), state.optimizer.vector.tobytes(), history.history["loss"]))
    assert found[0] == found[1]
