"""Several kinds of models, with custom code, and their files."""

import textwrap

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, SparkModel, StorageError, load_spark_model
from sparkkeras.parameter.rules import DiLoCo
from tests.models import classifier, gan, same
from tests.processes import clean_environment
from tests.scripts import Script, run_scripts


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def test_several_inputs_and_outputs(sc, generator):
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
    rdd = sc.parallelize(rows, 3)
    history = spark_model.fit(rdd, epochs=2, validation_split=0.1, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert {"amount_loss", "kind_loss", "kind_accuracy", "val_kind_accuracy"} <= history.keys()
    # In Keras, the loss of each output is a mean over batches, so it is the same only if all batches are full.
    expected = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    for data in ((x, y), (rdd,)):
        found = spark_model.evaluate(*data, batch_size=20, return_dict=True)
        assert found == pytest.approx(expected, rel=1e-5)
    expected = model.predict(x, verbose=0)
    in_order = spark_model.predict((x["wide"], x["ids"]))
    lazy = spark_model.predict(rdd, collect=False).collect()
    for name in expected:
        np.testing.assert_allclose(in_order[name], expected[name], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose([row[name] for row in lazy], expected[name], rtol=1e-4, atol=1e-5)


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


# Files


@pytest.mark.core
def test_a_model_is_saved_and_loaded_with_its_settings_and_states(sc, digits, tmp_path):
    x, y = digits[0][:200], digits[1][:200]
    saved = SparkModel(classifier(), frequency=5, num_workers=2, rule="diloco", batch_size=16, seed=9)
    saved.fit(x, y, verbose=0)
    saved.save(tmp_path / "model.keras")
    loaded = load_spark_model(tmp_path / "model.keras")
    assert [file.name for file in tmp_path.iterdir()] == ["model.keras"]
    assert (loaded.mode, loaded.frequency, loaded.num_workers, loaded.batch_size) == ("synchronous", 5, 2, 16)
    assert loaded.rule == DiLoCo()
    np.testing.assert_array_equal(loaded.predict(x), saved.predict(x))
    # Optimizer, rule and seed continue from their saved states.
    for spark_model in (saved, loaded):
        spark_model.fit(x, y, verbose=0)
    assert same(loaded, saved)


def test_paths_to_which_no_model_can_be_saved_are_reported(sc, tmp_path):
    spark_model = SparkModel(classifier())
    with pytest.raises(StorageError, match="nofs.*Add the client"):
        spark_model.save("nofs://host/model.keras")
    with pytest.raises(ConfigurationError, match=r"must end in \.keras"):
        spark_model.save(tmp_path / "model.h5")
