"""The checks of `SparkModel` on the driver, without Spark."""

import copy
import pickle
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, DataError, EnsembleModel, ModelError, SparkModel, load_spark_model
from sparkkeras.parameter.rules import AGN, Average, Downpour
from tests.models import regression


@pytest.fixture
def spark_model():
    return SparkModel(regression())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", -1, "batch_size=-1"),
        ("mode", "synchronos", "Did you mean 'synchronous'"),
        ("rule", "slowmoo", "Did you mean 'slowmo'"),
        ("custom_objects", 3, "expected a dict"),
        ("nun_workers", 3, "'nun_workers' .*Did you mean 'num_workers'"),
        ("epochs", 3, r"epochs is an argument of fit\."),
    ],
)
def test_attributes_are_checked_when_they_are_set(spark_model, name, value, message):
    before = spark_model.get_config()
    with pytest.raises(ConfigurationError, match=message):
        setattr(spark_model, name, value)
    assert spark_model.get_config() == before


def test_a_model_is_checked_when_it_is_set(spark_model):
    with pytest.raises(ModelError, match="expected a keras.Model"):
        spark_model.model = None
    with pytest.raises(ModelError, match="not built"):
        spark_model.model = keras.Sequential([keras.layers.Dense(1)])
    other = regression()
    spark_model.model = other
    assert spark_model.master_network is other


def test_the_default_rule_depends_on_the_mode_and_settings_may_be_set_in_any_order(spark_model, tmp_path):
    assert spark_model.rule == Average()
    spark_model.rule = "agn"
    spark_model.mode, spark_model.frequency = "asynchronous", "batch"
    assert (spark_model.rule, spark_model.frequency) == (AGN(), 1)
    spark_model.rule = spark_model.seed = None
    assert spark_model.rule == Downpour()
    assert "rule=Downpour(" in repr(spark_model)
    assert isinstance(spark_model.seed, int)
    spark_model.save(tmp_path / "model.keras")
    saved = load_spark_model(tmp_path / "model.keras")
    for other in (saved, SparkModel(spark_model.model, **spark_model.get_config())):
        assert (other.mode, other.rule) == ("asynchronous", Downpour())
        other.mode = "synchronous"
        assert other.rule == Average()


def test_an_explicit_rule_is_kept_when_the_mode_changes(spark_model, tmp_path):
    spark_model.rule = "average"
    spark_model.mode = "asynchronous"
    for call in (lambda: spark_model.fit(np.ones((2, 3)), np.ones(2)), lambda: spark_model.save(tmp_path / "model.keras")):
        with pytest.raises(ConfigurationError, match="rule 'average' does not"):
            call()
    assert (spark_model.get_config()["rule"], spark_model.mode) == (Average(), "asynchronous")
    spark_model.mode = "synchronous"
    spark_model.save(tmp_path / "model.keras")
    assert load_spark_model(tmp_path / "model.keras").get_config()["rule"] == Average()


def test_subclasses_may_add_attributes_and_copies_keep_the_settings(spark_model):
    class Noted(SparkModel):
        def __init__(self, model, note):
            super().__init__(model, batch_size=8)
            self.note = note

    noted = Noted(regression(), "mine")
    assert (noted.note, noted.batch_size) == ("mine", 8)
    assert copy.copy(spark_model).get_config() == spark_model.get_config()
    assert pickle.loads(pickle.dumps(spark_model)).get_config() == spark_model.get_config()


@pytest.fixture
def ensemble():
    """What scores in this process."""
    return EnsembleModel([regression(), regression()], voting="average")


def test_predict_prints_the_number_of_rows_if_verbose(ensemble, capsys):
    for verbose, printed in ((0, ""), (1, "4 rows\n")):
        assert ensemble.predict(np.ones((4, 3)), verbose=verbose).shape == (4, 1)
        assert capsys.readouterr().out == printed
    with pytest.raises(ConfigurationError, match="verbose=3"):
        ensemble.predict(np.ones((4, 3)), verbose=3)


def test_only_predictions_of_a_data_frame_can_be_null(spark_model, ensemble):
    for predict in (spark_model.predict, ensemble.predict):
        with pytest.raises(ConfigurationError, match="only the column of"):
            predict(np.ones((4, 3)), on_invalid="null")
    for fit in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(ConfigurationError, match="on_invalid='null'"):
            fit(np.ones((4, 3)), np.ones(4), on_invalid="null")


def test_evaluating_data_without_rows_raises_an_error(ensemble):
    with pytest.raises(DataError, match="has no rows"):
        ensemble.evaluate(np.ones((0, 3)), np.ones(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Path("m.h5"), r"load_spark_model\('m\.h5'\)"),
        (regression, r"Call the function .*regression\(\)"),
        (keras.Sequential, "Create an instance: Sequential"),
    ],
)
def test_the_error_for_an_object_that_is_not_a_model_has_advice(given, message):
    with pytest.raises(ModelError, match=message):
        SparkModel(given)


def test_settings_cannot_be_changed_while_fit_runs(spark_model, monkeypatch):
    """Both the lock on the model and the training use the settings with which fit started."""

    def during_fit(*given):
        for name, value in (("model", regression()), ("mode", "hogwild"), ("batch_size", 8), ("seed", 2)):
            with pytest.raises(ConfigurationError, match=f"^{name} .*while fit is running"):
                setattr(spark_model, name, value)
        raise KeyError("enough")

    monkeypatch.setattr("sparkkeras.spark_model.check_fit", during_fit)
    with pytest.raises(KeyError, match="enough"):
        spark_model.fit(np.ones((2, 3)), np.ones(2))
    spark_model.batch_size = 8


def test_summary_and_export_are_those_of_keras(spark_model, tmp_path):
    lines = []
    spark_model.summary(print_fn=lines.append, line_length=80, show_trainable=True)
    expected = []
    spark_model.model.summary(print_fn=expected.append, line_length=80, show_trainable=True)
    assert lines == expected
    with mock.patch.object(spark_model.model, "export") as export:
        spark_model.export(tmp_path / "served", verbose=False, input_signature=["x"])
    export.assert_called_once_with(str(tmp_path / "served"), format="tf_saved_model", verbose=False, input_signature=["x"])
    with pytest.raises(ConfigurationError, match="filepath='hdfs:///served'"):
        spark_model.export("hdfs:///served")
