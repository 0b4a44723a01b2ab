"""DataFrames as data: which columns are the features, labels and sample weights of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from sparkkeras.data.block import HELD_BYTES, Block, Form, Structure, by_name, describe, in_field, items_by_path, name_of
from sparkkeras.data.columns import ColumnValues, Leaf, Loader, label_loaders, sparse_width
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema, on_optional
from sparkkeras.errors import ConfigurationError, DataError, known_names
from sparkkeras.sources.column_names import ColumnFinder, column_names, quotes_are_patterns
from sparkkeras.sources.column_types import check_nulls, check_types
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str] | Mapping[str, Any]]
"""A column, several columns, or a dict of them by input or output name, nested as those of the model."""

Loaders = Loader | Mapping[str, Loader]
"""A loader for the model's only input, or a dict of them by the names of inputs and, for labels, of outputs."""


PACKED_COLUMNS = 16
"""The least number of columns of a type that Spark passes to Python as one: each column alone costs time in the JVM."""


def is_frame(data: Any) -> TypeGuard[DataFrame]:
    """Whether data is a Spark DataFrame, of a classic session or of Spark Connect."""
    from pyspark.sql import DataFrame

    return isinstance(data, DataFrame)


@dataclass(frozen=True)
class ColumnMapping:
    """The columns that a user maps to features, labels and sample weights.

    Attributes:
        features: The feature columns; ``None``: the column ``features``, or columns with the names of the inputs.
        label: The label columns; ``None``: the column ``label``, or columns with the names of the outputs.
        sample_weight: The columns of sample weights; ``None``: no weights.
        loader: Loaders for columns that hold other values than numbers, such as images.
        fits: Whether columns must fit the model; see `Leaf.fits`.
        features_only: Whether no column holds labels, also where labels are optional.
    """

    features: Columns | None = None
    label: Columns | None = None
    sample_weight: Columns | None = None
    loader: Loaders | None = None
    fits: bool = True
    features_only: bool = False

    def select(self, frame: DataFrame, reader: Reader) -> Selection:
        """Select the columns of the model's arrays, and check that they exist and that their types fit.

        Args:
            frame: The DataFrame, of which only the schema is used.
            reader: Reads and checks the rows. Where labels are optional, a DataFrame without their columns has none.

        Raises:
            DataError: A column is missing, or its type or width does not fit the model.
            ConfigurationError: The mapping does not fit the model's inputs or outputs.
        """
        finder = ColumnFinder(frame)
        schema, labelled = reader.schema, reader.labelled
        if reader.labels_optional and self.label is None:
            labelled &= not {"label", *(spec.name for spec in schema.outputs)}.isdisjoint(frame.schema.names)
        labelled &= not self.features_only
        loaders = self.loaders(schema)
        x, leaves = self._match_features(schema, finder)
        form = Form(x)
        leaves = [
            replace(
                leaf, fits=self.fits and leaf.input is not None, loader=loaders.get(leaf.input.name if leaf.input else "")
            )
            for leaf in leaves
        ]
        if labelled:
            y, labels = _match_columns("label", self.label, schema.outputs, schema.y, finder)
            of_outputs = label_loaders(loaders, schema)
            labels = [
                replace(leaf, fits=self.fits, loader=of_outputs.get(leaf.input.name if leaf.input else ""))
                for leaf in labels
            ]
            form, leaves = Form(x, y), leaves + [_label_leaf(leaf, leaves) for leaf in labels]
            if self.sample_weight is not None:
                weight, weights = _match_weights(self.sample_weight, schema, finder)
                for leaf in weights:
                    if leaf.together:
                        raise ConfigurationError(
                            f"sample_weight={list(leaf.columns)!r}: expected one column, or one for each output "
                            "({output name: column}). Multiply the columns, or choose one."
                        )
                form, leaves = Form(x, y, weight), leaves + [replace(leaf, input=None) for leaf in weights]
        for leaf in leaves:
            check_types(leaf, finder)
        if reader.on_invalid == "allow":
            check_nulls(leaves[form.span("x")], labelled, finder)
        selection = Selection(reader, form, tuple(leaves))
        return replace(selection, packs=_packs(selection.names, finder))

    def _match_features(self, schema: Schema, finder: ColumnFinder) -> tuple[Structure, list[Leaf]]:
        """Match the feature columns; a transform may get a dict of them by other names than those of the inputs."""
        given, specs = self.features, {spec.name: spec for spec in schema.inputs}
        if self.fits or not isinstance(given, Mapping) or set(by_name(given, schema.x)) <= set(specs):
            return _match_columns("features", given, schema.inputs, schema.x, finder)
        return _named_columns("features", given, specs, schema.x)

    def loaders(self, schema: Schema) -> dict[str, Loader]:
        """The loader of each input and output that has one, by its name."""
        if self.loader is None:
            return {}
        for each in by_name(self.loader).values() if isinstance(self.loader, Mapping) else [self.loader]:
            complete = all(hasattr(each, attribute) for attribute in ("shape", "on_error", "check"))
            if not complete or not callable(each) or isinstance(each, type):
                call = f" Call the class: loader={each.__name__}(...)." if isinstance(each, type) else ""
                raise ConfigurationError(
                    f"loader is {describe(each)}; expected a loader, such as image_loader(size) or PadSequences(maxlen)."
                    f"{call}"
                )
        if isinstance(self.loader, Mapping):
            given = by_name(self.loader)
            names = [spec.name for spec in (*schema.inputs, *schema.outputs)]
            for name in given:
                if name not in names:
                    raise ConfigurationError(
                        f"loader: the model has no input or output {name!r}. {known_names(name, names)}"
                    )
            return given
        if len(schema.inputs) > 1:
            raise ConfigurationError(
                f"loader: the model has {len(schema.inputs)} inputs, so pass {{input name: loader}} with names from "
                f"{[spec.name for spec in schema.inputs]}."
            )
        return {schema.inputs[0].name if schema.inputs else "": self.loader}


