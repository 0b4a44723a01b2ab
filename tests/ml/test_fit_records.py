"""Fits of one process with checkpoints in one folder: those of a search are refused, the same fit continues."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import keras
import pytest

from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.errors import ConfigurationError, TrainingInterruptedError
from sparkkeras.ml.fit_records import own_checkpoints
from tests.models import classifier


@dataclass
class Frame:
    """The part of a DataFrame that is used."""

    rows: int

    def semanticHash(self):
        return self.rows


class Closed(Frame):
    def semanticHash(self):
        raise RuntimeError("the session is closed")


def params(**changed):
    stopping = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=0.1)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    settings = {"model": classifier(), "batch_size": 32, "epochs": 1, "callbacks": [stopping, schedule], "transform": None}
    return settings | changed


def scaled_by(factor):
    return lambda x, y: (x * factor, y)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(str(tmp_path))


def fit(store, frame=None, writes=True, error=None, given=None, **changed):
    with own_checkpoints(store.path, frame or Frame(40), given or params(**changed)):
        if writes:
            store.write({"kind": "fit"})
        if error is not None:
            raise error


def test_a_fit_continues_with_models_callbacks_and_frames_that_are_created_again(store):
    fit(store, transform=scaled_by(2))
    fit(store, Frame(40), transform=scaled_by(2), epochs=5)
    same = params()
    other = CheckpointStore(store.path + "/other")
    fit(other, given=same)
    same["callbacks"][0].min_delta *= -1  # what training changes
    same["callbacks"][0].best = 0.5
    fit(other, given=same)


@pytest.mark.parametrize(
    ("frame", "change"),
    [
        (Frame(41), dict),
        (Closed(40), dict),
        (Frame(40), lambda: {"batch_size": 16}),
        (Frame(40), lambda: {"model": classifier(units=9)}),
        (Frame(40), lambda: {"callbacks": keras.callbacks.EarlyStopping("loss", patience=4)}),
        (Frame(40), lambda: {"transform": scaled_by(3)}),
    ],
)
@pytest.mark.parametrize("error", [None, ValueError("the cluster is gone")], ids=repr)
def test_another_fit_is_refused(store, frame, change, error):
    base = {"callbacks": keras.callbacks.EarlyStopping("loss", patience=3), "transform": scaled_by(2)}
    with nullcontext() if error is None else pytest.raises(ValueError, match="the cluster is gone"):
        fit(store, error=error, **base)
    with pytest.raises(ConfigurationError, match="are of an earlier fit of this process on other data or with other"):
        fit(store, frame, **base | change())
    fit(store, **base)


def test_a_fit_that_has_only_read_checkpoints_is_recorded(store):
    store.write({"kind": "fit"})  # by an earlier process, and complete
    fit(store, writes=False)
    with pytest.raises(ConfigurationError, match="are of an earlier fit"):
        fit(store, Frame(41))


def test_a_refused_fit_is_not_recorded(store):
    store.write({"kind": "fit"})  # by an earlier process
    with pytest.raises(ConfigurationError, match="batch_size: 32 in the checkpoint"):
        fit(store, writes=False, error=ConfigurationError("batch_size: 32 in the checkpoint, 64 now"), batch_size=64)
    fit(store)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TrainingInterruptedError("SIGTERM")], ids=repr)
def test_an_interrupted_fit_continues_with_a_frame_that_is_another_one_for_spark(store, error):
    with pytest.raises(type(error)):
        fit(store, error=error)
    fit(store, Frame(41))


def test_a_folder_that_was_emptied_belongs_to_no_fit(store, tmp_path):
    fit(store)
    (tmp_path / store.names()[0] / "manifest.json").unlink()
    fit(store, batch_size=16)


def test_models_and_frames_are_not_kept(store):
    frame, given = Frame(40), params()
    references = [weakref.ref(frame), weakref.ref(given["model"])]
    fit(store, frame, given=given)
    del frame, given
    gc.collect()
    assert [reference() for reference in references] == [None, None]
