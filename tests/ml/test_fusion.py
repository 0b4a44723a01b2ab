"""`fuse`: the predictions of a pipeline of Spark ML from one Keras model."""

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import Bucketizer, Imputer, OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler

from sparkkeras.errors import ConfigurationError
from sparkkeras.ml import KerasTransformer, fuse
from sparkkeras.worker.device import widest_float

ROWS = [
    ("Graz", 31.0, 4, 1_700_000_000.0),
    ("Linz", None, None, 1_700_000_100.0),
    ("Wien", 45.0, 2, 1_700_000_250.0),
    ("Graz", float("nan"), 1, 1_700_000_300.0),
    ("Rom", 20.0, 7, 1_700_000_310.0),
    (None, 33.0, 3, 1_700_000_050.0),
]
SCHEMA = "city string, age double, rooms int, time double"


@pytest.fixture
def rows(spark):
    return spark.createDataFrame(ROWS, SCHEMA).coalesce(1)


def network(width):
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
    model.layers[-1].bias.assign([0.3, -0.7])
    return model


def stages(kept):
    numbers = ["age", "rooms"]
    return [
        Imputer(inputCols=numbers, outputCols=["age_known", "rooms_known"]),
        StringIndexer(inputCol="city", outputCol="index", handleInvalid=kept),
        OneHotEncoder(inputCol="index", outputCol="is_city", handleInvalid=kept.replace("skip", "error")),
        VectorAssembler(inputCols=["age_known", "ROOMS_known", "time"], outputCol="numbers"),
        StandardScaler(inputCol="numbers", outputCol="scaled", withMean=True),
        VectorAssembler(inputCols=["scaled", "is_city"], outputCol="features"),
    ]


def arrays(rows):
    """The columns of rows as the fused model takes them: a null is NaN, or no label."""
    city, *numbers = zip(*rows, strict=True)
    columns = {name: np.array(values, float) for name, values in zip(("age", "rooms", "time"), numbers, strict=True)}
    found = {"city": keras.ops.convert_to_tensor([[each or ""] for each in city], "string")}
    return found | {name: tensor(values[:, None]) for name, values in columns.items()}


def tensor(values):
    return keras.ops.convert_to_tensor(np.array(values, widest_float()))


def called(model, columns):
    return keras.ops.convert_to_numpy(model(columns))


def outputs(frame):
    return np.array([row.output for row in frame.select("output").collect()])


def fitted(kept, rows):
    prepared = Pipeline(stages=stages(kept)).fit(rows)
    width = prepared.transform(rows).first().features.size
    return PipelineModel([prepared, KerasTransformer(model=network(width))])


def test_predictions_are_those_of_the_pipeline_with_nulls_and_unseen_labels(rows, tmp_path):
    pipeline = fitted("keep", rows.where("age > 30 or age is null"))

    fused = fuse(pipeline, rows)

    predicted = np.asarray(fused(arrays(ROWS)))
    np.testing.assert_allclose(predicted, outputs(pipeline.transform(rows)), rtol=1e-5)
    fused.save(tmp_path / "fused.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "fused.keras")(arrays(ROWS)), predicted)


@pytest.mark.parametrize("kept", ["error", "skip"])
def test_rows_that_the_pipeline_rejects_are_nan(rows, kept):
    known = rows.where("city in ('Graz', 'Linz')")
    pipeline = fitted(kept, known)

    found = np.asarray(fuse(pipeline, rows)(arrays(ROWS)))

    is_known = np.array([row[0] in {"Graz", "Linz"} for row in ROWS])
    np.testing.assert_allclose(found[is_known], outputs(pipeline.transform(known)), rtol=1e-5)
    assert np.isnan(found[~is_known]).all()


def test_features_that_no_model_takes_are_nan(spark):
    inputs = {"size": keras.Input((1,), name="size"), "code": keras.Input((1,), name="code", dtype="int32")}
    embedded = keras.layers.Flatten()(keras.layers.Embedding(3, 2)(inputs["code"]))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([inputs["size"], embedded])))
    fused = fuse(PipelineModel([KerasTransformer(model=model, featuresCol=["Code", "size"])]))
    values = {"size": [1.0, np.inf, 1e39, 2.0, 3.0, np.nan], "Code": [2.0, 0, 0, 3, -1, 1]}
    found = np.ravel(fused({name: tensor(np.array(each)[:, None]) for name, each in values.items()}))
    assert np.isfinite(found[0])
    assert np.isnan(found[1:]).all()
    accepted = spark.createDataFrame([(1.0, 2)], "size double, code int")
    predicted = KerasTransformer(model=model, featuresCol=["Code", "size"], outputCol="output").transform(accepted)
    np.testing.assert_allclose(outputs(predicted).ravel(), found[:1], rtol=1e-5)


