"""File formats: a model with the settings of its SparkModel as one ``.keras`` archive, and an ensemble as one zip file.

The archive has two more files than those of Keras, which ignores them: ``sparkkeras.json`` with the settings and
``sparkkeras.npz`` with the state of the update rule. An ensemble is a zip of ``ensemble.json`` and a ``.keras`` archive for
each member.
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
from sparkkeras.modeling.archive import HDF5, load_bytes, save_bytes
from sparkkeras.modeling.optimizers import optimizer_of
from sparkkeras.parameter.rules import State

_SETTINGS = "sparkkeras.json"
_RULE_STATE = "sparkkeras.npz"
_ENSEMBLE = "ensemble.json"
_FORMAT = 1
_LATER = "the file was written by a later version of sparkkeras: upgrade to read it."
_DAMAGED = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, KeyError, EOFError, RuntimeError)


def pack(model: keras.Model, settings: Mapping[str, Any], rule_state: State) -> bytes:
    """The bytes of a ``.keras`` archive with a model, settings (compatible with JSON) and the state of the update rule."""
    buffer = io.BytesIO(save_bytes(model))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(_SETTINGS, json.dumps({"format": _FORMAT, **settings}, indent=1))
        if rule_state:
            arrays = io.BytesIO()
            np.savez(arrays, **rule_state)  # type: ignore[arg-type]
            archive.writestr(_RULE_STATE, arrays.getvalue())
    return buffer.getvalue()


def unpack(data: bytes, custom_objects: Mapping[str, Any], safe_mode: bool) -> tuple[keras.Model, dict[str, Any], State]:
    """Read a ``.keras`` or HDF5 file: the model, the settings (empty for files of plain Keras) and the rule's state.

    Raises:
        ModelError: The file is not a Keras file or has a later format, or the model cannot be loaded.
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
            f"the file is not a .keras archive: it may be damaged, or of another format ({type(error).__name__}: {error})."
        ) from error
    if settings.pop("format", _FORMAT) > _FORMAT:
        raise ModelError(_LATER)
    if "config.json" not in members:
        reason = (
            "it is an ensemble. Load it with load_ensemble_model."
            if _ENSEMBLE in members
            else "it has no config.json. Pass a file that SparkModel.save or keras.Model.save wrote."
        )
        raise ModelError(f"the file is not a .keras archive: {reason}")
    return load_bytes(data, custom_objects, safe_mode=safe_mode), settings, state


def _unpack_hdf5(
    data: bytes, custom_objects: Mapping[str, Any], safe_mode: bool
) -> tuple[keras.Model, dict[str, Any], State]:
    """Read an HDF5 file of Keras or Elephas, with the settings that Elephas saves in an attribute of the file."""
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
            "the HDF5 file contains no model; if Keras wrote it, it contains only weights: build the same model, call "
            "model.load_weights(path), and pass the model to SparkModel(model)."
        )
    settings = {name: config[name] for name in _OF_ELEPHAS if config.get(name) is not None}
    if asynchronous:
        settings.setdefault("mode", "asynchronous")
    aliases = {short: getattr(keras.losses, name) for short, name in _ALIASES.items()}
    try:
        model = load_bytes(data, {**aliases, **custom_objects}, safe_mode=safe_mode)
    except ModelError as error:
        raise type(error)(
            f"{error} The file is HDF5, the format of older versions of Keras and Elephas. If its optimizer or loss cannot "
            "be loaded, load the model without them and compile it again: "
            "model = keras.models.load_model(path, compile=False); "
            f"model.compile(...); SparkModel(model{''.join(f', {name}={value!r}' for name, value in settings.items())})."
        ) from error.__cause__
    _restore_optimizer(model, data)
    return model, settings, {}


def _restore_optimizer(model: keras.Model, data: bytes) -> None:
    """Rebuild the optimizer of a model that Keras loaded from HDF5, with the saved optimizer variables if their shapes fit.

    Keras builds it only for the variables that the model has outside of its layers, usually none, so the loaded optimizer
    cannot train the model: https://github.com/keras-team/keras, ``legacy_h5_format.load_model_from_hdf5``.
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
"""Short names of losses that Keras accepts in compile but does not find when it loads HDF5."""

_OF_ELEPHAS = ("mode", "frequency", "num_workers", "parameter_server_mode", "batch_size")
"""The settings that have the same names and values in Elephas."""


def pack_ensemble(models: Sequence[keras.Model], settings: Mapping[str, Any]) -> bytes:
    """The bytes of an ensemble file with several models and settings (compatible with JSON)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(_ENSEMBLE, json.dumps({"format": _FORMAT, "members": len(models), **settings}, indent=1))
        for number, model in enumerate(models):
            archive.writestr(_member(number), save_bytes(model))
    return buffer.getvalue()


def unpack_ensemble(
    data: bytes, custom_objects: Mapping[str, Any], safe_mode: bool
) -> tuple[list[keras.Model], dict[str, Any]]:
    """Read an ensemble file: the models and the settings.

    Raises:
        ModelError: The file is not an ensemble file or has a later format, or a model cannot be loaded.
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
            f"the file is not an ensemble file: it may be damaged, or of another format ({type(error).__name__}: {error})."
        ) from error
    if later:
        raise ModelError(_LATER)
    if not members:
        reason = (
            "it is a single model. Load it with load_spark_model or keras.saving.load_model."
            if "metadata.json" in names
            else f"it has no {_ENSEMBLE} that lists members. Pass a file that EnsembleModel.save wrote."
        )
        raise ModelError(f"the file is not an ensemble file: {reason}")
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
