"""Saved SparkModels: Keras archives with two additional files."""

import io
import json
import traceback
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest

from sparkkeras import EnsembleModel, SparkModel, load_ensemble_model, load_spark_model
from sparkkeras.errors import ConfigurationError, CustomObjectError, ModelError
from sparkkeras.modeling.compilation import check_trainable
from sparkkeras.training import persistence
from tests.models import regression

SETTINGS = {
    "mode": "synchronous",
    "frequency": 10,
    "num_workers": None,
    "rule": {"name": "slowmo", "parameters": {"a": 1.0}},
}
STATE = {"momentum": np.arange(8, dtype=np.float32), "a": np.array([1 / 3]), "velocity of it": np.zeros(0, np.float32)}
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    model.fit(X, X[:, :2], epochs=2, verbose=0)
    return model


@pytest.fixture(scope="module")
def packed(model):
    return persistence.pack(model, SETTINGS, STATE)


def with_member(data, name, content):
    """The archive with one of its files replaced."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(result, "w") as target:
        for member in source.namelist():
            if member != name:
                target.writestr(member, source.read(member))
        if content is not None:
            target.writestr(name, content)
    return result.getvalue()


def test_model_settings_and_rule_state_survive_a_round_trip(model, packed):
    loaded, settings, state = persistence.unpack(packed, {}, True)
    assert settings == SETTINGS
    assert list(state) == list(STATE)
    for name, expected in STATE.items():
        np.testing.assert_array_equal(state[name], expected, strict=True)
    for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(theirs))
    assert loaded.loss == "mse"


def test_files_are_exchanged_with_plain_keras(model, packed, tmp_path):
    path = tmp_path / "model.keras"
    path.write_bytes(packed)
    assert np.array_equal(keras.saving.load_model(path)(X), model(X))
    model.save(path)
    loaded, settings, state = persistence.unpack(path.read_bytes(), {}, True)
    assert np.array_equal(loaded(X), model(X))
    assert (settings, state) == ({}, {})


def flipped(data, offset):
    damaged = bytearray(data)
    damaged[offset] ^= 0xFF
    return bytes(damaged)


def entry(data):
    """Where the entry of a file in the zip's directory begins, at the end of the archive."""
    return data.rindex(b"config.json") - 46


def pickled():
    """The state of a rule with an object, which only a pickle can hold."""
    file = io.BytesIO()
    np.savez(file, momentum=np.array([{"any": "object"}], object))
    return file.getvalue()


