"""The task of a prediction, and predictions row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from sparkkeras.data.dataset import Shared, TaskContext
from sparkkeras.data.schema import Schema
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.state import ModelWeights
from sparkkeras.worker.batches import BatchOptions
from sparkkeras.worker.predictor import Predictor


@dataclass(frozen=True)
class PredictTask:
    """Yields predictions in the structure of the model's outputs, many rows at a time, or single rows if ``rows`` is set.

    If ``keyed`` is set, it takes pairs of keys and blocks, and yields predictions as pairs with their keys.
    """

    archive: Shared[ModelArchive]
    state: Shared[ModelWeights]
    options: Shared[BatchOptions]
    schema: Schema
    rows: bool = False
    keyed: bool = False

    def __call__(self, context: TaskContext, blocks: Iterator[Any]) -> Iterator[Any]:
        """Yield the predictions."""
        predictor = Predictor(self.archive.value, self.state.value, self.options.value, self.schema, context)
        if self.keyed:
            with_keys = predictor.of_each(blocks)
            return (pair for part in with_keys for pair in pairs(*part)) if self.rows else with_keys
        parts = predictor.in_parts(blocks)
        return (row for part in parts for row in _rows(part)) if self.rows else parts


def pairs(keys: Sequence[Any], predicted: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a key and the prediction of its row."""
    rows = (tuple(row) if isinstance(row, list) else row for row in _rows(predicted))
    return zip(keys, rows, strict=True)


def _rows(predicted: Any) -> Iterator[Any]:
    leaves = keras.tree.flatten(predicted)
    for row in range(len(leaves[0])):
        yield keras.tree.pack_sequence_as(predicted, [leaf[row] for leaf in leaves])
