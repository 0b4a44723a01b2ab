"""Consistent cuts through a running server: weights, rule state and progress of the workers between two pushes.

A push changes the store and then the ledger. A cut is taken when no push is in between: pushes that have begun end first,
and those that follow wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sparkkeras.parameter.ledger import Ledger, LedgerProgress
from sparkkeras.parameter.rules import State
from sparkkeras.parameter.store import Store
from sparkkeras.weights import Flat


@dataclass(frozen=True)
class Cut:
    """What a server needs to continue.

    Attributes:
        weights: The weights; a copy.
        rule_state: The state of the rule; a copy.
        progress: The progress of the workers, whose updates are exactly those in the weights.
        version: The version of the weights.
    """

    weights: Flat
    rule_state: State
    progress: LedgerProgress
    version: int = 0


class Cuts:
    """Takes cuts of a store and a ledger.

    Args:
        store: The weights.
        ledger: The progress of the workers.
        keep: Called with each cut that was `requested`, while no push is applied.
    """

    def __init__(self, store: Store, ledger: Ledger, keep: Callable[[Cut], None]) -> None:
        self._store, self._ledger, self._keep = store, ledger, keep
        self._changed = threading.Condition()
        self._inside = 0
        self._is_requested = False
        self._num_waiting = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """The context of a call that may change both; a `requested` cut is taken when the last one of those has ended."""
        with self._changed:
            while self._is_requested or self._num_waiting:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    if self._is_requested:
                        self._is_requested = False
                        self._keep(self._take())
                    self._changed.notify_all()

    def request(self) -> None:
        """Have a cut taken at the end of this call, within `passing`."""
        self._is_requested = True  # read under the lock when this call has ended

    def now(self) -> Cut:
        """Take a cut; outside of `passing`."""
        with self._between():
            return self._take()

    def wait(self) -> None:
        """Wait until calls that are within `passing` have ended, and a requested cut has been taken."""
        with self._between():
            pass

    @contextmanager
    def _between(self) -> Iterator[None]:
        """The context in which no call is within `passing`."""
        with self._changed:
            self._num_waiting += 1
            try:
                while self._inside:
                    self._changed.wait()
                yield
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()

    def _take(self) -> Cut:
        with self._store.snapshot() as snapshot:
            weights = Flat(snapshot.weights.vector.copy(), snapshot.weights.integer_variables)
        return Cut(weights, self._store.rule_state(), self._ledger.take_progress(), snapshot.version)
