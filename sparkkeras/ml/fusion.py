"""`fuse`: a fitted pipeline of Spark ML as one Keras model, which needs no Spark to predict."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from pyspark.ml import PipelineModel
from pyspark.ml.feature import ImputerModel, OneHotEncoderModel, StandardScalerModel, StringIndexerModel, VectorAssembler
from pyspark.sql.types import DataType, IntegralType, NumericType, StringType, StructType

from sparkkeras.data.block import by_name, describe
from sparkkeras.data.schema import Schema
from sparkkeras.data.text import STRING
from sparkkeras.errors import ConfigurationError, ModelError, counted
from sparkkeras.ml.transformer import KerasTransformer, SchemaFrame
from sparkkeras.modeling.schema import has_strings, input_tensors, pack_inputs, schema_of
from sparkkeras.sources.frame import by_position, is_frame
from sparkkeras.worker import device

_NUMBERS = device.widest_float()
"""The dtype of columns of numbers: Spark's, unless the backend has none with as many bits."""


def fuse(pipeline: PipelineModel, schema: Any = None) -> keras.Model:
    """Make one Keras model of a fitted pipeline that ends with a `KerasTransformer`.

    The model takes the columns that the pipeline takes, in the order of their names, as a dict of arrays of shape (rows, 1),
    or (rows, width) for a column of vectors. It returns what the pipeline's ``outputCol`` holds. It is a functional model of
    Keras's own layers, without loss: ``model.save`` and ``model.export`` make files that need neither Spark nor sparkkeras.

    Stages before the last one may be ``Imputer``, ``StringIndexer``, ``OneHotEncoder``, ``VectorAssembler`` and
    ``StandardScaler``. Strings need the backend TensorFlow.

    A null is NaN in a column of numbers, and any value that is no label in a column of strings. The prediction is NaN for a
    row that the pipeline rejects or drops, such as one with a label that a ``StringIndexer`` does not keep, or an infinite
    feature. Keras's ``predict`` converts numbers to float32 first; call the model with tensors of float64 where these are
    too coarse, such as for timestamps. Stages that only make other columns, such as the index of the label, are left out.

    Args:
        pipeline: The fitted pipeline.
        schema: A DataFrame, or its schema, with the columns that the pipeline takes. It is needed for an ``Imputer`` of
            integers, which Spark imputes with integers, and for a ``StringIndexer`` of numbers. Default: a ``StringIndexer``
            takes strings, and other columns hold floating-point numbers.

    Returns:
        The model. It shares the weights of the pipeline's Keras model.

    Raises:
        ConfigurationError: A stage cannot become layers, or an argument is something else.
        ModelError: The ``KerasTransformer`` has no model, or one whose inputs are unknown.

    Example::

        model = fuse(pipeline.fit(df))
        model.save("churn.keras")
        model.predict({"age": np.array([[31.0]]), "city": keras.ops.convert_to_tensor([["Graz"]], "string")})
    """
    if not isinstance(pipeline, PipelineModel):
        raise ConfigurationError(f"pipeline is {describe(pipeline)}; expected a PipelineModel, the result of Pipeline.fit.")
    *stages, last = _flat(pipeline)
    if not isinstance(last, KerasTransformer):
        raise ConfigurationError(f"the pipeline's last stage is {last!r}; expected a KerasTransformer.")
    if not (schema is None or is_frame(schema) or isinstance(schema, StructType)):
        raise ConfigurationError(f"schema is {describe(schema)}; expected a DataFrame, or its schema.")
    model = last.get_model()
    if not getattr(model, "inputs", None):
        raise ModelError(
            f"the inputs of the model {model.name!r} are unknown; expected a functional model, or a Sequential one that "
            "begins with keras.Input."
        )
    given = _feature_columns(last.getOrDefault("featuresCol"), schema_of(model))
    columns = _ColumnTensors(None if schema is None else SchemaFrame.of(schema).schema)
    for stage, makes in _needed(stages, {name.lower() for names in given.values() for name in names}):
        add = next(function for kind, function in _STAGES.items() if isinstance(stage, kind))
        columns.add({new: add(stage, names, new, columns) for names, new in makes})
    outputs = _predictions(last, model, given, columns)
    return keras.Model(dict(sorted(columns.inputs.items())), outputs)


