"""The shared weights of the workers: one flat vector with snapshots and copy on write.

A snapshot holds the vector itself, not a copy. An update of a vector that a snapshot holds writes to a copy (copy on write).
So a pull copies nothing, and a push copies only while a snapshot is being read.

With ``locked=True`` (asynchronous mode) updates are applied one after the other, and a snapshot is one version. With
``locked=False`` (hogwild mode) they are applied in place at the same time, component by component, and may overwrite each
other's components, as in the paper (Niu et al., Hogwild!: A lock-free approach to parallelizing stochastic gradient descent,
2011, arXiv 1106.5730); a snapshot is then a copy that may mix versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkkeras.parameter.exchange import ExchangePoint
from sparkkeras.parameter.rules import State, UpdateRule, WorkerUpdate, apply_in_place, fitting_state
from sparkkeras.weights import Array, Flat

MAX_SPARES = 2
"""The number of unused vectors that are kept for the next copies: new memory costs more than the copy."""


@dataclass(frozen=True)
class WeightChange:
    """A change of weights by the driver.

    Attributes:
        places: The indices of the changed values.
        before: The values that were changed.
        after: The values after the change.
    """

    places: Array
    before: Array
    after: Array

    @classmethod
    def between(cls, before: Array, after: Array) -> WeightChange:
        """The change from one vector to another."""
        places = np.flatnonzero(before != after)
        return cls(places, before[places], after[places])

    def apply(self, vector: Array) -> None:
        """Change a vector in place: by the same differences, where it has other values than ``before``."""
        current = vector[self.places]
        vector[self.places] = np.where(current == self.before, self.after, current + (self.after - self.before))


class _Vector:
    """A vector, and the number of snapshots that hold it."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.readers = 0


class Snapshot:
    """The weights of one version, unchanged until `release`; a context manager.

    Attributes:
        version: The number of updates that were applied before.
        weights: The weights. Do not write to them, and do not use them after `release`.
    """

    def __init__(
        self, version: int, vector: _Vector, integers: tuple[Array, ...], on_release: Callable[[_Vector], None]
    ) -> None:
        self.version = version
        self.weights = Flat(vector.values, integers)
        self._vector: _Vector | None = vector
        self._on_release = on_release

    def release(self) -> None:
        """Release the vector; may be called more than once."""
        vector, self._vector = self._vector, None
        if vector is not None:
            self._on_release(vector)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Store:
    """The shared weights, and the update rule that applies the workers' updates to them.

    Args:
        weights: The initial weights; copied.
        trainable: The number of trainable values, which come first in the vector. The rest are statistics, which are
            averaged with every rule: ``C += (W - C)/num_workers``.
        rule: The update rule for the trainable values.
        rule_state: The state of the rule; copied. A state that does not fit is replaced by a new one.
        num_workers: The number of workers.
        locked: Whether updates are applied one after the other.

    Attributes:
        lock: Guards the weights, and what changes with them.
    """

    def __init__(
        self, weights: Flat, trainable: int, rule: UpdateRule, rule_state: State, num_workers: int, locked: bool = True
    ) -> None:
        self._current = _Vector(weights.vector.copy())
        self._integers = weights.integer_variables
        self._trainable = trainable
        self.rule = rule
        self._num_workers = num_workers
        self._locked = locked
        self.lock = threading.RLock()
        self._applying: AbstractContextManager[Any] = self.lock if locked else nullcontext()
        self._spares: list[Array] = []
        self._version = 0
        self._rule_state = fitting_state(rule, rule_state, self._current.values[:trainable])

    @property
    def version(self) -> int:
        """The number of applied updates."""
        return self._version

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        return bool(np.isfinite(self._current.values).all())

    def rule_state(self) -> State:
        """A copy of the rule's state."""
        with self.lock:
            return {name: value.copy() for name, value in self._rule_state.items()}

    def snapshot(self) -> Snapshot:
        """A snapshot of the current weights."""
        if self._locked:
            with self.lock:
                self._current.readers += 1
                return Snapshot(self._version, self._current, self._integers, self._release)
        with self.lock:
            version, integers = self._version, self._integers
            copy = _Vector(self._spare())
        np.copyto(copy.values, self._current.values)  # other updates may be applied meanwhile
        copy.readers += 1
        return Snapshot(version, copy, integers, self._release)

    def apply(self, sent: Flat, base: int, point: ExchangePoint) -> int:
        """Apply an update of a worker.

        Args:
            sent: The result of the rule's exchange for the trainable values, followed by the worker's statistics; and the
                worker's integer variables, of which the store keeps the largest.
            base: The version that the worker trained from.
            point: The worker's progress.

        Returns:
            The staleness of the update: the number of updates applied since its base.

        Raises:
            ConfigurationError: The rule does not work in place.
        """
        update = WorkerUpdate(
            sent=sent.vector[: self._trainable],
            steps=point.steps,
            rows=point.rows,
            learning_rate=point.learning_rate,
            num_workers=self._num_workers,
        )
        with self._applying:
            with self.lock:
                staleness, center = self._version - base, self._writable()
            self._apply_update(center, update, sent.vector[self._trainable :], staleness)
            with self.lock:  # only now: a reader of half the update must see a newer version at its next pull
                self._advance(sent.integer_variables)
        return staleness

    def change(self, change: WeightChange) -> int:
        """Apply a change of the driver, while no update is applied; returns the new version."""
        with self.lock:
            change.apply(self._writable())
            self._version += 1
            return self._version

    def _apply_update(self, center: Array, update: WorkerUpdate, statistics: Array, staleness: int) -> None:
        apply_in_place(self.rule, center[: self._trainable], self._rule_state, update, staleness)
        if statistics.size:
            shared = center[self._trainable :]
            shared += (statistics - shared) / self._num_workers

    def _advance(self, integers: tuple[Array, ...]) -> None:
        """Count an update, and keep the largest of each integer. Under the lock."""
        self._version += 1
        if integers:
            self._integers = tuple(np.maximum(ours, theirs) for ours, theirs in zip(self._integers, integers, strict=True))

    def _writable(self) -> Array:
        """The current values, as a copy if a snapshot holds them, which none does with ``locked=False``. Under the lock."""
        if self._current.readers:
            copy = _Vector(self._spare())
            np.copyto(copy.values, self._current.values)
            self._current = copy
        return self._current.values

    def _spare(self) -> Array:
        return self._spares.pop() if self._spares else np.empty_like(self._current.values)

    def _release(self, vector: _Vector) -> None:
        with self.lock:
            vector.readers -= 1
            if not vector.readers and vector is not self._current and len(self._spares) < MAX_SPARES:
                self._spares.append(vector.values)
