"""A trained model with its SparkModel's settings as one ``.keras`` archive, and several models as one file.

Keras ignores the two members that are added to its own: ``sparkkeras.json``, the settings, and ``sparkkeras.npz``, what
the update rule remembers. An ensemble is a zip of ``ensemble.json`` and a ``.keras`` archive for each member.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ModelError
from sparkkeras.modeling.archive import HDF5, load_bytes, optimizer_of, save_bytes
from sparkkeras.parameter.rules import State

_SETTINGS = "sparkkeras.json"
_RULE_STATE = "sparkkeras.npz"
_ENSEMBLE = "ensemble.json"
_FORMAT = 1
_LATER = "the file was written by a later version of sparkkeras: upgrade to read it."
_DAMAGED = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, KeyError, EOFError, RuntimeError)


def pack(model: keras.Model, settings: Mapping[str, Any], rule_state: State) -> bytes:
    """The archive's bytes. ``settings`` is what JSON can hold."""
    buffer = io.BytesIO(save_bytes(model))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(_SETTINGS, json.dumps({"format": _FORMAT, **settings}, indent=1))
        if rule_state:
            arrays = io.BytesIO()
            np.savez(arrays, **rule_state)  # type: ignore[arg-type]
            archive.writestr(_RULE_STATE, arrays.getvalue())
    return buffer.getvalue()


def unpack(data: bytes, custom_objects: Mapping[str, Any], safe_mode: bool) -> tuple[keras.Model, dict[str, Any], State]:
    """The model, the settings (empty if plain Keras wrote the archive) and the rule's state.

    Raises:
        ModelError: It is no file of Keras's, or one of a later format, or the model does not load.
    """
    if data.startswith(HDF5):
        return _unpack_hdf5(data, custom_objects, safe_mode)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = set(archive.namelist())
            settings = json.loads(archive.read(_SETTINGS)) if _SETTINGS in members else {}
            stored = archive.read(_RULE_STATE) if _RULE_STATE in members else b""
            state = _state(stored)
    except (*_DAMAGED, OSError) as error:
        raise ModelError(
            f"the file is no .keras archive: it may be damaged, or of another format ({type(error).__name__}: {error})."
        ) from error
    if settings.pop("format", _FORMAT) > _FORMAT:
        raise ModelError(_LATER)
    if "config.json" not in members:
        told = (
            "it is an ensemble: load it with load_ensemble_model."
            if _ENSEMBLE in members
            else "it has no config.json. Give what SparkModel.save or keras.Model.save wrote."
        )
        raise ModelError(f"the file is no .keras archive: {told}")
    return load_bytes(data, custom_objects, safe_mode=safe_mode), settings, state


def _unpack_hdf5(
    data: bytes, custom_objects: Mapping[str, Any], safe_mode: bool
) -> tuple[keras.Model, dict[str, Any], State]:
    """A model that Keras or Elephas wrote as HDF5, with the settings that Elephas puts into an attribute of the file."""
    import h5py

    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            written = json.loads(file.attrs.get("distributed_config", "{}"))
            has_model = "model_config" in file.attrs
        config = dict(written.get("config") or {})
        asynchronous = written.get("class_name") == "AsynchronousSparkModel"
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"the HDF5 file cannot be read: it may be damaged ({type(error).__name__}: {error}).") from error
    if not has_model:
        raise ModelError(
            "the HDF5 file holds no model, only weights (if it is Keras's): build the model as it was, load them with "
            "model.load_weights(path), and give it to SparkModel(model)."
        )
    settings = {name: config[name] for name in _OF_ELEPHAS if config.get(name) is not None}
    if asynchronous:
        settings.setdefault("mode", "asynchronous")
    aliases = {short: getattr(keras.losses, name) for short, name in _ALIASES.items()}
    try:
        model = load_bytes(data, {**aliases, **custom_objects}, safe_mode=safe_mode)
    except ModelError as error:
        raise type(error)(
            f"{error} The file is HDF5, which older versions of Keras and Elephas write. Where its optimizer or loss is the "
            "obstacle, load the model without and compile it again: model = keras.models.load_model(path, compile=False); "
            f"model.compile(...); SparkModel(model{''.join(f', {name}={value!r}' for name, value in settings.items())})."
        ) from error.__cause__
    _restore_optimizer(model, data)
    return model, settings, {}