DAMAGES = {
    "empty": (lambda data: b"", r"not a \.keras archive"),
    "truncated": (lambda data: data[: len(data) * 6 // 10], "damaged"),
    "flipped": (lambda data: flipped(data, len(data) // 2), "damaged.*'model.weights.h5'"),
    "another version": (lambda data: flipped(data, entry(data) + 6), None),
    "another method": (lambda data: flipped(data, entry(data) + 10), None),
    "another place": (lambda data: flipped(data, entry(data) + 42), None),
    "no configuration": (lambda data: with_member(data, "config.json", None), "no config.json"),
    "no weights": (lambda data: with_member(data, "model.weights.h5", None), "cannot be loaded"),
    "later": (lambda data: with_member(data, "sparkkeras.json", b'{"format": 999}'), "later version"),
    "other settings": (lambda data: with_member(data, "sparkkeras.json", b"{no json"), "damaged"),
    "other state": (lambda data: with_member(data, "sparkkeras.npz", b"no arrays"), "damaged"),
    "a pickle": (lambda data: with_member(data, "sparkkeras.npz", pickled()), None),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_cannot_be_read_is_reported_and_runs_no_code(packed, damage, message):
    with pytest.raises(ModelError, match=message):
        persistence.unpack(damage(packed), {}, True)


def test_missing_custom_code_is_reported_in_a_single_error(tmp_path):
    class Doubled(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    model = keras.Sequential([keras.Input((3,)), Doubled(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    path = tmp_path / "model.keras"
    model.save(path)
    with pytest.raises(CustomObjectError, match="'Doubled'.*custom_objects") as caught:
        load_spark_model(path)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    assert np.array_equal(load_spark_model(path, {"Doubled": Doubled}).model(X), model(X))


def test_a_lambda_is_loaded_only_without_safe_mode():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x * 2), keras.layers.Dense(1)])
    data = persistence.pack(model, {}, {})
    with pytest.raises(ModelError, match="safe_mode=False"):
        persistence.unpack(data, {}, True)
    assert np.array_equal(persistence.unpack(data, {}, False)[0](X), model(X))


# Files of Elephas and of older versions of Keras


def hdf5(model, path, **written):
    """Save a model like ``SparkModel.save`` of Elephas 7.3."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns that HDF5 is a legacy format
        model.save(path)
    if written:
        with h5py.File(path, "a") as file:
            file.attrs["distributed_config"] = json.dumps(written).encode("utf8")
    return path


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("SparkModel", {"num_workers": None, "batch_size": 64, "epochs": 3}, {"mode": "synchronous", "batch_size": 64}),
        (
            "AsynchronousSparkModel",
            {"num_workers": 3, "parameter_server_mode": "socket", "mode": "hogwild", "frequency": "batch"},
            {"mode": "hogwild", "frequency": 1, "num_workers": 3, "parameter_server_mode": "socket"},
        ),
        ("AsynchronousSparkModel", {}, {"mode": "asynchronous"}),
        (None, {}, {"mode": "synchronous"}),  # a file of Keras
    ],
)
def test_a_file_of_elephas_is_loaded(model, tmp_path, kind, config, expected):
    written = {"class_name": kind, "config": config} if kind else {}
    loaded = load_spark_model(hdf5(model, tmp_path / "model.h5", **written))
    assert {name: getattr(loaded, name) for name in expected} == expected
    assert np.array_equal(loaded.model(X), model(X))
    assert int(loaded.model.optimizer.iterations) == 2


def test_a_file_of_elephas_that_keras_cannot_load_is_reported(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x * 2), keras.layers.Dense(1)])
    path = hdf5(model, tmp_path / "model.h5", class_name="AsynchronousSparkModel", config={"frequency": "batch"})
    with pytest.raises(ModelError, match="Python code.*frequency='batch', mode='asynchronous'"):
        load_spark_model(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ModelError, match="may be damaged"):
        load_spark_model(path)


def test_files_without_a_single_model_are_reported_with_how_to_load_them(model, tmp_path):
    EnsembleModel([model], "average").save(tmp_path / "e.zip")
    with pytest.raises(ModelError, match="load_ensemble_model"):
        load_spark_model(tmp_path / "e.zip")
    model.save_weights(tmp_path / "w.weights.h5")
    with pytest.raises(ModelError, match=r"model\.load_weights"):
        load_spark_model(tmp_path / "w.weights.h5")


def test_values_that_are_not_paths_are_reported(model):
    for call in (lambda: load_spark_model(None), lambda: SparkModel(model).save("")):
        with pytest.raises(ConfigurationError, match="path=.*expected a path"):
            call()


def test_custom_objects_may_be_any_objects_except_plain_values_and_are_checked_first(model):
    given = {"half": keras.DTypePolicy("mixed_bfloat16"), "Dense": keras.layers.Dense, "relu": keras.ops.relu}
    assert SparkModel(model, custom_objects=given).custom_objects == given
    for plain in ("Dense", np.float32(1), True, None, []):
        with pytest.raises(ConfigurationError, match="custom_objects has 'half'"):
            SparkModel(model, custom_objects={"half": plain})
    for wrong, load in (([1], load_spark_model), ({5: keras.layers.Dense}, load_ensemble_model)):
        with pytest.raises(ConfigurationError, match="custom_objects.*expected"):
            load("nowhere", custom_objects=wrong)


def test_a_model_from_hdf5_continues_training_with_its_optimizer(packed, model, tmp_path):
    """Keras builds the optimizer of such a file for no weights, so fit fails with plain Keras."""
    (tmp_path / "model.keras").write_bytes(packed)
    plain = keras.saving.load_model(tmp_path / "model.keras")
    loaded = load_spark_model(hdf5(model, tmp_path / "model.h5")).model
    arguments = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    histories = [each.fit(X, X[:, :2], **arguments).history for each in (plain, loaded)]
    assert histories[0] == histories[1]
    check_trainable(loaded)


def test_a_model_that_keras_loaded_from_hdf5_is_rejected_with_the_reason(tmp_path):
    model = regression()
    model.compile("adam", keras.losses.MeanSquaredError())
    with pytest.raises(ModelError, match=r"HDF5.*load_spark_model"):
        check_trainable(keras.saving.load_model(hdf5(model, tmp_path / "model.h5")))
