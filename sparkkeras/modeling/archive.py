"""A Keras model, packed for its way to the workers and into a file.

The architecture and the person's own code travel once, as a `ModelArchive`: with the compile arguments to train and to
evaluate, without them to predict. A process keeps the few models that it has unpacked, by their digest. Weights and
optimizer variables travel apart from it, as a `ModelState` or `ModelWeights`.
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
"""How many unpacked models a worker process keeps, with their compiled functions."""

KEPT_ARCHIVES = 4
"""How many archives a process keeps: a model may have one to train and one to predict."""

FULL_BYTES = 1024 * 1024
"""Archives up to this size keep their weights: they travel in a moment as they are, and to empty one is to save it again."""


def check_built(model: Any) -> None:
    """Refuse a model that cannot predict.

    Raises:
        ModelError: It is no Keras model, or not built.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"expected a keras.Model, received {_kind(model)}")
    if not model.built:
        raise ModelError(
            f"the model {model.name!r} is not built, so it has no weights yet: begin it with keras.Input(shape), or call "
            "it once on a batch."
        )


def check_compiled(model: Any) -> None:
    """Refuse a model that cannot be evaluated on the workers.

    Raises:
        ModelError: It is no Keras model, not built, not compiled, or compiled with names that Keras does not know
            or in a way that is lost when Keras loads it.
    """
    check_built(model)
    if not model.compiled:
        raise ModelError(
            f"the model {model.name!r} is not compiled: call model.compile(optimizer=..., loss=...) first. Only predict "
            "works without."
        )
    loss_weights = _compiled_with(model).get("loss_weights")
    if any(isinstance(weight, str) for weight in keras.tree.flatten(loss_weights)):
        raise ModelError(
            f"the model {model.name!r} is compiled with loss_weights={loss_weights!r}, which is not numbers: the third "
            "positional argument of compile is loss_weights. For metrics write compile(optimizer, loss, "
            f"metrics={loss_weights!r})."
        )
    _check_names(model)
    kind = type(model)
    if kind.compile is not keras.Model.compile and kind.compile_from_config is keras.Model.compile_from_config:
        raise ModelError(
            f"the class {kind.__name__} of the model {model.name!r} overrides compile, so Keras cannot compile the workers' "
            "copies of the model: override get_compile_config (it returns the arguments of compile as a dict) and "
            "compile_from_config (it calls compile with them) as well. Only predict works without."
        )


def _check_names(model: keras.Model) -> None:
    """Refuse names of losses and metrics that Keras does not know, which it would find out with the first batch."""
    own = (name for name in _USE_COMPILED if getattr(type(model), name) is not getattr(keras.Model, name))
    if next(own, None) is not None:  # it may read the names as it likes
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
                    f"Call model.compile(...) again, with a name, a function or an object of keras.{where}, or your own "
                    "function or object."
                ) from error


_USE_COMPILED = ("compile", "train_step", "test_step", "compute_loss", "compute_metrics")


def _names_in(given: Any) -> Iterator[str]:
    """The names among losses or metrics as ``compile`` takes them."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, (list, tuple)) or (isinstance(given, Mapping) and "class_name" not in given):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from _names_in(each)


def check_trainable(model: Any) -> None:
    """Refuse a model that cannot be trained.

    Raises:
        ModelError: It cannot be evaluated either, or it has no weights, no optimizer, several optimizers, or one that was
            made for other weights.
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
            f"the optimizer of the model {model.name!r} was made for other weights than those that train now: a layer was "
            "frozen or unfrozen, or added, or the model quantized, after compile. Call model.compile(...) again."
        )


def _check_one_optimizer(model: keras.Model) -> None:
    """Refuse optimizers besides ``model.optimizer``: their variables would not travel."""
    compiled = (optimizer_of(model), inner_optimizer(model))
    own = {
        name
        for name, value in vars(model).items()
        for each in (value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value])
        if isinstance(each, keras.Optimizer)
        and not any(each is one for one in compiled)
        and not name.startswith("_self_")  # TensorFlow's lists of what a model has
    }
    if own:
        raise ModelError(
            f"the model {model.name!r} trains with optimizers of its own, {', '.join(sorted(own))}: fit does not support "
            "several optimizers yet, only the one that keras.Model.compile(optimizer=...) keeps as model.optimizer. Train "
            "the model with its own fit; SparkModel.predict works."
        )


