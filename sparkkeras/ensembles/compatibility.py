"""Checks that models can form an ensemble, maps their inputs to each other, and builds one Keras model that votes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.data.block import describe
from sparkkeras.data.schema import InputSpec
from sparkkeras.errors import ConfigurationError, ModelError, counted
from sparkkeras.modeling.compilation import check_built
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.outputs import OutputTask, losses_of, outputs_of
from sparkkeras.modeling.schema import graph_of, input_tensors, pack_inputs, schema_of
from sparkkeras.modeling.voting import Vote

VOTING = ("soft", "hard", "average")
"""The ways to combine the predictions of several models."""

_PROBABILITIES = ("softmax", "sigmoid", "hard_sigmoid", "sparsemax")


def check_members(members: Any, voting: str) -> tuple[keras.Model, ...]:
    """Check that models can vote together, and return them as a tuple.

    Raises:
        ModelError: There are no models, one is not a built Keras model, or their inputs or outputs differ.
        ConfigurationError: The voting is unknown, or does not fit the models' outputs.
    """
    arguments.one_of("voting", voting, VOTING)
    if isinstance(members, keras.Model) or not isinstance(members, (list, tuple)):
        raise ModelError(f"models is {describe(members)}; expected a list of built Keras models.")
    if not members:
        raise ModelError("models is empty; expected at least one built Keras model.")
    for number, model in enumerate(members):
        try:
            check_built(model)
            outputs_of(model)
        except ModelError as error:
            raise type(error)(f"models[{number}]: {error}") from error
        _check_like(number, model, members[0])
        if voting != "average":
            _check_probabilities(number, model, voting)
    _check_batch_sizes(members)
    return tuple(members)


def normalized_weights(weights: Any, count: int) -> tuple[float, ...]:
    """Scale the members' weights to add up to 1; ``None``: equal weights.

    Raises:
        ConfigurationError: The number of weights differs from ``count``, or they are not finite numbers of 0 or more, or all
            are 0.
    """
    if weights is None:
        return (1.0 / count,) * count
    expected = f"expected {counted(count, 'number')}, one for each model, of 0 or more and not all 0"
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"weights={weights!r}: {expected}.") from error
    total = math.fsum(numbers)
    if len(numbers) != count or not np.isfinite(numbers).all() or min(numbers) < 0 or total <= 0 or not np.isfinite(total):
        raise ConfigurationError(f"weights={weights!r}: {expected}.")
    if abs(total - 1.0) < 1e-12:
        return tuple(numbers)  # unchanged, so that saved weights are loaded bit for bit
    return tuple(number / total for number in numbers)


def exclusive(members: Sequence[keras.Model]) -> list[bool]:
    """For each output, whether its classes are mutually exclusive; see `sparkkeras.modeling.voting`."""
    by_member = [[_is_exclusive(*each) for each in _outputs(model)] for model in members]
    return [all(each) for each in zip(*by_member, strict=True)]


def input_order(model: keras.Model, first: keras.Model) -> list[int]:
    """The index of the matching input of ``first`` for each input of a model: by name, or by position if names differ."""
    mine, theirs = ([spec.name for spec in schema_of(each).inputs] for each in (model, first))
    return [theirs.index(name) for name in mine] if set(mine) == set(theirs) else list(range(len(mine)))


def first_compiled(members: Sequence[keras.Model]) -> keras.Model | None:
    """The first compiled member, whose loss and metrics are used."""
    return next((model for model in members if model.compiled), None)


def predicted(model: keras.Model, x: Any, batch_size: int) -> Any:
    """Predict in this process."""
    return model.predict(as_input(x), batch_size, verbose=0)


def as_input(x: Any) -> Any:
    """Features in a form that Keras accepts.

    Several inputs become a list, since Keras interprets a tuple as (x, y), and strings a tensor, since Keras's data adapters
    reject arrays of objects.
    """
    inputs = list(x) if isinstance(x, tuple) else x
    return keras.tree.map_structure(
        lambda array: keras.ops.convert_to_tensor(array) if array.dtype == object else array, inputs
    )


def as_one_model(
    like: keras.Model,
    members: Sequence[keras.Model],
    shares: Sequence[float],
    majority: bool,
    is_exclusive: Sequence[bool],
) -> keras.Model:
    """Build one model that calls all members and combines their outputs.

    Args:
        like: The model whose input and output structure the new model has.
        members: Copies of the models; they are renamed and made non-trainable.
        shares: The weight of each member.
        majority: Whether members vote for a class (hard voting), instead of averaging their outputs.
        is_exclusive: For each output, whether its classes are mutually exclusive.
    """
    first = graph_of(like)
    size = next(filter(None, map(fixed_batch_size, members)), None)
    inputs = [keras.Input(tensor.shape[1:], size, tensor.dtype, name=tensor.name) for tensor in input_tensors(like)]
    predictions = []
    for number, member in enumerate(members):
        order = input_order(member, like)
        member.name = f"ensemble_member_{number}"
        member.trainable = False  # otherwise their regularization penalties would be part of the ensemble's loss
        given = pack_inputs(member, [inputs[index] for index in order])
        predictions.append(keras.tree.flatten(member(given)))
    names = [spec.name for spec in schema_of(like).outputs]
    outputs = [
        Vote(shares, majority, each, name=name.replace("/", "_"))(list(several))
        for name, each, several in zip(names, is_exclusive, zip(*predictions, strict=True), strict=True)
    ]
    return keras.Model(
        pack_inputs(like, inputs),
        keras.tree.pack_sequence_as(first._outputs_struct, outputs),
        name="ensemble",
    )


def _check_like(number: int, model: keras.Model, first: keras.Model) -> None:
    mine, theirs = schema_of(model), schema_of(first)
    same = len(mine.inputs) == len(theirs.inputs) and all(
        (spec.shape, spec.floating) == (theirs.inputs[index].shape, theirs.inputs[index].floating)
        for spec, index in zip(mine.inputs, input_order(model, first), strict=True)
    )
    if not same:
        raise ModelError(
            f"models[{number}] ({model.name!r}) takes {_describe_specs(mine.inputs)}, but models[0] ({first.name!r}) takes "
            f"{_describe_specs(theirs.inputs)}: all members of an ensemble must have the same inputs. Wrap one to adapt it: "
            "keras.Model(inputs, model(changed)) with inputs = keras.Input(shape)."
        )
    same = len(mine.outputs) == len(theirs.outputs) and (mine.y is None) == (theirs.y is None)
    if not same or any(one.shape != other.shape for one, other in zip(mine.outputs, theirs.outputs, strict=True)):
        raise ModelError(
            f"models[{number}] ({model.name!r}) has the outputs {_describe_specs(mine.outputs)}, but models[0] "
            f"({first.name!r}) has {_describe_specs(theirs.outputs)}: all members of an ensemble must have outputs of the "
            "same shapes, for the same classes in the same order."
        )
    for spec in mine.outputs:
        if not spec.floating:
            raise ModelError(
                f"the output {spec.name!r} of models[{number}] ({model.name!r}) has an integer dtype and cannot be "
                "averaged; expected probabilities or other floating-point values. Remove the layer that converts them to "
                "integers."
            )


def _check_batch_sizes(members: Sequence[keras.Model]) -> None:
    """Reject members with stateful layers for batches of different sizes."""
    sizes = {number: size for number, model in enumerate(members) if (size := fixed_batch_size(model)) is not None}
    if len(set(sizes.values())) > 1:
        received = ", ".join(f"models[{number}] takes batches of {size}" for number, size in sizes.items())
        raise ModelError(
            f"members with stateful layers have different batch sizes: {received}. Build them for batches of one size, with "
            "keras.Input(..., batch_size=size)."
        )


def _describe_specs(specs: Sequence[InputSpec]) -> str:
    return ", ".join(f"{spec.name!r} of shape {spec.shape}{'' if spec.floating else ' (not floating)'}" for spec in specs)


def _check_probabilities(number: int, model: keras.Model, voting: str) -> None:
    for tensor, task in _outputs(model):
        activation = _activation(tensor)
        if task.from_logits:
            reason = "was compiled with a loss on logits (from_logits=True)"
        elif activation is not None and activation not in _PROBABILITIES:
            reason = f"ends with the activation {activation!r}"
        else:
            continue
        raise ConfigurationError(
            f"voting={voting!r} expects probabilities, but models[{number}] ({model.name!r}) {reason}. For regression use "
            'voting="average"; for classification append a softmax or sigmoid: keras.Sequential([model, '
            "keras.layers.Softmax()])."
        )


def _outputs(model: keras.Model) -> Iterator[tuple[Any, OutputTask]]:
    """Each output tensor with its task."""
    outputs = outputs_of(model)
    losses = losses_of(model, [output.name for output in outputs])
    for tensor, output, loss in zip(model.outputs, outputs, losses, strict=True):
        yield tensor, OutputTask.of(loss, output, tuple(tensor.shape[1:]))


def _is_exclusive(tensor: Any, task: OutputTask) -> bool:
    if len(tensor.shape) < 2 or tensor.shape[-1] == 1 or task.name == "multilabel":
        return False
    return task.name == "multiclass" or _activation(tensor) not in ("sigmoid", "hard_sigmoid")


def _activation(tensor: Any) -> str | None:
    """The name of the Keras activation that computes an output; ``None`` if it is unknown."""
    layer, _, index = tensor._keras_history
    if isinstance(layer, keras.Model):
        inside = getattr(layer, "outputs", None)
        return _activation(inside[index]) if inside else None
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    activation = getattr(layer, "activation", None)
    name = str(getattr(activation, "__name__", ""))
    if activation is None or getattr(keras.activations, name, None) is not activation:
        return None
    # A linear Activation layer may only cast the output's dtype, so it does not show what the output is.
    return None if type(layer) is keras.layers.Activation and name == "linear" else name
