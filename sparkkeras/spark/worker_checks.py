"""Checks once for each SparkContext or session that the workers can train, and packs this package for those that lack it."""

from __future__ import annotations

import sys
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sparkkeras.errors import ClusterError
from sparkkeras.spark import probe

_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()

PACKAGE = Path(__file__).parent.parent
"""The folder of this package, which is sent to workers that lack it."""


equipped: weakref.WeakKeyDictionary[Any, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The results of `sparkkeras.spark.probe.probe`, one per probed worker, of each SparkContext or session."""


def equip(owner: Any, find: Callable[[], list[dict[str, Any]]], send: Callable[[], None], backend: str) -> None:
    """Probe the workers once for each SparkContext or session, and ship this package if one lacks it or has another version.

    A probe waits for free slots, so that of one context must not block the threads that use others. The tasks pickle
    `sparkkeras.spark.probe` by value, because workers may lack this package.

    Args:
        owner: The SparkContext or the session.
        find: Runs the probe.
        send: Ships this package; see `pack_package`.
        backend: The Keras backend that the workers are for.

    Raises:
        ClusterError: Workers lack Keras or its backend, or run another Python version.
    """
    from pyspark import cloudpickle

    with _locks_lock:
        lock = _locks.setdefault(owner, threading.Lock())
        cloudpickle.register_pickle_by_value(probe)  # never undone, as another thread may be probing
    with lock:
        found = equipped[owner] if owner in equipped else find()
        check_workers(found, backend)
        if owner in equipped:
            return
        ours = probe.package_digest(PACKAGE)
        if any(worker["package"] != ours for worker in found):
            send()
        equipped[owner] = found


def check_workers(found: Iterable[Mapping[str, Any]], backend: str) -> None:
    """Reject workers that cannot train.

    Args:
        found: The results of `sparkkeras.spark.probe.probe`, one per worker.
        backend: The Keras backend to train with.

    Raises:
        ClusterError: Workers lack Keras or its backend.
    """
    for worker in found:
        if missing := [name for name in ("keras", backend) if name in worker["missing"]]:
            raise ClusterError(
                f"Spark's workers lack {' and '.join(missing)}: {worker['python']} (Python {worker['version']}) "
                f"on {worker['host']}. Install it there (pip install {' '.join(missing)}), or run the workers "
                "with a Python that has it: set the environment variable PYSPARK_PYTHON (with spark-submit, also "
                f"spark.pyspark.python) before the SparkContext starts. The driver runs {sys.executable}."
            )


def check_optional(found: Iterable[Mapping[str, Any]], module: str, package: str, purpose: str) -> None:
    """Reject workers that lack an optional module.

    Args:
        found: The results of `sparkkeras.spark.probe.probe`, one per worker.
        module: One of `sparkkeras.spark.probe.MODULES`.
        package: Its name for pip.
        purpose: The feature that needs it, in the plural, for the message.

    Raises:
        ClusterError: A worker lacks it.
    """
    for worker in found:
        if module in worker["missing"]:
            raise ClusterError(
                f"{purpose} need {package} on Spark's workers, and {worker['python']} (Python {worker['version']}) on "
                f"{worker['host']} lacks it. Install it there: pip install {package}."
            )


def pack_package(folder: str) -> str:
    """Write this package as a zip file to a folder; returns its path."""
    target = str(Path(folder) / "sparkkeras.zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in {".py", ".pyi", ".typed"}:
                archive.write(path, Path("sparkkeras") / path.relative_to(PACKAGE))
    return target
