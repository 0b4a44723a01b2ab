"""Params without Spark: names, defaults, checks, accessors, copies."""

import inspect
import json

import keras
import numpy as np
import pytest

from sparkkeras import (
    ConfigurationError,
    CustomObjectError,
    DataError,
    DiLoCo,
    ModelError,
    ParameterServerOptions,
    SparkModel,
    StorageError,
    UnknownArgumentError,
)
from sparkkeras.formats.images import image_loader
from sparkkeras.ml import ImageFeaturizer, KerasEstimator, KerasTransformer
from sparkkeras.ml.persistence import content_of
from tests.ml import parts, stages
from tests.models import classifier

CLASSES = [KerasEstimator, KerasTransformer, ImageFeaturizer]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_argument_is_a_param_with_its_default(kind):
    arguments = inspect.signature(kind).parameters
    made = kind()
    # A transformer's model is not a param, or a search over models would set it to the untrained model.
    assert {param.name for param in made.params} | {"model"} == set(arguments)
    for param in made.params:
        assert param.doc
        assert not made.isSet(param)
        if made.isDefined(param):
            assert made.getOrDefault(param) == arguments[param.name].default
    assert "inferenceBatchSize: " in made.explainParams()


def test_params_have_the_names_and_defaults_of_spark_models_arguments():
    renamed = {"validation_col", "features", "label", "sample_weight", "data", "y", "self"}
    renamed |= {"checkpoint", "resume"}  # of SparkModel only
    for function in (SparkModel.__init__, SparkModel.fit):
        for name, given in inspect.signature(function).parameters.items():
            if name in renamed or name in ("model", "batch_size", "on_invalid"):
                continue
            assert KerasEstimator().getOrDefault(name) == given.default, name
    assert KerasEstimator().getOrDefault("batch_size") == inspect.signature(SparkModel).parameters["batch_size"].default


def test_setters_and_getters():
    estimator = KerasEstimator().setNumWorkers(3).setFeaturesCol(["a", "b"]).setHandleInvalid("skip").setLearningRate(0.5)
    assert (estimator.getNumWorkers(), estimator.getFeaturesCol()) == (3, ["a", "b"])
    assert (estimator.getHandleInvalid(), estimator.getLearningRate(), estimator.getEpochs()) == ("skip", 0.5, 1)
    assert estimator.setParams(epochs=4, mode="hogwild").getEpochs() == 4
    assert estimator.set(estimator.seed, np.int64(7)) is None
    assert estimator.getSeed() == 7
    for kind in CLASSES:
        for param in kind().params:
            end = "".join(part[:1].upper() + part[1:] for part in param.name.split("_"))
            assert getattr(kind, f"get{end}").__doc__
            assert getattr(kind, f"set{end}").__doc__


@pytest.mark.parametrize("kind", CLASSES)
def test_an_unknown_argument_is_reported_with_the_known_ones(kind):
    with pytest.raises(UnknownArgumentError, match=r"takes no argument 'outputcol'. Known: .*Did you mean 'outputCol'\?"):
        kind(outputcol="x")
    with pytest.raises(UnknownArgumentError, match=r"has no param 'infernceBatchSize'.*Did you mean 'inferenceBatchSize'\?"):
        kind().setParams(infernceBatchSize=3)


def test_a_server_setting_is_reported_with_the_argument_it_belongs_to():
    with pytest.raises(UnknownArgumentError, match="belongs in server_options=ParameterServerOptions"):
        KerasEstimator(encrypt=True)


