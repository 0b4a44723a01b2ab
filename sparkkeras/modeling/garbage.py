"""Garbage collection in Python workers, which PySpark does after every task."""

from __future__ import annotations

import gc
import os


def keep_loaded() -> None:
    """PySpark collects garbage after every task, which takes 0.15 s once a backend is loaded. What is loaded now stays."""
    gc.collect()
    gc.freeze()


def spare_survivors() -> None:
    """Have the garbage collector of a worker pass over what earlier tasks have left in use.

    PySpark collects garbage after every task, which takes 20 ms for each model that the process keeps traced. As it has done
    so, nothing that is there when the next task begins is garbage.
    """
    if os.environ.get("SPARKKERAS_WORKER") and len(gc.get_objects()) > _SURVIVORS:
        gc.freeze()


def collect_survivors() -> None:
    """Have the next collection look through all objects again, as a large one is no longer in use."""
    if os.environ.get("SPARKKERAS_WORKER"):
        gc.unfreeze()


_SURVIVORS = 10_000
"""So many objects are collected in 3 ms."""
