"""Invalid arguments and data raise specific errors with helpful messages, before a job starts where possible."""

import threading

import keras
import numpy as np
import pytest

from sparkkeras import (
    ConfigurationError,
    CustomObjectError,
    DataError,
    DivergenceError,
    ModelError,
    ParameterServerOptions,
    SparkModel,
    UnknownArgumentError,
    WorkerError,
    to_simple_rdd,
)
from tests.models import classifier


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    return generator.random((60, 64)).astype(np.float32), generator.integers(0, 10, 60)


@pytest.fixture
def rows(arrays):
    return list(zip(*arrays, strict=True))


@pytest.fixture
def spark_model():
    return SparkModel(classifier(), num_workers=None)


def with_row(rows, index, row):
    return [*rows[:index], row, *rows[index + 1 :]]


class NotRun:
    """Fails the test if a job starts."""

    def __init__(self, sc):
        self._sc = sc

    def __enter__(self):
        self._sc.setJobGroup("not-run", "must stay empty")

    def __exit__(self, *_):
        jobs = self._sc.statusTracker().getJobIdsForGroup("not-run")
        self._sc.setLocalProperty("spark.jobGroup.id", None)
        assert not list(jobs)


@pytest.mark.parametrize(  # tests/test_spark_model.py has the others
    ("arguments", "words"),
    [
        ({"mode": "asynchron"}, "Did you mean 'asynchronous'"),
        ({"parameter_server_mode": "inprocess"}, "parameter_server_mode='inprocess' is not known"),
        ({"rule": "easgd"}, "rule 'easgd' does not fit mode='synchronous'"),
        ({"rule": "eamsgd", "mode": "asynchronous"}, "'eamsgd' needs an optimizer with Nesterov momentum, received Adam"),
        ({"num_workers": 0}, "num_workers=0: expected a positive whole number or None"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_arguments_of_the_model(arguments, words):
    with pytest.raises(ConfigurationError, match=words) as raised:
        SparkModel(classifier(), **arguments)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"validation_split": 1.0}, "validation_split=1.0"),
        ({"validation_split": 0.1, "validation_data": (1, 2)}, "pass only one of validation_split, validation_data and"),
        ({"validation_data": (1, 2, 3, 4)}, "tuple of 4"),
        ({"validation_data": "foo"}, "validation_data is str"),
        ({"validation_freq": 0}, "validation_freq=0"),
        ({"initial_epoch": -1}, "initial_epoch=-1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"on_invalid": "skip"}, "on_invalid"),
        ({"verbose": 3}, "verbose=3"),
        ({"class_weight": {0: -1.0}}, "class_weight.*finite weights of at least 0"),
        ({"class_weight": {0: 2.0}, "sample_weight": np.ones(60)}, "class_weight and sample weights"),
        ({"callbacks": [print]}, "expected keras.callbacks.Callback"),
        ({"worker_callbacks": [print]}, "worker_callbacks: expected"),
        ({"callbacks": [keras.callbacks.History]}, "History is a class; expected an object"),
        ({"callbacks": [keras.callbacks.ModelCheckpoint("a.keras", save_freq=5)]}, "save_freq=5"),
        ({"callbacks": [keras.callbacks.TensorBoard("logs", update_freq="batch")]}, "update_freq=1"),
    ],
)
def test_arguments_of_fit(sc, spark_model, arrays, arguments, words):
    with NotRun(sc), pytest.raises(ConfigurationError, match=words):
        spark_model.fit(*arrays, **arguments)


def test_unknown_arguments_are_reported_with_the_known_ones(spark_model, arrays):
    for call in (
        lambda: SparkModel(classifier(), surplus=1),
        lambda: spark_model.fit(*arrays, surplus=1),
        lambda: spark_model.evaluate(*arrays, surplus=1),
        lambda: spark_model.predict(arrays[0], surplus=1),
        lambda: ParameterServerOptions(surplus="driver"),
    ):
        with pytest.raises(UnknownArgumentError, match="takes no argument 'surplus'. Known: "):
            call()


