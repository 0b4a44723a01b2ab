"""Scoring with another backend than the driver's."""

import importlib.util
import os
import signal
import sys
from contextlib import closing

import keras
import numpy as np
import pytest

from sparkkeras import (
    ClusterError,
    ConfigurationError,
    EnsembleModel,
    ModelError,
    SparkModel,
    WorkerError,
    keras_udf,
    register_keras_udf,
    to_data_frame,
)
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.values import DelayedValue
from sparkkeras.ml import KerasTransformer
from sparkkeras.scoring import backends
from sparkkeras.worker import other_backend
from sparkkeras.worker.device import to_predict, worker_environment
from sparkkeras.worker.other_backend import run_in_child
from tests.conftest import long
from tests.models import classifier

X = np.random.default_rng(0).random((200, 5)).astype("float32")
Y = np.arange(200) % 3


@pytest.fixture(scope="module")
def model():
    return classifier(5, 8, 3)


@pytest.mark.parametrize("backend", [long("jax"), "openvino"])
def test_rows_of_all_kinds_have_the_predictions_of_this_backend(backend, sc, spark, model):
    expected = model.predict(X, verbose=0)

    def same(found):
        np.testing.assert_allclose(np.array(found), expected[: len(found)], rtol=1e-5, atol=1e-6)

    # One worker: each has a process of its own that loads the backend.
    spark_model, df = SparkModel(model, num_workers=1), to_data_frame(spark, X).repartition(1)
    same(spark_model.predict(X, backend=backend))
    keyed = sc.parallelize(list(enumerate(X[:20])), 1)
    same([value for _, value in spark_model.predict(keyed, keyed=True, backend=backend)])
    same([row.prediction for row in spark_model.predict(df, backend=backend).collect()])
    scorer = KerasTransformer(model=model, backend=backend)
    same([row.output for row in scorer.transform(df).collect()])
    register_keras_udf(spark, "other", model, backend=backend)
    df.select("features", keras_udf(model)("features").alias("own")).createOrReplaceTempView("rows")
    both = spark.sql("SELECT own, other(features) AS other FROM rows").collect()  # in workers of two backends
    same([row.own for row in both])
    same([row.other for row in both])
    same(EnsembleModel([model]).predict(X, backend=backend))


def test_metrics_are_those_of_this_backend(spark, model):
    spark_model = SparkModel(model, num_workers=1)
    expected = spark_model.evaluate(X, Y)
    assert spark_model.evaluate(X, Y, backend="jax") == pytest.approx(expected, rel=1e-5)
    logs = KerasTransformer(model=model, backend="jax").evaluate(to_data_frame(spark, X, Y).repartition(1))
    assert list(logs.values()) == pytest.approx(expected, rel=1e-5)


def test_changed_weights_are_used(sc):
    dense = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    recurrent = keras.Sequential([keras.Input((5, 1)), keras.layers.LSTM(2)])  # Keras exports it for a number of rows only
    for model, rows in (dense, X), (recurrent, X[..., None]):
        for _ in range(2):
            np.testing.assert_allclose(
                SparkModel(model, num_workers=1).predict(rows, backend="openvino"),
                model.predict(rows, verbose=0),
                rtol=1e-5,
                atol=1e-6,
            )
            model.set_weights([2 * weight for weight in model.get_weights()])


def test_openvino_does_without_what_takes_memory(sc, model):
    def lean(x, y):
        if keras.backend.backend() == "openvino":  # not here, where the first rows are tried
            assert not sys.modules.keys() & {"tensorflow", "torch", "jax", "matplotlib"}
            assert importlib.import_module("sklearn")  # which Keras has not found, but this function may use
            x = 2 * x
        return x

    found = SparkModel(model, num_workers=1).predict(X, backend="openvino", transform=lean)
    np.testing.assert_allclose(found, model.predict(2 * X, verbose=0), rtol=1e-5, atol=1e-6)


def exported(context, values):
    """A task that yields whether OpenVINO predicts with a model, and not Keras's backend, which may choose bfloat16."""
    model = keras.Sequential([keras.Input((None, 1)), keras.layers.LSTM(2), keras.layers.Flatten()])
    for rows, steps in (4, 5), (2, 5), (4, 3):
        assert to_predict(model, 1).predict_on_batch(np.ones((rows, steps, 1), "float32")).shape == (rows, 2)
    yield model.ov_compiled_model is None


