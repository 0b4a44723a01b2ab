"""`KerasTransformer` and `ImageFeaturizer`: the columns that they add. Saving and loading of all stages."""

import io
import json
import re
from contextlib import nullcontext

import keras
import numpy as np
import pytest
from PIL import Image
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.functions import vector_to_array
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from sparkkeras import (
    Checkpoint,
    ConfigurationError,
    CustomObjectError,
    DataError,
    ModelError,
    ParameterServerOptions,
    SparkModel,
    StorageError,
    load_spark_model,
    to_data_frame,
)
from sparkkeras.formats.images import image_loader
from sparkkeras.ml import ImageFeaturizer, KerasEstimator, KerasTransformer
from sparkkeras.spark import filesystem
from tests.ml import parts, stages
from tests.models import classifier, two_by_two

ROWS = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def spark(sc):
    return SparkSession(sc)


@pytest.fixture
def frame(spark):
    rows = [(number, row.tolist(), float(row[0]), float(row[1])) for number, row in enumerate(ROWS)]
    return spark.createDataFrame(rows, "id int, features array<float>, a double, b double").repartition(2)


def network(units=1, activation=None, loss=None, name="net"):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,), name="x"), keras.layers.Dense(units, activation, name="end")]
    model = keras.Sequential(layers, name=name)
    model.set_weights([3 * weight for weight in model.get_weights()])
    if loss is not None:
        model.compile(loss=loss, run_eagerly=True)
    return model


def small(**compiled):
    return classifier(4, 5, 3, **compiled)


def found(transformed, *names):
    """The columns as arrays, ordered by id."""
    for name in names:
        if transformed.schema[name].dataType.simpleString() == "vector":
            transformed = transformed.withColumn(name, vector_to_array(name))
    rows = sorted(transformed.select("id", *names).collect())
    columns = [np.array([row[name] for row in rows]) for name in names]
    return columns if len(columns) > 1 else columns[0]


