"""`fuse`: a fitted pipeline of Spark ML as one Keras model, which needs no Spark to predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from pyspark.ml import PipelineModel
from pyspark.ml.feature import ImputerModel, OneHotEncoderModel, StandardScalerModel, StringIndexerModel, VectorAssembler
from pyspark.sql.types import IntegralType, StructType

from sparkkeras.data.block import by_name, describe
from sparkkeras.data.schema import Schema
from sparkkeras.data.text import STRING
from sparkkeras.errors import ConfigurationError, counted
from sparkkeras.ml.transformer import KerasTransformer, SchemaFrame
from sparkkeras.modeling.schema import has_strings, input_tensors, pack_inputs, schema_of
from sparkkeras.worker import device

_NUMBERS = device.widest_float()
"""The dtype of columns of numbers: Spark's, unless the backend has none with as many bits."""


def fuse(pipeline: PipelineModel, schema: Any = None) -> keras.Model:
    """Make one Keras model of a fitted pipeline that ends with a `KerasTransformer`.

    The model takes the columns that the pipeline takes, as a dict of arrays of shape (rows, 1), and returns what the
    pipeline's ``outputCol`` holds. It is a functional model of Keras's own layers, without loss: ``model.save`` and
    ``model.export`` make files that need neither Spark nor sparkkeras.

    Stages before the last one may be ``Imputer``, ``StringIndexer``, ``OneHotEncoder``, ``VectorAssembler`` and
    ``StandardScaler``. Strings need the backend TensorFlow.

    A null is NaN in a column of numbers, and any value that is no label in a column of strings. The prediction is NaN for a
    row that the pipeline rejects or drops, such as one with a label that a ``StringIndexer`` does not keep. Keras's
    ``predict`` converts numbers to float32 first; call the model with tensors of float64 where these are too coarse, such
    as for timestamps.

    Args:
        pipeline: The fitted pipeline.
        schema: A DataFrame, or its schema, with the columns that the pipeline takes. It is needed for an ``Imputer`` of
            integers, which Spark imputes with integers. Default: columns of numbers are floating-point ones.

    Returns:
        The model. It shares the weights of the pipeline's Keras model.

    Raises:
        ConfigurationError: A stage cannot become layers.
        ModelError: The ``KerasTransformer`` has no model.

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
    columns = _ColumnTensors(None if schema is None else SchemaFrame.of(schema).schema)
    for stage in stages:
        add = next((function for kind, function in _STAGES.items() if isinstance(stage, kind)), None)
        if add is None:
            names = ", ".join(kind.__name__ for kind in _STAGES)
            raise ConfigurationError(f"the stage {stage!r} cannot become layers of Keras; expected one of {names}.")
        add(stage, columns)
    outputs = _predictions(last, columns)
    return keras.Model(columns.inputs, outputs)


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
        self._integers = {each.name.lower() for each in schema or () if isinstance(each.dataType, IntegralType)}

    def __setitem__(self, name: str, tensor: Any) -> None:
        self._made[name.lower()] = tensor

    def get(self, name: str, width: int = 1, dtype: str = _NUMBERS) -> Any:
        """The tensor of a column: a new input if no stage has made it.

        Raises:
            ConfigurationError: It is a column of strings for one stage, and one of numbers for another.
        """
        if name.lower() not in self._made:
            if dtype == STRING and not has_strings():
                raise ConfigurationError(
                    f"the column {name!r} holds strings, which models with the backend {keras.backend.backend()!r} cannot "
                    "take: set KERAS_BACKEND=tensorflow before you import Keras, and load the pipeline."
                )
            self[name] = self.inputs[name] = keras.Input((width,), name=name.replace("/", "_"), dtype=dtype)
        tensor = self._made[name.lower()]
        if (tensor.dtype == STRING) != (dtype == STRING):
            raise ConfigurationError(
                f"the column {name!r} is used both as strings and as numbers: give the stages columns of their own."
            )
        return tensor

    def is_integer(self, name: str) -> bool:
        """Whether the schema says that it holds integers."""
        return name.lower() in self._integers

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
                f"have {found} here: a column that holds vectors cannot be assembled with others, so assemble numbers."
            )
        return tensors[0] if len(tensors) == 1 else keras.ops.concatenate(tensors, axis=-1)


def _pairs(stage: Any) -> list[tuple[str, str]]:
    """The input and output columns of a stage, which has one or several."""
    if stage.isDefined("inputCols"):
        return list(zip(stage.getInputCols(), stage.getOutputCols(), strict=True))
    return [(stage.getInputCol(), stage.getOutputCol())]


def _impute(stage: ImputerModel, columns: _ColumnTensors) -> None:
    surrogates, missing = stage.surrogateDF.collect()[0].asDict(), stage.getMissingValue()
    for name, new in _pairs(stage):
        values, surrogate = columns.get(name), float(surrogates[name])
        if columns.is_integer(name):
            surrogate = float(int(surrogate))
        is_missing = keras.ops.isnan(values)
        if not math.isnan(missing):
            is_missing = keras.ops.logical_or(is_missing, keras.ops.equal(values, missing))
        columns[new] = keras.ops.where(is_missing, surrogate, values)


def _index(stage: StringIndexerModel, columns: _ColumnTensors) -> None:
    for (name, new), labels in zip(_pairs(stage), stage.labelsArray, strict=True):
        unknown = "[UNK]"
        while unknown in labels:
            unknown += "_"
        lookup = keras.layers.StringLookup(vocabulary=list(labels), oov_token=unknown)
        found = lookup(columns.get(name, dtype=STRING))  # 0: not a label
        other = float(len(labels)) if stage.getHandleInvalid() == "keep" else math.nan
        columns[new] = keras.ops.where(keras.ops.equal(found, 0), other, keras.ops.cast(found - 1, _NUMBERS))


def _one_hot(stage: OneHotEncoderModel, columns: _ColumnTensors) -> None:
    keeps = stage.getHandleInvalid() == "keep"
    for (name, new), size in zip(_pairs(stage), stage.categorySizes, strict=True):
        index = columns.get(name)
        category = keras.ops.cast(keras.ops.where(index < size, index, size), "int32")  # also of NaN
        encoded = keras.ops.one_hot(category, size + 1, dtype=_NUMBERS)[:, 0, : size + keeps - stage.getDropLast()]
        is_known = keras.ops.equal(index, index) if keeps else index < size
        columns[new] = keras.ops.where(is_known, encoded, math.nan)


def _assemble(stage: VectorAssembler, columns: _ColumnTensors) -> None:
    columns[stage.getOutputCol()] = columns.together(stage.getInputCols(), None, stage)


def _scale(stage: StandardScalerModel, columns: _ColumnTensors) -> None:
    mean, deviation = stage.mean.toArray(), stage.std.toArray()
    values = columns.together([stage.getInputCol()], len(mean), stage)
    if stage.getWithMean():
        values = keras.layers.Rescaling(1.0, -mean, dtype=_NUMBERS)(values)
    if stage.getWithStd():
        factor = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation != 0)
        values = keras.layers.Rescaling(factor, dtype=_NUMBERS)(values)
    columns[stage.getOutputCol()] = values


_STAGES: dict[type, Callable[[Any, _ColumnTensors], None]] = {
    ImputerModel: _impute,
    StringIndexerModel: _index,
    OneHotEncoderModel: _one_hot,
    VectorAssembler: _assemble,
    StandardScalerModel: _scale,
}
"""What adds the columns that a stage makes, for each kind of stage."""


def _predictions(stage: KerasTransformer, columns: _ColumnTensors) -> Any:
    """The outputs of the Keras model; NaN for a row with a feature that is NaN, which has no prediction in Spark."""
    model = stage.get_model()
    for param in ("loader", "batch_transform"):
        if stage.getOrDefault(param) is not None:
            raise ConfigurationError(f"{stage!r} has a {param}, which is code of Python: put it into the model as layers.")
    schema, inputs, are_nan = schema_of(model), [], []
    given = _feature_columns(stage.getOrDefault("featuresCol"), schema)
    for spec, tensor in zip(schema.inputs, input_tensors(model), strict=True):
        names, shape = given[spec.name], tensor.shape[1:]
        if spec.text:
            inputs.append(columns.get(names[0], dtype=STRING))
            continue
        if None in shape:
            raise ConfigurationError(
                f"{stage!r}: the model's {spec.title} has rows of shape {shape}; expected a fixed shape."
            )
        values = columns.together(names, math.prod(shape), stage)
        is_nan = keras.ops.isnan(values)
        are_nan.append(keras.ops.any(is_nan, axis=-1))
        numbers = keras.ops.cast(keras.ops.where(is_nan, 0.0, values), tensor.dtype)  # NaN is no integer
        inputs.append(keras.ops.reshape(numbers, (-1, *shape)))
    outputs = model(pack_inputs(model, inputs))
    return keras.tree.map_structure(lambda output: _without(output, are_nan), outputs)


def _feature_columns(given: Any, schema: Schema) -> dict[str, list[str]]:
    """The columns of each input of the Keras model, from the param ``featuresCol``."""
    names = [spec.name for spec in schema.inputs]
    if isinstance(given, Mapping):
        found = by_name(given, schema.x)
    elif len(names) == 1:
        found = {names[0]: given or "features"}
    elif isinstance(given, (list, tuple)):
        found = dict(zip(names, given, strict=True))
    else:
        found = {name: name for name in names}
    return {name: [each] if isinstance(each, str) else list(each) for name, each in found.items()}


def _without(output: Any, are_nan: Sequence[Any]) -> Any:
    """An output of the model with NaN in the rows in which one of these is true."""
    for is_nan in are_nan:
        output = keras.ops.where(keras.ops.reshape(is_nan, (-1, *(1 for _ in output.shape[1:]))), math.nan, output)
    return output
