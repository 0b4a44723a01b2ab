"""Training, evaluation and prediction on DataFrames: equal to RDDs and Keras, after any upstream operation."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
from pyspark.errors import PythonException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types

from sparkkeras import Checkpoint, ConfigurationError, DataError, SparkModel, load_spark_model
from tests.models import classifier, regression

ROWS = 120
X = np.random.default_rng(0).random((ROWS, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, ROWS)
W = np.random.default_rng(2).random(ROWS).astype(np.float32)
COLUMNS = ["a", "b", "c", "d"]

FORMS = {
    "array": ("features array<float>", lambda x: x.tolist()),
    "vector": (VectorUDT(), lambda x: Vectors.dense(x)),
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


def wide(spark, parts=2, x=X):
    """The rows with a column for each feature."""
    data = [(row, *map(float, x[row]), int(Y[row])) for row in range(len(x))]
    schema = "id int, a double, b double, c double, d double, label int"
    return spark.createDataFrame(spark.sparkContext.parallelize(data, parts), schema)


def pairs(sc, parts=2):
    return sc.parallelize(list(zip(X, Y, strict=True)), parts)


def model(**compiled):
    return classifier(width=4, units=8, classes=3, **compiled)


def train(data, *, epochs=2, num_workers=None, built=None, **given):
    spark_model = SparkModel(built or model(), num_workers=num_workers, seed=4)
    spark_model.fit(data, epochs=epochs, batch_size=16, verbose=0, **given)
    return spark_model.model.get_weights()


def assert_same_bits(mine, other):
    for one, two in zip(mine, other, strict=True):
        np.testing.assert_array_equal(one, two)


def predictions(frame, name="prediction"):
    return np.array([row[name] for row in frame.orderBy("id").select(name).collect()])


def job_count(sc, call):
    """The number of jobs that a call starts."""
    sc.setJobGroup("counted", "")
    try:
        call()
        return len(sc.statusTracker().getJobIdsForGroup("counted"))
    finally:
        sc.setLocalProperty("spark.jobGroup.id", None)


# Training


@pytest.fixture(scope="module")
def on_an_rdd(contexts):
    """The weights that training on an RDD of these rows gives."""
    return train(pairs(contexts.get("local[2]")))


@pytest.mark.parametrize("form", ["array", "mixed vectors", "bytes"])
def test_fit_on_a_data_frame_is_bit_identical_to_fit_on_an_rdd(spark, on_an_rdd, form):
    assert_same_bits(train(table(spark, form)), on_an_rdd)


def test_a_list_of_columns_is_bit_identical_to_an_array_column(spark, on_an_rdd):
    assert_same_bits(train(wide(spark), features={"pixels": COLUMNS}, label="label"), on_an_rdd)


def test_sample_weights_and_a_validation_split_are_bit_identical_to_an_rdd(sc, spark):
    triples = sc.parallelize(list(zip(X, Y, W, strict=True)), 3)
    expected = train(triples, validation_split=0.2)
    assert_same_bits(train(table(spark, parts=3), sample_weight="w", validation_split=0.2), expected)


def test_validation_data_may_be_a_data_frame_or_the_rows_of_a_column(sc, spark):
    frame = table(spark).withColumn("held", F.col("id") % 4 == 0)
    train_rows, held_out = frame.where("not held"), frame.where("held")
    expected, histories = None, []
    flags = {
        "boolean": F.col("held"),
        "int with nulls": F.when(F.col("held"), 7),
    }
    for flag in [None, *flags.values()]:
        spark_model = SparkModel(model(), seed=4)
        data = train_rows if flag is None else frame.withColumn("Is.Val", flag)
        given = {"validation_data": held_out} if flag is None else {"validation_col": "is.val"}
        histories.append(spark_model.fit(data, batch_size=16, epochs=2, verbose=0, **given).history)
        weights = spark_model.model.get_weights()
        expected = expected or weights
        assert_same_bits(weights, expected)
    rows = np.arange(ROWS) % 4 == 0
    values = spark_model.model.evaluate(X[rows], Y[rows], verbose=0)
    for history in histories:
        assert history == histories[0]
        np.testing.assert_allclose([history["val_loss"][-1], history["val_accuracy"][-1]], values, rtol=1e-5)


@pytest.mark.parametrize(  # tests/sources/test_frame.py has the other names of columns
    ("given", "kind", "words"),
    [
        ({"validation_col": "name"}, DataError, "column 'name' marks the validation rows.*has the type string"),
        ({"validation_col": "w", "validation_split": 0.1}, ConfigurationError, "pass only one of"),
        ({"features": "nothing"}, DataError, "no column 'nothing'"),
        ({"features": ["w", "id"]}, DataError, r"have 2 values per row, but the model's input 'pixels' expects.*\(4,\)"),
        ({"sample_weight": np.ones(3)}, ConfigurationError, "sample_weight is an array.*pass the name of the column"),
        ({"y": Y}, ConfigurationError, "y is only for arrays; for a DataFrame, name the column of labels"),
    ],
)
def test_invalid_arguments_are_reported_before_a_job_starts(sc, spark, given, kind, words):
    frame = table(spark).withColumn("name", F.lit("a"))

    def fit():
        with pytest.raises(kind, match=words):
            train(frame, **given)

    assert job_count(sc, fit) == 0


def test_column_arguments_need_a_data_frame(sc, spark):
    for data in ((X, Y), (pairs(sc),)):
        with pytest.raises(ConfigurationError, match="features= requires a Spark DataFrame"):
            SparkModel(model()).fit(*data, features="a", verbose=0)
    with pytest.raises(ConfigurationError, match="validation_col requires a DataFrame"):
        SparkModel(model()).fit(X, Y, validation_col="a", verbose=0)


def test_errors_in_rows_name_the_column(spark):
    ragged = table(spark).withColumn("features", F.when(F.col("id") == 50, F.array(F.lit(1.0))).otherwise(F.col("features")))
    with pytest.raises(DataError, match=r"column 'features' holds arrays of different lengths \(4 and 1\)"):
        train(ragged)
    short = table(spark).withColumn("features", F.slice("features", 1, 3))
    with pytest.raises(DataError, match=r"column 'features' does not fit the model's input 'pixels'.*\(4,\).*\(3,\)"):
        train(short)


def test_rows_with_nulls_are_rejected_or_dropped(spark):
    missing = F.col("id").isin([3, 4, 119])
    frame = wide(spark).withColumn("a", F.when(~missing, F.col("a")))
    with pytest.raises(DataError, match=r"column 'a' has a null in row 3 of partition 0.*fillna.*on_invalid=\"drop\""):
        train(frame, features=COLUMNS)
    expected = train(wide(spark).where(~missing), features=COLUMNS)
    assert_same_bits(train(frame, features=COLUMNS, on_invalid="drop"), expected)


def zeros_for_nan(x, y):
    return np.nan_to_num(x, nan=0.0), y


def test_nulls_can_be_read_as_nan(spark):
    missing = F.col("id") % 3 == 0
    frame = wide(spark).withColumn("a", F.when(~missing, F.col("a")))
    expected = train(frame.fillna(0), features=COLUMNS, transform=zeros_for_nan)
    assert_same_bits(train(frame, features=COLUMNS, on_invalid="allow", transform=zeros_for_nan), expected)
    arrays = frame.select(F.array(*(F.col(name).cast("float") for name in COLUMNS)).alias("features"), "label")
    assert_same_bits(train(arrays, on_invalid="allow", transform=zeros_for_nan), expected)
    with pytest.raises(DataError, match="column 'label' has a null"):
        train(frame.withColumn("label", F.when(~missing, F.col("label"))), features=COLUMNS, on_invalid="allow")


def test_empty_many_and_redistributed_partitions(sc, spark):
    whole = table(spark, parts=1).where("id < 30")
    holes = table(spark, parts=4).where("id >= 30 and id < 60")
    assert len(train(whole.union(holes))) == 4
    assert len(train(table(spark, parts=1).limit(1))) == 4
    spark_model = SparkModel(model(), num_workers=3, seed=4)
    spark_model.fit(table(spark, parts=1), verbose=0)
    assert sorted(report["rows"] for report in spark_model.training_histories) == [40, 40, 40]


def test_a_data_frame_without_rows_can_be_predicted_but_not_trained_on(spark):
    nothing = table(spark).where("id < 0")
    spark_model = SparkModel(model())
    with pytest.raises(DataError, match="the data has no rows"):
        spark_model.fit(nothing, verbose=0)
    with pytest.raises(DataError, match="no rows"):
        spark_model.fit(table(spark).withColumn("w", F.lit(float("nan"))), sample_weight="w", on_invalid="drop", verbose=0)
    with pytest.raises(DataError, match="no rows to evaluate"):
        spark_model.evaluate(nothing)
    assert spark_model.predict(nothing).collect() == []


def test_invalid_arguments_of_predict_are_reported_immediately(spark):
    spark_model = SparkModel(model())
    frame = table(spark)
    for data in (frame, X):
        with pytest.raises(ConfigurationError, match="every row gets one prediction"):
            spark_model.predict(data, on_invalid="drop")
        with pytest.raises(ConfigurationError, match="transform='flip': expected a function"):
            spark_model.predict(data, transform="flip")
    with pytest.raises(ConfigurationError, match=r"features is Column.* add computed columns with df.withColumn first"):
        spark_model.predict(frame, features=F.col("features") * 2)
    with pytest.raises(ConfigurationError, match=r"a pandas DataFrame of shape .* convert it .*spark.createDataFrame"):
        spark_model.predict(frame.toPandas(), features="features")


def test_values_that_are_not_finite_are_reported_with_their_column(spark):
    frame = wide(spark).withColumn("c", F.when(F.col("id") == 3, F.lit(float("inf"))).otherwise(F.col("c")))
    with pytest.raises(DataError, match="column 'c' holds NaN or an infinite value in row 3 of partition 0"):
        train(frame, features=COLUMNS)


def test_each_output_has_its_own_sample_weights(spark):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), name="x")
    built = keras.Model(inputs, [keras.layers.Dense(1, name="high")(inputs), keras.layers.Dense(2, name="low")(inputs)])
    built.compile("sgd", ["mse", "mse"])
    frame = wide(spark).withColumn("low", F.array("b", "c")).withColumn("v", F.col("b") * F.col("b"))
    named = {"features": COLUMNS, "label": {"low": "low", "high": "a"}, "sample_weight": ["a", "v"]}
    spark_model = SparkModel(built, seed=3)
    found = spark_model.evaluate(frame, return_dict=True, **named)
    y, weights = [X[:, 0], X[:, 1:3]], [X[:, 0], X[:, 1] ** 2]
    expected = built.evaluate(X, y, sample_weight=weights, batch_size=ROWS, return_dict=True, verbose=0)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    spark_model.fit(frame, verbose=0, **named)


def test_a_data_frame_as_validation_data_for_arrays(spark):
    spark_model = SparkModel(model(), num_workers=2, seed=1)
    frame = table(spark).withColumnRenamed("features", "measured").withColumnRenamed("label", "kind")
    given = {"features": "measured", "label": "kind", "sample_weight": W}
    history = spark_model.fit(X, Y, validation_data=frame, verbose=0, **given).history
    expected = spark_model.evaluate(X, Y)
    assert history["val_loss"] == [pytest.approx(expected if isinstance(expected, float) else expected[0], rel=1e-5)]
    with pytest.raises(DataError, match="no column 'mesured'"):
        spark_model.fit(X, Y, validation_data=frame, features="mesured", label="kind", verbose=0)


def test_asynchronous_training_on_data_frames(spark):
    spark_model = SparkModel(model(), mode="asynchronous", frequency=2, seed=1)
    history = spark_model.fit(table(spark, parts=4), epochs=3, batch_size=8, verbose=0, validation_data=table(spark))
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert len(history.history["val_loss"]) == 3


def test_nothing_remains(sc, spark, tmp_path):
    folder = Path(sc.parallelize([0], 1).map(lambda _: os.environ["SPARK_LOCAL_DIRS"].split(",")[0]).first())

    def kept():
        return set(sc._jsc.getPersistentRDDs().keySet()), set(folder.rglob("sparkkeras-*")), dict(sc.environment)

    before = kept()
    cached = table(spark).cache()
    train(cached, validation_data=cached)
    assert cached.is_cached
    cached.unpersist(blocking=True)
    with pytest.raises(DataError):
        train(table(spark).withColumn("features", F.slice("features", 1, 3)))
    assert kept() == before


# Evaluating


def test_evaluate_equals_keras(spark):
    metrics = {"metrics": ["accuracy"], "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(name="cross")]}
    spark_model = SparkModel(model(**metrics))
    expected = spark_model.model.evaluate(X, Y, verbose=0)
    for form in ("array", "vector"):
        np.testing.assert_allclose(spark_model.evaluate(table(spark, form, 3)), expected, rtol=1e-6)
    np.testing.assert_allclose(spark_model.evaluate(wide(spark), features=COLUMNS), expected, rtol=1e-6)
    expected = spark_model.model.evaluate(X, Y, sample_weight=W, return_dict=True, verbose=0)
    found = spark_model.evaluate(table(spark, parts=3), sample_weight="w", return_dict=True)
    assert found == pytest.approx(expected, rel=1e-6)


# Predicting


def test_predict_adds_a_column_without_a_job(sc, spark):
    frame = table(spark, parts=3)
    spark_model = SparkModel(model())
    spark_model.predict(frame)  # the first call probes the workers
    made = []
    assert job_count(sc, lambda: made.append(spark_model.predict(frame, output_col="p.q"))) == 0
    (scored,) = made
    assert scored.columns == [*frame.columns, "p.q"]
    assert scored.schema["p.q"].dataType.simpleString() == "array<float>"
    rows = scored.collect()
    np.testing.assert_array_equal([row.id for row in rows], np.arange(ROWS))
    np.testing.assert_array_equal([row.features for row in rows], X)
    np.testing.assert_allclose([row["p.q"] for row in rows], spark_model.model.predict(X, verbose=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["mixed vectors", "bytes"])
def test_predictions_equal_those_of_keras(spark, form):
    built = regression(width=4)
    scored = SparkModel(built).predict(table(spark, form, 3))
    assert scored.schema["prediction"].dataType == types.FloatType()
    np.testing.assert_allclose(predictions(scored), built.predict(X, verbose=0).ravel(), rtol=1e-6, atol=1e-6)


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

        (Path(self.folder) / uuid.uuid4().hex).write_text(str(len(x)))
        return x


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_filter_on_the_prediction_computes_it_once_per_row(spark, tmp_path, outputs):
    built = regression(width=4)
    if outputs == 2:
        inputs = keras.Input((4,), name="x")
        built = keras.Model(inputs, [keras.layers.Dense(1, name=f"y{number}")(inputs) for number in range(2)])
        built.compile("sgd", "mse")
    scored = SparkModel(built).predict(table(spark), transform=Noted(str(tmp_path)))
    name = scored.columns[-1]
    kept = scored.where(f"{name} > -1e9 and {name} < 1e9").withColumn("twice", F.col(name) * 2).collect()
    assert len(kept) == ROWS
    assert sum(int(path.read_text()) for path in tmp_path.iterdir()) == ROWS


def test_rows_with_nulls_get_null_predictions_or_are_predicted_with_nan(spark):
    spark_model = SparkModel(regression(width=4))
    missing = F.col("id") % 5 == 0  # rows of both partitions, either of which may fail first
    nulls = table(spark, "vector").withColumn("features", F.when(~missing, F.col("features")))
    with pytest.raises(PythonException, match=r"DataError: column 'features' has a null in row 0 of partition [01]"):
        spark_model.predict(nulls).collect()
    found = predictions(spark_model.predict(nulls, on_invalid="null")).astype(float)
    np.testing.assert_array_equal(np.isnan(found), np.arange(ROWS) % 5 == 0)
    some = wide(spark).withColumn("b", F.when(~missing, F.col("b")))
    found = predictions(spark_model.predict(some, features=COLUMNS, on_invalid="allow", transform=zeros_for_nan))
    filled = predictions(spark_model.predict(some.fillna(0), features=COLUMNS))
    np.testing.assert_array_equal(found, filled)


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
        with pytest.warns(UserWarning, match=r"^fit had transform=zeros_for_nan, which evaluate does not apply"):
            loss = each.evaluate(frame)
        assert loss == pytest.approx(spark_model.model.evaluate(X, Y, verbose=0), rel=1e-4)
        np.testing.assert_allclose(predictions(each.predict(frame, transform=None)), expected, rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match=r"^features=\['b', .* differs .* fit had features=\['a', 'b', 'c', 'd'\]"):
        spark_model.predict(frame, features=["b", "a", "c", "d"], transform=None)
    with pytest.warns(UserWarning, match="^label='a' differs from the columns .* fit had label='label'"):
        spark_model.evaluate(frame, label="a", transform=None)
    with pytest.raises(DataError, match=r"no column 'a'\. .* The columns are those of fit, features=\['a', 'b', 'c', 'd'\]"):
        spark_model.predict(frame.drop("a"), transform=None)
    with pytest.raises(ConfigurationError, match="features= .*is missing"):
        spark_model.predict(frame, features=None, transform=None)
    assert spark_model.predict(X, transform=None).shape == (ROWS, 1)


def test_several_inputs_and_outputs(sc, spark):
    def two_ended():
        keras.utils.set_random_seed(0)
        user, item = keras.Input((2, 1), name="user"), keras.Input((1,), name="item")
        both = keras.layers.Concatenate()([keras.layers.Flatten()(user), item])
        price = keras.layers.Dense(1, name="price")(both)
        kind = keras.layers.Reshape((3, 2), name="kind")(keras.layers.Dense(6)(both))
        built = keras.Model([user, item], {"price": price, "kind": kind})
        built.compile("sgd", {"price": "mse", "kind": "mse"})
        return built

    kinds = X[:, [0, 1, 2, 3, 0, 1]].reshape(ROWS, 3, 2)
    x, y = {"user": X[:, :2, None], "item": X[:, 2:3]}, {"price": X[:, 3], "kind": kinds}
    frame = wide(spark).select(
        "id",
        F.struct(F.array("a", "b").alias("taste"), F.col("b")).alias("user"),
        F.struct("c").alias("item"),
        F.col("d").alias("price"),
        F.array(F.array("a", "b"), F.array("c", "d"), F.array("a", "b")).alias("kind"),
    )
    features = {"item": "item.c", "user": "user.taste"}
    spark_model = SparkModel(two_ended(), seed=3)
    spark_model.fit(frame, features=features, epochs=2, batch_size=16, verbose=0)
    of_rows = SparkModel(two_ended(), seed=3)
    rows = [tuple({name: part[row] for name, part in side.items()} for side in (x, y)) for row in range(ROWS)]
    of_rows.fit(sc.parallelize(rows, 2), epochs=2, batch_size=16, verbose=0)
    assert_same_bits(spark_model.model.get_weights(), of_rows.model.get_weights())
    expected = spark_model.model.predict(x, verbose=0)
    scored = spark_model.predict(frame, features=features, output_col={"kind": "the kind", "price": "p_r"})
    assert scored.columns[:5] == frame.columns
    assert set(scored.columns[5:]) == {"p_r", "the kind"}
    np.testing.assert_allclose(predictions(scored, "p_r"), expected["price"].ravel(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(predictions(scored, "the kind"), expected["kind"], rtol=1e-6, atol=1e-6)


def test_an_existing_column_is_not_replaced(spark):
    spark_model = SparkModel(regression(width=4))
    scored = spark_model.predict(table(spark))
    for name in ("prediction", "Prediction", "ID"):
        with pytest.raises(ConfigurationError, match="the column .* already exists"):
            spark_model.predict(scored, output_col=name)
    assert spark_model.predict(scored, output_col="second").columns[-2:] == ["prediction", "second"]


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


def test_pandas_data_frames_are_accepted_as_arrays(spark):
    import pandas as pd

    x, y = pd.DataFrame(X, columns=COLUMNS), pd.Series(Y)
    spark_model = SparkModel(model(), num_workers=2, seed=4)
    spark_model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert_same_bits(spark_model.model.get_weights(), train(X, y=Y, num_workers=2))
    np.testing.assert_allclose(spark_model.predict(x), spark_model.model.predict(X, verbose=0), atol=1e-6)


def test_an_autoencoder_learns_like_in_keras(spark):
    """From arrays, sparse matrices, one column, and a list of columns that are also the labels."""
    from scipy import sparse

    x = np.random.default_rng(0).random((40, 3)).astype(np.float32) * (np.arange(3) > 0)
    names = ["a", "b", "c"]
    rows = [(*row.tolist(), row.tolist()) for row in x]
    columns = spark.createDataFrame(rows, "a float, b float, c float, features array<float>").coalesce(1)

    def model():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(2, name="code"), keras.layers.Dense(3, name="decoded")]
        made = keras.Sequential([keras.Input((3,), name="x"), *layers], name="autoencoder")
        made.compile(keras.optimizers.SGD(name="sgd"), "mse")
        return made

    expected = model()
    expected.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for arguments in (
        {"data": x, "y": x},
        {"data": sparse.csr_matrix(x), "y": sparse.csr_matrix(x)},
        {"data": columns, "label": "features"},
        {"data": columns, "features": names, "label": names},
    ):
        spark_model = SparkModel(model(), batch_size=8, num_workers=1)
        spark_model.fit(**arguments, epochs=2, shuffle=False, verbose=0)
        for ours, theirs in zip(spark_model.model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
