"""`adapt` gives layers the state that Keras's own `adapt` does with all rows in one process."""

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, DataError, ModelError, SparkModel, adapt, to_data_frame
from sparkkeras.ml import KerasEstimator
from sparkkeras.preprocessing import adaptation

ROWS = 300
DRAW = np.random.default_rng(3)
NUMBERS = (DRAW.normal(size=(ROWS, 4)) * [1, 10, 100, 0.1] + [0, 5, -1000, 3]).astype("float32")
CITIES = np.array(["Berlin", "Wien", "Bern", "Graz", "Genf"], object)[DRAW.integers(0, 5, ROWS)]
CODES = DRAW.integers(-3, 20, ROWS)
TEXTS = np.array([" ".join(DRAW.choice(["Red!", "green", "blue", "Blue,", "sky"], 1 + i % 5)) for i in range(ROWS)], object)


def shout(texts):
    import tensorflow as tf

    return tf.strings.upper(texts)


LOOKUPS = {
    "a function": (lambda: keras.layers.TextVectorization(standardize=shout, split="character"), TEXTS),
    "at most": (lambda: keras.layers.StringLookup(max_tokens=3, num_oov_indices=1, mask_token="Bern"), CITIES),
    "tf-idf of strings": (lambda: keras.layers.StringLookup(output_mode="tf_idf", max_tokens=4), CITIES),
    "floats as integers": (lambda: keras.layers.IntegerLookup(), CODES + 0.5),
    "words": (
        lambda: keras.layers.TextVectorization(max_tokens=5, output_mode="tf_idf", ngrams=2, standardize="lower"),
        TEXTS,
    ),
}


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch):
    """Tokens are merged by four tasks, not by 64."""
    monkeypatch.setattr(adaptation, "PIECES", 4)


def frame_of(spark, **columns):
    return to_data_frame(spark, columns).repartition(3)


@pytest.mark.parametrize("name", LOOKUPS)
def test_vocabularies_are_those_of_keras(spark, name):
    build, values = LOOKUPS[name]
    layer, plain = build(), build()
    plain.adapt(values[:, None])
    assert adapt(layer, frame_of(spark, x=values), features="x") is layer
    assert layer.get_vocabulary() == plain.get_vocabulary()
    given = values[:50, None]
    np.testing.assert_allclose(np.asarray(layer(given)), np.asarray(plain(given)), rtol=1e-6)


def test_means_and_variances_are_those_of_keras(spark, sc):
    rdd = sc.parallelize(list(NUMBERS), 3)
    for axis, data, given in ((-1, frame_of(spark, x=NUMBERS), {"features": "x"}), (-1, NUMBERS, {}), (None, rdd, {})):
        plain = keras.layers.Normalization(axis=axis)
        plain.adapt(NUMBERS)
        layer = adapt(keras.layers.Normalization(axis=axis), data, **given)
        np.testing.assert_allclose(layer(NUMBERS), plain(NUMBERS), rtol=1e-3, atol=1e-4)


def build():
    given = {
        "numbers": keras.Input((4,), name="numbers"),
        "city": keras.Input((1,), dtype="string", name="city"),
        "text": keras.Input((), dtype="string", name="text"),
    }
    scaled = keras.layers.Normalization(name="scaled")(given["numbers"])
    squared = keras.layers.Normalization(name="squared")(keras.layers.Lambda(lambda x: x * x)(scaled))
    city = keras.layers.StringLookup(
        output_mode="multi_hot", num_oov_indices=1, max_tokens=6, pad_to_max_tokens=True, name="city_index"
    )
    text = keras.layers.TextVectorization(output_mode="count", max_tokens=8, pad_to_max_tokens=True, name="text_index")
    fixed = keras.layers.Normalization(mean=0.0, variance=4.0)(given["numbers"])
    joined = keras.layers.Concatenate()([scaled, squared, fixed, city(given["city"]), text(given["text"])])
    model = keras.Model(given, keras.layers.Dense(1)(joined))
    model.compile("adam", "mse", run_eagerly=True)
    return model


