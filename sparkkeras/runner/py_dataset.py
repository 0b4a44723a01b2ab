"""The batches of a rank as a dataset of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches by their index.

    Args:
        count: The number of batches.
        batch: Returns a batch.
    """

    def __init__(self, count: int, batch: Callable[[int], Any]) -> None:
        super().__init__()
        self._count, self._batch = count, batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"there is no batch {index}, only {self._count}")
        return self._batch(index)
