"""Pipelines with Spark Connect; saving is not supported there, since it needs a Spark JVM in this process."""

import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler

from sparkkeras import StorageError
from sparkkeras.ml import KerasEstimator, KerasTransformer
from tests.models import classifier

ROWS = np.random.default_rng(0).normal(size=(60, 4))


@pytest.fixture
def frame(spark):
    data = [(*row.tolist(), number % 3) for number, row in enumerate(ROWS)]
    return spark.createDataFrame(data, "a double, b double, c double, d double, label int")


def test_a_transformer_saved_in_a_classic_session_is_loaded(frame, classic):
    saved = KerasTransformer.load(str(classic.folder / "transformer"))
    loaded = saved.setOutputType("vector").setFeaturesCol(["a", "b", "c", "d"])
    scored = loaded.transform(frame)
    assert scored.schema == loaded.transformSchema(frame.schema)
    found = np.array([row.output.toArray() for row in scored.collect()])
    np.testing.assert_allclose(found, loaded.get_model().predict(ROWS, verbose=0), atol=1e-6)


def test_a_pipeline_is_fitted_and_saving_it_is_rejected(frame, tmp_path):
    assembler = VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="features")
    estimator = KerasEstimator(model=classifier(4, 5, 3), epochs=2, verbose=0)
    fitted = Pipeline(stages=[assembler, estimator]).fit(frame)
    assert len(fitted.stages[-1].history["loss"]) == 2
    assert MulticlassClassificationEvaluator().evaluate(fitted.transform(frame)) > 0
    with pytest.raises(StorageError, match=r"get_model\(\)\.save\(path\)"):
        fitted.stages[-1].save(str(tmp_path / "again"))
