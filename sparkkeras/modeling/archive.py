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
import re
import shutil
import sys
import tempfile
import threading
import types
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.errors import CustomObjectError, ModelError, nearest_name
from sparkkeras.modeling import custom_code, garbage
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.locks import locks_state
from sparkkeras.modeling.voting import Vote
from sparkkeras.weights import Array, Flat, Layout

KEPT_MODELS = int(os.environ.get("SPARKKERAS_KEPT_MODELS", "2"))
"""The number of unpacked models, with their compiled functions, that a worker process caches."""

KEPT_ARCHIVES = 4
"""The number of archives that a process caches: a model may have one for training and one for prediction."""

FULL_BYTES = 1024 * 1024
"""Archives up to this size, in bytes, keep their weights: sending them is cheap, and zeroing them means saving again."""


def check_built(model: Any) -> None:
    """Reject a model that cannot predict.

    Raises:
        ModelError: It is not a Keras model, or not built.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"expected a keras.Model, received {_kind(model)}")
    if not model.built:
        raise ModelError(
            f"the model {model.name!r} is not built, so it has no weights yet: define it with keras.Input(shape), or call "
            "it once on a batch."
        )


def check_compiled(model: Any) -> None:
    """Reject a model that cannot be evaluated on the workers.

    Raises:
        ModelError: It is not a Keras model, not built, not compiled, compiled with unknown names, or compiled in a way that
            Keras does not restore when it loads the model.
    """
    check_built(model)
    if not model.compiled:
        raise ModelError(
            f"the model {model.name!r} is not compiled: call model.compile(optimizer=..., loss=...) first. Only predict "
            "works without compiling."
        )
    loss_weights = _compiled_with(model).get("loss_weights")
    if any(isinstance(weight, str) for weight in keras.tree.flatten(loss_weights)):
        raise ModelError(
            f"the model {model.name!r} is compiled with loss_weights={loss_weights!r}; expected numbers. The third "
            "positional argument of compile is loss_weights: for metrics, write compile(optimizer, loss, "
            f"metrics={loss_weights!r})."
        )
    _check_names(model)
    kind = type(model)
    if kind.compile is not keras.Model.compile and kind.compile_from_config is keras.Model.compile_from_config:
        raise ModelError(
            f"the class {kind.__name__} of the model {model.name!r} overrides compile, so Keras cannot compile the workers' "
            "copies of the model: also override get_compile_config (returns the arguments of compile as a dict) and "
            "compile_from_config (calls compile with them). Only predict works without them."
        )


def _check_names(model: keras.Model) -> None:
    """Reject unknown names of losses and metrics, which Keras would report only with the first batch."""
    overridden = (name for name in _USE_COMPILED if getattr(type(model), name) is not getattr(keras.Model, name))
    if next(overridden, None) is not None:  # the subclass may interpret the names itself
        return
    for argument, module, by_labels in (
        ("loss", keras.losses, ("crossentropy", "ce")),
        ("metrics", keras.metrics, ("accuracy", "acc")),
        ("weighted_metrics", keras.metrics, ("accuracy", "acc")),
    ):
        given = _compiled_with(model).get(argument)
        for name in _names_in(given):
            if name.lower() in by_labels:
                continue
            try:
                module.get(name)
            except Exception as error:
                known = [each for each in (*dir(module), *by_labels) if not each.startswith("_")]
                where = module.__name__.rpartition(".")[2]
                raise ModelError(
                    f"the model {model.name!r} is compiled with {argument}={given!r}: {error}.{nearest_name(name, known)} "
                    f"Call model.compile(...) again, with a name, a function or an object of keras.{where}, or a custom "
                    "function or object."
                ) from error


_USE_COMPILED = ("compile", "train_step", "test_step", "compute_loss", "compute_metrics")


def _names_in(given: Any) -> Iterator[str]:
    """The strings among losses or metrics, which may be nested as ``compile`` accepts them."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, (list, tuple)) or (isinstance(given, Mapping) and "class_name" not in given):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from _names_in(each)