_Makes = list[tuple[list[str], str]]
"""The columns that a stage makes, each after those that it is made of."""


def _needed(stages: Sequence[Any], wanted: set[str]) -> list[tuple[Any, _Makes]]:
    """The stages that make the wanted columns or what these are made of, with those columns.

    Raises:
        ConfigurationError: One of them cannot become layers, or may change other columns.
    """
    found = list[tuple[Any, _Makes]]()
    for stage in reversed(stages):
        makes = [(names, new) for names, new in _makes(stage) if not isinstance(new, str) or new.lower() in wanted]
        if not makes:
            continue
        if not isinstance(stage, tuple(_STAGES)):
            kinds = ", ".join(kind.__name__ for kind in _STAGES)
            raise ConfigurationError(
                f"the stage {stage!r} cannot become layers of Keras; expected one of {kinds}. Take it out, and "
                "apply it to the rows before they reach the pipeline."
            )
        wanted = wanted - {new.lower() for _, new in makes} | {name.lower() for names, _ in makes for name in names}
        found.append((stage, makes))
    return found[::-1]


def _makes(stage: Any) -> _Makes:
    """The columns that a stage makes; one that is no string, if that is unknown."""

    def param(name: str) -> Any:
        return stage.getOrDefault(name) if stage.hasParam(name) and stage.isDefined(name) else None

    names, several = param("inputCols") or [param("inputCol")], param("outputCols")
    if several is None:
        return [(names, param("outputCol"))]
    return [([name], new) for name, new in zip(names, several, strict=True)]


def _flat(pipeline: PipelineModel) -> Iterator[Any]:
    """The stages, also those of pipelines inside the pipeline."""
    for stage in pipeline.stages or [pipeline]:
        if isinstance(stage, PipelineModel) and stage.stages:
            yield from _flat(stage)
        else:
            yield stage


class _ColumnTensors:
    """The columns of a pipeline as tensors of shape (rows, width). As in Spark, the case of names does not count.

    Attributes:
        inputs: The columns that no stage has made.
    """

    def __init__(self, schema: StructType | None) -> None:
        self.inputs: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self._types = None if schema is None else {each.name.lower(): each.dataType for each in schema}

    def add(self, made: Mapping[str, Any]) -> None:
        """Add columns that a stage has made."""
        self._made |= {name.lower(): tensor for name, tensor in made.items()}

    def get(self, name: str, width: int = 1, dtype: str = _NUMBERS) -> Any:
        """The tensor of a column: a new input if no stage has made it.

        Raises:
            ConfigurationError: It is a column of strings for one stage, and one of numbers for another or in the schema; or
                the schema lacks it.
        """
        if name.lower() not in self._made:
            kind = None if self._types is None else self._types.get(name.lower())
            if self._types is not None and (kind is None or (dtype != STRING and isinstance(kind, StringType))):
                raise ConfigurationError(
                    f"schema has {'no column' if kind is None else 'strings in the column'} {name!r}, of which the pipeline "
                    f"takes {'strings' if dtype == STRING else 'numbers'}. Its columns: {', '.join(self._types)}."
                )
            if dtype == STRING and not has_strings():
                raise ConfigurationError(
                    f"the column {name!r} holds strings, which models with the backend {keras.backend.backend()!r} cannot "
                    "take: set KERAS_BACKEND=tensorflow before you import Keras, and load the pipeline. If it holds "
                    "numbers, pass the DataFrame as schema."
                )
            self.inputs[name] = keras.Input((width,), name=name.replace("/", "_"), dtype=dtype)
            self.add({name: self.inputs[name]})
        tensor = self._made[name.lower()]
        if (tensor.dtype == STRING) != (dtype == STRING):
            raise ConfigurationError(
                f"the column {name!r} is used both as strings and as numbers: pass the DataFrame as schema if it holds "
                "numbers, or give the stages columns of their own."
            )
        return tensor

    def are(self, name: str, kind: type[DataType]) -> bool:
        """Whether a column holds values of this type, as far as is known."""
        if name.lower() in self._made and name.lower() not in map(str.lower, self.inputs):
            return kind is NumericType  # all that stages make
        return self._types is not None and isinstance(self._types.get(name.lower()), kind)

    def together(self, names: Sequence[str], width: int | None, user: Any) -> Any:
        """The tensors of several columns, side by side.

        Args:
            names: The columns.
            width: How many values they have together; ``None``: unknown.
            user: The stage that takes them, for a message.

        Raises:
            ConfigurationError: They do not have as many values.
        """
        alone = width if len(names) == 1 and width else 1
        tensors = [self.get(name, alone) for name in names]
        found = sum(tensor.shape[-1] for tensor in tensors)
        if width is not None and found != width:
            raise ConfigurationError(
                f"{user!r} takes {counted(width, 'value')} for each row, but the columns {', '.join(map(repr, names))} "
                f"have {found}: check the shape of the model's input. A column of vectors cannot be assembled with others."
            )
        return tensors[0] if len(tensors) == 1 else keras.ops.concatenate(tensors, axis=-1)