def _optimizer_fits(model: keras.Model) -> bool:
    """Whether the optimizer has been made for the weights that train now; one that has no variables yet will be."""
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
        advice = " Give its attribute model."
    elif isinstance(given, (str, os.PathLike)) and str(given).endswith((".keras", ".h5", ".hdf5")):
        advice = f" A saved model is loaded with sparkkeras.load_spark_model({str(given)!r}), or keras.saving.load_model."
    elif isinstance(given, types.FunctionType):
        advice = f" Call the function that builds the model: {given.__name__}()."
    elif isinstance(given, type) and issubclass(given, keras.Model):
        advice = f" Make an object of the class {given.__name__}."
    return f"{type(given).__module__}.{type(given).__qualname__}.{advice}"


@dataclass(frozen=True)
class ModelState:
    """The weights of a model and the variables of its optimizer at one moment."""

    weights: Flat
    optimizer: Flat

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.weights.nbytes + self.optimizer.nbytes

    @classmethod
    @locks_state
    def take(cls, model: keras.Model) -> ModelState:
        """Copy the state out of a model."""
        return cls(take_weights(model), _take(optimizer_variables(model)))

    @locks_state
    def put(self, model: keras.Model) -> None:
        """Copy the state into a model of the same layout."""
        put_weights(self.weights, model)
        _put(self.optimizer, optimizer_variables(model))


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model alone, which is all that predicting takes."""

    weights: Flat

    @classmethod
    def take(cls, model: keras.Model) -> ModelWeights:
        """Copy the weights out of a model."""
        return cls(take_weights(model))

    def put(self, model: keras.Model) -> None:
        """Copy the weights into a model of the same layout."""
        put_weights(self.weights, model)


def floatx() -> str:
    """The dtype of Keras's floating data, or float32 where it is one that NumPy does not know (bfloat16)."""
    name = str(keras.backend.floatx())
    return name if name in {"float16", "float32", "float64"} else "float32"


def weight_variables(model: keras.Model) -> list[Any]:
    """The weights, those that are trained first."""
    return [*model.trainable_weights, *model.non_trainable_weights]


def optimizer_variables(model: keras.Model) -> list[Any]:
    """The optimizer's variables, its iterations and its learning rate; made if they were not there yet."""
    optimizer = optimizer_of(model)
    if optimizer is None:
        return []
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return list(optimizer.variables)


def trainable_size(model: keras.Model) -> int:
    """How many values at the head of the weight vector are trained."""
    return sum(int(np.prod(weight.shape, dtype=np.int64)) for weight in model.trainable_weights)


@locks_state
def take_weights(model: keras.Model) -> Flat:
    """Copy the weights out of a model."""
    return _take(weight_variables(model))


@locks_state
def put_weights(weights: Flat, model: keras.Model) -> None:
    """Copy weights into a model of the same layout."""
    _put(weights, weight_variables(model))


def advanced(state: ModelState, model: keras.Model, steps: int, learning_rate: float | None = None) -> ModelState:
    """The state of a worker that goes on where another one ended. ``model`` is left with it.

    Args:
        state: Weights as they are now, optimizer variables as they were at first.
        model: A model of that layout.
        steps: The steps that were made meanwhile; schedules go on behind them.
        learning_rate: One that was set meanwhile.
    """
    state.put(model)
    if steps:
        set_iterations(model, iterations(model) + steps)
        optimizer = inner_optimizer(model)
        if getattr(optimizer, "use_ema", False):  # averages of weights that are not these any more
            for average, weight in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
                average.assign(weight)
    if learning_rate is not None and has_settable_rate(model):
        model.optimizer.learning_rate = learning_rate
    return ModelState.take(model)


def iterations(model: keras.Model) -> int:
    """The steps that the optimizer has counted."""
    return 0 if optimizer_of(model) is None else int(keras.ops.convert_to_numpy(inner_optimizer(model)._iterations))


def set_iterations(model: keras.Model, number: int) -> None:
    """Have the optimizer go on counting from ``number``."""
    for optimizer in {id(each): each for each in (model.optimizer, inner_optimizer(model))}.values():
        if optimizer is not None:
            optimizer._iterations.assign(number)


