"""User-defined functions of Spark over Arrow batches of columns, on SparkContext and on Spark Connect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column


class ColumnFunction(Protocol):
    """A function of columns that Spark runs on its Python workers."""

    def __call__(self, *columns: Column) -> Column:
        """The column of results."""
        ...

    def asNondeterministic(self) -> ColumnFunction:  # noqa: N802 - Spark's name
        """The same function, computed only once per row even if a query uses the column several times."""
        ...


def column_function(call: Callable[[Iterator[Any]], Iterator[pa.Array]], type_name: str) -> ColumnFunction:
    """Make a Spark function from columns to a column of the given type.

    Args:
        call: Yields one value per row. It takes the batches of a partition, each an Arrow array or, for several columns, a
            tuple of them. Its ``__name__`` is the function's name in Spark's plans.
        type_name: The type of the column, as DDL.
    """
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]
    from pyspark.util import PythonEvalType

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="It is preferred to specify type hints")  # an object's cannot be read
        function: Any = arrow_udf(call, type_name, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)
    return function  # type: ignore[no-any-return]
