"""Saving and loading of estimators and transformers: a folder with Spark's metadata and a ``model.keras`` file.

Param values that JSON can hold are saved as Spark saves them. Functions and classes are saved as
``module:name`` (`sparkkeras.training.references`). Values of a param grid that JSON cannot hold, such as models, are saved
in folders of their own within the saved search (`GridValue`). Loading never unpickles anything.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras
import pyspark
from pyspark.ml import Transformer
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame

from sparkkeras import arguments
from sparkkeras.errors import CustomObjectError, ModelError, StorageError, warn
from sparkkeras.modeling.archive import ModelArchive, custom_objects_of
from sparkkeras.spark import filesystem
from sparkkeras.training import persistence
from sparkkeras.training.references import decode, encode, find_code, is_registered, reference_to_code

_MODEL, _METADATA = "model.keras", "metadata"
_METADATA_KEY = "sparkkeras"
_NOT_SAVED = ("callbacks", "worker_callbacks", "validation_data")


class Savable(Params, MLWritable, MLReadable[Any]):
    """Adds ``write``, ``save``, ``read`` and ``load``, for any file system that Spark can access.

    A path without a scheme is on Spark's default file system (``fs.defaultFS``); with Spark Connect, it is on this machine,
    and fsspec opens URIs. Saving to an existing path raises `StorageError`; ``write().overwrite().save(path)`` replaces it.

    Functions and classes among the params are saved as ``module:name`` and imported by ``load``. Saving raises
    `CustomObjectError` for lambdas, closures and functions of a script or notebook. A model's custom code can be registered
    with Keras instead; functions from an installed package must be. ``load`` imports the modules that the folder names, so
    load only folders that you trust as much as your code.
    A subclass is saved by its name, so define it at the top level of a module, or of the script that loads it.
    Callbacks and ``validation_data`` are not saved; a warning says so. Loading a Lambda layer that holds a Python lambda
    raises `ModelError`, unless ``keras.config.enable_unsafe_deserialization()`` was called.
    """

    def write(self) -> KerasWriter:
        """Return the writer, as in ``stage.write().overwrite().save(path)``."""
        return KerasWriter(self)

    @classmethod
    def read(cls) -> KerasReader:
        """Return the reader, as in ``KerasTransformer.read().load(path)``."""
        return KerasReader(cls)

    def _saved_model(self) -> keras.Model | None:
        """The model to save; ``None``: no model."""
        model: keras.Model | None = self.getOrDefault("model")
        return model

    def _loaded_model(self, model: keras.Model) -> None:
        """Set the model that was loaded."""
        self._set(model=model)

    def _saved_notes(self) -> dict[str, Any]:
        """Further values to save, compatible with JSON."""
        return {}

    def _loaded_notes(self, notes: dict[str, Any]) -> None:
        """Restore the values of `_saved_notes`."""


class GridValue(Transformer, Savable):
    """Wraps a param's value in a grid, so that Spark can save the grid.

    Spark writes the values of a grid as JSON, except stages, which it saves as stages. So ``ParamGridBuilder.build`` wraps
    values that JSON cannot hold in a GridValue, which is a stage. Setting a param to a GridValue sets it to ``value``.

    Args:
        name: The name of the param, for error messages.
        value: The value.
    """

    def __init__(self, name: str = "", value: Any = None) -> None:
        super().__init__()
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"GridValue({self.name!r}, {self.value!r})"

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return dataset

    def _saved_model(self) -> keras.Model | None:
        return self.value if isinstance(self.value, keras.Model) else None

    def _loaded_model(self, model: keras.Model) -> None:
        self.value = model

    def _saved_notes(self) -> dict[str, Any]:
        value = None if self._saved_model() is not None else self.value
        return {"name": self.name, "value": encode(value, f"a value of the param {self.name} in the grid")}

    def _loaded_notes(self, notes: dict[str, Any]) -> None:
        self.name, self.value = notes["name"], decode(notes["value"])


def as_grid_value(name: str, value: Any) -> Any:
    """Wrap a value in a `GridValue` if JSON cannot hold it, so that Spark can save a grid with it."""
    return value if is_json(value) else GridValue(name, value)


def from_grid_value(value: Any) -> Any:
    """Undo `as_grid_value`."""
    return value.value if isinstance(value, GridValue) else value


def content_of(instance: Savable) -> tuple[keras.Model | None, dict[str, Any], dict[str, Any]]:
    """What is saved of an estimator or transformer.

    Returns:
        The model; the params that were set and that JSON can hold; and everything else, encoded for JSON: other params,
        custom code, values of the class.

    Raises:
        CustomObjectError: A function or class could not be loaded again.
    """
    given = {param.name: value for param, value in instance._paramMap.items()}
    for name in _NOT_SAVED:
        if given.pop(name, None):
            warn(f"{instance.uid}: the param {name!r} cannot be saved and is left out. Set it again after loading.")
    model = instance._saved_model()
    if isinstance(given.get("model"), keras.Model):
        del given["model"]
    objects = given.pop("custom_objects", None) or {}
    plain = {name: value for name, value in given.items() if is_json(value)}
    notes = {
        "format": 1,
        "encoded": {name: encode(value, f"the param {name}") for name, value in given.items() if name not in plain},
        "custom_objects": _references(objects, objects),
        "code": {} if model is None else _references(_code_of(model, objects), objects),
        "has_model": model is not None,
        **instance._saved_notes(),
    }
    return model, plain, notes


class KerasWriter(MLWriter):
    """Writes an estimator or transformer to a folder.

    Args:
        instance: The stage.
    """

    def __init__(self, instance: Savable) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Write to a temporary folder and rename it, so that a failure does not change an existing folder.

        If the process dies while it replaces a folder, the old folder or the new one is complete, and ``load`` finds it.

        Raises:
            ConfigurationError: ``path`` is not a path.
            StorageError: There is no Spark session, the folder exists and ``overwrite()`` was not called, or it cannot be
                written.
            CustomObjectError: A function or class could not be loaded again.
            ModelError: The model cannot be saved.
        """
        kind = _checked_class(type(self.instance))
        given = arguments.path("path", path)
        target = _qualified(given, "saving")
        if not re.sub("^[^/]*:(//[^/]*)?", "", given).strip("/"):
            raise StorageError(f"{given!r} is the root of a file system: choose the path of a folder below it.")
        _check_shared(target, self.instance.uid)
        model, params, notes = content_of(self.instance)
        if not self.shouldOverwrite and any(map(filesystem.exists, (target, filesystem.previous_folder(target)))):
            raise StorageError(f"{given!r} already exists: use write().overwrite().save(path), or another path.")
        metadata = {
            "class": _saved_name(kind),
            "timestamp": round(1000 * time.time()),
            "sparkVersion": pyspark.__version__,
            "uid": self.instance.uid,
            "paramMap": params,
            "defaultParamMap": {param.name: value for param, value in self.instance._defaultParamMap.items()},
            _METADATA_KEY: notes,
        }
        data = None if model is None else persistence.pack(model, {}, {})
        with filesystem.new_folder(target, overwrite=self.shouldOverwrite) as folder:
            filesystem.make_folder(f"{folder}/{_METADATA}")
            if data is not None:
                filesystem.write_bytes(f"{folder}/{_MODEL}", data)
            filesystem.write_bytes(f"{folder}/{_METADATA}/part-00000.txt", f"{json.dumps(metadata)}\n".encode())