def learning_rate(model: keras.Model) -> float:
    """The optimizer's learning rate at its present step."""
    return 0.0 if model.optimizer is None else float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def has_settable_rate(model: keras.Model) -> bool:
    """Whether the optimizer's learning rate can be set: it can not where it follows a schedule or is a function."""
    return isinstance(getattr(inner_optimizer(model), "_learning_rate", None), keras.Variable)


def inner_optimizer(model: keras.Model) -> Any:
    """The optimizer that makes the steps; a ``LossScaleOptimizer`` (mixed precision) has it inside."""
    optimizer = optimizer_of(model)
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizer_of(model: keras.Model) -> Any:
    """The optimizer that a model was compiled with, or ``None``."""
    return getattr(model, "optimizer", None)


def reseed(model: keras.Model, seed: Sequence[int]) -> None:
    """Set every seed generator of a model (dropout, augmentation layers) from ``seed``."""
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
    """What a model takes and gives, as far as it says."""
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
    """What Keras calls the outputs: the keys of a dict of them, else the layers that they come from, numbered where two
    come from one.
    """
    functional = graph_of(model)
    structure = getattr(functional, "_outputs_struct", None)
    if isinstance(structure, dict):
        return sorted(structure)
    given = list(getattr(functional, "output_names", None) or ())
    before = [given[:index].count(name) for index, name in enumerate(given)]
    return [f"{name}_{number}" if number else name for name, number in zip(given, before, strict=True)]


def graph_of(model: keras.Model) -> Any:
    """What knows the structure of a model's inputs and outputs."""
    return getattr(model, "_functional", None) or model  # a Sequential has one inside


