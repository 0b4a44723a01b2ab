"""What `fit` leaves as the defaults of `evaluate` and `predict`, without Spark."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from pyspark.mllib.linalg import DenseMatrix
from pyspark.sql.types import DoubleType, StructField, StructType

from sparkkeras import (
    DataError,
    EnsembleModel,
    PadSequences,
    SparkMLlibModel,
    SparkModel,
    load_ensemble_model,
    load_spark_model,
)
from sparkkeras.arguments import AS_IN_FIT
from sparkkeras.data.reader import Reader
from sparkkeras.formats.images import image_loader
from sparkkeras.modeling.schema import schema_of
from sparkkeras.training.row_options import RowOptions
from tests.ml import parts
from tests.models import regression

X = np.ones((4, 3))
PADDED = PadSequences(3, padding="post")


def read(options, data=X, features=AS_IN_FIT, loader=AS_IN_FIT):
    return options.columns(data, features, AS_IN_FIT, loader, fits=True)


def again(options, edit=str, model=None):
    """The options after a round trip through JSON, of which the text is edited."""
    model = model or regression()
    return RowOptions.from_json(model, json.loads(edit(json.dumps(options.as_json(model)))))


def test_options_apply_to_data_of_the_same_kind_unless_an_argument_is_passed():
    options = RowOptions("arrays", loader=PADDED, on_invalid="allow")
    assert read(options).loader == PADDED
    assert read(options, loader=None).loader is None
    assert (options.policy(X, AS_IN_FIT), options.policy(X, None), options.policy(X, "drop")) == ("allow", "error", "drop")
    assert (options.policy_to_predict(X, AS_IN_FIT), options.policy_to_predict(X, None)) == ("allow", "error")
    dropped = RowOptions("arrays", on_invalid="drop")
    assert (dropped.policy(X, AS_IN_FIT), dropped.policy_to_predict(X, AS_IN_FIT)) == ("drop", "error")
    others = RowOptions("DataFrame", ["a", "b"], "y", PADDED, "allow")
    assert (read(others).features, read(others).loader, others.policy(X, AS_IN_FIT)) == (None, None, "error")


class Frame:
    """A DataFrame of floats."""

    def __init__(self, *names):
        self.schema = StructType([StructField(name, DoubleType()) for name in names])


class OfAnyInputs(keras.Model):
    def call(self, x):
        return x["a"]


def test_columns_of_nested_inputs_are_found_and_compared_in_a_data_frame(monkeypatch):
    for module in ("training.row_options", "sources.frame"):
        monkeypatch.setattr(f"sparkkeras.{module}.is_frame", lambda data: isinstance(data, Frame))
    options = again(RowOptions("DataFrame", {"a": "c1", "b": {"c": "c2"}}), model=OfAnyInputs())
    frame, reader = Frame("c1", "c2", "c3"), Reader(schema_of(OfAnyInputs()), labelled=False)
    with pytest.raises(DataError, match=r"no column 'c2'.*pass features="):
        read(options, Frame("c1", "c"))
    options.warn_of_columns(read(options, frame).select(frame, reader))
    other = read(options, frame, features={"b": {"c": "c3"}, "a": "c1"})
    with pytest.warns(UserWarning, match=r"features=.*'c3'.*'c2'"):
        options.warn_of_columns(other.select(frame, reader))


@pytest.mark.parametrize(("transform", "name"), [(parts.halved, "halved"), (partial(parts.halved), "partial")])
def test_a_transform_is_not_applied_again_and_its_name_is_in_a_warning(transform, name):
    given = {"loader": None, "on_invalid": "error", "transform": transform}
    options = RowOptions.of_fit(X, SimpleNamespace(source=None, given=given))
    with pytest.warns(UserWarning, match=f"transform={name}, which predict"):
        assert options.without_transform("predict", AS_IN_FIT) is None
    assert options.without_transform("predict", None) is None
    assert options.without_transform("predict", parts.halved) is parts.halved
    assert RowOptions().without_transform("predict", AS_IN_FIT) is None


@pytest.mark.parametrize(
    "options",
    [
        RowOptions(),
        RowOptions("RDD", loader=PADDED, on_invalid="drop", transform="halved"),
        RowOptions("DataFrame", {"user": ["a", "b"], "item": "c"}, "y", {"user": PADDED}, "allow"),
    ],
)
def test_options_survive_a_round_trip_through_json(options):
    assert again(options) == options


def test_inputs_without_names_have_other_names_when_a_model_is_loaded(tmp_path):
    left, right = keras.Input((3,)), keras.Input((1,))
    spark_model = SparkModel(keras.Model([left, right], keras.layers.Concatenate()([left, right])))
    spark_model._rows = RowOptions("DataFrame", {right.name: "b", left.name: "a"}, loader={left.name: PADDED})
    spark_model.save(tmp_path / "m.keras")
    loaded = load_spark_model(tmp_path / "m.keras")
    one, other = (spec.name for spec in schema_of(loaded.model).inputs)
    assert left.name not in (one, other)
    assert loaded._rows == RowOptions("DataFrame", {other: "b", one: "a"}, loader={one: PADDED})


def test_a_loader_that_cannot_be_imported_is_left_out_with_a_warning():
    local = RowOptions("DataFrame", "image", loader=image_loader((8, 8), "RGB", lambda x: x))
    with pytest.warns(UserWarning, match="pass loader= .* a lambda"):
        assert again(local) == RowOptions("DataFrame", "image")
    with pytest.warns(UserWarning, match="saved fields .*'width'"):
        assert again(RowOptions(loader=PADDED), lambda text: text.replace("maxlen", "width")).loader is None


def test_a_file_causes_no_import(tmp_path, monkeypatch):
    (tmp_path / "never_imported_by_options.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    options = RowOptions("DataFrame", "image", loader=image_loader((8, 8), "RGB", parts.darker))
    with pytest.warns(UserWarning, match="module never_imported_by_options.*import it before"):
        again(options, lambda text: text.replace("tests.ml.parts", "never_imported_by_options"))
    assert "never_imported_by_options" not in sys.modules


def test_models_and_ensembles_are_saved_with_the_options(tmp_path):
    options = RowOptions("arrays", on_invalid="allow", transform="halved")
    spark_model, ensemble = SparkModel(regression()), EnsembleModel([regression(), regression()], voting="average")
    spark_model._rows = ensemble._rows = options
    spark_model.save(tmp_path / "m.keras")
    ensemble.save(tmp_path / "ensemble")
    loaded = load_ensemble_model(tmp_path / "ensemble")
    assert load_spark_model(tmp_path / "m.keras")._rows == loaded._rows == options
    with pytest.warns(UserWarning, match="fit had transform=halved"):
        assert np.isnan(loaded.predict(np.full((1, 3), np.nan))).all()
    spark_model.model = regression()
    assert spark_model._rows == RowOptions()


def test_an_mllib_model_has_the_same_defaults():
    mllib_model = SparkMLlibModel(regression())
    mllib_model.spark_model._rows = RowOptions("arrays", transform="halved")
    wide = DenseMatrix(2, 4, np.ones(8))  # raises an error before a job starts
    with (
        pytest.warns(UserWarning, match="fit had transform=halved"),
        pytest.raises(DataError, match="expects rows"),
    ):
        mllib_model.predict(wide)
