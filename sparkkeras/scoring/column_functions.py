"""What a function of columns runs on the workers: it converts its arguments to blocks, and yields a value for each row."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkkeras.data.block import Block, Form, Structure
from sparkkeras.data.columns import Leaf
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.reader import Reader
from sparkkeras.errors import DataError, counted
from sparkkeras.sources.column_types import check_argument
from sparkkeras.sources.frame import ColumnMapping, Loaders, Selection
from sparkkeras.sources.tasks import task_context
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ArgumentsToBlocks:
    """Converts the arguments of a column function to blocks: one argument for each input, or several for a single input.

    Error messages name the function and the index of the argument, since calls in SQL have no column names or options.

    Attributes:
        reader: Reads and checks the rows.
        loader: Converts arguments to inputs.
        fits: Whether arguments must fit the model; see `Leaf.fits`.
        function: The function as users call it, for messages.
    """

    reader: Reader
    loader: Loaders | None = None
    fits: bool = True
    function: str = "the function"

    def argument_count_error(self, count: int) -> str:
        """The error message for a number of arguments that the model cannot take; empty if it can."""
        specs = self.reader.schema.inputs
        shape = specs[0].shape if len(specs) == 1 and self.fits else None
        if len(specs) > 1:
            names = ", ".join(spec.name for spec in specs)
            expected, accepted = f"{len(specs)} arguments, one for each input of the model ({names})", count == len(specs)
        elif self.loader is not None:
            expected, accepted = "one argument, for its loader", count == 1
        elif shape is not None and None not in shape:
            wanted = math.prod(size or 0 for size in shape)
            expected = f"{counted(wanted, 'string')}, or arrays that hold as many in all"
            if not specs[0].text:
                expected = f"{counted(wanted, 'number')}, or arrays or vectors that hold as many in all"
            accepted = 1 <= count <= wanted
        else:
            expected, accepted = "at least one argument", count > 0
        return "" if accepted else f"{self.function} takes {expected}; it received {counted(count, 'argument')}."

    def blocks(self, columns: Sequence[pa.Array], where: str, first: int) -> Iterator[tuple[Block, Array | None]]:
        """The rows of one batch; see `Selection.blocks`."""
        error = self.argument_count_error(len(columns))
        if error:
            raise DataError(error)
        specs, loaders = self.reader.schema.inputs, ColumnMapping(loader=self.loader).loaders(self.reader.schema)
        names = [f"argument {number}" for number in range(1, len(columns) + 1)]
        several = len(specs) > 1
        leaves = [
            Leaf(read, len(read) > 1, spec, self.fits, loaders.get(spec.name if spec else ""), self.function)
            for read, spec in zip([(name,) for name in names] if several else [tuple(names)], specs or (None,), strict=True)
        ]
        selection = Selection(self.reader, Form(Structure.several(len(specs)) if several else Structure()), tuple(leaves))
        for number, column in enumerate(columns):
            check_argument(leaves[number if several else 0], names[number], column)
        yield from selection.blocks(columns, where, first)


@dataclass(frozen=True)
class OverColumns:
    """Runs a task over the batches of a column function's arguments; see `sparkkeras.sources.frame_blocks.column_function`.

    Users run the queries that call such functions, so they see errors as Spark reports them.
    """

    __name__ = "keras_model"  # its name in Spark's plans

    task: Callable[[TaskContext, Iterator[Any]], Iterator[pa.Array]]

    def __call__(self, batches: Iterator[Any]) -> Iterator[pa.Array]:
        """Yield one value per row; reads all batches."""
        try:
            yield from self.task(task_context(), batches)
        except DataError as error:
            # The message explains what is wrong with the data; a traceback would bury it. Spark reads this variable when it
            # reports the error, and then ends the process.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise error from None
        for _ in batches:
            pass