def check_trainable(model: Any) -> None:
    """Reject a model that cannot be trained.

    Raises:
        ModelError: `check_compiled` rejects it, or it has no weights, no optimizer, several optimizers, or an optimizer that
            was built for other weights.
    """
    if isinstance(model, keras.Model):
        _check_one_optimizer(model)
    check_compiled(model)
    if not model.weights:
        raise ModelError(f"the model {model.name!r} has no weights, so there is nothing to train.")
    if optimizer_of(model) is None:
        raise ModelError(
            f"the model {model.name!r} was compiled without an optimizer, so it cannot be trained: call "
            "model.compile(optimizer=..., loss=...)."
        )
    if not _optimizer_fits(model):
        if not inner_optimizer(model)._trainable_variables:
            raise ModelError(
                f"the optimizer of the model {model.name!r} knows none of the weights, as after "
                "keras.saving.load_model of an HDF5 file (.h5): load it with sparkkeras.load_spark_model, or call "
                "model.compile(...) again."
            )
        raise ModelError(
            f"the optimizer of the model {model.name!r} was built for other weights than those that are trainable now: a "
            "layer was frozen, unfrozen or added, or the model quantized, after compile. Call model.compile(...) again."
        )


def _check_one_optimizer(model: keras.Model) -> None:
    """Reject optimizers other than ``model.optimizer``, because their variables would not be sent to the workers."""
    compiled = (optimizer_of(model), inner_optimizer(model))
    others = {
        name
        for name, value in vars(model).items()
        for each in (value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value])
        if isinstance(each, keras.Optimizer)
        and not any(each is one for one in compiled)
        and not name.startswith("_self_")  # TensorFlow's lists of tracked objects
    }
    if others:
        raise ModelError(
            f"the model {model.name!r} has additional optimizers, {', '.join(sorted(others))}: SparkModel.fit supports only "
            "one optimizer, which keras.Model.compile(optimizer=...) stores as model.optimizer. Train "
            "the model with keras.Model.fit; SparkModel.predict works."
        )


def _optimizer_fits(model: keras.Model) -> bool:
    """Whether the optimizer was built for the weights that are trainable now, or is not built yet."""
    optimizer = inner_optimizer(model)
    if optimizer is None or not optimizer.built:
        return True
    return [id(each) for each in optimizer._trainable_variables] == [id(each) for each in model.trainable_variables]


def _compiled_with(model: keras.Model) -> dict[str, Any]:
    """The arguments that ``keras.Model.compile`` was called with."""
    compiled = getattr(model, "_compile_config", None)
    return {} if compiled is None else dict(compiled.config)


def _kind(given: object) -> str:
    advice = ""
    if isinstance(getattr(given, "model", None), keras.Model):
        advice = " Pass its attribute model."
    elif isinstance(given, (str, os.PathLike)) and str(given).endswith((".keras", ".h5", ".hdf5")):
        advice = f" Load a saved model with sparkkeras.load_spark_model({str(given)!r}) or keras.saving.load_model."
    elif isinstance(given, types.FunctionType):
        advice = f" Call the function that builds the model: {given.__name__}()."
    elif isinstance(given, type) and issubclass(given, keras.Model):
        advice = f" Create an instance of the class {given.__name__}."
    return f"{type(given).__module__}.{type(given).__qualname__}.{advice}"


@dataclass(frozen=True)
class ModelState:
    """A snapshot of a model's weights and optimizer variables."""

    weights: Flat
    optimizer: Flat

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.weights.nbytes + self.optimizer.nbytes

    @classmethod
    @locks_state
    def take(cls, model: keras.Model) -> ModelState:
        """Copy the state from a model."""
        return cls(take_weights(model), _take(optimizer_variables(model)))

    @locks_state
    def put(self, model: keras.Model) -> None:
        """Copy the state into a model with the same variable shapes and dtypes."""
        put_weights(self.weights, model)
        _put(self.optimizer, optimizer_variables(model))


