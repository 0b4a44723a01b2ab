"""A probe of the Python environment of Spark's workers, which starts to load Keras. Imports only the standard library.

The workers may lack this package, so the module is pickled by value; see `sparkkeras.spark.cluster`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = ("keras", "tensorflow", "jax", "torch", "openvino", "google_crc32c")
"""The modules whose presence is reported: Keras, its backends, and what only some features need on the workers."""


def package_digest(folder: Path) -> str:
    """A digest of all Python files in a folder and its subfolders."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def probe_batches(backend: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Run `probe` in ``mapInArrow``: ignores the input, and yields the pickled result as an Arrow batch."""
    import pickle

    import pyarrow as pa

    for _ in batches:
        pass
    for found in probe(backend=backend):
        yield pa.record_batch([pa.array([pickle.dumps(found)], pa.binary())], ["result"])


def probe(_: Any = None, backend: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the properties of this worker's Python: path, version, missing modules, and a digest of its sparkkeras.

    A worker for training then begins to import Keras in the background.
    """

    def has(name: str) -> bool:
        found = importlib.util.find_spec(name)  # a folder without __init__.py, which uninstalling may leave, has no origin
        return found is not None and found.origin is not None

    backend = backend or os.environ.get("KERAS_BACKEND", "tensorflow")
    missing = [name for name in dict.fromkeys([*MODULES, backend]) if not has(name)]
    package = importlib.util.find_spec("sparkkeras")
    folder = Path(package.origin).parent if package is not None and package.origin else None
    yield {
        "host": platform.node(),
        "python": sys.executable,
        "version": platform.python_version(),
        "missing": missing,
        "package": package_digest(folder) if folder is not None and folder.is_dir() else "",
    }
    if (
        os.environ.get("SPARKKERAS_WORKER")
        and not os.environ.get("SPARKKERAS_FORKS")
        and not {"keras", backend} & {*missing, "openvino"}  # OpenVINO: see `device.prepare`
    ):
        # Training needs it in a moment: it loads after this task, while the driver packs model and data. Not in workers that
        # fork, since other threads do not survive a fork.
        threading.Thread(target=_load_keras, daemon=True).start()


def _load_keras() -> None:
    with suppress(Exception):  # training imports it as well, and reports the error
        importlib.import_module("keras")
