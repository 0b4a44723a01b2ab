"""Votes of several models, and the layer that counts them.

Classes are *exclusive* if exactly one of the values on the last axis is correct (softmax). Otherwise every value is an
independent yes or no (a sigmoid unit, or several for multilabel classification).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

TIE = 1e-5
"""Shares of the vote that differ by at most this much count as equal, because weights are rounded."""


def ballot(prediction: Any, exclusive: bool) -> Any:
    """The vote of a prediction: 1 for the class with the highest value, or for every value above 0.5; 0 for the others."""
    if exclusive:
        winner = keras.ops.argmax(prediction, axis=-1)
        return keras.ops.one_hot(winner, prediction.shape[-1], dtype=prediction.dtype)
    return keras.ops.cast(prediction > 0.5, prediction.dtype)


def decided(votes: Any, mean: Any, exclusive: bool) -> Any:
    """The result of a majority vote: 1 for winners, 0 for the others.

    Args:
        votes: The share of the votes for each value.
        mean: The mean prediction, which breaks ties.
        exclusive: Whether classes are exclusive; see the module docstring.
    """
    ops = keras.ops
    if exclusive:
        tied = votes >= ops.max(votes, axis=-1, keepdims=True) - TIE
        return ballot(ops.where(tied, mean, ops.full_like(mean, -float("inf"))), True)
    return ballot(ops.where(ops.abs(votes - 0.5) <= TIE, mean, votes), False)


@keras.saving.register_keras_serializable(package="sparkkeras")
class Vote(keras.layers.Layer):  # type: ignore[misc]
    """Combines several predictions into one: their weighted mean, or a weighted majority vote.

    Args:
        shares: The weight of each prediction; the weights add up to 1.
        majority: Whether to take a majority vote, whose result is zeros and ones; default: the mean.
        exclusive: Whether classes are exclusive; see the module docstring. Used only by majority votes. Default ``True``.
        name: The name of the layer.
        dtype: The dtype policy of the layer; predictions keep their own dtype.
    """

    def __init__(
        self,
        shares: Sequence[float],
        majority: bool = False,
        exclusive: bool = True,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype, autocast=False, trainable=False)
        self.shares = [float(share) for share in shares]
        self.majority = majority
        self.exclusive = exclusive

    def call(self, predictions: Sequence[Any]) -> Any:
        """Combine predictions; the result has the shape and dtype of one prediction."""
        given = keras.backend.result_type(*(prediction.dtype for prediction in predictions))
        exact = keras.backend.result_type(given, "float32")
        predictions = [keras.ops.cast(prediction, exact) for prediction in predictions]
        outcome = self._mean(predictions)
        if self.majority:
            votes = self._mean([ballot(prediction, self.exclusive) for prediction in predictions])
            outcome = decided(votes, outcome, self.exclusive)
        return keras.ops.cast(outcome, given)

    def _mean(self, values: Sequence[Any]) -> Any:
        """The weighted mean, computed from differences to the first value, so that the mean of equal values is exact."""
        mean = values[0]
        for value, share in zip(values[1:], self.shares[1:], strict=True):
            mean = mean + share * (value - values[0])
        return mean

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        config: dict[str, Any] = super().get_config()
        config.pop("trainable", None)
        return config | {"shares": self.shares, "majority": self.majority, "exclusive": self.exclusive}