def test_arguments_are_keyword_only():
    with pytest.raises(TypeError, match="KerasEstimator takes no arguments by position, received 1: name the others"):
        KerasEstimator(classifier())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", 0, "epochs=0: expected a positive whole number"),
        ("epochs", None, "epochs=None: expected a positive whole number"),
        ("batch_size", 1.5, "batch_size=1.5: expected"),
        ("num_workers", "two", "num_workers='two': expected"),
        ("validation_data", [1], "validation_data is a list of 1 value; expected a Spark DataFrame"),
        ("validation_split", 1.0, r"validation_split=1.0: expected a number in \[0, 1\)"),
        ("mode", "async", "mode='async' is not known. Known: 'allreduce', 'asynchronous'"),
        ("frequency", "day", "frequency='day': expected"),
        ("gradient_dtype", "float32", "gradient_dtype='float32': leave it out"),
        ("port", 70000, "port=70000: expected"),
        ("rule", "dilocco", "rule='dilocco' is not known.*Did you mean 'diloco'"),
        ("rule", DiLoCo, "is a class; expected an object"),
        ("server_options", {}, "ParameterServerOptions"),
        ("shuffle", 2, 'shuffle=2: expected True, False or "global"'),
        ("learning_rate", -1, "learning_rate=-1: expected a positive number"),
        ("learning_rate", float("nan"), "learning_rate=nan: expected a positive number"),
        ("class_weight", {"a": 1}, "expected a dict from class indices"),
        ("class_weight", {0: -0.5}, "to finite weights of at least 0"),
        ("class_weight", [1, 2], "expected a dict from class indices"),
        ("featuresCol", 3, "featuresCol is .*3.*; expected the name of a column"),
        ("featuresCol", [], "expected the name of a column"),
        ("featuresCol", {"left": 2}, r"featuresCol\['left'\] is"),
        ("labelCol", "", "expected a non-empty string"),
        ("predictionCol", 3, "predictionCol is .*; expected a column name"),
        ("outputType", "list", "outputType='list' is not known"),
        ("task", "classification", "task='classification' is not known"),
        ("task", {"left": "count"}, r"task\['left'\]='count' is not known"),
        ("handleInvalid", "keep", "handleInvalid='keep' is not known. Known: 'error', 'skip'"),
        ("thresholds", 0.5, "thresholds=0.5: expected a list with one threshold for each class"),
        ("thresholds", [0.5], r"thresholds=\[0.5\]: expected a list"),
        ("thresholds", [0.5, -0.1], "all greater than 0; one may be 0"),
        ("thresholds", [0, 0, 1], "all greater than 0; one may be 0"),
        ("thresholds", [0.5, float("nan")], "all greater than 0"),
        ("thresholds", {"kind": [[1], [2, 3]]}, r"thresholds\['kind'\]=.*: expected a list"),
        ("verbose", 5, "verbose=5 is not known"),
        ("callbacks", ["EarlyStopping"], "expected keras.callbacks.Callback objects"),
        ("custom_objects", [parts.Scale], "expected a dict from names to classes, functions or objects"),
        ("transform", "halved", "transform='halved': expected a function"),
        ("loader", "images", "expected a loader such as image_loader"),
    ],
)
def test_an_invalid_value_is_reported_when_it_is_set(name, value, message):
    for make in (lambda: KerasEstimator(**{name: value}), lambda: KerasEstimator().setParams(**{name: value})):
        with pytest.raises(ConfigurationError, match=message):
            make()
    estimator = KerasEstimator()
    with pytest.raises(ConfigurationError, match=message):
        estimator.copy({estimator.getParam(name): value})


def test_a_missing_or_invalid_model_is_reported():
    for kind in (KerasEstimator, KerasTransformer):
        with pytest.raises(ModelError, match="model is .*; expected a keras.Model"):
            kind(model="resnet")
    with pytest.raises(ModelError, match="has no model: pass one, KerasTransformer"):
        KerasTransformer().get_model()


def test_a_copy_has_the_params_and_leaves_the_original_alone():
    model = classifier()
    estimator = KerasEstimator(model=model, epochs=2, server_options=ParameterServerOptions(timeout=9))
    other = estimator.copy({estimator.epochs: 5, estimator.batch_size: 8})
    assert (other.getEpochs(), other.getBatchSize(), other.getModel()) == (5, 8, model)
    assert (estimator.getEpochs(), estimator.getBatchSize(), other.uid) == (2, 32, estimator.uid)
    assert other.getServerOptions().timeout == 9


def test_json_compatible_values_survive_a_round_trip():
    """Spark saves the values of a grid as JSON and sets them when it loads the grid."""
    for name, value in {
        "learning_rate": 0.1,
        "featuresCol": {"left": ["a", "b"], "right": "c"},
        "outputCol": ["x", "y"],
        "rule": "diloco",
        "frequency": "batch",
        "thresholds": np.array([0.25, 0.5, 0.0]),
        "rawPredictionCol": {"end": "logits"},
    }.items():
        first = KerasEstimator(**{name: value}).getOrDefault(name)
        assert KerasEstimator(**{name: json.loads(json.dumps(first))}).getOrDefault(name) == first


def test_image_featurizer_accepts_the_names_of_keras_applications():
    assert ImageFeaturizer(model="ResNet50", size=[32, 48]).getSize() == (32, 48)
    with pytest.raises(ConfigurationError, match=r"model='resnet50' is not known.*Did you mean 'ResNet50'\?"):
        ImageFeaturizer(model="resnet50")
    with pytest.raises(ConfigurationError, match=r"model='ResNet50' needs weights: .*weights=None for random ones"):
        ImageFeaturizer(model="ResNet50").get_model()
    with pytest.raises(ModelError, match="cannot be built"):
        ImageFeaturizer(model="MobileNetV2", weights="/no/such/file.h5").get_model()
    with pytest.raises(ConfigurationError, match=r"size=3: expected \(height, width\)"):
        ImageFeaturizer(size=3)
    with pytest.raises(ConfigurationError, match="expected 'auto', a function on a batch, a factor"):
        ImageFeaturizer(preprocessing="resnet")


def test_image_featurizer_resizes_as_keras_does_by_default():
    network = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()])
    assert ImageFeaturizer(model=network)._loader(network).interpolation == "nearest"
    featurizer = ImageFeaturizer(model=network).setInterpolation("box")
    assert featurizer._loader(network) == image_loader((8, 8), interpolation="box")
    assert content_of(featurizer)[1]["interpolation"] == "box"
    with pytest.raises(ConfigurationError, match="interpolation='cubic'.*'bicubic'"):
        ImageFeaturizer(interpolation="cubic")


