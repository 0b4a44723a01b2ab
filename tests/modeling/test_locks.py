"""One training at a time per model, and atomic reads of its state."""

import threading
from dataclasses import replace

import keras
import numpy as np
import pytest

from sparkkeras import EnsembleModel, ModelError, SparkEnsemble, SparkModel
from sparkkeras.modeling import archive as models
from sparkkeras.modeling import backends
from sparkkeras.modeling.archive import copy_of
from sparkkeras.modeling.locks import locks_state, training
from sparkkeras.modeling.state import ModelState
from sparkkeras.weights import Flat
from tests.models import regression

X = np.zeros((8, 3), np.float32)
Y = np.zeros((8, 1), np.float32)


@pytest.fixture
def trained_elsewhere():
    """A model that another thread is training."""
    model, begun, over = regression(), threading.Event(), threading.Event()

    def train():
        with training([model]):
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60)
    yield model
    over.set()
    thread.join()


def test_a_second_fit_of_a_model_raises_an_error(trained_elsewhere):
    model = trained_elsewhere
    for fit in (SparkModel(model).fit, SparkEnsemble([model, regression()], voting="average").fit):
        with pytest.raises(ModelError, match="another thread .* 'regression'"):
            fit(X, Y)


def test_a_model_that_shares_layers_with_a_model_in_training_raises_an_error(trained_elsewhere):
    layer = trained_elsewhere.layers[-1]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), layer], name="other")
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match="'other', .* shares layers"):
        SparkModel(model).fit(X, Y)
    layer.trainable = False  # training does not change it
    with training([model]):
        pass
    with training([keras.models.clone_model(trained_elsewhere), regression()]):
        pass


def test_fit_in_a_callback_of_a_fit_of_the_same_model_raises_an_error():
    model = regression()
    with training([model]), pytest.raises(ModelError, match="from a callback"):
        SparkModel(model).fit(X, Y)
    with pytest.raises(RuntimeError), training([model]):
        raise RuntimeError
    with training([model]):  # the model is not locked after the end, an error or a rejected call
        pass


@pytest.mark.core
def test_variables_do_not_share_memory_with_a_state():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile("sgd", "mse")
    state = ModelState.take(model)
    buffer = np.zeros(state.weights.vector.size + 16, np.float32)
    start = -buffer.ctypes.data % 64 // 4  # JAX does not copy memory that is aligned to 64 bytes
    vector = buffer[start : start + state.weights.vector.size]
    replace(state, weights=Flat(vector)).put(model)
    vector[:] = 7
    assert not ModelState.take(model).weights.vector.any()


def test_a_state_is_read_atomically_while_another_thread_writes_it(monkeypatch):
    model, read, assign_all = regression(), [], backends.assign_all
    reader = threading.Thread(target=lambda: read.append(ModelState.take(model).weights.vector))

    def interrupted(variables, values):
        assign_all(variables[:1], values[:1])
        if reader.ident is None:
            reader.start()
            reader.join(0.2)  # it has to wait for the lock
        assign_all(variables[1:], values[1:])

    monkeypatch.setattr(backends, "assign_all", interrupted)
    state = ModelState.take(model)
    state.weights.vector[:] = 7
    state.put(model)
    reader.join(60)
    assert (read[0] == 7).all()


def test_an_ensemble_waits_for_a_state_that_another_thread_writes():
    members, read = [regression(seed=seed) for seed in (1, 2)], []
    ensemble = EnsembleModel(members, voting="average")
    reader = threading.Thread(target=lambda: read.extend(ensemble.model.get_weights()))

    @locks_state
    def write():
        reader.start()
        reader.join(0.2)
        for member in members:
            member.set_weights([np.full(weight.shape, 7.0) for weight in member.weights])

    write()
    reader.join(60)
    assert [weight.tolist() for weight in read] == [[[7.0]] * 3, [7.0]] * 2


def test_a_copy_is_of_one_state_while_another_thread_writes_the_model(monkeypatch):
    model = regression()
    before, after = ModelState.take(model), ModelState.take(model)
    after.weights.vector[:] += 1
    writer = threading.Thread(target=after.put, args=[model])
    save_bytes = models.save_bytes

    def interrupted(model):
        data = save_bytes(model)
        writer.start()
        writer.join(0.2)  # it has to wait for the lock
        return data

    monkeypatch.setattr(models, "save_bytes", interrupted)
    copy = copy_of(model)  # compares the weights that it has loaded with the model's
    writer.join(60)
    assert np.array_equal(ModelState.take(copy).weights.vector, before.weights.vector)
    assert np.array_equal(ModelState.take(model).weights.vector, after.weights.vector)
