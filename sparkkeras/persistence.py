"""A trained model with its SparkModel's settings as one ``.keras`` archive.

Keras ignores the two members that are added to its own: ``sparkkeras.json``, the settings, and ``sparkkeras.npz``, what
the update rule remembers.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ModelError
from sparkkeras.model import load_bytes, save_bytes
from sparkkeras.parameter.rules import State

_SETTINGS = "sparkkeras.json"
_RULE_STATE = "sparkkeras.npz"
_FORMAT = 1
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
        ModelError: It is no ``.keras`` archive, or one of a later format, or the model does not load.
    """
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
        raise ModelError("the file was written by a later version of sparkkeras: upgrade to read it.")
    return load_bytes(data, custom_objects, safe_mode=safe_mode), settings, state


def _state(stored: bytes) -> State:
    if not stored:
        return {}
    with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
