"""DataFrames as data: maps columns to model inputs and labels, and converts rows to blocks, batch by Arrow batch."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import numpy as np
from pyspark.serializers import BatchedSerializer, CPickleSerializer, Serializer

from sparkkeras.data.block import Block, Form, Structure, describe
from sparkkeras.data.column_values import ColumnValues, Terms
from sparkkeras.data.columns import IMAGE_STRUCT, VECTOR_FIELDS, Leaf, Loader
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.data.sizes import HELD_BYTES
from sparkkeras.errors import ConfigurationError, DataError, known_names
from sparkkeras.sources.tasks import task_context
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.job_errors import translated
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

R = TypeVar("R")

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""A column, several columns, or a dict of them by input or output name."""

Loaders = Loader | Mapping[str, Loader]


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
        loader: Loaders for feature columns that hold other values than numbers, such as images.
        fits: Whether columns must fit the model; see `Leaf.fits`.
    """

    features: Columns | None = None
    label: Columns | None = None
    sample_weight: Columns | None = None
    loader: Loaders | None = None
    fits: bool = True

    def select(self, frame: DataFrame, schema: Schema, labelled: bool) -> Selection:
        """Select the columns of the model's arrays, and check that they exist and that their types fit.

        Raises:
            DataError: A column is missing, or its type or width does not fit the model.
            ConfigurationError: The mapping does not fit the model's inputs or outputs.
        """
        finder = _Finder(frame)
        loaders = self.loaders(schema)
        x, leaves = _side("features", self.features, schema.inputs, finder)
        form = Form(x)
        leaves = [
            Leaf(
                leaf.columns, leaf.together, leaf.input, self.fits, loaders.get(leaf.input.name if leaf.input else "", None)
            )
            for leaf in leaves
        ]
        if labelled:
            y, labels = _side("label", self.label, schema.outputs, finder)
            form, leaves = Form(x, y), leaves + [Leaf(leaf.columns, leaf.together) for leaf in labels]
            if self.sample_weight is not None:
                weight, weights = _weights(self.sample_weight, schema, finder)
                for leaf in weights:
                    if leaf.together:
                        raise ConfigurationError(
                            f"sample_weight={list(leaf.columns)!r}: expected one column, or one for each output "
                            "({output name: column}). Multiply the columns, or choose one."
                        )
                form, leaves = Form(x, y, weight), leaves + [Leaf(leaf.columns) for leaf in weights]
        for leaf in leaves:
            _check_types(leaf, finder)
        return Selection(form, tuple(leaves))

    def loaders(self, schema: Schema) -> dict[str, Loader]:
        """The loader of each input that has one, by input name."""
        if self.loader is None:
            return {}
        for each in self.loader.values() if isinstance(self.loader, Mapping) else [self.loader]:
            complete = all(hasattr(each, attribute) for attribute in ("shape", "on_error", "check"))
            if not complete or not callable(each) or isinstance(each, type):
                raise ConfigurationError(f"loader is {describe(each)}; expected a loader, such as image_loader(size).")
        if isinstance(self.loader, Mapping):
            names = [spec.name for spec in schema.inputs]
            for name in self.loader:
                if name not in names:
                    raise ConfigurationError(f"loader: the model has no input {name!r}. {known_names(name, names)}")
            return dict(self.loader)
        if len(schema.inputs) > 1:
            raise ConfigurationError(
                f"loader: the model has {len(schema.inputs)} inputs, so pass {{input name: loader}} with names from "
                f"{[spec.name for spec in schema.inputs]}."
            )
        return {schema.inputs[0].name if schema.inputs else "": self.loader}


@dataclass(frozen=True)
class Selection:
    """The columns that form a block."""

    form: Form
    leaves: tuple[Leaf, ...]

    @property
    def names(self) -> list[str]:
        """The names of all columns, in the order of the leaves."""
        return [name for leaf in self.leaves for name in leaf.columns]

    def columns(self, frame: DataFrame) -> list[Column]:
        """All columns, in the order of the leaves."""
        finder = _Finder(frame)
        return [finder.column(name) for name in self.names]

    def narrowed(self, frame: DataFrame) -> DataFrame:
        """The frame with only these columns, under names without special characters."""
        return frame.select(*(column.alias(f"c{number}") for number, column in enumerate(self.columns(frame))))

    def blocks(
        self, reader: Reader, columns: Sequence[pa.Array], where: str, first: int
    ) -> Iterator[tuple[Block, Array | None]]:
        """The rows of one batch, each with its mask of complete rows (see `Reader.read_columns`).

        The batch becomes one block, or several if a loader produces large rows, such as images.
        """
        size = min((_rows_at_once(leaf.loader) for leaf in self.leaves if leaf.loader is not None), default=len(columns[0]))
        for start in range(0, len(columns[0]), max(1, size)):
            some = [column.slice(start, size) for column in columns]
            yield reader.read_columns(self.read(some, where, first + start), self.form, where, first + start)

    def read(self, columns: Sequence[pa.Array], where: str = "the batch", first: int = 0) -> list[ColumnValues]:
        """Read the values of each array; for ``where`` and ``first`` see `Leaf.read`."""
        given = iter(columns)
        return [leaf.read([next(given) for _ in leaf.columns], where, first) for leaf in self.leaves]


def _rows_at_once(loader: Loader) -> int:
    sizes = [size or 1024 for size in loader.shape]  # an unknown size may be large
    return max(1, HELD_BYTES // (4 * int(np.prod(sizes, dtype=np.int64))))


@dataclass(frozen=True)
class BatchesToBlocks:
    """Converts Arrow batches of a selection to validated blocks."""

    selection: Selection
    reader: Reader

    def __call__(self, partition: int, batches: Iterable[pa.RecordBatch]) -> Iterator[Block]:
        """The blocks of a partition."""
        first = 0
        for batch in batches:
            yield from (block for block, _ in self.blocks(batch.columns, f"partition {partition}", first))
            first += batch.num_rows

    def blocks(self, columns: Sequence[pa.Array], where: str, first: int) -> Iterator[tuple[Block, Array | None]]:
        """The rows of one batch; see `Selection.blocks`."""
        return self.selection.blocks(self.reader, columns, where, first)


@dataclass(frozen=True)
class ArgumentsToBlocks:
    """Converts the arguments of a column function to blocks: one argument for each input, or several for a single input.

    Error messages name the function and the index of the argument, since calls in SQL have no column names or options.

    Attributes:
        reader: Reads and checks the rows.
        loader: Converts arguments to inputs.
        fits: Whether arguments must fit the model; see `Leaf.fits`.
        function: The function as users call it, for messages.
        make: The words before the name of an option in messages, such as "make the function with".
    """

    reader: Reader
    loader: Loaders | None = None
    fits: bool = True
    function: str = "the function"
    make: str = "make the function with"

    def argument_count_error(self, count: int) -> str:
        """The error message for a number of arguments that the model cannot take; empty if it can."""
        specs, wanted = self.reader.schema.inputs, self._values_wanted
        if len(specs) > 1:
            names = ", ".join(spec.name for spec in specs)
            expected, fits = f"{len(specs)} arguments, one for each input of the model ({names})", count == len(specs)
        elif self.loader is not None:
            expected, fits = "one argument, for its loader", count == 1
        elif wanted is not None:
            expected = f"{wanted} number(s), or arrays or vectors that hold as many in all"
            fits = 1 <= count <= wanted
        else:
            expected, fits = "at least one argument", count > 0
        return "" if fits else f"{self.function} takes {expected}; it received {count} argument(s)."

    @property
    def _values_wanted(self) -> int | None:
        """The total number of values that the arguments must hold; ``None`` if the model or a transform leaves it open."""
        specs = self.reader.schema.inputs
        shape = specs[0].shape if len(specs) == 1 and self.fits else None
        sizes = [size for size in shape or () if size is not None]
        return None if shape is None or len(sizes) < len(shape) else int(np.prod(sizes, dtype=np.int64))

    @property
    def _terms(self) -> Terms:
        wanted = self._values_wanted
        if len(self.reader.schema.inputs) > 1:
            fit = "Pass one array or vector for each input, of the size of the input."
        else:
            fit = f"Pass arguments that hold {wanted} number(s) in all." if wanted else "Pass arguments of another size."
        return Terms(
            give=self.make,
            fit=fit,
            fill="Fill it (coalesce), exclude such rows (WHERE ... IS NOT NULL)",
            function=self.function,
        )

    def blocks(self, columns: Sequence[pa.Array], where: str, first: int) -> Iterator[tuple[Block, Array | None]]:
        """The rows of one batch; see `Selection.blocks`."""
        error = self.argument_count_error(len(columns))
        if error:
            raise DataError(error)
        specs, loaders = self.reader.schema.inputs, ColumnMapping(loader=self.loader).loaders(self.reader.schema)
        names = [f"argument {number}" for number in range(1, len(columns) + 1)]
        if len(specs) > 1:
            structure = Structure(len(specs), bare=False)
            leaves = [
                Leaf((name,), False, spec, self.fits, loaders.get(spec.name), self._terms)
                for name, spec in zip(names, specs, strict=True)
            ]
        else:
            spec = specs[0] if specs else None
            structure = Structure()
            loader = loaders.get(spec.name if spec else "")
            leaves = [Leaf(tuple(names), len(names) > 1, spec, self.fits, loader, self._terms)]
        selection = Selection(Form(structure), tuple(leaves))
        for number, column in enumerate(columns):
            _check_argument(leaves[number if len(specs) > 1 else 0], names[number], column)
        yield from selection.blocks(self.reader, columns, where, first)


@dataclass(frozen=True)
class FrameBlocks:
    """The blocks of a DataFrame, over which tasks run as over an RDD; a `sparkkeras.sources.spark_dataset.Blocks`."""

    frame: DataFrame
    read: BatchesToBlocks

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return self.frame.rdd.getNumPartitions()

    def map(self, cluster: Cluster, call: Callable[[int, Iterable[Block]], Iterable[R]], training: bool) -> RDD[R]:
        """See `sparkkeras.sources.spark_dataset.Blocks.map`. Runs the shuffles of the frame's plan immediately."""
        from pyspark import RDD

        with cluster.training_workers() if training else nullcontext():
            results = self.frame.mapInArrow(OverBatches(self.read, call), "result binary")
        try:
            with cluster.cancellable():
                rdd = results.rdd
        except Exception as error:
            raise translated(error) from error
        return RDD(rdd._jrdd, rdd.ctx, _Results())


