"""Saving and loading of estimators and transformers, with errors that leave existing folders unchanged."""

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import (
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)
from pyspark.sql import SparkSession

from sparkkeras import (
    Checkpoint,
    CustomObjectError,
    ModelError,
    ParameterServerOptions,
    StorageError,
    load_spark_model,
)
from sparkkeras.formats.images import image_loader
from sparkkeras.ml import KerasEstimator, KerasTransformer
from sparkkeras.spark import filesystem
from tests.ml import parts, stages
from tests.models import classifier

pytestmark = pytest.mark.usefixtures("sc")

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def spark(sc):
    return SparkSession(sc)


@pytest.fixture
def frame(spark):
    return spark.createDataFrame(
        [(row.tolist(), index % 3) for index, row in enumerate(ROWS)], "features array<float>, label int"
    )


def small(**compiled):
    return classifier(4, 5, 3, **compiled)


def custom(layer, loss="mse"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="end"), layer])
    model.compile(optimizer="sgd", loss=loss)
    return model


def same_model(mine, other):
    np.testing.assert_array_equal(mine(ROWS), other(ROWS))  # calls, since each model would be traced to predict


def test_every_param_of_an_estimator_is_loaded(tmp_path):
    given = {
        "featuresCol": ["a", "b"], "labelCol": "y", "outputCol": {"scores": "raw"}, "epochs": 7, "learning_rate": 0.5,
        "mode": "synchronous", "frequency": 3, "rule": Damped(0.25), "class_weight": {0: 1.0, 2: 0.5},
        "server_options": ParameterServerOptions(timeout=7.0), "seed": 3, "transform": parts.halved, "handleInvalid": "skip",
        "thresholds": [0.25, 0.5, 0.0], "rawPredictionCol": "logits",
        "checkpoint": Checkpoint("runs/a", 2, 9.5), "resume": True,
        "loader": image_loader((8, 8), "L", 1 / 255), "custom_objects": {"Scale": parts.Scale}, "num_workers": 2,
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
    files = {path.name for path in (tmp_path / "estimator").iterdir()}
    assert files == {"metadata", "model.keras"}
    assert "pickle" not in next((tmp_path / "estimator" / "metadata").glob("part-*")).read_text()


def test_an_existing_folder_is_only_overwritten_on_request(tmp_path):
    path = f"file://{tmp_path}/here"
    kept, other = (KerasTransformer(model=small(seed=seed)) for seed in range(2))
    kept.save(path)
    with pytest.raises(StorageError, match=r"already exists: use write\(\).overwrite\(\)"):
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


@pytest.mark.parametrize(("on_hadoop", "call"), [(False, 0), (False, 1), (False, 2), (False, 3), (True, 2)])
def test_a_process_that_dies_while_it_replaces_a_folder_loses_nothing(tmp_path, hadoop_uri, monkeypatch, on_hadoop, call):
    path, aside = f"{hadoop_uri if on_hadoop else tmp_path}/here", tmp_path / ".here.previous"
    old, new, third = (KerasTransformer(model=small(seed=seed)) for seed in range(3))
    old.save(path)
    old.save(path.replace("here", ".here.previous"))  # another process has died before
    with pytest.raises(SystemExit):
        replace_with_fault(monkeypatch, new, path, call, killed)
    is_there = (tmp_path / "here").exists()
    with nullcontext() if is_there else pytest.warns(UserWarning, match="a process ended while it replaced"):
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
    with pytest.raises(StorageError, match="the new folder .* is complete, .*: cannot write '.*here': no"):
        replace_with_fault(monkeypatch, new, path, call, refused)
    same_model(KerasTransformer.load(path).get_model(), old.get_model())


def changed(folder, change):
    part = next((folder / "metadata").glob("part-*"))
    metadata = json.loads(part.read_text())
    change(metadata)
    part.write_text(json.dumps(metadata))


def test_folders_that_hold_no_stage_of_the_class_are_reported(tmp_path):
    path = tmp_path / "here"

    def check(error, message):
        with pytest.raises(error, match=message):
            KerasTransformer.load(str(path))

    check(StorageError, "there is no saved estimator or transformer at")
    (path / "metadata").mkdir(parents=True)
    check(ModelError, "was not written by sparkkeras")
    PipelineModel(stages=[]).write().overwrite().save(str(path))
    check(ModelError, r"holds a .*PipelineModel; expected")
    KerasEstimator(epochs=3).write().overwrite().save(str(path))
    assert KerasEstimator.load(str(path)).getModel() is None
    check(ModelError, "holds a sparkkeras.ml.KerasEstimator; expected a sparkkeras.ml.KerasTransformer")
    KerasTransformer(model=small()).write().overwrite().save(str(path))
    (path / "model.keras").write_bytes(b"no archive")
    check(ModelError, "is not a .keras archive")
    (path / "model.keras").unlink()
    check(StorageError, "cannot read")
    changed(path, lambda metadata: metadata["sparkkeras"].update(format=2))
    check(ModelError, "written by a later version")
    changed(path, lambda metadata: metadata.pop("sparkkeras"))
    check(ModelError, "was not written by sparkkeras: its metadata has no 'sparkkeras'")


@pytest.mark.parametrize(("where", "function"), [("code", "os:system"), ("custom_objects", "_pytest.outcomes:importorskip")])
def test_a_folder_cannot_make_keras_call_arbitrary_functions(tmp_path, where, function):
    ran = tmp_path / "ran"
    model = custom(keras.layers.Lambda(parts.piped, arguments={"command": f"touch {ran}"}, output_shape=(1,)))
    assert not ran.exists()
    path = tmp_path / "here"
    KerasTransformer(model=model).save(str(path))
    assert KerasTransformer.load(str(path)).get_model().layers[-1].function is parts.piped
    changed(path, lambda metadata: metadata["sparkkeras"].update({"code": {}, where: {"piped": function}}))
    with pytest.raises(CustomObjectError, match=r"may only name a function defined with def|is not defined there"):
        KerasTransformer.load(str(path))
    assert not ran.exists()
    with keras.saving.custom_object_scope({"piped": parts.piped}):  # the caller's scope takes precedence
        assert KerasTransformer.load(str(path)).get_model().layers[-1].function is parts.piped


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
    with pytest.raises(CustomObjectError, match=r"the model's custom code is .*Tripled.*custom_object_scope"):
        scorer.save(str(tmp_path / "refused"))
    path = str(tmp_path / "scoped")
    with keras.saving.custom_object_scope({"Tripled": Tripled}):
        PipelineModel(stages=[scorer]).save(path)
    with pytest.raises(CustomObjectError, match=r"custom code is missing.*custom_object_scope.*Tripled"):
        PipelineModel.load(path)
    with keras.saving.custom_object_scope({"Tripled": Tripled}):
        (loaded,) = PipelineModel.load(path).stages
    same_model(loaded.get_model(), scorer.get_model())


def test_lambda_layers_need_unsafe_deserialization_to_load(tmp_path):
    model = custom(keras.layers.Lambda(lambda x: x * 2, output_shape=(1,)))
    path = str(tmp_path / "lambda")
    KerasTransformer(model=model).save(path)
    with pytest.raises(ModelError, match=r"call keras.config.enable_unsafe_deserialization\(\) before"):
        KerasTransformer.load(path)
    from keras.src.saving.serialization_lib import SafeModeScope

    with SafeModeScope(None):
        keras.config.enable_unsafe_deserialization()
        same_model(KerasTransformer.load(path).get_model(), model)


def test_callbacks_and_validation_data_are_not_saved_and_warnings_say_so(frame, tmp_path):
    estimator = KerasEstimator(model=small(), callbacks=[keras.callbacks.TerminateOnNaN()], validation_data=frame)
    with pytest.warns(UserWarning, match="cannot be saved and is left out. Set it again after loading") as warned:
        estimator.save(str(tmp_path / "calling"))
    ours = [each for each in warned if each.filename == __file__]
    assert [str(each.message).split("'")[1] for each in ours] == ["callbacks", "validation_data"]
    loaded = KerasEstimator.load(str(tmp_path / "calling"))
    assert (loaded.getCallbacks(), loaded.getValidationData()) == (None, None)


@dataclass(frozen=True)
class Damped:
    share: float = 0.5
    modes: ClassVar[frozenset] = frozenset({"synchronous"})

    def init(self, center):
        return {}

    def apply(self, center, state, update, staleness):
        center += self.share * (update.sent - center)


def test_subclasses_are_loaded_as_subclasses(tmp_path):
    path = str(tmp_path / "here")
    scorer = stages.ChurnTransformer(model=small(), cutoff=0.75, task="multiclass")
    Pipeline(stages=[scorer, stages.ChurnEstimator(seed=4)]).save(path)
    loaded, estimator = Pipeline.load(path).getStages()
    assert (type(loaded), type(estimator)) == (stages.ChurnTransformer, stages.ChurnEstimator)
    assert (loaded.getCutoff(), loaded.getTask(), loaded.uid) == (0.75, "multiclass", scorer.uid)
    assert (estimator.getEpochs(), estimator.getSeed()) == (3, 4)
    same_model(loaded.get_model(), scorer.get_model())
    (folder,) = Path(path, "stages").glob("*Churn*Transformer*")
    with pytest.raises(ModelError, match=r"holds a tests.ml.stages.ChurnTransformer; expected a sparkkeras.ml.KerasTransf"):
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
    with pytest.raises(CustomObjectError, match=r"param callbacks in the grid\[0\] is .*cannot be saved"):
        search.setEstimatorParamMaps([calling]).save(str(tmp_path / "calling"))


def test_a_context_without_a_session_is_enough(sc, spark, tmp_path, monkeypatch):
    spark._jvm.SparkSession.clearActiveSession()
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    KerasEstimator(epochs=3).save(str(tmp_path / "bare"))
    assert KerasEstimator.load(str(tmp_path / "bare")).getEpochs() == 3
