"""Low-rank adaptation (LoRA): which layers have factors, and how a loaded copy of the model gets them.

Keras merges the factors of a layer into the weights that they adapt when it saves the layer, and loads new factors. The
factors of layers inside other layers, such as those of MultiHeadAttention, are not saved at all. So the values of these
weights are sent with the state of the model, as all others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class LoraLayer:
    """A layer with low-rank factors.

    Attributes:
        index: Its index among all layers of the model, nested ones included.
        rank: The rank of the factors.
        alpha: The scale of their product is ``alpha / rank``.
    """

    index: int
    rank: int
    alpha: float


def lora_layers(model: keras.Model) -> tuple[LoraLayer, ...]:
    """The layers of a model for which ``enable_lora`` was called."""
    return tuple(
        LoraLayer(index, layer.lora_rank, layer.lora_alpha)
        for index, layer in enumerate(model._flatten_layers())
        if getattr(layer, "lora_enabled", False)
    )


def enable_lora(model: keras.Model, adapted: Sequence[LoraLayer]) -> None:
    """Add factors to the layers of a loaded model that should have them and do not, and compile it for its new weights."""
    layers: list[Any] = list(model._flatten_layers())
    missing = [each for each in adapted if not layers[each.index].lora_enabled]
    for each in missing:
        layers[each.index].enable_lora(each.rank, lora_alpha=each.alpha)
    if missing and model.compiled:
        model.compile_from_config(model.get_compile_config())