@pytest.mark.programs
def test_importing_does_not_start_spark():
    import os
    import subprocess
    import sys

    code = (
        "import sparkkeras.ml, pyspark; from sparkkeras.ml import *; KerasEstimator(); KerasTransformer();"
        "assert pyspark.SparkContext._active_spark_context is None and pyspark.SparkContext._gateway is None"
    )
    environment = os.environ | {"KERAS_BACKEND": "jax"}  # the backend that loads fastest
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_transform_of_a_transformer_is_a_method_not_a_param():
    assert not hasattr(KerasTransformer, "setTransform")
    assert callable(KerasTransformer(model=classifier()).transform)
    assert isinstance(KerasTransformer(model=classifier()).get_model(), keras.Model)


def test_handle_invalid_takes_sparks_values():
    assert KerasTransformer(handleInvalid="keep").getHandleInvalid() == "keep"
    assert KerasTransformer().getThresholds() is None
    assert KerasTransformer(thresholds=(1, 3)).getThresholds() == [1.0, 3.0]
    with pytest.raises(ConfigurationError, match="Known: 'error', 'keep', 'skip'"):
        KerasTransformer(handleInvalid="drop")
    for kind in (KerasEstimator, KerasTransformer):
        with pytest.raises(UnknownArgumentError, match="takes no argument 'on_invalid'"):
            kind(on_invalid="error")


def test_an_unknown_param_name_is_reported_everywhere():
    estimator = KerasEstimator()
    for look_up in (estimator.getParam, estimator.getOrDefault, estimator.isSet, estimator.explainParam):
        with pytest.raises(UnknownArgumentError, match=r"KerasEstimator has no param 'epoch'.*Did you mean 'epochs'\?"):
            look_up("epoch")
    with pytest.raises(UnknownArgumentError, match=r"has no param 'epoch'.*Did you mean 'epochs'\?"):
        estimator.copy({"epoch": 3})
    with pytest.raises(
        UnknownArgumentError, match=r"the key 'epochs' is a name, not a Param: pass the param itself, {stage.epochs: "
    ):
        estimator.copy({"epochs": 3})
    assert estimator.copy({KerasTransformer().task: "binary"}).getTask() == "auto"  # a param of another stage is ignored


def test_a_subclass_may_have_plain_spark_params():
    made = stages.ChurnTransformer(cutoff=2, task="binary")
    assert (made.getCutoff(), made.getTask(), made.setCutoff(1).getCutoff()) == (2.0, "binary", 1.0)
    assert made.copy({made.cutoff: 3}).getCutoff() == 3.0
    assert stages.ChurnEstimator(seed=1).getEpochs() == 3
    with pytest.raises(UnknownArgumentError, match="Did you mean 'epochs'"):
        stages.ChurnEstimator(epoch=1)


@pytest.mark.parametrize("kind", CLASSES)
def test_saving_and_loading_without_a_session_is_reported(kind, monkeypatch, tmp_path):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    with pytest.raises(StorageError, match=r"saving an estimator or transformer needs a Spark session.*getOrCreate\(\)"):
        kind().save(str(tmp_path / "stage"))
    with pytest.raises(StorageError, match="loading an estimator or transformer needs a Spark session"):
        kind.load(str(tmp_path / "stage"))


def test_saving_a_class_that_could_not_be_loaded_is_reported(tmp_path):
    class Local(KerasTransformer):
        pass

    with pytest.raises(CustomObjectError, match=r"Local cannot be saved: .*at the top level of a module or script"):
        Local().save(str(tmp_path / "local"))
    with pytest.raises(CustomObjectError, match=r"requires \['country'\]. Give each argument a default"):
        stages.DemandingTransformer("at").save(str(tmp_path / "demanding"))


@pytest.mark.parametrize("data", [None, np.zeros((2, 64)), [1, 2], "table"], ids=["none", "array", "list", "text"])
def test_data_that_is_not_a_data_frame_is_reported(data):
    transformer = KerasTransformer(model=classifier())
    for call in (
        KerasEstimator(model=classifier()).fit,
        transformer.transform,
        transformer.evaluate,
        ImageFeaturizer(model=keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Flatten()])).transform,
    ):
        with pytest.raises(
            DataError, match=r"expects a Spark DataFrame\. Create one from arrays with .*to_data_frame\(spark"
        ):
            call(data)


def test_a_transformer_shows_its_class():
    """Its uid is that of the estimator that fitted it, as with Spark's models."""
    estimator = KerasEstimator()
    fitted = estimator._fitted(None, {})
    assert repr(fitted) == f"KerasTransformer: uid={estimator.uid}"
    assert repr(KerasTransformer()).startswith("KerasTransformer_")