@dataclass(frozen=True)
class ModelWeights:
    """A snapshot of a model's weights without the optimizer, for prediction."""

    weights: Flat

    @classmethod
    def take(cls, model: keras.Model) -> ModelWeights:
        """Copy the weights from a model."""
        return cls(take_weights(model))

    def put(self, model: keras.Model) -> None:
        """Copy the weights into a model with the same variable shapes and dtypes."""
        put_weights(self.weights, model)


def floatx() -> str:
    """Keras's ``floatx``, or float32 if NumPy does not support it (bfloat16)."""
    name = str(keras.backend.floatx())
    return name if name in {"float16", "float32", "float64"} else "float32"


def weight_variables(model: keras.Model) -> list[Any]:
    """The weights: trainable ones first, then non-trainable ones."""
    return [*model.trainable_weights, *model.non_trainable_weights]


def optimizer_variables(model: keras.Model) -> list[Any]:
    """All variables of the optimizer, with iterations and learning rate. Builds the optimizer if necessary."""
    optimizer = optimizer_of(model)
    if optimizer is None:
        return []
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return list(optimizer.variables)


def trainable_size(model: keras.Model) -> int:
    """The number of trainable values, which come first in the weight vector."""
    return sum(int(np.prod(weight.shape, dtype=np.int64)) for weight in model.trainable_weights)


@locks_state
def take_weights(model: keras.Model) -> Flat:
    """Copy the weights from a model."""
    return _take(weight_variables(model))


@locks_state
def put_weights(weights: Flat, model: keras.Model) -> None:
    """Copy weights into a model with the same variable shapes and dtypes."""
    _put(weights, weight_variables(model))


def advanced(state: ModelState, model: keras.Model, steps: int, learning_rate: float | None = None) -> ModelState:
    """The state of a worker that takes over after another one. ``model`` is left in this state.

    Args:
        state: Current weights, and the optimizer variables from the start of training.
        model: A model with the same variable shapes and dtypes.
        steps: The steps made since the start; the optimizer's iterations, and so its schedules, continue after them.
        learning_rate: The learning rate, if it was changed since the start.
    """
    state.put(model)
    if steps:
        set_iterations(model, iterations(model) + steps)
        optimizer = inner_optimizer(model)
        if getattr(optimizer, "use_ema", False):  # restart the moving averages from the current weights
            for average, weight in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
                average.assign(weight)
    if learning_rate is not None and has_settable_rate(model):
        model.optimizer.learning_rate = learning_rate
    return ModelState.take(model)


def iterations(model: keras.Model) -> int:
    """The optimizer's number of iterations; 0 without an optimizer."""
    return 0 if optimizer_of(model) is None else int(keras.ops.convert_to_numpy(inner_optimizer(model)._iterations))


def set_iterations(model: keras.Model, number: int) -> None:
    """Set the optimizer's number of iterations."""
    for optimizer in {id(each): each for each in (model.optimizer, inner_optimizer(model))}.values():
        if optimizer is not None:
            optimizer._iterations.assign(number)


def learning_rate(model: keras.Model) -> float:
    """The optimizer's learning rate at its current iteration; 0 without an optimizer."""
    return 0.0 if model.optimizer is None else float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def has_settable_rate(model: keras.Model) -> bool:
    """Whether the optimizer's learning rate is a variable that can be set, and not a schedule or a function."""
    return isinstance(getattr(inner_optimizer(model), "_learning_rate", None), keras.Variable)


def inner_optimizer(model: keras.Model) -> Any:
    """The optimizer that updates the weights: the inner one of a ``LossScaleOptimizer`` (mixed precision)."""
    optimizer = optimizer_of(model)
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizer_of(model: keras.Model) -> Any:
    """The optimizer that the model was compiled with, or ``None``."""
    return getattr(model, "optimizer", None)


