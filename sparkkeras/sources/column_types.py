"""Checks that the types and sizes of columns fit a model's inputs: on the driver, before a job starts.

Spark gives the types of a SQL function's arguments only to the workers, so there the same checks run on the first batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkkeras.data.columns import IMAGE_STRUCT, VECTOR_FIELDS, Leaf, Loader
from sparkkeras.data.invalid_rows import ALLOWS_NUMBERS, instead_of_nulls
from sparkkeras.data.schema import InputSpec
from sparkkeras.errors import ConfigurationError, DataError, counted
from sparkkeras.sources.column_names import ColumnFinder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType


def check_types(leaf: Leaf, finder: ColumnFinder) -> None:
    """Check the columns of an array.

    Raises:
        DataError: A column does not exist, or its type or width does not fit the model.
        ConfigurationError: The loader's arrays do not fit the model, or it would have to load several columns.
    """
    for name in leaf.columns:
        kind, _ = finder.type_of(name)
        if leaf.loader is None:
            _check_type(name, kind, leaf)
        elif leaf.together:
            raise ConfigurationError(f"a loader takes one column, received {list(leaf.columns)}.")
        else:
            leaf.loader.check(name, kind.simpleString())
    if leaf.together and leaf.takes_text and len({_holds_strings(finder.type_of(name)[0]) for name in leaf.columns}) > 1:
        raise DataError(
            f"{leaf.label} are combined into one array, which cannot hold both strings and numbers. Pass a dict, "
            "features={'name': 'column', ...}, of which transform= receives a dict of arrays, or give the model an input "
            "for each."
        )
    spec = leaf.input if leaf.fits else None
    if spec is None or spec.shape is None:
        return
    if leaf.loader is not None:
        _check_loaded_shape(leaf, leaf.loader, spec)
        return
    widths = [_width(*finder.type_of(name)) for name in leaf.columns]
    if None in widths or None in spec.shape:
        return
    width = sum(width or 0 for width in widths)
    if width != math.prod(size or 0 for size in spec.shape):
        raise DataError(
            f"{leaf.label} {'has' if len(leaf.columns) == 1 else 'have'} {counted(width, 'value')} per row, but the model's "
            f"{spec.title} expects rows of shape {spec.shape}. Choose other columns, or change the model's input."
        )


def check_nulls(features: Sequence[Leaf], labelled: bool, finder: ColumnFinder) -> None:
    """Reject ``on_invalid="allow"``, which replaces nulls by NaN, where all features are strings.

    Raises:
        DataError: All columns of features hold strings, and one of them may hold nulls.
    """
    names = [name for leaf in features for name in leaf.columns]
    if any(leaf.loader is not None for leaf in features) or not all(
        _holds_strings(finder.type_of(name)[0]) for name in names
    ):
        return
    name = next((name for name in names if finder.may_be_null(name)), None)
    if name is not None:
        raise DataError(
            f"column {name!r} holds strings and may hold nulls, but {ALLOWS_NUMBERS}. Replace nulls "
            f"(df.fillna({{{name!r}: ''}})), or {instead_of_nulls(labelled)}."
        )


def _check_loaded_shape(leaf: Leaf, loader: Loader, spec: InputSpec) -> None:
    """Raise `ConfigurationError` if a loader's arrays cannot fit an input."""
    if not spec.takes(loader.shape):
        preprocesses = getattr(loader, "preprocessing", None) is not None
        preprocessing = ", or change its preprocessing, which determines the shape too" if preprocesses else ""
        raise ConfigurationError(
            f"the loader of {leaf.label} returns arrays of shape {loader.shape}, but the model's {spec.title} expects "
            f"{spec.shape}: set the arguments of the loader accordingly{preprocessing}."
        )


