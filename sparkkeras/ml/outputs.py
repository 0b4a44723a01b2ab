"""The Spark ML columns for a model's outputs: raw predictions, probabilities and predictions.

Only one column per output comes from the model. The others are Spark expressions on it, so the model runs once for all.
So logits of a sigmoid or softmax are computed back from probabilities, and not taken from the layer before it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import pyarrow as pa
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, functions
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import ArrayType, DataType, DoubleType, StructField

from sparkkeras.errors import ConfigurationError, counted
from sparkkeras.ml.converters import Names
from sparkkeras.ml.params import KerasParams
from sparkkeras.modeling.outputs import Output, OutputTask, by_output, losses_of, names_by_output, outputs_of


@dataclass(frozen=True)
class OutputColumns:
    """The columns for one output of a model; a column with an empty name is omitted.

    Attributes:
        output: The output.
        units: The size of its last axis; ``None`` if that is not fixed.
        task: What it predicts.
        thresholds: One for each class; the class with the largest probability / threshold is predicted. ``None``: the class
            with the largest probability.
        as_vector: Whether the output's column is a vector if the output has one axis with several units.
        output_col: The name of the column for the model's output.
        raw_prediction: The name of the column for logits or log-probabilities.
        probability: The name of the column for probabilities.
        prediction: The name of the column for predictions.
    """

    output: Output
    units: int | None
    task: OutputTask
    thresholds: tuple[float, ...] | None
    as_vector: bool
    output_col: str
    raw_prediction: str
    probability: str
    prediction: str

    def __post_init__(self) -> None:
        """Check that the thresholds fit the output.

        Raises:
            ConfigurationError: The task is neither binary nor multiclass, or the number of classes differs.
        """
        if self.thresholds is None:
            return
        if self.task.name not in ("binary", "multiclass"):
            raise ConfigurationError(
                f"thresholds={list(self.thresholds)}: the task of the output {self.output.name!r} is {self.task.name!r}; "
                "expected 'binary' or 'multiclass', where one class is predicted. Leave thresholds out, or set task."
            )
        if self._classes is not None and len(self.thresholds) != self._classes:
            raise ConfigurationError(
                f"thresholds={list(self.thresholds)}: {counted(len(self.thresholds), 'value')} for the output "
                f"{self.output.name!r}, which has {counted(self._classes, 'class')}; expected one threshold for each class, "
                "in class order."
            )

    def fields(self) -> list[StructField]:
        """The schema fields of the columns."""
        return [field for field, _ in self._columns()]

    def expressions(self, scored: Column) -> list[Column]:
        """The columns as Spark expressions on ``scored``, the column with the model's output."""
        return [make(scored).alias(field.name, metadata=field.metadata) for field, make in self._columns()]

    def _columns(self) -> list[tuple[StructField, Callable[[Column], Column]]]:
        """The columns that have a name and that the task has: their schema fields, and how they are computed."""
        task, classes = self.task.name, self._classes
        known = {} if classes is None else {"ml_attr": {"num_attrs": classes}}
        output: tuple[DataType, dict[str, Any], Callable[[Column], Column]]
        if self.output.rank == 0:
            output = DoubleType(), {}, _as_double
        elif self.as_vector and self.output.rank == 1:
            output = VectorUDT(), known, as_vector
        else:
            output = _stored_type(self.output), {}, lambda scored: scored
        found = [(self.output_col, *output)]
        if task in ("binary", "multiclass", "multilabel"):
            found.append((self.raw_prediction, VectorUDT(), known, self._raw_prediction))
            found.append((self.probability, VectorUDT(), known, self._probability))
        if task in ("binary", "multiclass"):  # with the metadata that Spark's classifiers put on this column
            nominal = {"type": "nominal"} | ({} if classes is None else {"num_vals": classes})
            found.append((self.prediction, DoubleType(), {"ml_attr": nominal}, self._prediction))
        elif task == "multilabel":
            found.append((self.prediction, ArrayType(DoubleType()), {}, self._prediction))
        elif task == "regression":
            found.append((self.prediction, DoubleType(), {}, _as_double))
        return [(StructField(name, kind, True, metadata), make) for name, kind, metadata, make in found if name]

    @property
    def _classes(self) -> int | None:
        return 2 if self.task.name == "binary" else self.units

    def _raw_prediction(self, scored: Column) -> Column:
        """Logits, from the model or by inverting a sigmoid; for a softmax the logarithms of its probabilities."""
        if self.task.name == "binary":
            logit = self._logit(_as_double(scored))
            return as_vector(functions.when(scored.isNotNull(), functions.array(-logit, logit)))
        numbers = self._numbers(scored)
        if self.task.name == "multilabel":
            return as_vector(functions.transform(numbers, self._logit))
        return as_vector(numbers if self.task.from_logits else functions.transform(numbers, _log))

    def _probability(self, scored: Column) -> Column:
        return as_vector(self._class_probabilities(scored))

    def _prediction(self, scored: Column) -> Column:
        """The predicted class, or null where the output is NaN."""
        # Spark orders NaN above all numbers, so the class with NaN would be predicted.
        has_nan = functions.exists(scored, functions.isnan) if self.output.rank else functions.isnan(scored)
        return functions.when(~has_nan, self._predicted_class(scored))

    def _predicted_class(self, scored: Column) -> Column:
        """The class index, or for multilabel an array of label indices."""
        if self.thresholds is not None:
            return _let(_over_thresholds(self._class_probabilities(scored), self.thresholds), _argmax)
        if self.task.name == "binary":
            return (self._sigmoid(_as_double(scored)) > 0.5).cast("double")
        if self.task.name == "multiclass":
            return _argmax(scored)

        def index_if_set(p: Column, index: Column) -> Column:
            return functions.when(p > 0.5, index.cast("double"))

        indices = functions.transform(self._class_probabilities(scored), index_if_set)
        return functions.filter(indices, lambda index: index.isNotNull())

    def _sigmoid(self, value: Column) -> Column:
        """The probability for one unit: the sigmoid of a logit; a probability stays as it is."""
        return 1 / (1 + functions.exp(-value)) if self.task.from_logits else value

    def _logit(self, value: Column) -> Column:
        """The logit for one unit: the inverse sigmoid of a probability; a logit stays as it is."""
        return value if self.task.from_logits else _log(value) - _log(1 - value)

    def _class_probabilities(self, scored: Column) -> Column:
        """The probabilities of the classes or labels, an array<double>."""
        if self.task.name == "binary":
            p = self._sigmoid(_as_double(scored))
            return functions.when(scored.isNotNull(), functions.array(1 - p, p))
        numbers = self._numbers(scored)
        if not self.task.from_logits:
            return numbers
        if self.task.name == "multilabel":
            return functions.transform(numbers, self._sigmoid)
        return _softmax(numbers)

    def _numbers(self, scored: Column) -> Column:
        """The model's output as an array<double>, also where it is a single number."""
        numbers = functions.when(scored.isNotNull(), functions.array(scored)) if self.output.rank == 0 else scored
        return numbers.cast("array<double>")