def test_a_model_that_is_not_compiled_can_be_neither_fitted_nor_evaluated():
    scoring = SparkModel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    for call in (scoring.fit, scoring.evaluate):
        with pytest.raises(ModelError, match="not compiled: call model.compile"):
            call(np.zeros((4, 3)), np.zeros(4))


def test_arrays(sc, spark_model, arrays):
    x, y = arrays
    broken = x.copy()
    broken[7, 3] = np.inf
    with NotRun(sc):
        for given, words in [
            ((x,), "labels are missing"),
            ((x[:0], y[:0]), "no rows"),
            ((x, y[:10]), "x has 60 rows, y has 10 rows"),
            ((x[:, :10], y), r"input 'pixels': it expects rows of shape \(64,\), received rows of shape \(10,\)"),
            ((broken, y), "row 7 of the arrays"),
            ((x, y + 5), "from 0 to 9, but they range from 5"),
            (("file.csv", y), "data is str"),
        ]:
            with pytest.raises(DataError, match=words):
                spark_model.fit(*given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rows: [1, 2, 3], "row 0 of partition 0 is int 1; expected a pair"),
        (lambda rows: [], "no rows"),
        (lambda rows: [(x[:5], y) for x, y in rows], r"expects rows of shape \(64,\), received rows of shape \(5,\)"),
        (lambda rows: [(x, y + 9) for x, y in rows], "range from"),
        (lambda rows: with_row(rows, 45, (np.zeros(5), 1)), "x of row 15 of partition 1 has another shape"),
        (lambda rows: [(x[: 64 - 60 * (i >= 30)], y) for i, (x, y) in enumerate(rows)], "another shape|partitions differ"),
    ],
)
def test_rdds(sc, spark_model, rows, make, words):
    with pytest.raises(DataError, match=words):
        spark_model.fit(sc.parallelize(make(rows), 2))


def test_rows_that_are_not_finite_can_be_dropped_or_allowed(sc, spark_model, rows):
    broken = with_row(rows, 3, (np.full(64, np.nan, np.float32), 1))
    spark_model.fit(sc.parallelize(broken, 2), on_invalid="drop", verbose=0)
    assert sum(report["rows"] for report in spark_model.training_histories) == 59
    with pytest.raises(DivergenceError, match="epoch 1 on worker 0"):
        spark_model.fit(sc.parallelize(broken, 2), on_invalid="allow", verbose=0)


def test_labels_with_an_rdd_are_reported(sc, spark_model, rows, arrays):
    with pytest.raises(ConfigurationError, match="are only for arrays"):
        spark_model.fit(sc.parallelize(rows, 2), arrays[1])


def test_class_weight_excludes_several_outputs(sc, arrays):
    x, y = arrays
    inputs = keras.Input((64,))
    model = keras.Model(inputs, [keras.layers.Dense(10, activation="softmax")(inputs) for _ in range(2)])
    model.compile("sgd", ["sparse_categorical_crossentropy"] * 2)
    with pytest.raises(ConfigurationError, match="several outputs"):
        SparkModel(model).fit(x, (y, y), class_weight={0: 2.0})


