"""Checkpoints of an ensemble: what is continued, and what its members belong to."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sparkkeras import Checkpoint
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.modeling.state import ModelState
from sparkkeras.spark import filesystem
from sparkkeras.training.member_checkpoints import MemberCheckpoints, Trained
from sparkkeras.training.saved_run import SavedRun
from sparkkeras.worker.batches import FitOptions
from tests.models import regression
from tests.training.runs import partitions, stored_run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def models():
    return [regression(seed=seed) for seed in range(2)]


def begun(path, models, resume=False, checksum=7, batch_size=32, sampling="bootstrap"):
    """The checkpoints of a call of ``fit`` until it would train."""
    checkpoints = MemberCheckpoints.open(Checkpoint(path), resume)
    dataset = partitions(40)
    dataset = SimpleNamespace(handles=[replace(each, checksum=checksum) for each in dataset.handles])
    run = stored_run(models, dataset, FitOptions(batch_size), mode="independent", given={"epochs": 2})
    checkpoints.check(run, sampling, checkpoints.seed or (3, 0))
    checkpoints.begin(run)
    return checkpoints


def train(checkpoints, models, member):
    """Keep a member as trained; its optimizer has made a step."""
    models[member].optimizer.iterations.assign(1)
    checkpoints.keep(Trained(member, ModelState.take(models[member]), ({"loss": 0.5},)))


def test_rows_in_another_order_give_a_warning(path, models):
    train(begun(path, models), models, 0)
    with pytest.warns(UserWarning, match="same in another order"):
        begun(path, models, resume=True, checksum=8)


def test_a_trained_ensemble_is_resumed_with_its_models_and_with_new_ones(path, models):
    checkpoints = begun(path, models)
    for member in range(2):
        train(checkpoints, models, member)
    assert sorted(begun(path, models, resume=True).trained) == [0, 1]
    # The second call of fit, whose models are trained; a new process has models that are not.
    second = path.with_name("second")
    train(begun(second, models), models, 0)
    assert sorted(begun(second, [regression(seed=seed) for seed in range(2)], resume=True).trained) == [0]


def test_other_arguments_and_rates_are_refused(path, models):
    begun(path, models)
    with pytest.raises(ConfigurationError, match="batch_size: 32.*16 now"):
        begun(path, models, resume=True, batch_size=16)
    with pytest.raises(ConfigurationError, match='sampling: "bootstrap".*"all" now'):
        begun(path, models, resume=True, sampling="all")
    models[1].optimizer.learning_rate = 0.25
    with pytest.raises(ConfigurationError, match="learning_rate of member 1: 0.05"):
        begun(path, models, resume=True)


def test_members_without_their_checkpoint_are_refused(path, models):
    checkpoints = begun(path, models)
    train(checkpoints, models, 0)
    (name,) = CheckpointStore(str(path)).names()
    shutil.rmtree(path / name)
    for resume in (False, True):
        with pytest.raises(ConfigurationError, match="1 member of an earlier"):
            begun(path, models, resume=resume)
    assert [entry.name for entry in path.iterdir()] == ["member-00000"]


def test_a_member_of_another_ensemble_is_trained_again(path, models):
    train(begun(path, models), models, 0)
    other = path.with_name("other")
    train(begun(other, models), models, 1)
    shutil.copytree(path / "member-00000", other / "member-00000")
    with pytest.warns(UserWarning, match="member 0 is trained.*of an ensemble"):
        assert sorted(begun(other, models, resume=True).trained) == [1]


def test_a_damaged_member_is_trained_again_and_an_error_of_the_store_is_raised(path, models, monkeypatch):
    train(begun(path, models), models, 0)
    (file,) = path.glob("member-00000/*/arrays.bin")
    read = filesystem.read_bytes

    def times_out(name):
        if name == str(file):
            raise StorageError("not respond")
        return read(name)

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "read_bytes", times_out)
        with pytest.raises(StorageError, match="not respond"):
            begun(path, models, resume=True)
    file.unlink()
    with pytest.warns(UserWarning, match="member 0 is trained.*arrays.bin"):
        assert begun(path, models, resume=True).trained == {}


def test_paths_of_other_kinds(path, models):
    train(begun(path, models), models, 0)
    with pytest.raises(ConfigurationError, match="is of SparkEnsemble.fit.*this is SparkModel"):
        SavedRun.newest(CheckpointStore(str(path)))
    with pytest.raises(ConfigurationError, match="is of a member.*this is SparkEnsemble"):
        MemberCheckpoints.open(Checkpoint(path / "member-00000"), True)
