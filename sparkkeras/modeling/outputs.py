"""The outputs of a model: their Spark types, their losses, and their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sparkkeras.data.block import by_name, in_column_name
from sparkkeras.data.columns import stored_as, to_column, type_name
from sparkkeras.errors import ConfigurationError, ModelError, known_names
from sparkkeras.modeling.schema import output_structure, schema_of
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa

_TASKS = {
    "binary_crossentropy": "binary",
    "binary_focal_crossentropy": "binary",
    "categorical_crossentropy": "multiclass",
    "categorical_focal_crossentropy": "multiclass",
    "sparse_categorical_crossentropy": "multiclass",
}
"""The tasks of Keras's classification losses."""


@dataclass(frozen=True)
class Output:
    """One output of a model, as stored in a Spark column.

    Attributes:
        name: The name.
        dtype: The dtype of the stored values.
        rank: The number of axes of a row; 0 for a number.
    """

    name: str
    dtype: str
    rank: int

    @property
    def type_name(self) -> str:
        """The Spark type of the column, as a simple string."""
        return type_name(self.dtype, self.rank)

    def column(self, predicted: Any, good: Array) -> pa.Array:
        """Convert predictions to a column, with null for rows that are not ``good`` (a mask, shape (rows,))."""
        array = np.asarray(predicted).astype(self.dtype, copy=False)
        return to_column(array.reshape(len(array)) if self.rank == 0 else array, good)


def outputs_of(model: keras.Model) -> tuple[Output, ...]:
    """The outputs of a model. An output of shape (batch, 1) is stored as a number.

    Raises:
        ModelError: The shapes of the outputs are unknown.
    """
    tensors = getattr(model, "outputs", None)
    if not tensors:
        raise ModelError(
            f"the model {model.name!r} is subclassed, so the shapes of its outputs, which determine the column types, are "
            "unknown. Wrap it: keras.Model(inputs, model(inputs)) with inputs = keras.Input(shape)."
        )
    names = [spec.name for spec in schema_of(model).outputs]
    return tuple(
        Output(name, stored_as(keras.backend.standardize_dtype(tensor.dtype)), _rank(tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    )


def _rank(shape: Sequence[int | None]) -> int:
    return 0 if len(shape) == 2 and shape[1] == 1 else len(shape) - 1


@dataclass(frozen=True)
class OutputTask:
    """The task of one output of a model.

    Attributes:
        name: ``"regression"``, ``"binary"``, ``"multiclass"`` or ``"multilabel"``; ``None`` if unknown.
        from_logits: Whether the values are logits and not probabilities.
    """

    name: str | None
    from_logits: bool = False

    @classmethod
    def of(cls, loss: Any, output: Output, shape: tuple[int | None, ...], task: str = "auto") -> OutputTask:
        """The task of an output.

        Args:
            loss: The loss of the output, as passed to ``compile``, or ``None``.
            output: The output.
            shape: The shape of a row.
            task: The task; ``"auto"`` infers it from the loss and the shape.

        Raises:
            ConfigurationError: The task does not fit the output.
        """
        kind = _TASKS.get(known_loss(loss))
        from_logits = bool(getattr(loss, "from_logits", False))
        single = output.rank == 0
        if task == "auto":
            if kind is None:
                return cls("regression" if single else None)
            if output.rank > 1 or (kind == "multiclass" and single):
                return cls(None)
            return cls("multilabel" if kind == "binary" and not single else kind, from_logits)
        fits, wanted = {
            "regression": (single, "one unit, whose value is the prediction. Omit task: outputCol contains all values"),
            "binary": (single, "one unit. For two units with a softmax, use 'multiclass'"),
            "multiclass": (output.rank == 1, "one unit per class. For one unit with a sigmoid, use 'binary'"),
            "multilabel": (output.rank <= 1, "units on one axis"),
        }[task]
        if not fits:
            raise ConfigurationError(
                f"task={task!r} does not fit the output {output.name!r}, whose rows have the shape {shape}: expected "
                f"{wanted}."
            )
        return cls(task, from_logits and task != "regression")


def names_by_output(argument: str, given: Any, outputs: Sequence[str]) -> list[Any]:
    """The name of the new column for each output: those of a list or a dict, or one with the names of the outputs.

    An output that a dict lacks has an empty name. The values, and their number, are not checked.

    Raises:
        ConfigurationError: A dict has the name of an unknown output.
    """
    if isinstance(given, str) and len(outputs) > 1:
        return [given and f"{given}_{in_column_name(name)}" for name in outputs]
    return list(given) if isinstance(given, (list, tuple)) else by_output(argument, given, outputs, "")


def by_output(argument: str, given: Any, outputs: Sequence[str], default: Any) -> list[Any]:
    """The value of an argument for each output: the given one, or those of a dict.

    Raises:
        ConfigurationError: A dict has the name of an unknown output.
    """
    if not isinstance(given, Mapping):
        return [given] * len(outputs)
    for name in given:
        if name not in outputs:
            raise ConfigurationError(f"{argument}: the model has no output {name!r}. {known_names(name, outputs)}")
    return [given.get(name, default) for name in outputs]


def losses_of(model: keras.Model, names: Sequence[str]) -> list[Any]:
    """The loss of each output of a model, as passed to ``compile``; ``None`` for outputs without a loss.

    Args:
        model: The model.
        names: The names of its outputs.
    """
    loss = model.loss if model.compiled else None
    if isinstance(loss, Mapping):
        found = by_name(loss, output_structure(model))
        return [found.get(name) for name in names]
    if isinstance(loss, (list, tuple)):
        return list(loss) if len(loss) == len(names) else [None] * len(names)
    return [loss] * len(names)


def known_loss(loss: Any, exact: bool = False, names: Iterable[str] = tuple(_TASKS)) -> str:
    """The snake-case name of a loss of Keras that is given as a string, a function or an object.

    Args:
        loss: The loss.
        exact: Whether objects of subclasses, which may compute something else, count as custom.
        names: The losses to recognize; default: those for classification.

    Returns:
        The name; empty for all other losses.
    """
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # the name of a custom loss
            return ""
    for name in names:
        of_class = getattr(keras.losses, "".join(part.capitalize() for part in name.split("_")))
        if loss is getattr(keras.losses, name) or type(loss) is of_class or (isinstance(loss, of_class) and not exact):
            return name
    return ""
