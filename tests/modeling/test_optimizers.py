"""Models with several optimizers."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.errors import ModelError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.optimizers import built_for, iterations, optimizers_of, unbuilt
from sparkkeras.modeling.state import ModelState, advanced, learning_rate
from tests.models import Gan, gan, regression
from tests.training.runs import fit

pytestmark = pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras passes one optimizer to a train_step of JAX")

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
ROW = from_arrays(X[:1] * 0, None, None)


def test_optimizers_are_found_in_attributes_containers_and_nested_models():
    model = gan()
    model.discriminator.compile(keras.optimizers.SGD(), "mse")
    model.further = {"b": [keras.optimizers.Lion()], "a": model.d_optimizer}
    assert list(optimizers_of(model)) == ["d_optimizer", "discriminator.optimizer", "further['b'][0]", "g_optimizer"]
    plain = regression()
    plain.other = keras.optimizers.Adam()
    assert list(optimizers_of(plain)) == ["optimizer"]


def test_a_step_builds_optimizers_for_the_weights_that_they_train():
    model = gan()
    before = ModelState.take(model)
    assert unbuilt(model) == ["d_optimizer", "g_optimizer"]
    metrics.prepare(model, ROW)
    assert unbuilt(model) == []
    found = {path: built_for(optimizer, model) for path, optimizer in optimizers_of(model).items()}
    assert found == {"d_optimizer": [0, 1, 2, 3], "g_optimizer": [4, 5, 6, 7]}
    after = ModelState.take(model)
    np.testing.assert_array_equal(after.weights.vector, before.weights.vector)
    assert iterations(model) == [0, 0]
    assert all(not np.any(metric) for metric in metrics.take(model))
    assert np.count_nonzero(after.optimizer.vector) == 2  # the learning rates: moments are zeros, as Keras builds them


def test_a_train_step_that_fails_raises_an_error_with_its_message():
    class Failing(Gan):
        def g_loss(self, real):
            raise RuntimeError("no noise")

    with pytest.raises(ModelError, match="d_optimizer, g_optimizer.* no noise"):
        metrics.prepare(gan(Failing), ROW)


def test_an_attempt_that_takes_over_continues_the_iterations_of_all_optimizers():
    model = gan()
    metrics.prepare(model, ROW)
    state = advanced(ModelState.take(model), model, (35, 7), [0.5])
    assert learning_rate(model) == 0.5  # of the compiled optimizer only
    assert float(keras.ops.convert_to_numpy(model.d_optimizer.learning_rate)) == pytest.approx(0.01)
    other = ModelArchive.pack(model).unpack()
    state.put(other)
    assert iterations(other) == [35, 7]


def test_optimizers_that_are_missing_after_loading():
    class Forgetful(Gan):
        def get_compile_config(self):
            return {}

        def compile_from_config(self, config):
            keras.Model.compile(self)

    with pytest.raises(ModelError, match="none after saving.*get_compile"):
        ModelArchive.pack(gan(Forgetful))


def blocks(*sizes):
    stops = np.cumsum(sizes)
    return [from_arrays(X[stop - size : stop].copy(), None, None) for stop, size in zip(stops, sizes, strict=True)]


def test_the_variables_of_each_optimizer_are_averaged_by_rows():
    found = []
    for dataset in (blocks(6), blocks(6, 2), blocks(6, 2)[1:]):
        model = gan()
        metrics.prepare(model, ROW)
        history, _ = fit(SimpleNamespace(model=model), LocalDataset(tuple(dataset)), steps_per_epoch=1)
        assert set(history.history) == {"d_loss", "g_loss"}
        found.append(ModelState.take(model).optimizer.vector)
    first, both, second = found
    np.testing.assert_allclose(both, (4 * first + 2 * second) / 6, rtol=1e-5, atol=1e-7)


@keras.saving.register_keras_serializable("tests_of_optimizers")
class Reporting(keras.Sequential):
    """Returns a value that is not a metric."""

    def train_step(self, data):
        return super().train_step(data) | {"largest": keras.ops.max(data[1])}


def test_values_of_a_train_step_that_are_no_metrics_are_averaged_by_rows():
    model = Reporting([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    parts = [from_arrays(X[:size], np.full((size, 1), value, np.float32), None) for size, value in ((4, 1.0), (8, 4.0))]
    metrics.prepare(model, parts[0].spec.zeros())
    history, _ = fit(SimpleNamespace(model=model), LocalDataset(tuple(parts)))
    assert history.history["largest"] == [pytest.approx((4 * 1 + 8 * 4) / 12)]
