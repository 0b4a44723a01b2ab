"""Saving and loading of estimators and transformers, with errors that leave existing folders unchanged."""

import json
import re
import subprocess
import sys
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
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)
from pyspark.sql import SparkSession

from sparkkeras import (
    Checkpoint,
    CustomObjectError,
    DiLoCo,
    ModelError,
    ParameterServerOptions,
    StorageError,
    load_spark_model,
)
from sparkkeras.formats.images import image_loader
from sparkkeras.ml import KerasEstimator, KerasTransformer, persistence
from sparkkeras.spark import filesystem
from tests.conftest import long
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
        "mode": "synchronous", "frequency": 3, "rule": DiLoCo(momentum=0.5), "class_weight": {0: 1.0, 2: 0.5},
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


def test_an_estimator_without_a_model(tmp_path):
    KerasEstimator(epochs=3).save(str(tmp_path / "bare"))
    loaded = KerasEstimator.load(str(tmp_path / "bare"))
    assert (loaded.getModel(), loaded.getEpochs()) == (None, 3)
    with pytest.raises(ModelError, match="holds a sparkkeras.ml.KerasEstimator; expected a sparkkeras.ml.KerasTransformer"):
        KerasTransformer.load(str(tmp_path / "bare"))


def test_a_transformer_with_an_uncompiled_model(frame, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="end")])
    KerasTransformer(model=model, batch_transform=parts.Shifted(2.0)).save(str(tmp_path / "plain"))
    loaded = KerasTransformer.load(str(tmp_path / "plain"))
    assert loaded.getBatchTransform() == parts.Shifted(2.0)
    assert loaded.history == {}
    output = np.array([row.output for row in loaded.transform(frame).collect()])
    np.testing.assert_allclose(output, model.predict(ROWS + 2, verbose=0), rtol=1e-5)