@dataclass(frozen=True)
class OverBatches:
    """Calls a function for the Arrow batches of a partition, and writes each result as a row of bytes."""

    read: BatchesToBlocks
    call: Callable[[int, Iterable[Block]], Iterable[Any]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the pickled results, each in its own batch."""
        from pyspark import TaskContext

        task = TaskContext.get()
        partition = 0 if task is None else task.partitionId()
        for result in self.call(partition, self.read(partition, batches)):
            yield payload(result)


def payload(result: Any) -> pa.RecordBatch:
    """A pickled result as a batch of one row."""
    import pyarrow as pa

    return pa.record_batch([pa.array([pickle.dumps(result, 5)], pa.binary())], ["result"])


@dataclass(frozen=True)
class OverColumns:
    """Runs a task over the batches of a column function's arguments; see `column_function`.

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


class ColumnFunction(Protocol):
    """A user-defined function of Spark over Arrow batches of columns."""

    def __call__(self, *columns: Column) -> Column:
        """The column of results."""
        ...

    def asNondeterministic(self) -> ColumnFunction:  # noqa: N802 - Spark's name
        """The same function, computed only once per row even if a query uses the column several times."""
        ...


def column_function(call: OverColumns, type_name: str) -> ColumnFunction:
    """Make a Spark function from columns to a column of the given type."""
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]
    from pyspark.util import PythonEvalType

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="It is preferred to specify type hints")  # an object's cannot be read
        function: Any = arrow_udf(call, type_name, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)
    return function  # type: ignore[no-any-return]


