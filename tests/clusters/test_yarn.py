"""The recipe for YARN, as its page says, on nodes where nothing is installed."""

import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.clusters import tour
from tests.clusters.conftest import ARCHIVE, BACKEND, ROOT

pytestmark = [pytest.mark.programs, pytest.mark.soak]

PACKED = r"/nodemanager(\d)/local/usercache/\S+/environment/bin/python3"


def test_cluster_mode_with_a_checkpoint_on_hdfs(hadoop, submit):
    output = submit.recipe("--checkpoint", "hdfs:///user/me/run").succeed()
    assert f"Backend     {BACKEND}, synchronous, 2 workers" in output
    assert len(re.findall(rf"Worker +\S+{PACKED}", output)) == 2
    assert re.search(rf"Driver +\S+{PACKED}", output)
    assert float(re.search(r"Accuracy +([\d.]+)%", output)[1]) > 90
    assert "manifest.json" in hadoop.fs("-ls", "-R", "/user/me/run")


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "allreduce"])
def test_client_mode(submit, mode):
    saved = f"hdfs:///user/me/{mode}.keras"
    program = submit.program(ROOT / "recipes" / "train.py", "--mode", mode, "--save", saved, mode="client")
    output = program.succeed()
    assert f"Backend     {BACKEND}, {mode}, 2 workers" in output
    assert f"Driver      {sys.executable}" in output
    assert len(re.findall(rf"Worker +\S+{PACKED}", output)) == 2


def test_a_tour_of_sparkkeras(submit):
    output = submit.program(ROOT / "tests" / "clusters" / "tour.py", "hdfs:///user/me/tour").succeed()
    assert re.findall(r"^worked: (\w+)", output, re.MULTILINE) == [part.__name__ for part in tour.PARTS]


def test_the_doctor_finds_no_error(submit):
    settings = dict(
        line.split(maxsplit=1) for line in submit.properties({}).read_text().splitlines() if line[:6] == "spark."
    )
    settings |= {"spark.yarn.dist.archives": f"{ARCHIVE}#environment"}
    given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = [sys.executable, "-m", "sparkkeras", "doctor", "--master", "yarn", *given]
    environment = submit.environment("client") | {"PYSPARK_PYTHON": "./environment/bin/python3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 slots of 1 core on 2 executors" in done.stdout
    assert "environment/bin/python3" in done.stdout


def test_dynamic_allocation_takes_executors_between_the_phases(submit):
    settings = {
        "spark_dynamicAllocation_enabled": "true",
        "spark_dynamicAllocation_shuffleTracking_enabled": "true",
        "spark_dynamicAllocation_minExecutors": "0",
        "spark_dynamicAllocation_maxExecutors": "2",
        "spark_dynamicAllocation_executorIdleTimeout": "1s",
        "spark_dynamicAllocation_cachedExecutorIdleTimeout": "1s",
        "spark_executor_instances": "1",
    }
    output = submit.program(ROOT / "recipes" / "train.py", "--epochs", "6", **settings).succeed()
    assert float(re.search(r"Accuracy +([\d.]+)%", output)[1]) > 90
    assert "was lost: Executor killed by driver" in output


def test_a_killed_application_master_is_started_again_and_continues(hadoop, submit, tmp_path):
    given = ("--epochs", "4", "--rows", "400000")
    submit.recipe(*given, "--save", "hdfs:///user/me/whole.keras").succeed()
    saved = ("--checkpoint", "hdfs:///user/me/killed", "--save", "hdfs:///user/me/killed.keras")
    application = submit.recipe(*given, *saved)
    hadoop.wait(lambda: "Epoch 2/4" in application.log, "the second epoch has not come", seconds=300)

    def has_checkpoint():
        return "manifest.json" in hadoop.fs("-ls", "-R", "/user/me/killed", check=False)

    hadoop.wait(has_checkpoint, "no checkpoint was completed", seconds=60)  # it is written in the background
    masters = [
        each for each in hadoop.containers() if "ApplicationMaster" in " ".join(each.cmdline()) and each.name() == "java"
    ]
    assert len(masters) == 1
    masters[0].kill()
    output = application.succeed()
    attempts = output.split("_02_000001 stdout")
    assert "Epoch 1/4" in attempts[0]
    assert "Epoch 1/4" not in attempts[1], output
    weights = []
    for name in ("whole", "killed"):
        hadoop.fs("-get", f"/user/me/{name}.keras", tmp_path / f"{name}.keras")
        weights.append(keras.saving.load_model(tmp_path / f"{name}.keras").get_weights())
    assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))
