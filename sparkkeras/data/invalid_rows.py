"""Rows with nulls, NaN or infinite values: reports them, drops them or passes them to the model, as ``on_invalid`` says.

Values that no policy allows are rejected here too: negative sample weights, and indices out of range for an ``Embedding``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparkkeras.data.block import Block, Form
from sparkkeras.data.columns import ColumnValues
from sparkkeras.data.schema import InputSpec
from sparkkeras.data.sparse import SparseRows
from sparkkeras.errors import DataError
from sparkkeras.weights import Array, is_floating

InvalidPolicy = Literal["error", "drop", "allow", "null"]
"""How rows with nulls, NaN or infinite values are handled. Spark ML's ``handleInvalid`` needs all of these."""


ALLOWS_NUMBERS = 'on_invalid="allow" replaces missing numbers by NaN, which strings and integers cannot be'
"""Why ``on_invalid="allow"`` may not help, for messages."""


@dataclass(frozen=True)
class InvalidRows:
    """Handles invalid rows.

    Attributes:
        policy: How rows with nulls, NaN or infinite values are handled. ``"allow"`` keeps them, with NaN for nulls. In
            prediction, ``"drop"`` and ``"null"`` only mask such rows, and the caller drops them or predicts null.
        labelled: Whether the rows are for training or evaluation.
        has_argument: Whether the caller has an argument ``on_invalid=`` that messages can suggest.
    """

    policy: InvalidPolicy
    labelled: bool
    has_argument: bool

    def mask_nulls(self, leaves: Sequence[ColumnValues], arrays: list[Array], where: str, first: int) -> Array | None:
        """Find the rows with nulls in columns, or replace the nulls by NaN with ``"allow"``.

        Args:
            leaves: The values of each array, with their nulls.
            arrays: The arrays, in the dtypes that the model takes; replaced in the list.
            where: What contains the rows, for messages.
            first: The index of the first of these rows in ``where``, for messages.

        Returns:
            A mask of the rows without nulls; ``None``: all.

        Raises:
            DataError: There are nulls, and the policy does not allow it.
        """
        complete: Array | None = None
        for index, leaf in enumerate(leaves):
            if leaf.good is None:
                continue
            if not leaf.may_lack and self.policy == "allow" and is_floating(arrays[index].dtype):
                known = np.isnan(arrays[index].reshape(len(leaf.good), -1)).any(axis=1)  # which of its values are missing
                arrays[index] = arrays[index].copy()
                arrays[index][~leaf.good & ~known] = np.nan
                continue
            if not leaf.may_lack and self.policy in ("error", "allow"):
                row = int(np.argmin(leaf.good))
                reason = f", and {ALLOWS_NUMBERS}" if self.policy == "allow" else ""
                raise DataError(
                    f"{leaf.null_column(row)} has a null in row {first + row} of {where}{reason}. Replace nulls (df.fillna, "
                    "in SQL coalesce), leave such rows out (df.dropna(subset=[...]), in SQL WHERE ... IS NOT NULL)"
                    + (f", or {instead_of_nulls(self.labelled)}." if self.has_argument else ".")
                )
            complete = leaf.good if complete is None else complete & leaf.good
        return complete

    def fill_missing(
        self,
        arrays: list[Array],
        masks: Sequence[Array | None],
        form: Form,
        integers: Sequence[int],
        indices: Sequence[int],
        place: str,
        first: int,
    ) -> Array | None:
        """Find the rows with missing values (``None``) in arrays, or replace these by NaN with ``"allow"``.

        Args:
            arrays: The arrays, in the dtypes that the model takes; replaced in the list.
            masks: The mask of missing values of each array; ``None``: none are missing.
            form: The form of the rows.
            integers: The indices of the arrays for inputs that take integers, which cannot be NaN.
            indices: The indices of the arrays for inputs of an ``Embedding``, which has no index for NaN.
            place: What contains the rows, for messages.
            first: The index of the first of these rows in ``place``, for messages.

        Returns:
            A mask of the rows to drop; ``None``: none.

        Raises:
            DataError: Values are missing, and the policy does not allow it.
        """
        incomplete: Array | None = None
        for index, missing in enumerate(masks):
            if missing is None:
                continue
            is_text = arrays[index].dtype == object
            takes_nan = not is_text and (is_floating(arrays[index].dtype) or index not in integers)
            if self.policy == "allow" and takes_nan:
                arrays[index] = np.where(missing.reshape(arrays[index].shape), np.nan, arrays[index])
                continue
            rows: Array = np.any(missing.reshape(len(missing), -1), axis=1)
            if self.policy != "drop":
                raise DataError(
                    f"{form.labels[index]} of row {first + int(np.argmax(rows))} of {place} has missing values (None or "
                    f"NA): replace them or drop the row{self._other_remedies(takes_nan and index not in indices)}."
                )
            incomplete = rows if incomplete is None else incomplete | rows
        return incomplete

    def handle_not_finite(self, block: Block, describe_value: Callable[[int, int, int], str]) -> Block:
        """Drop or reject rows with NaN or infinite values, as the policy says.

        Args:
            block: The rows.
            describe_value: Describes an invalid value for a message, by the indices of its array, its row, and its position
                in the row.
        """
        if self.policy == "allow":
            return block
        if self.policy != "error":
            rows = finite_rows(block)
            return block if rows is None else block[np.flatnonzero(rows)]
        for index, finite in _not_finite(block):
            row = int(np.argmin(finite))
            remedy = 'on_invalid="allow" to pass them to the model (in Spark ML handleInvalid="keep" to predict null)'
            if self.labelled:
                remedy = 'on_invalid="drop" (in Spark ML handleInvalid="skip") to drop such rows'
                remedy += ', or on_invalid="allow" (not in Spark ML) to train on them'
            otherwise = f"pass {remedy}" if self.has_argument else "drop such rows"
            position = int(np.argmin(np.isfinite(block.arrays[index][row])))
            raise DataError(f"{describe_value(index, row, position)}. Fix the data, or {otherwise}.")
        return block

    def check_indices(
        self,
        block: Block,
        specs: Sequence[InputSpec | None],
        names: Sequence[str],
        place: str,
        complete: Array | None = None,
    ) -> None:
        """Reject values that are out of range for the ``Embedding`` layer that takes an input.

        Args:
            block: The rows.
            specs: The input that each array is for; ``None`` if it is for none.
            names: The name of each array in messages.
            place: What contains the rows, for messages.
            complete: A mask of the rows without missing values; ``None``: all.
        """
        for name, array, spec in zip(names, block.arrays, specs, strict=False):
            if spec is None or spec.indices is None:
                continue
            values = array.values if isinstance(array, SparseRows) else array if complete is None else array[complete]
            if not values.size:
                continue
            # fmin and fmax ignore NaN, which on_invalid handles; they are NaN if all values are.
            low, high = float(np.fmin.reduce(values, axis=None)), float(np.fmax.reduce(values, axis=None))
            if low < 0 or high >= spec.indices:
                raise DataError(
                    f"{name} of {place} is for the model's {spec.title}, which goes into an Embedding with "
                    f"input_dim={spec.indices}, so its values must be indices from 0 to {spec.indices - 1}, but they range "
                    f"from {low:g} to {high:g}. "
                    "Renumber them, or increase input_dim."
                )
            if self.policy == "allow" and is_floating(values.dtype) and np.isnan(values).any():
                raise DataError(
                    f"{name} of {place} is for the model's {spec.title}, which goes into an Embedding, and that has no "
                    f"index for NaN: replace missing values by an index of their own"
                    f"{', or drop such rows' if self.labelled else ''}."
                )

    def _other_remedies(self, takes_nan: bool) -> str:
        if not self.has_argument:
            return ""
        drop = 'on_invalid="drop" drops such rows' if self.labelled else ""
        if self.policy == "allow":
            null = 'for a DataFrame, on_invalid="null" predicts null for such rows'
            return f", since {ALLOWS_NUMBERS}; {drop or null}"
        allow = 'on_invalid="allow" replaces them by NaN' if takes_nan else ""
        given = ", and ".join(filter(None, (drop, allow)))
        return f"; {given}" if given else ""


