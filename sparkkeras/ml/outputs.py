"""The Spark ML columns for a model's outputs: raw predictions, probabilities and predictions.

Only one column per output comes from the model. The others are Spark expressions on it, so the model runs once for all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras

from sparkkeras.data.block import in_column_name
from sparkkeras.errors import ConfigurationError, counted, known_names
from sparkkeras.ml.converters import Names, Thresholds
from sparkkeras.ml.params import KerasParams
from sparkkeras.modeling.outputs import Output, OutputTask, losses_of, outputs_of

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructField


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

    def without_missing(self) -> OutputColumns:
        """A copy without the names of columns that the task does not have."""
        name = self.task.name
        classifies = name in ("binary", "multiclass", "multilabel")
        return replace(
            self,
            raw_prediction=self.raw_prediction if classifies else "",
            probability=self.probability if classifies else "",
            prediction=self.prediction if name is not None else "",
        )

    def check_thresholds(self) -> None:
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

    def fields(self) -> Iterator[StructField]:
        """The schema fields of the columns."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import ArrayType, DoubleType, StructField

        if self.output_col:
            kind, metadata = self._output_type()
            yield StructField(self.output_col, kind, True, metadata)
        if self.raw_prediction:
            yield StructField(self.raw_prediction, VectorUDT(), True, _vector_metadata(self._classes))
        if self.probability:
            yield StructField(self.probability, VectorUDT(), True, _vector_metadata(self._classes))
        if self.prediction:
            many = self.task.name == "multilabel"
            kind = ArrayType(DoubleType()) if many else DoubleType()
            yield StructField(self.prediction, kind, True, self._class_metadata())

    def expressions(self, scored: Column) -> list[Column]:
        """The columns as Spark expressions on ``scored``, the column with the model's output."""
        found = {
            self.output_col: self._output,
            self.raw_prediction: self._raw_prediction,
            self.probability: self._probability,
            self.prediction: self._prediction,
        }
        return [found[field.name](scored).alias(field.name, metadata=field.metadata) for field in self.fields()]

    def _output_type(self) -> tuple[DataType, dict[str, Any]]:
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import DoubleType

        if self.output.rank == 0:
            return DoubleType(), {}
        if self.as_vector and self.output.rank == 1:
            return VectorUDT(), _vector_metadata(self.units)
        return _stored_type(self.output), {}

    @property
    def _classes(self) -> int | None:
        return 2 if self.task.name == "binary" else self.units

    def _class_metadata(self) -> dict[str, Any]:
        """The metadata that Spark's classifiers put on their prediction column."""
        if self.task.name not in ("binary", "multiclass"):
            return {}
        known = {} if self._classes is None else {"num_vals": self._classes}
        return {"ml_attr": {**known, "type": "nominal"}}

    def _output(self, scored: Column) -> Column:
        if self.output.rank == 0:
            return scored.cast("double")
        return as_vector(scored) if self.as_vector and self.output.rank == 1 else scored

    def _raw_prediction(self, scored: Column) -> Column:
        """Logits, from the model or by inverting a sigmoid; for a softmax the logarithms of its probabilities."""
        from pyspark.sql import functions

        if self.task.name == "binary":
            logit = self._logit(scored.cast("double"))
            return as_vector(functions.when(scored.isNotNull(), functions.array(-logit, logit)))
        numbers = self._numbers(scored)
        if self.task.name == "multilabel":
            return as_vector(functions.transform(numbers, self._logit))
        return as_vector(numbers if self.task.from_logits else functions.transform(numbers, _log))

    def _probability(self, scored: Column) -> Column:
        return as_vector(self._class_probabilities(scored))

    def _prediction(self, scored: Column) -> Column:
        from pyspark.sql import functions

        if self.task.name == "regression":
            return scored.cast("double")
        # Spark orders NaN above all numbers, so the class with NaN would be predicted.
        has_nan = functions.exists(scored, functions.isnan) if self.output.rank else functions.isnan(scored)
        return functions.when(~has_nan, self._predicted_class(scored))

    def _predicted_class(self, scored: Column) -> Column:
        """The class index, or for multilabel an array of label indices."""
        from pyspark.sql import functions

        if self.thresholds is not None:
            return _let(_over_thresholds(self._class_probabilities(scored), self.thresholds), _argmax)
        if self.task.name == "binary":
            return (self._sigmoid(scored.cast("double")) > 0.5).cast("double")
        if self.task.name == "multiclass":
            return _argmax(scored)

        def index_if_set(p: Column, index: Column) -> Column:
            return functions.when(p > 0.5, index.cast("double"))

        indices = functions.transform(self._class_probabilities(scored), index_if_set)
        return functions.filter(indices, lambda index: index.isNotNull())

    def _sigmoid(self, value: Column) -> Column:
        """The probability for one unit: the sigmoid of a logit; a probability stays as it is."""
        from pyspark.sql import functions

        return 1 / (1 + functions.exp(-value)) if self.task.from_logits else value

    def _logit(self, value: Column) -> Column:
        """The logit for one unit: the inverse sigmoid of a probability; a logit stays as it is."""
        return value if self.task.from_logits else _log(value) - _log(1 - value)

    def _class_probabilities(self, scored: Column) -> Column:
        """The probabilities of the classes or labels, an array<double>."""
        from pyspark.sql import functions

        if self.task.name == "binary":
            p = self._sigmoid(scored.cast("double"))
            return functions.when(scored.isNotNull(), functions.array(1 - p, p))
        numbers = self._numbers(scored)
        if not self.task.from_logits:
            return numbers
        if self.task.name == "multilabel":
            return functions.transform(numbers, self._sigmoid)
        return _softmax(numbers)

    def _numbers(self, scored: Column) -> Column:
        """The model's output as an array<double>, also where it is a single number."""
        from pyspark.sql import functions

        numbers = functions.when(scored.isNotNull(), functions.array(scored)) if self.output.rank == 0 else scored
        return numbers.cast("array<double>")