def test_an_existing_folder_is_only_overwritten_on_request(tmp_path):
    path = str(tmp_path / "here")
    KerasTransformer(model=small()).save(path)
    before = sorted(file.read_bytes() for file in Path(path).rglob("*") if file.is_file())
    with pytest.raises(StorageError, match=r"already exists: use write\(\).overwrite\(\)"):
        KerasTransformer(model=small(seed=1)).save(path)
    assert sorted(file.read_bytes() for file in Path(path).rglob("*") if file.is_file()) == before
    other = KerasTransformer(model=small(seed=1))
    other.write().overwrite().save(path)
    same_model(KerasTransformer.load(path).get_model(), other.get_model())
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="already exists"):
        other.save(str(tmp_path / "empty"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "here"]


def test_an_error_while_saving_leaves_the_old_folder_unchanged(tmp_path):
    path = str(tmp_path / "here")
    kept = KerasTransformer(model=small())
    kept.save(path)
    with pytest.raises(CustomObjectError, match="batch_transform is .*a lambda"):
        KerasTransformer(model=small(), batch_transform=lambda x, y: x).write().overwrite().save(path)
    same_model(KerasTransformer.load(path).get_model(), kept.get_model())


def test_a_save_that_fails_half_way_leaves_only_the_old_folder(tmp_path, monkeypatch):
    path = str(tmp_path / "here")
    kept = KerasTransformer(model=small())
    kept.save(path)

    write = filesystem.write_bytes

    def full(path, data):
        write(path, data)
        if "metadata" in path:
            assert len(list(tmp_path.iterdir())) == 2
            raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(filesystem, "write_bytes", full)
        for writer in (KerasTransformer(model=small()).write().overwrite(), KerasTransformer(model=small()).write()):
            with pytest.raises((OSError, StorageError), match="no space left|already exists"):
                writer.save(path)
        with pytest.raises(OSError, match="no space left"):
            KerasTransformer(model=small()).save(str(tmp_path / "z"))
    assert [file.name for file in tmp_path.iterdir()] == ["here"]
    same_model(KerasTransformer.load(path).get_model(), kept.get_model())


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


@pytest.fixture(params=["local", "hadoop"])
def here(request, tmp_path):
    """The path of a folder in ``tmp_path``."""
    return str(tmp_path / "here") if request.param == "local" else f"{request.getfixturevalue('hadoop_uri')}/here"


def refused():
    raise OSError("no")


@pytest.mark.parametrize("call", range(4))
def test_a_process_that_dies_while_it_replaces_a_folder_loses_nothing(here, tmp_path, monkeypatch, call):
    path, aside = here, tmp_path / ".here.previous"
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


@pytest.mark.parametrize("call", [1, 2])
def test_a_rename_that_fails_leaves_the_old_folder(here, monkeypatch, call):
    path = here
    old, new = (KerasTransformer(model=small(seed=seed)) for seed in range(2))
    old.save(path)
    with pytest.raises(StorageError, match="the new folder .* is complete, .*: cannot write '.*here': no"):
        replace_with_fault(monkeypatch, new, path, call, refused)
    same_model(KerasTransformer.load(path).get_model(), old.get_model())


def test_missing_and_foreign_folders_are_reported(tmp_path):
    with pytest.raises(StorageError, match="there is no saved estimator or transformer at"):
        KerasTransformer.load(str(tmp_path / "nowhere"))
    (tmp_path / "empty" / "metadata").mkdir(parents=True)
    with pytest.raises(ModelError, match="was not written by sparkkeras"):
        KerasTransformer.load(str(tmp_path / "empty"))
    PipelineModel(stages=[]).save(str(tmp_path / "pipeline"))
    with pytest.raises(ModelError, match=r"holds a .*PipelineModel; expected"):
        KerasTransformer.load(str(tmp_path / "pipeline"))
    KerasTransformer(model=small()).save(str(tmp_path / "ours"))
    changed(tmp_path / "ours", lambda metadata: metadata.pop("sparkkeras"))
    with pytest.raises(ModelError, match="was not written by sparkkeras: its metadata has no 'sparkkeras'"):
        KerasTransformer.load(str(tmp_path / "ours"))


def changed(folder, change):
    part = next((folder / "metadata").glob("part-*"))
    metadata = json.loads(part.read_text())
    change(metadata)
    part.write_text(json.dumps(metadata))


@pytest.mark.parametrize("where", ["code", "custom_objects"])
@pytest.mark.parametrize(
    "function",
    [long("pydoc:pipepager"), long("subprocess:getoutput"), "os:system", "_pytest.outcomes:importorskip"],
)
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


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_paths_with_and_without_a_file_scheme(spark, tmp_path, scheme):
    KerasTransformer(model=small()).save(f"{scheme}{tmp_path}/there")
    assert (tmp_path / "there" / "model.keras").is_file()
    KerasTransformer.load(f"{scheme}{tmp_path}/there")
    assert load_spark_model(tmp_path / "there" / "model.keras").model.name == "classifier"


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


def test_a_stage_is_saved_where_spark_saves_its_pipeline(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(persistence, "_qualified", lambda path, doing: f"{tmp_path}/default/{path}")
    (tmp_path / "default" / "there" / "metadata").mkdir(parents=True)
    scorer = KerasTransformer(model=small())
    scorer.save(f"there/stages/0_{scorer.uid}")
    assert (tmp_path / "default" / "there" / "stages" / f"0_{scorer.uid}" / "model.keras").is_file()


def test_custom_code_of_a_module_is_saved_and_loaded(tmp_path):
    model = custom(parts.Scale(3.0), parts.squared)
    Pipeline(stages=[KerasEstimator(model=model)]).save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline")).getStages()[0].getModel()
    assert loaded.layers[-1].factor == 3.0
    assert loaded.loss is parts.squared
    same_model(loaded, model)


def test_custom_code_inside_a_function_must_be_registered_with_keras(frame, tmp_path):
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
        loaded = PipelineModel.load(path)
    same_model(loaded.stages[0].get_model(), scorer.get_model())
    assert len(loaded.transform(frame).collect()) == 6


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


class Loose(Damped):
    def __init__(self):
        pass

    __qualname__ = "test.<locals>.Loose"


def test_custom_rules_are_saved_if_they_can_be_imported(tmp_path):
    KerasEstimator(rule=Damped(0.25)).save(str(tmp_path / "damped"))
    assert KerasEstimator.load(str(tmp_path / "damped")).getRule() == Damped(0.25)
    with pytest.raises(CustomObjectError, match="the param rule .*defined inside a function"):
        KerasEstimator(rule=Loose()).save(str(tmp_path / "loose"))


def test_damaged_folders_and_those_of_later_versions_are_reported(tmp_path):
    path = tmp_path / "here"
    KerasTransformer(model=small()).save(str(path))
    (path / "model.keras").write_bytes(b"no archive")
    with pytest.raises(ModelError, match="is not a .keras archive"):
        KerasTransformer.load(str(path))
    (path / "model.keras").unlink()
    with pytest.raises(StorageError, match="cannot read"):
        KerasTransformer.load(str(path))
    part = next((path / "metadata").glob("part-*"))
    metadata = json.loads(part.read_text())
    metadata["sparkkeras"]["format"] = 2
    part.write_text(json.dumps(metadata))
    with pytest.raises(ModelError, match="written by a later version"):
        KerasTransformer.load(str(path))


LOAD = """
import sys
import numpy as np
from pyspark.ml.tuning import CrossValidatorModel
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
model = CrossValidatorModel.load(sys.argv[1] + "search")
rows = model.transform(spark.read.parquet(sys.argv[1] + "rows")).orderBy("id").select("output").collect()
np.save(sys.argv[1] + "found.npy", np.array([row.output for row in rows]))
assert [len(grid) for grid in model.getEstimatorParamMaps()] == [1, 1]
"""


@pytest.mark.soak
def test_a_saved_search_is_loaded_in_another_process(spark, tmp_path):
    rows = [(index, np.random.default_rng(index).normal(size=4).tolist(), index % 3) for index in range(60)]
    frame = spark.createDataFrame(rows, "id int, features array<double>, label int").repartition(2).cache()
    estimator = KerasEstimator(model=small(), verbose=0, seed=1)
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.001, 0.1]).build()
    search = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=MulticlassClassificationEvaluator(), numFolds=2
    )
    found = search.fit(frame)
    found.save(f"{tmp_path}/search")
    frame.write.parquet(f"{tmp_path}/rows")
    again = CrossValidatorModel.load(f"{tmp_path}/search")
    assert again.getEstimator().getModel().name == "classifier"
    assert again.bestModel.history == found.bestModel.history
    done = subprocess.run([sys.executable, "-c", LOAD, f"{tmp_path}/"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    mine = [row.output for row in found.transform(frame).orderBy("id").select("output").collect()]
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), np.array(mine), rtol=0, atol=1e-6)


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
    with pytest.raises(CustomObjectError, match=r"a value of the param callbacks in the grid\[0\] is .*cannot be saved"):
        search.setEstimatorParamMaps([calling]).save(str(tmp_path / "calling"))


def test_a_context_without_a_session_is_enough(sc, spark, tmp_path, monkeypatch):
    spark._jvm.SparkSession.clearActiveSession()
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    KerasEstimator(epochs=3).save(str(tmp_path / "bare"))
    assert KerasEstimator.load(str(tmp_path / "bare")).getEpochs() == 3
