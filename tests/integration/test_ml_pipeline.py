"""Pipelines on real data, one for each task: trained, evaluated by Spark's evaluators, saved, loaded in another process."""

import json

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    MultilabelClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import SparkSession, functions
from sklearn import datasets

from sparkkeras.ml import KerasEstimator
from tests.conftest import SOAK
from tests.processes import clean_environment
from tests.scripts import SECONDS, Script, run_scripts

pytestmark = pytest.mark.usefixtures("sc")


@pytest.fixture(scope="module")
def spark(contexts):
    session = SparkSession(contexts.get("local[2]"))
    session.conf.set("spark.sql.shuffle.partitions", 2)
    return session


def network(width, units, activation, loss, rate=0.05):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((width,), name="scaled"),
            keras.layers.Dense(8, "relu", name="hidden"),
            keras.layers.Dense(units, activation, name="end"),
        ],
        name="pipelined",
    )
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss)
    return model


def prepared(names, scaled="scaled"):
    return [
        VectorAssembler(inputCols=names, outputCol="assembled"),
        StandardScaler(inputCol="assembled", outputCol=scaled, withMean=True),
    ]


def regression():
    data = datasets.load_diabetes(as_frame=True).frame
    data["label"] = data.pop("target") / 100
    names = [name for name in data.columns if name != "label"]
    estimator = KerasEstimator(model=network(10, 1, None, "mse"), featuresCol="scaled", epochs=6, seed=1, verbose=0)
    return data, [*prepared(names), estimator]


def binary():
    data = datasets.load_breast_cancer(as_frame=True).frame
    data.columns = [name.replace(" ", "_") for name in data.columns]
    data["label"] = data.pop("target")
    names = [name for name in data.columns if name != "label"]
    model = network(30, 1, "sigmoid", "binary_crossentropy")
    return data, [*prepared(names), KerasEstimator(model=model, featuresCol="scaled", epochs=4, seed=1, verbose=0)]