def test_all_layers_of_a_model(spark, tmp_path):
    data = {"numbers": NUMBERS, "city": CITIES, "text": TEXTS}
    frame = frame_of(spark, **data, y=NUMBERS[:, 0])
    model = adapt(build(), frame)
    layers = {layer.name: layer for layer in model.layers}
    expected = {
        name: layers[name].__class__.from_config(layers[name].get_config())
        for name in ("scaled", "squared", "city_index", "text_index")
    }
    expected["scaled"].adapt(NUMBERS)
    scaled = np.asarray(expected["scaled"](NUMBERS))
    expected["squared"].adapt(scaled * scaled)
    expected["city_index"].adapt(CITIES[:, None])
    expected["text_index"].adapt(TEXTS[:, None])
    np.testing.assert_allclose(layers["scaled"](NUMBERS), scaled, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        layers["squared"](scaled * scaled), expected["squared"](scaled * scaled), rtol=1e-2, atol=1e-3
    )
    for name in ("city_index", "text_index"):
        assert layers[name].get_vocabulary() == expected[name].get_vocabulary()
    columns = {name: name for name in data}
    history = SparkModel(model).fit(frame, features=columns, label="y", verbose=0)
    assert np.isfinite(history.history["loss"][0])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    given = {"numbers": NUMBERS[:5], "city": CITIES[:5, None], "text": TEXTS[:5]}
    given = {
        name: keras.ops.convert_to_tensor(value.astype(str) if value.dtype == object else value)
        for name, value in given.items()
    }
    np.testing.assert_allclose(loaded(given), model(given), rtol=1e-5)


def test_a_feature_space(spark):
    def space():
        kind = keras.utils.FeatureSpace
        return kind(
            {
                "age": kind.float_normalized(),
                "city": kind.string_categorical(),
                "code": kind.integer_categorical(),
                "size": kind.float_discretized(3),
            },
            crosses=[kind.cross(("city", "code"), 16)],
            output_mode="concat",
        )

    data = {"age": NUMBERS[:, 0], "city": CITIES, "code": CODES.astype("int64"), "size": NUMBERS[:, 1]}
    plain, found = space(), space()
    plain.adapt({name: values.astype(str) if values.dtype == object else values for name, values in data.items()})
    assert adapt(found, frame_of(spark, **data)) is found
    row = {"age": 0.5, "city": "Wien", "code": 4, "size": 3.0}
    np.testing.assert_allclose(np.asarray(found(row)), np.asarray(plain(row)), rtol=1e-3, atol=1e-4)
    boundaries = (each.preprocessors["size"].bin_boundaries for each in (found, plain))
    np.testing.assert_allclose(*boundaries, atol=1)


def test_columns_with_the_names_of_outputs_are_no_labels(spark):
    inputs = {name: keras.Input((1,), name=name) for name in ("age", "size")}
    frame = frame_of(spark, age=NUMBERS[:, 0], size=NUMBERS[:, 1], label=CITIES)
    for other in ("size", "other"):
        scale = keras.layers.Normalization()
        adapt(
            keras.Model(inputs, {"age": scale(inputs["age"]), other: inputs["size"]}),
            frame,
            features={"age": "age", "size": "size"},
        )
        np.testing.assert_allclose(np.ravel(scale.mean), [NUMBERS[:, 0].mean()], rtol=1e-4)


def test_an_estimator_adapts_lookups_that_are_new_in_each_fit(spark):
    city = keras.Input((1,), dtype="string", name="city")
    lookup = keras.layers.StringLookup(output_mode="multi_hot", max_tokens=6, pad_to_max_tokens=True, name="cities")
    model = keras.Model(city, keras.layers.Dense(1)(lookup(city)))
    model.compile("adam", "mse", run_eagerly=True)
    frame = frame_of(spark, city=CITIES, label=NUMBERS[:, 0])
    with pytest.raises(ModelError, match="adapt"):
        SparkModel(model).fit(frame, features="city", label="label", verbose=0)
    estimator = KerasEstimator(model=model, adapt=True, featuresCol="city", verbose=0)
    with pytest.raises(ConfigurationError, match="transform"):
        estimator.copy().setTransform(lambda x, y: (x, y)).fit(frame)
    for chosen in (frame, frame.where("city < 'C'")):
        found = estimator.fit(chosen).get_model().get_layer("cities").get_vocabulary()
        assert set(found[1:]) == {row.city for row in chosen.select("city").distinct().collect()}


