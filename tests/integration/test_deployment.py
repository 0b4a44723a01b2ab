"""Executors whose Python lacks packages, and a driver and executors that have no TensorFlow."""

import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.processes import clean_environment
from tests.scripts import ROOT, SECONDS

PYTHONS = """
import os, sys
sys.path.insert(0, os.environ["SPARKKERAS_ROOT"])  # like an editable install, which executors do not see
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
bare, lacking = sys.argv[1:]
for sc.pythonExec in bare, lacking:
    try:
        SparkModel(model, num_workers=1).fit(x, x[:, 0], verbose=0)
        print("trained with", sc.parallelize([0], 1).mapPartitions(where).first())
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
sc.stop()  # a new one is started for the arrays
print(SparkModel(model, num_workers=1).fit(x, x[:, 0], verbose=0).history)
"""


def python_without(path, *, site_packages):
    """A Python that cannot import its installed packages, except for those in the given folder."""
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site_packages}" exec {sys.executable} -S "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.programs
def test_workers_with_two_kinds_of_python(tmp_path):
    """Without Keras, and without sparkkeras; then Spark is started, with another python3 on the PATH."""
    wrong = tmp_path / "bin" / "python3"
    wrong.parent.mkdir()
    wrong.write_text("#!/bin/sh\necho wrong python >&2\nexit 9\n")
    wrong.chmod(0o755)
    numpy = tmp_path / "only-numpy"
    numpy.mkdir()
    for name in ("numpy", "numpy.libs"):
        found = Path(sysconfig.get_paths()["platlib"]) / name
        if found.exists():
            (numpy / name).symlink_to(found)
    script = tmp_path / "script.py"
    script.write_text(PYTHONS)
    pythons = [
        python_without(tmp_path / "bare-python", site_packages=numpy),
        # Site-packages without the editable install's hook: Keras is installed, sparkkeras is not.
        python_without(tmp_path / "lacking-python", site_packages=sysconfig.get_paths()["purelib"]),
    ]
    command = [sys.executable, str(script), *pythons]
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYSPARK_PYTHON"}}
    kept |= {"SPARKKERAS_ROOT": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{wrong.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    lacking, shipped, started = done.stdout.splitlines()
    assert "ClusterError" in lacking
    assert "lack keras and tensorflow" in lacking
    assert "PYSPARK_PYTHON" in lacking
    assert "trained with" in shipped
    assert "sparkkeras.zip" in shipped
    assert started.startswith("{'loss'")
    assert "previous Spark session was stopped, so a new one" in done.stderr


# Without TensorFlow

TENSORFLOW = """
import traceback
from pathlib import Path

callers = [frame.filename for frame in traceback.extract_stack()[:-1] if "importlib" not in frame.filename]
with Path(__file__).with_name("importers").open("a") as file:
    file.write(f"{callers}\\n")
raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
"""

ALL_OF_IT = """
import importlib, pkgutil
import keras
import numpy as np
from pyspark import SparkConf, SparkContext
from hyperopt import hp
import sparkkeras
from sparkkeras.hyperopt import HyperParamModel

for module in pkgutil.walk_packages(sparkkeras.__path__, "sparkkeras."):
    importlib.import_module(module.name)
conf = SparkConf().setMaster("local[2]").set("spark.ui.enabled", "false")
sc = SparkContext(conf=conf.set("spark.python.daemon.module", "sparkkeras.spark.daemon"))
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
for mode in "synchronous", "asynchronous":
    spark_model = sparkkeras.SparkModel(model, mode=mode)
    spark_model.fit(x, x[:, 0], validation_split=0.2, verbose=0)
spark_model.evaluate(x, x[:, 0], verbose=0)
spark_model.predict(x)
spark_model.save("model.keras")
sparkkeras.load_spark_model("model.keras")

def build(params):
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made

search = HyperParamModel(sc)
space = {"x": hp.uniform("x", 0, 1)}
search.minimize(model=build, data=(x, x[:, 0]), space=space, max_evals=2, validation_split=0.2, verbose=0)
"""


@pytest.mark.programs
@pytest.mark.timeout(SECONDS + 60)
def test_on_another_backend_nothing_imports_tensorflow(tmp_path):
    """Neither the driver, nor workers, nor trials of a search, whether it is installed or not."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(TENSORFLOW)
    environment = clean_environment() | {"KERAS_BACKEND": "jax", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", ALL_OF_IT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    importers = tmp_path / "tensorflow" / "importers"
    assert not importers.exists(), importers.read_text()
