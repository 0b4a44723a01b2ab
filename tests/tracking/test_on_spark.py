"""Training on Spark with MLflow, TensorBoard and Weights & Biases (offline); scoring with ``mlflow.pyfunc.spark_udf``."""

import keras
import mlflow
import numpy as np
import pytest

from sparkkeras import MLflowCallback, SparkModel, WorkerTensorBoard
from tests.models import regression
from tests.tracking.test_mlflow_model import logged
from tests.tracking.test_worker_tensorboard import curves

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)


class Halves(keras.layers.Layer):
    def call(self, x):
        return x / 2


@pytest.fixture
def frame(spark):
    rows = [(index, x.tolist(), float(y)) for index, (x, y) in enumerate(zip(X, Y, strict=True))]
    return spark.createDataFrame(rows, "id int, features array<float>, label float").repartition(2)


def scored(spark, uri, frame, *columns):
    """The type and the predictions of a model, in the order of the rows."""
    score = mlflow.pyfunc.spark_udf(spark, uri, env_manager="local")
    predicted = frame.select("id", score(*columns).alias("predicted"))
    rows = sorted(predicted.collect(), key=lambda row: row.id)
    return predicted.schema["predicted"].dataType.simpleString(), [row.predicted for row in rows]


def test_training_is_a_run_whose_model_scores_a_column_and_has_curves_of_the_workers(store, spark, frame, tmp_path):
    model, mlflow_run = regression(), MLflowCallback()
    spark_model, callbacks = SparkModel(model), [mlflow_run, WorkerTensorBoard(tmp_path)]
    history = spark_model.fit(frame, epochs=2, batch_size=8, verbose=0, validation_split=0.2, callbacks=callbacks)
    assert store.get_run(mlflow_run.run_id).info.status == "FINISHED"
    for metric in ("loss", "val_loss"):
        values = [each.value for each in store.get_metric_history(mlflow_run.run_id, metric)]
        np.testing.assert_allclose(values, history.history[metric])
    for worker in (0, 1):
        expected = [entry["loss"] for entry in spark_model.training_histories if entry["worker"] == worker]
        found = [value for _, value in curves(tmp_path / f"worker-{worker}")["epoch_loss"]]
        assert found == pytest.approx(expected)
    kind, predicted = scored(spark, mlflow_run.model_uri, frame, "features")
    assert kind == "float"
    np.testing.assert_allclose(predicted, model.predict(X, verbose=0)[:, 0], rtol=1e-5, atol=1e-6)


def test_custom_code_and_several_inputs_and_outputs(store, spark, frame):
    a, b = keras.Input((3,), name="features"), keras.Input((1,), name="label")
    joint = Halves()(keras.layers.Concatenate()([a, b]))
    outputs = {"one": keras.layers.Dense(1)(joint), "two": keras.layers.Dense(2)(joint)}
    model = keras.Model([a, b], outputs)
    kind, predicted = scored(spark, logged(model), frame, "features", "label")
    assert kind == "struct<one:float,two:array<float>>"
    expected = model.predict([X, Y], verbose=0)
    np.testing.assert_allclose([row.one for row in predicted], expected["one"][:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([row.two for row in predicted], expected["two"], rtol=1e-5, atol=1e-6)


def test_weights_and_biases(sc, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("its callback imports TensorFlow")
    from wandb.integration.keras import WandbMetricsLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="tests", dir=tmp_path, mode="offline", settings={"console": "off"}) as run:
        spark_model = SparkModel(regression(), num_workers=2)
        with pytest.warns(UserWarning, match="on_batch_end"):  # it is needed for log_freq="batch" only
            history = spark_model.fit(X, Y, epochs=2, verbose=0, callbacks=[WandbMetricsLogger()])
        summary = dict(run.summary)
    wandb.teardown()
    assert summary["epoch/epoch"] == 1
    assert summary["epoch/loss"] == pytest.approx(history.history["loss"][-1])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
