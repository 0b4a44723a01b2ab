"""Serialization of Keras models, for workers and for files.

The driver sends architecture and custom code once, as a `ModelArchive`: with the compile arguments for training and
evaluation, without them for prediction. A process caches a few unpacked models by their digest. Weights and optimizer
variables are sent separately, as a `ModelState` or `ModelWeights`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ModelError
from sparkkeras.modeling import custom_code, garbage_collection, outside, unsaved
from sparkkeras.modeling.archive_errors import load_error, missing_from_config, save_error
from sparkkeras.modeling.backends import read, without_tensorflow
from sparkkeras.modeling.compilation import check_adapted, compiled_with, leaves, optimizer_fits
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.locks import locks_state
from sparkkeras.modeling.optimizers import keep_trained, optimizer_of, optimizers_of, trained
from sparkkeras.modeling.state import (
    ModelWeights,
    is_built,
    keep_outside,
    layout,
    optimizer_variables,
    weight_variables,
)
from sparkkeras.modeling.voting import Vote

KEPT_MODELS = int(os.environ.get("SPARKKERAS_KEPT_MODELS", "2"))
"""The number of unpacked models, with their compiled functions, that a worker process caches."""


KEPT_ARCHIVES = 4
"""The number of archives that a process caches: a model may have one for training and one for prediction."""


FULL_BYTES = 1024 * 1024
"""Archives up to this size, in bytes, keep their weights: sending them is cheap, and zeroing them means saving again."""


@dataclass(frozen=True)
class ModelArchive:
    """A model with its custom code and, unless it is packed for prediction only, its compile arguments.

    Attributes:
        data: A ``.keras`` archive. Its weights and optimizer variables may be outdated or zeros, except for the adapted
            state of preprocessing layers.
        custom: The custom classes and functions of the model, by the names under which Keras looks them up.
        digest: The fingerprint of the model: of architecture, compile arguments, custom code and the adapted state of
            preprocessing layers, but not of the weights.
        outside: The names of the variables outside the model, see `sparkkeras.modeling.outside.dump_code`.
    """

    data: bytes
    custom: ByValue[dict[str, Any]]
    digest: str
    outside: tuple[str, ...] = ()

    @classmethod
    def pack(cls, model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> ModelArchive:
        """Pack a compiled model, and verify that it loads as the same model.

        The most recent archives are cached: packing a model again costs almost nothing if only its weights have changed.

        Args:
            model: The model.
            custom_objects: Custom classes and functions by name, if they cannot be found in the model.

        Raises:
            CustomObjectError: Custom code would load as other code, or not at all.
            ModelError: The model cannot be saved and loaded for another reason.
        """
        with _packing:
            described = _Description.of(model, custom_objects, trains=True)
            if described.fingerprint not in _packed:
                keep_outside(model, described.outside)
                to_predict = _Description.of(_uncompiled(model), custom_objects).fingerprint
                _keep(described.fingerprint, to_predict, cls._made(model, described))
            _packed.move_to_end(described.fingerprint)
            archive, _ = _packed[described.fingerprint]
            keep_outside(model, {name: described.outside[name] for name in archive.outside})
            return archive

    @classmethod
    def pack_to_predict(cls, model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> ModelArchive:
        """Pack a built model, compiled or not, without optimizer, loss and metrics.

        If the cache holds an archive of the same model for training, that archive is reused: workers that have trained the
        model then predict with the model that they have unpacked and traced.

        Args:
            model: The model.
            custom_objects: Custom classes and functions by name, if they cannot be found in the model.

        Raises:
            CustomObjectError: Custom code would load as other code, or not at all.
            ModelError: The model cannot be saved and loaded for another reason.
        """
        with _packing:
            bare = _uncompiled(model)
            described = _Description.of(bare, custom_objects)
            key = next((key for key in reversed(_packed) if _packed[key][1] == described.fingerprint), None)
            if key is None:
                key = described.fingerprint
                _keep(key, key, cls._made(bare, described))
            _packed.move_to_end(key)
            return _packed[key][0]

    @classmethod
    def _made(cls, model: keras.Model, described: _Description) -> ModelArchive:
        data, loaded = _saved_and_loaded(model, described)
        if len(data) > FULL_BYTES:
            data = _emptied(data, loaded)
        attributes = custom_code.untracked_variables(loaded)
        shared = (name for name in described.outside if not name.startswith("model.") or name in attributes)
        return cls(data, described.custom, described.fingerprint, tuple(shared))

    def unpack(self) -> keras.Model:
        """A new model, compiled if the packed one was. Set its weights with `ModelState.put` or `ModelWeights.put`."""
        return _read(self.data, self.custom.load(), safe_mode=False, with_optimizers=False, is_packed=True)

    def unpack_to_train(self) -> keras.Model:
        """A new model that has found the variables outside it, which are a part of its state."""
        model = self.unpack()
        keep_outside(model, outside.find(model, self.outside))
        return model

    def cached(self, features: str | None = None, labels: str | None = None) -> keras.Model:
        """The cached model of this process with this digest; unpacked if there is none.

        Models with the same digest are separate for features and for labels of other ranks: TensorFlow traces a model that
        has seen both for inputs of unknown rank, and Keras builds a loss for the first labels that it sees.

        Args:
            features: The ranks of the features (`BlockSpec.ranks`). ``None`` accepts any.
            labels: The ranks of labels and sample weights. ``None`` accepts any.
        """
        fitting = [key for key in _kept if key[0] == self.digest and features in (None, key[1]) and labels in (None, key[2])]
        key = fitting[-1] if fitting else (self.digest, features, labels)
        if key not in _kept:
            _kept[key] = self.unpack_to_train()
            if len(_kept) > KEPT_MODELS:
                _kept.popitem(last=False)
                garbage_collection.unfreeze_survivors()
        _kept.move_to_end(key)
        return _kept[key]


@dataclass(frozen=True)
class _Description:
    """The code and the configuration of a model, without its weights."""

    code: dict[str, Any]
    objects: dict[str, Any]
    custom: ByValue[dict[str, Any]]
    fingerprint: str
    outside: dict[str, Any]

    @classmethod
    def of(cls, model: keras.Model, custom_objects: Mapping[str, Any] | None, trains: bool = False) -> _Description:
        code = custom_code.code_of(model)
        config = model_config(model)
        objects = _custom_objects(model, code, config, custom_objects)
        custom, found = outside.dump_code(model, objects, trains)
        return cls(code, objects, custom, _fingerprint(model, config, custom, found), found)


def _keep(fingerprint: str, to_predict: str, archive: ModelArchive) -> None:
    _packed[fingerprint] = archive, to_predict
    if len(_packed) > KEPT_ARCHIVES:
        _packed.popitem(last=False)


@locks_state
def _saved_and_loaded(model: keras.Model, described: _Description) -> tuple[bytes, keras.Model]:
    """Save a model, load it again, and verify that both are the same.

    Returns:
        The bytes of the ``.keras`` archive, and the loaded model.

    Raises:
        CustomObjectError: Custom code would load as other code, or not at all.
        ModelError: The model cannot be saved and loaded for another reason.
    """
    check_adapted(model)
    data = save_bytes(model)
    loaded = _read(data, described.objects, safe_mode=False, with_optimizers=False)
    _verify(model, described.code, loaded)
    return data, loaded


def _uncompiled(model: keras.Model) -> keras.Model:
    """An uncompiled view of the model, which shares its layers and variables. It can be saved, but must not be called.

    The model itself is not changed, because another thread may be training it.
    """
    bare = object.__new__(type(model))  # copy.copy would save and load it
    bare.__dict__.update(vars(model), compiled=False, _jit_compile=None)
    # A jit_compile that Keras has resolved for this machine is not a setting of the user: workers resolve it themselves.
    is_set = model._jit_compile is not None and (model.compiled or model._jit_compile != bare.jit_compile)
    compiled = dict.fromkeys(("optimizer", "loss", "_compile_loss", "_compile_metrics", "_loss_tracker"))
    bare.__dict__.update(compiled, _jit_compile=model._jit_compile if is_set else None)
    bare.__dict__["get_compile_config"] = dict  # also where a class overrides it
    for name in ("_compile_config", "_compiled_trainable_state"):
        bare.__dict__.pop(name, None)
    keep_trained(bare, trained(model))
    return bare


_packing = threading.RLock()


_packed: OrderedDict[str, tuple[ModelArchive, str]] = OrderedDict()
"""The cached archives, each with the fingerprint of its model without the compile arguments."""


_kept: OrderedDict[tuple[str, str | None, str | None], keras.Model] = OrderedDict()


def save_bytes(model: keras.Model) -> bytes:
    """A model, with its optimizer, as the bytes of a ``.keras`` archive.

    Raises:
        ModelError: Keras cannot save it.
    """
    _check_dtypes(model)
    optimizer_variables(model)  # builds the optimizer, so that the archive contains its variables
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        path = Path(folder) / "model.keras"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*includes a `lambda`.*")
            if is_built(model):  # a model without call is not built for Keras
                warnings.filterwarnings("ignore", message="You are saving a model that has not yet been built")
            saved = model_config(model)["unsaved"]  # raises a clear error for parts that cannot be saved
            with without_tensorflow():
                model.save(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(_UNSAVED, json.dumps(saved))
        return path.read_bytes()


_UNSAVED = "sparkkeras_unsaved.json"
"""The file of an archive with what Keras does not save."""


def _check_dtypes(model: keras.Model) -> None:
    """Reject weights with dtypes that Keras cannot save or load."""
    for weight in weight_variables(model):
        dtype = keras.backend.standardize_dtype(weight.dtype)
        if dtype.startswith("float8"):
            raise ModelError(
                f"the weight {weight.path!r} of the model {model.name!r} has the dtype {dtype}, which Keras cannot save and "
                'load, so the model cannot be sent to workers. Create the weight with dtype="bfloat16" or "float16"; if '
                f'necessary, convert it in call: keras.ops.cast(weight, "{dtype}").'
            )


@locks_state
def copy_of(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """An uncompiled copy of a built model, with separate weights of the same values.

    Raises:
        CustomObjectError: Custom code would load as other code, or not at all.
        ModelError: The model cannot be saved and loaded for another reason.
    """
    bare = _uncompiled(model)
    copy = _saved_and_loaded(bare, _Description.of(bare, custom_objects))[1]
    ModelWeights.take(model).put(copy)  # saving merges low-rank factors (LoRA) into the weights that they adapt
    return copy


def load_bytes(data: bytes, custom_objects: Mapping[str, Any], *, safe_mode: bool, is_packed: bool = False) -> keras.Model:
    """Load a model from the bytes of a ``.keras`` archive or of Keras's HDF5 format.

    Custom code that an archive names and this process has already imported is found without ``custom_objects``. With
    ``is_packed``, the bytes are those of a `ModelArchive`.

    Raises:
        CustomObjectError: Custom code is missing.
        ModelError: The archive cannot be loaded, or ``safe_mode`` is set and it contains a Python lambda.
    """
    found = {} if data.startswith(HDF5) else custom_code.already_loaded(_config_in(data))
    return _read(data, {**found, **custom_objects}, safe_mode=safe_mode, is_packed=is_packed)


HDF5 = b"\x89HDF\r\n\x1a\n"
"""The signature at the start of HDF5 files."""


def _config_in(data: bytes) -> Any:
    """The configuration in a ``.keras`` archive; ``None`` if it cannot be read, which Keras reports later."""
    with suppress(Exception), zipfile.ZipFile(io.BytesIO(data)) as archive:
        return json.loads(archive.read("config.json"))
    return None


def _read(
    data: bytes,
    custom_objects: Mapping[str, Any],
    *,
    safe_mode: bool,
    with_optimizers: bool = True,
    is_packed: bool = False,
) -> keras.Model:
    handled = sys.exception()
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder, warnings.catch_warnings():
        path = Path(folder) / ("model.h5" if data.startswith(HDF5) else "model.keras")
        if is_packed:  # decompress: Keras rejects highly compressed zeros as a decompression bomb
            with zipfile.ZipFile(io.BytesIO(data)) as packed, zipfile.ZipFile(path, "w") as plain:
                _copy(packed, plain)
        else:
            path.write_bytes(data)
        # An optimizer that was saved before its first step has no variables to load.
        warnings.filterwarnings("ignore", message="Skipping variable loading.* optimizer has 2 variables")
        warnings.filterwarnings("ignore", message="`compile\\(\\)` was not called as part of model loading")
        try:
            saved = _unsaved(path)
            objects = {**_OURS, **custom_objects}
            with warnings.catch_warnings():
                if saved or not with_optimizers:  # the variables of optimizers that are restored are loaded below
                    warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
                model = keras.saving.load_model(path, objects, safe_mode=safe_mode)
            changed = unsaved.restore(model, saved, objects, safe_mode=safe_mode)
            if saved and is_built(model):
                model.built = True  # load_weights and PyTorch's fit require it also of a model without call
            if changed and with_optimizers and is_built(model):
                if "optimizer" not in optimizers_of(model):  # PyTorch's fit builds it although no step uses it
                    warnings.filterwarnings("ignore", message="A total of 1 objects could not be loaded")
                model.load_weights(path, skip_mismatch=True)  # perhaps the optimizer was built for other weights
            unsaved.restart_lora(model)
            return model
        except ModelError:
            raise
        except Exception as error:
            translated = load_error(error, handled)
            raise translated from translated.__cause__


_OURS = {keras.saving.get_registered_name(Vote): Vote}
"""The layers of this package that saved models may contain."""


def _unsaved(path: Path) -> dict[str, Any]:
    if path.suffix != ".keras" or not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(_UNSAVED)) if _UNSAVED in archive.namelist() else {}


def _verify(model: keras.Model, code: Mapping[str, Any], loaded: keras.Model) -> None:
    custom_code.check_same_code(code, custom_code.code_of(loaded))
    _verify_weights(model, loaded)
    mine, other = (optimizers_of(each) if model.compiled else {} for each in (model, loaded))
    if list(mine) != list(other):
        raise ModelError(
            f"the optimizers of the model {model.name!r} are {', '.join(mine)}, but {', '.join(other) or 'none'} after "
            f"saving and loading. The class {type(model).__name__} must set all optimizers in __init__ or compile, and "
            "compile_from_config must call compile with what get_compile_config returns."
        )
    if (
        loaded.compiled
        and optimizer_fits(model)
        and layout(optimizer_variables(model)) != layout(optimizer_variables(loaded))
    ):
        raise ModelError(
            f"the optimizer of the model {model.name!r} has other variables after saving and loading: the "
            "get_config of an optimizer must return the arguments of its constructor."
        )


def _verify_weights(model: keras.Model, loaded: keras.Model) -> None:
    mine, other = weight_variables(model), weight_variables(loaded) if is_built(loaded) else []
    shapes, loaded_shapes = ([tuple(weight.shape) for weight in weights] for weights in (mine, other))
    if shapes != loaded_shapes and sorted(shapes) == sorted(loaded_shapes):
        raise ModelError(
            f"the weights of the model {model.name!r} are in another order after saving and loading, for instance due to "
            'model.quantize("float8"). Save the model, load it, and use the loaded one: model.save("model.keras"); model = '
            'keras.saving.load_model("model.keras").'
        )
    if shapes != loaded_shapes:
        raise ModelError(
            f"the model {model.name!r} has {len(mine)} weights, but {len(other)} after saving and loading, or other shapes: "
            + (
                missing_from_config(model)
                or "a custom layer must create its weights in __init__ or build(), from the arguments that its get_config "
                "returns."
            )
        )
    adapted = [layer for layer in model._flatten_layers() if getattr(layer, "lora_enabled", False)]
    merged = {id(variable) for layer in adapted for variable in layer.variables}
    for before, after in zip(mine, other, strict=True):
        if id(before) not in merged and not np.array_equal(
            read(before), read(after), equal_nan=read(before).dtype.kind == "f"
        ):
            raise ModelError(
                f"the weight {before.path!r} has other values after saving and loading the model: a custom layer must load "
                "its weights unchanged."
            )


def _emptied(data: bytes, loaded: keras.Model) -> bytes:
    """An archive with zeros as weights, compressed, which is small for any size of model; the weights are sent separately.

    Only the weights file is replaced: all other files are those that were verified to load correctly.

    Args:
        data: The archive.
        loaded: The model that was loaded from the archive. Its weights are set to zero.
    """
    _set_zeros(loaded)
    small = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as full,
        zipfile.ZipFile(io.BytesIO(save_bytes(loaded))) as empty,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        _copy(full, target, empty)
    return small.getvalue()


def _copy(archive: zipfile.ZipFile, target: zipfile.ZipFile, weights: zipfile.ZipFile | None = None) -> None:
    """Copy a ``.keras`` archive, optionally with the weights file of another archive."""
    for name in archive.namelist():
        source = weights if weights is not None and name.startswith("model.weights") else archive
        with source.open(name) as file, target.open(name, "w", force_zip64=True) as copy:
            shutil.copyfileobj(file, copy, 1024 * 1024)


def _set_zeros(model: keras.Model) -> None:
    """Set weights and optimizer variables to zero, except for those of layers that process them while loading."""
    layers = [layer for layer in model._flatten_layers() if hasattr(layer, "adapt") or _loads_by_itself(layer)]
    kept = {id(variable) for layer in layers for variable in layer.variables}
    for variable in [*weight_variables(model), *optimizer_variables(model)]:
        if len(variable.shape) and id(variable) not in kept:  # scalars, such as the learning rate, take no space
            variable.assign(keras.ops.zeros(variable.shape, variable.dtype))


def _loads_by_itself(layer: Any) -> bool:
    """Whether a layer overrides the loading of its variables, in which it may turn them into constants."""
    return not type(layer).load_own_variables.__module__.startswith("keras.")


def model_config(model: keras.Model) -> Any:
    """Architecture and compile arguments, in Keras's serialized form.

    Raises:
        ModelError: Keras cannot serialize a part of the model.
    """
    _put_optimizer_back(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*includes a `lambda`.*")
        try:
            with without_tensorflow():
                return keras.saving.serialize_keras_object(model) | {"unsaved": unsaved.collect(model)}
        except ModelError:
            raise
        except Exception as error:
            raise save_error(model, error) from error


def _put_optimizer_back(model: keras.Model) -> None:
    """Restore the optimizer in the compile arguments: Keras removes it when it saves HDF5, and copies would use RMSprop."""
    compiled, optimizer = getattr(model, "_compile_config", None), optimizer_of(model)
    if compiled is not None and optimizer is not None:
        compiled.config.setdefault("optimizer", optimizer)


def find_outside(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> None:
    """Find the variables outside a compiled model, see `sparkkeras.modeling.state.outside`; raises like `copy_of`."""
    keep_outside(model, _Description.of(model, custom_objects, trains=True).outside)


def custom_objects_of(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The custom classes and functions of a model, by the names under which Keras looks them up; raises like `copy_of`."""
    return _custom_objects(model, custom_code.code_of(model), model_config(model), custom_objects)


