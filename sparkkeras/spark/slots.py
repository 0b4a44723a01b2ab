"""Tracks the slots that Spark jobs hold until a callback returns, so that calls inside the callback do not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_waiting = threading.local()
"""``slots``: the number of slots held by jobs that wait for this thread to return from a callback."""


@contextmanager
def holding_slots(slots: int) -> Iterator[None]:
    """Run callbacks for which a Spark job waits and holds its slots, so that jobs started by the callbacks cannot use them.

    Args:
        slots: The number of slots that the job holds. The slots of nested calls add up.
    """
    before = held_slots()
    _waiting.slots = before + slots
    try:
        yield
    finally:
        _waiting.slots = before


def held_slots() -> int:
    """The number of slots that are held until this thread returns from a callback; 0 outside of callbacks."""
    slots: int = getattr(_waiting, "slots", 0)
    return slots
