"""`KerasEstimator` in Spark ML: params, searches, weights and validation; a pipeline that another process loads."""

import json

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import SparkSession
from sklearn import datasets

from sparkkeras import Checkpoint, ConfigurationError, DataError, ModelError
from sparkkeras.ml import KerasEstimator
from tests.models import classifier
from tests.processes import clean_environment
from tests.scripts import SECONDS, Script, run_scripts

pytestmark = pytest.mark.usefixtures("sc")


@pytest.fixture(scope="module")
def spark(contexts):
    session = SparkSession(contexts.get("local[2]"))
    session.conf.set("spark.sql.shuffle.partitions", 2)
    return session


@pytest.fixture(scope="module")
def frame(spark, digits):
    x, y, *_ = digits
    rows = [
        (row.tolist(), int(label), 1.0 if label < 5 else 0.0, number % 4 == 0)
        for number, (row, label) in enumerate(zip(x[:400], y[:400], strict=True))
    ]
    schema = "features array<float>, label int, weight double, held_out boolean"
    return spark.createDataFrame(rows, schema).repartition(2).cache()


@pytest.fixture
def model():
    return classifier(units=16, optimizer=keras.optimizers.Adam(0.01))


@pytest.fixture
def estimator(model):
    return KerasEstimator(model=model, seed=5, verbose=0)


def accuracy(**columns):
    return MulticlassClassificationEvaluator(metricName="accuracy", **columns)


def weights_of(fitted):
    return fitted.get_model().get_weights()


def test_fit_starts_from_the_models_current_weights_and_does_not_change_it(estimator, model, frame):
    before = model.get_weights()
    first = estimator.fit(frame)
    np.testing.assert_equal(model.get_weights(), before)
    assert int(model.optimizer.iterations) == 0
    assert first.get_model() is not model
    np.testing.assert_equal(weights_of(estimator.fit(frame)), weights_of(first))
    # A model with the same architecture but other weights is not confused with the first one.
    model.set_weights([np.zeros_like(weight) for weight in before])
    (still,) = estimator.fit(frame, [{estimator.learning_rate: 1e-30}])
    assert all(np.abs(weight).max() < 1e-20 for weight in weights_of(still))


def test_a_fit_continues_from_a_checkpoint_and_that_of_another_fit_does_not(model, frame, tmp_path):
    def new(**params):
        given = {"checkpoint": Checkpoint(tmp_path / "run"), "resume": True, "validation_data": frame.where("held_out")}
        return KerasEstimator(model=model, verbose=0, **(given | params))

    expected = new(seed=5, epochs=2, checkpoint=None, resume=False).fit(frame)
    new(seed=5).fit(frame)
    continued = new(seed=5)
    resumed = continued.fit(frame, {continued.epochs: 2})
    assert resumed.history == expected.history
    np.testing.assert_equal(weights_of(resumed), weights_of(expected))
    with pytest.raises(ConfigurationError, match="rows: 400 .* 300 now"):
        new(epochs=2).fit(frame.limit(300))


def test_the_fits_of_a_search_take_no_checkpoint(estimator, frame, tmp_path):
    plain, checkpoint = estimator.setResume(True), Checkpoint(tmp_path / "run")
    stage = plain.copy().setCheckpoint(checkpoint)
    pipeline = Pipeline(stages=[Pipeline(stages=[stage])])
    rates = ParamGridBuilder().addGrid(stage.learning_rate, [0.1, 0.2]).build()
    folders = [{plain.checkpoint: checkpoint}]
    searches = [
        lambda: stage.fit(frame, rates),
        lambda: plain.fit(frame, folders),
        lambda: TrainValidationSplit(estimator=stage, estimatorParamMaps=rates, evaluator=accuracy()).fit(frame),
        lambda: CrossValidator(estimator=pipeline, estimatorParamMaps=[{}], evaluator=accuracy(), numFolds=2).fit(frame),
    ]
    for search in searches:
        with pytest.raises(ConfigurationError, match=r"Checkpoint\(.*leave checkpoint out there"):
            search()
        assert not (tmp_path / "run").exists()
    assert stage.copy().setCheckpoint(Checkpoint(tmp_path / "once")).fit(frame).history["loss"]


def test_param_maps(estimator, model, frame):
    maps = [
        {estimator.epochs: 1, estimator.predictionCol: "a", estimator.learning_rate: 0.003},
        {estimator.epochs: 2, estimator.predictionCol: "b"},
    ]
    fitted = dict(estimator.fitMultiple(frame, maps))
    assert estimator.getEpochs() == 1
    assert [len(fitted[index].history["loss"]) for index in (0, 1)] == [1, 2]
    assert [fitted[index].getPredictionCol() for index in (0, 1)] == ["a", "b"]
    rates = [float(each.optimizer.learning_rate) for each in (fitted[0].get_model(), fitted[1].get_model(), model)]
    assert rates == pytest.approx([0.003, 0.01, 0.01])
    assert repr(fitted[0]) == f"KerasTransformer: uid={estimator.uid}"


