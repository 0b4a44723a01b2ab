"""Training, evaluation and prediction on DataFrames: equal to RDDs and Keras, after any upstream operation."""

from pathlib import Path

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types

from sparkkeras import Checkpoint, ConfigurationError, DataError, SparkModel, load_spark_model
from tests.integration.faults import jobs_of
from tests.models import classifier, regression, two_by_two

ROWS = 120
X = np.random.default_rng(0).random((ROWS, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, ROWS)
W = np.random.default_rng(2).random(ROWS).astype(np.float32)
COLUMNS = ["a", "b", "c", "d"]

FORMS = {
    "array": ("features array<float>", lambda x: x.tolist()),
    "mixed vectors": (
        VectorUDT(),
        lambda x: Vectors.dense(x) if x[0] > 0.5 else Vectors.sparse(4, dict(enumerate(x.tolist()))),
    ),
    "bytes": ("features binary", lambda x: bytearray(x.tobytes())),
}


def table(spark, form="array", parts=2, rows=ROWS):
    """A DataFrame with the columns id, features (in one of several forms), label and w."""
    kind, pack = FORMS[form]
    if isinstance(kind, str):
        kind = types.StructType.fromDDL(kind)["features"].dataType
    schema = types.StructType.fromDDL("id int, label int, w float").add("features", kind)
    data = [(row, int(Y[row]), float(W[row]), pack(X[row])) for row in range(rows)]
    return spark.createDataFrame(spark.sparkContext.parallelize(data, parts), schema)


def wide(spark, parts=2):
    """The rows with a column for each feature."""
    data = [(row, *map(float, x), int(Y[row])) for row, x in enumerate(X)]
    schema = "id int, a double, b double, c double, d double, label int"
    return spark.createDataFrame(spark.sparkContext.parallelize(data, parts), schema)


def pairs(sc, parts=2):
    return sc.parallelize(list(zip(X, Y, strict=True)), parts)


def model(**compiled):
    return classifier(width=4, units=8, classes=3, run_eagerly=True, **compiled)


def train(data, *, epochs=1, num_workers=None, built=None, **given):
    spark_model = SparkModel(built or model(), num_workers=num_workers, seed=4)
    spark_model.fit(data, epochs=epochs, batch_size=16, verbose=0, **given)
    return spark_model.model.get_weights()


def predictions(frame, name="prediction"):
    return np.array([row[name] for row in frame.orderBy("id").select(name).collect()])


# Training


def test_training_has_the_same_bits_for_an_rdd_and_all_kinds_of_columns(sc, spark):
    expected = train(pairs(sc))
    for form in ("array", "mixed vectors", "bytes"):
        np.testing.assert_equal(train(table(spark, form)), expected)
    np.testing.assert_equal(train(wide(spark), features={"pixels": COLUMNS}, label="label"), expected)


def test_sample_weights_and_a_validation_split_are_bit_identical_to_an_rdd(sc, spark):
    triples = sc.parallelize(list(zip(X, Y, W, strict=True)), 3)
    expected = train(triples, validation_split=0.2)
    np.testing.assert_equal(train(table(spark, parts=3), sample_weight="w", validation_split=0.2), expected)


def test_validation_data_may_be_a_data_frame_or_the_rows_of_a_column(spark):
    frame = table(spark).withColumn("Is.Val", F.when(F.col("id") % 4 == 0, 7))
    held_out, training = frame.where("`Is.Val` = 7"), frame.where("`Is.Val` is null")
    one, two = (SparkModel(model(), seed=4, batch_size=16) for _ in range(2))
    history = one.fit(training, validation_data=held_out, epochs=2, verbose=0).history
    assert two.fit(frame, validation_col="is.val", epochs=2, verbose=0).history == history
    np.testing.assert_equal(two.model.get_weights(), one.model.get_weights())
    expected = one.model.evaluate(X[::4], Y[::4], verbose=0)
    np.testing.assert_allclose([history["val_loss"][-1], history["val_accuracy"][-1]], expected, rtol=1e-5)


@pytest.mark.parametrize(  # tests/sources/test_frame.py has the other names of columns
    ("given", "kind", "words"),
    [
        ({"validation_col": "name"}, DataError, "'name' marks .* type string"),
        ({"validation_col": "w", "validation_split": 0.1}, ConfigurationError, "only one of"),
        ({"features": ["w", "id"]}, DataError, "have 2 values per row"),
        ({"sample_weight": np.ones(3)}, ConfigurationError, "sample_weight .* name of the column"),
        ({"y": Y}, ConfigurationError, "y is only for arrays"),
    ],
)
def test_invalid_arguments_are_reported_before_a_job_starts(sc, spark, given, kind, words):
    frame = table(spark).withColumn("name", F.lit("a"))
    with jobs_of(sc) as jobs, pytest.raises(kind, match=words):
        train(frame, **given)
    assert jobs == []


def test_column_arguments_need_a_data_frame(sc):
    spark_model = SparkModel(model())
    for data, named in (((X, Y), "features"), ((pairs(sc),), "features"), ((X, Y), "validation_col")):
        with pytest.raises(ConfigurationError, match=f"{named}.* requires a .*DataFrame"):
            spark_model.fit(*data, verbose=0, **{named: "a"})


def test_errors_in_rows_name_the_column(spark):
    is_bad = F.col("id") == 3
    one, infinite = F.array(F.lit(1.0)), F.lit(float("inf"))
    arrays = table(spark).withColumn("features", F.when(is_bad, one).otherwise(F.col("features")))
    columns = wide(spark).withColumn("c", F.when(is_bad, infinite).otherwise(F.col("c")))
    with pytest.raises(DataError, match=r"'features' holds .* \(4 and 1\)"):
        train(arrays)
    with pytest.raises(DataError, match="'c' holds NaN .* row 3 of partition 0"):
        train(columns, features=COLUMNS)


def zeros_for_nan(x, y):
    return np.nan_to_num(x, nan=0.0), y


def test_rows_with_nulls_are_rejected_dropped_or_read_as_nan(spark):
    missing = F.col("id").isin([3, 4, 119])
    nulls = wide(spark).withColumn("a", F.when(~missing, F.col("a")))
    given = {"features": COLUMNS, "transform": zeros_for_nan}
    with pytest.raises(DataError, match=r"'a' has a null in row 3 of partition 0.*fillna.*on_invalid"):
        train(nulls, features=COLUMNS)
    np.testing.assert_equal(train(nulls, on_invalid="drop", **given), train(nulls.where(~missing), **given))
    np.testing.assert_equal(train(nulls, on_invalid="allow", **given), train(nulls.fillna(0), **given))
    with pytest.raises(DataError, match="'label' has a null"):
        train(nulls.withColumn("label", F.when(~missing, F.col("label"))), features=COLUMNS, on_invalid="allow")


def test_empty_many_and_redistributed_partitions(spark):
    whole = table(spark, parts=1)
    train(whole.where("id < 30").union(table(spark, parts=4).where("id >= 90")))
    train(whole.limit(1))
    spark_model = SparkModel(model(), num_workers=3, seed=4)
    spark_model.fit(whole, verbose=0)
    assert [report["rows"] for report in spark_model.training_histories] == [40, 40, 40]


def test_a_data_frame_without_rows_can_be_predicted_but_not_trained_on(spark):
    nothing = table(spark).where("id < 0")
    invalid = table(spark).withColumn("w", F.lit(float("nan")))
    spark_model = SparkModel(model())
    for call in (
        lambda: spark_model.fit(nothing, verbose=0),
        lambda: spark_model.fit(invalid, sample_weight="w", on_invalid="drop", verbose=0),
        lambda: spark_model.evaluate(nothing),
    ):
        with pytest.raises(DataError, match="no rows"):
            call()
    assert spark_model.predict(nothing).collect() == []


def test_invalid_arguments_of_predict_are_reported_immediately(spark):
    frame = table(spark)
    for data, given, words in [
        (frame, {"on_invalid": "drop"}, "every row gets one"),
        (X, {"on_invalid": "drop"}, "every row gets one"),
        (frame, {"transform": "flip"}, "transform='flip'"),
        (frame, {"features": F.col("features") * 2}, "features is Column.*withColumn"),
        (frame.toPandas(), {"features": "features"}, "pandas DataFrame .*createDataFrame"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            SparkModel(model()).predict(data, **given)


def test_a_data_frame_as_validation_data_for_arrays(spark):
    spark_model = SparkModel(model(), num_workers=2, seed=1)
    frame = table(spark).withColumnRenamed("features", "measured").withColumnRenamed("label", "kind")
    given = {"features": "measured", "label": "kind", "sample_weight": W}
    history = spark_model.fit(X, Y, validation_data=frame, verbose=0, **given).history
    assert history["val_loss"] == [pytest.approx(spark_model.evaluate(X, Y)[0], rel=1e-5)]


# Evaluating


def test_evaluate_equals_keras(spark):
    metrics = {"metrics": ["accuracy"], "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(name="cross")]}
    spark_model = SparkModel(model(**metrics))
    expected = spark_model.model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(spark_model.evaluate(table(spark, "mixed vectors", 3)), expected, rtol=1e-6)
    np.testing.assert_allclose(spark_model.evaluate(wide(spark), features=COLUMNS), expected, rtol=1e-6)
    expected = spark_model.model.evaluate(X, Y, sample_weight=W, return_dict=True, verbose=0)
    found = spark_model.evaluate(table(spark, parts=3), sample_weight="w", return_dict=True)
    assert found == pytest.approx(expected, rel=1e-6)


# Predicting


def test_predict_adds_a_column_without_a_job(sc, spark):
    frame = table(spark, parts=3)
    spark_model = SparkModel(model())
    spark_model.predict(frame)  # the first call probes the workers
    with jobs_of(sc) as jobs:
        scored = spark_model.predict(frame, output_col="p.q")
    assert jobs == []
    assert scored.columns == [*frame.columns, "p.q"]
    assert scored.schema["p.q"].dataType.simpleString() == "array<float>"
    rows = scored.collect()
    np.testing.assert_array_equal([row.id for row in rows], np.arange(ROWS))
    np.testing.assert_array_equal([row.features for row in rows], X)
    np.testing.assert_allclose([row["p.q"] for row in rows], spark_model.model.predict(X, verbose=0), rtol=1e-6, atol=1e-6)
    for name in ("p.q", "P.Q", "ID"):
        with pytest.raises(ConfigurationError, match="already exists"):
            spark_model.predict(scored, output_col=name)


def assert_linear(built, scored):
    """Check that each row's prediction belongs to the features of the same row."""
    rows = scored.collect()
    features = np.array([[row[name] for name in COLUMNS] for row in rows], np.float32)
    np.testing.assert_allclose(
        [row.prediction for row in rows], built.predict(features, verbose=0).ravel(), rtol=1e-5, atol=1e-5
    )
    return rows


def test_predictions_stay_with_their_rows_after_any_upstream_operation(spark):
    built = regression(width=4)

    @F.udf("double")
    def unsteady():
        import uuid

        return float(uuid.uuid4().int % 1000) / 1000

    upstream = (
        spark.range(60, numPartitions=3)
        .select("id", F.rand().alias("a"), (F.monotonically_increasing_id() % 7).cast("double").alias("b"))
        .withColumn("c", unsteady.asNondeterministic()())
        .withColumn("d", F.lit(1).cast("byte"))
        .repartition(5)
    )
    scored = SparkModel(built).predict(upstream, features=COLUMNS)
    for frame in (scored, scored.repartition(2), scored.where("prediction > -1e9").orderBy(F.desc("prediction"))):
        assert len(assert_linear(built, frame)) == 60
    joined = scored.join(spark.range(30).withColumnRenamed("id", "other"), F.col("id") == F.col("other"))
    assert len(assert_linear(built, joined)) == 30


class Noted:
    """A transform that records in a folder the number of rows of each call."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, x, y):
        import uuid

        rows = len(x["left"] if isinstance(x, dict) else x)
        (Path(self.folder) / uuid.uuid4().hex).write_text(str(rows))
        return x


@pytest.mark.parametrize("made", [lambda: regression(width=4), two_by_two], ids=["one output", "two outputs"])
def test_a_filter_on_the_prediction_computes_it_once_per_row(spark, tmp_path, made):
    frame = table(spark).selectExpr("*", "w AS left", "features AS right")
    scored = SparkModel(made()).predict(frame, transform=Noted(str(tmp_path)))
    name = scored.columns[len(frame.columns)]
    kept = scored.where(f"{name} > -1e9 and {name} < 1e9").withColumn("twice", F.col(name) * 2).collect()
    assert len(kept) == ROWS
    assert sum(int(path.read_text()) for path in tmp_path.iterdir()) == ROWS


def test_evaluate_and_predict_read_rows_as_the_last_fit_did(spark, tmp_path):
    frame = wide(spark)
    spark_model = SparkModel(regression(width=4))
    checkpoint = Checkpoint(tmp_path / "checkpoints")
    spark_model.fit(frame, features=COLUMNS, label="label", transform=zeros_for_nan, verbose=0, checkpoint=checkpoint)
    spark_model.save(tmp_path / "model.keras")
    expected = spark_model.model.predict(X, verbose=0).ravel()
    for each in (
        spark_model,
        load_spark_model(tmp_path / "model.keras"),
        SparkModel.from_checkpoint(tmp_path / "checkpoints"),
    ):
        with pytest.warns(UserWarning, match="^fit had transform=zeros_for_nan"):
            loss = each.evaluate(frame)
        assert loss == pytest.approx(spark_model.model.evaluate(X, Y, verbose=0), rel=1e-4)
        np.testing.assert_allclose(predictions(each.predict(frame, transform=None)), expected, rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match=r"^features=\['b', .* fit had features=\['a'"):
        spark_model.predict(frame, features=["b", "a", "c", "d"], transform=None)
    with pytest.raises(DataError, match=r"no column 'a'.* those of fit"):
        spark_model.predict(frame.drop("a"), transform=None)
    assert spark_model.predict(X, transform=None).shape == (ROWS, 1)


def test_several_inputs_outputs_and_sample_weights(sc, spark):
    frame = wide(spark).withColumn("user", F.struct(F.array(*COLUMNS).alias("taste"), F.col("b")))
    features = {"right": "user.taste", "left": "c"}
    labelled = {"features": features, "label": {"kind": "label", "size": "d"}, "sample_weight": {"kind": "a", "size": "b"}}
    x, y, weights = {"left": X[:, 2:3], "right": X}, [X[:, 3], Y], [X[:, 1], X[:, 0]]
    rows = [
        ({name: part[row] for name, part in x.items()}, *(tuple(part[row] for part in side) for side in (y, weights)))
        for row in range(ROWS)
    ]
    spark_model, of_rows = (SparkModel(two_by_two(), seed=3) for _ in range(2))
    spark_model.fit(frame, verbose=0, **labelled)
    of_rows.fit(sc.parallelize(rows, 2), verbose=0)
    built = spark_model.model
    np.testing.assert_equal(built.get_weights(), of_rows.model.get_weights())
    expected = built.evaluate(x, y, sample_weight=weights, batch_size=ROWS, return_dict=True, verbose=0)
    assert spark_model.evaluate(frame, return_dict=True, **labelled)["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    scored = spark_model.predict(frame, features=features, output_col={"kind": "the kind", "size": "p_r"})
    assert set(scored.columns) == {*frame.columns, "p_r", "the kind"}
    size, kind = built.predict(x, verbose=0)
    np.testing.assert_allclose(predictions(scored, "p_r"), size.ravel(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(predictions(scored, "the kind"), kind, rtol=1e-6, atol=1e-6)


def test_a_stream_can_be_predicted(spark, tmp_path):
    table(spark).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(table(spark).schema).parquet(str(tmp_path / "rows"))
    spark_model = SparkModel(regression(width=4))
    for call in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(DataError, match=r"is a stream.*foreachBatch"):
            call(stream, verbose=0)
    scored = spark_model.predict(stream)
    assert scored.isStreaming
    query = scored.writeStream.format("memory").queryName("scored").trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    found = predictions(spark.table("scored"))
    np.testing.assert_allclose(found, spark_model.model.predict(X, verbose=0).ravel(), rtol=1e-6, atol=1e-6)


def test_pandas_data_frames_are_accepted_as_arrays(sc):
    import pandas as pd

    x, y = pd.DataFrame(X, columns=COLUMNS), pd.Series(Y)
    np.testing.assert_equal(train(x, y=y, num_workers=2), train(X, y=Y, num_workers=2))
