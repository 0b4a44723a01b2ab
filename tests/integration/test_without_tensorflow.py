"""With another backend, no process imports TensorFlow, installed or not: not the driver, workers, or trials of a search."""

import subprocess
import sys

import pytest

from tests.processes import clean_environment
from tests.scripts import ROOT, SECONDS

TENSORFLOW = """
import traceback
from pathlib import Path

callers = [frame.filename for frame in traceback.extract_stack()[:-1] if "importlib" not in frame.filename]
with Path(__file__).with_name("importers").open("a") as file:
    file.write(f"{callers}\\n")
raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
"""

SCRIPT = """
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
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(TENSORFLOW)
    environment = clean_environment() | {"KERAS_BACKEND": "jax", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    importers = tmp_path / "tensorflow" / "importers"
    assert not importers.exists(), importers.read_text()
