"""The global generators of Python and NumPy, from which functions of users draw: their seeds, and streams with their own."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def seed_generators(seed: Sequence[int]) -> None:
    """Seed the global generators of Python and NumPy. Those of the backend are not seeded: that causes retracing."""
    drawn = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(drawn)
    np.random.seed(drawn)


@contextmanager
def seeded(seed: Sequence[int]) -> Generator[None, None, None]:
    """Seed the global generators in the ``with`` block; then they continue as before."""
    outer = _state()
    seed_generators(seed)
    try:
        yield
    finally:
        _set_state(outer)


def with_own_generators(values: Generator[T, None, None], seed: Sequence[int]) -> Generator[T, None, None]:
    """Iterate over values that draw from generators of their own, which start at ``seed``.

    So the values do not depend on what other code draws between them, and the other way round. Threads share the
    generators, so what they draw depends on their timing. Closing the result closes ``values``.
    """
    with seeded(seed):
        own = _state()

    @contextmanager
    def active() -> Generator[None, None, None]:
        nonlocal own
        outer = _state()
        _set_state(own)
        try:
            yield
        finally:
            own = _state()
            _set_state(outer)

    try:
        while True:
            with active():
                try:
                    value = next(values)
                except StopIteration:
                    return
            yield value
    finally:
        with active():
            values.close()


def _state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
