"""Whether the loss of a model is a mean over rows, so that gradients of several batches can be averaged by their rows."""

from __future__ import annotations

from typing import Any

import keras

from sparkkeras.errors import ModelError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.compilation import compiled_with


def check_mean_over_rows(model: keras.Model) -> None:
    """Reject a model whose loss is known not to be a mean over rows.

    Functions, subclasses of ``keras.losses.Loss``, and ``compute_loss`` and ``train_step`` of the model's class may compute
    anything; they are assumed to be means.

    Raises:
        ModelError: A loss is a sum, or divides by something else than the number of rows, which differs between batches.
    """
    for loss in keras.tree.flatten(compiled_with(model).get("loss")):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("sum_over_batch_size", "mean"):
            reason = "is not a mean over rows"
            if reduction == "mean_with_sample_weight":
                reason = "divides by the sum of the sample weights of a batch"
            raise _rejected(model, f"{_named(loss)} with reduction={reduction!r}", reason, 'reduction="sum_over_batch_size"')
        if _is_over_batch(loss):
            raise _rejected(
                model, _named(loss), "compares the rows of a batch with each other", _INSTEAD.get(_name(loss), _OWN)
            )
        ignored = getattr(loss, "ignore_class", None)
        if ignored is not None:
            raise _rejected(
                model,
                f"{_named(loss)} with ignore_class={ignored}",
                "divides by the number of labels of a batch that are not ignored",
                "sample weights of 0 for the labels to ignore",
            )
    for output in model.outputs if getattr(model, "outputs", None) else ():
        if getattr(output, "_keras_mask", None) is not None:
            raise _masked(model, f"the output {output.name!r}")


def check_without_mask(model: keras.Model) -> None:
    """Reject a model with a mask on an output, also if a subclass computes it: known once `metrics.prepare` has called it.

    Raises:
        ModelError: An output has a mask.
    """
    if metrics.masks_loss(model):
        raise _masked(model, "an output")


def _masked(model: keras.Model, output: str) -> ModelError:
    return _rejected(
        model,
        f"{output} with a mask (from mask_zero=True or Masking)",
        "divides by the number of steps of a batch that are not masked",
        "sample weights of 0 for the steps to ignore, and no mask",
    )


def _is_over_batch(loss: Any) -> bool:
    """Whether a loss of Keras is one of a batch: circle, and dice and tversky unless they are computed for each row."""
    name = _name(loss)
    if name == "circle":
        return True
    axis = getattr(loss, "axis", None)
    axes = axis if isinstance(axis, (tuple, list)) else [axis]
    return name in _INSTEAD and (None in axes or 0 in axes)


def _name(loss: Any) -> str:
    """The name of a loss of Keras in lower case; empty for other losses."""
    if isinstance(loss, str):
        return loss.lower()
    kind = loss if hasattr(loss, "__name__") else type(loss)
    return str(kind.__name__).lower() if str(kind.__module__).startswith("keras.") else ""


_INSTEAD = {
    "dice": "keras.losses.Dice(axis=...) with all axes but the first",
    "tversky": "keras.losses.Tversky(axis=...) with all axes but the first",
}
_OWN = "a loss that is a mean over rows, or another mode"


def _named(loss: Any) -> str:
    return f"the loss {getattr(loss, 'name', type(loss).__name__)!r}"


def _rejected(model: keras.Model, what: str, reason: str, instead: str) -> ModelError:
    return ModelError(
        f"the model {model.name!r} has {what}: it {reason}, so averaging the gradients of several workers by rows would "
        f'give other weights than training on all of their rows at once. With mode="allreduce", use {instead}.'
    )
