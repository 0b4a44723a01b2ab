"""Rows and arrays as validated blocks: their structure, and the dtypes that the model takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from sparkkeras.data.block import Block, Form, Structure, describe
from sparkkeras.data.columns import ColumnValues, RowLoader, label_loaders
from sparkkeras.data.invalid_rows import InvalidPolicy, InvalidRows, finite_rows, reject_negative_weights
from sparkkeras.data.numeric import Masked, UnfitValuesError, to_numbers
from sparkkeras.data.schema import Schema, on_optional
from sparkkeras.data.sparse import SparseRows, dense_row
from sparkkeras.data.text import Text, holds_text, to_text
from sparkkeras.errors import DataError, counted
from sparkkeras.weights import Array, is_floating


@dataclass(frozen=True)
class Reader:
    """Converts rows or arrays to validated blocks: structure, dtype, finite values.

    Attributes:
        schema: The inputs and outputs of the model.
        labelled: Whether labels are required (training, evaluation) or dropped (prediction).
        labels_optional: Whether rows may lack labels, for a model that does not need them in training.
        on_invalid: How rows with nulls, NaN or infinite values are handled; see `InvalidRows`.
        has_on_invalid: Whether the caller has an argument ``on_invalid=`` that messages can suggest.
        loaders: The loaders of rows and arrays by the names of inputs and outputs. Those of columns are in
            `sparkkeras.data.columns.Leaf`.
    """

    schema: Schema
    labelled: bool = True
    on_invalid: InvalidPolicy = "error"
    has_on_invalid: bool = True
    loaders: Mapping[str, RowLoader] = field(default_factory=dict)
    labels_optional: bool = False

    def read_arrays(self, x: Any, y: Any, sample_weight: Any) -> Block:
        """Make a validated block of arrays, whose first axis is the row axis.

        Raises:
            DataError: The numbers of rows differ, labels are missing, or values are missing or not finite.
        """
        if isinstance(x, (int, float, str)):
            raise DataError(f"x is {describe(x)}; expected an array with one row per sample.")
        if not self.labelled and self._is_pair(x):
            raise DataError(
                f"x is a tuple of {len(x)} arrays, like (x, y), but the model has one input: to predict, pass only the "
                "features."
            )
        if self.labelled and y is None and not self.labels_optional:
            taken = f" x is {describe(x)}, which are taken as inputs of the model." if isinstance(x, tuple) else ""
            raise DataError(
                f"labels are missing.{taken} Pass them as a separate argument, y=, or use an RDD of (x, y) pairs."
            )
        inputs = len(self.schema.inputs)
        kinds = (np.ndarray, SparseRows)
        several = isinstance(x, (tuple, list)) and len(x) > 0 and all(isinstance(p, kinds) and p.ndim > 1 for p in x)
        if several and inputs and Structure.of(x, self.schema.expected_x).bare:
            raise DataError(
                f"the model has {counted(inputs, 'input')}, but x is a {type(x).__name__} of {counted(len(x), 'array')}."
            )
        if not self.labelled:
            y = sample_weight = None
        try:
            form = Form.of(x, y, sample_weight, self.schema.expected_x, self.schema.expected_y)
        except ValueError as error:
            raise DataError(f"{error}.") from error
        self.schema.check_structure(form.x)
        self._check_weights(form)
        given = form.flatten(x, y, sample_weight)
        found = self._all_values(form, given, "the arrays")
        leaves = [leaf for leaf, _ in found]
        self._check_given(form, given)
        for label, (leaf, missing) in zip(form.labels, found, strict=True):
            if not leaf.ndim and missing is not None:
                advice = " For outputs without a loss, leave the labels out: pass those of the outputs that have one."
                raise DataError(
                    f"{label} is None; expected an array with one row per sample.{advice if label.startswith('y') else ''}"
                )
            if not leaf.ndim:
                raise DataError(f"{label} is a single value, {leaf[()]}; expected an array with one row per sample.")
        lengths = {label: len(leaf) for label, leaf in zip(form.labels, leaves, strict=True)}
        if len(set(lengths.values())) > 1:
            received = ", ".join(f"{label} has {counted(rows, 'row')}" for label, rows in lengths.items())
            raise DataError(f"arrays must have the same number of rows: {received}.")
        return self._block(form, found, "the arrays", 0)

    def read_rows(self, rows: Sequence[Any], form: Form, partition: int, first: int) -> Block:
        """Make a validated block of consecutive rows of a partition.

        Args:
            rows: The rows, as expected by `form_of`.
            form: The form of the partition's first row, which all rows must have.
            partition: The index of the partition, for messages.
            first: The index of the first of these rows in the partition, for messages.

        Raises:
            DataError: A row has another form, or values are missing or not finite; the message names partition and row.
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
        found = self._all_values(form, [list(map(dense_row, column)) for column in columns], place, first)
        return self._block(form, found, place, first)

    def read_columns(self, leaves: Sequence[ColumnValues], form: Form, where: str, first: int) -> tuple[Block, Array | None]:
        """Make a validated block of consecutive rows of columns.

        In training, invalid rows are dropped. In prediction they remain in the block, and the caller predicts null for them.
        With ``on_invalid="allow"``, rows are valid and have NaN in place of nulls.

        Args:
            leaves: The values of each array of the form.
            form: The form.
            where: What contains the rows, for messages.
            first: The index of the first of these rows in ``where``, for messages.

        Returns:
            The block, and a mask of its valid rows; ``None``: all.

        Raises:
            DataError: Values are missing or not finite, and ``on_invalid`` does not allow it.
        """
        found = {
            id(leaf): self._values(leaf.values, leaf.label, isinstance(leaf.values, Text), None, where, first)[0]
            for leaf in leaves
        }
        arrays = [found[id(leaf)] for leaf in leaves]
        arrays = self._as_the_model_takes_them(form, arrays)
        complete = self._invalid.mask_nulls(leaves, arrays, where, first)
        block, rows = Block(form, tuple(arrays)), None
        if self.labelled and complete is not None:
            rows, complete = np.flatnonzero(complete), None
            block = block[rows]

        def describe_value(array: int, row: int, position: int) -> str:
            number = row if rows is None else int(rows[row])
            return f"{leaves[array].holding(position)} holds NaN or an infinite value in row {first + number} of {where}"

        names = [leaf.label for leaf in leaves]
        if not self.labelled and self.on_invalid in ("drop", "null"):
            finite = finite_rows(block)
            complete = finite if complete is None else complete if finite is None else complete & finite
        else:
            block = self._invalid.handle_not_finite(block, describe_value)
        reject_negative_weights(block, names, where)
        self._invalid.check_indices(block, self.schema.specs_of(form), names, where, complete)
        return block, complete

    def form_of(self, row: Any, partition: int) -> Form:
        """Infer the form of one row: ``(x, y)``, ``(x, y, sample_weight)`` or, for prediction, only features.

        Raises:
            DataError: The row is none of these.
        """
        sides = self._sides(row)
        if sides is None:
            advice = "Map the RDD to such rows, or create it with to_simple_rdd."
            if type(row).__name__ == "LabeledPoint":
                advice = "Convert LabeledPoints with lp_to_simple_rdd(rdd), or train with SparkMLlibModel."
            raise DataError(
                f"row 0 of partition {partition} is {describe(row)}; expected a pair (x, y) or a triple "
                f"(x, y, sample_weight). {advice}"
            )
        x, y, weight = sides
        schema = self.schema
        if not self.labelled and self._is_keyed(row):
            raise DataError(
                f"row 0 of partition {partition} is {describe(row)}, of which only the second one fits the model: if the "
                "rows are pairs (key, x), pass keyed=True."
            )
        try:
            form = Form(
                Structure.of(x, schema.expected_x),
                Structure.of(y, schema.expected_y) if self.labelled and not (y is None and self.labels_optional) else None,
                None if weight is None or not self.labelled else Structure.of(weight, schema.expected_y),
            )
        except ValueError as error:
            raise DataError(f"row 0 of partition {partition}: {error}.") from error
        self._check_given(form, form.x.flatten(x), f"row 0 of partition {partition}: ")
        return form

    def _check_weights(self, form: Form) -> None:
        """Reject several arrays of weights that do not match the arrays of labels."""
        y, weight = form.y, form.weight
        if y is None or weight is None or weight.bare or self.schema.transformed:
            return
        if weight.count != y.count or set(weight.names or y.names or ()) != set(y.names or weight.names or ()):
            raise DataError(
                f"sample_weight is {weight.shown()}, but y is {'one array' if y.bare else y.shown()}: pass one array of "
                "weights, or one for each array of y in the same structure."
            )

    def _check_given(self, form: Form, values: Sequence[Any], where: str = "") -> None:
        """Reject ``None`` for an input that is optional in Keras."""
        for label, spec, value in zip(form.labels, self.schema.specs_of(form), values, strict=False):
            if value is None and spec is not None and spec.optional:
                raise DataError(f"{where}{label} is None.{on_optional([spec])}")

    @property
    def _invalid(self) -> InvalidRows:
        return InvalidRows(self.on_invalid, self.labelled, self.has_on_invalid)

    def _leaves(self, row: Any, form: Form) -> list[Any]:
        sides = self._sides(row)
        if sides is None:
            raise ValueError(f"expected a pair (x, y) or a triple (x, y, sample_weight), received {describe(row)}")
        if (sides[2] is None) != (form.weight is None) and self.labelled:
            raise ValueError("some rows have a sample weight and others have none")
        return form.flatten(*sides)

    def _sides(self, row: Any) -> tuple[Any, Any, Any] | None:
        pair = isinstance(row, (tuple, list)) and len(row) in (2, 3)
        if self.labelled:
            if self.labels_optional and (not pair or self._is_features(tuple(row))):
                return row, None, None
            return (row[0], row[1], row[2] if len(row) == 3 else None) if pair else None
        if pair and isinstance(row, tuple) and not self._is_features(row):
            return row[0], None, None
        return row, None, None

    def _is_pair(self, x: Any) -> bool:
        """Whether a tuple holds features and labels of many rows, for a model with one input, and is not a tuple of rows."""
        if not isinstance(x, tuple) or len(x) not in (2, 3) or len(self.schema.inputs) != 1:
            return False
        row, shape = self.schema.inputs[0].shape, _shape(x[0])
        if row is None or shape is None or len(shape) != len(row) + 1:
            return False
        return self.schema.inputs[0].takes(shape[1:])

    def _is_keyed(self, row: Any) -> bool:
        """Whether a row looks like a key with the features of the model's only input."""
        if not isinstance(row, (tuple, list)) or len(row) != 2 or len(self.schema.inputs) != 1 or self.schema.transformed:
            return False
        key, x = map(_shape, row)
        spec = self.schema.inputs[0]
        return key == () and x is not None and x != () and spec.takes(x) and not spec.text

    def _is_features(self, row: tuple[Any, ...]) -> bool:
        """Whether all of a tuple is features, and not a pair or triple that begins with features."""
        inputs = self.schema.inputs
        if self.schema.x is not None and self.schema.x.is_nested:
            structure = Structure.of(row, self.schema.x)
            shapes = map(_shape, structure.flatten(row))
            return structure.count == len(inputs) and all(
                shape is not None and spec.takes(shape) for spec, shape in zip(inputs, shapes, strict=True)
            )
        if len(inputs) > 1:
            nested = isinstance(row[0], (tuple, list, dict)) and len(row[0]) == len(inputs)
            return len(row) == len(inputs) and not nested
        if inputs and inputs[0].text:
            return len(row) == math.prod([size or 0 for size in inputs[0].shape or ()])
        rank = len(inputs[0].shape) if inputs and inputs[0].shape is not None else 1
        shape = _shape(row[0])
        return shape is not None and len(shape) < rank

    def _all_values(self, form: Form, values: Sequence[Any], place: str, first: int = 0) -> list[Masked]:
        """Each array of a form as numbers or strings, and a mask of its missing values."""
        each = zip(values, form.labels, self._expects_text(form), self._loaders(form), strict=False)
        return [self._values(value, label, text, loader, place, first) for value, label, text, loader in each]

    def _expects_text(self, form: Form) -> list[bool | None]:
        """Whether each array must hold strings; ``None`` if it may hold strings or numbers."""
        specs = self.schema.specs_of(form) or [None] * form.x.count
        features = [None if spec is None or self.schema.transformed else spec.text for spec in specs]
        features += [False] * (form.x.count - len(features))
        labels = [None if self.schema.transformed else False] * (0 if form.y is None else form.y.count)
        return features + labels + [False] * (0 if form.weight is None else form.weight.count)

    def _values(self, value: Any, label: str, text: bool | None, loader: RowLoader | None, place: str, first: int) -> Masked:
        """Rows as strings, or as numbers in floatx, and a mask of missing values; for ``text`` see `_expects_text`."""
        convert: Callable[[Any, int], Masked] = to_numbers
        if loader is not None:
            convert = loader.load_rows
        elif text or (text is None and holds_text(value)):
            convert = to_text
        try:
            array, missing = convert(value, first)
        except UnfitValuesError as error:
            where = place if error.row is None else f"row {error.row} of {place}"
            raise DataError(f"{label} of {where} {error}") from error
        return self._in_floatx(array), missing

    def _loaders(self, form: Form) -> Iterator[RowLoader | None]:
        """The loader of each array of a form, and then ``None``, without end."""
        if self.loaders:
            names = [spec.name if spec is not None else "" for spec in self.schema.specs_of(form)] or [""]
            yield from (self.loaders.get(name) for name in names)
            of_outputs = label_loaders(self.loaders, self.schema)
            names = [spec.name for spec in self.schema.outputs]
            yield from (of_outputs.get(name) for name in (form.y.names or names if form.y is not None else ()))
        yield from repeat(None)

    def _in_floatx(self, array: Array) -> Array:
        return array.astype(self.schema.floatx, copy=False) if is_floating(array.dtype) else array

    def _block(self, form: Form, found: Sequence[Masked], place: str, first: int) -> Block:
        """Make a validated block of arrays and their masks of missing values, which `InvalidRows` handles."""
        arrays = self._as_the_model_takes_them(form, [array for array, _ in found])
        floating = self._floating(form) if self.schema.inputs else range(form.x.count)
        integers = [index for index in range(form.x.count) if index not in floating]
        specs = self.schema.specs_of(form)
        indices = [index for index, spec in enumerate(specs) if spec is not None and spec.indices is not None]
        masks = [missing for _, missing in found]
        incomplete = self._invalid.fill_missing(arrays, masks, form, integers, indices, place, first)
        arrays = [self._in_floatx(array) for array in arrays]
        block = Block(form, tuple(arrays))
        if incomplete is not None:
            block = block[np.flatnonzero(~incomplete)]

        def describe_value(array: int, row: int, position: int) -> str:
            return f"{form.labels[array]} holds NaN or an infinite value in row {first + row} of {place}"

        block = self._invalid.handle_not_finite(block, describe_value)
        reject_negative_weights(block, form.labels, place)
        self._invalid.check_indices(block, specs, form.labels, place)
        return block

    def _as_the_model_takes_them(self, form: Form, arrays: list[Array]) -> list[Array]:
        """Convert integers to floats for floating-point inputs, since JSON and CSV mix both. One-byte integers are kept.

        Arrays get or lose a last axis of size 1, as the input has it: TensorFlow would trace the model for the other rank,
        then for inputs of unknown rank, which Keras's layers do not take.
        """
        for index, spec in enumerate([] if self.schema.transformed else self.schema.specs_of(form)):
            array = arrays[index]
            if isinstance(array, SparseRows) or spec is None or spec.shape is None:
                continue
            if spec.takes(array.shape[1:]):
                if len(spec.shape) == array.ndim:
                    arrays[index] = array.reshape(*array.shape, 1)
                elif len(spec.shape) < array.ndim - 1:
                    arrays[index] = array.reshape(*array.shape[:-1])
        for index in self._floating(form):
            if arrays[index].dtype.kind in "iu" and arrays[index].dtype.itemsize > 1:
                arrays[index] = arrays[index].astype(self.schema.floatx)
        return arrays

    def _floating(self, form: Form) -> list[int]:
        """The indices of the arrays of floating-point inputs."""
        return [index for index, spec in enumerate(self.schema.specs_of(form)) if spec is not None and spec.floating]


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """The shape of a value that can be converted to an array; ``None`` if it is ragged."""
    try:
        return tuple(np.shape(leaf))
    except ValueError:
        return None
