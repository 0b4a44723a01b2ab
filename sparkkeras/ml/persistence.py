"""Estimators and transformers in folders: Spark's metadata, with ``model.keras`` beside it.

What JSON can hold stands among Spark's params. Functions and classes are kept as the names of their modules
(`sparkkeras.ml.references`), and nothing is ever unpickled.
"""

from __future__ import annotations

import inspect
import json
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import keras
from pyspark.errors import PySparkRuntimeError
from pyspark.ml.param import Params
from pyspark.ml.util import (
    BaseReadWrite,
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from sparkkeras.errors import CustomObjectError, ModelError, StorageError
from sparkkeras.ml.references import decode, encode, find_code, is_registered, reference_to_code
from sparkkeras.modeling import custom_code
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.spark import storage
from sparkkeras.training import persistence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

S = TypeVar("S", bound="Savable")

_MODEL = "model.keras"
_OURS = "sparkkeras"
_NOT_SAVED = ("callbacks", "worker_callbacks")


class Savable(Params, MLWritable, MLReadable[Any]):
    """Has ``write``, ``save``, ``read`` and ``load``, on any file system that Spark reaches.

    A path without a scheme means what Spark means by it (``fs.defaultFS``). A folder that is there is refused, unless
    ``write().overwrite()`` says otherwise.

    Functions and classes among the params are saved as ``module:name`` and imported again by ``load``. Those of a script or
    a notebook, lambdas and closures are refused when saving; a model's custom code may be registered with Keras instead,
    and functions of it that are in an installed package must be. ``load`` imports the modules that a folder names: load
    only folders that you trust as you do your own modules.
    A subclass is saved under its own name and found again by it, so it stands at the top level of a module, or of the script
    that loads it.
    Callbacks are left out, with a warning. A Lambda layer with a Python lambda is refused when loading, unless
    ``keras.config.enable_unsafe_deserialization()`` was called.
    """

    def write(self) -> KerasWriter:
        """What saves this; ``write().overwrite().save(path)``."""
        return KerasWriter(self)

    @classmethod
    def read(cls) -> KerasReader:
        """What loads one; ``read().load(path)``."""
        return KerasReader(cls)

    def _saved_model(self) -> keras.Model | None:
        """The model that goes into the folder."""
        model: keras.Model | None = self.getOrDefault("model")
        return model

    def _loaded_model(self, model: keras.Model) -> None:
        """Take up the model of a folder."""
        self._set(model=model)

    def _saved_notes(self) -> dict[str, Any]:
        """What else is to be saved, as JSON can hold it."""
        return {}

    def _loaded_notes(self, notes: dict[str, Any]) -> None:
        """Take up what `_saved_notes` gave."""


@dataclass(frozen=True)
class Content:
    """Everything that a folder holds.

    Attributes:
        model: The ``.keras`` archive; ``None``: there is no model.
        params: What was set and JSON can hold.
        notes: The rest.
    """

    model: bytes | None
    params: dict[str, Any]
    notes: dict[str, Any]

    @classmethod
    def of(cls, instance: Savable) -> Content:
        """What is to be saved of an estimator or transformer.

        Raises:
            CustomObjectError: Something of it could not be loaded again.
            ModelError: The model cannot be saved.
        """
        given = {param.name: value for param, value in instance._paramMap.items()}
        for name in _NOT_SAVED:
            if given.pop(name, None):
                warnings.warn(
                    f"{instance.uid}: the param {name!r} cannot be saved and is left out: set it again after loading.",
                    stacklevel=5,
                )
        model = instance._saved_model()
        if isinstance(given.get("model"), keras.Model):
            del given["model"]
        objects = given.pop("custom_objects", None) or {}
        plain = {name: value for name, value in given.items() if is_json(value)}
        notes = {
            "format": 1,
            "encoded": {name: encode(value, f"the param {name}") for name, value in given.items() if name not in plain},
            "custom_objects": _referred(objects, objects),
            "code": {},
            "has_model": model is not None,
            **instance._saved_notes(),
        }
        if model is None:
            return cls(None, plain, notes)
        notes["code"] = _referred(_code_of(model, objects), objects)
        return cls(persistence.pack(model, {}, {}), plain, notes)


class KerasWriter(MLWriter):
    """Writes an estimator or transformer into a folder.

    Args:
        instance: What to write.
    """

    def __init__(self, instance: Savable) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Write the folder: beside the path first, then renamed, so that a failure leaves what is there as it was.

        Raises:
            StorageError: There is no Spark session, the folder exists and ``overwrite()`` was not called, or it cannot be
                written.
            CustomObjectError: Something could not be loaded again.
        """
        kind = _checked_class(type(self.instance))
        session = _classic(_session(self, "saving"))
        content = Content.of(self.instance)
        extra = {"class": _saved_name(kind), _OURS: content.notes}
        with _replaced(session, str(path), self.shouldOverwrite) as beside:
            if content.model is not None:
                storage.write_bytes(f"{beside}/{_MODEL}", content.model)
            DefaultParamsWriter.saveMetadata(self.instance, beside, session, extra, content.params)


class KerasReader(MLReader[Any]):
    """Reads an estimator or transformer from a folder.

    Args:
        kind: The class that is expected there.
    """

    def __init__(self, kind: type[Savable]) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> Any:
        """Read the folder.

        Raises:
            StorageError: There is no Spark session, or no such folder, or it cannot be read.
            ModelError: It holds something else, was written by a later version, or its model cannot be loaded.
            CustomObjectError: A module that it refers to is missing, or what it names may not be named by a file.
        """
        session = _session(self, "loading")
        metadata = _metadata(session, str(path))
        expected = _saved_name(self.kind)
        if metadata.get("class") != expected:
            raise ModelError(
                f"{str(path)!r} holds a {metadata.get('class')}; expected a {expected}: load it with its own class."
            )
        notes = metadata.get(_OURS)
        if not isinstance(notes, dict):
            raise ModelError(f"{str(path)!r} was not written by sparkkeras: its metadata has no {_OURS!r}.")
        if notes["format"] > 1:
            raise ModelError(f"{str(path)!r} was written by a later version of sparkkeras: upgrade to read it.")
        instance = self.kind()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        instance._set(**{name: decode(value) for name, value in notes["encoded"].items()})
        objects = _imported(notes["custom_objects"])
        if objects:
            instance._set(custom_objects=objects)
        instance._loaded_notes(notes)
        if notes["has_model"]:
            data = _read(session, f"{path}/{_MODEL}")
            instance._loaded_model(_model_of(data, {**_imported(notes["code"]), **objects}, str(path)))
        return instance


def _saved_name(kind: type[Savable]) -> str:
    """The name that Spark's loader imports a class by: those of this package are at hand in the package itself."""
    own = getattr(sys.modules[__package__], kind.__name__, None) is kind
    return f"{__package__ if own else kind.__module__}.{kind.__name__}"


def _checked_class(kind: type[Savable]) -> type[Savable]:
    """The class of what is to be saved, found to be one that can be loaded.

    Raises:
        CustomObjectError: Spark's loader would not find it, or could not make one.
    """
    found: object = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    if found is not kind:
        raise CustomObjectError(
            f"{kind.__module__}.{kind.__qualname__} cannot be saved: Spark loads a stage by the name of its class, and at "
            "that name there is another class, or none. Define the class at the top level of a module or script, not inside "
            "a function or class; if it was defined again meanwhile, create the stage again."
        )
    needed = [
        name
        for name, each in inspect.signature(kind).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise CustomObjectError(
            f"{kind.__name__} cannot be saved: loading makes one without arguments, and its __init__ requires {needed}. "
            "Give each argument a default."
        )
    return kind


def _session(of: BaseReadWrite, doing: str) -> SparkSession:
    """The Spark session that was given, or the active one.

    Raises:
        StorageError: There is none.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    try:
        return of.sparkSession
    except PySparkRuntimeError as error:
        if SparkContext._active_spark_context is not None:
            return SparkSession(SparkContext._active_spark_context)
        raise StorageError(
            f"{doing} an estimator or transformer needs a Spark session, and none is active: start one with "
            "SparkSession.builder.getOrCreate(). A Keras model alone needs none: model.save(path) and "
            "KerasTransformer(model=keras.saving.load_model(path))."
        ) from error


def _metadata(session: SparkSession, path: str) -> dict[str, Any]:
    try:
        found = DefaultParamsReader.loadMetadata(path, session)
    except (TypeError, ValueError) as error:  # an empty folder, or one of other files
        raise ModelError(f"{path!r} was not written by sparkkeras: its metadata cannot be read ({error}).") from error
    except Exception as error:
        raise StorageError(
            f"there is no saved estimator or transformer at {path!r}, or it cannot be read. A path without a scheme is "
            f"one of Spark's default file system. Spark says: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path!r} was not written by sparkkeras: its metadata is {found!r}.")
    return found


@contextmanager
def _replaced(session: SparkSession, path: str, overwrite: bool) -> Iterator[str]:
    """A folder to write into, which takes the path's place at the end; what was begun is removed on failure.

    Raises:
        StorageError: The path is there, and is not to be overwritten, or cannot be replaced.
    """
    target, files = _hadoop(session, path)
    jvm: Any = session.sparkContext._jvm
    target = files.makeQualified(target)
    if target.getParent() is None:
        raise StorageError(f"{path!r} is the root of a file system: give the path of a folder that is to be made.")
    if not overwrite and files.exists(target):
        raise StorageError(f"{path!r} is there already: take write().overwrite().save(path) to replace it, or another path.")
    beside = jvm.org.apache.hadoop.fs.Path(target.getParent(), f".{target.getName()}.{uuid.uuid4().hex}")
    try:
        yield str(beside.toString())
        if not overwrite and files.exists(target):  # a rename would move it inside
            raise StorageError(f"{path!r} was made by somebody else while this was saved.")
    except BaseException:
        with suppress(Exception):
            files.delete(beside, True)
        raise
    cause: Exception | None = None
    try:
        files.delete(target, True)
        if files.rename(beside, target):
            return
    except Exception as error:
        cause = error
    raise StorageError(f"cannot replace {path!r} ({cause or 'the rename failed'}); the new one is at {beside.toString()}")


def qualified(session: SparkSession, path: str) -> str:
    """The path as a URI: one without a scheme is of the file system that Spark takes by default."""
    target, files = _hadoop(session, path)
    return str(files.makeQualified(target).toString())


def _hadoop(session: SparkSession, path: str) -> tuple[Any, Any]:
    """A path and its file system, as Hadoop has them."""
    context = session.sparkContext
    jvm: Any = context._jvm
    target = jvm.org.apache.hadoop.fs.Path(path)
    try:
        return target, target.getFileSystem(context._jsc.hadoopConfiguration())
    except Exception as error:
        raise StorageError(f"cannot reach {path!r}: {error}") from error


def _read(session: SparkSession, path: str) -> bytes:
    if _is_remote(session):
        row = session.read.format("binaryFile").load(path).select("content").first()
        return bytes(row[0])  # type: ignore[index]
    return storage.read_bytes(qualified(session, path))


def _model_of(data: bytes, objects: Mapping[str, Any], path: str) -> keras.Model:
    try:
        return persistence.unpack(data, objects, safe_mode=True)[0]
    except CustomObjectError as error:
        raise CustomObjectError(
            f"{path!r}: the model's custom code is missing: register it with "
            "@keras.saving.register_keras_serializable(), or "
            f"load within keras.saving.custom_object_scope({{name: object}}). Keras says: {error}"
        ) from error.__cause__
    except ModelError as error:
        told = str(error).replace(
            "load it with safe_mode=False if", "call keras.config.enable_unsafe_deserialization() before, if"
        )
        raise ModelError(f"{path!r}: {told}") from error.__cause__


def _code_of(model: keras.Model, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The custom classes and functions that Keras looks up when it loads the model, by name; the model loads as itself."""
    needed = ModelArchive.pack(model, objects).custom.load()
    return {
        name: value
        for value in custom_code.code_of(model).values()
        if not custom_code.is_builtin(value)
        for name in custom_code.lookup_names(value)
        if name in needed
    }


def _referred(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """References to custom code by name, without what Keras finds by itself."""
    return {
        name: reference_to_code(value, f"custom_objects[{name!r}]" if name in given else "the model's custom code")
        for name, value in found.items()
        if not is_registered(value)
    }


def _imported(references: Mapping[str, str]) -> dict[str, Any]:
    """Custom code by name, without what Keras finds by itself: what is registered or in scope has precedence."""
    missing = {name: place for name, place in references.items() if keras.saving.get_registered_object(name) is None}
    return {name: find_code(place) for name, place in missing.items()}


def is_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it was."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _is_remote(session: SparkSession) -> bool:
    return type(session).__module__.startswith("pyspark.sql.connect")


def _classic(session: SparkSession) -> SparkSession:
    if _is_remote(session):
        raise StorageError(
            "Spark Connect has no way to write a file: save the model itself with get_model().save(path) (an estimator's "
            "with getModel()), and make KerasTransformer(model=...) of it again."
        )
    return session
