"""Executors whose Python is not quite the driver's."""

import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import os, sys
sys.path.insert(0, os.environ["SPARKKERAS_ROOT"])  # as an editable install would: executors do not see it
import numpy as np
from pyspark import SparkConf, SparkContext
import keras
from sparkkeras import SparkModel
conf = SparkConf().setMaster("local[1]").set("spark.ui.enabled", "false")
sc = SparkContext(conf=conf)
sc.setLogLevel("OFF")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((20, 3), np.float32)
def where(_):
    import sparkkeras
    yield sparkkeras.__file__
bare, lacking, version = sys.argv[1], sys.argv[2], sc.pythonVer
for python, driver in (bare, version), (sys.executable, "3.9"), (lacking, version):
    sc.pythonExec, sc.pythonVer = python, driver
    try:
        SparkModel(model, num_workers=1).fit(x, x[:, 0], verbose=0)
        print("trained with", sc.parallelize([0], 1).mapPartitions(where).first())
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
sc.stop()  # the next one is started for the arrays
print(SparkModel(model, num_workers=1).fit(x, x[:, 0], verbose=0).history)
"""


def environment(**named):
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYSPARK_PYTHON"}}
    return kept | {"SPARKKERAS_ROOT": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"} | named


def python_without(path, *, site_packages):
    """A Python that does not see what is installed beside it, save for the given folders."""
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site_packages}" exec {sys.executable} -S "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a driver says that trains with three kinds of Python: without Keras, of another version, without sparkkeras.

    In the end it has Spark started for it, where python3 on PATH is another one.
    """
    folder = tmp_path_factory.mktemp("deployment")
    wrong = folder / "bin" / "python3"
    wrong.parent.mkdir()
    wrong.write_text("#!/bin/sh\necho wrong python >&2\nexit 9\n")
    wrong.chmod(0o755)
    numpy = folder / "only-numpy"
    numpy.mkdir()
    for name in ("numpy", "numpy.libs"):
        found = Path(sysconfig.get_paths()["platlib"]) / name
        if found.exists():
            (numpy / name).symlink_to(found)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    pythons = [
        python_without(folder / "bare-python", site_packages=numpy),
        # Site-packages without the editable install's hook: Keras is there, sparkkeras is not.
        python_without(folder / "lacking-python", site_packages=sysconfig.get_paths()["purelib"]),
    ]
    command = [sys.executable, str(script), *pythons]
    kept = environment(PATH=f"{wrong.parent}:{os.environ['PATH']}")
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.programs
def test_workers_without_keras_are_named(told):
    assert "ClusterError" in told[0]
    assert "lack keras and tensorflow" in told[0]
    assert "PYSPARK_PYTHON" in told[0]


@pytest.mark.programs
def test_workers_of_another_python_are_told_apart(told):
    """The driver claims another version, so that the workers refuse it as they would a real one."""
    assert "ClusterError Spark's workers run another Python version" in told[1]
    assert "PYSPARK_PYTHON" in told[1]


@pytest.mark.programs
def test_the_package_is_shipped_where_it_lacks(told):
    assert "trained with" in told[2]
    assert "sparkkeras.zip" in told[2]


@pytest.mark.programs
def test_spark_is_started_for_arrays_with_this_python(told):
    assert told[3].startswith("{'loss'")
