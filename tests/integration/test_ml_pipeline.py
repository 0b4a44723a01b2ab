"""A pipeline on real data: trained, evaluated by Spark's evaluators, saved, loaded in another process."""

import json

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import SparkSession
from sklearn import datasets

from sparkkeras.ml import KerasEstimator
from tests.processes import clean_environment
from tests.scripts import SECONDS, Script, run_scripts

pytestmark = pytest.mark.usefixtures("sc")


@pytest.fixture(scope="module")
def spark(contexts):
    session = SparkSession(contexts.get("local[2]"))
    session.conf.set("spark.sql.shuffle.partitions", 2)
    return session


def network():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu", name="hidden"), keras.layers.Dense(3, name="end")]
    model = keras.Sequential([keras.Input((13,), name="scaled"), *layers], name="pipelined")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.05), loss=loss)
    return model


@pytest.fixture(scope="module")
def trained(spark, tmp_path_factory):
    """The fitted pipeline and its predictions; and the folder with the saved pipeline and the rows."""
    folder = tmp_path_factory.mktemp("pipeline")
    loaded = datasets.load_wine(as_frame=True)
    data = loaded.frame
    data.columns = [name.replace("/", "_") for name in data.columns]
    data["kind"] = [str(loaded.target_names[target]) for target in data.pop("target")]
    names = [name for name in data.columns if name != "kind"]
    data.insert(0, "id", range(len(data)))
    frame = spark.createDataFrame(data).repartition(2, "id").cache()
    stages = [
        StringIndexer(inputCol="kind", outputCol="index"),
        VectorAssembler(inputCols=names, outputCol="assembled"),
        StandardScaler(inputCol="assembled", outputCol="scaled", withMean=True),
        KerasEstimator(
            model=network(), featuresCol="scaled", labelCol="index", epochs=6, batch_size=16, seed=1, verbose=0,
            outputType="vector",
        ),
    ]  # fmt: skip
    model = Pipeline(stages=stages).fit(frame)
    model.save(str(folder / "model"))
    frame.write.parquet(str(folder / "rows"))
    return model, model.transform(frame).cache(), folder


LOAD = """
import json, sys
from pathlib import Path
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
spark.conf.set("spark.sql.shuffle.partitions", 2)
folder = Path(sys.argv[1])
model = PipelineModel.load(str(folder / "model"))
rows = model.transform(spark.read.parquet(str(folder / "rows"))).orderBy("id").select("output", "prediction").collect()
found = {
    "output": [list(row.output) for row in rows],
    "prediction": [row.prediction for row in rows],
    "history": model.stages[-1].history,
    "iterations": int(model.stages[-1].get_model().optimizer.iterations),
}
(folder / "found.json").write_text(json.dumps(found, default=float))
"""


CUSTOM = """
import sys
import keras
import pytest
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
from sparkkeras import CustomObjectError
from sparkkeras.ml import KerasTransformer

spark = SparkSession.builder.getOrCreate()

class Layer(keras.layers.Layer):
    def call(self, inputs):
        return inputs + 1

def save(layer, name):
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    PipelineModel([KerasTransformer(model=model)]).save(f"{sys.argv[1]}/{name}")

with pytest.raises(CustomObjectError, match="__main__"):
    save(Layer(), "plain")

@keras.saving.register_keras_serializable()
class Registered(Layer):
    pass

save(Registered(), "registered")
(stage,) = PipelineModel.load(f"{sys.argv[1]}/registered").stages
assert type(stage.get_model().layers[0]) is Registered

class Mine(KerasTransformer):
    pass

PipelineModel([Mine(model=stage.get_model())]).save(f"{sys.argv[1]}/mine")
assert type(PipelineModel.load(f"{sys.argv[1]}/mine").stages[0]) is Mine
"""


@pytest.fixture(scope="module")
def scripts_run(trained, tmp_path_factory):
    """The results of two scripts in other processes: one loads the saved pipeline, one saves custom classes."""
    scripts = []
    for text, argument in (LOAD, trained[2]), (CUSTOM, tmp_path_factory.mktemp("saved")):
        folder = tmp_path_factory.mktemp("scripts_run")
        scripts.append(Script(folder / "script.py", folder, (str(argument),)))
        scripts[-1].path.write_text(text)
    settings = {"PYSPARK_SUBMIT_ARGS": "--conf spark.python.daemon.module=sparkkeras.spark.daemon pyspark-shell"}
    return run_scripts(scripts, clean_environment() | settings)


def test_evaluators_of_spark_score_the_predictions(trained):
    model, scored, _ = trained
    evaluator = MulticlassClassificationEvaluator(labelCol="index")
    assert evaluator.setMetricName("accuracy").evaluate(scored) > 0.85
    assert evaluator.setMetricName("logLoss").evaluate(scored) < 0.7
    losses = model.stages[-1].history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.programs
@pytest.mark.timeout(SECONDS)
def test_a_pipeline_predicts_the_same_in_another_process(trained, scripts_run):
    assert scripts_run[0].failure == ""
    model, scored, folder = trained
    rows = scored.orderBy("id").select("output", "prediction").collect()
    found = json.loads((folder / "found.json").read_text())
    np.testing.assert_allclose(found["output"], [row.output.toArray() for row in rows], rtol=0, atol=1e-6)
    assert found["prediction"] == [row.prediction for row in rows]
    assert found["history"] == model.stages[-1].history
    assert found["iterations"] == int(model.stages[-1].get_model().optimizer.iterations) > 0


@pytest.mark.programs
def test_a_script_can_save_classes_that_are_registered_with_keras(scripts_run):
    assert scripts_run[1].failure == ""