def _impute(stage: ImputerModel, names: Sequence[str], new: str, columns: _ColumnTensors) -> Any:
    (name,) = names
    values, missing = columns.get(name), stage.getMissingValue()
    surrogate = float(_surrogates(stage)[name])
    if columns.are(name, IntegralType):
        surrogate = float(int(surrogate))
    is_missing = keras.ops.isnan(values)
    if not math.isnan(missing):
        is_missing = keras.ops.logical_or(is_missing, keras.ops.equal(_rounded(values), np.float32(missing)))
    return keras.ops.where(is_missing, surrogate, values)


@functools.lru_cache(maxsize=1)
def _surrogates(stage: ImputerModel) -> dict[str, float]:
    """What replaces missing values of each column, of which Spark makes a job."""
    return stage.surrogateDF.collect()[0].asDict()


def _rounded(values: Any) -> Any:
    """Numbers as Keras's ``predict`` passes them, for comparisons that are to be the same in a call."""
    return keras.ops.cast(values, "float32")


def _index(stage: StringIndexerModel, names: Sequence[str], new: str, columns: _ColumnTensors) -> Any:
    labels = {made: list(each) for (_, made), each in zip(_makes(stage), stage.labelsArray, strict=True)}[new]
    (name,) = names
    if columns.are(name, NumericType):
        numbers = np.array(labels, "float64")
        exact = len(set(numbers.astype("float32"))) < len(labels)
        values = columns.get(name) if exact else _rounded(columns.get(name))
        equal = keras.ops.equal(values, keras.ops.convert_to_tensor(numbers, values.dtype))
        is_label, index = keras.ops.any(equal, axis=-1, keepdims=True), keras.ops.argmax(equal, axis=-1, keepdims=True)
    else:
        unknown = "[UNK]"
        while unknown in labels:
            unknown += "_"
        lookup = keras.layers.StringLookup(vocabulary=labels, oov_token=unknown)
        found = lookup(columns.get(name, dtype=STRING))
        is_label, index = keras.ops.greater(found, 0), found - 1
    other = float(len(labels)) if stage.getHandleInvalid() == "keep" else math.nan
    return keras.ops.where(is_label, keras.ops.cast(index, _NUMBERS), other)


def _one_hot(stage: OneHotEncoderModel, names: Sequence[str], new: str, columns: _ColumnTensors) -> Any:
    size = {made: each for (_, made), each in zip(_makes(stage), stage.categorySizes, strict=True)}[new]
    keeps, index = stage.getHandleInvalid() == "keep", columns.get(names[0])
    is_category = keras.ops.logical_and(index >= 0, index < size)
    category = keras.ops.cast(keras.ops.where(is_category, index, size), "int32")
    encoded = keras.ops.one_hot(category, size + 1, dtype=_NUMBERS)[:, 0, : size + keeps - stage.getDropLast()]
    return keras.ops.where(keras.ops.equal(index, index) if keeps else is_category, encoded, math.nan)


