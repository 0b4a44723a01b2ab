"""Params without Spark: names, defaults, checks, accessors, copies."""

import inspect
import json

import keras
import numpy as np
import pytest
from pyspark.ml.tuning import ParamGridBuilder

from sparkkeras import (
    ConfigurationError,
    CustomObjectError,
    DataError,
    DiLoCo,
    ModelError,
    SparkModel,
    StorageError,
    UnknownArgumentError,
)
from sparkkeras.ml import GridValue, ImageFeaturizer, KerasEstimator, KerasTransformer
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
    estimator = KerasEstimator().setNumWorkers(3).setFeaturesCol(["a", "b"])
    assert (estimator.getNumWorkers(), estimator.getFeaturesCol(), estimator.getEpochs()) == (3, ["a", "b"], 1)
    assert estimator.setParams(epochs=4, mode="hogwild").getEpochs() == 4
    estimator.set(estimator.seed, np.int64(7))
    assert estimator.getSeed() == 7
    for kind in CLASSES:
        for param in kind().params:
            end = "".join(part[:1].upper() + part[1:] for part in param.name.split("_"))
            assert getattr(kind, f"get{end}").__doc__
            assert getattr(kind, f"set{end}").__doc__


@pytest.mark.parametrize("kind", CLASSES)
def test_an_unknown_argument_is_reported_with_the_known_ones(kind):
    with pytest.raises(UnknownArgumentError, match="'outputcol'. Known: .*mean 'outputCol'"):
        kind(outputcol="x")
    with pytest.raises(UnknownArgumentError, match="'infernceBatchSize'.*mean 'inferenceBatchSize'"):
        kind().setParams(infernceBatchSize=3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", 0, "epochs=0"),
        ("validation_data", [1], "validation_data is a list"),
        ("rule", "dilocco", "rule='dilocco'.*'diloco'"),
        ("featuresCol", 3, "featuresCol is int 3"),
        ("featuresCol", {"left": 2}, r"featuresCol\['left'\] is"),
        ("labelCol", "", "labelCol"),
        ("predictionCol", 3, "predictionCol is int 3"),
        ("task", {"left": "count"}, r"task\['left'\]='count'"),
        ("handleInvalid", "keep", "'keep' .*Known: 'error', 'skip'"),
        ("thresholds", [0.5], r"thresholds=\[0.5\]"),
        ("thresholds", [0.5, -0.1], "greater than 0"),
        ("thresholds", [0, 0, 1], "one may be 0"),
        ("thresholds", {"kind": [[1], [2, 3]]}, r"thresholds\['kind'\]="),
        ("loader", "images", "image_loader"),
    ],
)
def test_an_invalid_value_is_reported_when_it_is_set(name, value, message):
    estimator = KerasEstimator()
    for make in (KerasEstimator, estimator.setParams):
        with pytest.raises(ConfigurationError, match=message):
            make(**{name: value})
    with pytest.raises(ConfigurationError, match=message):
        estimator.copy({estimator.getParam(name): value})


def test_an_invalid_model_is_reported():
    for kind in (KerasEstimator, KerasTransformer):
        with pytest.raises(ModelError, match="expected a keras.Model"):
            kind(model="resnet")


def test_a_copy_has_the_params_and_leaves_the_original_alone():
    estimator = KerasEstimator(model=classifier(), epochs=2)
    other = estimator.copy({estimator.epochs: 5})
    assert (other.getEpochs(), other.getModel(), other.uid) == (5, estimator.getModel(), estimator.uid)
    assert estimator.getEpochs() == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "resnet50"}, "'resnet50' .*mean 'ResNet50'"),
        ({"size": 3}, r"size=3: .*\(height, width\)"),
        ({"preprocessing": "resnet"}, "preprocessing is str"),
    ],
)
def test_arguments_of_an_image_featurizer_are_checked(given, message):
    with pytest.raises(ConfigurationError, match=message):
        ImageFeaturizer(**given)


def test_image_featurizer_accepts_the_names_of_keras_applications():
    featurizer = ImageFeaturizer(model="ResNet50", size=[32, 48])
    assert featurizer.getSize() == (32, 48)
    with pytest.raises(ConfigurationError, match="'ResNet50' needs weights: .*weights=None"):
        featurizer.get_model()
    with pytest.raises(ModelError, match="cannot be built"):
        ImageFeaturizer(model="MobileNetV2", weights="/no/such/file.h5").get_model()


