"""Models with stateful recurrent layers take whole batches of their fixed size."""

from dataclasses import replace
from unittest.mock import Mock

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, DataError, ModelError, SparkModel
from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.data.reader import Reader
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.fixed_batch import (
    check_partitions,
    fixed_batch_size,
    warn_of_shuffle,
)
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelState, ModelWeights
from sparkkeras.scoring.columns import Scorer
from sparkkeras.scoring.inference import PredictTask, check_evaluate, check_predict
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.worker import device
from sparkkeras.worker.batch_reader import BatchReader
from sparkkeras.worker.batches import BatchOptions, BatchRange, FitOptions
from sparkkeras.worker.predictor import Predictor
from sparkkeras.worker.trainer import HeldOut, LocalTrainer
from tests.models import regression

unknown_sizes = pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14), reason="Keras 3.14 (batches of unknown size)"
)
"""For tests that train or evaluate stateful layers."""

X, Y = np.ones((16, 5, 2), np.float32), np.ones((16, 1), np.float32)


@pytest.fixture(scope="module")
def model():
    layers = [keras.Input((5, 2), batch_size=8), keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)]
    made = keras.Sequential(layers, name="sequence")
    made.compile("sgd", "mse")
    return made


without_torch = pytest.mark.skipif(keras.backend.backend() == "torch", reason="PyTorch does not train such models")


def test_only_stateful_models_have_a_fixed_batch_size(model):
    options = Scorer.of(model).options
    assert fixed_batch_size(model) == options.batch_size == 8
    assert options.across_blocks  # a batch may have rows of several Arrow batches, like those to predict and to evaluate
    assert fixed_batch_size(keras.Sequential([keras.Input((2,), batch_size=8), keras.layers.Dense(1)])) is None


@pytest.mark.filterwarnings("ignore:the model 'sequence' has stateful layers")
@without_torch
def test_another_batch_size_is_reported(model):
    spark_model = SparkModel(model)
    for attempt in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(ConfigurationError, match="batch_size=32: set batch_size=8"):
            attempt(X, Y)
    with pytest.raises(ConfigurationError, match="set validation_batch_size=8"):
        spark_model.fit(X, Y, batch_size=8, validation_batch_size=4, validation_split=0.5)
    with pytest.raises(ConfigurationError, match="batch_size=16"):
        spark_model.predict(X, batch_size=16)


def test_partitions_of_incomplete_batches_are_reported(model):
    with pytest.raises(ConfigurationError, match="partition 1 has 20"):
        check_partitions(model, (16, 20), "training")
    check_partitions(model, (16, 20), "training", max_batches=2)
    check_partitions(regression(), (1, 2), "training")


def test_shuffled_rows_are_warned_of(model):
    with pytest.warns(UserWarning, match="pass shuffle=False"):
        warn_of_shuffle(model, shuffle=True)
    warn_of_shuffle(model, shuffle=False)


def test_what_pytorch_cannot_train_is_reported(model, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ModelError, match="stateful .* 'torch'"):
        device.check_supported(model)
    with pytest.raises(ModelError, match="steps_per_execution=4; .* 'torch'"):
        device.check_supported(regression(steps_per_execution=4))
    device.check_supported(regression())


# Blocks of any size

ROWS = np.random.default_rng(0).normal(size=(32, 5, 2)).astype(np.float32)


def predicted(model, rows):
    """What Keras predicts for rows; the states start from zero."""
    model.layers[0].reset_state()
    return model.predict(rows, batch_size=8, verbose=0)


def in_blocks(x, y, sizes):
    ends = np.cumsum(sizes)
    return [from_arrays(x[i - n : i], None if y is None else y[i - n : i], None) for i, n in zip(ends, sizes, strict=True)]