def test_an_index_of_numbers_and_stages_for_other_columns(rows):
    before = [
        Bucketizer(splits=[0.0, 10.0, 20.0], inputCol="rooms", outputCol="unused"),
        StringIndexer(inputCols=["city", "rooms", "time"], outputCols=["label", "kind", "when"], handleInvalid="keep"),
        OneHotEncoder(inputCols=["kind", "when"], outputCols=["is_kind", "is_when"], dropLast=False),
        VectorAssembler(inputCols=["is_kind", "is_when", "kind"], outputCol="numbers"),
        StandardScaler(inputCol="numbers", outputCol="features", withMean=True, withStd=False),
    ]
    prepared = Pipeline(stages=before).fit(rows.where("rooms < 5"))
    known = rows.where("rooms < 5").drop("city")
    pipeline = PipelineModel(
        [prepared, KerasTransformer(model=network(prepared.transform(rows.limit(1)).first().features.size))]
    )

    fused = fuse(pipeline, rows)

    assert set(fused.input) == {"rooms", "time"}
    data = {
        name: keras.ops.convert_to_tensor(np.array(known.select(name).collect()).astype(float)) for name in ("rooms", "time")
    }
    np.testing.assert_allclose(fused(data), outputs(pipeline.transform(known)), rtol=1e-5)
    with pytest.raises(ConfigurationError, match="strings and as numbers: .*schema"):
        fuse(PipelineModel([prepared, KerasTransformer(model=network(2), featuresCol=["kind", "rooms"])]))


def test_inputs_of_other_types_and_shapes(rows):
    inputs = {"city": keras.Input((1,), dtype="int32", name="city"), "grid": keras.Input((2, 1), name="grid")}
    embedded = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(inputs["city"]))
    merged = keras.layers.Concatenate()([embedded, keras.layers.Flatten()(inputs["grid"])])
    model = keras.Model(inputs, {"a": keras.layers.Dense(1, name="a")(merged), "b": keras.layers.Dense(2, name="b")(merged)})
    columns = {"city": "index", "grid": ["rooms", "age"]}
    transformer = KerasTransformer(
        model=model, featuresCol=columns, outputCol=["a", "b"], predictionCol="", handleInvalid="keep"
    )
    indexer = StringIndexer(inputCol="city", outputCol="index", handleInvalid="keep").fit(rows.where("city < 'M'"))
    pipeline = PipelineModel([indexer, transformer])

    found = fuse(pipeline)({"city": arrays(ROWS)["city"], "rooms": arrays(ROWS)["rooms"], "age": arrays(ROWS)["age"]})

    expected = pipeline.transform(rows).select("a", "b").collect()
    for name, width in (("a", 1), ("b", 2)):
        values = [np.full(width, np.nan) if row[name] is None else np.reshape(row[name], width) for row in expected]
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


@pytest.mark.core
def test_a_constant_column_and_a_marked_missing_value(spark):
    rows = spark.createDataFrame([(3.0, -999.9), (3.0, 5.0), (3.0, 8.0)], "same double, marked double").coalesce(1)
    before = [
        Imputer(inputCol="marked", outputCol="imputed", missingValue=-999.9),
        VectorAssembler(inputCols=["same", "imputed"], outputCol="numbers"),
        StandardScaler(inputCol="numbers", outputCol="features"),
    ]
    pipeline = PipelineModel([*Pipeline(stages=before).fit(rows).stages, KerasTransformer(model=network(2))])

    data = {"same": np.full((3, 1), 3.0), "marked": np.array([[-999.9], [5.0], [8.0]])}

    fused, expected = fuse(pipeline), outputs(pipeline.transform(rows))
    np.testing.assert_allclose(fused.predict(data, verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(called(fused, {name: tensor(values) for name, values in data.items()}), expected, rtol=1e-5)


def test_a_stage_that_cannot_become_layers_is_named(spark):
    keras_stage = KerasTransformer(model=network(1), featuresCol="bucket")
    bucketizer = Bucketizer(splits=[0.0, 1.0, 2.0], inputCol="age", outputCol="bucket")

    for pipeline, words in (
        (PipelineModel([bucketizer, keras_stage]), "Bucketizer"),
        (PipelineModel([bucketizer]), "last stage is Bucketizer"),
        (keras_stage, "pipeline is KerasTransformer"),
        (PipelineModel([VectorAssembler(inputCols=["a", "b"], outputCol="bucket"), keras_stage]), "1 value .* have 2"),
        (PipelineModel([KerasTransformer(model=network(1), batch_transform=abs)]), "batch_transform"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            fuse(pipeline)
    pipeline = PipelineModel([KerasTransformer(model=network(1), featuresCol="age")])
    for other, words in (
        (spark.createDataFrame([], "size double"), "no column 'age'.* size"),
        (spark.createDataFrame([], "age string"), "strings in the column 'age'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            fuse(pipeline, other)
    with pytest.raises(ConfigurationError, match="schema is "):
        fuse(PipelineModel([KerasTransformer(model=network(1))]), "age int")