def classified(task, from_logits, output):
    """The raw predictions, probabilities and predictions for outputs of a model."""
    if task == "multiclass":
        powers = np.exp(output) if from_logits else output
        return np.log(powers), powers / powers.sum(axis=1, keepdims=True), powers.argmax(axis=1).tolist()
    p = 1 / (1 + np.exp(-output)) if from_logits else output
    raw = np.log(p / (1 - p))
    if task == "binary":
        return np.stack([-raw, raw], axis=1), np.stack([1 - p, p], axis=1), (p > 0.5).tolist()
    return raw, p, [np.flatnonzero(row > 0.5).tolist() for row in p]


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(
    ("task", "units", "activation", "loss"),
    [
        ("binary", 1, "sigmoid", keras.losses.BinaryCrossentropy),
        ("multiclass", 3, "softmax", keras.losses.SparseCategoricalCrossentropy),
        ("multilabel", 3, "sigmoid", keras.losses.BinaryCrossentropy),
    ],
)
def test_columns_of_classes_and_labels(frame, task, units, activation, loss, from_logits):
    model = network(units, None if from_logits else activation, loss(from_logits=from_logits))
    scorer = KerasTransformer(model=model, outputType="vector")
    scored = scorer.transform(frame)
    assert scored.columns[4:] == ["output", "rawPrediction", "probability", "prediction"]
    assert scored.schema == scorer.transformSchema(frame.schema)
    expected = model.predict(ROWS, verbose=0).astype(float)
    expected = expected[:, 0] if units == 1 else expected
    raw, probability, prediction = classified(task, from_logits, expected)
    for mine, other in zip(found(scored, *scored.columns[4:7]), (expected, raw, probability), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    assert [row.prediction for row in sorted(scored.select("id", "prediction").collect())] == prediction
    plan = scored.where("prediction is not null")._jdf.queryExecution().executedPlan().toString()
    assert plan.count("ArrowEvalPython") == 1  # the model runs once for all columns


def test_thresholds(frame):
    scorer = KerasTransformer(model=network(1, "sigmoid", "binary_crossentropy"), thresholds=[0.2, 0.8])
    probability, prediction = found(scorer.transform(frame), "probability", "prediction")
    np.testing.assert_array_equal(prediction, probability[:, 1] > 0.8)
    assert set(probability[prediction == 0, 1] > 0.5) == {True, False}
    scorer = KerasTransformer(model=network(3, "softmax", "categorical_crossentropy"), thresholds=[0.9, 0.5, 0.01])
    probability, prediction = found(scorer.transform(frame), "probability", "prediction")
    np.testing.assert_array_equal(prediction, (probability / [0.9, 0.5, 0.01]).argmax(axis=1))
    assert (prediction != probability.argmax(axis=1)).any()
    always = found(scorer.setThresholds([1, 0, 1]).transform(frame), "prediction")
    assert set(always) == {1.0}  # as in Spark: a probability over 0 divided by a threshold of 0 is infinite


def test_extreme_probabilities_and_logits(frame):
    model = network(1, "sigmoid", "binary_crossentropy")
    model.set_weights([1e4 * weight for weight in model.get_weights()])
    raw, output = found(KerasTransformer(model=model).transform(frame), "rawPrediction", "output")
    assert set(output) == {0.0, 1.0}
    np.testing.assert_allclose(raw[:, 1], np.where(output == 1, 1, -1) * -np.log(np.finfo(float).tiny))
    model = network(3, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.set_weights([np.zeros((4, 3)), np.array([2000.0, 0.0, -2000.0])])
    scorer = KerasTransformer(model=model, thresholds=[1, 1, 0])
    probability, prediction = found(scorer.transform(frame), "probability", "prediction")
    np.testing.assert_allclose(probability.sum(axis=1), 1)
    assert set(prediction) == {0.0}  # a class with probability 0 and threshold 0 is not predicted


def test_several_inputs_and_outputs(frame):
    model = two_by_two()
    scorer = KerasTransformer(model=model, featuresCol={"left": "a", "right": "features"}, outputType="vector")
    scored = scorer.transform(frame)
    assert scored.schema == scorer.transformSchema(frame.schema)
    assert scored.columns[4:] == [
        "output_size", "prediction_size", "output_kind", "rawPrediction_kind", "probability_kind", "prediction_kind",
    ]  # fmt: skip
    size, kind = model.predict({"left": ROWS[:, :1], "right": ROWS}, verbose=0)
    got = found(scored, "output_size", "prediction_size", "output_kind", "probability_kind", "prediction_kind")
    for mine, expected in zip(got, [size[:, 0], size[:, 0], kind, kind, kind.argmax(axis=1)], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)
    without = dict.fromkeys([scorer.outputCol, scorer.rawPredictionCol, scorer.probabilityCol], "")
    by_name = scorer.copy({**without, scorer.predictionCol: {"kind": "sort"}})
    assert by_name.transform(frame).columns[4:] == ["sort"]
    with pytest.warns(UserWarning, match="adds no columns") as warned:
        assert scorer.copy({**without, scorer.predictionCol: ""}).transform(frame).columns == frame.columns
    assert warned[0].filename == __file__


@pytest.mark.parametrize(("units", "task"), [(1, "regression"), (1, "binary"), (3, "multiclass")])
def test_rows_without_features_and_with_a_nan_output_have_no_prediction(spark, units, task):
    rows = [(0, [1.0, 2.0, 3.0, 4.0]), (1, None), (2, [0.0] * 4)]
    frame = spark.createDataFrame(rows, "id int, features array<double>")
    scorer = KerasTransformer(model=network(units), batch_transform=parts.nan_for_zeros, task=task, handleInvalid="keep")
    whole, empty, undefined = sorted(scorer.transform(frame).collect(), key=lambda row: row.id)
    assert None not in whole
    assert set(empty[2:]) == {None}
    assert np.isnan(undefined.output).all()
    assert undefined.prediction is None or task == "regression"


def test_a_row_without_features_is_an_error_by_default(frame):
    scored = KerasTransformer(model=network()).transform(frame.selectExpr("id", "if(id = 3, null, features) AS features"))
    with pytest.raises(Exception, match="'features' has a null.*handleInvalid"):
        scored.collect()


def test_names_of_other_columns(spark, frame):
    """They may have dots or be there twice; those that differ in case only may be if Spark is case-sensitive."""
    twins = frame.withColumnRenamed("a", "Features").withColumnRenamed("id", "Prediction")
    odd = frame.withColumnRenamed("a", "a.b").select("*", frame.b)
    scorer = KerasTransformer(model=network())
    assert scorer.transform(odd).select("output").count() == len(ROWS)
    with pytest.raises(ConfigurationError, match=r"'prediction' already exists as 'Prediction'"):
        scorer.transform(frame.withColumnRenamed("id", "Prediction"))
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        scored = scorer.transform(twins)
        assert {"Prediction", "prediction"} < set(scored.columns)
        assert scored.count() == len(ROWS)
        assert SparkModel(network()).predict(twins, output_col="FEATURES").count() == len(ROWS)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_evaluate_returns_the_same_values_as_keras(spark):
    model, labels, weights = small(), np.arange(10) % 3, np.linspace(0.5, 2, 10)
    frame = to_data_frame(spark, ROWS, labels, sample_weight=weights)
    expected = model.evaluate(ROWS, labels, sample_weight=weights, verbose=0, return_dict=True)
    assert KerasTransformer(model=model, weightCol="weight").evaluate(frame) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ModelError, match="is not compiled"):
        KerasTransformer(model=network(3)).evaluate(frame)


def test_errors_are_raised_on_the_driver_before_a_job(frame):
    model = network()
    for error, words, given in [
        (ConfigurationError, "'b' already exists", {"model": model, "outputCol": "b"}),
        (ConfigurationError, "two new columns .* 'output'", {"model": model, "predictionCol": "output"}),
        (DataError, "no column 'pixels'", {"model": model, "featuresCol": "pixels"}),
        (ModelError, "KerasTransformer has no model", {}),
    ]:
        with pytest.raises(error, match=words):
            KerasTransformer(**given).transform(frame)
    with pytest.raises(DataError, match="has the type string"):
        KerasTransformer(model=model).transformSchema(StructType().add("features", "string"))


# Images


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def pixels():
    """Noise images; every second one has a bright upper half. Shape (24, 16, 16, 3)."""
    drawn = np.random.default_rng(0).integers(0, 120, (24, 16, 16, 3)).astype(np.uint8)
    drawn[::2, :8] += 100
    return drawn


@pytest.fixture
def images(spark, pixels):
    rows = [(number, bytearray(png(each)), float(number % 2)) for number, each in enumerate(pixels)]
    return spark.createDataFrame(rows, "id int, image binary, label double").repartition(2)


@pytest.fixture
def looker():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3), name="photo"),
            keras.layers.Conv2D(4, 3, strides=2, activation="relu", name="conv"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(5, "relu", name="hidden"),
            keras.layers.Dense(1, "sigmoid", name="end"),
        ],
        name="looker",
    )