def _restore_optimizer(model: keras.Model, data: bytes) -> None:
    """Give a model that Keras has loaded from HDF5 an optimizer for its weights, with the saved variables if these fit.

    Keras builds the optimizer for the variables that the model has outside of its layers, none as a rule, so that it cannot
    be used: https://github.com/keras-team/keras, ``legacy_h5_format.load_model_from_hdf5``.
    """
    import h5py

    optimizer = optimizer_of(model)
    if optimizer is None or not optimizer.built or not model.trainable_variables:
        return
    restored = type(optimizer).from_config(optimizer.get_config())
    restored.build(model.trainable_variables)
    with h5py.File(io.BytesIO(data), "r") as file:
        group = file.get("optimizer_weights")
        names = [] if group is None else group.attrs.get("weight_names", [])
        saved = [group[name if isinstance(name, str) else name.decode()][()] for name in names]
    if [value.shape for value in saved] == [tuple(variable.shape) for variable in restored.variables]:
        for variable, value in zip(restored.variables, saved, strict=True):
            variable.assign(value)
    model.optimizer = restored
    model._compile_config.config["optimizer"] = restored


_ALIASES = {
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "msle": "mean_squared_logarithmic_error",
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
}
"""Names of losses that Keras takes in compile, and does not find when it loads HDF5."""

_OF_ELEPHAS = ("mode", "frequency", "num_workers", "parameter_server_mode", "batch_size")
"""The settings of Elephas that have the same names and values here."""


def pack_ensemble(models: Sequence[keras.Model], settings: Mapping[str, Any]) -> bytes:
    """The bytes of a file with several models. ``settings`` is what JSON can hold."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(_ENSEMBLE, json.dumps({"format": _FORMAT, "members": len(models), **settings}, indent=1))
        for number, model in enumerate(models):
            archive.writestr(_member(number), save_bytes(model))
    return buffer.getvalue()


def unpack_ensemble(
    data: bytes, custom_objects: Mapping[str, Any], safe_mode: bool
) -> tuple[list[keras.Model], dict[str, Any]]:
    """The models and the settings.

    Raises:
        ModelError: It is no such file, or one of a later format, or a model does not load.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            settings: dict[str, Any] = json.loads(archive.read(_ENSEMBLE)) if _ENSEMBLE in names else {}
            later = settings.pop("format", _FORMAT) > _FORMAT
            count = 0 if later else settings.pop("members", 0)
            members = [archive.read(_member(number)) for number in range(count)]
    except (*_DAMAGED, AttributeError, TypeError, OSError) as error:
        raise ModelError(
            f"the file holds no ensemble: it may be damaged, or of another format ({type(error).__name__}: {error})."
        ) from error
    if later:
        raise ModelError(_LATER)
    if not members:
        told = (
            "it is a single model: load it with load_spark_model or keras.saving.load_model."
            if "metadata.json" in names
            else f"it has no {_ENSEMBLE} with members. Give what EnsembleModel.save wrote."
        )
        raise ModelError(f"the file holds no ensemble: {told}")
    loaded = []
    for number, member in enumerate(members):
        try:
            loaded.append(load_bytes(member, custom_objects, safe_mode=safe_mode))
        except ModelError as error:
            raise type(error)(f"member {number}: {error}") from error.__cause__
    return loaded, settings


def _member(number: int) -> str:
    return f"member-{number}.keras"


def _state(stored: bytes) -> State:
    if not stored:
        return {}
    with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