def test_inner_models_are_adapted_first(spark):
    frame = frame_of(spark, x=NUMBERS)
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Normalization()])
    outer = keras.Sequential([keras.Input((4,)), inner, keras.layers.Normalization(name="last")])
    with pytest.raises(ModelError, match="inside"):
        adapt(outer, frame, features="x")
    adapt(inner, frame, features="x")
    adapt(outer, frame, features="x")
    np.testing.assert_allclose(np.ravel(outer.get_layer("last").variance), 1, rtol=1e-2)


def test_layers_that_cannot_be_adapted_with_their_model(spark):
    frame = frame_of(spark, left=NUMBERS, right=NUMBERS)
    shared = keras.layers.Normalization()
    both = {"left": keras.Input((4,), name="left"), "right": keras.Input((4,), name="right")}
    model = keras.Model(both, keras.layers.Add()([shared(both["left"]), shared(both["right"])]))
    with pytest.raises(ModelError, match="several times"):
        adapt(model, frame)
    back = keras.layers.Normalization(invert=True)
    back.adapt(NUMBERS)
    output = back(keras.layers.Normalization()(both["left"]))
    adapt(keras.Model(both["left"], output), frame, features="left")
    np.testing.assert_allclose(np.ravel(back.mean), NUMBERS.mean(0), rtol=1e-3, atol=1e-3)


def test_empty_texts_and_no_tokens(spark):
    texts = np.array(["", "one two", "!!!", "two"] * 5, object)
    frame = frame_of(spark, x=texts)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 1)
    assert adapt(keras.layers.TextVectorization(), frame, features="x").get_vocabulary() == ["", "[UNK]", "two", "one"]
    with pytest.raises(DataError, match="no tokens"):
        adapt(keras.layers.TextVectorization(), frame.where("x = ''"), features="x")


def test_large_whole_numbers_in_a_float_column(spark):
    frame = frame_of(spark, x=np.array([16777217.0, 16777216.0, 16777217.0]))
    assert adapt(keras.layers.IntegerLookup(), frame, features="x").get_vocabulary() == [-1, 16777217, 16777216]


def test_invalid_rows(spark):
    broken = NUMBERS.copy()
    broken[7, 1] = np.nan
    frame = frame_of(spark, x=broken)
    with pytest.raises(DataError, match="NaN"):
        adapt(keras.layers.Normalization(), frame, features="x")
    layer = adapt(keras.layers.Normalization(), frame, features="x", on_invalid="drop")
    np.testing.assert_allclose(np.ravel(layer.mean), np.delete(NUMBERS, 7, 0).mean(0), rtol=1e-3, atol=1e-3)
    names = spark.createDataFrame([("a", 1.0), (None, 2.0), ("b", None), ("a", 6.0)], "name string, label double")
    lookup = adapt(keras.layers.StringLookup(), names, features="name", on_invalid="drop")
    assert lookup.get_vocabulary(include_special_tokens=False) == ["a", "b"]
    scale = adapt(keras.layers.Normalization(), names, features="label", on_invalid="drop")
    np.testing.assert_allclose(np.ravel(scale.mean), [3.0], rtol=1e-5)


def test_wrong_arguments(spark):
    frame = frame_of(spark, x=NUMBERS)
    for error, match, target, data, given in [
        (ConfigurationError, "target", keras.layers.Dense(1), frame, {}),
        (ConfigurationError, "fixed state", keras.layers.StringLookup(vocabulary=["a"]), frame, {}),
        (ModelError, "no layers", keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), frame, {"features": "x"}),
        (DataError, "'z'", keras.layers.Normalization(), frame, {"features": "z"}),
        (DataError, "shape", adapt(keras.layers.Normalization(), NUMBERS[:, :2]), frame, {"features": "x"}),
        (DataError, "'z'", keras.utils.FeatureSpace({"z": "float"}), frame, {}),
        (DataError, "empty", keras.layers.Normalization(), frame.where("false"), {"features": "x"}),
        (ConfigurationError, "on_invalid", keras.layers.Normalization(), frame, {"on_invalid": "null"}),
    ]:
        with pytest.raises(error, match=match):
            adapt(target, data, **given)
