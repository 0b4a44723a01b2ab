"""Which models may be one ensemble, what they say, what that means to a vote, and the one model that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.data.block import describe
from sparkkeras.data.schema import InputSpec
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.modeling import archive as models
from sparkkeras.modeling.outputs import OutputTask, losses_of, outputs_of
from sparkkeras.modeling.voting import Vote

VOTING = ("soft", "hard", "average")
"""How the predictions of several models become one."""

_PROBABILITIES = ("softmax", "sigmoid", "hard_sigmoid", "sparsemax")


def check_members(members: Any, voting: str) -> tuple[keras.Model, ...]:
    """Models that can vote together, as a tuple.

    Raises:
        ModelError: There are none, one is not built or is no model, or they differ in their inputs or outputs.
        ConfigurationError: The voting is unknown, or does not fit what they give.
    """
    arguments.one_of("voting", voting, VOTING)
    if isinstance(members, keras.Model) or not isinstance(members, (list, tuple)):
        raise ModelError(f"models is {describe(members)}; expected a list of built Keras models.")
    if not members:
        raise ModelError("models is empty; expected at least one built Keras model.")
    for number, model in enumerate(members):
        try:
            models.check_built(model)
            outputs_of(model)
        except ModelError as error:
            raise type(error)(f"models[{number}]: {error}") from error
        _check_like(number, model, members[0])
        if voting != "average":
            _check_probabilities(number, model, voting)
    return tuple(members)


def shares(weights: Any, count: int) -> tuple[float, ...]:
    """The weight of each member, scaled to add up to 1; ``None``: all have the same.

    Raises:
        ConfigurationError: They are not as many as the members, or not finite numbers of 0 or more, or all 0.
    """
    if weights is None:
        return (1.0 / count,) * count
    expected = f"expected {count} number(s), one for each model, of 0 or more and not all 0"
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"weights={weights!r}: {expected}.") from error
    total = math.fsum(numbers)
    if len(numbers) != count or not np.isfinite(numbers).all() or min(numbers) < 0 or total <= 0 or not np.isfinite(total):
        raise ConfigurationError(f"weights={weights!r}: {expected}.")
    if abs(total - 1.0) < 1e-12:
        return tuple(numbers)  # to the last bit those that were saved
    return tuple(number / total for number in numbers)


def exclusive(members: Sequence[keras.Model]) -> list[bool]:
    """For each output, whether its values are classes of which one is right; see `sparkkeras.modeling.voting`."""
    told = [[_is_exclusive(*each) for each in _outputs(model)] for model in members]
    return [all(each) for each in zip(*told, strict=True)]


def input_order(model: keras.Model, first: keras.Model) -> list[int]:
    """Which input of ``first`` each input of a model is: the one of its name, or where names differ, of its place."""
    mine, theirs = ([spec.name for spec in models.schema_of(each).inputs] for each in (model, first))
    return [theirs.index(name) for name in mine] if set(mine) == set(theirs) else list(range(len(mine)))


def first_compiled(members: Sequence[keras.Model]) -> keras.Model | None:
    """The first member that says what to measure it by."""
    return next((model for model in members if model.compiled), None)


def own_features(x: Any, model: keras.Model, first: keras.Model) -> Any:
    """Features as a member takes them, which are given as ``first`` takes them."""
    inputs = list(x) if isinstance(x, tuple) else [x]
    if isinstance(x, Mapping):
        names = [spec.name for spec in models.schema_of(first).inputs]
        inputs = [x[name] for name in names] if set(names) <= set(x) else list(x.values())
    structure = models.graph_of(model)._inputs_struct
    return keras.tree.pack_sequence_as(structure, [inputs[index] for index in input_order(model, first)])


def predicted(model: keras.Model, x: Any, batch_size: int) -> Any:
    """What a model predicts in this process."""
    return model.predict(as_input(x), batch_size, verbose=0)


def as_input(x: Any) -> Any:
    """Features as Keras takes them: several are a list, since it takes a tuple for (x, y)."""
    return list(x) if isinstance(x, tuple) else x


def as_one_model(
    like: keras.Model,
    members: Sequence[keras.Model],
    shares: Sequence[float],
    majority: bool,
    is_exclusive: Sequence[bool],
) -> keras.Model:
    """One model that calls all members and votes.

    Args:
        like: A model whose inputs and outputs it has the structure of.
        members: Models that nobody else needs: they get other names, and are not trained any more.
        shares: The weight of each.
        majority: As of `sparkkeras.modeling.voting.Vote`.
        is_exclusive: The same, for each output.
    """
    first = models.graph_of(like)
    inputs = [
        keras.Input(tensor.shape[1:], dtype=tensor.dtype, name=tensor.name) for tensor in keras.tree.flatten(first.inputs)
    ]
    predictions = []
    for number, member in enumerate(members):
        order = input_order(member, like)
        member.name = f"ensemble_member_{number}"
        member.trainable = False  # else their penalties on weights would be part of the ensemble's loss
        given = keras.tree.pack_sequence_as(models.graph_of(member)._inputs_struct, [inputs[index] for index in order])
        predictions.append(keras.tree.flatten(member(given)))
    names = [spec.name for spec in models.schema_of(like).outputs]
    outputs = [
        Vote(shares, majority, each, name=name)(list(several))
        for name, each, several in zip(names, is_exclusive, zip(*predictions, strict=True), strict=True)
    ]
    return keras.Model(
        keras.tree.pack_sequence_as(first._inputs_struct, inputs),
        keras.tree.pack_sequence_as(first._outputs_struct, outputs),
        name="ensemble",
    )


def _check_like(number: int, model: keras.Model, first: keras.Model) -> None:
    mine, theirs = models.schema_of(model), models.schema_of(first)
    same = len(mine.inputs) == len(theirs.inputs) and all(
        _alike(spec, theirs.inputs[index]) for spec, index in zip(mine.inputs, input_order(model, first), strict=True)
    )
    if not same:
        raise ModelError(
            f"models[{number}] ({model.name!r}) takes {_told(mine.inputs)}, but models[0] ({first.name!r}) takes "
            f"{_told(theirs.inputs)}: the members of an ensemble take the same inputs. Wrap one so that it does: "
            "keras.Model(inputs, model(changed)) with inputs = keras.Input(shape)."
        )
    same = len(mine.outputs) == len(theirs.outputs) and mine.named_outputs == theirs.named_outputs
    if not same or any(one.shape != other.shape for one, other in zip(mine.outputs, theirs.outputs, strict=True)):
        raise ModelError(
            f"models[{number}] ({model.name!r}) gives {_told(mine.outputs)}, but models[0] ({first.name!r}) gives "
            f"{_told(theirs.outputs)}: the members of an ensemble give outputs of the same shapes, for the same classes in "
            "the same order."
        )
    for spec in mine.outputs:
        if not spec.floating:
            raise ModelError(
                f"models[{number}] ({model.name!r}) gives whole numbers in its output {spec.name!r}, which have no mean: "
                "expected probabilities or other floating numbers. Take the model without what makes numbers of them."
            )


def _alike(one: InputSpec, other: InputSpec) -> bool:
    return one.shape == other.shape and one.floating == other.floating


def _told(specs: Sequence[InputSpec]) -> str:
    return ", ".join(f"{spec.name!r} of shape {spec.shape}{'' if spec.floating else ' (not floating)'}" for spec in specs)


def _check_probabilities(number: int, model: keras.Model, voting: str) -> None:
    for tensor, task in _outputs(model):
        activation = _activation(tensor)
        if task.from_logits:
            told = "was compiled with a loss that takes logits (from_logits=True)"
        elif activation is not None and activation not in _PROBABILITIES:
            told = f"ends with the activation {activation!r}"
        else:
            continue
        raise ConfigurationError(
            f'voting={voting!r} takes probabilities, but models[{number}] ({model.name!r}) {told}: give voting="average", '
            "as for regression, or for classes put a softmax or a sigmoid behind it: keras.Sequential([model, "
            "keras.layers.Softmax()])."
        )


def _outputs(model: keras.Model) -> Iterator[tuple[Any, OutputTask]]:
    """Each output with what its loss says of it."""
    outputs = outputs_of(model)
    losses = losses_of(model, [output.name for output in outputs])
    for tensor, output, loss in zip(model.outputs, outputs, losses, strict=True):
        yield tensor, OutputTask.of(loss, output, tuple(tensor.shape[1:]))


def _is_exclusive(tensor: Any, task: OutputTask) -> bool:
    if len(tensor.shape) < 2 or tensor.shape[-1] == 1 or task.name == "multilabel":
        return False
    return task.name == "multiclass" or _activation(tensor) not in ("sigmoid", "hard_sigmoid")


def _activation(tensor: Any) -> str | None:
    """The name of the activation of Keras's that makes an output; ``None`` where that is not known."""
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
    # A layer that does nothing is put behind others to change their dtype.
    return None if type(layer) is keras.layers.Activation and name == "linear" else name