class _Results(Serializer):  # type: ignore[misc]
    """Unpickles the results of `OverBatches` from the rows that Spark passes to Python."""

    def load_stream(self, stream: Any) -> Iterator[Any]:
        rows = BatchedSerializer(CPickleSerializer()).load_stream(stream)
        return (pickle.loads(row[0]) for row in rows)


def split_by(frame: DataFrame, name: str) -> tuple[DataFrame, DataFrame]:
    """Split a DataFrame into the rows whose column ``name`` is false, 0 or null, and the others.

    Raises:
        DataError: The column does not exist, or is neither boolean nor numeric.
    """
    from pyspark.sql import functions, types

    finder = _Finder(frame)
    kind, _ = finder.type_of(name)
    if not isinstance(kind, (types.BooleanType, types.NumericType)):
        raise DataError(
            f"column {name!r} marks the validation rows, so it must be boolean or numeric; it has the type "
            f"{kind.simpleString()}."
        )
    chosen = functions.coalesce(finder.column(name).cast("boolean"), functions.lit(False))
    return frame.where(~chosen), frame.where(chosen)


# Finding columns


def _side(argument: str, given: Columns | None, specs: Sequence[InputSpec], finder: _Finder) -> tuple[Structure, list[Leaf]]:
    """The structure of one side (features, labels or weights), and a leaf for each of its arrays."""
    names = [spec.name for spec in specs]
    ends = "inputs" if argument == "features" else "outputs"
    if given is None:
        given = finder.default(argument, names)
    if isinstance(given, Mapping):
        partial = argument == "label"  # outputs without a loss need no labels
        if not given or (len(specs) > 1 and not partial and set(given) != set(names)):
            raise ConfigurationError(f"{argument} has the keys {sorted(given)}, but the model's {ends} are {names}.")
        by_name = dict(zip(names, specs, strict=True))
        leaves = []
        for key, columns in given.items():
            if names and key not in by_name:
                raise ConfigurationError(f"{argument}: the model has no {ends[:-1]} {key!r}. {known_names(key, names)}")
            leaves.append(_leaf(f"{argument}[{key!r}]", columns, by_name.get(key)))
        if len(specs) == 1:  # Keras expects the array itself
            return Structure(), leaves
        return Structure(len(leaves), tuple(given), bare=False), leaves
    if isinstance(given, str) or len(specs) < 2:
        if len(specs) > 1 and argument != "sample_weight":
            raise ConfigurationError(
                f"{argument}={given!r}: the model has {len(specs)} {ends}: pass {{name: column}} for {names}."
            )
        return Structure(), [_leaf(argument, given, specs[0] if len(specs) == 1 else None)]
    columns = _names(argument, given)
    if len(columns) != len(specs):
        raise ConfigurationError(
            f"{argument}={list(columns)!r}: the model has {len(specs)} {ends}: pass one column for each, or "
            f"{{name: column(s)}} for {names}."
        )
    return Structure(len(columns), bare=False), [
        _leaf(argument, column, spec) for column, spec in zip(columns, specs, strict=True)
    ]


