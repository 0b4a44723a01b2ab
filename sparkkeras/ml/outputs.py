"""What a model's outputs mean, and the columns that Spark ML wants of them.

One column comes from the model. The others (raw predictions, probabilities, predictions) are Spark expressions on it, so the
model runs once for all of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.ml.values import Names, Thresholds
from sparkkeras.modeling.outputs import Output, OutputTask, losses_of, outputs_of

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructField


@dataclass(frozen=True)
class OutputColumns:
    """The columns that one output of a model becomes; a column without a name is left out.

    Attributes:
        output: The output.
        units: How many values it has; ``None`` where that is open.
        task: What they predict.
        thresholds: What each class's probability is divided by before the largest is taken; ``None``: nothing.
        as_vector: Whether the output's column is a vector where there are several units on one axis.
        output_col: The name of the column of the model's own output.
        raw_prediction: The name of the column of logits, or of the logarithms of probabilities.
        probability: The name of the column of probabilities.
        prediction: The name of the column of predictions.
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
        """The same with names for those columns only that the output has."""
        name = self.task.name
        classifies = name in ("binary", "multiclass", "multilabel")
        return replace(
            self,
            raw_prediction=self.raw_prediction if classifies else "",
            probability=self.probability if classifies else "",
            prediction=self.prediction if name is not None else "",
        )

    def check_thresholds(self) -> None:
        """Refuse thresholds that do not fit the output.

        Raises:
            ConfigurationError: The output does not choose one class of several, or has another number of classes.
        """
        if self.thresholds is None:
            return
        if self.task.name not in ("binary", "multiclass"):
            raise ConfigurationError(
                f"thresholds={list(self.thresholds)}: the task of the output {self.output.name!r} is {self.task.name!r}; "
                "expected 'binary' or 'multiclass', where one class is predicted. Leave thresholds out, or say task=."
            )
        if self._classes is not None and len(self.thresholds) != self._classes:
            raise ConfigurationError(
                f"thresholds={list(self.thresholds)}: {len(self.thresholds)} value(s) for the output {self.output.name!r}, "
                f"which has {self._classes} classes; expected one threshold for each class, in their order."
            )

    def fields(self) -> Iterator[StructField]:
        """The columns, as a schema has them."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import ArrayType, DoubleType, StructField

        if self.output_col:
            kind, metadata = self._output_type()
            yield StructField(self.output_col, kind, True, metadata)
        if self.raw_prediction:
            yield StructField(self.raw_prediction, VectorUDT(), True, _vector_of(self._classes))
        if self.probability:
            yield StructField(self.probability, VectorUDT(), True, _vector_of(self._classes))
        if self.prediction:
            many = self.task.name == "multilabel"
            kind = ArrayType(DoubleType()) if many else DoubleType()
            yield StructField(self.prediction, kind, True, self._nominal())

    def expressions(self, scored: Column) -> list[Column]:
        """The columns, made of the column that the model gave."""
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
            return VectorUDT(), _vector_of(self.units)
        return _stored_type(self.output), {}

    @property
    def _classes(self) -> int | None:
        return 2 if self.task.name == "binary" else self.units

    def _nominal(self) -> dict[str, Any]:
        """What Spark's classifiers note of their predictions."""
        if self.task.name not in ("binary", "multiclass"):
            return {}
        known = {} if self._classes is None else {"num_vals": self._classes}
        return {"ml_attr": {**known, "type": "nominal"}}

    def _output(self, scored: Column) -> Column:
        if self.output.rank == 0:
            return scored.cast("double")
        return as_vector(scored) if self.as_vector and self.output.rank == 1 else scored

    def _raw_prediction(self, scored: Column) -> Column:
        """Logits where the model gives them or a sigmoid can be undone, else the logarithms of the probabilities."""
        from pyspark.sql import functions

        if self.task.name == "binary":
            logit = self._logit(scored.cast("double"))
            return as_vector(functions.when(scored.isNotNull(), functions.array(-logit, logit)))
        numbers = self._numbers(scored)
        if self.task.name == "multilabel":
            return as_vector(functions.transform(numbers, self._logit))
        return as_vector(numbers if self.task.from_logits else functions.transform(numbers, _log))

    def _probability(self, scored: Column) -> Column:
        return as_vector(self._chances(scored))

    def _prediction(self, scored: Column) -> Column:
        from pyspark.sql import functions

        if self.task.name == "regression":
            return scored.cast("double")
        # Spark orders NaN above all numbers, which would make it the surest class.
        has_nan = functions.exists(scored, functions.isnan) if self.output.rank else functions.isnan(scored)
        return functions.when(~has_nan, self._class(scored))

    def _class(self, scored: Column) -> Column:
        """The number of the class, or those of the labels."""
        from pyspark.sql import functions

        if self.thresholds is not None:
            return _let(_over(self._chances(scored), self.thresholds), _largest)
        if self.task.name == "binary":
            return (self._chance(scored.cast("double")) > 0.5).cast("double")
        if self.task.name == "multiclass":
            return _largest(scored)

        def number(chance: Column, place: Column) -> Column:
            return functions.when(chance > 0.5, place.cast("double"))

        return functions.filter(functions.transform(self._chances(scored), number), lambda found: found.isNotNull())

    def _chance(self, value: Column) -> Column:
        from pyspark.sql import functions

        return 1 / (1 + functions.exp(-value)) if self.task.from_logits else value

    def _logit(self, value: Column) -> Column:
        return value if self.task.from_logits else _log(value) - _log(1 - value)

    def _chances(self, scored: Column) -> Column:
        """The probabilities of the classes or labels, array<double>."""
        from pyspark.sql import functions

        if self.task.name == "binary":
            chance = self._chance(scored.cast("double"))
            return functions.when(scored.isNotNull(), functions.array(1 - chance, chance))
        numbers = self._numbers(scored)
        if not self.task.from_logits:
            return numbers
        if self.task.name == "multilabel":
            return functions.transform(numbers, self._chance)
        return _softmax(numbers)

    def _numbers(self, scored: Column) -> Column:
        """What the model gives, array<double>, also where it is one number."""
        from pyspark.sql import functions

        numbers = functions.when(scored.isNotNull(), functions.array(scored)) if self.output.rank == 0 else scored
        return numbers.cast("array<double>")


