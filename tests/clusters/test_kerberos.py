"""HDFS and YARN with Kerberos: keytabs, tickets and tokens that expire during the run. ``kinit`` makes the tickets."""

import os
import re
import shutil
import subprocess
import threading

import pytest

from tests.clusters import tour
from tests.clusters.conftest import ROOT, Submit, running

pytestmark = [pytest.mark.programs, pytest.mark.soak]

PAUSE = 30
"""Seconds after each epoch: with Spark's start and four epochs, longer than a token lives; see `tests.clusters.hadoop`."""

PROGRAM = """
import sys
import time

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkkeras import Checkpoint, Monitor, SparkKerasError, load_spark_model
from tour import Tour

folder, seconds = sys.argv[1], float(sys.argv[2])
tour = Tour(SparkSession.builder.appName("kerberos").getOrCreate(), folder)
whole, _ = tour.fit(epochs=4)
pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(seconds))
try:
    with Monitor(save_to=f"{folder}/training.html") as monitor:
        trained, _ = tour.fit(epochs=4, callbacks=[pause, monitor], checkpoint=Checkpoint(f"{folder}/run"), resume=True)
    trained.save(f"{folder}/model.keras", overwrite=True)
    weights = load_spark_model(f"{folder}/model.keras").master_network.get_weights()
    pairs = zip(whole.master_network.get_weights(), weights, strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
except SparkKerasError as error:
    print(f"driver: {type(error).__name__}: {error}", flush=True)
try:
    whole.evaluate(tour.rows, features=tour.features, label="label", verbose=0)
except SparkKerasError as error:
    print(f"executors: {type(error).__name__}: {error}", flush=True)
else:
    print("read again", flush=True)
"""


@pytest.fixture(scope="module")
def secured(request, tmp_path_factory):
    """A cluster with a KDC, the folder of a user, and nodes that have unpacked Python: that takes as long as tokens live."""
    with running(request, tmp_path_factory.mktemp("secured"), secured=True) as cluster:
        cluster.fs("-mkdir", "-p", "/user/me")
        cluster.fs("-chown", "me", "/user/me")
        submit = Submit(cluster, tmp_path_factory.mktemp("first"))
        submit.recipe(spark_executor_instances="4", **keytab(cluster)).succeed()
        yield cluster


@pytest.fixture
def submit(secured, tmp_path):
    submit = Submit(secured, tmp_path)
    yield submit
    submit.stop()


@pytest.fixture
def long_run(submit, tmp_path):
    """Runs a training that outlives tokens and tickets, and returns all output."""
    path = tmp_path / "long_run.py"
    path.write_text(PROGRAM)

    def run(folder, pause=PAUSE, **given):
        given["spark_submit_pyFiles"] = ROOT / "tests" / "clusters" / "tour.py"
        return submit.program(path, f"hdfs:///user/me/{folder}", pause, **given).succeed()

    return run


@pytest.fixture
def kinit(secured, tmp_path, monkeypatch):
    """Makes a ticket of the user for some seconds."""
    if shutil.which("kinit") is None:
        pytest.skip("kinit is missing: install krb5-user")
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "tickets"))
    environment = os.environ | {"KRB5_CONFIG": str(secured.folder / "kdc" / "krb5.conf")}

    def run(seconds):
        command = ["kinit", "-k", "-t", secured.keytab, "-l", f"{seconds}s", "me"]
        subprocess.run(command, env=environment, check=True, timeout=60)

    return run


def keytab(secured):
    """The settings of a user with a keytab."""
    # Tokens are renewed after 24 s of 60: an executor that starts meanwhile may miss the new ones until the next time.
    renewal = {"spark_security_credentials_renewalRatio": "0.4"}
    return {"spark_kerberos_principal": "me", "spark_kerberos_keytab": secured.keytab} | renewal


def errors(output):
    """The errors of driver and executors in the output of the program."""
    assert len(re.findall("^(?:executors: |read again)", output, re.MULTILINE)) == 1, output[-9000:]
    return re.findall(r"^(?:driver|executors): (.*)", output, re.MULTILINE)


def assert_named(found):
    """The driver, which has the trained weights, and an executor have named the token, and the setting that helps."""
    assert len(found) == 2, found
    assert "training was completed, and the model has the trained weights" in found[0]
    expected = "StorageError: .* delegation token has expired.* spark.kerberos.keytab"
    assert all(re.match(expected, error) for error in found), found


def test_a_tour_with_a_keytab(secured, submit):
    parts = [part.__name__ for part in tour.PARTS]
    program = ROOT / "tests" / "clusters" / "tour.py"
    output = submit.program(program, "hdfs:///user/me/tour", **keytab(secured)).succeed()
    assert re.findall(r"^worked: (\w+)", output, re.MULTILINE) == parts


@pytest.mark.parametrize("mode", ["cluster", "client"])
def test_a_keytab_renews_tokens_during_training(secured, long_run, mode):
    output = long_run(f"keytab-{mode}", mode=mode, **keytab(secured))
    assert not errors(output)


def test_a_ticket_that_is_renewed_during_training(long_run, kinit):
    ended = threading.Event()

    def renew():
        kinit(60)
        while not ended.wait(20):
            kinit(60)

    kinit(60)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        renewal = {"spark_kerberos_renewal_credentials": "ccache", "spark_security_credentials_renewalRatio": "0.4"}
        output = long_run("renewed", mode="client", **renewal)
    finally:
        ended.set()
        thread.join()
    assert not errors(output)


def test_a_token_that_expires_during_training_is_named(long_run, kinit):
    kinit(90)
    assert_named(errors(long_run("expires", mode="client")))


def test_a_missing_ticket_is_named(submit, tmp_path, monkeypatch):
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "none"))
    path = tmp_path / "load.py"
    path.write_text("import sparkkeras\nsparkkeras.load_spark_model('hdfs:///user/me/model.keras')\n")
    application = submit.program(path, mode="client", master="local[1]")
    assert application.process.wait(timeout=300) == 1
    assert re.search("StorageError: .*no valid Kerberos ticket.* spark.kerberos.keytab", application.output)


def test_training_continues_after_its_tokens_have_expired(long_run, kinit):
    kinit(600)
    assert_named(errors(long_run("tokens")))
    output = long_run("tokens", pause=0)
    assert not errors(output)