def test_batches_to_predict_may_have_rows_of_several_blocks(model):
    """What reads rows chooses the size of blocks, such as Spark for Arrow batches."""
    source, options = check_predict(model, ROWS, ColumnMapping(), batch_size=8, transform=None, on_invalid="error")
    shared = map(LocalShared, (ModelArchive.pack_to_predict(model), ModelWeights.take(model), options))
    task = PredictTask(*shared, source.reader.schema)
    sizes = (3, 0, 4, 17, 0, 8, 0)
    keyed = zip("abcdefg", in_blocks(ROWS, None, sizes), strict=True)
    found = list(replace(task, keyed=True)(TaskContext(0), keyed))
    assert [(key, 0 if part is None else len(part)) for key, part in found] == list(zip("abcdefg", sizes, strict=True))
    joined = np.concatenate([part for _, part in found if part is not None])
    assert np.allclose(joined, predicted(model, ROWS), atol=1e-6)
    with pytest.raises(DataError, match="a batch of 3"):
        list(task(TaskContext(0), iter(in_blocks(ROWS, None, (10, 1)))))


# Batches that a function of the user reads

BATCHES = "one of 5 rows.* 8 rows"


def reading(model, *sizes, labelled=True):
    """The batches of a worker, of these sizes."""

    def make(worker, num_workers):
        for block in in_blocks(ROWS, np.ones((32, 1), np.float32), sizes):
            yield (block.x, block.y) if labelled else block.x

    return BatchReader(ByValue.dump(make, "data"), 1, Reader(schema_of(model), labelled)).workers[0]


@unknown_sizes
@without_torch
def test_a_batch_of_another_size_to_train_on_raises_an_error(model):
    trainer, state = LocalTrainer(ModelArchive.pack(model), TaskContext(0)), ModelState.take(model)
    options = FitOptions(8, shuffle=False)
    with pytest.raises(DataError, match=BATCHES):
        trainer.fit(state, reading(model, 8, 5, 8), BatchRange(0, None, 0, 9), options)
    assert trainer.fit(state, reading(model, 8, 8, 5), BatchRange(0, None, 0, 2), options).rows == 16
    stored, held_out = (reading(model, *sizes).open() for sizes in ((8, 8), (8, 4)))
    with pytest.raises(DataError, match="a batch of 4"):
        trainer.fit(state, stored, BatchRange(0, 16, 0, 2), options, held_out=HeldOut(held_out, BatchOptions(8)))


@without_torch
def test_the_batch_size_does_not_matter_to_batches_that_are_read(model, monkeypatch):
    class ChecksPassed(Exception):
        pass

    monkeypatch.setattr("sparkkeras.spark_model.rows_stored", Mock(side_effect=ChecksPassed))
    make = reading(model, 8).read.make.load()
    with pytest.raises(ChecksPassed):
        SparkModel(model, batch_size=32).fit(make, validation_data=make, shuffle=False)
    check_evaluate(model, make, None, None, ColumnMapping(), batch_size=32, transform=None, on_invalid="error", verbose=0)
    check_predict(model, make, ColumnMapping(), batch_size=32, transform=None, on_invalid="error")


@unknown_sizes
def test_a_batch_of_another_size_to_evaluate_or_predict_raises_an_error(model):
    state, options = ModelWeights.take(model), BatchOptions(8, in_batches=True, across_blocks=True)
    trainer = LocalTrainer(ModelArchive.pack(model), TaskContext(0))
    with pytest.raises(DataError, match=BATCHES):
        trainer.evaluate(state, reading(model, 8, 5).blocks(), options)
    labelled = iter(in_blocks(ROWS, np.ones((32, 1), np.float32), (16, 5, 11)))
    assert trainer.evaluate(state, labelled, BatchOptions(8, across_blocks=True))[0].rows == 32
    predictor = Predictor(ModelArchive.pack_to_predict(model), state, options, schema_of(model), TaskContext(0))
    with pytest.raises(DataError, match=BATCHES):
        list(predictor.in_parts(reading(model, 8, 5, labelled=False).blocks()))