def reseed(model: keras.Model, seed: Sequence[int]) -> None:
    """Reset all seed generators of a model (dropout, augmentation layers) from ``seed``."""
    states = [v for v in model.non_trainable_variables if v.name == "seed_generator_state"]
    for number, state in enumerate(states):
        drawn = np.random.SeedSequence([*seed, number]).generate_state(int(np.prod(state.shape)))
        state.assign((drawn & 0x7FFFFFFF).astype(keras.backend.standardize_dtype(state.dtype)).reshape(state.shape))


def _take(variables: Sequence[Any]) -> Flat:
    return _layout(variables).pack([keras.ops.convert_to_numpy(variable) for variable in variables])


def _put(flat: Flat, variables: Sequence[Any]) -> None:
    for variable, value in zip(variables, _layout(variables).unpack(flat), strict=True):
        variable.assign(value)


def _layout(variables: Sequence[Any]) -> Layout:
    shapes = tuple(tuple(int(size) for size in variable.shape) for variable in variables)
    return Layout(shapes, tuple(keras.backend.standardize_dtype(variable.dtype) for variable in variables))


def schema_of(model: keras.Model) -> Schema:
    """The inputs and outputs of a model, as far as they are known."""
    tensors = list(getattr(model, "inputs", None) or ())
    entries = _entries(model)
    inputs = tuple(
        replace(spec, indices=entries.get(id(tensor))) for spec, tensor in zip(_specs(tensors), tensors, strict=True)
    )
    outputs = _specs(getattr(model, "outputs", None))
    names = _output_names(model)
    if len(names) == len(outputs):
        outputs = tuple(replace(spec, name=name) for name, spec in zip(names, outputs, strict=True))
    named = isinstance(getattr(graph_of(model), "_outputs_struct", None), dict)
    return Schema(inputs, outputs, floatx(), named)


def _output_names(model: keras.Model) -> list[str]:
    """Keras's names of the outputs: the keys of a dict of outputs, else the names of the output layers, with a numeric
    suffix if one layer has several outputs.
    """
    functional = graph_of(model)
    structure = getattr(functional, "_outputs_struct", None)
    if isinstance(structure, dict):
        return sorted(structure)
    given = list(getattr(functional, "output_names", None) or ())
    before = [given[:index].count(name) for index, name in enumerate(given)]
    return [f"{name}_{number}" if number else name for name, number in zip(given, before, strict=True)]


def graph_of(model: keras.Model) -> Any:
    """The functional model that holds the structure of inputs and outputs: a ``Sequential``'s inner one, or the model."""
    return getattr(model, "_functional", None) or model


def _entries(model: keras.Model) -> dict[int, int]:
    """The smallest ``input_dim`` of the ``Embedding`` layers that take a tensor, by the tensor's id."""
    found: dict[int, int] = {}
    for layer in getattr(graph_of(model), "layers", ()):
        if isinstance(layer, keras.layers.Embedding) and type(layer).call is keras.layers.Embedding.call:
            for tensor in (tensor for node in layer._inbound_nodes for tensor in node.input_tensors):
                found[id(tensor)] = min(layer.input_dim, found.get(id(tensor), layer.input_dim))
    return found


def _specs(tensors: Iterable[Any] | None) -> tuple[InputSpec, ...]:
    return tuple(
        InputSpec(str(tensor.name), tuple(tensor.shape[1:]), "float" in keras.backend.standardize_dtype(tensor.dtype))
        for tensor in tensors or ()
    )


