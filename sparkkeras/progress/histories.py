"""The logs of each epoch, from a history by metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def logs_by_epoch(
    epochs: Sequence[int], history: Mapping[str, Sequence[Any]], validation_freq: int | None = None
) -> list[dict[str, Any]]:
    """The logs of each epoch.

    A metric of validations that were made every few epochs has fewer values than there are epochs.

    Args:
        epochs: The epochs, counted from 0.
        history: The values of each metric, as in ``keras.callbacks.History.history``.
        validation_freq: The number of epochs from one validation to the next; ``None``: the one that gives as many values.
    """
    found: list[dict[str, Any]] = [{} for _ in epochs]
    for name, values in history.items():
        for index, value in zip(_places(epochs, len(values), validation_freq), values, strict=False):
            found[index][name] = value
    return found


def _places(epochs: Sequence[int], count: int, validation_freq: int | None) -> Sequence[int]:
    """The indices of the epochs to which so many values belong; the last ones if none fit."""
    if count >= len(epochs):
        return range(len(epochs))
    for frequency in range(2, max(epochs) + 2) if validation_freq is None else [validation_freq]:
        places = [index for index, epoch in enumerate(epochs) if (epoch + 1) % frequency == 0]
        if len(places) == count:
            return places
    return range(len(epochs) - count, len(epochs))
