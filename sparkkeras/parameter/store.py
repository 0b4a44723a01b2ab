"""The common weights: one flat vector that many pull and many push to.

Who pulls gets the vector itself, not a copy: a snapshot holds it, and an update that meets a held vector works on a copy
(copy on write). So a pull copies nothing, and a push only where somebody is still reading.

With ``locked`` (asynchronous training) updates are applied one after the other, and a snapshot is one version. Without
(hogwild) they are applied in place at the same time, component by component, and may overwrite each other's components, as
in the paper (Niu et al., Hogwild!: A lock-free approach to parallelizing stochastic gradient descent, 2011, arXiv
1106.5730); a snapshot is then a copy that may mix versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from sparkkeras.parameter.rules import State, UpdateRule, WorkerUpdate, apply_in_place, fitting_state
from sparkkeras.weights import Array, Flat

KEPT_SPARES = 2
"""So many vectors that nobody reads any more are kept for the next copies: memory that is new costs more than copying."""


@dataclass(frozen=True)
class Applied:
    """What became of an update.

    Attributes:
        version: The version that it made.
        staleness: The updates that were applied since the weights that it came from.
    """

    version: int
    staleness: int


class _Vector:
    """A vector, and how many snapshots hold it."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.readers = 0


class Snapshot:
    """The weights of one version, which do not change as long as this is held; a context manager.

    Attributes:
        version: How many updates were applied.
        weights: The weights. Not to be written to, and not to be used after `release`.
    """

    def __init__(
        self, version: int, vector: _Vector, counters: tuple[Array, ...], let_go: Callable[[_Vector], None]
    ) -> None:
        self.version = version
        self.weights = Flat(vector.values, counters)
        self._vector: _Vector | None = vector
        self._let_go = let_go

    def release(self) -> None:
        """Let go of the vector. Any number of times."""
        vector, self._vector = self._vector, None
        if vector is not None:
            self._let_go(vector)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Store:
    """The weights that workers share, and the rule that applies what they send.

    Args:
        weights: The weights to begin with; copied.
        trainable: How many values at the head of the vector are trained. What follows are statistics, which are averaged
            whatever the rule: ``C += (W - C)/num_workers``.
        rule: How the trained ones take up an update.
        rule_state: What the rule remembers; copied, and begun anew where it does not fit.
        num_workers: How many workers there are.
        locked: Whether updates are applied one after the other.
    """

    def __init__(
        self, weights: Flat, trainable: int, rule: UpdateRule, rule_state: State, num_workers: int, locked: bool = True
    ) -> None:
        self._current = _Vector(weights.vector.copy())
        self._counters = weights.counters
        self._trainable = trainable
        self.rule = rule
        self._num_workers = num_workers
        self._locked = locked
        self._lock = threading.Lock()
        self._spares: list[Array] = []
        self._version = 0
        self._rule_state = fitting_state(rule, rule_state, self._current.values[:trainable])

    @property
    def version(self) -> int:
        """How many updates were applied."""
        return self._version

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        return bool(np.isfinite(self._current.values).all())

    def rule_state(self) -> State:
        """A copy of what the rule remembers."""
        with self._lock:
            return {name: value.copy() for name, value in self._rule_state.items()}

    def snapshot(self) -> Snapshot:
        """The weights as they are now."""
        if self._locked:
            with self._lock:
                self._current.readers += 1
                return Snapshot(self._version, self._current, self._counters, self._release)
        with self._lock:
            version, counters = self._version, self._counters
            copy = _Vector(self._spare())
        np.copyto(copy.values, self._current.values)  # while other updates are applied
        copy.readers += 1
        return Snapshot(version, copy, counters, self._release)

    def apply(
        self,
        sent: Array,
        counters: tuple[Array, ...],
        base: int,
        *,
        steps: int,
        rows: int,
        learning_rate: float,
    ) -> Applied:
        """Take up what a worker sent.

        Args:
            sent: What the rule's exchange gave for the trained values, and the worker's own statistics behind it.
            counters: The worker's counters; of counters the largest counts.
            base: The version that the worker went on from.
            steps: The optimizer steps behind it.
            rows: The rows that they saw.
            learning_rate: That of the last of these steps.

        Raises:
            ConfigurationError: The rule does not work in place.
        """
        update = WorkerUpdate(
            sent=sent[: self._trainable],
            steps=steps,
            rows=rows,
            learning_rate=learning_rate,
            num_workers=self._num_workers,
        )
        statistics = sent[self._trainable :]
        if self._locked:
            with self._lock:
                staleness = self._version - base
                self._take_up(self._writable(), update, statistics, staleness)
                self._count(counters)
                return Applied(self._version, staleness)
        with self._lock:
            staleness = self._version - base
        self._take_up(self._current.values, update, statistics, staleness)
        with self._lock:  # only now: who has read half of it must get the answer that there is something newer
            self._count(counters)
            return Applied(self._version, staleness)

    def _take_up(self, center: Array, update: WorkerUpdate, statistics: Array, staleness: int) -> None:
        apply_in_place(self.rule, center[: self._trainable], self._rule_state, update, staleness)
        if statistics.size:
            mine = center[self._trainable :]
            mine += (statistics - mine) / self._num_workers

    def _count(self, counters: tuple[Array, ...]) -> None:
        self._version += 1
        if counters:
            self._counters = tuple(np.maximum(mine, other) for mine, other in zip(self._counters, counters, strict=True))

    def _writable(self) -> Array:
        """The current values, as a copy where somebody reads them. Under the lock."""
        if self._current.readers:
            copy = _Vector(self._spare())
            np.copyto(copy.values, self._current.values)
            self._current = copy
        return self._current.values

    def _spare(self) -> Array:
        return self._spares.pop() if self._spares else np.empty_like(self._current.values)

    def _release(self, vector: _Vector) -> None:
        with self._lock:
            vector.readers -= 1
            if not vector.readers and vector is not self._current and len(self._spares) < KEPT_SPARES:
                self._spares.append(vector.values)
