"""Training over several hosts: with default settings, behind firewalls, with hosts that the network cuts off."""

import time

import pytest

from tests.clusters import hosts as network

pytestmark = [pytest.mark.programs, pytest.mark.soak, pytest.mark.timeout(900)]

REASON = network.missing()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if REASON:
        pytest.skip(REASON)
    with network.Hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def spark(hosts, tmp_path_factory):
    with network.cluster(tmp_path_factory.mktemp("cluster"), hosts) as standalone:
        yield standalone


def arrays():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[:1024].astype("float32") / 16, y[:1024]


def compiled(units=32):
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def timed(function):
    """The result of a call or its error, and the seconds that it took."""
    began = time.monotonic()
    try:
        found = {"result": function()}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def train(context, units=32, epochs=2, **options):
    from sparkkeras import SparkModel

    spark_model = SparkModel(compiled(units), num_workers=2, **options)
    return timed(lambda: spark_model.fit(*arrays(), epochs=epochs, verbose=0).history["loss"])


def run(context, **options):
    from sparkkeras import SparkRunner

    return timed(lambda: SparkRunner(2, **options).run(_sum))


def _sum():
    from sparkkeras.runner import context

    return float(context().all_reduce([1.0])[0])


def all_of_it(context):
    return {mode: train(context, mode=mode) for mode in ("synchronous", "asynchronous", "allreduce")} | {
        "runner": run(context)
    }


def test_everything_works_by_default(spark):
    found = spark.run(all_of_it, {})
    assert not [each for each in found.values() if "error" in each], found
