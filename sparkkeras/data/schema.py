"""What a model expects of data, and what data is checked against before any training starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sparkkeras.data.block import Block, BlockSpec, Form, Structure, describe
from sparkkeras.data.numeric import NotNumbersError, filled, to_numbers
from sparkkeras.errors import DataError
from sparkkeras.weights import Array, is_floating

OnInvalid = Literal["error", "drop", "allow"]
"""What ``on_invalid=`` accepts where rows are trained or evaluated on."""

OnInvalidToPredict = Literal["error", "allow"]
"""What ``on_invalid=`` accepts where each row has its prediction."""

InvalidPolicy = Literal["error", "drop", "allow", "null"]
"""What a `Reader` can do about rows with nulls, NaN or infinite values; Spark ML's ``handleInvalid`` needs all of them."""


@dataclass(frozen=True)
class InputSpec:
    """One input or output of a model.

    Attributes:
        name: Its name.
        shape: Its shape without the batch axis, ``None`` where any size fits.
        floating: Whether it takes floating numbers.
        indices: Into how many entries its values are indices, where it goes straight into an ``Embedding``.
    """

    name: str
    shape: tuple[int | None, ...] | None
    floating: bool = False
    indices: int | None = None

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether rows of this shape fit. A trailing axis of size 1 may be there or not, as in Keras."""
        if self.shape is None:
            return True
        return any(
            len(wanted) == len(given) and all(w is None or w == g for w, g in zip(wanted, given, strict=True))
            for wanted, given in ((self.shape, shape), (self.shape, (*shape, 1)), ((*self.shape, 1), shape))
        )


@dataclass(frozen=True)
class Schema:
    """What a model takes and gives.

    Attributes:
        inputs: Its inputs in order; empty where the model does not say (a subclassed model).
        outputs: Its outputs in order; likewise.
        floatx: The dtype that floating data is turned into, as Keras does.
        named_outputs: Whether it gives its outputs as a dict.
    """

    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[InputSpec, ...] = ()
    floatx: str = "float32"
    named_outputs: bool = False

    @property
    def expected_x(self) -> int | None:
        """How many arrays features have, where the model says."""
        return len(self.inputs) or None

    @property
    def expected_y(self) -> int | None:
        """How many arrays labels have, where the model says."""
        return len(self.outputs) or None

    def before(self, transform: object | None) -> Schema:
        """What is expected of rows that a transform, if there is one, will change: their values may be any."""
        if transform is None:
            return self
        return replace(self, inputs=tuple(replace(spec, indices=None) for spec in self.inputs))

    def specs_of(self, form: Form) -> list[InputSpec | None]:
        """The input that each array of features goes into, where that is known."""
        by_name = {spec.name: spec for spec in self.inputs}
        if form.x.names is not None:
            return [by_name.get(name) for name in form.x.names]
        return list(self.inputs[: form.x.count])

    def check_features(self, received: BlockSpec, has_transform: bool = True) -> None:
        """Refuse features that the model cannot take.

        Args:
            received: What the features are.
            has_transform: Whether the caller takes ``transform=``, so that messages may advise it.

        Raises:
            DataError: It names the input, what it expects and what came.
        """
        if not self.inputs:
            return
        form = received.form
        labels, leaves = form.x.labels("x"), received.leaves[form.span("x")]
        specs = list(self.inputs)
        if form.x.names is not None:
            by_name = {spec.name: spec for spec in self.inputs}
            if set(by_name) != set(form.x.names) and len(specs) > 1:
                raise DataError(
                    f"features have the keys {sorted(form.x.names)}, but the model's inputs are {sorted(by_name)}: "
                    "give one array for each input, under its name."
                )
            specs = [by_name.get(name, specs[0]) for name in form.x.names]
        if len(specs) != len(leaves):
            raise DataError(
                f"the model has {len(specs)} inputs ({', '.join(spec.name for spec in specs)}), but the features are "
                f"{len(leaves)} array(s): give x as a tuple or a dict of {len(specs)} arrays."
            )
        for label, spec, leaf in zip(labels, specs, leaves, strict=True):
            if spec.shape is not None and not spec.takes(leaf.shape):
                raise DataError(
                    f"{label} does not fit the model's input {spec.name!r}: it expects rows of shape {spec.shape}, "
                    f"received rows of shape {leaf.shape}. "
                    + ("A single sample needs an axis for rows: x[None]. " if leaf.shape == spec.shape[1:] else "")
                    + ("Reshape the data, or give transform= that does." if has_transform else "Reshape the data.")
                )


@dataclass(frozen=True)
class Terms:
    """How messages name the columns of an array, and what they advise.

    Attributes:
        give: How an argument is given, before its name.
        fit: What to do about values that do not fit the model's input.
        fill: What to do about nulls.
        function: The function whose arguments the columns are, as it is written; empty: they are columns by name.
    """

    give: str = "give"
    fit: str = "Choose other columns, or give transform= that reshapes."
    fill: str = "Fill it (df.fillna), leave such rows out (df.dropna(subset=[...]))"
    function: str = ""

    def column(self, name: str) -> str:
        """What messages call one column."""
        return f"{name} of {self.function}" if self.function else f"column {name!r}"

    def columns(self, names: Sequence[str]) -> str:
        """What messages call several columns."""
        return f"the arguments of {self.function}" if self.function else f"the columns {', '.join(names)}"


BY_NAME = Terms()
"""The columns of a DataFrame, which people name."""


@dataclass(frozen=True)
class ColumnPart:
    """What one column gave to an array.

    Attributes:
        name: The column's name.
        width: How many of a row's values are its own.
        good: Which rows have all of its values; ``None``: all.
    """

    name: str
    width: int
    good: Array | None


@dataclass(frozen=True)
class ColumnValues:
    """What was read from the columns of one array.

    Attributes:
        values: The values, shape (rows, ...).
        good: Which rows have all of their values; ``None``: all.
        told: What messages call it.
        may_lack: Whether somebody has allowed that rows lack their values.
        parts: What each column gave, where several lie side by side.
        terms: How messages name them.
    """

    values: Array
    good: Array | None
    told: str
    may_lack: bool = False
    parts: tuple[ColumnPart, ...] = ()
    terms: Terms = BY_NAME

    def lacking(self, row: int) -> str:
        """What messages call the column that has a null in a row."""
        names = [part.name for part in self.parts if part.good is not None and not part.good[row]]
        return self.terms.column(names[0]) if names else self.told

    def holding(self, position: int) -> str:
        """What messages call the column of one of a row's values, which are counted over all columns."""
        for part in self.parts:
            if position < part.width:
                return self.terms.column(part.name)
            position -= part.width
        return self.told


