"""Errors that users meet: those on docs/troubleshooting.md, and those about invalid arguments and rows.

Where possible, they are raised before a job starts.
"""

import inspect
import os
import re
import signal
import socket
import sys
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
from hyperopt import hp

from sparkkeras import (
    Checkpoint,
    ConfigurationError,
    DataError,
    DivergenceError,
    ParameterServerOptions,
    SparkModel,
    SparkRunner,
    UnknownArgumentError,
    errors,
    load_spark_model,
    to_simple_rdd,
)
from sparkkeras.hyperopt import HyperParamModel
from sparkkeras.hyperopt.workers import LocalWorkers
from tests.conftest import settle
from tests.integration.faults import jobs_of
from tests.models import classifier, regression
from tests.scripts import ROOT

# The messages on the page

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
X = np.random.default_rng(0).random((64, 3)).astype("float32")
Y = X.sum(axis=1)


def test_each_error_has_a_section_that_begins_with_its_docstring_and_names_its_bases():
    found = re.findall(r"^### (\w+Error)\n\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    sections = {name: " ".join(text.replace("`", "").split()) for name, text in found}
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert sections.keys() == kinds.keys()
    for name, kind in kinds.items():
        first = inspect.getdoc(kind).partition("\n\n")[0].replace("`", "").removesuffix(".")
        assert sections[name].startswith(first), name
        for base in set(kind.__bases__) - {Exception, errors.SparkKerasError}:
            assert base.__name__ in sections[name], name


def rdd(spark):
    return spark.sparkContext.parallelize(list(zip(X, Y, strict=True)), 2)


def too_many_workers(spark, folder):
    SparkModel(regression(), mode="allreduce", num_workers=4).fit(X, Y, verbose=0)


def rule_of_another_mode(spark, folder):
    SparkModel(regression(), rule="easgd")


def misspelled_argument(spark, folder):
    Checkpoint(folder, evry=5)


def not_compiled(spark, folder):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="digits")
    SparkModel(model).fit(X, Y)


def lambda_as_loss(spark, folder):
    SparkModel(regression(loss=lambda true, predicted: keras.ops.mean((true - predicted) ** 2))).fit(X, Y, verbose=0)


def lock_in_a_function(spark, folder):
    lock = threading.Lock()

    def transform(x, y):
        with lock:
            return x, y

    SparkModel(regression()).fit(X, Y, transform=transform, verbose=0)


def wrong_shape(spark, folder):
    SparkModel(regression()).fit(X[:, :2], Y, verbose=0)


def null_in_a_column(spark, folder):
    rows = [([1.0, 2.0, 3.0], 1.0), ([1.0, None, 3.0], 0.0)]
    df = spark.createDataFrame(spark.sparkContext.parallelize(rows, 2), "features array<double>, label double")
    SparkModel(regression()).fit(df, verbose=0)


def nan_in_an_array(spark, folder):
    x = X.copy()
    x[5, 1] = np.nan
    SparkModel(regression()).fit(x, Y, verbose=0)


def too_large_learning_rate(spark, folder):
    model = regression(optimizer=keras.optimizers.SGD(1e30))
    SparkModel(model, num_workers=2).fit(X, Y, epochs=3, verbose=0)


def unreachable_driver(spark, folder):
    # The address answers at once that nothing listens there.
    options = ParameterServerOptions(host="127.0.0.2", bind="127.0.0.1", timeout=3)
    SparkModel(regression(), mode="asynchronous", num_workers=2, server_options=options).fit(X, Y, verbose=0)


def error_in_a_transform(spark, folder):
    def decode(x, y):
        if x.any():
            raise ValueError("unknown format of row 17")
        return x, y

    SparkModel(regression()).fit(rdd(spark), transform=decode, verbose=0)


def another_python_version(spark, folder):
    with mock.patch.object(spark.sparkContext, "pythonVer", "3.0"):
        SparkModel(regression()).fit(rdd(spark), verbose=0)


def killed_worker(spark, folder):
    def decode(x, y):
        if x.any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x, y

    SparkModel(regression()).predict(rdd(spark), transform=decode)


def sleeping_ranks(spark, folder):
    SparkRunner(2, local_mode=True).run(time.sleep, 60, timeout=1)


def sigterm(spark, folder):
    class Terminate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    model = SparkModel(regression())
    model.fit(X, Y, epochs=5, checkpoint=Checkpoint(folder), callbacks=[Terminate()], verbose=0)