def check_argument(leaf: Leaf, name: str, column: pa.Array) -> None:
    """Check the type of an argument of a SQL function, on a worker. ``name`` is its name in messages.

    Raises:
        DataError: The model cannot take the type.
    """
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import NullType, StructType

    kind = from_arrow_type(column.type)
    if isinstance(kind, NullType):  # the NULL of SQL, which stands for any value
        return
    if leaf.loader is not None:
        leaf.loader.check(name, kind.simpleString())
    elif not isinstance(kind, StructType) or tuple(kind.names) != VECTOR_FIELDS:
        _check_type(name, kind, leaf)


def _check_type(name: str, kind: DataType, leaf: Leaf) -> None:
    from pyspark.sql import types

    if leaf.takes_text and _holds_strings(kind):
        return
    inner = kind
    while isinstance(inner, types.ArrayType):
        inner = inner.elementType
    if leaf.needs_text:
        assert leaf.input is not None
        advice = "Cast it: CAST(... AS STRING), in Python column.cast('string')."
        if isinstance(inner, types.BinaryType):
            advice = "Decode it: decode(..., 'UTF-8')."
        raise DataError(
            f"{leaf.shown(name)} has the type {kind.simpleString()}, but the model's {leaf.input.title} takes strings: "
            f"expected a string, or an array of strings. {advice}"
        )
    if isinstance(inner, (types.NumericType, types.BooleanType)) or (_is_vector(kind) and inner is kind):
        return
    if isinstance(inner, types.BinaryType) and inner is kind and leaf.input is not None:
        return
    type_name = kind.simpleString()
    if isinstance(inner, types.StringType):
        advice = (
            "Encode text first, for instance with pyspark.ml.feature.StringIndexer, or with keras.layers.StringLookup or "
            "TextVectorization in transform=. Cast text that is a number: CAST(... AS DOUBLE)."
        )
        if inner is kind and leaf.input is not None and len(leaf.input.shape or ()) == 3:
            advice = f"If these are paths of images, pass loader={_loader_call(leaf)}. {advice}"
    elif isinstance(inner, types.BinaryType):
        advice = "Bytes require a model input of known shape, to be read as tensors, or a loader (image_loader(...))."
    elif type_name == IMAGE_STRUCT:
        advice = f"It is the struct of Spark's image source: pass loader={_loader_call(leaf)}."
    elif isinstance(inner, types.MapType) or (isinstance(inner, types.StructType) and inner is not kind):
        advice = "Make a column of each value to use first, such as m['key'] of a map, or s.field of an array of structs."
    elif isinstance(inner, types.StructType):
        advice = "Name the fields to use (struct.field), or pass loader=image_loader(...) if it holds images."
    else:
        function = "unix_date" if isinstance(inner, types.DateType) else "unix_timestamp"
        advice = f"Convert it to numbers first, for instance with {function}."
    raise DataError(
        f"{leaf.shown(name)} has the type {type_name}; expected numbers, booleans, arrays of them, or vectors. {advice}"
    )


def _holds_strings(kind: DataType) -> bool:
    """Whether a column holds strings, or arrays of them."""
    from pyspark.sql import types

    return isinstance(getattr(kind, "elementType", kind), types.StringType)


def _loader_call(leaf: Leaf) -> str:
    """The call of `image_loader` that fits an input, for messages."""
    shape = (leaf.input.shape if leaf.input is not None else None) or ()
    return f"image_loader({shape[:2]})" if len(shape) == 3 and None not in shape[:2] else "image_loader(size)"


def _is_vector(kind: DataType) -> bool:
    return type(kind).__name__ == "VectorUDT"


def _width(kind: DataType, metadata: Mapping[str, Any]) -> int | None:
    """The number of values per row, if the type or the metadata determine it."""
    from pyspark.sql import types

    if isinstance(kind, (types.NumericType, types.BooleanType, types.StringType)):
        return 1
    size = (metadata.get("ml_attr") or {}).get("num_attrs") if _is_vector(kind) else None
    return None if size is None else int(size)
