"""`KerasEstimator` in Spark ML: param maps, hyperparameter searches, weight and validation columns."""

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import SparkSession

from sparkkeras import Checkpoint, ConfigurationError, DataError, ModelError
from sparkkeras.ml import KerasEstimator
from tests.models import classifier

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


def test_fit_starts_from_the_models_current_weights_and_does_not_change_it(estimator, model, frame):
    before = model.get_weights()
    first = estimator.fit(frame)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert int(model.optimizer.iterations) == 0
    assert first.get_model() is not model
    second = estimator.fit(frame)
    for mine, other in zip(first.get_model().get_weights(), second.get_model().get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    # A model with the same architecture but other weights is not confused with the first one.
    model.set_weights([np.zeros_like(weight) for weight in before])
    (still,) = estimator.fit(frame, [{estimator.learning_rate: 1e-30}])
    assert all(np.abs(weight).max() < 1e-20 for weight in still.get_model().get_weights())


def test_a_fit_continues_from_a_checkpoint_and_that_of_another_fit_does_not(model, frame, tmp_path):
    def new(**params):
        given = {"checkpoint": Checkpoint(tmp_path / "run"), "resume": True, "validation_data": frame.where("held_out")}
        return KerasEstimator(model=model, verbose=0, **(given | params))

    expected = new(seed=5, epochs=3, checkpoint=None, resume=False).fit(frame)
    new(seed=5).fit(frame)
    continued = new(seed=5)
    resumed = continued.fit(frame, {continued.epochs: 3})
    assert resumed.history == expected.history
    for mine, other in zip(resumed.get_model().get_weights(), expected.get_model().get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    with pytest.raises(ConfigurationError, match="rows: 400 in the checkpoint, 300 now"):
        new(epochs=3).fit(frame.limit(300))


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
        with pytest.raises(ConfigurationError, match=r"Checkpoint\(.*needs its own folder.*leave checkpoint out there"):
            search()
        assert not (tmp_path / "run").exists()
    assert stage.copy().setCheckpoint(Checkpoint(tmp_path / "once")).fit(frame).history["loss"]


def test_param_maps(estimator, frame):
    assert len(estimator.fit(frame, {estimator.epochs: 3}).history["loss"]) == 3
    assert estimator.getEpochs() == 1
    maps = [{estimator.epochs: 1, estimator.predictionCol: "a"}, {estimator.epochs: 2, estimator.predictionCol: "b"}]
    fitted = dict(estimator.fitMultiple(frame, maps))
    assert [len(fitted[index].history["loss"]) for index in (0, 1)] == [1, 2]
    assert [fitted[index].getPredictionCol() for index in (0, 1)] == ["a", "b"]
    assert repr(fitted[0]) == f"KerasTransformer: uid={estimator.uid}"


def test_a_search_finds_the_same_sequentially_and_in_parallel(estimator, frame):
    estimator.setBatchSize(8)
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [1e-6, 0.02]).baseOn({estimator.epochs: 2}).build()
    search = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=accuracy(), trainRatio=0.6, parallelism=2, seed=1
    )
    found = search.fit(frame)
    assert np.argmax(found.validationMetrics) == 1
    assert len(found.bestModel.history["loss"]) == 2
    assert accuracy().evaluate(found.transform(frame)) > 0.7
    assert search.setParallelism(1).fit(frame).validationMetrics == found.validationMetrics


def test_a_search_over_models_runs_fits_with_callbacks_one_at_a_time(estimator, frame):
    stopped = []
    counter = keras.callbacks.LambdaCallback(on_train_end=lambda logs: stopped.append(1))
    small, large = classifier(units=2), classifier(units=16, optimizer=keras.optimizers.Adam(0.02))
    grid = ParamGridBuilder().addGrid(estimator.model, [small, large]).build()
    search = TrainValidationSplit(
        estimator=estimator.setParams(callbacks=[counter], batch_size=8, epochs=2),
        estimatorParamMaps=grid,
        evaluator=accuracy(),
        parallelism=2,
        seed=1,
    )
    found = search.fit(frame)
    assert np.argmax(found.validationMetrics) == 1
    assert found.bestModel.get_model().layers[0].units == 16
    assert len(stopped) == 3


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
    with pytest.raises(DataError, match=r"^validation_data: .* no column 'weight'.*validationIndicatorCol instead"):
        estimator.copy({estimator.validation_data: held_out.drop("weight")}).transformSchema(training.schema)
    with pytest.raises(DataError, match="validate on has no rows: .*handleInvalid='skip'.*validationIndicatorCol"):
        estimator.fit(training, {estimator.validation_data: held_out.limit(0)})


def test_the_learning_rate(estimator, model, frame):
    fitted = estimator.fit(frame, {estimator.learning_rate: 0.003})
    assert float(fitted.get_model().optimizer.learning_rate) == pytest.approx(0.003)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    scheduled = classifier(optimizer=keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)))
    with pytest.raises(ConfigurationError, match="the model's optimizer uses a learning rate schedule"):
        estimator.fit(frame, {estimator.model: scheduled, estimator.learning_rate: 0.1})


def test_errors_are_raised_before_training(estimator, model, frame):
    with pytest.raises(ModelError, match="this KerasEstimator has no model"):
        KerasEstimator().fit(frame)
    with pytest.raises(ModelError, match="is not compiled"):
        estimator.fit(frame, {estimator.model: keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])})
    with pytest.raises(ConfigurationError, match="the output column 'label' already exists"):
        estimator.fit(frame, {estimator.predictionCol: "label"})
    with pytest.raises(ConfigurationError, match=r"only one of .*validation_col \(in Spark ML validationIndicatorCol\)"):
        estimator.fit(frame, {estimator.validation_split: 0.2, estimator.validation_data: frame})


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
    fitted = KerasEstimator(model=model, verbose=0, num_workers=1, epochs=2).fit(labelled)
    assert [[type(each) for each in values] for values in fitted.history["f1"]] == [[float, float]] * 2
    assert [type(each) for each in fitted.history["loss"]] == [float, float]