def columns_of(
    model: keras.Model,
    *,
    task: str | Mapping[str, str],
    output_type: str,
    output_col: Names,
    raw_prediction: Names,
    probability: Names,
    prediction: Names,
    thresholds: Thresholds | None = None,
) -> list[OutputColumns]:
    """The columns that a model's outputs become.

    Args:
        model: The model.
        task: What its outputs mean, or what each of them means by name.
        output_type: ``"array"`` or ``"vector"``.
        output_col: What the param ``outputCol`` says.
        raw_prediction: What the param ``rawPredictionCol`` says.
        probability: What the param ``probabilityCol`` says.
        prediction: What the param ``predictionCol`` says.
        thresholds: What the param ``thresholds`` says.

    Raises:
        ModelError: The model does not say what it gives.
        ConfigurationError: Names, tasks or thresholds do not fit its outputs.
    """
    outputs = outputs_of(model)
    ends = [output.name for output in outputs]
    if isinstance(task, Mapping):
        _check_keys("task", task, ends)
        tasks = [task.get(end, "auto") for end in ends]
    else:
        tasks = [task] * len(ends)
    given = {"outputCol": output_col, "rawPredictionCol": raw_prediction, "probabilityCol": probability}
    named = [_by_output(*each, ends) for each in (given | {"predictionCol": prediction}).items()]
    limits = _thresholds_of(thresholds, ends)
    found = []
    for index, (output, tensor, loss) in enumerate(zip(outputs, model.outputs, losses_of(model, ends), strict=True)):
        shape = tuple(tensor.shape[1:])
        predicts = OutputTask.of(loss, output, shape, tasks[index])
        names = [each[index] for each in named]
        units = shape[-1] if shape else 1
        limit = limits.get(output.name)
        columns = OutputColumns(output, units, predicts, limit, output_type == "vector", *names)
        columns.check_thresholds()
        found.append(columns.without_missing())
    return found


def as_vector(numbers: Column) -> Column:
    """An array of numbers as a vector; null stays null, which Spark's own function does not take."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions

    return functions.when(numbers.isNotNull(), array_to_vector(numbers))


def _by_output(param: str, given: Names, outputs: Sequence[str]) -> list[str]:
    if isinstance(given, str):
        return [given] if len(outputs) == 1 else [f"{given}_{name}" if given else "" for name in outputs]
    if isinstance(given, Mapping):
        _check_keys(param, given, outputs)
        return [given.get(name, "") for name in outputs]
    if len(given) != len(outputs):
        raise ConfigurationError(f"{param}={given!r}: expected {len(outputs)} name(s), for the output(s) {list(outputs)}.")
    return list(given)


def _thresholds_of(given: Thresholds | None, outputs: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The thresholds by the outputs that have any."""
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


def _vector_of(size: int | None) -> dict[str, Any]:
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
    """The natural logarithm; of 0, which Spark has none of, that of the smallest number. NaN stays NaN."""
    from pyspark.sql import functions

    return functions.log(functions.greatest(value, functions.lit(sys.float_info.min)))


def _largest(numbers: Column) -> Column:
    """The index of the largest number, the first of equal ones, a double."""
    from pyspark.sql import functions

    return (functions.array_position(numbers, functions.array_max(numbers)) - 1).cast("double")


def _over(chances: Column, thresholds: Sequence[float]) -> Column:
    """Each probability divided by its threshold, as in Spark's classifiers: p/0 is infinite, 0/0 never is the largest."""
    from pyspark.sql import functions

    def ratio(chance: Column, threshold: Column) -> Column:  # Spark refuses to divide by 0
        return (
            functions.when(threshold > 0, chance / threshold)
            .when(chance > 0, functions.lit(math.inf))
            .otherwise(functions.lit(-math.inf))
        )

    return functions.zip_with(chances, functions.array(*map(functions.lit, thresholds)), ratio)


def _softmax(numbers: Column) -> Column:
    """The softmax of an array of doubles, in which no number overflows."""
    from pyspark.sql import functions

    def shifted(largest: Column) -> Column:
        return functions.transform(numbers, lambda number: functions.exp(number - largest))

    def normalized(powers: Column) -> Column:
        total = functions.aggregate(powers, functions.lit(0.0), lambda total, power: total + power)
        return _let(total, lambda total: functions.transform(powers, lambda power: power / total))

    return _let(_let(functions.array_max(numbers), shifted), normalized)


def _let(value: Column, body: Callable[[Column], Column]) -> Column:
    """An expression over a value that is computed once; Spark would compute it anew for each element of an array."""
    from pyspark.sql import functions

    return functions.transform(functions.array(value), body)[0]
