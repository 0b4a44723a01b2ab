"""`adapt`: what preprocessing layers learn from rows, computed on the cluster in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_args

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.block import Block, describe
from sparkkeras.data.dataset import Shared, TaskContext
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, OnInvalid, Schema
from sparkkeras.data.text import STRING
from sparkkeras.errors import ConfigurationError, DataError, ModelError, known_names
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import special_tokens
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.schema import input_structure, input_tensors, schema_of
from sparkkeras.modeling.state import ModelWeights, floatx
from sparkkeras.preprocessing.states import MeanVariance, MergeStates, Quantiles, Tokens
from sparkkeras.scoring.inference import Verbose, dataset_with_progress
from sparkkeras.sources.frame import ColumnMapping, Columns, Loaders, is_frame
from sparkkeras.sources.source import Source, as_source
from sparkkeras.weights import Array
from sparkkeras.worker.batches import BatchOptions
from sparkkeras.worker.predictor import Predictor

T = TypeVar("T")

LAYERS = (
    keras.layers.Normalization,
    keras.layers.Discretization,
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    keras.layers.TextVectorization,
)
"""The layers that have a state to learn."""

BATCH_SIZE = 1024
TEXTS = 256
"""How many texts become tokens at a time."""

PIECES = 64
"""Into how many pieces tokens are split, each of which is merged by one task."""


@known_arguments
def adapt(
    target: T,
    data: Any,
    *,
    features: Columns | None = None,
    loader: Loaders | None = None,
    on_invalid: OnInvalid = "error",
    custom_objects: Mapping[str, Any] | None = None,
    verbose: Verbose = "auto",
) -> T:
    """Adapt preprocessing layers to rows on the cluster, as their own ``adapt`` does with all rows in one process.

    These are ``Normalization``, ``Discretization``, ``StringLookup``, ``IntegerLookup`` and ``TextVectorization``, also with
    tf-idf, unless they were made with a fixed state. Of a model, all such layers are adapted in one pass over the rows, or
    in several where one takes what another returns. Workers merge their states; of a vocabulary with ``max_tokens``, only
    the most frequent tokens pass through this process.

    The state is that of Keras: means and variances are computed in float64, vocabularies are the same with their order, and
    the boundaries of ``Discretization`` are within its ``epsilon``.

    Args:
        target: A layer, a functional or ``Sequential`` model, or a ``keras.utils.FeatureSpace``. It is changed in place.
        data: A DataFrame, an RDD of features, or arrays; see `SparkModel.predict`. For a ``FeatureSpace`` a DataFrame with
            columns of its features' names, or a dict of arrays.
        features: The columns of a DataFrame; see `SparkModel.fit`.
        loader: Converts a column into an input; see `SparkModel.fit`.
        on_invalid: How to handle rows with nulls, NaN or infinite values; see `SparkModel.fit`.
        custom_objects: Custom classes and functions by name, where they cannot be found from the model.
        verbose: ``"auto"`` or 1: show the progress; 0: do not.

    Returns:
        ``target``.

    Raises:
        ModelError: A layer of the model cannot be reached from its inputs, or there is none to adapt.
        ConfigurationError: An argument is out of range, or ``target`` is something else.
        DataError: The data is empty, or does not fit.
        WorkerError: A task failed repeatedly; the message contains its traceback.

    Example::

        adapt(model, df, features={"age": "age", "city": "city"})
        SparkModel(model).fit(df, features={"age": "age", "city": "city"}, label="income")
    """
    arguments.one_of("on_invalid", on_invalid, get_args(OnInvalid))
    arguments.one_of("verbose", verbose, get_args(Verbose))
    objects = arguments.custom_objects("custom_objects", custom_objects)
    columns, rows = ColumnMapping(features, loader=loader, features_only=True), data
    if isinstance(target, keras.utils.FeatureSpace) and features is None:
        rows = _of_features(rows, list(target.features))

    def learned(wanted: Sequence[_Wanted], schema: Schema, upstream: keras.Model | None = None) -> list[Any]:
        source = as_source(rows, Reader(schema, True, on_invalid, labels_optional=True), columns=columns)
        return _learned(wanted, schema, source, upstream, objects, verbose)

    if isinstance(target, keras.utils.FeatureSpace):
        _adapt_feature_space(target, learned)
    elif isinstance(target, keras.Model):
        _adapt_model(target, learned)
    elif isinstance(target, LAYERS):
        if not _learns(target):
            raise ConfigurationError(f"the layer {target.name!r} was made with a fixed state: there is nothing to adapt.")
        wanted = _Wanted.of(target, "features")
        spec = InputSpec("features", None, wanted.floating, text=wanted.text)
        _set_state(target, *learned([wanted], Schema((spec,), floatx="float64")))
    else:
        kinds = ", ".join(kind.__name__ for kind in LAYERS)
        raise ConfigurationError(
            f"target is {describe(target)}; expected a Keras model, a keras.utils.FeatureSpace, or one of the layers "
            f"{kinds}."
        )
    return target


def _of_features(data: Any, names: Sequence[str]) -> Any:
    """The data of a ``FeatureSpace``; the columns of a pandas DataFrame as a dict of arrays.

    Raises:
        DataError: A feature is missing.
    """
    known = getattr(data, "columns", data if isinstance(data, Mapping) else None)
    if known is None:
        return data
    missing = [name for name in names if name not in known]
    if missing:
        raise DataError(
            f"the data has no column {missing[0]!r}, a feature of the space. {known_names(missing[0], list(known))}"
        )
    return data if is_frame(data) or isinstance(data, Mapping) else {name: np.asarray(data[name]) for name in names}


@dataclass(frozen=True)
class _Wanted:
    """What a worker computes for a layer.

    Attributes:
        takes: The name of the input that the layer takes; ``None``: the next output of the model before it.
        measure: Makes the state of an array.
        floating: Whether it takes floating-point numbers.
        text: Whether it takes strings.
    """

    takes: str | None
    measure: Callable[[Array], Any]
    floating: bool
    text: bool

    @classmethod
    def of(cls, layer: Any, takes: str | None) -> _Wanted:
        """What to compute for a layer."""
        if isinstance(layer, keras.layers.Normalization):
            return cls(takes, partial(_mean_variance, kept=tuple(layer.axis)), True, False)
        if isinstance(layer, keras.layers.Discretization):
            return cls(takes, partial(Quantiles.of, epsilon=layer.epsilon), True, False)
        config, rows = layer.get_config(), layer.get_config()["output_mode"] == "tf_idf"
        limit = None if config["max_tokens"] is None else config["max_tokens"] - special_tokens(config)
        if isinstance(layer, keras.layers.TextVectorization):
            split = {
                **config,
                "output_mode": "int",
                "max_tokens": None,
                "pad_to_max_tokens": False,
                "sparse": False,
                "ragged": False,
                "output_sequence_length": None,
            }
            for name in ("vocabulary", "idf_weights", "vocabulary_size"):
                split.pop(name, None)
            by_value = ByValue.dump(split, f"the layer {layer.name!r}")
            return cls(takes, _Words(by_value, rows, limit), False, True)
        is_text = isinstance(layer, keras.layers.StringLookup)
        ignored = [each for each in (config["mask_token"], config["oov_token"]) if each is not None]
        return cls(takes, _Lookup(is_text, tuple(ignored), rows, limit), False, is_text)


def _mean_variance(values: Array, kept: Sequence[int]) -> MeanVariance:
    return MeanVariance.of(_in_columns(values), kept)


def _in_columns(values: Array) -> Array:
    """One value for each row as a column, as layers in models get them."""
    return values[:, None] if values.ndim == 1 else values


@dataclass(frozen=True)
class _Lookup:
    """Counts the elements of an array, but those that are ignored. Numbers become whole ones, as in Keras."""

    is_text: bool
    ignored: tuple[Any, ...]
    with_rows: bool
    limit: int | None

    def __call__(self, values: Array) -> Tokens:
        tokens = np.asarray(values) if self.is_text else np.asarray(values).astype(np.int64)
        return Tokens.of(tokens, self.with_rows, self.limit).without(self.ignored)


@dataclass(frozen=True)
class _Words:
    """Counts the tokens that a ``TextVectorization`` makes of texts: a copy of it, adapted to them, numbers their tokens."""

    config: ByValue[dict[str, Any]]
    with_rows: bool
    limit: int | None

    def __call__(self, values: Array) -> Tokens:
        layer = keras.layers.TextVectorization(**self.config.load())  # from_config takes no functions of users
        texts = np.asarray(values, object)
        layer.adapt(texts)
        words = layer.get_vocabulary(include_special_tokens=False)
        if not words:  # the layer has no table to look up then
            return Tokens(Counter(), Counter(), len(texts), self.limit)
        special = layer.vocabulary_size() - len(words)
        counts, rows_with = (np.zeros(len(words), np.int64) for _ in range(2))
        for start in range(0, len(texts), TEXTS):  # whose rows of tokens are padded to the longest one
            numbers = np.asarray(layer(texts[start : start + TEXTS])) - special
            row, *_ = found = np.nonzero(numbers >= 0)
            tokens = numbers[found]
            counts += np.bincount(tokens, minlength=len(words))
            if self.with_rows:
                pairs = np.unique(np.stack([row, tokens]), axis=1)
                rows_with += np.bincount(pairs[1], minlength=len(words))
        by_word = [Counter(dict(zip(words, each.tolist(), strict=True))) for each in (counts, rows_with)]
        return Tokens(by_word[0], by_word[1] if self.with_rows else Counter(), len(texts), self.limit)


@dataclass(frozen=True)
class LearnTask:
    """Yields the states of all layers for the rows of a partition; nothing if it has none."""

    wanted: tuple[_Wanted, ...]
    schema: Schema
    upstream: tuple[Shared[ModelArchive], Shared[ModelWeights], BatchOptions] | None

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[list[Any]]:
        """Yield the states."""
        predictor = None
        if self.upstream is not None:
            archive, weights, options = self.upstream
            predictor = Predictor(archive.value, weights.value, options, self.schema, context)
        states: list[Any] | None = None
        for block in blocks:
            if block.rows:
                found = self._states(block.dense(), predictor)
                states = found if states is None else [one.merge(other) for one, other in zip(states, found, strict=True)]
        if states is not None:
            yield states

    def _states(self, block: Block, predictor: Predictor | None) -> list[Any]:
        specs = self.schema.specs_of(block.form)
        inputs = {spec.name: array for spec, array in zip(specs, block.arrays, strict=False) if spec is not None}
        outputs = iter(() if predictor is None else keras.tree.flatten(predictor.predict(block)))
        arrays = (next(outputs) if each.takes is None else inputs[each.takes] for each in self.wanted)
        return [each.measure(np.asarray(array)) for each, array in zip(self.wanted, arrays, strict=True)]


def _learned(
    wanted: Sequence[_Wanted],
    schema: Schema,
    source: Source,
    upstream: keras.Model | None,
    custom_objects: Mapping[str, Any],
    verbose: Verbose,
) -> list[Any]:
    """The states of layers for all rows."""

    def packed() -> Any:
        return None if upstream is None else ModelArchive.pack_to_predict(upstream, custom_objects)

    with (
        dataset_with_progress(packed, source, None, "Adapting layers", verbose) as (archive, dataset, _),
        ExitStack() as stack,
    ):
        before = None
        if upstream is not None:
            weights = stack.enter_context(dataset.share(ModelWeights.take(upstream)))
            options = BatchOptions(BATCH_SIZE, input_structure=input_structure(upstream), to_predict=True)
            before = stack.enter_context(dataset.share(archive)), weights, options
        pieces = PIECES if any(isinstance(each.measure, (_Lookup, _Words)) for each in wanted) else 1
        found = dataset.run(LearnTask(tuple(wanted), schema, before)).reduce(MergeStates(pieces))
    if not found:
        raise DataError("there are no rows to adapt to: the data is empty.")
    return found[0]


Learned = Callable[..., list[Any]]


def _adapt_model(model: keras.Model, learned: Learned) -> None:
    """Adapt the layers of a model: first those that depend on no other one."""
    if not getattr(model, "inputs", None):
        raise ModelError(
            f"the model {model.name!r} has no inputs that Keras knows: expected a functional or Sequential model. For "
            "another one, adapt its layers: adapt(layer, df, features=...)."
        )
    _check_others(model)
    schema, tensors = schema_of(model), input_tensors(model)
    names = {id(tensor): spec.name for tensor, spec in zip(tensors, schema.inputs, strict=True)}
    left = [layer for layer in model.layers if _learns(layer)]
    if not left:
        kinds = ", ".join(kind.__name__ for kind in LAYERS)
        raise ModelError(f"the model {model.name!r} has no layers to adapt ({kinds}).")
    while left:
        ready: list[tuple[Any, str | None]] = []
        before: list[Any] = []
        for layer in left:
            tensor = _input_of(layer, model)
            if id(tensor) in names:
                ready.append((layer, names[id(tensor)]))
            elif not any(other in left for other in keras.Model(model.inputs, tensor).layers):
                ready.append((layer, None))
                before.append(tensor)
        wanted = [_Wanted.of(layer, takes) for layer, takes in ready]
        states = learned(wanted, schema, keras.Model(_given_inputs(model), before) if before else None)
        for (layer, _), state in zip(ready, states, strict=True):
            _set_state(layer, state)
            left.remove(layer)


def _given_inputs(model: keras.Model) -> Any:
    """The inputs in the structure that the model was built with."""
    structure, tensors = input_structure(model), input_tensors(model)
    return tensors if structure is None else structure.build(tensors)


def _check_others(model: keras.Model) -> None:
    """Check that layers inside others, whose inputs are unknown here, have a state."""
    known = {id(each) for layer in model.layers if isinstance(layer, LAYERS) for each in layer._flatten_layers()}
    for layer in model._flatten_layers(include_self=False):
        if id(layer) not in known and _learns(layer) and not _has_state(layer):
            raise ModelError(
                f"the layer {layer.name!r} is inside another layer of {model.name!r}, whose inputs are its own: adapt it "
                "first, with adapt(inner_model, df, features=...) or adapt(layer, df, features=...)."
            )


def _has_state(layer: Any) -> bool:
    """Whether a layer has been adapted, as far as its state shows."""
    if isinstance(layer, keras.layers.Normalization):
        return layer.built and bool(np.any(layer.adapt_mean) or np.any(np.asarray(layer.adapt_variance) != 1))
    if isinstance(layer, keras.layers.Discretization):
        return layer.bin_boundaries is not None
    return bool(layer.vocabulary_size() > special_tokens(layer.get_config()))


def _input_of(layer: Any, model: keras.Model) -> Any:
    if len(layer._inbound_nodes) > 1 and not isinstance(model, keras.Sequential):  # which calls its layers again and again
        raise ModelError(
            f"the layer {layer.name!r} is called several times, on inputs that may differ: adapt it on its own, with "
            "adapt(layer, df, features=...), and make it with that vocabulary or mean for this model."
        )
    return layer.input


def _adapt_feature_space(space: Any, learned: Learned) -> None:
    """Adapt the preprocessors of a ``FeatureSpace``. Its own ``adapt`` calls theirs, and then finishes building it."""
    layers = {name: layer for name, layer in space.preprocessors.items() if isinstance(layer, LAYERS) and _learns(layer)}
    kinds = {name: feature.dtype for name, feature in space.features.items()}
    specs = [InputSpec(name, None, "float" in kind, text=kind == STRING) for name, kind in kinds.items()]
    wanted = [_Wanted.of(layer, name) for name, layer in layers.items()]
    states = learned(wanted, Schema(tuple(specs), floatx="float64")) if wanted else []
    for layer, state in zip(layers.values(), states, strict=True):
        layer.adapt = partial(_ignore_rows, layer, state)
    try:
        space.adapt({name: _any_row(kind) for name, kind in kinds.items()})
    finally:
        for layer in layers.values():
            del layer.adapt


def _any_row(dtype: str) -> Array:
    return np.array([[""]], object) if dtype == STRING else np.zeros((1, 1), dtype)


def _ignore_rows(layer: Any, state: Any, rows: Any) -> None:
    _set_state(layer, state)


def _learns(layer: Any) -> bool:
    """Whether a layer has a state to learn: it was not made with a fixed one."""
    if not isinstance(layer, LAYERS):
        return False
    config = layer.get_config()
    if config.get("invert"):  # it takes what a model returns
        return False
    if isinstance(layer, keras.layers.Normalization):
        return config["mean"] is None
    if isinstance(layer, keras.layers.Discretization):
        return layer.num_bins is not None
    return not layer._has_input_vocabulary  # the configuration does not name a file of tokens


def learned_by(layer: Any) -> Any:
    """What a layer has learned by ``adapt``, as values for JSON; ``None``: nothing."""
    if not _learns(layer) or not _has_state(layer):
        return None
    if isinstance(layer, keras.layers.Normalization):
        return [np.ravel(each).tolist() for each in (layer.adapt_mean, layer.adapt_variance)]
    if isinstance(layer, keras.layers.Discretization):
        return np.ravel(layer.bin_boundaries).tolist()
    return [str(token) for token in layer.get_vocabulary()]


def _set_state(layer: Any, state: Any) -> None:
    """Put the state of all rows into a layer."""
    if isinstance(state, MeanVariance):
        if not layer.built:
            layer.build((None, *state.row_shape))
        if tuple(layer.adapt_mean.shape) != state.mean.shape:
            raise DataError(
                f"the layer {layer.name!r} was built for means of shape {tuple(layer.adapt_mean.shape)}, but the rows have "
                f"the shape {state.row_shape}: choose other columns, or make a new layer."
            )
        layer.adapt_mean.assign(state.mean.astype(floatx()))
        layer.adapt_variance.assign(state.variance.astype(floatx()))
        layer.finalize_state()
    elif isinstance(state, Quantiles):
        layer.summary = np.stack([state.values, state.weights]).astype("float32")
        layer.finalize_state()
    elif not state.counts:
        raise DataError(f"the rows have no tokens for the layer {layer.name!r}: all are empty, masked or unknown.")
    else:
        tokens = list(state.counts)
        vocabulary = np.array(tokens, object if isinstance(tokens[0], str) else np.int64)  # an array of str pads them all
        layer.set_vocabulary(vocabulary, idf_weights=state.inverse_document_frequencies if state.rows_with else None)