@dataclass(frozen=True)
class Reader:
    """Turns rows or arrays into checked blocks: structure, dtype, finite values.

    Attributes:
        schema: What the model expects.
        labelled: Whether there must be labels (training, evaluation) or they are dropped (prediction).
        on_invalid: What to do with rows that hold NaN or infinite values. In prediction, ``"drop"`` and ``"null"`` mark such
            rows as not whole; the caller drops them or predicts null.
        has_on_invalid: Whether the caller takes ``on_invalid=``, so that messages may advise it.
    """

    schema: Schema
    labelled: bool = True
    on_invalid: InvalidPolicy = "error"
    has_on_invalid: bool = True

    def read_arrays(self, x: Any, y: Any, sample_weight: Any) -> Block:
        """Arrays with the rows on their first axis, as a checked block.

        Raises:
            DataError: Lengths differ, there are no rows, or values are missing or not finite.
        """
        if isinstance(x, (int, float, str)):
            raise DataError(f"x is {describe(x)}; expected an array with one row per sample.")
        values = {"x": x, "y": y if self.labelled else None, "sample_weight": sample_weight if self.labelled else None}
        if not self.labelled and self._is_pair(x):
            raise DataError(
                f"x is a tuple of {len(x)} arrays, as (x, y) is, and the model has one input: to predict, give the features "
                "alone."
            )
        inputs = self.schema.expected_x
        several = isinstance(x, (tuple, list)) and len(x) > 0 and all(isinstance(p, np.ndarray) and p.ndim > 1 for p in x)
        if several and inputs is not None and len(x) != inputs:
            raise DataError(f"the model has {inputs} input(s), but x is a {type(x).__name__} of {len(x)} arrays.")
        if self.labelled and y is None:
            raise DataError("labels are missing: give y= along with the arrays, or an RDD of (x, y) pairs.")
        counts = {"x": self.schema.expected_x, "y": self.schema.expected_y, "sample_weight": self.schema.expected_y}
        try:
            structures = {s: Structure.of(value, counts[s]) for s, value in values.items() if value is not None}
        except ValueError as error:
            raise DataError(f"{error}.") from error
        form = Form(structures["x"], structures.get("y"), structures.get("sample_weight"))
        found = [
            self._numbers(leaf, label, "the arrays")
            for side, structure in form.sides
            for leaf, label in zip(structure.flatten(values[side]), structure.labels(side), strict=True)
        ]
        leaves = [leaf for leaf, _ in found]
        for label, leaf in zip(form.labels, leaves, strict=True):
            if not leaf.ndim:
                raise DataError(f"{label} is a single value, {leaf[()]}; expected an array with one row per sample.")
        lengths = {label: len(leaf) for label, leaf in zip(form.labels, leaves, strict=True)}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{label} has {rows} rows" for label, rows in lengths.items())
            raise DataError(f"arrays must have the same number of rows: {told}.")
        return self._block(form, found, "the arrays", 0)

    def read_rows(self, rows: Sequence[Any], form: Form, partition: int, first: int) -> Block:
        """Consecutive rows of a partition as a checked block.

        Args:
            rows: Rows as `form_of` understands them.
            form: The form of the partition's first row; all must have it.
            partition: The partition's number, for messages.
            first: The number of the first of these rows in its partition, for messages.

        Raises:
            DataError: It names partition and row.
        """
        columns: list[list[Any]] = [[] for _ in form.labels]
        for offset, row in enumerate(rows):
            try:
                leaves = self._leaves(row, form)
            except ValueError as error:
                raise DataError(f"row {first + offset} of partition {partition}: {error}.") from error
            for column, leaf in zip(columns, leaves, strict=True):
                column.append(leaf)
        place = f"partition {partition}"
        found = [
            self._numbers([leaf.toArray() if hasattr(leaf, "toArray") else leaf for leaf in column], label, place, first)
            for column, label in zip(columns, form.labels, strict=True)
        ]
        return self._block(form, found, place, first)

    def read_columns(self, leaves: Sequence[ColumnValues], form: Form, where: str, first: int) -> tuple[Block, Array | None]:
        """Consecutive rows of columns as a checked block, and which of them are whole; ``None``: all.

        To train, rows that are not whole are left out, or have NaN in the places of their nulls (``on_invalid="allow"``). To
        predict they are there, and the caller gives them nothing.

        Args:
            leaves: The values of each array of the form.
            form: The form.
            where: Where the rows are, for messages.
            first: The number of the first of these rows there.

        Raises:
            DataError: Values are missing, or not finite, and ``on_invalid`` does not allow it.
        """
        arrays = [self._numbers(leaf.values, leaf.told, where, first)[0] for leaf in leaves]
        arrays = self._as_the_model_takes_them(form, arrays)
        whole: Array | None = None
        for index, leaf in enumerate(leaves):
            if leaf.good is None:
                continue
            if not leaf.may_lack and self.labelled and self.on_invalid == "allow" and is_floating(arrays[index].dtype):
                known = np.isnan(arrays[index].reshape(len(leaf.good), -1)).any(axis=1)  # which of its values are missing
                arrays[index] = arrays[index].copy()
                arrays[index][~leaf.good & ~known] = np.nan
                continue
            if not leaf.may_lack and (self.on_invalid == "error" or (self.labelled and self.on_invalid == "allow")):
                policy = (
                    'on_invalid="drop" (in Spark ML handleInvalid="skip")'
                    if self.labelled
                    else 'on_invalid="allow" (in Spark ML handleInvalid="keep"), which predicts null for them'
                )
                row = int(np.argmin(leaf.good))
                raise DataError(
                    f"{leaf.lacking(row)} is null, or holds a null, in row {first + row} of {where}. {leaf.terms.fill}"
                    + (f", or {leaf.terms.give} {policy}." if self.has_on_invalid else ".")
                )
            whole = leaf.good if whole is None else whole & leaf.good
        block, rows = Block(form, tuple(arrays)), None
        if self.labelled and whole is not None:
            rows, whole = np.flatnonzero(whole), None
            block = block[rows]

        def told(array: int, row: int, position: int) -> str:
            number = row if rows is None else int(rows[row])
            return f"{leaves[array].holding(position)} holds NaN or an infinite value in row {first + number} of {where}"

        names = [leaf.told for leaf in leaves]
        if not self.labelled and self.on_invalid in ("drop", "null"):
            finite = _finite_rows(block)
            whole = finite if whole is None else whole if finite is None else whole & finite
        else:
            block = self._finite(block, told, leaves[0].terms.give if leaves else "give")
        _refuse_negative_weights(block, names, where)
        self._check_indices(block, names, where, whole)
        return block, whole

    def form_of(self, row: Any, partition: int) -> Form:
        """The form of one row: ``(x, y)``, ``(x, y, sample_weight)`` or, for prediction, bare features.

        Raises:
            DataError: It is none of these.
        """
        sides = self._sides(row)
        if sides is None:
            raise DataError(
                f"row 0 of partition {partition} is {describe(row)}; expected a pair (x, y) or a triple "
                "(x, y, sample_weight). Map the RDD to such rows, for instance with to_simple_rdd."
            )
        x, y, weight = sides
        schema = self.schema
        try:
            return Form(
                Structure.of(x, schema.expected_x),
                Structure.of(y, schema.expected_y) if self.labelled else None,
                None if weight is None or not self.labelled else Structure.of(weight, schema.expected_y),
            )
        except ValueError as error:
            raise DataError(f"row 0 of partition {partition}: {error}.") from error

    def _leaves(self, row: Any, form: Form) -> list[Any]:
        sides = self._sides(row)
        if sides is None:
            raise ValueError(f"expected a pair (x, y) or a triple (x, y, sample_weight), received {describe(row)}")
        values = dict(zip(("x", "y", "sample_weight"), sides, strict=True))
        if (values["sample_weight"] is None) != (form.weight is None) and self.labelled:
            raise ValueError("some rows have a sample weight and others have none")
        return [leaf for side, structure in form.sides for leaf in structure.flatten(values[side])]

    def _sides(self, row: Any) -> tuple[Any, Any, Any] | None:
        pair = isinstance(row, (tuple, list)) and len(row) in (2, 3)
        if self.labelled:
            return (row[0], row[1], row[2] if len(row) == 3 else None) if pair else None
        if pair and isinstance(row, tuple) and not self._is_features(row):
            return row[0], None, None
        return row, None, None

    def _is_pair(self, x: Any) -> bool:
        """Whether arrays are the features and labels of many rows, for a model with one input; not a tuple of rows."""
        if not isinstance(x, tuple) or len(x) not in (2, 3) or len(self.schema.inputs) != 1:
            return False
        row, shape = self.schema.inputs[0].shape, _shape(x[0])
        if row is None or shape is None or len(shape) != len(row) + 1:
            return False
        return self.schema.inputs[0].takes(shape[1:])

    def _is_features(self, row: tuple[Any, ...]) -> bool:
        """Whether a tuple is features by itself, and not a pair or triple that begins with them."""
        inputs = self.schema.inputs
        if len(inputs) > 1:
            nested = isinstance(row[0], (tuple, list, dict)) and len(row[0]) == len(inputs)
            return len(row) == len(inputs) and not nested
        rank = len(inputs[0].shape) if inputs and inputs[0].shape is not None else 1
        shape = _shape(row[0])
        return shape is not None and len(shape) < rank

    def _numbers(self, value: Any, label: str, place: str, first: int = 0) -> tuple[Array, Array | None]:
        """Rows as an array of numbers, and which of its values are missing; see `to_numbers`."""
        try:
            array, missing = to_numbers(value, first)
        except NotNumbersError as error:
            where = place if error.row is None else f"row {error.row} of {place}"
            raise DataError(f"{label} of {where} {error}") from error
        return self._in_floatx(array), missing

    def _in_floatx(self, array: Array) -> Array:
        return array.astype(self.schema.floatx, copy=False) if is_floating(array.dtype) else array

    def _block(self, form: Form, found: Sequence[tuple[Array, Array | None]], place: str, first: int) -> Block:
        """Arrays with what is missing in them as a checked block: nulls, on which `on_invalid` decides."""
        arrays, lacking = self._as_the_model_takes_them(form, [array for array, _ in found]), None
        floating = self._floating(form)
        for index, (_, missing) in enumerate(found):
            if missing is None:
                continue
            whole = index < form.x.count and index not in floating and bool(self.schema.inputs)  # such an input has no NaN
            takes_nan = is_floating(arrays[index].dtype) or not whole
            if self.on_invalid == "allow" and takes_nan:
                arrays[index] = self._in_floatx(filled(arrays[index], missing))
                continue
            rows = missing.reshape(len(missing), -1).any(axis=1)
            if self.on_invalid != "drop":
                raise DataError(
                    f"{form.labels[index]} of row {first + int(np.argmax(rows))} of {place} is or holds None: fill it in or "
                    f"filter the row out{self._other_remedies(takes_nan)}."
                )
            lacking = rows if lacking is None else lacking | rows
        block = Block(form, tuple(arrays))
        if lacking is not None:
            block = block[np.flatnonzero(~lacking)]
        block = self._finite(block, _in_row(form, place, first))
        _refuse_negative_weights(block, form.labels, place)
        self._check_indices(block, form.labels, place)
        return block

    def _other_remedies(self, takes_nan: bool) -> str:
        if not self.has_on_invalid:
            return ""
        drop = 'on_invalid="drop" leaves such rows out' if self.labelled else ""
        allow = 'on_invalid="allow" makes NaN of it' if takes_nan else ""
        given = ", and ".join(filter(None, (drop, allow)))
        return f"; {given}" if given else ""

    def _as_the_model_takes_them(self, form: Form, arrays: list[Array]) -> list[Array]:
        """Whole numbers as floating ones where the model's input is: rows of JSON or CSV mix them. Bytes stay."""
        for index in self._floating(form):
            if arrays[index].dtype.kind in "iu" and arrays[index].itemsize > 1:
                arrays[index] = arrays[index].astype(self.schema.floatx)
        return arrays

    def _floating(self, form: Form) -> list[int]:
        """Which arrays go into inputs that take floating numbers."""
        return [index for index, spec in enumerate(self.schema.specs_of(form)) if spec is not None and spec.floating]

    def _check_indices(self, block: Block, told: Sequence[str], place: str, whole: Array | None = None) -> None:
        """Refuse values that no entry of the ``Embedding`` behind an input stands for.

        Args:
            block: The rows.
            told: What messages call each array.
            place: Where the rows are, for messages.
            whole: Which rows have all of their values; ``None``: all.
        """
        for name, array, spec in zip(told, block.arrays, self.schema.specs_of(block.form), strict=False):
            if spec is None or spec.indices is None:
                continue
            values = array if whole is None else array[whole]
            if not values.size:
                continue
            # These two ignore NaN, which on_invalid decides on, and are NaN where there is nothing else.
            low, high = float(np.fmin.reduce(values, axis=None)), float(np.fmax.reduce(values, axis=None))
            if low < 0 or high >= spec.indices:
                raise DataError(
                    f"{name} of {place} goes into an Embedding with input_dim={spec.indices}, so its values must be indices "
                    f"from 0 to {spec.indices - 1}, but they range from {low:g} to {high:g}. "
                    "Renumber them, or make the Embedding larger."
                )

    def _finite(self, block: Block, told: Callable[[int, int, int], str], give: str = "give") -> Block:
        """The rows without NaN and infinite values.

        Args:
            block: The rows.
            told: What is wrong with an array of the block, a row of it, and one of that row's values.
            give: As in `Terms`.
        """
        if self.on_invalid == "allow":
            return block
        bad = np.zeros(block.rows, bool)
        for index, array in enumerate(block.arrays):
            if not is_floating(array.dtype) or not array.size or _has_finite_sum(array):
                continue
            values = np.isfinite(array.reshape(block.rows, -1))
            finite = values.all(axis=1)
            if self.on_invalid == "error" and not finite.all():
                row = int(np.argmin(finite))
                remedy = (
                    'on_invalid="drop" (in Spark ML handleInvalid="skip") to leave such rows out, or on_invalid="allow" to '
                    "train on them"
                    if self.labelled
                    else 'on_invalid="allow" to predict whatever the model makes of it (in Spark ML handleInvalid="keep" '
                    "predicts null)"
                )
                otherwise = f"{give} {remedy}" if self.has_on_invalid else "leave such rows out"
                raise DataError(f"{told(index, row, int(np.argmin(values[row])))}. Fix the data, or {otherwise}.")
            bad |= ~finite
        return block[np.flatnonzero(~bad)] if bad.any() else block