class KerasReader(MLReader[Any]):
    """Reads an estimator or transformer from a folder.

    Args:
        kind: The expected class.
    """

    def __init__(self, kind: type[Savable]) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> Any:
        """Read the folder.

        Raises:
            StorageError: There is no Spark session, or the folder does not exist or cannot be read.
            ModelError: The folder holds something else, was written by a later version, or its model cannot be loaded.
            CustomObjectError: A module that the folder refers to is missing, or a file may not refer to the object.
        """
        path = _location(_qualified(arguments.path("path", path), "loading"))
        metadata = _metadata(path)
        expected = _saved_name(self.kind)
        if metadata.get("class") != expected:
            raise ModelError(f"{path!r} holds a {metadata.get('class')}; expected a {expected}. Load it with that class.")
        notes = metadata.get(_METADATA_KEY)
        if not isinstance(notes, dict):
            raise ModelError(f"{path!r} was not written by sparkkeras: its metadata has no {_METADATA_KEY!r}.")
        if notes["format"] > 1:
            raise ModelError(f"{path!r} was written by a later version of sparkkeras: upgrade to read it.")
        instance = self.kind()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        instance._set(**{name: decode(value) for name, value in notes["encoded"].items()})
        objects = _import_missing(notes["custom_objects"])
        if objects:
            instance._set(custom_objects=objects)
        instance._loaded_notes(notes)
        if notes["has_model"]:
            data = filesystem.read_bytes(f"{path}/{_MODEL}")
            instance._loaded_model(_model_of(data, {**_import_missing(notes["code"]), **objects}, path))
        return instance


def _saved_name(kind: type[Savable]) -> str:
    """The name by which Spark's loader imports a class; for the public stages that of the package, not of the module."""
    is_public = getattr(sys.modules[__package__], kind.__name__, None) is kind
    return f"{__package__ if is_public else kind.__module__}.{kind.__name__}"


