"""Checkpoints on URIs with Spark Connect, which queries of the session read and write, and on local paths."""

import threading
import time

import keras
import numpy as np
import pytest

from sparkkeras import Checkpoint, ConfigurationError, SparkEnsemble, SparkModel, SparkRunner, StorageError, WorkerError
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.runner import context
from sparkkeras.sources.connect import RemoteResults
from sparkkeras.spark import filesystem, remote_files
from sparkkeras.training.member_checkpoints import MemberCheckpoints
from sparkkeras.training.saved_run import SavedRun
from tests.connect import cases
from tests.connect.conftest import stored
from tests.models import classifier
from tests.processes import interrupted_when


@pytest.fixture
def folder(tmp_path):
    """A local folder with its URI; its name has characters with a meaning in patterns and URIs."""
    path = tmp_path / "a [0-9]{b,c}*?%20 d"
    path.mkdir()
    return path, f"file:{path}"


def write(path, data):
    with filesystem.new_file(path) as file:
        file.write(data)


# Files


@pytest.mark.soak
def test_files_of_a_uri(spark, folder, monkeypatch):
    monkeypatch.setattr(remote_files, "CHUNK_BYTES", 20)
    monkeypatch.setattr(remote_files, "PIECES_READ", 1)
    path, uri = folder
    assert filesystem.names_in(uri) == filesystem.folders_in(f"{uri}/missing") == []
    content = {"long": bytes(range(35)), "empty": b"", "a/short": b"\0\1"}
    (path / "plain.txt").write_bytes(b"of a classic session")
    for name, data in content.items():
        write(f"{uri}/{name}", data)
    content["plain.txt"] = b"of a classic session"
    assert filesystem.names_in(uri) == filesystem.names_in(str(path)) == ["empty", "long", "plain.txt"]
    assert filesystem.folders_in(uri) == filesystem.folders_in(str(path)) == ["a"]
    for place in (uri, str(path)):  # the latter without Spark
        assert {name: filesystem.read_bytes(f"{place}/{name}") for name in content} == content
    write(f"{uri}/long", b"other")
    assert filesystem.read_bytes(f"{uri}/long") == b"other"
    for name in ("long", "plain.txt", "missing"):
        filesystem.remove(f"{uri}/{name}")
    assert filesystem.names_in(uri) == ["empty"]
    filesystem.remove_folder(f"{uri}/a")
    filesystem.remove_folder(f"{uri}/a")
    filesystem.remove(f"{path}/empty")
    assert list(path.iterdir()) == []


def test_files_that_cannot_be_used_are_errors(spark, tmp_path):
    uri = f"file:{tmp_path}"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with pytest.raises(StorageError, match="cannot read 'file:.*/missing': it does not exist"):
        filesystem.read_bytes(f"{uri}/missing")
    with pytest.raises(StorageError, match="cannot read 'file:.*/folder': it is a folder; expected a file"):
        filesystem.read_bytes(f"{uri}/folder")
    with pytest.raises(StorageError, match="cannot write 'file:/proc/a' with Spark Connect: "):
        write("file:/proc/a", b"1")
    with pytest.raises(StorageError, match="cannot read 'nothing://a/b' with Spark Connect: .*nothing"):
        filesystem.names_in("nothing://a/b")
    (tmp_path / "lost.parquet").mkdir()
    for place in (uri, str(tmp_path)):
        with pytest.raises(StorageError, match="lost.*(not complete|does not exist)"):
            filesystem.read_bytes(f"{place}/lost")


@pytest.mark.soak
def test_a_dynamic_overwrite_mode_of_the_session_does_not_keep_files(spark, settings, tmp_path):
    settings("spark.sql.sources.partitionOverwriteMode", "dynamic")
    write(f"file:{tmp_path}/a/file", b"1")
    filesystem.remove_folder(f"file:{tmp_path}/a")
    assert list(tmp_path.iterdir()) == []


# Stores


def test_a_store_on_a_uri(spark, tmp_path):
    store = CheckpointStore(f"file:{tmp_path}/run", keep=2)
    assert store.newest() is None
    thread = threading.Thread(target=lambda: [store.write("a test", (number, np.arange(5))) for number in range(3)])
    thread.start()  # as checkpoints are written: a thread that has no session of its own
    thread.join()
    local = CheckpointStore(str(tmp_path / "run"))
    for each in (store, local):
        assert [int(name.split("-")[1]) for name in each.names()] == [3, 2]
        assert each.newest().value[0] == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(store.names())
    newest = tmp_path / "run" / store.names()[0]
    next((newest / "arrays.bin.parquet").glob("part-*")).unlink()
    with pytest.warns(UserWarning, match="is damaged, and checkpoint-.* is used"):
        assert store.newest().value[0] == 1
    filesystem.remove(f"file:{newest}/manifest.json")
    assert [int(name.split("-")[1]) for name in store.names()] == [2]
    assert local.write("a test", 9) in store.names()  # and a plain checkpoint is read as well
    assert store.newest().value == 9


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
        pytest.param("synchronous", False, marks=pytest.mark.soak),
        pytest.param("allreduce", True, marks=pytest.mark.soak),
        pytest.param("allreduce", False, marks=pytest.mark.soak),
    ],
)
def test_training_continues_with_the_same_bits(spark, tmp_path, mode, is_uri):
    workers = 1 if (mode, is_uri) == ("allreduce", True) else 2
    checkpoint = place(tmp_path / "run", is_uri)
    trained(1, mode, workers, checkpoint=checkpoint)
    found = trained(2, mode, workers, checkpoint=checkpoint, resume=True)
    assert found == trained(2, mode, workers)
    model = SparkModel.from_checkpoint(checkpoint.path)
    assert [weights.tolist() for weights in model.model.get_weights()] == found[0]
    with pytest.raises(ConfigurationError, match="checkpoints? of an earlier training"):
        trained(2, mode, workers, checkpoint=checkpoint)