def _refuse_negative_weights(block: Block, told: Sequence[str], place: str) -> None:
    """Refuse sample weights below 0, with which training would raise the loss.

    Args:
        block: The rows.
        told: What messages call each array.
        place: Where the rows are, for messages.
    """
    weights = block.form.span("sample_weight")
    for name, array in zip(told[weights], block.arrays[weights], strict=True):
        if array.size and array.min() < 0:
            raise DataError(
                f"{name} of {place} holds negative sample weights, down to {float(array.min()):g}: expected weights of 0 or "
                "more."
            )


def _finite_rows(block: Block) -> Array | None:
    """Which rows hold no NaN and no infinite value; ``None``: all of them."""
    finite = np.ones(block.rows, bool)
    for array in block.arrays:
        if is_floating(array.dtype) and array.size and not _has_finite_sum(array):
            finite &= np.isfinite(array.reshape(block.rows, -1)).all(axis=1)
    return None if finite.all() else finite


def _in_row(form: Form, where: str, first: int) -> Callable[[int, int, int], str]:
    """What messages say of a value that is not finite."""
    labels = form.labels
    return lambda array, row, _: f"{labels[array]} holds NaN or an infinite value in row {first + row} of {where}"


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """The shape of what can become an array; ``None`` where it is ragged."""
    try:
        return tuple(np.shape(leaf))
    except ValueError:
        return None


