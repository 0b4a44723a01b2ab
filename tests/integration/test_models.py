"""Training of several kinds of models on Spark."""

import textwrap

import keras
import numpy as np
import pytest

from sparkkeras import SparkModel, load_spark_model, to_simple_rdd
from tests.models import gan
from tests.processes import clean_environment
from tests.scripts import Script, run_scripts


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def test_several_inputs_and_outputs_by_position(sc, generator):

    one, two = keras.Input((4,)), keras.Input((2, 3))
    joined = keras.layers.Concatenate()([one, keras.layers.Flatten()(two)])
    model = keras.Model([one, two], [keras.layers.Dense(1)(joined), keras.layers.Dense(2)(joined)])
    model.compile("sgd", loss=["mse", "mae"])
    x = [generator.random((60, 4)).astype(np.float32), generator.random((60, 2, 3)).astype(np.float32)]
    y = [x[0].sum(1, keepdims=True), x[1][:, 0, :2]]
    spark_model = SparkModel(model, num_workers=2)
    for data in ((x, y), (to_simple_rdd(sc, x, y),)):
        spark_model.fit(*data, verbose=0)
    for mine, other in zip(spark_model.predict(x), model.predict(x, verbose=0), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_several_inputs_and_outputs_by_name(sc, generator):
    wide, ids = keras.Input((5,), name="wide"), keras.Input((3,), dtype="int32", name="ids")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(7, 4)(ids))
    joined = keras.layers.Concatenate()([wide, embedded])
    outputs = {
        "amount": keras.layers.Dense(1, name="amount")(joined),
        "kind": keras.layers.Dense(3, activation="softmax", name="kind")(joined),
    }
    model = keras.Model({"wide": wide, "ids": ids}, outputs)
    losses = {"amount": "mse", "kind": "sparse_categorical_crossentropy"}
    model.compile("adam", losses, loss_weights={"amount": 0.5, "kind": 2.0}, metrics={"kind": ["accuracy"]})
    x = {"wide": generator.random((120, 5)).astype(np.float32), "ids": generator.integers(0, 7, (120, 3))}
    y = {"amount": x["wide"].sum(1), "kind": x["ids"][:, 0] % 3}
    spark_model = SparkModel(model, num_workers=2)
    rows = [({k: v[i] for k, v in x.items()}, {k: v[i] for k, v in y.items()}) for i in range(120)]
    for data in ((x, y), (to_simple_rdd(sc, x, y),), (sc.parallelize(rows, 3),)):
        history = spark_model.fit(*data, epochs=3, validation_split=0.1, verbose=0).history
        assert history["loss"][-1] < history["loss"][0]
        assert {"amount_loss", "kind_loss", "kind_accuracy", "val_kind_accuracy"} <= history.keys()
        # In Keras, the loss of each output is a mean over batches, so it is the same only if all batches are full.
        expected = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
        found = spark_model.evaluate(*data, batch_size=20, return_dict=True)
        assert found == pytest.approx(expected, rel=1e-5)
    expected = model.predict(x, verbose=0)
    predicted = spark_model.predict((x["wide"], x["ids"]))
    assert predicted.keys() == expected.keys()
    np.testing.assert_allclose(predicted["kind"], expected["kind"], rtol=1e-4, atol=1e-6)
    lazy = spark_model.predict(sc.parallelize(rows, 3), collect=False)
    np.testing.assert_allclose([row["amount"] for row in lazy.collect()], expected["amount"], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras passes one optimizer to a train_step of JAX")
def test_a_gan_on_rows_without_labels(spark, generator, tmp_path):
    x = generator.normal(size=(40, 3)).astype(np.float32)
    frame = spark.createDataFrame([(row.tolist(),) for row in x], ["features"])
    model = gan()
    spark_model = SparkModel(model, "asynchronous", num_workers=2, parameter_server_mode="socket", batch_size=4)
    history = spark_model.fit(frame, epochs=2, verbose=0)
    assert set(history.history) == {"d_loss", "g_loss"}
    assert int(model.d_optimizer.iterations) == int(model.g_optimizer.iterations) == 10
    spark_model.save(tmp_path / "gan.keras")
    loaded = load_spark_model(tmp_path / "gan.keras").model
    for mine, other in zip(loaded.g_optimizer.variables, model.g_optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(other))


@pytest.mark.soak  # needs separate workers, like mixed precision
def test_float64_models(sc, generator):
    keras.config.set_floatx("float64")
    try:
        model = keras.Sequential([keras.Input((3,), dtype="float64"), keras.layers.Dense(1, dtype="float64")])
        model.compile("sgd", "mse")
        x = generator.random((40, 3))
        weight = np.ones(40)
        SparkModel(model, num_workers=2).fit(x, x.sum(1), sample_weight=weight, verbose=0)
        assert model.get_weights()[0].dtype == np.float64
    finally:
        keras.config.set_floatx("float32")


START = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
import numpy as np
from pyspark import SparkConf, SparkContext
settings = SparkConf().setMaster("local-cluster[1,1,1024]").set("spark.ui.enabled", "false")
sc = SparkContext.getOrCreate(settings)
sc.setLogLevel("OFF")
"""
CUSTOM = """
    import keras
    from keras import ops

    def bend(x):
        return ops.tanh(x) * 1.5

    class Scale(keras.layers.Layer):
        def __init__(self, factor=2.0, **kwargs):
            super().__init__(**kwargs)
            self.factor = factor
        def build(self, shape):
            self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")
        def call(self, x):
            return bend(x) * self.gain * self.factor
        def get_config(self):
            return {**super().get_config(), "factor": self.factor}

    def tilted(y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred) * 1.5, axis=-1)

    def bias(y_true, y_pred):
        return ops.mean(y_pred - y_true, axis=-1)

    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, start): self.start = start
        def __call__(self, step): return self.start / (1.0 + ops.cast(step, "float32"))
        def get_config(self): return {"start": self.start}

    class Whole(keras.Model):
        def __init__(self, units=4, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.scale, self.out = Scale(3.0), keras.layers.Dense(1)
        def call(self, x, training=False):
            return self.out(self.scale(x))
        def get_config(self):
            return {**super().get_config(), "units": self.units}
"""
FROM_MODULES = """
    from mine import *
    from mine import Whole
    import helper
    def transform(x, y): return x * helper.one(), y
"""
TRAIN = """
    from sparkkeras import SparkModel
    model = Whole()
    model(np.zeros((1, 3), np.float32))
    model.out.set_weights([np.full((3, 1), -0.3), np.zeros(1)])
    model.compile(keras.optimizers.SGD(Halving(0.05)), tilted, metrics=[bias])
    x = np.random.default_rng(0).random((80, 3)).astype(np.float32)
    spark_model = SparkModel(model, num_workers=2, seed=1)
    history = spark_model.fit(x, x.sum(1, keepdims=True), epochs=2, verbose=0)
    print("losses", history.history["loss"], sorted(history.history))
    assert history.history["loss"][1] < history.history["loss"][0]
    assert np.allclose(spark_model.predict(x), model.predict(x, verbose=0), atol=1e-5)
    y = x.sum(1, keepdims=True)
    assert abs(spark_model.evaluate(x, y)[0] - model.evaluate(x, y, verbose=0)[0]) < 1e-4
    print("done")
"""


@pytest.mark.programs
def test_custom_code_of_a_script_and_of_local_modules(tmp_path):
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    for folder in (alone, beside):
        folder.mkdir()
    (alone / "script.py").write_text(START + textwrap.dedent(CUSTOM) + textwrap.dedent(TRAIN))
    # Executors start in another folder and cannot import either module.
    (beside / "helper.py").write_text("FACTOR = 1.0\ndef one(): return FACTOR\n")
    (beside / "mine.py").write_text("import helper\n" + textwrap.dedent(CUSTOM))
    train = textwrap.dedent(TRAIN).replace("epochs=2", "epochs=2, transform=transform")
    (beside / "script.py").write_text(START + textwrap.dedent(FROM_MODULES) + train)
    environment = clean_environment() | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    for done in run_scripts([Script(folder / "script.py", folder) for folder in (alone, beside)], environment):
        assert done.failure == "", f"{done.failure}\n{done.stderr[-3000:]}"
        assert done.stdout.endswith("done\n")