def test_handle_invalid_takes_sparks_values():
    with pytest.raises(ConfigurationError, match="Known: 'error', 'keep', 'skip'"):
        KerasTransformer(handleInvalid="drop")
    with pytest.raises(UnknownArgumentError, match="'on_invalid'"):
        KerasEstimator(on_invalid="error")


def test_an_unknown_param_name_is_reported_everywhere():
    estimator = KerasEstimator()
    for call in (estimator.getParam, estimator.getOrDefault, estimator.isSet, lambda name: estimator.copy({name: 3})):
        with pytest.raises(UnknownArgumentError, match="'epoch'.*mean 'epochs'"):
            call("epoch")
    with pytest.raises(UnknownArgumentError, match="'epochs' is a name.*stage.epochs"):
        estimator.copy({"epochs": 3})
    assert estimator.copy({KerasTransformer().task: "binary"}).getTask() == "auto"  # a param of another stage is ignored


def test_a_subclass_may_have_plain_spark_params():
    made = stages.ChurnTransformer(cutoff=2, task="binary")
    assert (made.getCutoff(), made.getTask(), made.setCutoff(1).getCutoff()) == (2.0, "binary", 1.0)
    assert made.copy({made.cutoff: 3}).getCutoff() == 3.0
    assert stages.ChurnEstimator(seed=1).getEpochs() == 3


def test_saving_and_loading_without_a_session_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    for call in (KerasEstimator().save, KerasEstimator.load):
        with pytest.raises(StorageError, match="needs a Spark session.*getOrCreate"):
            call(str(tmp_path / "stage"))


def test_saving_a_class_that_could_not_be_loaded_is_reported(tmp_path):
    class Local(KerasTransformer):
        pass

    with pytest.raises(CustomObjectError, match="Local .*at the top level"):
        Local().save(str(tmp_path / "local"))
    with pytest.raises(CustomObjectError, match=r"\['country'\].*a default"):
        stages.DemandingTransformer("at").save(str(tmp_path / "demanding"))


def test_data_that_is_not_a_data_frame_is_reported():
    transformer = KerasTransformer(model=classifier())
    images = ImageFeaturizer(model=keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Flatten()]))
    for call in (KerasEstimator(model=classifier()).fit, transformer.transform, transformer.evaluate, images.transform):
        with pytest.raises(DataError, match="a Spark DataFrame.*to_data_frame"):
            call(np.zeros((2, 64)))


# Grids: values that JSON cannot hold


def test_values_that_json_cannot_hold_are_wrapped_and_unwrapped():
    small, large = classifier(units=2), classifier(units=4)
    estimator = KerasEstimator()
    grid = (
        ParamGridBuilder().addGrid(estimator.model, [small, large]).addGrid(estimator.rule, [DiLoCo(momentum=0.5)]).build()
    )
    assert [type(value) for value in grid[0].values()] == [GridValue, GridValue]
    assert [estimator.copy(values).getModel() for values in grid] == [small, large]
    assert estimator.copy(grid[1]).getRule() == DiLoCo(momentum=0.5)
    assert estimator.setModel(grid[1][estimator.model]).getModel() is large


def test_values_that_json_can_hold_are_not_wrapped():
    estimator = KerasEstimator()
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.1]).addGrid(estimator.thresholds, [None, [0.5, 1]]).build()
    values = [list(each.values()) for each in grid]
    assert values == [[0.1, None], [0.1, [0.5, 1.0]]]
    assert json.loads(json.dumps(values)) == values
    (weighted,) = ParamGridBuilder().addGrid(estimator.class_weight, [{0: 1, 1: 2}]).build()
    assert weighted[estimator.class_weight].value == {0: 1.0, 1: 2.0}  # JSON would turn the keys into strings


def test_a_grid_checks_its_values():
    with pytest.raises(ConfigurationError, match="transform='halved'"):
        ParamGridBuilder().addGrid(KerasEstimator().transform, [parts.halved, "halved"]).build()
