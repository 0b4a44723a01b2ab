"""With another backend, sparkkeras imports TensorFlow neither on the driver nor on workers, and does not need it.

Keras itself tries to import it where it serializes an object, which only the driver does, and in
``keras.utils.set_random_seed``, which trials of a search call.
"""

import subprocess
import sys

import pytest

from tests.processes import clean_environment
from tests.scripts import ROOT, SECONDS

TENSORFLOW = """
import os, traceback
from pathlib import Path

callers = [frame.filename for frame in traceback.extract_stack()[:-1] if "importlib" not in frame.filename]
with Path(__file__).with_name("importers").open("a") as file:
    file.write(f"{os.getpid()} {callers[-1]}\\n")
raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
"""

SCRIPT = """
import importlib, os, pkgutil
import keras
import numpy as np
from pyspark import SparkConf, SparkContext
import sparkkeras

for module in pkgutil.walk_packages(sparkkeras.__path__, "sparkkeras."):
    importlib.import_module(module.name)
conf = SparkConf().setMaster("local[2]").set("spark.ui.enabled", "false")
SparkContext(conf=conf.set("spark.python.daemon.module", "sparkkeras.spark.daemon"))
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
print(os.getpid())
"""


@pytest.mark.programs
@pytest.mark.timeout(SECONDS + 60)
def test_on_another_backend_only_keras_tries_to_import_tensorflow(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(TENSORFLOW)
    environment = clean_environment() | {"KERAS_BACKEND": "jax", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    importers = (tmp_path / "tensorflow" / "importers").read_text().splitlines()  # Keras does on the driver, so it exists
    driver = done.stdout.split()[-1]
    for importer in importers:
        assert importer.startswith(f"{driver} "), f"a worker imports TensorFlow: {importer}"
        assert importer.endswith("keras/src/utils/module_utils.py"), importer
