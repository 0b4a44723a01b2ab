"""Layers that synchronize statistics between replicas in every step, which training on Spark cannot do."""

from __future__ import annotations

import keras

from sparkkeras.errors import ModelError


def check_not_synchronized(model: keras.Model) -> None:
    """Reject a model with trainable layers that synchronize batch statistics, such as ``BatchNormalization``.

    Raises:
        ModelError: There are such layers.
    """
    names = [
        layer.name for layer in model._flatten_layers() if getattr(layer, "synchronized", False) is True and layer.trainable
    ]
    if names:
        raise ModelError(
            f"the model {model.name!r} has layers with synchronized=True ({', '.join(names)}), which compute the statistics "
            "of a batch over all replicas in every step. Workers train their replicas separately, and sparkkeras averages "
            "moving statistics with the weights when workers exchange them: use synchronized=False, or freeze the layers "
            "(trainable=False). Only predict and evaluate work with them."
        )
