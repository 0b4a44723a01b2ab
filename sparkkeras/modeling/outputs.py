"""The outputs of a model: how they are stored, which losses they have, and what they predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sparkkeras.data.columns import stored_as, to_column, type_name
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.modeling.archive import schema_of
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
"""The tasks of Keras's losses for classes."""


@dataclass(frozen=True)
class Output:
    """One output of a model, as Spark stores it.

    Attributes:
        name: Its name.
        dtype: The dtype that it is stored in.
        rank: How many axes a row has; a single number has none.
    """

    name: str
    dtype: str
    rank: int

    @property
    def type_name(self) -> str:
        """The Spark type of a row."""
        return type_name(self.dtype, self.rank)

    def column(self, predicted: Any, good: Array) -> pa.Array:
        """Predictions as a column; null where rows were not good."""
        array = np.asarray(predicted).astype(self.dtype, copy=False)
        return to_column(array.reshape(len(array)) if self.rank == 0 else array, good)


def outputs_of(model: keras.Model) -> tuple[Output, ...]:
    """The outputs of a model. One of shape (batch, 1) is a number.

    Raises:
        ModelError: The model does not say what it gives.
    """
    tensors = getattr(model, "outputs", None)
    if not tensors:
        raise ModelError(
            f"the model {model.name!r} does not say the shape of its outputs, which the type of a column depends on, since "
            "it is subclassed. Wrap it: keras.Model(inputs, model(inputs)) with inputs = keras.Input(shape)."
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
    """What one output of a model predicts.

    Attributes:
        name: ``"regression"``, ``"binary"``, ``"multiclass"`` or ``"multilabel"``; ``None`` where that is unknown.
        from_logits: Whether its values are logits, not probabilities.
    """

    name: str | None
    from_logits: bool = False

    @classmethod
    def of(cls, loss: Any, output: Output, shape: tuple[int | None, ...], task: str = "auto") -> OutputTask:
        """The task of an output.

        Args:
            loss: The loss that it was compiled with, or ``None``.
            output: The output.
            shape: The shape of its rows.
            task: The task that the user declares; ``"auto"`` infers it from the loss and the shape.

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
        fits = {
            "regression": single,
            "binary": single,
            "multiclass": output.rank == 1,
            "multilabel": output.rank <= 1,
        }
        if not fits[task]:
            wanted = {
                "regression": "one unit, whose value is the prediction. Leave task out: outputCol has all values",
                "binary": "one unit. Two units with a softmax are 'multiclass'",
                "multiclass": "a unit for each class. One unit with a sigmoid is 'binary'",
                "multilabel": "units on one axis",
            }[task]
            raise ConfigurationError(
                f"task={task!r} does not fit the output {output.name!r}, whose rows have the shape {shape}: it takes "
                f"{wanted}."
            )
        if task == "regression":
            return cls("regression")
        return cls(task, from_logits)


def losses_of(model: keras.Model, outputs: Sequence[str]) -> list[Any]:
    """The loss of each output that a model was compiled with.

    Args:
        model: The model.
        outputs: The names of its outputs; empty strings where they have none.

    Returns:
        A loss for each output, ``None`` where there is none.
    """
    loss = model.loss if model.compiled else None
    if isinstance(loss, Mapping):
        return [loss.get(name) for name in outputs]
    if isinstance(loss, (list, tuple)):
        return list(loss) if len(loss) == len(outputs) else [None] * len(outputs)
    return [loss] * len(outputs)


def known_loss(loss: Any, exact: bool = False) -> str:
    """The snake-case name of one of Keras's losses for classes, given as a name, a function or an object.

    Args:
        loss: The loss.
        exact: Whether objects of subclasses, which may compute something else, count as custom.

    Returns:
        The name; empty for other losses and custom ones.
    """
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # the user's own, by name
            return ""
    for name in _TASKS:
        of_class = getattr(keras.losses, "".join(part.capitalize() for part in name.split("_")))
        if loss is getattr(keras.losses, name) or type(loss) is of_class or (isinstance(loss, of_class) and not exact):
            return name
    return ""
