"""The types of columns and features: a DataFrame's schema as features of an Example, and columns inferred from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkkeras.errors import ConfigurationError, DataError, known_names
from sparkkeras.formats.examples import BYTES, KINDS, VALUES, FeatureStats, Field

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


BINARY_WITH_SCHEMA = (
    "binary_features applies only without a schema: leave it out, and declare these columns binary in the schema."
)


def fields_of(schema: StructType, written: bool = False) -> tuple[Field, ...]:
    """The features for the columns of a schema to read, or of a DataFrame to write.

    Raises:
        DataError: An Example cannot hold the type of a column.
        ConfigurationError: A schema to read has no columns, or several with the same name; for a DataFrame a `DataError`.
    """
    if not 0 < len(schema.names) == len(set(schema.names)):
        what = f"has the columns {schema.names}; expected at least one column and unique names"
        raise (
            DataError(f"the DataFrame {what}: rename with toDF(...).") if written else ConfigurationError(f"schema {what}.")
        )
    return tuple(_field(field.name, field.dataType, written, field.nullable) for field in schema)


def _field(name: str, kind: DataType, written: bool, nullable: bool) -> Field:
    from pyspark.sql.types import ArrayType

    if written and type(kind).__name__ == "VectorUDT":
        return Field(name, "double", is_array=True, is_vector=True)
    is_array = isinstance(kind, ArrayType)
    value = kind.elementType if isinstance(kind, ArrayType) else kind
    known = value.simpleString().partition(" ")[0]  # the type of a string may be followed by its collation
    if known in VALUES:
        return Field(name, known, is_array, nullable)
    type_name = known.partition("(")[0].partition("<")[0]
    raise DataError(
        f"column {name!r} has the type {kind.simpleString()}, which an Example cannot hold: expected a number, a boolean, a "
        f"string, bytes, or an array of these. {_REMEDIES.get(type_name, 'Cast it to one of these.')}"
    )


_REMEDIES = {
    "date": "Use unix_date(), and date_from_unix_date() after loading, or cast it to string.",
    "timestamp": "Use unix_micros(), and timestamp_micros() after loading, or cast it to string.",
    "timestamp_ntz": "Cast it to string.",
    "decimal": "Cast it to double (float32 in the file) or to string.",
    "map": "Use map_keys() and map_values() as separate columns, or to_json().",
    "struct": "Select its fields as separate columns, or use to_json().",
    "array": "Use flatten(), and store the shape in a separate column.",
    "vector": "Load it as array<float> and use pyspark.ml.functions.array_to_vector().",
}


def ddl(fields: Sequence[Field]) -> str:
    """The schema of a DataFrame with columns for fields."""
    return ", ".join(
        f"`{field.name.replace('`', '``')}` {field.type_name}{'' if field.nullable else ' NOT NULL'}" for field in fields
    )


def infer_fields(stats: Mapping[str, FeatureStats], path: str, binary: Sequence[str] = ()) -> tuple[Field, ...]:
    """The columns for the features of sampled records, sorted by name.

    Args:
        stats: The statistics of the features, by name.
        path: The path of the files, for error messages.
        binary: Names of features that become binary even if their bytes are valid UTF-8.

    Raises:
        DataError: There are no features, or one of ``binary`` is unknown or does not hold bytes.
    """
    if not stats:
        raise DataError(
            f"cannot infer the columns of {path!r}: no record sampled there has features. Set schema, for instance 'x "
            "array<float>, y bigint'."
        )
    for name in binary:
        if name not in stats:
            raise DataError(f"binary_features: {path!r} has no feature {name!r}. {known_names(name, stats)}")
        if stats[name].kind != BYTES:
            raise DataError(
                f"binary_features: feature {name!r} holds {KINDS[stats[name].kind]} values in {stats[name].where}; expected "
                "bytes. Leave it out."
            )
    return tuple(stats[name].field(name in binary) for name in sorted(stats))
