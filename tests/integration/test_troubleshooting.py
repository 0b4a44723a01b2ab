"""docs/troubleshooting.md has a section for each error, with the messages that are raised."""

import os
import re
import signal
import socket
import sys
import threading
import time

import keras
import numpy as np
import pytest
from hyperopt import hp

from sparkkeras import Checkpoint, ParameterServerOptions, SparkModel, SparkRunner, errors, load_spark_model
from sparkkeras.hyperopt import HyperParamModel
from tests.models import regression
from tests.scripts import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
X = np.random.default_rng(0).random((64, 3)).astype("float32")
Y = X.sum(axis=1)


def test_each_error_has_a_section():
    documented = re.findall(r"^### (\w+Error)$", PAGE, re.MULTILINE)
    assert set(documented) == {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and name in errors.__doc__
    }


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
    options = ParameterServerOptions(
        host="127.0.0.2", bind="127.0.0.1", timeout=3
    )  # answers at once that nothing listens there
    SparkModel(regression(), mode="asynchronous", num_workers=2, server_options=options).fit(X, Y, verbose=0)


def error_in_a_transform(spark, folder):
    def decode(x, y):
        if x.any():
            raise ValueError("unknown format of row 17")
        return x, y

    rows = spark.sparkContext.parallelize(list(zip(X, Y, strict=True)), 2)
    SparkModel(regression()).fit(rows, transform=decode, verbose=0)


def killed_worker(spark, folder):
    def decode(x, y):
        if x.any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x, y

    rows = spark.sparkContext.parallelize(list(zip(X, Y, strict=True)), 2)
    SparkModel(regression()).fit(rows, transform=decode, verbose=0)


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

    search = HyperParamModel(spark.sparkContext, num_workers=2)
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
    with pytest.raises(kind) as raised:
        cause(spark, str(tmp_path))
    assert type(raised.value) is kind
    check(str(raised.value), kind, str(tmp_path))


def test_the_page_shows_the_message_about_another_python_version(spark, monkeypatch):
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.0")
    with pytest.raises(errors.ClusterError) as raised:
        SparkModel(regression()).fit(spark.sparkContext.parallelize(list(zip(X, Y, strict=True)), 2), verbose=0)
    check(str(raised.value), errors.ClusterError)


def check(message, kind, folder="/data/run"):
    """Check that the section of an error shows the beginning of a message, apart from what depends on the machine."""
    for here, there in (
        (socket.gethostname(), "worker-1"),
        (sys.executable, "/opt/venv/bin/python"),
        (".".join(map(str, sys.version_info[:3])), "3.11.7"),
        ("127.0.0.2", "192.0.2.1"),
        (folder, "/data/run"),
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
