"""Arrays read from columns, with the rows and columns that hold nulls, and the names of columns in messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sparkkeras.weights import Array


@dataclass(frozen=True)
class Terms:
    """The wording of messages about the columns of an array.

    Attributes:
        give: The verb before the name of an argument that a message suggests: "pass", "register the function again with".
        fit: The advice on values that do not fit the model's input.
        fill: The advice on nulls.
        function: The SQL function whose arguments the columns are; empty for the columns of a DataFrame.
        spark_ml: Whether the user sets params of Spark ML, such as ``handleInvalid``, instead of arguments.
    """

    give: str = "pass"
    fit: str = "Choose other columns, or reshape them with transform=."
    fill: str = "Replace nulls (df.fillna), leave such rows out (df.dropna(subset=[...]))"
    function: str = ""
    spark_ml: bool = False

    def column(self, name: str) -> str:
        """The name of one column in messages."""
        return f"{name} of {self.function}" if self.function else f"column {name!r}"

    def argument(self, name: str) -> str:
        """The name of an argument of `SparkModel.fit`, or of the param of Spark ML that stands for it."""
        return _PARAMS.get(name, name) if self.spark_ml else name

    def columns(self, names: Sequence[str]) -> str:
        """The name of several columns in messages."""
        return f"the arguments of {self.function}" if self.function else f"the columns {', '.join(names)}"


_PARAMS = {
    "features": "featuresCol",
    "label": "labelCol",
    "sample_weight": "weightCol",
    "validation_col": "validationIndicatorCol",
}

BY_NAME = Terms()
"""The wording for the columns of a DataFrame, which have names."""

SPARK_ML = Terms(give="set", spark_ml=True)
"""The wording for the columns of a DataFrame in Spark ML."""

current_terms: ContextVar[Terms] = ContextVar("current_terms", default=BY_NAME)
"""The wording of messages about columns that are selected in this context."""


@contextmanager
def worded_for(terms: Terms) -> Iterator[None]:
    """Select columns with another wording of messages, also of those that workers raise later."""
    token = current_terms.set(terms)
    try:
        yield
    finally:
        current_terms.reset(token)


@dataclass(frozen=True)
class ColumnPart:
    """The part of an array that comes from one column.

    Attributes:
        name: The column's name.
        width: The number of values per row that come from this column.
        good: A mask of the rows without nulls in this column; ``None``: all.
    """

    name: str
    width: int
    good: Array | None


@dataclass(frozen=True)
class ColumnValues:
    """The values of one array, read from its columns.

    Attributes:
        values: The values, shape (rows, ...).
        good: A mask of the rows without nulls; ``None``: all.
        label: The name of the array in messages.
        may_lack: Whether nulls are allowed whatever ``on_invalid`` is, because a loader handles them.
        parts: The part of each column, if several columns are concatenated.
        terms: The wording of messages.
    """

    values: Array
    good: Array | None
    label: str
    may_lack: bool = False
    parts: tuple[ColumnPart, ...] = ()
    terms: Terms = BY_NAME

    def null_column(self, row: int) -> str:
        """The name, in messages, of the first column that is null in a row."""
        names = [part.name for part in self.parts if part.good is not None and not part.good[row]]
        return self.terms.column(names[0]) if names else self.label

    def holding(self, position: int) -> str:
        """The name, in messages, of the column that holds the value at ``position`` of a row of all columns."""
        for part in self.parts:
            if position < part.width:
                return self.terms.column(part.name)
            position -= part.width
        return self.label
