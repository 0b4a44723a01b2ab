"""The names of columns: finds a DataFrame's columns and fields of structs by name, as Spark does, and quotes names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkkeras.data.block import describe, in_field
from sparkkeras.errors import ConfigurationError, DataError, known_names

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType


class ColumnFinder:
    """Finds columns of a DataFrame by name: a top-level column, else a field of a struct (``user.age``).

    As in Spark, names are case-insensitive unless that is ambiguous.
    """

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame
        self._schema: StructType = frame.schema
        self._names = self._schema.names
        self._matching: dict[str, list[str]] = {}  # the names that are equal if case is ignored
        for name in self._names:
            self._matching.setdefault(name.lower(), []).append(name)

    def column(self, name: str) -> Column:
        """A column as an expression.

        Raises:
            DataError: No column has this name, or several have.
        """
        from pyspark.sql import functions

        return functions.col(self.expression(name))

    def expression(self, name: str) -> str:
        """A column as an expression of SQL; see `column`."""
        return ".".join(quoted(field.name) for field in self._found(name))

    def type_of(self, name: str) -> tuple[DataType, Mapping[str, Any]]:
        """A column's type and metadata.

        Raises:
            DataError: No column has this name, or several have.
        """
        field = self._found(name)[-1]
        return field.dataType, field.metadata

    def may_be_null(self, name: str) -> bool:
        """Whether a column may hold nulls.

        Raises:
            DataError: No column has this name, or several have.
        """
        return any(field.nullable for field in self._found(name))

    def _found(self, name: str) -> list[StructField]:
        """The path to the column: its field alone, or a struct and its nested fields."""
        path = _path(self._schema, name)
        if path is None:
            raise DataError(f"the DataFrame has no column {name!r}. {known_names(name, self._known(name))}")
        name = path[0].name
        matches = self._matching[name.lower()]
        if matches.count(name) > 1 or (len(matches) > 1 and not is_case_sensitive(self._frame.sparkSession)):
            raise DataError(
                f"the DataFrame has {len(matches)} columns whose names Spark does not distinguish "
                f"({', '.join(map(repr, matches))}): rename them."
            )
        return path

    def _known(self, name: str) -> list[str]:
        """The columns, or for a path such as ``b.x``, the fields of the innermost struct on it."""
        from pyspark.sql.types import StructType

        struct, _, _ = name.rpartition(".")
        path = _path(self._schema, struct) if struct else None
        if path is None or not isinstance(path[-1].dataType, StructType):
            return self._known(struct) if struct else self._names
        return [f"{struct}.{field}" for field in path[-1].dataType.names]

    def default(self, argument: str, names: Sequence[str]) -> str | dict[str, str]:
        """The default columns for an argument that was not set.

        Args:
            argument: The name of the argument, which is also a default name of its column.
            names: The names of the model's inputs or outputs.

        Raises:
            ConfigurationError: The DataFrame lacks such columns.
        """
        if len(names) < 2 and _field(self._schema, argument) is not None:
            return argument
        found = {name: column for name in names if (column := self._named(name)) is not None}
        if names and len(found) == len(names):
            return found if len(names) > 1 else found[names[0]]
        kind = "inputs" if argument == "features" else "outputs"
        lacks = [f"column {argument!r}"] * (len(names) < 2)
        lacks += [f"columns with the names of the model's {kind} ({', '.join(names)})"] * bool(names)
        raise ConfigurationError(
            f"{argument}= (in Spark ML {argument}Col) is missing, and the DataFrame has no {' and no '.join(lacks)}. Its "
            f"columns: {', '.join(map(repr, self._names))}."
        )

    def _named(self, name: str) -> str | None:
        """The column with the name of an input or output; for one in others, such as ``b/c``, also the field ``b.c``."""
        if _field(self._schema, name) is not None:
            return name
        field = in_field(name)
        return field if field != name and _path(self._schema, field) is not None else None


def column_names(argument: str, given: Any) -> tuple[str, ...]:
    """The names in a list that a user passes as an argument.

    Raises:
        ConfigurationError: It is empty, not a list, or holds something else than names.
    """
    received, advice, other = describe(given), "", given
    if isinstance(given, (list, tuple)):
        if given and all(isinstance(each, str) for each in given):
            return tuple(given)
        other = next((each for each in given if not isinstance(each, str)), None)
        received += f", one of which is {describe(other)}" if given else ""
    if isinstance(other, (list, tuple)) and other is not given:
        advice = f" For several columns per input or output, use a dict: {argument}={{name: [columns]}}."
    elif hasattr(other, "alias"):
        advice = " Pass the names of columns instead of Column objects; add computed columns with df.withColumn first."
    elif hasattr(given, "tolist"):
        advice = f" Convert it to a list: {argument}=list(...)."
    raise ConfigurationError(f"{argument} is {received}; expected the name of a column, or a list of names.{advice}")


def is_case_sensitive(session: Any) -> bool:
    """Whether column names are case-sensitive in a session; by default they are not."""
    return session is not None and str(session.conf.get("spark.sql.caseSensitive")).lower() == "true"


def quotes_are_patterns(session: Any) -> bool:
    """Whether names in backticks are regular expressions in SQL, and in ``frame[name]``; not in ``functions.col(name)``."""
    return str(session.conf.get("spark.sql.parser.quotedRegexColumnNames")).lower() == "true"


def column_named(name: str) -> Column:
    """A top-level column whose name may contain any character, also if `quotes_are_patterns`."""
    from pyspark.sql import functions

    return functions.col(quoted(name))


def quoted(name: str) -> str:
    """A column's name in backticks, which may contain any character."""
    return "`" + name.replace("`", "``") + "`"


def _path(kind: StructType, name: str) -> list[StructField] | None:
    """The field of this name, preceded by the structs that contain it. Names may contain dots."""
    from pyspark.sql.types import StructType

    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        field = _field(kind, ".".join(parts[:count]))
        if field is None:
            continue
        if count == len(parts):
            return [field]
        inner = field.dataType
        rest = _path(inner, ".".join(parts[count:])) if isinstance(inner, StructType) else None
        if rest is not None:
            return [field, *rest]
    return None


def _field(kind: StructType, name: str) -> StructField | None:
    exact = (field for field in kind.fields if field.name == name)
    return next(exact, None) or next((field for field in kind.fields if field.name.lower() == name.lower()), None)
