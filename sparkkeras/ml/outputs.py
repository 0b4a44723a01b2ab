"""What a model's outputs mean, and the columns that Spark ML wants of them.

The raw column comes from the model; what is made of it (probabilities, predictions) are expressions of Spark's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.ml.values import Names
from sparkkeras.scoring import Output, outputs_of

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructField

_KINDS = {
    "binary_crossentropy": "binary",
    "binary_focal_crossentropy": "binary",
    "categorical_crossentropy": "multiclass",
    "categorical_focal_crossentropy": "multiclass",
    "sparse_categorical_crossentropy": "multiclass",
}


@dataclass(frozen=True)
class Meaning:
    """What one output says.

    Attributes:
        task: ``"regression"``, ``"binary"``, ``"multiclass"`` or ``"multilabel"``; ``None``: nothing that is known.
        from_logits: Whether it gives logits, not probabilities.
    """

    task: str | None
    from_logits: bool = False

    @classmethod
    def of(cls, loss: Any, output: Output, shape: tuple[int | None, ...], task: str = "auto") -> Meaning:
        """What an output means.

        Args:
            loss: What it was compiled with; ``None``: nothing.
            output: The output.
            shape: The shape of its rows.
            task: What a person says of it.

        Raises:
            ConfigurationError: The task does not fit the output.
        """
        kind, from_logits = _known_loss(loss)
        single = output.rank == 0
        if task == "auto":
            if kind is None:
                return cls("regression" if single else None)
            if output.rank > 1 or (kind == "multiclass" and single):
                return cls(None)
            return cls("multilabel" if kind == "binary" and not single else kind, from_logits)
        fits = {
            "regression": output.rank <= 1,
            "binary": single,
            "multiclass": output.rank == 1,
            "multilabel": output.rank <= 1,
        }
        if not fits[task]:
            wanted = {"binary": "one unit", "multiclass": "a unit for each class"}.get(task, "units on one axis")
            raise ConfigurationError(
                f"task={task!r} does not fit the output {output.name!r}, whose rows have the shape {shape}: it takes "
                f"{wanted}. Two units with a softmax are 'multiclass'."
            )
        if task == "regression":
            return cls("regression" if single else None)
        return cls(task, from_logits)


@dataclass(frozen=True)
class OutputColumns:
    """The columns that one output of a model becomes; a column without a name is left out.

    Attributes:
        output: The output.
        units: How many values it has; ``None`` where that is open.
        meaning: What they say.
        as_vector: Whether the raw column is a vector where there are several units on one axis.
        raw: The name of the raw column.
        probability: The name of the column of probabilities.
        prediction: The name of the column of predictions.
    """

    output: Output
    units: int | None
    meaning: Meaning
    as_vector: bool
    raw: str
    probability: str
    prediction: str

    def without_missing(self) -> OutputColumns:
        """The same with names for those columns only that the output has."""
        task = self.meaning.task
        return replace(
            self,
            probability=self.probability if task in ("binary", "multiclass", "multilabel") else "",
            prediction=self.prediction if task is not None else "",
        )

    def fields(self) -> Iterator[StructField]:
        """The columns, as a schema has them."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import ArrayType, DoubleType, StructField

        if self.raw:
            kind, metadata = self._raw_type()
            yield StructField(self.raw, kind, True, metadata)
        if self.probability:
            yield StructField(self.probability, VectorUDT(), True, _vector_of(self._classes))
        if self.prediction:
            many = self.meaning.task == "multilabel"
            kind = ArrayType(DoubleType()) if many else DoubleType()
            yield StructField(self.prediction, kind, True, self._nominal())

    def expressions(self, scored: Column) -> list[Column]:
        """The columns, made of the column that the model gave."""
        found = {self.raw: self._raw, self.probability: self._probability, self.prediction: self._prediction}
        return [found[field.name](scored).alias(field.name, metadata=field.metadata) for field in self.fields()]

    def _raw_type(self) -> tuple[DataType, dict[str, Any]]:
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import DoubleType

        if self.output.rank == 0:
            return DoubleType(), {}
        if self.as_vector and self.output.rank == 1:
            return VectorUDT(), _vector_of(self.units)
        return _stored_type(self.output), {}

    @property
    def _classes(self) -> int | None:
        return 2 if self.meaning.task == "binary" else self.units

    def _nominal(self) -> dict[str, Any]:
        """What Spark's classifiers note of their predictions."""
        if self.meaning.task not in ("binary", "multiclass"):
            return {}
        return {"ml_attr": {"num_vals": self._classes, "type": "nominal"}}

    def _raw(self, scored: Column) -> Column:
        if self.output.rank == 0:
            return scored.cast("double")
        return as_vector(scored) if self.as_vector and self.output.rank == 1 else scored

    def _probability(self, scored: Column) -> Column:
        from pyspark.sql import functions

        if self.meaning.task == "binary":
            chance = self._chance(scored.cast("double"))
            return as_vector(functions.when(scored.isNotNull(), functions.array(1 - chance, chance)))
        return as_vector(self._chances(scored))

    def _prediction(self, scored: Column) -> Column:
        from pyspark.sql import functions

        if self.meaning.task == "regression":
            return scored.cast("double")
        # Spark orders NaN above all numbers, which would make it the surest class.
        has_nan = functions.exists(scored, functions.isnan) if self.output.rank else functions.isnan(scored)
        return functions.when(~has_nan, self._class(scored))

    def _class(self, scored: Column) -> Column:
        """The number of the class, or those of the labels."""
        from pyspark.sql import functions

        if self.meaning.task == "binary":
            return (self._chance(scored.cast("double")) > 0.5).cast("double")
        if self.meaning.task == "multiclass":
            return (functions.array_position(scored, functions.array_max(scored)) - 1).cast("double")

        def number(chance: Column, place: Column) -> Column:
            return functions.when(chance > 0.5, place.cast("double"))

        return functions.filter(functions.transform(self._chances(scored), number), lambda found: found.isNotNull())

    def _chance(self, value: Column) -> Column:
        from pyspark.sql import functions

        return 1 / (1 + functions.exp(-value)) if self.meaning.from_logits else value

    def _chances(self, scored: Column) -> Column:
        """The probabilities of several classes or labels, array<double>."""
        from pyspark.sql import functions

        numbers = functions.when(scored.isNotNull(), functions.array(scored)) if self.output.rank == 0 else scored
        numbers = numbers.cast("array<double>")
        if not self.meaning.from_logits:
            return numbers
        if self.meaning.task == "multilabel":
            return functions.transform(numbers, self._chance)
        return _softmax(numbers)


