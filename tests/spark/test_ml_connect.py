"""Pipelines on Spark Connect: all but saving, which has to go through a Spark of this process."""

import subprocess
import sys

import pytest
from pyspark.sql import SparkSession

from sparkkeras.ml import KerasTransformer
from tests.models import classifier

pytest.importorskip("grpc")
pytestmark = pytest.mark.usefixtures("sc")

SCRIPT = """
import sys
import numpy as np
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from sparkkeras import StorageError
from sparkkeras.ml import KerasEstimator, KerasTransformer
from tests.models import classifier

spark = SparkSession.builder.remote("local[1]").getOrCreate()
rows = np.random.default_rng(0).normal(size=(60, 4))
data = [(*row.tolist(), number % 3) for number, row in enumerate(rows)]
frame = spark.createDataFrame(data, "a double, b double, c double, d double, label int")

loaded = KerasTransformer.load(sys.argv[1]).setOutputType("vector").setFeaturesCol(["a", "b", "c", "d"])
scored = loaded.transform(frame)
assert scored.schema == loaded.transformSchema(frame.schema)
found = np.array([row.output.toArray() for row in scored.collect()])
np.testing.assert_allclose(found, loaded.get_model().predict(rows, verbose=0), atol=1e-6)

assembler = VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="features")
estimator = KerasEstimator(model=classifier(4, 5, 3), epochs=2, verbose=0)
fitted = Pipeline(stages=[assembler, estimator]).fit(frame)
assert len(fitted.stages[-1].history["loss"]) == 2
assert MulticlassClassificationEvaluator().evaluate(fitted.transform(frame)) > 0
try:
    fitted.stages[-1].save(sys.argv[1] + "-again")
except StorageError as error:
    assert "get_model().save(path)" in str(error)
else:
    raise AssertionError("saved through Spark Connect")
"""


def test_everything_but_saving(sc, tmp_path):
    SparkSession(sc)
    KerasTransformer(model=classifier(4, 5, 3)).save(str(tmp_path / "saved"))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "saved")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