def _custom_objects(
    model: keras.Model, code: Mapping[str, Any], config: Any, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    compiled = compiled_with(model)
    bare_names = _strings([compiled.get(side) for side in ("loss", "metrics", "weighted_metrics")])
    return {**custom_code.custom_objects(code, _strings(config), bare_names), **(given or {})}


def _strings(value: Any) -> set[str]:
    return {leaf for leaf in leaves(value) if isinstance(leaf, str)}


def _fingerprint(model: keras.Model, config: Any, custom: ByValue[Any], variables: Mapping[str, Any]) -> str:
    """A fingerprint of a model without its trained weights.

    It covers the backend and the default dtypes, architecture, compile arguments, custom code with everything that it refers
    to, the files that custom layers save, and the state of layers that may turn it into constants when they load it, so that
    setting weights does not update them: adapted preprocessing layers, and custom layers without trainable variables that
    override the loading. It also covers the names of the ``variables`` outside the model in modules, the values of those
    that the backend compiles into steps, and the weights of other models, such as a teacher in its loss, which travel with
    the archive.
    """
    config = json.loads(json.dumps(config, default=repr))
    config["kinds"] = [keras.backend.backend(), keras.config.dtype_policy().name, keras.config.floatx()]
    for part in ("compile_config", "unsaved"):
        config[part] = without_rates(config.get(part))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=repr).encode())
    digest.update(custom.payload)
    digest.update(repr([name for name in variables if ":" in name]).encode())
    compiled = outside.compiled(model, variables)
    for variable in [*(compiled[name] for name in sorted(compiled)), *custom_code.other_weights(model)]:
        digest.update(read(variable).tobytes())
    for layer in model._flatten_layers():
        if hasattr(layer, "adapt") or (_loads_by_itself(layer) and not layer.trainable_variables):
            for variable in layer.variables:
                digest.update(read(variable).tobytes())
            if hasattr(layer, "get_vocabulary"):
                digest.update(repr(layer.get_vocabulary()).encode())
        if hasattr(layer, "save_assets") and not type(layer).save_assets.__module__.startswith("keras."):
            for name, content in _assets(layer):
                digest.update(repr((layer.name, name)).encode() + content)
    return digest.hexdigest()


def _assets(layer: Any) -> list[tuple[str, bytes]]:
    """The files that a layer saves beside its variables: their paths and contents."""
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        layer.save_assets(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in files]


def without_rates(value: Any, are_arguments: bool = False) -> Any:
    """Compile arguments without the learning rates of optimizers that are numbers: variables, which are part of the state.

    Args:
        value: The arguments, as nested values for JSON.
        are_arguments: Whether they are those of an object, such as an optimizer.
    """
    if isinstance(value, dict):
        return {
            key: without_rates(member, key == "config")
            for key, member in value.items()
            if not (are_arguments and key == "learning_rate" and isinstance(member, float))
        }
    return [without_rates(member) for member in value] if isinstance(value, list) else value