def _assemble(stage: VectorAssembler, names: Sequence[str], new: str, columns: _ColumnTensors) -> Any:
    return columns.together(names, None, stage)


def _scale(stage: StandardScalerModel, names: Sequence[str], new: str, columns: _ColumnTensors) -> Any:
    mean, deviation = stage.mean.toArray(), stage.std.toArray()
    values = columns.together(names, len(mean), stage)
    if stage.getWithMean():
        values = keras.layers.Rescaling(1.0, -mean, dtype=_NUMBERS)(values)
    if stage.getWithStd():
        factor = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation != 0)
        values = keras.layers.Rescaling(factor, dtype=_NUMBERS)(values)
    return values


_STAGES: dict[type, Callable[[Any, Sequence[str], str, _ColumnTensors], Any]] = {
    ImputerModel: _impute,
    StringIndexerModel: _index,
    OneHotEncoderModel: _one_hot,
    VectorAssembler: _assemble,
    StandardScalerModel: _scale,
}
"""What makes the tensor of a column, for each kind of stage, of the stage, the columns that it takes, and the new one."""


def _predictions(
    stage: KerasTransformer, model: keras.Model, given: Mapping[str, list[str]], columns: _ColumnTensors
) -> Any:
    """The outputs of the Keras model; NaN for a row with a feature that Spark rejects."""
    for param in ("loader", "batch_transform"):
        if stage.getOrDefault(param) is not None:
            raise ConfigurationError(f"{stage!r} has a {param}, which is code of Python: put it into the model as layers.")
    inputs, invalid = [], []
    for spec, tensor in zip(schema_of(model).inputs, input_tensors(model), strict=True):
        names, shape = given[spec.name], tensor.shape[1:]
        if None in shape or (spec.text and len(names) > 1):
            raise ConfigurationError(
                f"{stage!r}: the model's {spec.title} has rows of shape {shape}, of the columns {', '.join(names)}; "
                "expected a fixed shape, and one column of strings."
            )
        if spec.text:
            inputs.append(columns.get(names[0], dtype=STRING))
            continue
        values = columns.together(names, math.prod(shape), stage)
        is_valid = keras.ops.isfinite(keras.ops.cast(values, tensor.dtype) if spec.floating else values)
        if spec.indices is not None:
            is_valid = keras.ops.logical_and(is_valid, keras.ops.logical_and(values >= 0, values < spec.indices))
        invalid.append(keras.ops.any(keras.ops.logical_not(is_valid), axis=-1))
        numbers = keras.ops.cast(keras.ops.where(is_valid, values, 0.0), tensor.dtype)  # NaN is no integer
        inputs.append(keras.ops.reshape(numbers, (-1, *shape)))
    outputs = model(pack_inputs(model, inputs))
    return keras.tree.map_structure(lambda output: _without(output, invalid), outputs)


def _feature_columns(given: Any, schema: Schema) -> dict[str, list[str]]:
    """The columns of each input of the Keras model, from the param ``featuresCol``."""
    names = [spec.name for spec in schema.inputs]
    if isinstance(given, Mapping):
        found = by_name(given, schema.x)
    elif len(names) == 1:
        found = {names[0]: given or "features"}
    elif isinstance(given, (list, tuple)):
        if len(given) != len(names):
            raise ConfigurationError(f"featuresCol={list(given)!r}, but the model has {counted(len(names), 'input')}.")
        found = dict(zip(names, by_position("featuresCol", "input", given, names), strict=True))
    else:
        found = {name: name for name in names}
    return {name: [each] if isinstance(each, str) else list(each) for name, each in found.items()}


def _without(output: Any, invalid: Sequence[Any]) -> Any:
    """An output of the model with NaN in the rows in which one of these is true."""
    for each in invalid:
        output = keras.ops.where(keras.ops.reshape(each, (-1, *(1 for _ in output.shape[1:]))), math.nan, output)
    return output