@pytest.mark.parametrize(("layer", "taken"), [(None, "hidden"), ("conv", "conv"), (-1, "end")])
def test_features_are_the_output_of_the_layer(images, pixels, looker, layer, taken):
    featurizer = ImageFeaturizer(model=looker, layer=layer, preprocessing=1 / 255)
    transformed = featurizer.transform(images)
    nearest = pixels[:, 1::2, 1::2] / np.float32(255)
    model = keras.Model(looker.inputs, looker.get_layer(taken).output)
    expected = model.predict(nearest, verbose=0).reshape(len(pixels), -1)
    np.testing.assert_allclose(found(transformed, "features"), expected, rtol=1e-4, atol=1e-5)
    assert transformed.schema == featurizer.transformSchema(images.schema)
    assert transformed.schema["features"].metadata == {"ml_attr": {"num_attrs": expected.shape[1]}}


def test_a_pipeline_with_logistic_regression_is_saved_and_loaded(images, looker, tmp_path):
    featurizer = ImageFeaturizer(model=looker, layer="flat", preprocessing=parts.darker, interpolation="box")
    model = Pipeline(stages=[featurizer, LogisticRegression(maxIter=5)]).fit(images)
    scored = model.transform(images)
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) == 1.0
    model.save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert loaded.stages[0].getPreprocessing() is parts.darker
    assert loaded.stages[0].getInterpolation() == "box"
    again, expected = (found(each, "probability") for each in (loaded.transform(images), scored))
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-6)