@dataclass(frozen=True)
class Selection:
    """The columns that form a block; called, it converts the Arrow batches of a partition to blocks.

    Attributes:
        reader: Reads and checks the rows.
        form: The structure of the features, labels and weights in the block.
        leaves: The columns of each array, in the order of the block. Labels that equal features have the same leaf, which is
            read once.
        packs: The positions in `names` of columns of the same type that Spark passes to Python as one column of arrays.
    """

    reader: Reader
    form: Form
    leaves: tuple[Leaf, ...]
    packs: tuple[tuple[int, ...], ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the columns to read, in the order of the leaves."""
        return [name for leaf in self._distinct for name in leaf.columns]

    @property
    def _distinct(self) -> list[Leaf]:
        return list({id(leaf): leaf for leaf in self.leaves}.values())

    def mapped(self, side: str, specs: Sequence[InputSpec]) -> Columns | None:
        """The columns of features (``"x"``) or labels (``"y"``) by the names of inputs or outputs, as for `fit`."""
        structure = self.form.x if side == "x" else self.form.y
        if structure is None:
            return None
        columns = [list(leaf.columns) if leaf.together else leaf.columns[0] for leaf in self.leaves[self.form.span(side)]]
        if structure.bare:
            return columns[0]
        if structure.is_nested and not specs:  # names of nested inputs are only known for inputs that are known
            return cast("Columns", structure.build(columns))
        return dict(zip(structure.names or [spec.name for spec in specs], columns, strict=True))

    def columns(self, frame: DataFrame) -> list[Column]:
        """The columns to pass to Python, which `read` expects: those that are not packed, and the packed ones."""
        from pyspark.sql import functions

        if not quotes_are_patterns(frame.sparkSession):
            return [functions.expr(expression) for expression in self._expressions(frame)]
        finder = ColumnFinder(frame)
        columns = [finder.column(name) for name in self.names]
        packs = [functions.array(*(columns[position] for position in pack)) for pack in self.packs]
        return [*(columns[position] for position in self._alone), *packs]

    def narrowed(self, frame: DataFrame) -> DataFrame:
        """The frame with only these columns, under names without special characters; see `columns`."""
        if quotes_are_patterns(frame.sparkSession):
            return frame.select(*(column.alias(f"c{number}") for number, column in enumerate(self.columns(frame))))
        # One call of the JVM: each Column and each alias would be a call of its own, about a millisecond.
        return frame.selectExpr(*(f"{column} AS c{number}" for number, column in enumerate(self._expressions(frame))))

    def _expressions(self, frame: DataFrame) -> list[str]:
        finder = ColumnFinder(frame)
        columns = [finder.expression(name) for name in self.names]
        packs = [f"array({', '.join(columns[position] for position in pack)})" for pack in self.packs]
        return [*(columns[position] for position in self._alone), *packs]

    @property
    def _alone(self) -> list[int]:
        """The positions in `names` of columns that are not packed."""
        packed = {position for pack in self.packs for position in pack}
        return [position for position in range(len(self.names)) if position not in packed]

    def __call__(self, partition: int, batches: Iterable[pa.RecordBatch]) -> Iterator[Block]:
        """The blocks of a partition."""
        first = 0
        for batch in batches:
            yield from (block for block, _ in self.blocks(batch.columns, f"partition {partition}", first))
            first += batch.num_rows

    def blocks(self, columns: Sequence[pa.Array], where: str, first: int) -> Iterator[tuple[Block, Array | None]]:
        """The rows of one batch, each with its mask of complete rows (see `Reader.read_columns`).

        The batch becomes one block, or several if rows become large by a loader, such as images, or as dense vectors.
        """
        widths = [width for width in map(sparse_width, columns) if width]
        sizes = [_rows_at_once(leaf.loader) for leaf in self.leaves if leaf.loader is not None]
        size = min([*sizes, *(HELD_BYTES // (8 * width) for width in widths)], default=len(columns[0]))
        size = max(1, size)
        for start in range(0, len(columns[0]), size):
            part = [column.slice(start, size) for column in columns]
            yield self.reader.read_columns(self.read(part, where, first + start), self.form, where, first + start)

    def read(self, columns: Sequence[pa.Array], where: str = "the batch", first: int = 0) -> list[ColumnValues]:
        """Read the values of each array.

        Args:
            columns: Arrow columns, in the order of `columns`.
            where: See `Leaf.read`.
            first: See `Leaf.read`.
        """
        remaining = iter(self._unpacked(columns) if self.packs else columns)
        found = {id(leaf): leaf.read([next(remaining) for _ in leaf.columns], where, first) for leaf in self._distinct}
        return [found[id(leaf)] for leaf in self.leaves]

    def _unpacked(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """The columns in the order of `names`."""
        alone = self._alone
        unpacked = dict(zip(alone, columns, strict=False))
        for pack, column in zip(self.packs, columns[len(alone) :], strict=True):
            unpacked |= dict(zip(pack, _elements(column, len(pack)), strict=True))
        return [unpacked[position] for position in range(len(unpacked))]


def _elements(lists: pa.ListArray, width: int) -> list[pa.Array]:
    """The first elements of all lists, which have this width, then the second ones, and so on."""
    import pyarrow as pa
    from pyarrow import compute

    values = lists.flatten()
    if values.null_count:
        return [compute.list_element(lists, number) for number in range(width)]
    rows = values.to_numpy().reshape(-1, width)
    columns = np.empty(rows.shape[::-1], rows.dtype)
    for start in range(0, len(rows), _TRANSPOSED_ROWS):  # in pieces that fit into the cache
        columns[:, start : start + _TRANSPOSED_ROWS] = rows[start : start + _TRANSPOSED_ROWS].T
    return [pa.array(column) for column in columns]


_TRANSPOSED_ROWS = 64


def _packs(names: Sequence[str], finder: ColumnFinder) -> tuple[tuple[int, ...], ...]:
    """The positions of columns to pack, by their type: all values keep it."""
    from pyspark.sql import types

    of_type: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        kind, _ = finder.type_of(name)
        if isinstance(kind, (types.DoubleType, types.FloatType, types.IntegralType)):
            of_type.setdefault(kind.simpleString(), []).append(position)
    return tuple(tuple(positions) for positions in of_type.values() if len(positions) >= PACKED_COLUMNS)


def _rows_at_once(loader: Loader) -> int:
    sizes = [size or 1024 for size in loader.shape]  # an unknown size may be large
    return max(1, HELD_BYTES // (4 * math.prod(sizes)))


def split_by(frame: DataFrame, name: str) -> tuple[DataFrame, DataFrame]:
    """Split a DataFrame into the rows whose column ``name`` is false, 0 or null, and the others.

    Raises:
        DataError: The column does not exist, or is neither boolean nor numeric.
    """
    from pyspark.sql import functions, types

    finder = ColumnFinder(frame)
    kind, _ = finder.type_of(name)
    if not isinstance(kind, (types.BooleanType, types.NumericType)):
        raise DataError(
            f"column {name!r} marks the validation rows, so it must be boolean or numeric; it has the type "
            f"{kind.simpleString()}."
        )
    chosen = functions.coalesce(finder.column(name).cast("boolean"), functions.lit(False))
    return frame.where(~chosen), frame.where(chosen)


def _match_columns(
    argument: str,
    given: Columns | None,
    specs: Sequence[InputSpec],
    expected: Structure | None,
    finder: ColumnFinder,
) -> tuple[Structure, list[Leaf]]:
    """Match the columns of an argument to the model's inputs or outputs.

    Args:
        argument: ``"features"``, ``"label"`` or ``"sample_weight"``.
        given: The columns; ``None``: those with the default names.
        specs: The inputs or outputs; empty if they are unknown.
        expected: Their structure, if they are a dict or nested.
        finder: Finds the default columns.

    Returns:
        The structure of the arrays, and a leaf for each of them.
    """
    names = [spec.name for spec in specs]
    if len(specs) > 1 and isinstance(given, str) and given == argument != "sample_weight":
        given = None  # the default of a param of Spark ML, which is a name
    kind = "input" if argument == "features" else "output"
    if given is None:
        given = finder.default(argument, names)
    if isinstance(given, Mapping):
        partial = argument == "label"  # outputs without a loss need no labels
        received = by_name(given, expected)
        if not received or (len(specs) > 1 and not partial and set(received) != set(names)):
            raise ConfigurationError(
                f"{argument} has the keys {sorted(received)}, but the model's {kind}s are {names}."
                + _in_structure(argument, expected)
                + on_optional(spec for spec in specs if spec.name not in received)
            )
        for key in received:
            if names and key not in names:
                raise ConfigurationError(
                    f"{argument}: the model has no {kind} {key!r}. {known_names(key, names)}"
                    + _in_structure(argument, expected)
                )
        structure, leaves = _named_columns(argument, given, dict(zip(names, specs, strict=True)), expected)
        return Structure() if len(specs) == 1 else structure, leaves  # Keras expects the only array itself
    if isinstance(given, str) or len(specs) < 2:
        if len(specs) > 1 and argument != "sample_weight":
            raise ConfigurationError(
                f"{argument}={given!r}: the model has {len(specs)} {kind}s: pass {{name: column}} for {names}."
                + _in_structure(argument, expected)
            )
        return Structure(), [_leaf(argument, given, specs[0] if len(specs) == 1 else None)]
    if expected is not None and expected.is_nested and isinstance(given, (list, tuple)):
        parts = dict(items_by_path(given, expected))
        if set(parts) == set(expected.paths):
            return expected, [_leaf(argument, parts[path], spec) for path, spec in zip(expected.paths, specs, strict=True)]
        if not all(isinstance(each, str) for each in given):
            raise ConfigurationError(
                f"{argument}={given!r} does not fit the model's {kind}s.{_in_structure(argument, expected)}"
            )
    columns = column_names(argument, given)
    if len(columns) != len(specs):
        raise ConfigurationError(
            f"{argument}={list(columns)!r}: the model has {len(specs)} {kind}s: pass one column for each, or "
            f"{{name: column(s)}} for {names}.{_in_structure(argument, expected)}"
        )
    ordered = by_position(argument, kind, columns, names)
    structure = expected if expected is not None and expected.is_nested else Structure.several(len(columns))
    return structure, [_leaf(argument, column, spec) for column, spec in zip(ordered, specs, strict=True)]


def _in_structure(shown: str, expected: Structure | None) -> str:
    """How to pass the columns of nested inputs or outputs, for a message; empty for others."""
    if expected is None or not expected.is_nested:
        return ""
    return f" Pass {shown}={expected.shown('column')}."


def by_position(shown: str, kind: str, columns: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """The columns of a list in the order of the inputs or outputs; those that have their names go by name.

    Raises:
        ConfigurationError: A column has the name of another input or output than the one at its position.
    """
    named = {_in_any_case(column): column for column in columns}
    if set(named) == set(map(_in_any_case, names)) and len(named) == len(names):
        return [named[_in_any_case(name)] for name in names]
    check_positions(f"{shown}={list(columns)!r}", kind, dict(zip(names, columns, strict=True)), f"{shown}={{name: column}}")
    return columns


def check_positions(shown: str, kind: str, columns: Mapping[str, str], remedy: str) -> None:
    """Reject columns by position of which one has the name of another input or output; Spark ignores case in names.

    Args:
        shown: The columns, for the message.
        kind: ``"input"`` or ``"output"``.
        columns: The column at the position of each input or output.
        remedy: How to pass columns in the intended order, for the message.

    Raises:
        ConfigurationError: There is such a column.
    """
    names = {_in_any_case(name): name for name in columns}
    for name, column in columns.items():
        other = names.get(_in_any_case(column), name)
        if other != name:
            mapping = ", ".join(f"{each!r} gets {columns[each]!r}" for each in columns)
            raise ConfigurationError(
                f"{shown} are mapped to the model's {kind}s by position ({mapping}), but {column!r} is the name of the "
                f"{kind} {other!r}: pass {remedy}."
            )


def _in_any_case(name: str) -> str:
    """What the name of an input and a column of this name have in common; that of ``b/c`` is the field ``b.c``."""
    return in_field(name).lower()


def _label_leaf(leaf: Leaf, features: Sequence[Leaf]) -> Leaf:
    """The leaf of labels. If features contain the same columns, as for an autoencoder, the labels are read like these."""
    for same in features:
        if (same.columns, same.together) == (leaf.columns, leaf.together):
            if (
                leaf.loader is None
                and same.input is not None
                and leaf.input is not None
                and same.input.shape == leaf.input.shape
            ):
                return same
            return replace(leaf, input=None, loader=leaf.loader or same.loader)
    return replace(leaf, input=None)


def _match_weights(given: Columns, schema: Schema, finder: ColumnFinder) -> tuple[Structure, list[Leaf]]:
    """One weight for all outputs, or one for each, in the outputs' order and structure, since Keras does not match names."""
    structure, leaves = _match_columns("sample_weight", given, schema.outputs, schema.y, finder)
    if structure.bare:
        return structure, leaves
    if structure.names is not None:
        of_outputs = dict(zip(structure.names, leaves, strict=True))
        leaves = [of_outputs[spec.name] for spec in schema.outputs]
    return schema.y or Structure.several(len(leaves)), leaves


def _named_columns(
    argument: str, given: Mapping[str, Any], specs: Mapping[str, InputSpec], expected: Structure | None
) -> tuple[Structure, list[Leaf]]:
    """The structure and the leaves of columns in dicts; the names of nested inputs may also be keys: ``{"b/c": column}``."""
    columns = dict(items_by_path(given, expected or Structure()))
    if expected is not None and expected.is_nested and set(map(name_of, columns)) <= set(expected.names or ()):
        named = by_name(given, expected)
        columns = {path: named[name_of(path)] for path in expected.paths if name_of(path) in named}
    structure = Structure(tuple(columns))
    labels = structure.labels(argument)
    return structure, [
        _leaf(label, each, specs.get(name_of(path))) for label, (path, each) in zip(labels, columns.items(), strict=True)
    ]


def _leaf(argument: str, given: Any, spec: InputSpec | None) -> Leaf:
    if isinstance(given, str):
        return Leaf((given,), input=spec)
    names = column_names(argument, given)
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigurationError(f"{argument}={list(names)!r} has the column {repeated!r} twice; name each column once.")
    return Leaf(names, together=True, input=spec)
