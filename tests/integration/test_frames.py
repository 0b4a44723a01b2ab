"""Training, evaluation and prediction on DataFrames: equal to RDDs and Keras, after any upstream operation."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
from pyspark.errors import PythonException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.mllib.linalg import Vectors as OldVectors
from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types

from sparkkeras import Checkpoint, ConfigurationError, DataError, SparkModel, load_spark_model
from sparkkeras.ml import KerasEstimator
from tests.conftest import long
from tests.integration.test_recovery import Kill
from tests.models import classifier, regression

ROWS = 120
X = np.random.default_rng(0).random((ROWS, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, ROWS)
W = np.random.default_rng(2).random(ROWS).astype(np.float32)
COLUMNS = ["a", "b", "c", "d"]

FORMS = {
    "array": ("features array<float>", lambda x: x.tolist()),
    "double array": ("features array<double>", lambda x: x.tolist()),
    "vector": (VectorUDT(), lambda x: Vectors.dense(x)),
    "mixed vectors": (
        VectorUDT(),
        lambda x: Vectors.dense(x) if x[0] > 0.5 else Vectors.sparse(4, dict(enumerate(x.tolist()))),
    ),
    "mllib": (OldVectorUDT(), lambda x: OldVectors.dense(x)),
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


def test_column_names_may_contain_any_characters(spark, on_an_rdd):
    user = F.struct(F.col("features").alias("x.y")).alias("user")
    renamed = table(spark).select(user, F.col("label").alias("The `label`"))
    assert_same_bits(train(renamed, features="user.x.y", label="the `label`"), on_an_rdd)


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


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"validation_col": "name"}, DataError, "column 'name' marks the validation rows.*has the type string"),
        ({"validation_col": "held"}, DataError, "no column 'held'"),
        ({"validation_col": "w", "validation_split": 0.1}, ConfigurationError, "pass only one of"),
        ({"features": "name"}, DataError, "column 'name' has the type string"),
        ({"features": ["w", "id"]}, DataError, r"have 2 values per row, but the model's input 'pixels' expects.*\(4,\)"),
        ({"features": "nothing"}, DataError, "no column 'nothing'"),
        ({"label": "name"}, DataError, "column 'name' has the type string"),
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


@pytest.mark.parametrize("null", ["a", long("label")])
def test_rows_with_nulls_are_rejected_or_dropped(sc, spark, null):
    missing = F.col("id").isin([3, 4, 119])
    frame = wide(spark).withColumn(null, F.when(~missing, F.col(null)))
    message = rf"column '{null}' has a null in row 3 of partition 0.*fillna.*on_invalid=\"drop\""
    with pytest.raises(DataError, match=message):
        train(frame, features=COLUMNS)
    expected = train(wide(spark).where(~missing), features=COLUMNS)
    assert_same_bits(train(frame, features=COLUMNS, on_invalid="drop"), expected)


def zeros_for_nan(x, y):
    return np.nan_to_num(x, nan=0.0), y


@pytest.mark.filterwarnings("ignore:the rows seem to be sorted")  # by the column n
def test_nulls_can_be_read_as_nan(spark):
    missing = F.col("id") % 3 == 0
    frame = wide(spark).withColumn("a", F.when(~missing, F.col("a"))).withColumn("n", F.when(~missing, F.col("id")))
    frame = frame.withColumn("n", F.col("n").cast("int"))
    columns = ["a", "b", "c", "n"]
    expected = train(frame.fillna(0), features=columns, transform=zeros_for_nan)
    assert_same_bits(train(frame, features=columns, on_invalid="allow", transform=zeros_for_nan), expected)
    arrays = frame.select(F.array(*(F.col(name).cast("float") for name in columns)).alias("features"), "label")
    assert_same_bits(train(arrays, on_invalid="allow", transform=zeros_for_nan), expected)
    with pytest.raises(DataError, match="column 'label' has a null"):
        train(frame.withColumn("label", F.when(~missing, F.col("label"))), features=columns, on_invalid="allow")


def test_empty_many_and_redistributed_partitions(sc, spark):
    whole = table(spark, parts=1).where("id < 30")
    holes = table(spark, parts=4).where("id >= 30 and id < 60")
    assert len(train(whole.union(holes))) == 4
    assert len(train(table(spark, parts=1).limit(1))) == 4
    spark_model = SparkModel(model(), num_workers=3, seed=4)
    spark_model.fit(table(spark, parts=1), verbose=0)
    assert sorted(report["rows"] for report in spark_model.training_histories) == [40, 40, 40]
    few = SparkModel(model(), seed=4)
    few.fit(table(spark, parts=5, rows=3), verbose=0)
    assert sum(report["rows"] for report in few.training_histories) == 3


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
    with pytest.raises(ConfigurationError, match=r"transform failed .*transform must return \(x, y\)"):
        spark_model.predict(X, transform=lambda x, y: None)
    with pytest.raises(DataError, match="expects numbers, received strings"):
        spark_model.predict(X, transform=lambda x, y: x.astype(str))


def test_values_that_are_not_finite_are_reported_with_their_column(spark):
    frame = wide(spark).withColumn("c", F.when(F.col("id") == 3, F.lit(float("inf"))).otherwise(F.col("c")))
    with pytest.raises(DataError, match="column 'c' holds NaN or an infinite value in row 3 of partition 0"):
        train(frame, features=COLUMNS)
    with pytest.raises(PythonException, match="column 'c' holds NaN or an infinite value in row 3 of partition 0"):
        SparkModel(model()).predict(frame, features=COLUMNS).collect()


@pytest.mark.parametrize(
    ("given", "structure"),
    [(list, list), long(dict, dict), long(list, dict), long(dict, list)],
)
def test_each_output_has_its_own_sample_weights(spark, structure, given):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), name="x")
    outputs = {"high": keras.layers.Dense(1, name="high")(inputs), "low": keras.layers.Dense(2, name="low")(inputs)}
    built = keras.Model(inputs, outputs if structure is dict else list(outputs.values()))
    built.compile("sgd", dict.fromkeys(outputs, "mse") if structure is dict else ["mse", "mse"])
    y, weights = {"high": X[:, 0], "low": X[:, 1:3]}, {"high": X[:, 0], "low": X[:, 1] ** 2}
    frame = wide(spark).withColumn("low", F.array("b", "c")).withColumn("v", F.col("b") * F.col("b"))
    named = {"features": COLUMNS, "label": {"low": "low", "high": "a"}, "sample_weight": {"low": "v", "high": "a"}}
    if given is list:
        named["sample_weight"] = ["a", "v"]
    spark_model = SparkModel(built, seed=3)
    found = spark_model.evaluate(frame, return_dict=True, **named)
    if structure is list:
        y, weights = list(y.values()), list(weights.values())
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


def test_a_data_frame_after_a_shuffle(spark):
    grouped = table(spark).groupBy("id").agg(F.first("features").alias("features"), F.first("label").alias("label"))
    spark_model = SparkModel(model(), seed=4)
    spark_model.fit(grouped, verbose=0)
    assert sum(report["rows"] for report in spark_model.training_histories) == ROWS
    np.testing.assert_allclose(predictions(spark_model.predict(grouped)), spark_model.model.predict(X, verbose=0), atol=1e-6)


@pytest.mark.parametrize("mode", ["asynchronous", long("hogwild")])
def test_asynchronous_training_on_data_frames(spark, mode):
    spark_model = SparkModel(model(), mode=mode, frequency=2, seed=1)
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


@pytest.mark.cluster
@pytest.mark.soak
def test_a_killed_worker_changes_no_bit(spark, tmp_path):
    expected = train(table(spark), epochs=3)
    mark = tmp_path / "killed"
    assert_same_bits(train(table(spark), epochs=3, worker_callbacks=[Kill(str(mark), 1, 2)]), expected)
    assert mark.exists()
    spark_model = SparkModel(model())
    np.testing.assert_allclose(
        predictions(spark_model.predict(table(spark))), spark_model.model.predict(X, verbose=0), atol=1e-6
    )


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


@pytest.mark.parametrize("form", ["array", long("double array"), long("vector"), "mixed vectors", long("mllib"), "bytes"])
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


def test_a_cached_frame_and_a_cached_prediction(spark, tmp_path):
    frame = table(spark).cache()
    scored = SparkModel(regression(width=4)).predict(frame, transform=Noted(str(tmp_path))).cache()
    assert scored.count() == ROWS
    assert scored.where("prediction is not null").count() == ROWS
    assert sum(int(path.read_text()) for path in tmp_path.iterdir()) == ROWS
    scored.unpersist()
    frame.unpersist()


def test_rows_with_nulls_get_null_predictions_or_are_predicted_with_nan(spark):
    spark_model = SparkModel(regression(width=4))
    missing = F.col("id") % 5 == 0  # rows of both partitions, either of which may fail first
    nulls = table(spark, "vector").withColumn("features", F.when(~missing, F.col("features")))
    with pytest.raises(PythonException, match=r"DataError: column 'features' has a null in row 0 of partition [01]"):
        spark_model.predict(nulls).collect()
    found = predictions(spark_model.predict(nulls, on_invalid="null")).astype(float)
    np.testing.assert_array_equal(np.isnan(found), np.arange(ROWS) % 5 == 0)
    all_null = wide(spark).withColumn("b", F.lit(None).cast("double"))
    scored = spark_model.predict(all_null, features=COLUMNS, on_invalid="null")
    assert scored.where("prediction is null").count() == ROWS
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    some = wide(spark).withColumn("b", F.when(F.col("id") >= 14, F.col("b")))
    found = predictions(spark_model.predict(some, features=COLUMNS, on_invalid="null")).astype(float)
    np.testing.assert_allclose(found[14:], spark_model.model.predict(X[14:], verbose=0).ravel(), atol=1e-6)
    assert np.isnan(found[:14]).all()
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
    saved = load_spark_model(tmp_path / "model.keras"), SparkModel.from_checkpoint(tmp_path / "checkpoints")
    for each in (spark_model, *saved):
        with pytest.warns(UserWarning, match=r"^fit had transform=zeros_for_nan, which evaluate does not apply"):
            loss = each.evaluate(frame)
        assert loss == pytest.approx(spark_model.model.evaluate(X, Y, verbose=0), rel=1e-4)
        np.testing.assert_allclose(predictions(each.predict(frame, transform=None)), expected, rtol=1e-4, atol=1e-6)
        with pytest.warns(
            UserWarning, match=r"^features=\['b', 'a', 'c', 'd'\] differs .* fit had features=\['a', 'b', 'c', 'd'\]"
        ):
            each.predict(frame, features=["b", "a", "c", "d"], transform=None)
        with pytest.warns(UserWarning, match="^label='a' differs from the columns .* fit had label='label'"):
            each.evaluate(frame, label="a", transform=None)
        with pytest.raises(
            DataError, match=r"no column 'a'\. .* The columns are those of fit, features=\['a', 'b', 'c', 'd'\]"
        ):
            each.predict(frame.drop("a"), transform=None)
        with pytest.raises(ConfigurationError, match="features= .*is missing"):
            each.predict(frame, features=None, transform=None)
        assert each.predict(X, transform=None).shape == (ROWS, 1)


def two_ended(structure=list):
    keras.utils.set_random_seed(0)
    user, item = keras.Input((2, 1), name="user"), keras.Input((1,), name="item")
    both = keras.layers.Concatenate()([keras.layers.Flatten()(user), item])
    price = keras.layers.Dense(1, name="price")(both)
    kind = keras.layers.Reshape((3, 2), name="kind")(keras.layers.Dense(6)(both))
    outputs = {"price": price, "kind": kind} if structure is dict else [price, kind]
    built = keras.Model([user, item], outputs)
    built.compile("sgd", {"price": "mse", "kind": "mse"} if structure is dict else ["mse", "mse"])
    return built


@pytest.mark.parametrize("structure", [long(list), dict])
def test_several_inputs_and_outputs(sc, spark, structure):
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
    spark_model = SparkModel(two_ended(structure), seed=3)
    spark_model.fit(frame, features=features, epochs=2, batch_size=16, verbose=0)
    of_rows = SparkModel(two_ended(structure), seed=3)
    rows = [
        ({name: part[row] for name, part in x.items()}, {name: part[row] for name, part in y.items()}) for row in range(ROWS)
    ]
    if structure is list:
        rows = [(features_of, tuple(labels.values())) for features_of, labels in rows]
    of_rows.fit(sc.parallelize(rows, 2), epochs=2, batch_size=16, verbose=0)
    assert_same_bits(spark_model.model.get_weights(), of_rows.model.get_weights())
    expected = spark_model.model.predict(x, verbose=0)
    expected = expected if structure is dict else dict(zip(["price", "kind"], expected, strict=True))
    for output_col, names in [
        ("p", {"price": "p_price", "kind": "p_kind"}),
        ({"kind": "the kind", "price": "p.r"}, {"price": "p.r", "kind": "the kind"}),
    ]:
        scored = spark_model.predict(frame, features=features, output_col=output_col)
        assert scored.columns[:5] == frame.columns
        assert set(scored.columns[5:]) == set(names.values())
        ordered = scored.orderBy("id").collect()
        np.testing.assert_allclose([r[names["price"]] for r in ordered], expected["price"].ravel(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose([r[names["kind"]] for r in ordered], expected["kind"], rtol=1e-6, atol=1e-6)


def test_outputs_whose_names_are_one_field_have_their_own_columns(spark):
    x = keras.Input((4,))
    heads = {"b_c": keras.layers.Dense(1)(x), "b": {"c": keras.layers.Dense(2)(x)}}
    model = keras.Model(x, heads)
    scored = SparkModel(model).predict(table(spark), output_col={"b_c": "p1", "b": {"c": "p2"}}).orderBy("id").toPandas()
    expected = model.predict(np.array(scored["features"].tolist()), verbose=0)
    np.testing.assert_allclose(scored["p1"], expected["b_c"].ravel(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scored["p2"].tolist(), expected["b"]["c"], rtol=1e-5, atol=1e-6)


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
    given = spark.createDataFrame(x.assign(label=Y))
    assert sorted(given.columns) == ["a", "b", "c", "d", "label"]
    assert len(train(given, features=COLUMNS)) == 4


def test_an_autoencoder_learns_like_in_keras(spark, sc):
    """From arrays, sparse matrices, rows, one column, and a list of columns that are also the labels."""
    from scipy import sparse

    x = np.random.default_rng(0).random((40, 3)).astype(np.float32) * (np.arange(3) > 0)
    names = ["a", "b", "c"]
    columns = spark.createDataFrame(
        [(*row.tolist(), row.tolist()) for row in x], "a float, b float, c float, features array<float>"
    )
    columns = columns.coalesce(1)

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
        {"data": sc.parallelize([(row, row) for row in x], 1)},
        {"data": columns, "label": "features"},
        {"data": columns, "features": names, "label": names},
    ):
        spark_model = SparkModel(model(), batch_size=8, num_workers=1)
        spark_model.fit(**arguments, epochs=2, shuffle=False, verbose=0)
        for ours, theirs in zip(spark_model.model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    stage = KerasEstimator(model=model(), labelCol="features", batch_size=8, epochs=2, shuffle=False, verbose=0).fit(columns)
    np.testing.assert_allclose(stage.get_model().get_weights()[0], expected.get_weights()[0], atol=1e-5)
