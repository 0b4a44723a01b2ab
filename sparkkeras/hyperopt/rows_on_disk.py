"""Rows of a search that are too large to be sent by the driver: trials read them from files of their machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from sparkkeras.data.block import Block
from sparkkeras.data.labels import LabelRange
from sparkkeras.data.order import RowOrder
from sparkkeras.hyperopt.reporting import SearchDefinitionError
from sparkkeras.modeling import state as model_state
from sparkkeras.worker import device

TRAINING, VALIDATION = "data", "validation_data"
"""The names of rows."""


@dataclass(frozen=True)
class RowsOnDisk:
    """The data of a search, of which some is in files.

    Attributes:
        sent: What the driver has sent besides: arguments of ``fit``.
        blocks: The rows in files, memory-mapped, by `TRAINING` and `VALIDATION`.
        labels: The ranges of the labels of `TRAINING`.
    """

    sent: Mapping[str, Any]
    blocks: Mapping[str, Block]
    labels: tuple[LabelRange, ...] = ()

    def arrays(self) -> tuple[Any, ...]:
        """``(x, y)`` or ``(x, y, sample_weight)``, memory-mapped, for an objective."""
        return arrays_of(self.blocks[TRAINING])

    def fit_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the arguments of ``fit`` that concern rows: batches are read from the files.

        Args:
            arguments: The arguments, as for arrays.

        Raises:
            SearchDefinitionError: The validation share leaves no rows to train on, or there are weights beside the files.
        """
        made = {**arguments}
        if made.get("sample_weight") is not None and TRAINING in self.blocks:
            raise SearchDefinitionError(
                "the function that builds models returned sample_weight, but the rows are in files, since they are large: "
                "give the weights as a column, with sample_weight= of the search."
            )
        split = made.pop("validation_split", 0)
        size = made.pop("batch_size", None) or 32
        validation_size = made.pop("validation_batch_size", None) or size
        training, validation = self.blocks.get(TRAINING), self.blocks.get(VALIDATION)
        if training is None:
            made["batch_size"] = size
        else:
            if split:
                training, validation = _split(training, split)
            seed = np.random.randint(2**31) if made.get("shuffle", True) else None
            made |= {"x": RowBatches(training, size, seed), "shuffle": False}
        if validation is not None and made.get("validation_data") is None:
            made["validation_data"] = RowBatches(validation, validation_size)
        return made


def _split(block: Block, share: float) -> tuple[Block, Block]:
    """The rows to train on, and the last ones, to validate on; as `keras.Model.fit` splits arrays."""
    at = int(np.floor(block.rows * (1 - share)))
    if not at:
        raise SearchDefinitionError(f"validation_split={share} of {block.rows} rows leaves none to train on.")
    return block[:at], block[at:]


def arrays_of(block: Block) -> tuple[Any, ...]:
    """A block as ``(x, y)`` or ``(x, y, sample_weight)``, of which ``fit`` takes several inputs or outputs as lists."""
    arrays = (block.x, block.y) if block.sample_weight is None else (block.x, block.y, block.sample_weight)
    return tuple(list(array) if isinstance(array, tuple) else array for array in arrays)


class RowBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of a block, which are read when they are needed.

    Args:
        block: The rows.
        batch_size: The number of rows in a batch.
        seed: The seed with which rows are shuffled, differently in each epoch; ``None``: in their order.
    """

    def __init__(self, block: Block, batch_size: int, seed: int | None = None) -> None:
        super().__init__()
        self._block, self._batch_size, self._seed, self._epoch = block, batch_size, seed, 0
        self._order = self._of_epoch()

    def __len__(self) -> int:
        return self._order.batches

    def __getitem__(self, index: int) -> Any:
        rows = next(self._order.pieces(index, index + 1, 1))
        batch = device.overwritable(self._block[rows].with_floats(model_state.floatx()))
        return keras.utils.pack_x_y_sample_weight(batch.x, batch.y, batch.sample_weight)

    def on_epoch_end(self) -> None:
        """Shuffle the rows for the next epoch."""
        self._epoch += 1
        self._order = self._of_epoch()

    def _of_epoch(self) -> RowOrder:
        seed = None if self._seed is None else (self._seed, self._epoch)
        return RowOrder(self._block.rows, self._block.row_bytes, self._batch_size, seed)