@dataclass(frozen=True)
class ModelArchive:
    """A model with its custom code and, unless it is packed for prediction only, its compile arguments.

    Attributes:
        data: A ``.keras`` archive. Its weights and optimizer variables may be outdated or zeros, except for the adapted
            state of preprocessing layers.
        custom: The custom classes and functions of the model, by the names under which Keras looks them up.
        digest: A digest of architecture, compile arguments, custom code and the adapted state of preprocessing layers, but
            not of the weights.
        settings: Attributes that Keras does not save, by path, such as ``optimizer._exclude_from_weight_decay``.
    """

    data: bytes
    custom: ByValue[dict[str, Any]]
    digest: str
    settings: tuple[tuple[str, Any], ...] = ()

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
            described = _Description.of(model, custom_objects)
            if described.fingerprint not in _packed:
                to_predict = _Description.of(_uncompiled(model), custom_objects).fingerprint
                _keep(described.fingerprint, to_predict, cls._made(model, described))
            _packed.move_to_end(described.fingerprint)
            return _packed[described.fingerprint].archive

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
            key = next((key for key in reversed(_packed) if _packed[key].to_predict == described.fingerprint), None)
            if key is None:
                key = described.fingerprint
                _keep(key, key, cls._made(bare, described))
            _packed.move_to_end(key)
            return _packed[key].archive

    @classmethod
    def _made(cls, model: keras.Model, described: _Description) -> ModelArchive:
        settings = _settings(model)  # before saving, during which Keras sets attributes that were None
        data, loaded = _saved_and_loaded(model, described)
        digest = _digest(data, described.fingerprint)
        if len(data) > FULL_BYTES:
            data = _emptied(data, loaded)
        return cls(data, described.custom, digest, settings)

    def unpack(self) -> keras.Model:
        """A new model, compiled if the packed one was. Set its weights with `ModelState.put` or `ModelWeights.put`."""
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder, warnings.catch_warnings():
            # The optimizer variables in the archive are not used, so a mismatch does not matter.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            path = Path(folder) / "model.keras"
            # Decompress: Keras rejects highly compressed zeros as a decompression bomb.
            with zipfile.ZipFile(io.BytesIO(self.data)) as packed, zipfile.ZipFile(path, "w") as plain:
                _copy(packed, plain)
            model = _load(path, self.custom.load(), safe_mode=False)
        for attribute, value in self.settings:
            owner, _, name = attribute.rpartition(".")
            setattr(attrgetter(owner)(model) if owner else model, name, value)
        return model

    def cached(self, variant: str | None = None) -> keras.Model:
        """The cached model of this process with this digest; unpacked if there is none.

        Args:
            variant: A key for separate models with the same digest, such as the rank of the labels: Keras builds a loss for
                the first labels that it sees. ``None`` accepts any variant.
        """
        fitting = [key for key in _kept if key[0] == self.digest and variant in (None, key[1])]
        key = fitting[-1] if fitting else (self.digest, variant)
        if key not in _kept:
            _kept[key] = self.unpack()
            if len(_kept) > KEPT_MODELS:
                _kept.popitem(last=False)
                garbage.collect_survivors()
        _kept.move_to_end(key)
        return _kept[key]


@dataclass(frozen=True)
class _Description:
    """The code and the configuration of a model, without its weights."""

    code: dict[str, Any]
    objects: dict[str, Any]
    custom: ByValue[dict[str, Any]]
    fingerprint: str

    @classmethod
    def of(cls, model: keras.Model, custom_objects: Mapping[str, Any] | None) -> _Description:
        code = custom_code.code_of(model)
        config = _config(model)
        objects = _custom_objects(model, code, config, custom_objects)
        custom = ByValue.dump(objects, "the model's custom code")
        return cls(code, objects, custom, _fingerprint(model, config, custom))


@dataclass(frozen=True)
class _Packed:
    """A cached archive, and the fingerprint of its model without the compile arguments."""

    archive: ModelArchive
    to_predict: str


