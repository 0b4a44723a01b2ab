"""Votes of several models, and the layer that counts them.

A vote is about *exclusive* classes, the values on the last axis, of which one is right (softmax); or about values that each
say yes or no for themselves (a sigmoid unit, or several for labels that do not exclude each other).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

TIE = 1e-5
"""TrainValidationSplit of the vote that differ by no more than this are equal: weights are rounded."""


def ballot(prediction: Any, exclusive: bool) -> Any:
    """What a prediction votes for: 1 for the likeliest class, or for every value above one half; else 0."""
    if exclusive:
        winner = keras.ops.argmax(prediction, axis=-1)
        return keras.ops.one_hot(winner, prediction.shape[-1], dtype=prediction.dtype)
    return keras.ops.cast(prediction > 0.5, prediction.dtype)


def decided(votes: Any, mean: Any, exclusive: bool) -> Any:
    """The outcome of a vote by majority: 1 for what won, else 0.

    Args:
        votes: The share of the votes that each value got.
        mean: The mean prediction; it decides between values with equally many votes.
        exclusive: See the module's words.
    """
    ops = keras.ops
    if exclusive:
        tied = votes >= ops.max(votes, axis=-1, keepdims=True) - TIE
        return ballot(ops.where(tied, mean, ops.full_like(mean, -float("inf"))), True)
    return ballot(ops.where(ops.abs(votes - 0.5) <= TIE, mean, votes), False)


@keras.saving.register_keras_serializable(package="sparkkeras")
class Vote(keras.layers.Layer):  # type: ignore[misc]
    """Makes one prediction of several: their weighted mean, or what the majority says.

    Args:
        shares: The weight of each prediction; they add up to 1.
        majority: Whether each casts its weight for one outcome, which gives zeros and ones.
        exclusive: See the module's words; it matters to majorities only.
        name: As of any layer.
        dtype: As of any layer; predictions keep their own.
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
        """The outcome, in the shape and dtype of one prediction."""
        given = keras.backend.result_type(*(prediction.dtype for prediction in predictions))
        exact = keras.backend.result_type(given, "float32")
        predictions = [keras.ops.cast(prediction, exact) for prediction in predictions]
        outcome = self._mean(predictions)
        if self.majority:
            votes = self._mean([ballot(prediction, self.exclusive) for prediction in predictions])
            outcome = decided(votes, outcome, self.exclusive)
        return keras.ops.cast(outcome, given)

    def _mean(self, values: Sequence[Any]) -> Any:
        """The mean as the first value and what the others differ by: equal ones give themselves, to the last bit."""
        mean = values[0]
        for value, share in zip(values[1:], self.shares[1:], strict=True):
            mean = mean + share * (value - values[0])
        return mean

    def get_config(self) -> dict[str, Any]:
        """What makes the layer again."""
        config: dict[str, Any] = super().get_config()
        config.pop("trainable", None)
        return config | {"shares": self.shares, "majority": self.majority, "exclusive": self.exclusive}