def _checked_class(kind: type[Savable]) -> type[Savable]:
    """Check that Spark could load a stage of this class.

    Raises:
        CustomObjectError: Spark's loader would not find the class, or could not create an instance.
    """
    found: object = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    if found is not kind:
        raise CustomObjectError(
            f"{kind.__module__}.{kind.__qualname__} cannot be saved: Spark loads a stage by the name of its class, and this "
            "name refers to another class or to none. Define the class at the top level of a module or script, not inside a "
            "function or class; if the class was redefined, create the stage again."
        )
    needed = [
        name
        for name, each in inspect.signature(kind).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise CustomObjectError(
            f"{kind.__name__} cannot be saved: loading creates it without arguments, but its __init__ requires {needed}. "
            "Give each argument a default."
        )
    return kind


def _qualified(path: str, doing: str) -> str:
    """The path, as in `filesystem.qualified`.

    Raises:
        StorageError: It needs Spark, and Spark does not run.
    """
    if not filesystem.can_open_uris():
        raise StorageError(
            f"{doing} an estimator or transformer needs a Spark session, and none is active: start one with "
            "SparkSession.builder.getOrCreate(). To use only the Keras model, no session is needed: model.save(path) and "
            "KerasTransformer(model=keras.saving.load_model(path))."
        )
    return filesystem.qualified(path)


def _check_shared(path: str, uid: str) -> None:
    """Reject a stage of a pipeline that Spark writes elsewhere: on the server of Spark Connect.

    Raises:
        StorageError: This process does not find the metadata that Spark has written before the stages.
    """
    found = re.fullmatch(f"(.*)/stages/[0-9]+_{re.escape(uid)}/?", path)
    if found and not filesystem.exists(f"{found[1]}/{_METADATA}"):
        raise StorageError(
            f"{found[1]!r}: the server of Spark Connect has written the pipeline where this process does not find it. Use a "
            "path that both open, such as s3a://, or an absolute one if they run on the same machine."
        )


def _metadata(path: str) -> dict[str, Any]:
    folder = f"{path}/{_METADATA}"
    names = [name for name in filesystem.names_in(folder) if name.startswith("part-")]
    if not names and filesystem.exists(path):
        raise ModelError(f"{path!r} was not written by sparkkeras: it has no folder {_METADATA!r} with metadata.")
    if not names:
        raise StorageError(
            f"there is no saved estimator or transformer at {path!r}: it does not exist. A path without a scheme is on "
            "Spark's default file system; with Spark Connect, it is on this machine."
        )
    try:
        found = json.loads(b"".join(filesystem.read_bytes(f"{folder}/{name}") for name in names))
    except ValueError as error:  # an empty folder, or a folder with other files
        raise ModelError(f"{path!r} was not written by sparkkeras: its metadata cannot be read ({error}).") from error
    needed = ("class", "uid", "paramMap", "defaultParamMap", "sparkVersion")
    if not isinstance(found, dict) or not all(name in found for name in needed):
        raise ModelError(f"{path!r} was not written by sparkkeras: its metadata lacks {needed}.")
    return found


def _location(path: str) -> str:
    """Where the folder of a path is: there, or under its other name if a process died while it replaced the folder."""
    if filesystem.exists(f"{path}/{_METADATA}"):
        return path
    previous = filesystem.previous_folder(path)
    if not filesystem.exists(previous):
        return path
    warn(
        f"a process ended while it replaced {path!r}: loading the previous folder, {previous}. Save to {path!r} again, or "
        "rename that folder."
    )
    return previous


def _model_of(data: bytes, objects: Mapping[str, Any], path: str) -> keras.Model:
    try:
        return persistence.unpack(data, objects, safe_mode=True)[0]
    except CustomObjectError as error:
        raise CustomObjectError(
            f"{path!r}: the model's custom code is missing: register it with "
            "@keras.saving.register_keras_serializable(), or "
            f"load within keras.saving.custom_object_scope({{name: object}}). Keras's error: {error}"
        ) from error.__cause__
    except ModelError as error:
        message = str(error).replace(
            "pass safe_mode=False if", "call keras.config.enable_unsafe_deserialization() before, if"
        )
        raise ModelError(f"{path!r}: {message}") from error.__cause__


def _code_of(model: keras.Model, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The custom classes and functions that Keras looks up when it loads the model, by name."""
    ModelArchive.pack(model, objects)  # verifies that it loads as the same model
    return custom_objects_of(model, objects)


def _references(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """References to custom code by name, without objects that are registered with Keras."""
    return {
        name: reference_to_code(value, f"custom_objects[{name!r}]" if name in given else "the model's custom code")
        for name, value in found.items()
        if not is_registered(value)
    }


def _import_missing(references: Mapping[str, str]) -> dict[str, Any]:
    """Import custom code by name, unless Keras has an object of the name: registered objects take precedence."""
    return {name: find_code(place) for name, place in references.items() if keras.saving.get_registered_object(name) is None}


def is_json(value: Any) -> bool:
    """Whether a value survives a round trip through JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
