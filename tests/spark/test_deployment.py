"""Executors whose Python is not quite the driver's."""

import os
import stat
import subprocess
import sys
import sysconfig
import textwrap
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
conf = SparkConf().setMaster("local[2]").set("spark.ui.enabled", "false")
sc = SparkContext(conf=conf)
sc.setLogLevel("OFF")
sc.pythonVer = os.environ.get("SPARKKERAS_DRIVER", sc.pythonVer)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((20, 3), np.float32)
def where(_):
    import sparkkeras
    yield sparkkeras.__file__
try:
    SparkModel(model, num_workers=2).fit(x, x[:, 0], verbose=0)
    print("trained with", sc.parallelize([0], 1).mapPartitions(where).first())
except Exception as error:
    print(type(error).__name__, error)
"""


def run(tmp_path, worker_python=None, **environment):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYSPARK_PYTHON"}}
    kept |= {"SPARKKERAS_ROOT": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    kept["PYSPARK_PYTHON"] = worker_python or sys.executable
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def python_without(tmp_path, *, site_packages):
    """A Python that does not see what is installed beside it, save for the given folders."""
    path = tmp_path / "worker-python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site_packages}" exec {sys.executable} -S "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_package_is_shipped_where_it_lacks(tmp_path):
    """Site-packages without the editable install's hook: Keras is there, sparkkeras is not."""
    told = run(tmp_path, python_without(tmp_path, site_packages=sysconfig.get_paths()["purelib"]))
    assert "trained with" in told
    assert "sparkkeras.zip" in told


def test_workers_without_keras_are_named(tmp_path):
    numpy = tmp_path / "only-numpy"
    numpy.mkdir()
    for name in ("numpy", "numpy.libs"):
        found = Path(sysconfig.get_paths()["platlib"]) / name
        if found.exists():
            (numpy / name).symlink_to(found)
    told = run(tmp_path, python_without(tmp_path, site_packages=numpy))
    assert "ClusterError" in told
    assert "lack keras and tensorflow" in told
    assert "PYSPARK_PYTHON" in told


def test_workers_of_another_python_are_told_apart(tmp_path):
    """The driver claims another version, so that the workers refuse it as they would a real one."""
    told = run(tmp_path, SPARKKERAS_DRIVER="3.9")
    assert "ClusterError Spark's workers run another Python version" in told
    assert "PYSPARK_PYTHON" in told


@pytest.mark.core
def test_spark_is_started_for_arrays_with_this_python(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; sys.path.insert(0, os.environ['SPARKKERAS_ROOT'])\n"
        "import keras, numpy as np\n"
        "from sparkkeras import SparkModel\n"
        "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "x = np.ones((20, 3), np.float32)\n"
        "print(SparkModel(model).fit(x, x[:, 0], verbose=0).history)\n"
    )
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python3").write_text("#!/bin/sh\necho wrong python >&2\nexit 9\n")
    (bare / "python3").chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYSPARK_PYTHON"}}
    kept |= {"PATH": f"{bare}:{kept['PATH']}", "SPARKKERAS_ROOT": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=kept, capture_output=True, text=True, timeout=250)
    assert "loss" in done.stdout, done.stderr[-3000:]
