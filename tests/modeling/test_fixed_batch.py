"""Models with stateful recurrent layers take whole batches of their fixed size."""

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, DataError, ModelError, SparkModel
from sparkkeras.modeling.fixed_batch import (
    check_partitions,
    check_whole_batches,
    fixed_batch_size,
    warn_of_shuffle,
    whole_batches,
)
from sparkkeras.scoring.columns import Scorer
from sparkkeras.worker import device
from tests.models import regression

X, Y = np.ones((16, 5, 2), np.float32), np.ones((16, 1), np.float32)


@pytest.fixture(scope="module")
def model():
    layers = [keras.Input((5, 2), batch_size=8), keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)]
    made = keras.Sequential(layers, name="sequence")
    made.compile("sgd", "mse")
    return made


def test_only_stateful_models_have_a_fixed_batch_size(model):
    assert fixed_batch_size(model) == 8
    assert fixed_batch_size(keras.Sequential([keras.Input((2,), batch_size=8), keras.layers.Dense(1)])) is None


@pytest.mark.filterwarnings("ignore:the model 'sequence' has stateful layers")
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="PyTorch does not train such models")
def test_another_batch_size_is_reported(model):
    spark_model = SparkModel(model)
    for attempt in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(ConfigurationError, match=r"fixed batch size of 8, but batch_size=32: set batch_size=8"):
            attempt(X, Y)
    with pytest.raises(ConfigurationError, match="validation_batch_size=4: set validation_batch_size=8"):
        spark_model.fit(X, Y, batch_size=8, validation_batch_size=4, validation_split=0.5)
    with pytest.raises(ConfigurationError, match="batch_size=16"):
        spark_model.predict(X, batch_size=16)


def test_columns_are_predicted_in_the_fixed_batch_size(model):
    assert Scorer.of(model).options.batch_size == 8
    assert Scorer.of(regression()).options.batch_size == 1024


def test_partitions_of_incomplete_batches_are_reported(model):
    with pytest.raises(ConfigurationError, match=r"partition 1 has 20 rows for training, so its last batch has only 4"):
        check_partitions(model, (16, 20), "training")
    check_partitions(model, (16, 20), "training", max_batches=2)
    check_partitions(model, (None,), "training")
    check_partitions(regression(), (1, 2), "training")
    with pytest.raises(DataError, match="there are 20 rows, which leaves a batch of 4"):
        check_whole_batches(model, 20)
    with pytest.raises(DataError, match="20 rows"), whole_batches(model, [16, 4]):
        raise ValueError
    with pytest.raises(ValueError, match="another"), whole_batches(model, [16]):
        raise ValueError("another")


def test_shuffled_rows_are_warned_of(model):
    with pytest.warns(UserWarning, match="shuffle=True reorders the rows.*shuffle=False"):
        warn_of_shuffle(model, shuffle=True)
    warn_of_shuffle(model, shuffle=False)


def test_what_pytorch_cannot_train_is_reported(model, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ModelError, match="stateful recurrent layers, which Keras cannot train with the backend 'torch'"):
        device.check_supported(model)
    with pytest.raises(ModelError, match="steps_per_execution=4; with the backend 'torch', Keras supports only 1"):
        device.check_supported(regression(steps_per_execution=4))
    device.check_supported(regression())