def _entries(model: keras.Model) -> dict[int, int]:
    """How many entries there are in the smallest ``Embedding`` that takes a tensor as indices, by the tensor's id."""
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
    """A model with its custom code and, unless it is packed to predict only, its compile arguments.

    Attributes:
        data: A ``.keras`` archive. Weights and optimizer variables in it mean nothing: they may be older ones, or zeros.
        custom: The custom classes and functions that it needs, by the names that Keras looks them up by.
        digest: A digest of architecture, compile arguments, custom code, and what preprocessing layers adapted to. The
            weights do not enter.
        settings: What Keras does not save, as attributes by their paths: ``optimizer._exclude_from_weight_decay``.
    """

    data: bytes
    custom: ByValue[dict[str, Any]]
    digest: str
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def pack(cls, model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> ModelArchive:
        """Pack a compiled model that lives in this process, and make sure that it loads as itself.

        The last archives are kept: packing a model again that has only been trained meanwhile costs next to nothing.

        Args:
            model: The model.
            custom_objects: Custom classes and functions by name, where they cannot be found in the model.

        Raises:
            CustomObjectError: Some of its code would load as something else, or not at all.
            ModelError: It does not survive the round trip for another reason.
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

        If the same model was packed to train and is still kept, that archive is taken: workers that have trained the model
        predict with it as they have it, unpacked and traced.

        Args:
            model: As of `pack`.
            custom_objects: As of `pack`.

        Raises:
            CustomObjectError: As of `pack`.
            ModelError: As of `pack`.
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
        settings = _settings(model)  # before Keras saves the model, for which it chooses what is not set
        data, loaded = _saved_and_loaded(model, described)
        digest = _digest(data, described.fingerprint)
        if len(data) > FULL_BYTES:
            data = _emptied(data, loaded)
        return cls(data, described.custom, digest, settings)

    def unpack(self) -> keras.Model:
        """A new model, compiled if it was packed so. It has to be given its weights (`ModelState`, `ModelWeights`)."""
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder, warnings.catch_warnings():
            # Optimizer variables in the archive mean nothing, so it is no matter if they do not fit.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            path = Path(folder) / "model.keras"
            # Keras takes large zeros that are compressed for an attack.
            with zipfile.ZipFile(io.BytesIO(self.data)) as packed, zipfile.ZipFile(path, "w") as plain:
                _copy(packed, plain)
            model = _load(path, self.custom.load(), safe_mode=False)
        for attribute, value in self.settings:
            owner, _, name = attribute.rpartition(".")
            setattr(attrgetter(owner)(model) if owner else model, name, value)
        return model

    def cached(self, variant: str | None = None) -> keras.Model:
        """This process's model with this digest: unpacked the first time, and the same one ever after.

        Args:
            variant: What else the model must have been used for all along, such as labels of one rank: Keras makes a loss
                for what it sees first. ``None`` takes any.
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
    """What a model is made of, its weights aside."""

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
    """An archive, and the fingerprint of its model without the compile arguments."""

    archive: ModelArchive
    to_predict: str


def _keep(fingerprint: str, to_predict: str, archive: ModelArchive) -> None:
    _packed[fingerprint] = _Packed(archive, to_predict)
    if len(_packed) > KEPT_ARCHIVES:
        _packed.popitem(last=False)


@locks_state
def _saved_and_loaded(model: keras.Model, described: _Description) -> tuple[bytes, keras.Model]:
    """The bytes of a ``.keras`` archive, and the model that loads from them, which is found to be the same.

    Raises:
        CustomObjectError: Some of its code would load as something else, or not at all.
        ModelError: It does not survive the round trip for another reason.
    """
    data = save_bytes(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Skipping variable loading")  # _verify raises an error instead
        loaded = _read(data, described.objects, safe_mode=False)
    _verify(model, described.code, loaded)
    return data, loaded


def _uncompiled(model: keras.Model) -> keras.Model:
    """The model as if it had not been compiled: another object with the same layers and variables. To be saved, not called.

    The model itself stays as it is, since another thread may be training it.
    """
    bare = object.__new__(type(model))  # copy.copy would save and load it
    bare.__dict__.update(vars(model), compiled=False, _jit_compile=None)
    # What Keras itself has chosen for this machine, to predict or to save, is no setting: workers choose for theirs.
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
    optimizer_variables(model)  # makes the variables, so that they are in the archive
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        path = Path(folder) / "model.keras"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*includes a `lambda`.*")
            _config(model)  # says what cannot be saved
            model.save(path)
        return path.read_bytes()


def _check_dtypes(model: keras.Model) -> None:
    """Refuse weights that Keras either cannot write to a file or cannot read again."""
    for weight in weight_variables(model):
        dtype = keras.backend.standardize_dtype(weight.dtype)
        if dtype.startswith("float8"):
            raise ModelError(
                f"the weight {weight.path!r} of the model {model.name!r} has the dtype {dtype}, which Keras cannot save and "
                'load, and models travel to workers as saved ones. Create the weight with dtype="bfloat16" or "float16"; if '
                f'need be, convert it in call: keras.ops.cast(weight, "{dtype}").'
            )


def copy_of(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """A copy of a built model for this process, with weights of its own. It is not compiled.

    Raises:
        CustomObjectError: Some of its code would load as something else, or not at all.
        ModelError: It cannot be saved and loaded for another reason.
    """
    bare = _uncompiled(model)
    return _saved_and_loaded(bare, _Description.of(bare, custom_objects))[1]


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """Losses and metrics that a model was compiled with, as JSON knows them; ``None`` where it was not."""
    config = model.get_compile_config() if model.compiled else None
    return None if config is None else {name: config.get(name) for name in _JUDGING}


def compile_to_judge(
    model: keras.Model, given: Mapping[str, Any] | None, custom_objects: Mapping[str, Any], *, safe_mode: bool
) -> None:
    """Compile a model that is not to be trained with what `compile_arguments` gave of another one.

    Raises:
        ModelError: Custom code is missing, or there is a Python lambda and ``safe_mode`` is on.
    """
    handled = sys.exception()
    try:
        arguments = keras.saving.deserialize_keras_object(
            dict(given or {}), custom_objects=dict(custom_objects), safe_mode=safe_mode
        )
    except Exception as error:
        told = _load_error(error, handled)
        raise told from told.__cause__
    model.compile("sgd", **arguments)  # without an optimizer Keras saves it, and cannot load it


_JUDGING = ("loss", "loss_weights", "metrics", "weighted_metrics")


def load_bytes(data: bytes, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> keras.Model:
    """A model out of the bytes of a ``.keras`` archive, or of an HDF5 file of Keras's.

    Custom code that an archive names and this process has loaded already need not be given.

    Raises:
        CustomObjectError: Custom code is missing.
        ModelError: The archive cannot be loaded, or holds a Python lambda and ``safe_mode`` is on.
    """
    found = {} if data.startswith(HDF5) else custom_code.already_loaded(_config_in(data))
    return _read(data, {**found, **custom_objects}, safe_mode=safe_mode)


HDF5 = b"\x89HDF\r\n\x1a\n"
"""What an HDF5 file begins with."""


def _config_in(data: bytes) -> Any:
    """The configuration in a ``.keras`` archive; ``None`` if it cannot be read, which Keras reports."""
    with suppress(Exception), zipfile.ZipFile(io.BytesIO(data)) as archive:
        return json.loads(archive.read("config.json"))
    return None


def _read(data: bytes, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> keras.Model:
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        path = Path(folder) / ("model.h5" if data.startswith(HDF5) else "model.keras")
        path.write_bytes(data)
        return _load(path, custom_objects, safe_mode=safe_mode)


_OURS = {keras.saving.get_registered_name(Vote): Vote}
"""The layers of our own that saved models may have."""


def _load(path: Path, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> keras.Model:
    handled = sys.exception()
    try:
        with warnings.catch_warnings():
            # An optimizer that had not made a step when it was saved has no variables to load.
            warnings.filterwarnings("ignore", message="Skipping variable loading.* optimizer has 2 variables")
            objects = {**_OURS, **custom_objects}
            return keras.saving.load_model(path, objects, safe_mode=safe_mode)
    except Exception as error:
        told = _load_error(error, handled)
        raise told from told.__cause__


def _load_error(error: Exception, handled: BaseException | None) -> ModelError:
    """What to raise where Keras could not load a model. Keras wraps errors several times; its cause is the innermost one.

    Args:
        error: What Keras raised.
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
            "the model holds Python code (a lambda in a Lambda layer), which is not run from a file unless you trust it: "
            "load it with safe_mode=False if it comes from a source that you trust."
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
    told = ModelError(
        f"the model cannot be loaded from its saved form{place}: {type(origin).__name__}: {reason}. {_load_advice(reason)}"
    )
    told.__cause__ = origin
    return told


def _raised_from(error: BaseException) -> BaseException | None:
    """The exception that a traceback shows above this one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


_LONGEST_REASON = 600
"""The most characters of Keras's own words in a message."""

_OF_KERAS = ("name", "trainable", "dtype")
"""The arguments that every layer's configuration has."""


def _innermost(text: str) -> str:
    """What Keras reports as the reason, without the configurations that it prints first."""
    reason = re.split(r"(?:Exception encountered|Error encountered during deserialization): ", text)[-1]
    return reason.split("\n\nArguments received by", 1)[0].removeprefix("''").removesuffix("''").strip()


def _load_advice(reason: str) -> str:
    """How to fix a custom class that does not load."""
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", reason)
    if unexpected and unexpected[1] in _OF_KERAS:
        return (
            "Keras calls the constructor with what get_config returns, which includes name, trainable and dtype. Write def "
            "__init__(self, units, **kwargs) with super().__init__(**kwargs), and def get_config(self) that returns "
            '{**super().get_config(), "units": self.units}, with your own arguments for units.'
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
            f"the optimizer of the model {model.name!r} comes back from a saved copy of it with other variables: the "
            "get_config of an optimizer must return the arguments of its constructor."
        )


def _verify_weights(model: keras.Model, loaded: keras.Model) -> None:
    mine, other = weight_variables(model), weight_variables(loaded) if loaded.built else []
    shapes, loaded_shapes = ([tuple(weight.shape) for weight in weights] for weights in (mine, other))
    if shapes != loaded_shapes and sorted(shapes) == sorted(loaded_shapes):
        raise ModelError(
            f"the weights of the model {model.name!r} come back from a saved copy of it in another order, as they do after "
            'model.quantize("float8"): save the model, load it, and use the loaded one: model.save("model.keras"); model = '
            'keras.saving.load_model("model.keras").'
        )
    if shapes != loaded_shapes:
        raise ModelError(
            f"the model {model.name!r} has {len(mine)} weights, but a saved copy of it loads with {len(other)}, or with "
            "other shapes: a custom layer must create its weights in __init__ or build(), from the arguments that its "
            "get_config returns."
        )
    for before, after in zip(mine, other, strict=True):
        if not np.array_equal(_numpy(before), _numpy(after), equal_nan=_numpy(before).dtype.kind == "f"):
            raise ModelError(f"the weight {before.path!r} comes back from a saved copy of the model with other values.")


def _emptied(data: bytes, loaded: keras.Model) -> bytes:
    """An archive with zeros for what travels apart from it, compressed: then it is small, however large the model.

    Only its file of weights is another one, so all else in it is what was found to load well.

    Args:
        data: The archive.
        loaded: The model that was loaded from it; it is left with zeros.
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
    """Copy a ``.keras`` archive, with the weights of another one where that is given."""
    for name in archive.namelist():
        source = weights if weights is not None and name.startswith("model.weights") else archive
        with source.open(name) as read, target.open(name, "w", force_zip64=True) as write:
            shutil.copyfileobj(read, write, 1024 * 1024)


def _set_zeros(model: keras.Model) -> None:
    """Set weights and optimizer variables to zero, but for those that a layer made something of when they were loaded."""
    layers = [layer for layer in model._flatten_layers() if hasattr(layer, "adapt") or _loads_by_itself(layer)]
    kept = {id(variable) for layer in layers for variable in layer.variables}
    for variable in [*weight_variables(model), *optimizer_variables(model)]:
        if len(variable.shape) and id(variable) not in kept:  # a number, such as the learning rate, takes no room
            variable.assign(keras.ops.zeros(variable.shape, variable.dtype))


def _loads_by_itself(layer: Any) -> bool:
    """Whether a layer has a way of its own to load its variables, in which it may make constants of them."""
    return not type(layer).load_own_variables.__module__.startswith("keras.")


def _config(model: keras.Model) -> Any:
    """Architecture and compile arguments, as Keras writes them down.

    Raises:
        ModelError: Something in the model has no form that Keras can write.
    """
    _put_optimizer_back(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*includes a `lambda`.*")
        try:
            return keras.saving.serialize_keras_object(model)
        except Exception as error:
            raise ModelError(
                f"the model {model.name!r} cannot be saved, which is how it travels: {error} Losses and metrics must be "
                "functions made with def, or Keras objects with a get_config."
            ) from error


def _put_optimizer_back(model: keras.Model) -> None:
    """Keras takes it out of the arguments of compile when it saves a model as HDF5; a copy would train with RMSprop."""
    compiled, optimizer = getattr(model, "_compile_config", None), optimizer_of(model)
    if compiled is not None and optimizer is not None:
        compiled.config.setdefault("optimizer", optimizer)


def custom_objects_of(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The custom classes and functions that a model needs, by the names that Keras looks them up by; see `copy_of`."""
    return _custom_objects(model, custom_code.code_of(model), _config(model), custom_objects)


def _custom_objects(
    model: keras.Model, code: Mapping[str, Any], config: Any, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {**custom_code.custom_objects(code, _strings(config), _bare_names(model)), **(given or {})}


def _bare_names(model: keras.Model) -> set[str]:
    """The losses and metrics that the model was compiled with by their names."""
    given = _compiled_with(model)
    sides = [given.get(side) for side in ("loss", "metrics", "weighted_metrics")]
    return {leaf for leaf in keras.tree.flatten(sides) if isinstance(leaf, str)}


def _fingerprint(model: keras.Model, config: Any, custom: ByValue[Any]) -> str:
    """What distinguishes one model from another in this process, its trained weights aside.

    Architecture and compile arguments, its custom code with what that refers to, and what preprocessing layers adapted
    to: they turn their variables into constants when they are loaded, so setting weights does not reach those.
    """
    config = json.loads(json.dumps(config, default=repr))
    optimizer = ((config.get("compile_config") or {}).get("optimizer") or {}).get("config") or {}
    if isinstance(optimizer.get("learning_rate"), float):
        optimizer["learning_rate"] = None  # it is a variable, and travels with the state
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
    """What Keras does not save: weights without decay and, of a model that is not compiled, how it runs."""
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