def _has_finite_sum(array: Array) -> bool:
    """Whether the sum is finite, so that every value is. The other way round it may have overflowed."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum()))


@dataclass(frozen=True)
class LabelRange:
    """The smallest and the largest value of an array of labels, and whether all are whole numbers."""

    low: float
    high: float
    whole: bool

    @classmethod
    def of(cls, labels: Array) -> LabelRange:
        """The range of an array with at least one value."""
        return cls(float(labels.min()), float(labels.max()), labels.dtype.kind in "iub" or bool((labels % 1 == 0).all()))

    def union(self, other: LabelRange) -> LabelRange:
        """The range of both together."""
        return LabelRange(min(self.low, other.low), max(self.high, other.high), self.whole and other.whole)


def label_ranges(block: Block) -> tuple[LabelRange, ...]:
    """The range of each array of labels of a block; empty where there is none to report."""
    labels = block.arrays[block.form.span("y")]
    return tuple(LabelRange.of(array) for array in labels) if all(array.size for array in labels) else ()


def union(ranges: tuple[LabelRange, ...], others: tuple[LabelRange, ...]) -> tuple[LabelRange, ...]:
    """The label ranges of two sets of rows together."""
    if not ranges or not others:
        return ranges or others
    return tuple(mine.union(other) for mine, other in zip(ranges, others, strict=True))