def _weights(given: Columns, schema: Schema, finder: _Finder) -> tuple[Structure, list[Leaf]]:
    """One weight for all outputs, or one for each, in the outputs' order and structure, since Keras does not match names."""
    structure, leaves = _side("sample_weight", given, schema.outputs, finder)
    if structure.bare:
        return structure, leaves
    names = tuple(spec.name for spec in schema.outputs)
    if structure.names is not None:
        by_name = dict(zip(structure.names, leaves, strict=True))
        leaves = [by_name[name] for name in names]
    return Structure(len(leaves), names if schema.named_outputs else None, bare=False), leaves


def _leaf(argument: str, given: Any, spec: InputSpec | None) -> Leaf:
    if isinstance(given, str):
        return Leaf((given,), input=spec)
    names = _names(argument, given)
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigurationError(f"{argument}={list(names)!r} has the column {repeated!r} twice; name each column once.")
    return Leaf(names, together=True, input=spec)


def _names(argument: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(name, str) for name in given):
        advice = " Add computed columns with df.withColumn first." if hasattr(given, "alias") else ""
        if isinstance(given, (list, tuple)) and any(isinstance(name, (list, tuple)) for name in given):
            advice = f" For several columns per input or output, use a dict: {argument}={{name: [columns]}}."
        raise ConfigurationError(
            f"{argument} is {given if advice and isinstance(given, (list, tuple)) else describe(given)}; expected the name "
            f"of a column, or a list of names.{advice}"
        )
    return tuple(given)