def test_rows_without_a_readable_image(spark, pixels, looker):
    def nan_if_black(batch):
        return np.where(batch.max(axis=(1, 2, 3), keepdims=True) == 0, np.nan, batch)

    files = [png(pixels[0]), b"no image", None, png(np.zeros((8, 8, 3), np.uint8))]
    frame = spark.createDataFrame(list(enumerate(files)), "id int, image binary").coalesce(1)
    featurizer = ImageFeaturizer(model=looker, on_error="null", preprocessing=nan_if_black)
    assert [row.id for row in featurizer.transform(frame).collect() if row.features is None] == [1, 2, 3]
    assert [row.id for row in featurizer.setOnError("drop").transform(frame).collect()] == [0]
    featurizer.setOnError("error")
    for rows, words in ((frame, "'image', row 1 of partition 0"), (frame.where("id = 3"), "'image' holds NaN")):
        with pytest.raises(Exception, match=words):
            featurizer.transform(rows).collect()


def test_a_model_of_keras_applications_by_name(images, pixels, tmp_path):
    weights = str(tmp_path / "mobile.weights.h5")
    keras.applications.MobileNet(weights=None, include_top=False).save_weights(weights)
    featurizer = ImageFeaturizer(model="MobileNet", weights=weights, include_top=False, layer=0, size=(16, 16))
    expected = keras.applications.mobilenet.preprocess_input(pixels.astype(np.float32))
    np.testing.assert_allclose(found(featurizer.transform(images), "features"), expected.reshape(len(pixels), -1))
    featurizer.save(str(tmp_path / "featurizer"))
    loaded = ImageFeaturizer.load(str(tmp_path / "featurizer"))
    assert (loaded.getModel(), loaded.getWeights()) == ("MobileNet", weights)


def test_errors_of_a_featurizer_are_raised_before_a_job(images, looker):
    flat = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    free = keras.Sequential([keras.Input((None, None, 3)), keras.layers.Conv2D(2, 3)])
    for error, words, given in [
        (ModelError, "ImageFeaturizer has no model", {}),
        (DataError, "expected images", {"model": looker, "inputCol": "label"}),
        (ConfigurationError, r"'label' already exists.*\(outputCol\)", {"model": looker, "outputCol": "label"}),
        (ModelError, "layer=9: .* 4 layers", {"model": looker, "layer": 9}),
        (ModelError, "layer='cnov': .* no layer", {"model": looker, "layer": "cnov"}),
        (ModelError, "does not take images", {"model": flat}),
        (ConfigurationError, "any size: set size", {"model": free}),
    ]:
        with pytest.raises(error, match=words):
            ImageFeaturizer(**given).transform(images)


# Saving and loading


def custom(layer, loss="mse"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="end"), layer])
    model.compile(optimizer="sgd", loss=loss)
    return model


def same_model(mine, other):
    np.testing.assert_array_equal(mine(ROWS), other(ROWS))  # calls, since each model would be traced to predict