def _keep(fingerprint: str, to_predict: str, archive: ModelArchive) -> None:
    _packed[fingerprint] = _Packed(archive, to_predict)
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
    data = save_bytes(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Skipping variable loading")  # _verify raises an error instead
        loaded = _read(data, described.objects, safe_mode=False)
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
    bare.__dict__["_jit_compile"] = model._jit_compile if is_set else None
    bare.__dict__.update(dict.fromkeys(("optimizer", "loss", "_compile_loss", "_compile_metrics", "_loss_tracker")))
    bare.__dict__["get_compile_config"] = dict  # also where a class overrides it
    for name in ("_compile_config", "_compiled_trainable_state"):
        bare.__dict__.pop(name, None)
    return bare


_packing = threading.RLock()
_packed: OrderedDict[str, _Packed] = OrderedDict()
_kept: OrderedDict[tuple[str, str | None], keras.Model] = OrderedDict()


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
            _config(model)  # raises a clear error for parts that cannot be saved
            model.save(path)
        return path.read_bytes()


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


def copy_of(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """An uncompiled copy of a built model, with separate weights.

    Raises:
        CustomObjectError: Custom code would load as other code, or not at all.
        ModelError: The model cannot be saved and loaded for another reason.
    """
    bare = _uncompiled(model)
    return _saved_and_loaded(bare, _Description.of(bare, custom_objects))[1]


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """The losses and metrics that a model was compiled with, in serialized form; ``None`` if it is not compiled."""
    config = model.get_compile_config() if model.compiled else None
    return None if config is None else {name: config.get(name) for name in _JUDGING}


def compile_to_judge(
    model: keras.Model, given: Mapping[str, Any] | None, custom_objects: Mapping[str, Any], *, safe_mode: bool
) -> None:
    """Compile a model for evaluation only, with the `compile_arguments` of another model.

    Raises:
        ModelError: Custom code is missing, or ``safe_mode`` is set and there is a Python lambda.
    """
    handled = sys.exception()
    try:
        arguments = keras.saving.deserialize_keras_object(
            dict(given or {}), custom_objects=dict(custom_objects), safe_mode=safe_mode
        )
    except Exception as error:
        translated = _load_error(error, handled)
        raise translated from translated.__cause__
    model.compile("sgd", **arguments)  # Keras cannot load a model that was compiled and saved without an optimizer


_JUDGING = ("loss", "loss_weights", "metrics", "weighted_metrics")


def load_bytes(data: bytes, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> keras.Model:
    """Load a model from the bytes of a ``.keras`` archive or of Keras's HDF5 format.

    Custom code that an archive names and this process has already imported is found without ``custom_objects``.

    Raises:
        CustomObjectError: Custom code is missing.
        ModelError: The archive cannot be loaded, or ``safe_mode`` is set and it contains a Python lambda.
    """
    found = {} if data.startswith(HDF5) else custom_code.already_loaded(_config_in(data))
    return _read(data, {**found, **custom_objects}, safe_mode=safe_mode)


HDF5 = b"\x89HDF\r\n\x1a\n"
"""The signature at the start of HDF5 files."""


def _config_in(data: bytes) -> Any:
    """The configuration in a ``.keras`` archive; ``None`` if it cannot be read, which Keras reports later."""
    with suppress(Exception), zipfile.ZipFile(io.BytesIO(data)) as archive:
        return json.loads(archive.read("config.json"))
    return None


def _read(data: bytes, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> keras.Model:
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        path = Path(folder) / ("model.h5" if data.startswith(HDF5) else "model.keras")
        path.write_bytes(data)
        return _load(path, custom_objects, safe_mode=safe_mode)


_OURS = {keras.saving.get_registered_name(Vote): Vote}
"""The layers of this package that saved models may contain."""


def _load(path: Path, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> keras.Model:
    handled = sys.exception()
    try:
        with warnings.catch_warnings():
            # An optimizer that was saved before its first step has no variables to load.
            warnings.filterwarnings("ignore", message="Skipping variable loading.* optimizer has 2 variables")
            objects = {**_OURS, **custom_objects}
            return keras.saving.load_model(path, objects, safe_mode=safe_mode)
    except Exception as error:
        translated = _load_error(error, handled)
        raise translated from translated.__cause__


def _load_error(error: Exception, handled: BaseException | None) -> ModelError:
    """Translate an error of Keras on loading a model. Keras wraps errors several times; the innermost one is the cause.

    Args:
        error: The exception that Keras raised.
        handled: The exception that the caller was handling when it called Keras, which is not the cause.
    """
    text = str(error)
    if "Could not locate" in text:
        what = text.split("Could not locate", 1)[1].split(". Make sure", 1)[0].strip()
        return CustomObjectError(
            f"the model needs the custom {what}, which was not found: import the module that defines it first, or pass "
            "custom_objects={name: object}."
        )
    if "unsafe deserialization" in text or "safe_mode" in text:
        return ModelError(
            "the model holds Python code (a lambda in a Lambda layer), which is not loaded in safe mode: "
            "pass safe_mode=False if you trust the source of the file."
        )
    origin: BaseException = error
    while (deeper := _raised_from(origin)) is not None and deeper is not handled:
        origin = deeper
    if isinstance(origin, (zipfile.BadZipFile, zlib.error)):
        damaged = ModelError(f"the saved model is damaged ({origin}): copy the file again, or save the model again.")
        damaged.__cause__ = origin
        return damaged
    kinds = re.findall(r"<class '([\w.<>]+)'> could not be deserialized|deserializing class '(\w+)'", text)
    place = f" in the class {''.join(kinds[-1]).rpartition('.')[2]}" if kinds else ""
    reason = " ".join(_innermost(text).split())[:_LONGEST_REASON].rstrip(".")
    translated = ModelError(
        f"the model cannot be loaded from its saved form{place}: {type(origin).__name__}: {reason}. {_load_advice(reason)}"
    )
    translated.__cause__ = origin
    return translated


def _raised_from(error: BaseException) -> BaseException | None:
    """The exception that a traceback shows before this one: its cause or context."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


_LONGEST_REASON = 600
"""The maximum length, in characters, of Keras's message inside ours."""

_OF_KERAS = ("name", "trainable", "dtype")
"""The keys that every layer's configuration has."""


def _innermost(text: str) -> str:
    """The reason in a message of Keras, without the configurations that it prints first."""
    reason = re.split(r"(?:Exception encountered|Error encountered during deserialization): ", text)[-1]
    return reason.split("\n\nArguments received by", 1)[0].removeprefix("''").removesuffix("''").strip()


def _load_advice(reason: str) -> str:
    """How to fix a custom class that does not load."""
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", reason)
    if unexpected and unexpected[1] in _OF_KERAS:
        return (
            "Keras calls the constructor with what get_config returns, which includes name, trainable and dtype. Write def "
            "__init__(self, units, **kwargs) with super().__init__(**kwargs), and def get_config(self) that returns "
            '{**super().get_config(), "units": self.units}, with your arguments in place of units.'
        )
    if unexpected or "required positional argument" in reason or "required keyword-only argument" in reason:
        return (
            "Keras calls the constructor with what get_config returns: its keys must be the names of the constructor's "
            'arguments, {**super().get_config(), "units": self.units} for def __init__(self, units, **kwargs).'
        )
    return (
        "A custom layer needs a get_config that returns its constructor's arguments; a Lambda layer's function may only "
        "use its arguments, or must be defined with def."
    )


def _verify(model: keras.Model, code: Mapping[str, Any], loaded: keras.Model) -> None:
    custom_code.check_same_code(code, custom_code.code_of(loaded))
    _verify_weights(model, loaded)
    if (
        loaded.compiled
        and _optimizer_fits(model)
        and _layout(optimizer_variables(model)) != _layout(optimizer_variables(loaded))
    ):
        raise ModelError(
            f"the optimizer of the model {model.name!r} has other variables after saving and loading: the "
            "get_config of an optimizer must return the arguments of its constructor."
        )


def _verify_weights(model: keras.Model, loaded: keras.Model) -> None:
    mine, other = weight_variables(model), weight_variables(loaded) if loaded.built else []
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
            "a custom layer must create its weights in __init__ or build(), from the arguments that its "
            "get_config returns."
        )
    for before, after in zip(mine, other, strict=True):
        if not np.array_equal(_numpy(before), _numpy(after), equal_nan=_numpy(before).dtype.kind == "f"):
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
        with source.open(name) as read, target.open(name, "w", force_zip64=True) as write:
            shutil.copyfileobj(read, write, 1024 * 1024)


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


def _config(model: keras.Model) -> Any:
    """Architecture and compile arguments, in Keras's serialized form.

    Raises:
        ModelError: Keras cannot serialize a part of the model.
    """
    _put_optimizer_back(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*includes a `lambda`.*")
        try:
            return keras.saving.serialize_keras_object(model)
        except Exception as error:
            raise ModelError(
                f"the model {model.name!r} cannot be saved, which is required to send it to workers: {error} Losses and "
                "metrics must be functions defined with def, or Keras objects with a get_config."
            ) from error


def _put_optimizer_back(model: keras.Model) -> None:
    """Restore the optimizer in the compile arguments: Keras removes it when it saves HDF5, and copies would use RMSprop."""
    compiled, optimizer = getattr(model, "_compile_config", None), optimizer_of(model)
    if compiled is not None and optimizer is not None:
        compiled.config.setdefault("optimizer", optimizer)


def custom_objects_of(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The custom classes and functions of a model, by the names under which Keras looks them up; raises like `copy_of`."""
    return _custom_objects(model, custom_code.code_of(model), _config(model), custom_objects)


def _custom_objects(
    model: keras.Model, code: Mapping[str, Any], config: Any, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {**custom_code.custom_objects(code, _strings(config), _bare_names(model)), **(given or {})}


def _bare_names(model: keras.Model) -> set[str]:
    """The losses and metrics that were passed to ``compile`` as strings."""
    given = _compiled_with(model)
    sides = [given.get(side) for side in ("loss", "metrics", "weighted_metrics")]
    return {leaf for leaf in keras.tree.flatten(sides) if isinstance(leaf, str)}


def _fingerprint(model: keras.Model, config: Any, custom: ByValue[Any]) -> str:
    """A fingerprint of a model without its trained weights.

    It covers architecture, compile arguments, custom code with everything that it refers to, and the adapted state of
    preprocessing layers: they turn their variables into constants when they are loaded, so setting weights does not update
    them.
    """
    config = json.loads(json.dumps(config, default=repr))
    optimizer = ((config.get("compile_config") or {}).get("optimizer") or {}).get("config") or {}
    if isinstance(optimizer.get("learning_rate"), float):
        optimizer["learning_rate"] = None  # a variable, which is part of the state
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=repr).encode())
    digest.update(custom.payload + repr(_settings(model)).encode())
    for layer in model._flatten_layers():
        if hasattr(layer, "adapt"):
            for variable in layer.variables:
                digest.update(_numpy(variable).tobytes())
            if hasattr(layer, "get_vocabulary"):
                digest.update(repr(layer.get_vocabulary()).encode())
    return digest.hexdigest()


def _digest(data: bytes, fingerprint: str) -> str:
    kinds = (keras.backend.backend(), keras.config.dtype_policy().name, keras.config.floatx())
    digest = hashlib.sha256("/".join((fingerprint, *kinds)).encode())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("assets/"):
                digest.update(name.encode() + b"\0" + archive.read(name))
    return digest.hexdigest()


_UNDECAYED = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


def _settings(model: keras.Model) -> tuple[tuple[str, Any], ...]:
    """Settings that Keras does not save: weights without decay and, for uncompiled models, run_eagerly and jit_compile."""
    undecayed = [(f"optimizer.{name}", getattr(optimizer_of(model), name, None) or None) for name in _UNDECAYED]
    runs = [] if model.compiled else [("run_eagerly", model.run_eagerly or None), ("jit_compile", model._jit_compile)]
    return tuple((name, value) for name, value in [*undecayed, *runs] if value is not None)


def _strings(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*(_strings(member) for member in members))


def _numpy(variable: Any) -> Array:
    array: Array = np.asarray(keras.ops.convert_to_numpy(variable))
    return array
