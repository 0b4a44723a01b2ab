"""Garbage collection in Python workers, which PySpark runs after every task."""

from __future__ import annotations

import gc
import os


def freeze_loaded() -> None:
    """Exclude all current objects from garbage collection, which takes 0.15 s per task once a backend is loaded."""
    gc.collect()
    gc.freeze()


def freeze_survivors() -> None:
    """In a worker, exclude objects that survived earlier tasks from garbage collection. Called when a task starts.

    PySpark collects garbage after every task, which takes 20 ms for each traced model in the cache of the process. Because
    of this collection, no object that exists at the start of the next task is garbage.
    """
    if os.environ.get("SPARKKERAS_WORKER") and len(gc.get_objects()) > _SURVIVORS:
        gc.freeze()


def unfreeze_survivors() -> None:
    """In a worker, include all objects in the next garbage collection, because a large one is no longer in use."""
    if os.environ.get("SPARKKERAS_WORKER"):
        gc.unfreeze()


_SURVIVORS = 10_000
"""Collecting this many objects takes 3 ms."""
