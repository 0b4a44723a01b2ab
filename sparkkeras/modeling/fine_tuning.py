"""Fine-tuning that Keras does not save: low-rank factors (LoRA) and single weights that are frozen, for loaded copies.

Keras merges the factors of a layer into the weights that they adapt when it saves the layer, and loads new factors. The
factors of layers inside other layers, such as those of MultiHeadAttention, are not saved at all. So the values of these
weights are sent with the state of the model, as all others are. Of ``trainable``, Keras saves that of layers only.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class FineTuning:
    """Which parts of a model are trained.

    Attributes:
        adapted: The layers for which ``enable_lora`` was called.
        trainable: Whether each weight is trainable, apart from its layer, in the order of ``model.weights``.
    """

    adapted: tuple[LoraLayer, ...] = ()
    trainable: tuple[bool, ...] = ()

    @classmethod
    def of(cls, model: keras.Model) -> FineTuning:
        """The fine-tuning of a model."""
        adapted = (
            LoraLayer(index, layer.lora_rank, layer.lora_alpha)
            for index, layer in enumerate(model._flatten_layers())
            if getattr(layer, "lora_enabled", False)
        )
        return cls(tuple(adapted), tuple(bool(weight.trainable) for weight in model.weights))

    def restore(self, model: keras.Model) -> None:
        """Set up a loaded copy of the model like the original, and compile it for its new weights."""
        layers: list[Any] = list(model._flatten_layers())
        changed = [each for each in self.adapted if not layers[each.index].lora_enabled]
        for each in changed:
            layers[each.index].enable_lora(each.rank, lora_alpha=each.alpha)
        weights = model.weights if len(model.weights) == len(self.trainable) else []  # others are reported as an error
        unlike = [each for each in zip(weights, self.trainable, strict=False) if each[0].trainable != each[1]]
        for weight, trainable in unlike:
            weight.trainable = trainable
        if (changed or unlike) and model.compiled:
            model.compile_from_config(model.get_compile_config())