def test_layers_that_keras_exports_for_a_number_of_rows_only_are_exported():
    with closing(other_backend.OtherBackend(worker_environment(1, "openvino"))) as child:
        assert list(child.run(DelayedValue(exported), TaskContext(0), iter(()))) == [True]


def test_several_inputs_and_outputs_keep_their_names(sc):
    first, second = keras.Input((2,), name="first"), keras.Input((3,), name="second")
    joined = keras.layers.concatenate([second, first])
    outputs = {"sum": keras.layers.Dense(1, name="sum")(joined), "parts": keras.layers.Dense(2, name="parts")(joined)}
    model = keras.Model({"second": second, "first": first}, outputs)
    rows = {"first": X[:, :2], "second": X[:, 2:]}
    expected = model.predict(rows, verbose=0)
    found = SparkModel(model, num_workers=1).predict(rows, backend="openvino")
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)


class OfTensorFlow(keras.layers.Layer):
    def call(self, inputs):
        import tensorflow as tf

        return tf.raw_ops.Relu(features=inputs)


CHANGES = {
    "twice": lambda inputs: 2 * inputs,
    "narrow": lambda inputs: inputs[:, 1:],
    "broken": lambda inputs: (inputs - inputs) / (inputs - inputs),
    "nearly": lambda inputs: 1.0001 * inputs,
}


class OnJax(keras.layers.Layer):
    """Changes its inputs on JAX, as its name says."""

    def call(self, inputs):
        return CHANGES[self.name](inputs) if keras.backend.backend() == "jax" else inputs


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (OfTensorFlow(), r"backend='jax'.*OfTensorFlow.call"),
        (OnJax(name="twice"), r"backend='jax' differ .* by up to 1 "),
        long(OnJax(name="narrow"), "by up to inf"),
        (OnJax(name="broken"), "by up to nan"),
    ],
)
def test_a_backend_that_cannot_predict_the_same_is_an_error_before_a_job(layer, words, sc):
    model = keras.Sequential([keras.Input((5,)), layer])
    with pytest.raises(ModelError, match=words):
        SparkModel(model).predict(X, backend="jax")


def test_a_model_that_takes_strings_is_an_error_before_a_job(spark):
    city = keras.Input((1,), dtype="string", name="city")
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="multi_hot")
    model = keras.Model(city, keras.layers.Dense(1)(lookup(city)))
    with pytest.raises(ModelError, match="strings.* leave backend out"):
        SparkModel(model).predict(spark.createDataFrame([("a",)], "city string"), features="city", backend="openvino")


def test_small_differences_give_a_warning(sc):
    model = keras.Sequential([keras.Input((5,)), OnJax(name="nearly")])
    with pytest.warns(UserWarning, match=r"by up to 0\.0001"):
        found = SparkModel(model, num_workers=1).predict(X, backend="jax")
    np.testing.assert_allclose(found, X * 1.0001, rtol=1e-6)


def test_the_driver_checks_a_model_once(sc, model, monkeypatch):
    spark_model = SparkModel(model, num_workers=1)
    spark_model.predict(X, backend="jax")
    monkeypatch.setattr(backends, "OtherBackend", None)
    spark_model.predict(X[:3], backend="jax")


def test_names_of_backends_are_checked(sc, model, monkeypatch):
    for call in SparkModel(model).predict, SparkModel(model).evaluate:
        with pytest.raises(ConfigurationError, match=r"backend='onnx'.*'openvino'"):
            call(X, backend="onnx")
    with pytest.raises(ConfigurationError, match="backend="):
        KerasTransformer(model=model, backend="numpy")
    monkeypatch.setattr(backends, "find_spec", lambda name: importlib.util.find_spec("no_such_package"))
    with pytest.raises(ClusterError, match="pip install torch"):
        SparkModel(model).predict(X, backend="torch")


def pids(context, values):
    """A task that yields the backend and the process ID, then each value, and ends the process at a negative one."""
    yield os.environ["KERAS_BACKEND"], os.getpid()
    for value in values:
        if value < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield value


def test_a_child_is_kept_for_the_next_task_unless_it_is_lost_or_its_task_was_left():
    def run(values):
        return run_in_child(DelayedValue(pids), TaskContext(0), iter(values), worker_environment(1, "jax"), None)

    (backend, first), *values = run([1, 2])
    assert (backend, values) == ("jax", [1, 2])
    assert next(run([3])) == ("jax", first)
    (_, second), *_ = run([3])
    assert second != first
    with pytest.raises(WorkerError, match="'jax' was lost: .*SIGKILL"):
        list(run([4, -1]))
    assert other_backend._idle == []