def instead_of_nulls(labelled: bool) -> str:
    """The policy for nulls to suggest in a message about columns."""
    if labelled:
        return 'pass on_invalid="drop" (in Spark ML handleInvalid="skip")'
    return 'pass on_invalid="null" (in Spark ML handleInvalid="keep"), which predicts null for them'


def reject_negative_weights(block: Block, names: Sequence[str], place: str) -> None:
    """Reject sample weights below 0, with which training would increase the loss.

    Args:
        block: The rows.
        names: The name of each array in messages.
        place: What contains the rows, for messages.
    """
    weights = block.form.span("sample_weight")
    for name, array in zip(names[weights], block.arrays[weights], strict=True):
        if array.size and array.min() < 0:
            raise DataError(
                f"{name} of {place} holds negative sample weights, down to {float(array.min()):g}: expected weights of 0 or "
                "greater."
            )


def finite_rows(block: Block) -> Array | None:
    """A mask of the rows without NaN and infinite values; ``None``: all."""
    found = [finite for _, finite in _not_finite(block)]
    return np.logical_and.reduce(found) if found else None


def _not_finite(block: Block) -> Iterator[tuple[int, Array]]:
    """The index of each array with NaN or infinite values, and a mask of the rows without them."""
    for index, array in enumerate(block.arrays):
        if is_floating(array.dtype) and array.size and not _has_finite_sum(array):
            finite = _finite(array)
            if not finite.all():
                yield index, finite


def _finite(array: Array) -> Array:
    """A mask of the rows without NaN and infinite values."""
    if isinstance(array, SparseRows):
        return array.finite
    return np.asarray(np.isfinite(array.reshape(len(array), -1)).all(axis=1))


def _has_finite_sum(array: Array) -> bool:
    """Whether the sum is finite, which implies that every value is. An infinite sum may be an overflow of finite values."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite((array.values if isinstance(array, SparseRows) else array).sum()))
