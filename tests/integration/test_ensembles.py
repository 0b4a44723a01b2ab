"""Ensembles on Spark: members trained in parallel, and predictions for RDDs and DataFrames."""

import keras
import numpy as np
import pytest

from sparkkeras import (
    Checkpoint,
    ConfigurationError,
    DataError,
    EnsembleModel,
    ModelError,
    SparkEnsemble,
    greedy_ensemble,
    load_ensemble_model,
    to_data_frame,
    to_simple_rdd,
)
from tests.conftest import settle
from tests.integration.faults import interrupted_at_the_first_member
from tests.models import classifier


def build(number):
    """Members of two architectures."""
    return classifier(units=16 + 8 * (number % 2), seed=number, optimizer=keras.optimizers.Adam(0.01))


def unseeded():
    dropout = keras.layers.Dropout(0.1, name="dropout")
    model = keras.Sequential(
        [keras.Input((64,), name="pixels"), dropout, keras.layers.Dense(10, "softmax", name="scores")], name="unseeded"
    )
    model.compile(keras.optimizers.Adam(0.01, name="adam"), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# Prediction


def test_predictions_and_a_greedy_selection_for_rdds_and_frames_equal_those_for_arrays(sc, spark, digits):
    x, y, weights = digits[2][:120], digits[3][:120], np.linspace(0.5, 2, 120)
    members = [build(0), build(1)]
    ensemble = EnsembleModel(members, "hard", weights=[1, 2])
    local, logs = ensemble.predict(x), ensemble.evaluate(x, y)
    rdd = to_simple_rdd(sc, x, y, num_slices=3).filter(lambda row: True)
    np.testing.assert_allclose(ensemble.predict(rdd), local, atol=1e-6)
    assert np.array_equal(ensemble.predict_classes(rdd), local.argmax(-1))
    pairs = ensemble.predict(rdd.zipWithIndex().map(lambda row: row[::-1]), keyed=True)
    assert [key for key, _ in pairs] == list(range(len(local)))
    frame = to_data_frame(spark, x, y, sample_weight=weights)
    assert ensemble.evaluate(frame) == pytest.approx(logs, rel=1e-5)
    scored = ensemble.predict(frame, output_col="digit")
    assert scored.columns == [*frame.columns, "digit"]
    np.testing.assert_allclose([row.digit for row in scored.select("digit").collect()], local, atol=1e-6)
    with pytest.raises(ConfigurationError, match="predict_classes returns an array"):
        ensemble.predict_classes(frame)
    renamed = frame.withColumnsRenamed({"features": "pixels", "label": "digit"}).coalesce(1)
    named = {"features": "pixels", "label": "digit", "sample_weight": "weight"}
    found = greedy_ensemble(members, renamed, metric="loss", size=4, **named)
    expected = greedy_ensemble(members, x, y, "loss", 4, sample_weight=weights)
    assert (found.models, found.weights) == (expected.models, expected.weights)


# Training


def test_members_train_in_parallel(sc, spark, digits):
    x, y, x_test, y_test = digits
    spark_ensemble = SparkEnsemble(build, 2, sampling="bootstrap", seed=1)
    before = [model.evaluate(x_test, y_test, verbose=0)[0] for model in spark_ensemble.models]
    frame = to_data_frame(spark, x, y, features="pixels", label="digit")
    columns = {"features": "pixels", "label": "digit"}
    histories = spark_ensemble.fit(frame, epochs=3, validation_split=0.1, verbose=0, **columns)
    assert histories is spark_ensemble.histories
    assert [set(history.history) for history in histories] == [{"loss", "accuracy", "val_loss", "val_accuracy"}] * 2
    assert [history.epoch for history in histories] == [[0, 1, 2]] * 2
    alone = [model.evaluate(x_test, y_test, verbose=0)[0] for model in spark_ensemble.models]
    assert all(mine < 0.7 * loss for mine, loss in zip(alone, before, strict=True))
    assert spark_ensemble.evaluate(x_test, y_test)[0] < np.mean(alone)
    assert spark_ensemble.evaluate(frame) == spark_ensemble.evaluate(frame, **columns)
    assert "prediction" in spark_ensemble.predict(frame).columns
    assert spark_ensemble.ensemble.models == tuple(spark_ensemble.models)


def test_models_of_a_list_are_trained_in_place_and_can_continue(sc, digits, tmp_path):
    x, y = digits[0][:320], digits[1][:320]
    models = [build(0), build(1)]
    spark_ensemble = SparkEnsemble(models, seed=0)
    spark_ensemble.fit(to_simple_rdd(sc, x, y), verbose=0)
    assert spark_ensemble.models == models
    losses = [history.history["loss"][0] for history in spark_ensemble.histories]
    spark_ensemble.save(tmp_path / "ensemble.zip")
    again = SparkEnsemble(list(load_ensemble_model(tmp_path / "ensemble.zip").models))
    histories = again.fit(x, y, epochs=2, verbose=0)
    assert all(history.history["loss"][0] < loss for history, loss in zip(histories, losses, strict=True))
    assert int(again.models[0].optimizer.iterations) == 3 * 10


# Errors


def test_trained_members_are_not_trained_again(sc, digits, tmp_path, monkeypatch):
    x, y, *_ = digits
    x, y = x[:90], y[:90]

    def fit(seed=3, epochs=2, **arguments):
        spark_ensemble = SparkEnsemble(unseeded, 3, sampling="bootstrap", seed=seed)
        histories = spark_ensemble.fit(x, y, epochs=epochs, validation_split=0.2, verbose=0, **arguments)
        weights = [value.tolist() for model in spark_ensemble.models for value in model.get_weights()]
        return spark_ensemble, [history.history for history in histories], weights

    whole, *expected = fit()
    jobs, kept = interrupted_at_the_first_member(monkeypatch)
    arguments = {"checkpoint": Checkpoint(tmp_path / "run")}
    with pytest.raises(KeyboardInterrupt):
        fit(**arguments)
    settle(sc)
    first = list(kept)
    jobs.clear()
    resumed, *found = fit(seed=None, resume=True, **arguments)
    assert found == expected
    assert sorted(jobs + first) == [0, 1, 2]
    assert resumed.seed == whole.seed
    jobs.clear()
    assert fit(seed=8, resume=True, **arguments)[1:] == tuple(expected)
    assert jobs == []


def test_data_that_does_not_fit_is_reported_before_a_job(sc, digits, tmp_path):
    x, y, *_ = digits
    spark_ensemble, other = SparkEnsemble(build, 3, sampling="partition"), build(1)
    with pytest.raises(ConfigurationError, match="members needs a partition"):
        spark_ensemble.fit(x[:2], y[:2], verbose=0)
    with pytest.raises(ConfigurationError, match="has not been trained"):
        spark_ensemble.predict(x)
    other.compile("sgd", "categorical_crossentropy")
    with pytest.raises(DataError, match="expects one-hot rows"):
        SparkEnsemble([build(0), other]).fit(x, y, verbose=0)
    with pytest.raises(TypeError, match="no argument 'callbacks'.*'worker_callbacks'"):
        spark_ensemble.fit(x, y, callbacks=[])
    with pytest.raises(ConfigurationError, match=r"Checkpoint\(every=2\)"):
        spark_ensemble.fit(x, y, checkpoint=Checkpoint(tmp_path, every=2))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((build,), ConfigurationError, "num_models is missing"),
        ((build, 0), ConfigurationError, "num_models=0"),
        ((3, 3), ConfigurationError, "models is int 3"),
        (([build(0)], 3), ConfigurationError, "num_models=3, .* 1 model"),
        ((lambda: 3, 2), ModelError, r"models\[0\]"),
        (([build(0)] * 2,), ModelError, "same model twice"),
        (([keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])],), ModelError, "is not compiled"),
    ],
)
def test_invalid_models_are_reported(given, error, message):
    with pytest.raises(error, match=message):
        SparkEnsemble(*given)


def test_an_unknown_sampling_is_reported():
    with pytest.raises(ConfigurationError, match="sampling='bagging'.*'bootstrap'"):
        SparkEnsemble(build, 2, sampling="bagging")