def test_every_param_of_an_estimator_is_loaded(tmp_path):
    given = {
        "featuresCol": ["a", "b"], "outputCol": {"scores": "raw"}, "epochs": 7, "learning_rate": 0.5, "mode": "synchronous",
        "class_weight": {0: 1.0, 2: 0.5}, "server_options": ParameterServerOptions(timeout=7.0), "resume": True,
        "transform": parts.Shifted(2.0, (1,)), "thresholds": [0.25, 0.5, 0.0], "checkpoint": Checkpoint("runs/a", 2, 9.5),
        "loader": image_loader((8, 8), "L", 1 / 255), "custom_objects": {"Scale": parts.Scale},
    }  # fmt: skip
    estimator = KerasEstimator(model=small(optimizer="rmsprop"), **given)
    estimator.save(str(tmp_path / "estimator"))
    loaded = KerasEstimator.load(str(tmp_path / "estimator"))
    assert loaded.uid == estimator.uid
    for name, value in given.items():
        assert loaded.getOrDefault(name) == value, name
    assert not loaded.isSet("batch_size")
    assert type(loaded.getModel().optimizer) is keras.optimizers.RMSprop
    same_model(loaded.getModel(), estimator.getModel())
    assert {path.name for path in (tmp_path / "estimator").iterdir()} == {"metadata", "model.keras"}
    assert "pickle" not in next((tmp_path / "estimator" / "metadata").glob("part-*")).read_text()


def test_an_existing_folder_is_only_overwritten_on_request(tmp_path):
    path = f"file://{tmp_path}/here"
    kept, other = (KerasTransformer(model=small(seed=seed)) for seed in range(2))
    kept.save(path)
    with pytest.raises(StorageError, match=r"already exists: use write\(\)"):
        other.save(path)
    with pytest.raises(CustomObjectError, match="batch_transform is .*a lambda"):
        KerasTransformer(model=small(), batch_transform=lambda x, y: x).write().overwrite().save(path)
    same_model(KerasTransformer.load(path).get_model(), kept.get_model())
    other.write().overwrite().save(path)
    same_model(load_spark_model(tmp_path / "here" / "model.keras").model, other.get_model())
    assert [file.name for file in tmp_path.iterdir()] == ["here"]


def killed(*arguments):
    raise SystemExit("killed")


def replace_with_fault(monkeypatch, stage, path, call, fault):
    """A process dies, or gets an answer, in one of the calls that change a folder."""
    place = type(filesystem._place(path))
    changes = {name: getattr(place, name) for name in ("move", "remove")}
    calls = list(range(call + 1))  # the last one gets the fault

    def changed(name):
        def change(target, *others):
            is_folder = re.search(r"here(\.previous|\.[0-9a-f]{32})?$", target.path)  # and no file in one
            if is_folder and calls and not calls.pop():
                return fault()
            if not calls and fault is killed:  # nor does it clean up
                killed()
            return changes[name](target, *others)

        return change

    with monkeypatch.context() as patched:
        for name in changes:
            patched.setattr(place, name, changed(name))
        stage.write().overwrite().save(path)


def refused():
    raise OSError("no")


@pytest.mark.parametrize(("on_hadoop", "call"), [(False, 1), (False, 2), (False, 3), (True, 2)])
def test_a_process_that_dies_while_it_replaces_a_folder_loses_nothing(tmp_path, hadoop_uri, monkeypatch, on_hadoop, call):
    path, aside = f"{hadoop_uri if on_hadoop else tmp_path}/here", tmp_path / ".here.previous"
    old, new, third = (KerasTransformer(model=small(seed=seed)) for seed in range(3))
    old.save(path)
    old.save(path.replace("here", ".here.previous"))  # another process has died before
    with pytest.raises(SystemExit):
        replace_with_fault(monkeypatch, new, path, call, killed)
    is_there = (tmp_path / "here").exists()
    with nullcontext() if is_there else pytest.warns(UserWarning, match="while it replaced"):
        same_model(KerasTransformer.load(path).get_model(), (old if call < 3 else new).get_model())
    assert is_there == (call != 2)
    with pytest.raises(StorageError, match="already exists"):
        third.save(path)
    third.write().overwrite().save(path)
    same_model(KerasTransformer.load(path).get_model(), third.get_model())
    assert not aside.exists()


@pytest.mark.parametrize(("on_hadoop", "call"), [(False, 1), (True, 2)])
def test_a_rename_that_fails_leaves_the_old_folder(tmp_path, hadoop_uri, monkeypatch, on_hadoop, call):
    path = f"{hadoop_uri if on_hadoop else tmp_path}/here"
    old, new = (KerasTransformer(model=small(seed=seed)) for seed in range(2))
    old.save(path)
    with pytest.raises(StorageError, match="new folder .* complete, .*: cannot write"):
        replace_with_fault(monkeypatch, new, path, call, refused)
    same_model(KerasTransformer.load(path).get_model(), old.get_model())