class _Finder:
    """Finds columns of a DataFrame by name: a top-level column, else a field of a struct (``user.age``).

    As in Spark, names are case-insensitive unless that is ambiguous.
    """

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame
        self.schema: StructType = frame.schema
        self._names = self.schema.names

    def column(self, name: str) -> Column:
        from pyspark.sql import functions

        return functions.col(".".join(quoted(field.name) for field in self._found(name)))

    def type_of(self, name: str) -> tuple[DataType, Mapping[str, Any]]:
        """A column's type and metadata.

        Raises:
            DataError: No column has this name, or several have.
        """
        field = self._found(name)[-1]
        return field.dataType, field.metadata

    def _found(self, name: str) -> list[StructField]:
        """The path to the column: its field alone, or a struct and its nested fields."""
        path = _path(self.schema, name)
        if path is None:
            raise DataError(f"the DataFrame has no column {name!r}. {known_names(name, self._names)}")
        twins = [other for other in self._names if _alike(other, path[0].name)]
        if twins.count(path[0].name) > 1 or (len(twins) > 1 and not is_case_sensitive(self._frame.sparkSession)):
            raise DataError(
                f"the DataFrame has {len(twins)} columns whose names Spark does not distinguish "
                f"({', '.join(map(repr, twins))}): rename them."
            )
        return path

    def default(self, argument: str, specs: Sequence[str]) -> Columns:
        """The default columns for an argument that was not set."""
        if len(specs) < 2 and _field(self.schema, argument) is not None:
            return argument
        if specs and all(_field(self.schema, name) is not None for name in specs):
            return {name: name for name in specs} if len(specs) > 1 else specs[0]
        ends = "inputs" if argument == "features" else "outputs"
        raise ConfigurationError(
            f"{argument}= is missing: there is no column {argument!r}, and no columns with the names of the model's {ends} "
            f"({', '.join(specs) or 'unknown'}). The DataFrame has {', '.join(map(repr, self._names))}."
        )


def is_case_sensitive(session: Any) -> bool:
    """Whether column names are case-sensitive in a session; by default they are not."""
    return session is not None and str(session.conf.get("spark.sql.caseSensitive")).lower() == "true"


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
    return next(exact, None) or next((field for field in kind.fields if _alike(field.name, name)), None)


def _alike(name: str, other: str) -> bool:
    return name.lower() == other.lower()


# Checking types and shapes


