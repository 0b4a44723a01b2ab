"""Slots that are occupied until a callback returns, so that no call made in it waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_waiting = threading.local()
"""``slots``: how many slots are held by the jobs that wait until the thread returns from a callback."""


@contextmanager
def holding_slots(slots: int) -> Iterator[None]:
    """Run callbacks while a Spark job that waits for them keeps its slots: a job that they start cannot have these.

    Args:
        slots: How many slots the job keeps. Calls within one another add up.
    """
    before = held_slots()
    _waiting.slots = before + slots
    try:
        yield
    finally:
        _waiting.slots = before


def held_slots() -> int:
    """How many slots are not released before this thread returns from a callback; 0 outside of callbacks."""
    slots: int = getattr(_waiting, "slots", 0)
    return slots