def changed(folder, change):
    part = next((folder / "metadata").glob("part-*"))
    metadata = json.loads(part.read_text())
    change(metadata)
    part.write_text(json.dumps(metadata))


def test_folders_that_hold_no_stage_of_the_class_are_reported(tmp_path):
    path = tmp_path / "here"

    def check(error, words):
        with pytest.raises(error, match=words):
            KerasTransformer.load(str(path))

    def save(stage):
        stage.write().overwrite().save(str(path))

    check(StorageError, "no saved estimator or transformer")
    (path / "metadata").mkdir(parents=True)
    check(ModelError, "not written by sparkkeras")
    save(PipelineModel(stages=[]))
    check(ModelError, "holds a .*PipelineModel")
    save(KerasEstimator(epochs=3))
    check(ModelError, "holds a .*KerasEstimator; expected a .*KerasTransformer")
    save(KerasTransformer(model=small()))
    (path / "model.keras").write_bytes(b"no archive")
    check(ModelError, "not a .keras archive")
    (path / "model.keras").unlink()
    check(StorageError, "cannot read")
    changed(path, lambda metadata: metadata["sparkkeras"].update(format=2))
    check(ModelError, "a later version")
    changed(path, lambda metadata: metadata.pop("sparkkeras"))
    check(ModelError, "metadata has no 'sparkkeras'")


@pytest.mark.parametrize(("where", "function"), [("code", "os:system"), ("custom_objects", "_pytest.outcomes:importorskip")])
def test_a_folder_cannot_make_keras_call_arbitrary_functions(tmp_path, where, function):
    path, ran = str(tmp_path / "here"), tmp_path / "ran"
    arguments = {"command": f"touch {ran}"}
    KerasTransformer(model=custom(keras.layers.Lambda(parts.piped, arguments=arguments, output_shape=(1,)))).save(path)
    assert KerasTransformer.load(path).get_model().layers[-1].function is parts.piped
    changed(tmp_path / "here", lambda metadata: metadata["sparkkeras"].update({"code": {}, where: {"piped": function}}))
    with pytest.raises(CustomObjectError, match="function defined with def|not defined there"):
        KerasTransformer.load(path)
    assert not ran.exists()
    with keras.saving.custom_object_scope({"piped": parts.piped}):  # the caller's scope takes precedence
        assert KerasTransformer.load(path).get_model().layers[-1].function is parts.piped


def test_a_path_without_a_scheme_is_on_the_default_file_system(sc, tmp_path):
    conf = sc._jsc.hadoopConfiguration()
    before = conf.get("fs.defaultFS")
    conf.set("fs.defaultFS", "nofs://host")
    try:
        with pytest.raises(StorageError, match="nofs"):
            KerasTransformer(model=small()).save(str(tmp_path / "here"))
    finally:
        conf.set("fs.defaultFS", before)
    assert not (tmp_path / "here").exists()