def columns_of(params: KerasParams, model: keras.Model) -> list[OutputColumns]:
    """The columns for each output of a model, from the params of an estimator or a transformer.

    Raises:
        ModelError: The model does not declare its outputs.
        ConfigurationError: Names, tasks or thresholds do not fit the outputs.
    """
    get, outputs = params.getOrDefault, outputs_of(model)
    ends, thresholds = [output.name for output in outputs], get("thresholds")
    if thresholds is not None and not isinstance(thresholds, Mapping) and len(ends) > 1:
        raise ConfigurationError(
            f"thresholds={thresholds!r}: the model has the outputs {ends}; expected {{output name: thresholds}}."
        )
    tasks, limits = by_output("task", get("task"), ends, "auto"), by_output("thresholds", thresholds, ends, None)
    names = [_names(each, get(each), ends) for each in KerasParams._new_columns]
    found = []
    for output, tensor, loss, task, limit, *named in zip(
        outputs, model.outputs, losses_of(model, ends), tasks, limits, *names, strict=True
    ):
        shape = tuple(tensor.shape[1:])
        predicts = OutputTask.of(loss, output, shape, task)
        units = shape[-1] if shape else 1
        given = None if limit is None else tuple(limit)
        found.append(OutputColumns(output, units, predicts, given, get("outputType") == "vector", *named))
    return found


def _names(param: str, given: Names, outputs: Sequence[str]) -> list[str]:
    names = names_by_output(param, given, outputs)
    if len(names) != len(outputs):
        raise ConfigurationError(
            f"{param}={given!r}: expected {counted(len(outputs), 'name')}, one for each of {list(outputs)}."
        )
    return names


def _as_double(scored: Column) -> Column:
    return scored.cast("double")


def as_vector(numbers: Column) -> Column:
    """Convert an array of numbers to a vector. Null stays null; Spark's ``array_to_vector`` fails on it."""
    return functions.when(numbers.isNotNull(), array_to_vector(numbers))


def _stored_type(output: Output) -> DataType:
    kind = from_arrow_type(pa.from_numpy_dtype(output.dtype))
    for _ in range(output.rank):
        kind = ArrayType(kind)
    return kind


def _log(value: Column) -> Column:
    """The natural logarithm, clipped at the smallest positive double, since Spark's log(0) is null. NaN stays NaN."""
    return functions.log(functions.greatest(value, functions.lit(sys.float_info.min)))


def _argmax(numbers: Column) -> Column:
    """The index of the largest number as a double; the first of equal ones."""
    return (functions.array_position(numbers, functions.array_max(numbers)) - 1).cast("double")


def _over_thresholds(probabilities: Column, thresholds: Sequence[float]) -> Column:
    """Each probability divided by its threshold, as in Spark's classifiers: p/0 is infinite, 0/0 is never the largest."""

    def ratio(p: Column, threshold: Column) -> Column:  # in ANSI mode Spark raises on a division by 0
        return (
            functions.when(threshold > 0, p / threshold)
            .when(p > 0, functions.lit(math.inf))
            .otherwise(functions.lit(-math.inf))
        )

    return functions.zip_with(probabilities, functions.array(*map(functions.lit, thresholds)), ratio)


def _softmax(numbers: Column) -> Column:
    """The softmax of an array of doubles, shifted by the maximum so that no exponential overflows."""

    def shifted(largest: Column) -> Column:
        return functions.transform(numbers, lambda number: functions.exp(number - largest))

    def normalized(powers: Column) -> Column:
        total = functions.aggregate(powers, functions.lit(0.0), lambda total, power: total + power)
        return _let(total, lambda total: functions.transform(powers, lambda power: power / total))

    return _let(_let(functions.array_max(numbers), shifted), normalized)


def _let(value: Column, body: Callable[[Column], Column]) -> Column:
    """Bind ``value`` in the expression ``body``, so that Spark computes it once and not for each element of an array."""
    return functions.transform(functions.array(value), body)[0]