@pytest.mark.soak
def test_an_interrupted_training_continues_with_the_same_bits(spark, tmp_path):
    checkpoint = place(tmp_path / "run", True)
    with interrupted_when(lambda: len(list(tmp_path.glob("run/*/manifest.json.parquet/_SUCCESS"))) > 1, 30):
        trained(100, checkpoint=checkpoint)
    reached = SavedRun.newest(CheckpointStore(checkpoint.path)).progress.part.epoch
    assert 1 < reached < 100
    assert trained(reached + 2, checkpoint=checkpoint, resume=True) == trained(reached + 2)


@pytest.mark.soak
def test_checkpoints_are_written_while_workers_train(spark, tmp_path):
    class Look(keras.callbacks.Callback):
        written = ()

        def on_epoch_end(self, epoch, logs=None):
            time.sleep(3)
            self.written = *self.written, len(CheckpointStore(f"file:{tmp_path}/run").names())

    look = Look()
    trained(3, "allreduce", 1, checkpoint=place(tmp_path / "run", True), callbacks=look)
    assert look.written[-1] > 0


def test_workers_that_leave_no_slot_to_write_checkpoints_are_errors(spark, tmp_path):
    given = {"checkpoint": place(tmp_path, True)}
    message = "num_workers=2, and Spark has 2 slots: with Spark Connect, checkpoints on a URI .* Use num_workers=1 or less"
    with pytest.raises(ConfigurationError, match=message):
        trained(1, "allreduce", 2, **given)
    with pytest.raises(ConfigurationError, match=message):
        SparkRunner(2).run(print, **given)


@pytest.mark.soak
@pytest.mark.parametrize("is_uri", [False, True])
def test_a_run_continues(spark, tmp_path, is_uri):
    def train(last):
        ranks = context()
        found = ranks.restored()
        for epoch in range(0 if found is None else found.epoch + 1, 3):
            if epoch == last:
                raise ValueError("on purpose")
            ranks.save(epoch, {"array": np.full(3, epoch)})
            time.sleep(1)
        return found and (found.epoch, found.state["array"].tolist())

    runner, given = SparkRunner(1 if is_uri else 2), {"checkpoint": place(tmp_path / "run", is_uri), "resume": True}
    with pytest.raises(WorkerError, match="on purpose"):
        runner.run(train, 2, **given)
    assert runner.run(train, None, **given)[0] == (1, [1, 1, 1])


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


@pytest.mark.parametrize("is_uri", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_trained_members_are_not_trained_again(spark, tmp_path, local_dir, monkeypatch, is_uri):
    trained, kept = [], []
    of, keep = RemoteResults.of, MemberCheckpoints.keep

    def interrupted(checkpoints, member):
        keep(checkpoints, member)
        kept.append(member.member)
        if len(kept) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RemoteResults, "of", lambda results, number: (trained.append(number), of(results, number))[1])
    monkeypatch.setattr(MemberCheckpoints, "keep", interrupted)
    given = {"checkpoint": place(tmp_path / "run", is_uri)}
    with pytest.raises(KeyboardInterrupt):
        members(**given)
    assert stored(local_dir) == []
    first = list(kept)
    trained.clear()
    expected = members()
    assert members(resume=True, **given) == expected
    assert sorted(trained + first) == [0, 1, 2]
    if not is_uri:
        trained.clear()
        assert members(resume=True, **given) == expected
        assert trained == []


class Fails(keras.callbacks.Callback):
    """Fails in the member with ten units, when another one has been trained."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        if self.model.count_params() == classifier(cases.WIDTH, 10, cases.CLASSES).count_params():
            raise ValueError("on purpose")


@pytest.mark.soak
def test_a_failed_member_keeps_the_trained_ones(spark, tmp_path):
    checkpoint = place(tmp_path / "run", True)
    with pytest.raises(WorkerError, match="on purpose"):
        members(checkpoint=checkpoint, worker_callbacks=Fails(str(tmp_path)))
    assert filesystem.folders_in(f"{checkpoint.path}/member-00000")
    assert not filesystem.folders_in(f"{checkpoint.path}/member-00002")
    assert members(checkpoint=checkpoint, resume=True) == members()


@pytest.mark.soak
def test_an_interrupt_cancels_the_members(spark, tmp_path, local_dir):
    with interrupted_when(lambda: list(tmp_path.glob("run/checkpoint-*/manifest.json.parquet/_SUCCESS"))):
        members(checkpoint=place(tmp_path / "run", True), epochs=10_000)
    assert stored(local_dir) == []
    assert cases.CASES["plain"].train(spark)  # the slots are free
