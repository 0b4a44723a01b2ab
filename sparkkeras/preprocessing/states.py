"""What preprocessing layers learn of rows: states of parts of the rows, which are merged to the state of all.

Pure NumPy: a measure makes a state of an array, `MergeStates` merges those of several parts.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from sparkkeras.data.partition_stats import Moments
from sparkkeras.errors import DataError
from sparkkeras.weights import Array

S = TypeVar("S", bound="LayerState")


class LayerState(Protocol):
    """The state of some rows."""

    def merge(self: S, other: S) -> S:
        """The state of these rows and those of another state."""
        ...

    def split(self: S, parts: int) -> Sequence[S | None]:
        """The state in pieces that can be merged apart; ``None``: nothing is in this piece."""
        ...

    def join(self: S, others: Sequence[S]) -> S:
        """The inverse of `split`; ``self`` is the first piece."""
        ...

    def reduced(self: S) -> S:
        """What the driver needs of a state, or of a piece of it."""
        ...


class _Small:
    """A state that is merged as a whole."""

    def split(self: S, parts: int) -> Sequence[S | None]:
        return [self, *[None] * (parts - 1)]

    def join(self: S, others: Sequence[S]) -> S:
        return self

    def reduced(self: S) -> S:
        return self


@dataclass(frozen=True)
class MeanVariance(_Small):
    """Means and variances of values, in float64.

    Attributes:
        moments: The number of values of each mean, the means, and the sums of squared deviations from them.
        row_shape: The shape of a row.
    """

    moments: Moments
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, values: Array, kept: Sequence[int]) -> MeanVariance:
        """Those of an array over all axes that are not ``kept``."""
        reduced = tuple(axis for axis in range(values.ndim) if axis not in {each % values.ndim for each in kept})
        wide = values.astype(np.float64)
        squares = np.square(wide - wide.mean(reduced, keepdims=True)).sum(reduced)
        count = np.array(math.prod(values.shape[axis] for axis in reduced))
        return cls(Moments(count, wide.mean(reduced), squares), values.shape[1:])

    def merge(self, other: MeanVariance) -> MeanVariance:
        """See `LayerState.merge`."""
        if self.mean.shape != other.mean.shape:
            raise DataError(
                f"rows have the shapes {self.row_shape} and {other.row_shape}: all must have the same number of values."
            )
        return MeanVariance(self.moments.union(other.moments), self.row_shape)

    @property
    def mean(self) -> Array:
        """The means."""
        return self.moments.mean

    @property
    def variance(self) -> Array:
        """The variances."""
        variances: Array = self.moments.squares / self.moments.rows
        return variances


@dataclass(frozen=True)
class Quantiles(_Small):
    """A summary of values within an error ``epsilon`` of their ranks: those at even distances, and how many each stands for.

    The method is that of Keras's ``Discretization``.
    """

    values: Array
    weights: Array
    epsilon: float

    @classmethod
    def of(cls, values: Array, epsilon: float) -> Quantiles:
        """The summary of an array."""
        found = np.sort(values, axis=None).astype(np.float32)
        step = max(found.size * epsilon, 1.0)
        chosen = found[int(step - 1) :: int(step)]
        return cls(chosen, np.full(chosen.size, found.size / max(1, chosen.size)), epsilon)

    def merge(self, other: Quantiles) -> Quantiles:
        """See `LayerState.merge`."""
        values, weights = np.concatenate([self.values, other.values]), np.concatenate([self.weights, other.weights])
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        if values.size * self.epsilon >= 1:
            sums = weights.cumsum()
            shares = self.epsilon + np.arange(0.0, 1.0, self.epsilon)
            values = np.interp(shares, sums / sums[-1], values).astype(np.float32)
            weights = np.diff(np.interp(shares, sums / sums[-1], sums), prepend=0.0)
        return Quantiles(values, weights, self.epsilon)


@dataclass(frozen=True)
class Tokens:
    """How often tokens occur, and in how many rows.

    Attributes:
        counts: The number of occurrences by token.
        rows_with: The number of rows with the token; empty if they are not counted.
        rows: The number of all rows.
        limit: How many tokens the driver needs: the most frequent ones. ``None``: all.
    """

    counts: Counter[Any]
    rows_with: Counter[Any] = field(default_factory=Counter)
    rows: int = 0
    limit: int | None = None

    @classmethod
    def of(cls, values: Array, with_rows: bool, limit: int | None) -> Tokens:
        """Those of an array, whose elements are the tokens."""
        counts = _counted(values)
        if not with_rows:
            return cls(counts, limit=limit)
        rows = values.reshape(len(values), -1).tolist()
        return cls(counts, Counter(token for row in rows for token in set(row)), len(rows), limit)

    def without(self, tokens: Sequence[Any]) -> Tokens:
        """Without some tokens."""
        counts, rows_with = (
            Counter({token: count for token, count in each.items() if token not in tokens})
            for each in (self.counts, self.rows_with)
        )
        return Tokens(counts, rows_with, self.rows, self.limit)

    def merge(self, other: Tokens) -> Tokens:
        """See `LayerState.merge`. Changes this one: a copy of all tokens for each block would take long."""
        self.counts.update(other.counts)
        self.rows_with.update(other.rows_with)
        return Tokens(self.counts, self.rows_with, self.rows + other.rows, self.limit)

    def split(self, parts: int) -> Sequence[Tokens]:
        """See `LayerState.split`: by the hash of the tokens. The first piece has the number of rows."""
        pieces: list[Counter[Any]] = [Counter() for _ in range(parts)]
        for token, count in self.counts.items():
            pieces[zlib.crc32(str(token).encode()) % parts][token] = count
        return [
            Tokens(piece, self._rows_with(piece), 0 if index else self.rows, self.limit)
            for index, piece in enumerate(pieces)
        ]

    def join(self, others: Sequence[Tokens]) -> Tokens:
        """See `LayerState.join`."""
        return functools.reduce(Tokens.merge, others, self).reduced()

    def reduced(self) -> Tokens:
        """The most frequent tokens, in order. Keras puts the largest first of those that are equally frequent."""
        order = sorted(self.counts.items(), key=lambda item: (item[1], item[0]), reverse=True)[: self.limit]
        kept = Counter(dict(order))
        return Tokens(kept, self._rows_with(kept), self.rows, self.limit)

    def _rows_with(self, tokens: Iterable[Any]) -> Counter[Any]:
        return Counter({token: self.rows_with[token] for token in tokens} if self.rows_with else {})

    @property
    def inverse_document_frequencies(self) -> Array:
        """``log(1 + rows / (1 + rows with the token))`` for each token, as Keras computes it."""
        return np.array([np.log(1 + self.rows / (1 + self.rows_with[token])) for token in self.counts], np.float32)


def _counted(values: Array) -> Counter[Any]:
    if values.dtype == object:
        return Counter(values.reshape(-1).tolist())
    found, counts = np.unique(values, return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))


@dataclass(frozen=True)
class MergeStates:
    """Merges the states of several layers; see `sparkkeras.data.dataset.Merging`. A result has a state for each layer.

    Attributes:
        parts: Into how many pieces results are split, so that the tokens of one layer need not fit into one worker.
    """

    parts: int

    def __call__(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """Merge the states of each layer."""
        return [_merged(states) for states in zip(*results, strict=True)]

    def split(self, result: Sequence[Any], max_bytes: int) -> list[list[Any]]:
        """Split the states of each layer."""
        return [list(piece) for piece in zip(*(state.split(self.parts) for state in result), strict=True)]

    def join(self, pieces: Sequence[Sequence[Any]]) -> list[Any]:
        """Join the pieces of each layer."""
        of_layers = zip(*pieces, strict=True)
        return [first.join([each for each in others if each is not None]) for first, *others in of_layers]


def _merged(states: Sequence[Any]) -> Any:
    found = [state for state in states if state is not None]
    return functools.reduce(lambda one, other: one.merge(other), found).reduced() if found else None