def test_objects_that_cannot_be_pickled_are_named(sc, spark_model, rows):
    lock = threading.Lock()

    def transform(x, y):
        with lock:
            return x, y

    class Held(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.held = threading.Lock()

    with pytest.raises(CustomObjectError, match="transform cannot be sent.*lock"):
        spark_model.fit(sc.parallelize(rows, 2), transform=transform)
    with pytest.raises(CustomObjectError, match=r"worker_callbacks\[1\].*Held"):
        spark_model.fit(sc.parallelize(rows, 2), worker_callbacks=[keras.callbacks.Callback(), Held()])


def test_transforms(sc, spark_model, rows):
    rdd = sc.parallelize(rows, 2)
    for transform, words in [
        (lambda x, y: (x[:, :5], y), r"expects rows of shape \(64,\), received rows of shape \(5,\)"),
        (lambda x, y: x, "must return .x, y."),
        (lambda x, y: (x / undefined, y), "NameError"),  # noqa: F821
    ]:
        with pytest.raises((DataError, ConfigurationError), match=words):
            spark_model.fit(rdd, transform=transform)


def test_a_workers_traceback_is_in_the_message(sc, spark_model, rows):
    def explode(row):
        raise RuntimeError("kaboom in my map")

    class Explode(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("kaboom in my callback")

    before = spark_model.model.get_weights()
    with pytest.raises(WorkerError, match="kaboom in my map") as raised:
        spark_model.fit(sc.parallelize(rows, 2).map(explode))
    assert "in explode" in raised.value.worker_traceback
    with pytest.raises(WorkerError, match="kaboom in my callback") as raised:
        spark_model.fit(sc.parallelize(rows, 2), worker_callbacks=[Explode()], verbose=0)
    assert "on_epoch_end" in str(raised.value)
    assert raised.value.__cause__ is not None
    for mine, other in zip(spark_model.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    spark_model.fit(sc.parallelize(rows, 2), verbose=0)


def test_evaluate_and_predict(sc, spark_model, rows, arrays):
    x, y = arrays
    for given, words in [
        ((sc.parallelize([], 2),), "no rows"),
        ((sc.parallelize([(a, b + 9) for a, b in rows], 2),), "range from"),
        ((x, y + 9), "range from"),
        ((x[:0], y[:0]), "no rows"),
    ]:
        with pytest.raises(DataError, match=words):
            spark_model.evaluate(*given)
    for data, words in [
        (x[:, :4], "received rows of shape"),
        (x[0], r"x\[None\]"),
        (sc.parallelize(list(x[:, :4]), 2), "received rows of shape"),
        (sc.parallelize([None], 1), "None"),
    ]:
        with pytest.raises(DataError, match=words):
            spark_model.predict(data)


def test_helpers(sc, arrays):
    x, y = arrays
    with pytest.raises(DataError, match="same number of rows"):
        to_simple_rdd(sc, x, y[:5])
    with pytest.raises(DataError, match="no rows"):
        to_simple_rdd(sc, x[:0], y[:0])
    with pytest.raises(ConfigurationError, match="num_slices=0"):
        to_simple_rdd(sc, x, y, num_slices=0)


def test_invalid_rows_do_not_fail_tasks(sc, rows, spark_model):
    """Spark would log the error of each attempt, and end the Python worker."""
    invalid = sc.parallelize(with_row(rows, 40, (np.full(64, np.nan, np.float32), 3)), 2)
    sc.setJobGroup("invalid", "")
    try:
        for call in (spark_model.evaluate, spark_model.predict, spark_model.fit):
            with pytest.raises(DataError, match="NaN or an infinite value in row 10 of partition 1"):
                call(invalid)
        jobs = sc.statusTracker().getJobIdsForGroup("invalid")
        statuses = {"RUNNING"}
        while "RUNNING" in statuses:  # Spark updates them asynchronously
            statuses = {sc.statusTracker().getJobInfo(job).status for job in jobs}
        assert statuses == {"SUCCEEDED"}
    finally:
        sc.setLocalProperty("spark.jobGroup.id", None)


def test_missing_labels_of_a_data_frame_are_reported_before_a_job(sc, spark):
    inputs = keras.Input((1,), name="x")
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")})
    model.compile("sgd", "mse")
    frame = spark.createDataFrame([(0.5, 1.0)], "x double, a double")
    spark_model = SparkModel(model)
    spark_model.predict(frame)  # the workers are checked in the first call
    with NotRun(sc), pytest.raises(DataError, match="labels are missing for 'b': every output with a loss"):
        spark_model.fit(frame, features="x", label={"a": "a"})