def failing_trials(spark, folder):
    def build(params):
        raise ValueError("units must be positive")

    search = HyperParamModel(LocalWorkers())
    search.minimize(model=build, data=(X, Y), space={"units": hp.choice("units", [-1])}, max_evals=4, verbose=0)


def missing_file(spark, folder):
    load_spark_model("/data/digits.keras")


def missing_checkpoint(spark, folder):
    SparkModel.from_checkpoint("/data/run")


RAISED = [
    (errors.ConfigurationError, too_many_workers),
    (errors.ConfigurationError, rule_of_another_mode),
    (errors.UnknownArgumentError, misspelled_argument),
    (errors.ModelError, not_compiled),
    (errors.CustomObjectError, lambda_as_loss),
    (errors.CustomObjectError, lock_in_a_function),
    (errors.DataError, wrong_shape),
    (errors.DataError, null_in_a_column),
    (errors.DataError, nan_in_an_array),
    pytest.param(
        errors.DivergenceError,
        too_large_learning_rate,
        marks=pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # NumPy's, about inf - inf
    ),
    (errors.ClusterError, another_python_version),
    (errors.DriverConnectionError, unreachable_driver),
    (errors.WorkerError, error_in_a_transform),
    (errors.WorkerError, killed_worker),
    (errors.WorkerTimeoutError, sleeping_ranks),
    (errors.TrainingInterruptedError, sigterm),
    (errors.SearchError, failing_trials),
    (errors.StorageError, missing_file),
    (errors.StorageError, missing_checkpoint),
]