def columns_of(
    model: keras.Model,
    *,
    task: str | Mapping[str, str],
    output_type: str,
    raw: Names,
    probability: Names,
    prediction: Names,
) -> list[OutputColumns]:
    """The columns that a model's outputs become.

    Args:
        model: The model.
        task: What its outputs mean, or what each of them means by name.
        output_type: ``"array"`` or ``"vector"``.
        raw: What the param ``outputCol`` says.
        probability: What the param ``probabilityCol`` says.
        prediction: What the param ``predictionCol`` says.

    Raises:
        ModelError: The model does not say what it gives.
        ConfigurationError: Names or tasks do not fit its outputs.
    """
    outputs = outputs_of(model)
    ends = [output.name for output in outputs]
    if isinstance(task, Mapping):
        _check_keys("task", task, ends)
        tasks = [task.get(end, "auto") for end in ends]
    else:
        tasks = [task] * len(ends)
    named = [_by_output(*each, ends) for each in (("outputCol", raw), ("probabilityCol", probability))]
    named.append(_by_output("predictionCol", prediction, ends))
    found = []
    for index, (output, tensor, loss) in enumerate(zip(outputs, model.outputs, losses_of(model, ends), strict=True)):
        shape = tuple(tensor.shape[1:])
        meaning = Meaning.of(loss, output, shape, tasks[index])
        names = [each[index] for each in named]
        found.append(
            OutputColumns(output, shape[-1] if shape else 1, meaning, output_type == "vector", *names).without_missing()
        )
    return found


def losses_of(model: keras.Model, outputs: Sequence[str]) -> list[Any]:
    """The loss of each output; ``None`` where there is none."""
    loss = getattr(model, "loss", None)
    if isinstance(loss, Mapping):
        return [loss.get(name) for name in outputs]
    if isinstance(loss, (list, tuple)):
        return list(loss) if len(loss) == len(outputs) else [None] * len(outputs)
    return [loss] * len(outputs)


def as_vector(numbers: Column) -> Column:
    """An array of numbers as a vector; null stays null, which Spark's own function does not take."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions

    return functions.when(numbers.isNotNull(), array_to_vector(numbers))


def _known_loss(loss: Any) -> tuple[str | None, bool]:
    """The kind of a loss of Keras's for classes, and whether it takes logits."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # the person's own, by name
            return None, False
    for name, kind in _KINDS.items():
        of_class = getattr(keras.losses, "".join(part.capitalize() for part in name.split("_")))
        if loss is getattr(keras.losses, name) or isinstance(loss, of_class):
            return kind, bool(getattr(loss, "from_logits", False))
    return None, False


def _by_output(param: str, given: Names, outputs: Sequence[str]) -> list[str]:
    if isinstance(given, str):
        return [given] if len(outputs) == 1 else [f"{given}_{name}" if given else "" for name in outputs]
    if isinstance(given, Mapping):
        _check_keys(param, given, outputs)
        return [given.get(name, "") for name in outputs]
    if len(given) != len(outputs):
        raise ConfigurationError(f"{param}={given!r}: expected {len(outputs)} name(s), for the output(s) {list(outputs)}.")
    return list(given)


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