def columns_of(params: KerasParams, model: keras.Model) -> list[OutputColumns]:
    """The columns for each output of a model, from the params of an estimator or a transformer.

    Raises:
        ModelError: The model does not declare its outputs.
        ConfigurationError: Names, tasks or thresholds do not fit the outputs.
    """
    get, outputs = params.getOrDefault, outputs_of(model)
    ends, task = [output.name for output in outputs], get("task")
    if isinstance(task, Mapping):
        _check_keys("task", task, ends)
        tasks = [task.get(end, "auto") for end in ends]
    else:
        tasks = [task] * len(ends)
    named = [_by_output(each, get(each), ends) for each in KerasParams._new_columns]
    limits = _thresholds_of(get("thresholds"), ends)
    found = []
    for index, (output, tensor, loss) in enumerate(zip(outputs, model.outputs, losses_of(model, ends), strict=True)):
        shape = tuple(tensor.shape[1:])
        predicts = OutputTask.of(loss, output, shape, tasks[index])
        names = [each[index] for each in named]
        units = shape[-1] if shape else 1
        limit = limits.get(output.name)
        columns = OutputColumns(output, units, predicts, limit, get("outputType") == "vector", *names)
        columns.check_thresholds()
        found.append(columns.without_missing())
    return found


def as_vector(numbers: Column) -> Column:
    """Convert an array of numbers to a vector. Null stays null; Spark's ``array_to_vector`` fails on it."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions

    return functions.when(numbers.isNotNull(), array_to_vector(numbers))


def _by_output(param: str, given: Names, outputs: Sequence[str]) -> list[str]:
    if isinstance(given, str):
        return [given] if len(outputs) == 1 else [given and f"{given}_{in_column_name(name)}" for name in outputs]
    if isinstance(given, Mapping):
        _check_keys(param, given, outputs)
        return [given.get(name, "") for name in outputs]
    if len(given) != len(outputs):
        raise ConfigurationError(
            f"{param}={given!r}: expected {counted(len(outputs), 'name')}, one for each of {list(outputs)}."
        )
    return list(given)


def _thresholds_of(given: Thresholds | None, outputs: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The thresholds by output name, for the outputs that have any."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        _check_keys("thresholds", given, outputs)
        return {name: tuple(values) for name, values in given.items()}
    if len(outputs) > 1:
        raise ConfigurationError(
            f"thresholds={given!r}: the model has the outputs {list(outputs)}; expected {{output name: thresholds}}."
        )
    return {outputs[0]: tuple(given)}


def _check_keys(param: str, given: Mapping[str, Any], outputs: Sequence[str]) -> None:
    for name in given:
        if name not in outputs:
            raise ConfigurationError(f"{param}: the model has no output {name!r}. {known_names(name, outputs)}")


def _vector_metadata(size: int | None) -> dict[str, Any]:
    return {} if size is None else {"ml_attr": {"num_attrs": size}}


def _stored_type(output: Output) -> DataType:
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import ArrayType

    kind = from_arrow_type(pa.from_numpy_dtype(output.dtype))
    for _ in range(output.rank):
        kind = ArrayType(kind)
    return kind


def _log(value: Column) -> Column:
    """The natural logarithm, clipped at the smallest positive double, since Spark's log(0) is null. NaN stays NaN."""
    from pyspark.sql import functions

    return functions.log(functions.greatest(value, functions.lit(sys.float_info.min)))


def _argmax(numbers: Column) -> Column:
    """The index of the largest number as a double; the first of equal ones."""
    from pyspark.sql import functions

    return (functions.array_position(numbers, functions.array_max(numbers)) - 1).cast("double")


def _over_thresholds(probabilities: Column, thresholds: Sequence[float]) -> Column:
    """Each probability divided by its threshold, as in Spark's classifiers: p/0 is infinite, 0/0 is never the largest."""
    from pyspark.sql import functions

    def ratio(p: Column, threshold: Column) -> Column:  # in ANSI mode Spark raises on a division by 0
        return (
            functions.when(threshold > 0, p / threshold)
            .when(p > 0, functions.lit(math.inf))
            .otherwise(functions.lit(-math.inf))
        )

    return functions.zip_with(probabilities, functions.array(*map(functions.lit, thresholds)), ratio)


def _softmax(numbers: Column) -> Column:
    """The softmax of an array of doubles, shifted by the maximum so that no exponential overflows."""
    from pyspark.sql import functions

    def shifted(largest: Column) -> Column:
        return functions.transform(numbers, lambda number: functions.exp(number - largest))

    def normalized(powers: Column) -> Column:
        total = functions.aggregate(powers, functions.lit(0.0), lambda total, power: total + power)
        return _let(total, lambda total: functions.transform(powers, lambda power: power / total))

    return _let(_let(functions.array_max(numbers), shifted), normalized)


def _let(value: Column, body: Callable[[Column], Column]) -> Column:
    """Bind ``value`` in the expression ``body``, so that Spark computes it once and not for each element of an array."""
    from pyspark.sql import functions

    return functions.transform(functions.array(value), body)[0]