@pytest.mark.parametrize(("kind", "cause"), RAISED, ids=lambda value: getattr(value, "__name__", None))
def test_the_page_shows_the_message(kind, cause, spark, tmp_path):
    """The section of an error shows the beginning of the message, apart from what depends on the machine."""
    with pytest.raises(kind) as raised:
        cause(spark, str(tmp_path))
    assert type(raised.value) is kind
    message = str(raised.value)
    for here, there in (
        (socket.gethostname(), "worker-1"),
        (sys.executable, "/opt/venv/bin/python"),
        (".".join(map(str, sys.version_info[:3])), "3.11.7"),
        ("127.0.0.2", "192.0.2.1"),
        (str(tmp_path), "/data/run"),
        ("failed on a worker:", "failed on worker-1:"),  # a local master names no host
        ("Spark's workers run", "Spark's workers on worker-1 run"),
    ):
        message = message.replace(here, there)
    message = re.sub(r":\d{4,5}\b", ":41343", message)
    message = re.sub(r"\d+\.\d of \d+\.\d GB", "12.4 of 15.6 GB", message)
    message = re.sub(r"(checkpoint-\d+)-\w+", r"\1-4b31108c", message)
    section = PAGE.partition(f"\n### {kind.__name__}\n")[2].partition("\n### ")[0]
    shown = [" ".join(text.split()) for text in re.findall(r"^```output\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]
    found = " ".join(message.split())
    assert any(found.startswith(text) for text in shown), f"not in the section of the page: {found}"


# Arguments


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


@pytest.fixture
def not_run(sc):
    """Fails the test if a job starts."""
    with jobs_of(sc) as jobs:
        yield
    assert jobs == []


@pytest.mark.parametrize(  # tests/test_spark_model.py has the others
    ("arguments", "words"),
    [
        ({"parameter_server_mode": "inprocess"}, "parameter_server_mode='inprocess'"),
        ({"rule": "eamsgd", "mode": "asynchronous"}, "Nesterov momentum, received Adam"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_arguments_of_the_model(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        SparkModel(classifier(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"validation_split": 1.0}, "validation_split=1.0"),
        ({"validation_split": 0.1, "validation_data": (1, 2)}, "only one of validation_split"),
        ({"validation_data": (1, 2, 3, 4)}, "tuple of 4"),
        ({"validation_data": "foo"}, "validation_data is str"),
        ({"verbose": 3}, "verbose=3"),
        ({"class_weight": {0: 2.0}, "sample_weight": np.ones(60)}, "class_weight and sample weights"),
        ({"callbacks": [print]}, "expected keras.callbacks.Callback"),
        ({"worker_callbacks": [print]}, "worker_callbacks: expected"),
        ({"callbacks": [keras.callbacks.History]}, "History is a class"),
        ({"callbacks": [keras.callbacks.ModelCheckpoint("a.keras", save_freq=5)]}, "save_freq=5"),
        ({"callbacks": [keras.callbacks.TensorBoard("logs", update_freq="batch")]}, "update_freq=1"),
    ],
)
def test_arguments_of_fit(spark_model, arrays, not_run, arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        spark_model.fit(*arrays, **arguments)


def test_unknown_arguments_are_reported_with_the_known_ones(spark_model, arrays):
    for call in (SparkModel, spark_model.fit, spark_model.evaluate, spark_model.predict, ParameterServerOptions):
        with pytest.raises(UnknownArgumentError, match="'surplus'. Known: "):
            call(surplus=1)


def test_arguments_that_the_model_or_the_data_exclude(sc, spark_model, rows, arrays):
    x, y = arrays
    inputs = keras.Input((64,))
    model = keras.Model(inputs, [keras.layers.Dense(10, activation="softmax")(inputs) for _ in range(2)])
    model.compile("sgd", ["sparse_categorical_crossentropy"] * 2)
    with pytest.raises(ConfigurationError, match="several outputs"):
        SparkModel(model).fit(x, (y, y), class_weight={0: 2.0})
    with pytest.raises(ConfigurationError, match="only for arrays"):
        spark_model.fit(sc.parallelize(rows, 2), y)
    with pytest.raises(ConfigurationError, match="num_slices=0"):
        to_simple_rdd(sc, x, y, num_slices=0)


# Rows


def test_arrays(spark_model, arrays, not_run):
    x, y = arrays
    for given, words in [
        ((x,), "labels are missing"),
        ((x[:0], y[:0]), "no rows"),
        ((x, y[:10]), "60 rows, y has 10"),
        ((x, y + 5), "they range from 5"),
        (("file.csv", y), "data is str"),
    ]:
        with pytest.raises(DataError, match=words):
            spark_model.fit(*given)


def test_rdds(sc, spark_model, rows):
    for given, words in [
        ([1, 2, 3], "row 0 .* expected a pair"),
        ([(x[:5], y) for x, y in rows], r"\(64,\), .* \(5,\)"),
        ([(x, y + 9) for x, y in rows], "range from"),
        ([(x[: 64 - 60 * (i >= 30)], y) for i, (x, y) in enumerate(rows)], "another shape|partitions differ"),
    ]:
        with pytest.raises(DataError, match=words):
            spark_model.fit(sc.parallelize(given, 2))
    with pytest.raises(DataError, match=r"\(64,\), .* \(5,\)"):
        spark_model.fit(sc.parallelize(rows, 2), transform=lambda x, y: (x[:, :5], y))


def with_nan(rows, index):
    return [*rows[:index], (np.full(64, np.nan, np.float32), 1), *rows[index + 1 :]]


def test_rows_that_are_not_finite_can_be_dropped_or_allowed(sc, spark_model, rows):
    broken = sc.parallelize(with_nan(rows, 3), 2)
    spark_model.fit(broken, on_invalid="drop", verbose=0)
    assert sum(report["rows"] for report in spark_model.training_histories) == 59
    with pytest.raises(DivergenceError, match="on worker 0"):
        spark_model.fit(broken, on_invalid="allow", verbose=0)


def test_invalid_rows_do_not_fail_tasks(sc, rows, spark_model):
    """Spark would log the error of each attempt, and end the Python worker."""
    invalid = sc.parallelize(with_nan(rows, 40), 2)
    with jobs_of(sc) as jobs:
        for call in (spark_model.evaluate, spark_model.predict, spark_model.fit):
            with pytest.raises(DataError, match="row 10 of partition 1"):
                call(invalid)
    settle(sc)
    assert {sc.statusTracker().getJobInfo(job).status for job in jobs} == {"SUCCEEDED"}


def test_evaluate_and_predict(sc, spark_model, rows, arrays):
    x, _ = arrays
    for call, data, words in [
        (spark_model.evaluate, sc.parallelize([(a, b + 9) for a, b in rows], 2), "range from"),
        (spark_model.predict, x[0], r"x\[None\]"),
        (spark_model.predict, sc.parallelize(list(x[:, :4]), 2), "received rows of shape"),
        (spark_model.predict, sc.parallelize([None], 1), "None"),
    ]:
        with pytest.raises(DataError, match=words):
            call(data)


def test_missing_labels_of_a_data_frame_are_reported_before_a_job(spark, request):
    inputs = keras.Input((1,), name="x")
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")})
    model.compile("sgd", "mse")
    frame = spark.createDataFrame([(0.5, 1.0)], "x double, a double")
    spark_model = SparkModel(model)
    spark_model.predict(frame)  # the workers are checked in the first call
    request.getfixturevalue("not_run")
    with pytest.raises(DataError, match="missing for 'b'"):
        spark_model.fit(frame, features="x", label={"a": "a"})
