"""Checkpoints on URIs and on local paths with Spark Connect."""

import threading

import keras
import numpy as np
import pytest

from sparkkeras import Checkpoint, ConfigurationError, SparkEnsemble, SparkModel, StorageError
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.spark import filesystem
from sparkkeras.training.saved_run import SavedRun
from tests.connect import cases
from tests.connect.conftest import stored
from tests.integration.faults import interrupted_at_the_first_member
from tests.models import classifier
from tests.processes import interrupted_when

# Files


@pytest.mark.parametrize(("path", "words"), [("nothing://a/b", "nothing"), ("hdfs://nowhere/a", "webhdfs://")])
def test_uris_that_cannot_be_written_are_errors(spark, path, words):
    with pytest.raises(StorageError, match=f"cannot reach '{path}' .*{words}"):
        filesystem.write_bytes(path, b"1")


# Stores


def test_a_store_on_a_uri(spark, tmp_path):
    """Of fsspec; more of these is in tests/spark/test_filesystem.py."""
    store = CheckpointStore(f"memory:/{tmp_path}/run", keep=2)
    assert store.newest() is None
    store.check_writable()
    thread = threading.Thread(target=lambda: [store.write("a test", (number, np.arange(5))) for number in range(3)])
    thread.start()  # as checkpoints are written: a thread that has no session of its own
    thread.join()
    assert [int(name.split("-")[1]) for name in store.names()] == [3, 2]
    assert store.newest().value[0] == 2
    assert filesystem.folders_in(store.path) == sorted(store.names())
    filesystem.remove(f"{store.path}/{store.names()[0]}/arrays.bin")
    with pytest.warns(UserWarning, match="is damaged"):
        assert store.newest().value[0] == 1


# Training


def place(path, is_uri):
    return Checkpoint(f"file:{path}" if is_uri else path)


def trained(epochs=3, mode="synchronous", num_workers=None, **given):
    """The weights and the history of a training."""
    spark_model = SparkModel(cases.model(), mode, batch_size=16, seed=7, num_workers=num_workers)
    history = spark_model.fit(*cases.arrays(), epochs=epochs, verbose=0, **given).history
    return [weights.tolist() for weights in spark_model.model.get_weights()], history


@pytest.mark.parametrize(
    ("mode", "is_uri"),
    [
        ("synchronous", True),
        pytest.param("allreduce", False, marks=pytest.mark.soak),
    ],
)
def test_training_continues_with_the_same_bits(spark, tmp_path, mode, is_uri):
    workers = 2
    checkpoint = place(tmp_path / "run", is_uri)
    trained(1, mode, workers, checkpoint=checkpoint)
    found = trained(2, mode, workers, checkpoint=checkpoint, resume=True)
    assert found == trained(2, mode, workers)
    model = SparkModel.from_checkpoint(checkpoint.path)
    assert [weights.tolist() for weights in model.model.get_weights()] == found[0]
    with pytest.raises(ConfigurationError, match="an earlier training"):
        trained(2, mode, workers, checkpoint=checkpoint)


@pytest.mark.soak
def test_an_interrupted_training_continues_with_the_same_bits(spark, tmp_path):
    checkpoint = place(tmp_path / "run", True)
    with interrupted_when(lambda: len(list(tmp_path.glob("run/*/manifest.json"))) > 1, 30):
        trained(100, checkpoint=checkpoint)
    reached = SavedRun.newest(CheckpointStore(checkpoint.path)).progress.part.epoch
    assert 1 < reached < 100
    assert trained(reached + 2, checkpoint=checkpoint, resume=True) == trained(reached + 2)


# Ensembles


def members(**given):
    """The weights and histories of an ensemble of three members."""
    models = [
        classifier(cases.WIDTH, 8 + number, cases.CLASSES, optimizer=keras.optimizers.Adam(0.01)) for number in range(3)
    ]
    ensemble = SparkEnsemble(models, sampling="partition", seed=7)
    histories = ensemble.fit(*cases.arrays(), **({"epochs": 2, "verbose": 0, "validation_split": 0.2} | given))
    weights = [[each.tolist() for each in model.get_weights()] for model in models]
    return weights, [history.history for history in histories]


def test_trained_members_are_not_trained_again(spark, tmp_path, local_dir, monkeypatch):
    trained, kept = interrupted_at_the_first_member(monkeypatch)
    given = {"checkpoint": place(tmp_path / "run", True)}
    with pytest.raises(KeyboardInterrupt):
        members(**given)
    assert stored(local_dir) == []
    first = list(kept)
    trained.clear()
    expected = members()
    assert members(resume=True, **given) == expected
    assert sorted(trained + first) == [0, 1, 2]


@pytest.mark.soak
def test_an_interrupt_cancels_the_members(spark, tmp_path, local_dir):
    with interrupted_when(lambda: list(tmp_path.glob("run/checkpoint-*/manifest.json"))):
        members(checkpoint=place(tmp_path / "run", True), epochs=10_000)
    assert stored(local_dir) == []
    assert cases.CASES["plain"].train(spark)  # the slots are free