def test_a_search_over_models_finds_the_same_in_parallel_and_with_callbacks_one_at_a_time(estimator, frame):
    models = [classifier(units=2), classifier(units=16, optimizer=keras.optimizers.Adam(0.02))]
    grid = ParamGridBuilder().addGrid(estimator.model, models).baseOn({estimator.epochs: 2}).build()
    search = TrainValidationSplit(
        estimator=estimator.setBatchSize(8),
        estimatorParamMaps=grid,
        evaluator=accuracy(),
        trainRatio=0.6,
        parallelism=2,
        seed=1,
    )
    found = search.fit(frame)
    assert np.argmax(found.validationMetrics) == 1
    assert found.bestModel.get_model().layers[0].units == 16
    assert len(found.bestModel.history["loss"]) == 2
    assert accuracy().evaluate(found.transform(frame)) > 0.7
    events = []
    noting = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: events.append("begin"), on_train_end=lambda logs: events.append("end")
    )
    again = search.setEstimator(estimator.setCallbacks([noting])).fit(frame)
    assert again.validationMetrics == found.validationMetrics
    assert events == ["begin", "end"] * 3


@pytest.mark.soak
def test_asynchronous_fits_run_one_at_a_time(estimator, frame):
    estimator.setMode("asynchronous").setFrequency(4).setParameterServerMode("socket")
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build()
    search = TrainValidationSplit(estimator=estimator, estimatorParamMaps=grid, evaluator=accuracy(), parallelism=2, seed=1)
    assert len(search.fit(frame).validationMetrics) == 2


def test_weight_and_validation_columns(estimator, frame):
    """Digits of 5 and more have weight 0, so they are not learned; every fourth row is used for validation."""
    estimator.setParams(weightCol="weight", validationIndicatorCol="held_out", epochs=4)
    fitted = estimator.fit(frame)
    assert set(fitted.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    predicted = {row.prediction for row in fitted.transform(frame).select("prediction").collect()}
    assert predicted <= {0.0, 1.0, 2.0, 3.0, 4.0}
    # Training steps: two partitions of 150 training rows in batches of 32.
    assert int(fitted.get_model().optimizer.iterations) == 4 * 5
    # The same rows as a second DataFrame: set on the estimator, which a pipeline and a list of param maps copy.
    held_out, training = frame.where("held_out"), frame.where("not held_out")
    estimator.setValidationIndicatorCol(None).setValidationData(held_out)
    (again,) = Pipeline(stages=[estimator]).fit(training, [{estimator.epochs: 4}])
    assert again.stages[0].history == fitted.history
    assert estimator.getValidationData() is held_out
    with pytest.raises(DataError, match="^validation_data: .*'weight'.*validationIndicatorCol instead"):
        estimator.copy({estimator.validation_data: held_out.drop("weight")}).transformSchema(training.schema)
    with pytest.raises(DataError, match="no rows: .*handleInvalid='skip'.*validationIndicatorCol"):
        estimator.fit(training, {estimator.validation_data: held_out.limit(0)})


def test_errors_are_raised_before_training(model, frame):
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    scheduled = classifier(optimizer=keras.optimizers.SGD(decay))
    plain = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    both = {"validation_split": 0.2, "validation_data": frame}
    for error, words, given in [
        (ModelError, "KerasEstimator has no model", {}),
        (ModelError, "not compiled", {"model": plain}),
        (ConfigurationError, "'label' already exists", {"model": model, "predictionCol": "label"}),
        (ConfigurationError, "only one .*validationIndicatorCol", {"model": model, **both}),
        (ConfigurationError, "learning rate schedule", {"model": scheduled, "learning_rate": 0.1}),
    ]:
        with pytest.raises(error, match=words):
            KerasEstimator(**given).fit(frame)


def test_invalid_rows_are_skipped_or_kept(spark, model):
    rows = [([0.5] * 64, 1), (None, 2), ([float("nan")] * 64, 2), ([0.1] * 64, 3)]
    frame = spark.createDataFrame(rows, "features array<double>, label int")
    fitted = KerasEstimator(model=model, handleInvalid="skip", verbose=0, num_workers=1).fit(frame)
    assert [row.label for row in fitted.transform(frame).collect()] == [1, 3]
    whole = fitted.evaluate(frame.where("label != 2"))
    assert np.isfinite(whole["loss"])
    assert fitted.evaluate(frame) == pytest.approx(whole)
    fitted.setHandleInvalid("keep")
    assert [row.prediction is None for row in fitted.transform(frame).collect()] == [False, True, True, False]
    assert fitted.evaluate(frame) == pytest.approx(whole)


def test_metrics_with_several_values(frame):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    labelled = frame.selectExpr("features", "array(label % 2, 1) as label")
    history = KerasEstimator(model=model, verbose=0, num_workers=1).fit(labelled).history
    assert [[type(each) for each in values] for values in history["f1"]] == [[float, float]]
    assert [type(each) for each in history["loss"]] == [float]


# A pipeline, and other processes


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
