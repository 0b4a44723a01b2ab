"""Training over several hosts: with default settings, behind firewalls, with hosts that the network cuts off."""

import os
import subprocess
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clusters import hosts as network

REASON = network.missing()

pytestmark = [
    pytest.mark.programs,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(REASON), reason=REASON),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
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


def train(context, units=32, epochs=2, callbacks=(), **options):
    from sparkkeras import SparkModel

    spark_model = SparkModel(compiled(units), num_workers=2, seed=1, **options)
    fit = {"epochs": epochs, "verbose": 0, "callbacks": list(callbacks)}
    return timed(lambda: spark_model.fit(*arrays(), **fit).history["loss"])


def run(context, **options):
    from sparkkeras import SparkRunner

    return timed(lambda: SparkRunner(2, **options).run(_sum))


def _sum():
    from sparkkeras.runner import context

    return float(context().all_reduce([1.0])[0])


def train_while_cut(context, marker, mode, **options):
    """Train 12 epochs, each of two seconds at least; the marker exists after the third one."""
    import keras

    class Marker(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            time.sleep(2)
            if epoch == 2:
                Path(marker).touch()

    return train(context, mode=mode, epochs=12, callbacks=[Marker()], **options)


def warned(context, **options):
    """The first warning of training that has to be stopped, and the seconds until it came."""
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        ended = []
        threading.Thread(target=lambda: ended.append(train(context, **options)), daemon=True).start()
        while not (caught or ended) and time.monotonic() < began + 120:
            time.sleep(0.1)
    seconds = round(time.monotonic() - began, 1)
    return {"warnings": [str(each.message) for each in caught], "seconds": seconds, "ended": ended}


def search(context, port=0):
    from pyspark.sql import SparkSession

    from sparkkeras.hyperopt import HyperParamModel, choice

    given = {"model": build, "data": arrays(), "space": {"units": choice(16, 32)}, "max_evals": 4, "validation_split": 0.2}
    found = HyperParamModel(SparkSession(context), port=port)
    return timed(lambda: found.minimize(**given, epochs=2, seed=1, verbose=0) and len(found.trials))


def build(params):
    return compiled(params["units"])


def watched(context, url):
    """Train with a page that other hosts can open, whose address is in a file, until that is removed."""
    from sparkkeras import Monitor

    with Monitor(host="driver", verbose=False) as monitor:
        found = train(context, callbacks=[monitor])
        Path(url).write_text(monitor.url)
        while Path(url).exists():
            time.sleep(0.1)
    return found


def examined(context, port):
    """The errors that the doctor finds."""
    from pyspark.sql import SparkSession

    from sparkkeras import diagnose

    return [str(finding) for finding in diagnose(SparkSession(context), port=port).errors]


def diagnosed(context, port=0):
    def check():
        errors = examined(context, port)
        assert not errors, "\n".join(errors)

    return timed(check)


def all_of_it(context, port=0):
    modes = ("synchronous", "asynchronous", "allreduce")
    found = {mode: train(context, mode=mode, **({"port": port} if port else {})) for mode in modes}
    return found | {
        "runner": run(context, port=port),
        "search": search(context, port),
        "doctor": diagnosed(context, port),
    }


def check_success(found):
    assert not [each for each in found.values() if "error" in each], found


PORT = 35002
WORKER_PORTS = "36000-36003"
SETTINGS = network.SPARK_PORTS | {"spark.sparkkeras.worker.ports": WORKER_PORTS}


def close_all_but_documented(hosts, *worker_ports, driver=(PORT,), spark=("driver", *network.WORKERS), rejects=False):
    """Open the ports that docs/settings.md names, and no others."""
    hosts.allow("driver", *((port, network.WORKERS) for port in ("35000", "35001", *driver)), ("35000", ("master",)))
    for worker in network.WORKERS:
        hosts.allow(worker, ("35010", spark), *((port, network.WORKERS) for port in worker_ports), rejects=rejects)


@pytest.fixture
def firewall(hosts):
    yield lambda *ports, **more: close_all_but_documented(hosts, *ports, **more)
    for host in ("driver", *network.WORKERS):
        hosts.open(host)


def test_everything_works_by_default(spark):
    check_success(spark.run(all_of_it, {}, seconds=600))


def test_another_host_opens_the_page_of_a_monitor(spark, hosts, tmp_path):
    url = tmp_path / "url"
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(spark.run, watched, {}, url=str(url))
        while not (running.done() or (url.exists() and url.read_text())):
            time.sleep(0.1)
        if running.done():
            check_success({"": running.result()})
        read = [*hosts.command("worker1"), "curl", "--silent", "--show-error", "--max-time", "10", url.read_text()]
        page = subprocess.run(read, capture_output=True, text=True)
        url.unlink()
        check_success({"": running.result()})
    assert "<title>" in page.stdout, page


def test_everything_works_behind_nat(tmp_path):
    """The driver listens at another address than the one that workers connect to."""
    own = f"{network.OTHER_NETWORK}1"
    with network.Hosts(tmp_path, interfaces={"driver": own}) as made, network.cluster(tmp_path, made) as spark:
        made.translate("driver", f"35000-{PORT}")
        settings = network.SPARK_PORTS | {"spark.driver.host": f"{network.NETWORK}1", "spark.driver.bindAddress": own}
        check_success(spark.run(all_of_it, settings, seconds=600, port=PORT))


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_everything_works_with_ipv6_only(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("SPARK_PREFER_IPV6", "true")
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", f"{os.environ['SPARK_SUBMIT_OPTS']} -Djava.net.preferIPv6Addresses=true")
    with network.Hosts(tmp_path, network.IPV6_ADDRESSES) as made, network.cluster(tmp_path, made) as spark:
        check_success(spark.run(all_of_it, {}, seconds=600))


@pytest.mark.parametrize(("backend", "ports"), [("tensorflow", ()), ("jax", ("32768-60999",)), ("torch", ("32768-60999",))])
def test_everything_works_behind_a_firewall(spark, firewall, monkeypatch, backend, ports):
    firewall(WORKER_PORTS, *ports)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    check_success(spark.run(all_of_it, SETTINGS, seconds=600, port=PORT))


def test_closed_ports_of_the_driver_are_named(spark, firewall):
    firewall(WORKER_PORTS, driver=())
    found = spark.run(all_of_it, SETTINGS, seconds=600, port=PORT)
    assert "result" in found.pop("synchronous")
    for name, each in found.items():
        assert f"driver:{PORT}" in each["error"]
        assert "port=" in each["error"]
        limit = {"search": 60, "doctor": 120}.get(name, 30)  # the check takes 10; those two load the backend on this host
        assert each["seconds"] < limit


@pytest.mark.parametrize(("backend", "rejects"), [("tensorflow", False), ("jax", False), ("tensorflow", True)])
def test_closed_ports_between_workers_are_named(spark, firewall, monkeypatch, backend, rejects):
    """Connections that are rejected look like those to workers that have not started."""
    firewall(*(() if backend == "tensorflow" else (WORKER_PORTS,)), rejects=rejects)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    found = spark.run(train, SETTINGS, mode="allreduce", port=PORT)
    assert f"{'cannot reach each other' if rejects else 'cannot connect to another one at'}" in found["error"]
    assert network.NETWORK in found["error"]
    assert "spark.sparkkeras.worker.ports" in found["error"]
    assert found["seconds"] < (200 if rejects else 120)


def test_closed_ports_of_executors_are_named(spark, firewall):
    firewall(WORKER_PORTS, spark=())
    found = spark.run(warned, SETTINGS, units=40_000)  # whose results the driver fetches
    assert len(found["warnings"]) == 1, found
    (message,) = found["warnings"]
    assert "the driver cannot connect to the executor at " in message
    assert "spark.blockManager.port" in message
    assert found["seconds"] < 120


@pytest.mark.parametrize("address", ["driver", f"{network.OTHER_NETWORK}1"])
def test_a_driver_that_workers_cannot_resolve_or_reach_is_named(tmp_path, address):
    interfaces = {"driver": f"{network.OTHER_NETWORK}1"}
    with (
        network.Hosts(tmp_path, interfaces=interfaces, unknown=("driver",)) as made,
        network.cluster(tmp_path, made) as spark,
    ):
        found = spark.run(warned, {"spark.driver.host": address, "spark.driver.bindAddress": "0.0.0.0"}, executors=0)
        assert not found["ended"]
        (message,) = found["warnings"]
        assert "Spark has no executor" in message
        assert f"the driver at {address}:" in message
        assert found["seconds"] < 120
        check_success(
            {"": spark.run(train, {"spark.driver.host": f"{network.NETWORK}1", "spark.driver.bindAddress": "0.0.0.0"})}
        )


def test_the_doctor_names_closed_ports(spark, firewall):
    firewall()
    (found,) = spark.run(examined, SETTINGS, port=PORT)
    assert f"cannot connect to 2 other workers, such as the one at {network.NETWORK}" in found
    assert ":36000" in found
    firewall(WORKER_PORTS, spark=network.WORKERS)
    (found,) = spark.run(examined, SETTINGS, port=PORT)
    assert "the driver cannot connect to 2 executors, such as the one at " in found
    assert "spark.blockManager.port" in found


QUICK = {
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "10s",
    "spark.executor.heartbeatInterval": "5s",
}


def cut_during(spark, hosts, folder, mode, ends, seconds, settings=QUICK):
    """Train, and cut the link between two hosts after the third epoch, for some seconds or for good."""
    marker = folder / "marker"
    try:
        with ThreadPoolExecutor(1) as threads:
            arguments = {"marker": str(marker), "mode": mode, "seconds": 300}
            running = threads.submit(spark.run, train_while_cut, settings, **arguments)
            while not (marker.exists() or running.done()):
                time.sleep(0.1)
            hosts.cut(*ends)
            if seconds is not None:
                time.sleep(seconds)
                hosts.mend(ends[0])
            return running.result()
    finally:
        hosts.mend(ends[0])


@pytest.mark.parametrize("seconds", [5, 40])
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "allreduce"])
def test_a_link_to_the_driver_is_cut_for_some_seconds(spark, hosts, tmp_path, mode, seconds):
    settings = QUICK | {"spark.network.timeout": "120s"}
    found = cut_during(spark, hosts, tmp_path, mode, ("worker1", "driver"), seconds, settings)
    assert len(found.get("result", ())) == 12, found
    assert found["result"][-1] < 1.0
    assert found["seconds"] < 60 + 2.5 * seconds + 30


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "allreduce"])
def test_a_worker_host_is_cut_off_for_good(spark, hosts, tmp_path, mode):
    found = cut_during(spark, hosts, tmp_path, mode, ("worker1",), None)
    assert len(found.get("result", ())) == 12, found
    assert found["seconds"] < 200


@pytest.mark.parametrize("seconds", [5, 40])
def test_the_link_between_workers_is_cut_for_some_seconds(spark, hosts, tmp_path, seconds):
    found = cut_during(spark, hosts, tmp_path, "allreduce", network.WORKERS, seconds)
    assert len(found.get("result", ())) == 12, found


def test_the_link_between_workers_is_cut_for_good(spark, hosts, tmp_path):
    found = cut_during(spark, hosts, tmp_path, "allreduce", network.WORKERS, None)
    assert f"cannot connect to another one at {network.NETWORK}" in found["error"]
    of_spark = 4 * 30 + 3 * 5  # an executor may ask the other one for a broadcast block first, in four attempts
    assert found["seconds"] < 150 + of_spark
