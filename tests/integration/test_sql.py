"""Models as functions of columns and as SQL functions."""

import keras
import numpy as np
import pyspark
import pytest
from pyspark.errors import PythonException
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from sparkkeras import (
    ConfigurationError,
    DataError,
    ModelError,
    SparkModel,
    UnknownArgumentError,
    keras_udf,
    register_keras_udf,
)
from sparkkeras.spark.job_errors import translated
from tests.models import regression

X = np.random.default_rng(0).random((30, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    return regression()


@pytest.fixture
def frame(spark):
    """A DataFrame with id, the numbers a, b and c, and these three as an array and as a vector."""
    rows = [(row, *map(float, x), x.tolist(), Vectors.dense(x)) for row, x in enumerate(X)]
    made = spark.createDataFrame(spark.sparkContext.parallelize(rows, 3), ["id", "a", "b", "c", "features", "v"])
    made.createOrReplaceTempView("measurements")
    return made


def values(scored, name="p"):
    return np.array([row[name] for row in scored.orderBy("id").collect()])


def expected(model):
    return model.predict(X, verbose=0).ravel()


def close(mine, other):
    np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


def test_a_model_is_a_function_of_columns(model, frame):
    predict = keras_udf(model, batch_size=7)
    for columns in [("features",), (frame.v,), ("a", frame["b"], F.col("c")), (F.array("a", F.col("b") * 1, "c"),)]:
        scored = frame.select("id", predict(*columns).alias("p"))
        assert scored.schema["p"].dataType.simpleString() == "float"
        close(values(scored), expected(model))


def test_one_column_as_a_number_and_as_an_array_in_one_session(frame):
    """In the same processes, with the shape that the model declares in each of them."""
    own = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    predictions, function = SparkModel(own), keras_udf(own)
    wanted = own.predict(X[:, :1], verbose=0)
    for scored in (
        predictions.predict(frame, features="a", output_col="p"),
        predictions.predict(frame, features=["a"], output_col="p"),
        frame.withColumn("p", function("a")),
        frame.withColumn("p", function(F.array("a"))),
    ):
        close(values(scored), wanted.ravel())
    for rows in (X[:, 0], X[:, :1]):
        close(predictions.predict(rows), wanted)


def test_later_changes_to_the_model_do_not_affect_the_function(frame):
    own = regression()
    before = expected(own)
    predict = keras_udf(own)
    own.set_weights([weight * 0 for weight in own.get_weights()])
    close(values(frame.withColumn("p", predict("features"))), before)


def test_a_model_is_a_function_of_sql(spark, model, frame):
    returned = register_keras_udf(spark, "appraise", model)
    close(values(spark.sql("SELECT id, APPRAISE(a, b, c) AS p FROM measurements")), expected(model))
    close(values(frame.withColumn("p", returned("v"))), expected(model))
    middle = float(np.median(expected(model)))
    found = spark.sql(f"SELECT id FROM measurements WHERE appraise(features) > {middle} ORDER BY appraise(v)").collect()
    order = np.argsort(expected(model), kind="stable")
    assert [row.id for row in found] == [row for row in order if expected(model)[row] > middle]
    mean = spark.sql("SELECT avg(appraise(features)) AS p, id % 2 AS id FROM measurements GROUP BY id % 2")
    close(values(mean), [expected(model)[::2].mean(), expected(model)[1::2].mean()])


def test_two_models_in_one_query(spark, model, frame):
    register_keras_udf(spark, "one", model)
    register_keras_udf(spark, "two", regression(seed=5))
    scored = spark.sql("SELECT id, two(features) AS q, one(array(two(features), 0.0, 0.0)) AS p FROM measurements")
    second = expected(regression(seed=5))
    close(values(scored, "q"), second)
    close(values(scored), model.predict(np.stack([second, second * 0, second * 0], axis=1), verbose=0).ravel())


def test_rows_with_nulls_get_null_or_are_rejected(spark, model, frame):
    frame.withColumn("b", F.when(F.col("id") % 3 > 0, F.col("b"))).createOrReplaceTempView("gaps")
    register_keras_udf(spark, "lenient", model)
    register_keras_udf(spark, "strict", model, on_invalid="error")
    found = values(spark.sql("SELECT id, lenient(a, b, c) AS p FROM gaps")).astype(float)
    close(found, np.where(np.arange(len(X)) % 3 > 0, expected(model), np.nan))
    assert spark.sql("SELECT lenient(1, NULL, 2) AS p, lenient(NULL) AS q").first().asDict() == {"p": None, "q": None}
    with pytest.raises(PythonException, match=r"DataError: argument 2 of strict\(\) has a null"):
        spark.sql("SELECT strict(a, b, c) FROM gaps").collect()


def test_invalid_arguments_are_reported_immediately(spark, model):
    for name in ("two words", 3):
        with pytest.raises(ConfigurationError, match="expected a name of letters, digits and underscores"):
            register_keras_udf(spark, name, model)
    with pytest.raises(ConfigurationError, match="on_invalid"):
        keras_udf(model, on_invalid="drop")
    with pytest.raises(UnknownArgumentError, match="Did you mean 'batch_size'"):
        keras_udf(model, batchsize=3)
    with pytest.raises(ModelError, match="expected a keras.Model"):
        keras_udf("model")
    with pytest.raises(ConfigurationError, match=r"^counted\(\) takes 3 numbers, or arrays or .*; it received 4"):
        register_keras_udf(spark, "counted", model)("a", "b", "c", "d")


def test_a_built_in_function_of_spark_is_not_hidden(spark, model):
    """SQL would still call Spark's function after the registration."""
    with pytest.raises(ConfigurationError, match="name='Upper': Spark has a built-in function of this name"):
        register_keras_udf(spark, "Upper", model)
    register_keras_udf(spark, "upper_bound", model)
    register_keras_udf(spark, "upper_bound", model)  # a registered one is replaced


def test_invalid_arguments_in_sql_are_reported_in_one_line(spark, model, frame):
    register_keras_udf(spark, "handed", model)
    for arguments, words in {
        "": "handed() takes 3 numbers, or arrays or vectors that hold as many in all; it received 0 arguments.",
        "a, b": "the arguments of handed() do not fit the model's input",
    }.items():
        if not arguments and pyspark.__version__ < "4.2":
            continue  # PySpark fails before it calls the function
        with pytest.raises(PythonException) as error:
            spark.sql(f"SELECT handed({arguments}) FROM measurements").collect()
        assert f"sparkkeras.errors.DataError: {words}" in str(error.value)
        assert "Traceback" not in str(error.value)
        assert isinstance(translated(error.value), DataError)
