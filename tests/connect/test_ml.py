"""Pipelines with Spark Connect: fitted, scored, saved and loaded."""

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
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


def test_a_pipeline_is_fitted_and_saved(frame, tmp_path):
    assembler = VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="features")
    held_out = assembler.transform(frame).limit(20)
    estimator = KerasEstimator(model=classifier(4, 5, 3), epochs=2, verbose=0, validation_data=held_out)
    pipeline = Pipeline(stages=[assembler, estimator])
    fitted = pipeline.fit(frame)
    history = fitted.stages[-1].history
    assert len(history["loss"]) == len(history["val_loss"]) == 2
    scored = fitted.transform(frame)
    assert MulticlassClassificationEvaluator().evaluate(scored) > 0
    path = f"file:{tmp_path}/fitted"
    for writer in (fitted.write(), fitted.write().overwrite()):
        writer.save(path)
    again = PipelineModel.load(path)
    assert again.stages[-1].history == history
    assert again.transform(frame).collect() == scored.collect()
    with pytest.warns(UserWarning, match="'validation_data' cannot be saved"):
        pipeline.save(f"{tmp_path}/pipeline")
    loaded = Pipeline.load(f"{tmp_path}/pipeline").getStages()[-1]
    assert (loaded.uid, loaded.getEpochs(), loaded.getValidationData()) == (estimator.uid, 2, None)


def test_places_where_a_stage_cannot_be_saved_are_reported(spark, tmp_path):
    stage = KerasTransformer(model=classifier(4, 5, 3))
    # Spark writes the pipeline on the server, which may be another machine.
    with pytest.raises(StorageError, match="where this process does not"):
        stage.save(f"{tmp_path}/pipeline/stages/0_{stage.uid}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="root of a file system"):
        stage.write().overwrite().save("file:///")
    with pytest.raises(StorageError, match="'/nowhere': it does not exist"):
        KerasTransformer.load("/nowhere")