def _check_types(leaf: Leaf, finder: _Finder) -> None:
    for name in leaf.columns:
        kind, _ = finder.type_of(name)
        if leaf.loader is None:
            _check_type(name, kind, leaf)
        elif leaf.together:
            raise ConfigurationError(f"a loader takes one column, received {list(leaf.columns)}.")
        else:
            leaf.loader.check(name, kind.simpleString())
            _check_shape(leaf, leaf.loader.shape)
    widths = [_width(*finder.type_of(name)) for name in leaf.columns] if leaf.loader is None else [None]
    shape = None if leaf.input is None or not leaf.fits else leaf.input.shape
    if shape is None or None in shape or None in widths:
        return
    width, wanted = sum(w for w in widths if w is not None), 1
    for size in shape:
        wanted *= size or 0
    if width != wanted:
        assert leaf.input is not None
        raise DataError(
            f"{leaf.label} {'has' if len(leaf.columns) == 1 else 'have'} {width} value(s) per row, but the model's input "
            f"{leaf.input.name!r} expects rows of shape {shape}. Choose other columns, or change the model's input."
        )


def _check_shape(leaf: Leaf, shape: tuple[int | None, ...]) -> None:
    """Raise `ConfigurationError` if a loader's arrays cannot fit the model's input."""
    wanted = None if leaf.input is None or not leaf.fits else leaf.input.shape
    if wanted is None:
        return
    known = len(shape) == len(wanted) and all(
        mine is None or theirs is None or mine == theirs for mine, theirs in zip(shape, wanted, strict=True)
    )
    if not known:
        assert leaf.input is not None
        raise ConfigurationError(
            f"the loader of {leaf.label} returns arrays of shape {shape}, but the model's input {leaf.input.name!r} expects "
            f"{wanted}: set the size and mode of the loader accordingly."
        )


def _check_argument(leaf: Leaf, name: str, column: pa.Array) -> None:
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

    inner = kind
    while isinstance(inner, types.ArrayType):
        inner = inner.elementType
    if isinstance(inner, (types.NumericType, types.BooleanType)) or (_is_vector(kind) and inner is kind):
        return
    if isinstance(inner, types.BinaryType) and inner is kind and leaf.input is not None:
        return
    type_name, give = kind.simpleString(), leaf.terms.give
    if isinstance(inner, types.StringType):
        advice = "Encode text first, for instance with pyspark.ml.feature.StringIndexer."
        if leaf.terms.function:
            advice = "Cast text that is a number, CAST(... AS DOUBLE), and encode other text first."
        if inner is kind and leaf.input is not None and len(leaf.input.shape or ()) == 3:
            advice = f"If these are paths of images, {give} loader={_loader_call(leaf)}. {advice}"
    elif isinstance(inner, types.BinaryType):
        advice = "Bytes require a model input of known shape, to be read as tensors, or a loader (image_loader(...))."
    elif type_name == IMAGE_STRUCT:
        advice = f"It is the struct of Spark's image source: {give} loader={_loader_call(leaf)}."
    elif isinstance(inner, (types.StructType, types.MapType)):
        field = f" ({name}.field)" if not leaf.terms.function else ""
        advice = f"Name the fields to use{field}, or {give} loader=image_loader(...) if it holds images."
    else:
        advice = "Convert it to numbers first, for instance with cast or unix_timestamp."
    raise DataError(
        f"{leaf.terms.column(name)} has the type {type_name}; expected numbers, booleans, arrays of them, or vectors. "
        f"{advice}"
    )


def _loader_call(leaf: Leaf) -> str:
    """The call of `image_loader` that fits an input, for messages."""
    shape = (leaf.input.shape if leaf.input is not None else None) or ()
    return f"image_loader({shape[:2]})" if len(shape) == 3 and None not in shape[:2] else "image_loader(size)"


def _is_vector(kind: DataType) -> bool:
    return type(kind).__name__ == "VectorUDT"


def _width(kind: DataType, metadata: Mapping[str, Any]) -> int | None:
    """The number of values per row, if the type or the metadata determine it."""
    from pyspark.sql import types

    if isinstance(kind, (types.NumericType, types.BooleanType)):
        return 1
    size = (metadata.get("ml_attr") or {}).get("num_attrs") if _is_vector(kind) else None
    return None if size is None else int(size)