def multiclass():
    loaded = datasets.load_wine(as_frame=True)
    data = loaded.frame
    data.columns = [name.replace("/", "_") for name in data.columns]
    data["kind"] = [str(loaded.target_names[target]) for target in data.pop("target")]
    names = [name for name in data.columns if name != "kind"]
    model = network(13, 3, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    estimator = KerasEstimator(
        model=model, featuresCol="scaled", labelCol="index", epochs=6, batch_size=16, seed=1, verbose=0,
        outputType="vector",
    )  # fmt: skip
    return data, [StringIndexer(inputCol="kind", outputCol="index"), *prepared(names), estimator]


def multilabel():
    x, y = datasets.load_digits(return_X_y=True, as_frame=True)
    data = x.iloc[:600].copy()
    names = list(data.columns)
    data["even"], data["large"] = (y[:600] % 2 == 0).astype(float), (y[:600] > 4).astype(float)
    estimator = KerasEstimator(
        model=network(64, 2, "sigmoid", "binary_crossentropy"), featuresCol="scaled", labelCol=["even", "large"],
        epochs=6, seed=1, verbose=0,
    )  # fmt: skip
    return data, [*prepared(names), estimator]


MAKERS = {maker.__name__: maker for maker in (regression, binary, multiclass, multilabel)}
TASKS = [name for name in MAKERS if SOAK or name in {"multiclass"}]  # one output, and several


@pytest.fixture(scope="module")
def trained(spark, tmp_path_factory):
    """For each task the fitted pipeline and its predictions; and the folder with saved pipelines and rows."""
    folder = tmp_path_factory.mktemp("pipelines")
    made = {}
    for name in TASKS:
        data, stages = MAKERS[name]()
        data.insert(0, "id", range(len(data)))
        frame = spark.createDataFrame(data).repartition(2, "id").cache()
        model = Pipeline(stages=stages).fit(frame)
        model.save(str(folder / name / "model"))
        frame.write.parquet(str(folder / name / "rows"))
        made[name] = (model, model.transform(frame).cache())
    return made, folder


LOAD = """
import json, sys
from pathlib import Path
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
spark.conf.set("spark.sql.shuffle.partitions", 2)
for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    model = PipelineModel.load(str(folder / "model"))
    rows = model.transform(spark.read.parquet(str(folder / "rows"))).select("id", "output", "prediction").collect()
    rows.sort(key=lambda row: row.id)
    found = {
        "output": [list(row.output) if hasattr(row.output, "__len__") else row.output for row in rows],
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
    """The results of two scripts in other processes: one loads the saved pipelines, one saves custom classes."""
    scripts = []
    for text, argument in (LOAD, trained[1]), (CUSTOM, tmp_path_factory.mktemp("saved")):
        folder = tmp_path_factory.mktemp("scripts_run")
        scripts.append(Script(folder / "script.py", folder, (str(argument),)))
        scripts[-1].path.write_text(text)
    settings = {"PYSPARK_SUBMIT_ARGS": "--conf spark.python.daemon.module=sparkkeras.spark.daemon pyspark-shell"}
    return run_scripts(scripts, clean_environment() | settings)


@pytest.mark.soak
def test_regression(trained):
    scored = trained[0]["regression"][1]
    spread = scored.select(functions.stddev("label")).first()[0]
    assert RegressionEvaluator(metricName="rmse").evaluate(scored) < 0.9 * spread
    assert RegressionEvaluator(metricName="r2").evaluate(scored) > 0.2


@pytest.mark.soak
def test_binary(trained):
    scored = trained[0]["binary"][1]
    by_probability = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored)
    by_output = BinaryClassificationEvaluator(rawPredictionCol="output").evaluate(scored)
    assert BinaryClassificationEvaluator().evaluate(scored) == pytest.approx(by_output, abs=1e-3)
    assert by_probability == pytest.approx(by_output, abs=1e-3)
    assert by_probability > 0.95
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.9


def test_multiclass(trained):
    scored = trained[0]["multiclass"][1]
    evaluator = MulticlassClassificationEvaluator(labelCol="index")
    assert evaluator.setMetricName("accuracy").evaluate(scored) > 0.85
    assert evaluator.setMetricName("logLoss").evaluate(scored) < 0.7


@pytest.mark.soak
def test_multilabel(trained):
    scored = trained[0]["multilabel"][1]
    labels = functions.filter(
        functions.array(functions.when(scored.even > 0, 0.0), functions.when(scored.large > 0, 1.0)),
        lambda label: label.isNotNull(),
    )
    evaluator = MultilabelClassificationEvaluator(labelCol="labels")
    assert evaluator.setMetricName("microF1Measure").evaluate(scored.withColumn("labels", labels)) > 0.75


def test_the_transformer_has_the_training_history(trained):
    """The loss decreases from the first to the last epoch."""
    for model, _ in trained[0].values():
        losses = model.stages[-1].history["loss"]
        assert losses[-1] < losses[0]


@pytest.mark.programs
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_predicts_the_same_in_another_process(trained, scripts_run, task):
    assert scripts_run[0].failure == ""
    model, scored = trained[0][task]
    rows = scored.orderBy("id").select("output", "prediction").collect()
    found = json.loads((trained[1] / task / "found.json").read_text())
    mine = [row.output.toArray() if hasattr(row.output, "toArray") else row.output for row in rows]
    np.testing.assert_allclose(np.array(found["output"]), np.array(mine), rtol=0, atol=1e-6)
    if task == "regression":  # batches may differ in the other process
        np.testing.assert_allclose(found["prediction"], [row.prediction for row in rows], rtol=0, atol=1e-6)
    else:
        assert found["prediction"] == [row.prediction for row in rows]
    assert found["history"] == model.stages[-1].history
    assert found["iterations"] == int(model.stages[-1].get_model().optimizer.iterations) > 0


@pytest.mark.programs
def test_a_script_can_save_classes_that_are_registered_with_keras(scripts_run):
    assert scripts_run[1].failure == ""