def test_custom_code_inside_a_function_must_be_registered_with_keras(tmp_path):
    class Tripled(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 3

    scorer = KerasTransformer(model=custom(Tripled()))
    with pytest.raises(CustomObjectError, match="custom code is .*Tripled.*custom_object_scope"):
        scorer.save(str(tmp_path / "refused"))
    path = str(tmp_path / "scoped")
    with keras.saving.custom_object_scope({"Tripled": Tripled}):
        PipelineModel(stages=[scorer]).save(path)
    with pytest.raises(CustomObjectError, match="custom code is missing.*Tripled"):
        PipelineModel.load(path)
    with keras.saving.custom_object_scope({"Tripled": Tripled}):
        (loaded,) = PipelineModel.load(path).stages
    same_model(loaded.get_model(), scorer.get_model())


def test_lambda_layers_need_unsafe_deserialization_to_load(tmp_path):
    model = custom(keras.layers.Lambda(lambda x: x * 2, output_shape=(1,)))
    path = str(tmp_path / "lambda")
    KerasTransformer(model=model).save(path)
    with pytest.raises(ModelError, match="keras.config.enable_unsafe_deserialization"):
        KerasTransformer.load(path)
    from keras.src.saving.serialization_lib import SafeModeScope

    with SafeModeScope(None):
        keras.config.enable_unsafe_deserialization()
        same_model(KerasTransformer.load(path).get_model(), model)


def test_callbacks_and_validation_data_are_not_saved_and_warnings_say_so(frame, tmp_path):
    path = str(tmp_path / "calling")
    estimator = KerasEstimator(callbacks=[keras.callbacks.TerminateOnNaN()], validation_data=frame)
    with pytest.warns(UserWarning, match="cannot be saved") as warned:
        estimator.save(path)
    ours = [each for each in warned if each.filename == __file__]
    assert [str(each.message).split("'")[1] for each in ours] == ["callbacks", "validation_data"]
    loaded = KerasEstimator.load(path)
    assert (loaded.getModel(), loaded.getCallbacks(), loaded.getValidationData()) == (None, None, None)


def test_subclasses_are_loaded_as_subclasses(tmp_path):
    scorer = stages.ChurnTransformer(model=small(), cutoff=0.75, task="multiclass")
    Pipeline(stages=[scorer, stages.ChurnEstimator(seed=4)]).save(str(tmp_path / "here"))
    loaded, estimator = Pipeline.load(str(tmp_path / "here")).getStages()
    assert (type(loaded), type(estimator)) == (stages.ChurnTransformer, stages.ChurnEstimator)
    assert (loaded.getCutoff(), loaded.getTask(), loaded.uid) == (0.75, "multiclass", scorer.uid)
    assert (estimator.getEpochs(), estimator.getSeed()) == (3, 4)
    same_model(loaded.get_model(), scorer.get_model())
    (folder,) = (tmp_path / "here" / "stages").glob("*Churn*Transformer*")
    with pytest.raises(ModelError, match="holds a .*ChurnTransformer; expected"):
        KerasTransformer.load(str(folder))


def test_a_search_over_models_is_saved_and_loaded(tmp_path):
    estimator = KerasEstimator(model=small(), labelCol="y")
    models = [custom(parts.Scale(2.0), parts.squared), custom(parts.Scale(3.0))]
    grid = ParamGridBuilder().addGrid(estimator.model, models).addGrid(estimator.class_weight, [None, {1: 2.0}]).build()
    search = TrainValidationSplit(
        estimator=Pipeline(stages=[estimator]), estimatorParamMaps=grid, evaluator=MulticlassClassificationEvaluator()
    )
    found = search._copyValues(TrainValidationSplitModel(KerasTransformer(model=models[1]), [0.1, 0.2, 0.3, 0.4]))
    found.save(str(tmp_path / "found"))
    again = TrainValidationSplitModel.load(str(tmp_path / "found"))
    (stage,) = again.getEstimator().getStages()
    taken = [stage.copy(values) for values in again.getEstimatorParamMaps()]
    assert [each.getModel().layers[-1].factor for each in taken] == [2.0, 2.0, 3.0, 3.0]
    assert [each.getClassWeight() for each in taken] == [None, {1: 2.0}] * 2
    assert taken[0].getModel().loss is parts.squared
    same_model(taken[2].getModel(), models[1])
    (calling,) = ParamGridBuilder().addGrid(estimator.callbacks, [[keras.callbacks.TerminateOnNaN()]]).build()
    with pytest.raises(CustomObjectError, match=r"callbacks in the grid\[0\]"):
        search.setEstimatorParamMaps([calling]).save(str(tmp_path / "calling"))


def test_a_context_without_a_session_is_enough(spark, tmp_path, monkeypatch):
    spark._jvm.SparkSession.clearActiveSession()
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    KerasEstimator(epochs=3).save(str(tmp_path / "bare"))
    assert KerasEstimator.load(str(tmp_path / "bare")).getEpochs() == 3
