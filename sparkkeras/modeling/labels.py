"""Validation of labels and class weights against the loss that a model was compiled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from sparkkeras.data.block import BlockSpec, LeafSpec, Structure
from sparkkeras.data.labels import LabelRange
from sparkkeras.data.schema import Schema
from sparkkeras.errors import ConfigurationError, DataError, counted, known_names, warn
from sparkkeras.modeling.outputs import known_loss, losses_of
from sparkkeras.modeling.own_methods import overrides
from sparkkeras.modeling.schema import schema_of


def check_labels(model: keras.Model, spec: BlockSpec, ranges: Sequence[LabelRange]) -> None:
    """Reject labels that the loss would misinterpret or that would fail on a worker.

    Args:
        model: A compiled model.
        spec: The shapes and dtypes of the data.
        ranges: The value range of each array of labels.

    Raises:
        DataError: Labels do not fit; the message names the array, the loss, and what it expects.
    """
    structure = spec.form.y
    labelled = check_label_structure(model, structure)
    if structure is None or not labelled:
        return
    outputs, names, losses = _outputs(model)
    leaves = spec.leaves[spec.form.span("y")]
    labels = structure.labels("y")
    for place, index in enumerate(labelled):
        position = place
        if structure.names is not None and names[index] in structure.names:
            position = structure.names.index(names[index])
        if position < len(ranges):
            _check(labels[position], losses[index], leaves[position], ranges[position], tuple(outputs[index].shape[1:]))


def check_label_structure(model: keras.Model, structure: Structure | None) -> list[int]:
    """Reject labels for other outputs than those of a compiled model with a loss, before any values are known.

    Returns:
        The indices of the outputs that the labels are for, in order; empty if this is unknown.

    Raises:
        DataError: Labels are missing, or for unknown outputs.
    """
    outputs, names, losses = _outputs(model)
    if structure is None or not outputs:
        return []
    with_loss = [index for index, loss in enumerate(losses) if loss is not None]
    custom = overrides(model, "train_step", "test_step", "compute_loss")
    if structure.names is not None and not custom and (len(outputs) > 1 or structure.names != tuple(names)):
        _check_names(structure, schema_of(model), losses)
    if structure.count == len(outputs):
        return list(range(len(outputs)))
    if not custom and structure.count == len(with_loss):
        return with_loss  # Keras also accepts labels for only these outputs
    if custom or structure.names is not None:
        return []
    expected, with_a_loss = _arrays(len(outputs)), ""
    if 0 < len(with_loss) < len(outputs):
        expected += f", or as {_arrays(len(with_loss))} for the {'output' if len(with_loss) == 1 else 'outputs'} with a loss"
        with_a_loss = f", {len(with_loss)} with a loss"
    raise DataError(
        f"the model has {counted(len(outputs), 'output')} ({', '.join(names)}){with_a_loss}, but the labels are "
        f"{counted(structure.count, 'array')}: pass y as {expected}."
    )


def _outputs(model: keras.Model) -> tuple[list[Any], list[str], list[Any]]:
    """The outputs of a model, their names, and their losses; empty if they are unknown."""
    outputs = list(getattr(model, "outputs", None) or ())
    names = list(getattr(model, "output_names", None) or [""] * len(outputs))
    return outputs, names, losses_of(model, names)


def _check_names(labels: Structure, schema: Schema, losses: Sequence[Any]) -> None:
    """Reject labels for unknown outputs, and outputs that have a loss but no labels."""
    received, names = labels.names or (), [spec.name for spec in schema.outputs]
    unknown = next((name for name in received if name not in names), None)
    if unknown is not None and schema.y is not None and schema.y.is_nested:
        raise DataError(
            f"the labels are {labels.shown()}, but the model's outputs are {schema.y.shown()}: pass y in this structure."
        )
    if unknown is not None:
        raise DataError(f"the labels are for the output {unknown!r}, which the model lacks. {known_names(unknown, names)}")
    missing = [name for name, loss in zip(names, losses, strict=True) if loss is not None and name not in received]
    if missing:
        raise DataError(
            f"labels are missing for {', '.join(map(repr, missing))}: every output with a loss needs labels; received "
            f"those of {', '.join(map(repr, received))}."
        )


def _arrays(count: int) -> str:
    return "one array" if count == 1 else f"a tuple or a dict of {count} arrays"


def check_class_weight(model: keras.Model, class_weight: Mapping[int, float]) -> None:
    """Reject weights for classes that do not exist, for models with one output and a classification loss.

    Raises:
        ConfigurationError: ``class_weight`` contains unknown classes.
    """
    outputs, _, losses = _outputs(model)
    if len(outputs) != 1:
        return
    name = known_loss(losses[0], exact=True)
    last = outputs[0].shape[-1] if len(outputs[0].shape) > 1 else None
    binary = 2 if last == 1 else None
    classes = binary if name.startswith("binary_") else last if name else None
    unknown = [] if classes is None else sorted(number for number in class_weight if number >= classes)
    if classes is not None and unknown:
        raise ConfigurationError(
            f"class_weight={dict(class_weight)!r} contains unknown classes, {', '.join(map(str, unknown))}: with the loss "
            f"{name} the model has {counted(classes, 'class')}: expected class indices from 0 to {classes - 1}."
        )


_ELEMENTWISE = (
    "mean_squared_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
    "huber",
    "log_cosh",
)


def _check_elementwise(label: str, name: str, labels: tuple[int, ...], output: tuple[int | None, ...]) -> None:
    """Check the shape of labels for a loss that compares them with an output value by value.

    Keras adds or removes a last axis of size 1, and then broadcasts, so that rows may be compared with other rows.
    """
    if len(labels) != len(output):
        longer, shorter = (labels, output) if len(labels) > len(output) else (output, labels)
        if len(longer) == len(shorter) + 1 and longer[-1] == 1:
            labels, output = (labels[:-1], output) if longer is labels else (labels, output[:-1])
    has_same_rank = len(labels) == len(output)
    unequal = [(one, other) for one, other in zip(labels, output, strict=False) if other not in (one, None)]
    if has_same_rank and not unequal:
        return
    message = f"{label} has rows of shape {labels}, but the output of the model has rows of shape {output}"
    if has_same_rank and all(1 in sizes for sizes in unequal):
        warn(f"{message}: the loss {name} broadcasts them. Reshape the labels, or give the last layer as many units.")
        return
    raise DataError(
        f"{message}, and the loss {name} compares them value by value. Reshape the labels, or change the units of the last "
        "layer."
    )


def _check(label: str, loss: Any, leaf: LeafSpec, found: LabelRange, output: tuple[int | None, ...]) -> None:
    if elementwise := known_loss(loss, exact=True, names=_ELEMENTWISE):
        _check_elementwise(label, elementwise, leaf.shape, output)
        return
    name = known_loss(loss, exact=True)
    classes = output[-1] if output else None
    if name == "sparse_categorical_crossentropy" and classes and len(leaf.shape) == len(output) and leaf.shape[-1] > 1:
        one_hot = leaf.shape[-1] == classes
        raise DataError(
            f"{label} does not fit the loss {name}: it expects class indices from 0 to {classes - 1}, received rows of "
            f"shape {leaf.shape}{', the shape of one-hot rows' if one_hot else ''}. "
            + ("Compile with categorical_crossentropy, or pass " if one_hot else "Pass ")
            + f"class indices{f' ({label}.argmax(-1))' if one_hot else ''}."
        )
    if name == "sparse_categorical_crossentropy" and getattr(loss, "ignore_class", None) is None and classes:
        if not found.all_integers or found.low < 0 or found.high >= classes:
            advice = "Renumber the labels, or add units to the model's last layer."
            if classes == 1:
                advice = "For labels 0 and 1, use a sigmoid with binary_crossentropy; for classes, one unit for each class."
            raise DataError(
                f"{label} does not fit the loss {name}: the model's output has {counted(classes, 'unit')}, so labels must "
                f"be integers from 0 to {classes - 1}, but they range from {found.low:g} to {found.high:g}. {advice}"
            )
    elif name == "categorical_crossentropy" and classes:
        if not leaf.shape or leaf.shape[-1] != classes:
            raise DataError(
                f"{label} does not fit the loss {name}: it expects one-hot rows of {classes} values, received rows of "
                f"shape {leaf.shape}. Encode them with keras.utils.to_categorical (or with Spark's OneHotEncoder and "
                "dropLast=False), or compile with sparse_categorical_crossentropy."
            )
    elif name == "binary_crossentropy" and (found.low < 0 or found.high > 1):
        raise DataError(
            f"{label} does not fit the loss {name}: labels must lie between 0 and 1, but they range from {found.low:g} to "
            f"{found.high:g}. Map the classes to 0 and 1."
        )
