"""Checkpoints of what rank 0 of a run saves, written on the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparkkeras.checkpoints.background_writer import BackgroundWriter
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.errors import ConfigurationError, warn
from sparkkeras.runner.rank_context import Saved
from sparkkeras.runner.service import pack

_RUN = "SparkRunner.run"


class RunCheckpoints:
    """The checkpoints of one run.

    Args:
        store: Their folder.
        resume: Whether to read the newest one.

    Attributes:
        restored: What the newest checkpoint has, pickled; empty if there is none.

    Raises:
        ConfigurationError: The checkpoint is not of a run.
        StorageError: The folder cannot be read, or all checkpoints are damaged.
    """

    def __init__(self, store: CheckpointStore, resume: bool) -> None:
        self._store = store
        self._writer = BackgroundWriter(self._write)
        stored = store.newest(_RUN) if resume else None
        self.restored = b"" if stored is None else pack(Saved(*stored.value), "the checkpoint")

    @classmethod
    def open(cls, checkpoint: object, resume: object, barrier: bool) -> RunCheckpoints | None:
        """Check the arguments of `SparkRunner.run`, and read the newest checkpoint; ``None`` without checkpoints.

        Raises:
            ConfigurationError: An argument is not valid, or there are checkpoints that would not be used.
            StorageError: The folder cannot be read, or all checkpoints are damaged.
        """
        written = "in a run, each call of context().save writes a checkpoint: call it less often"
        store = CheckpointStore.open(checkpoint, resume, written)
        if store is not None and not barrier:
            raise ConfigurationError(
                "checkpoint= needs ranks that run at the same time, and barrier=False runs each on its own: use "
                "SparkRunner(num_workers, barrier=True)."
            )
        return None if store is None else cls(store, bool(resume))

    def save(self, saved: Saved) -> None:
        """Write what rank 0 has saved soon, in a thread."""
        self._warn_of(self._writer.new_error())
        self._writer.submit(saved)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The ranks run within this context, at the end of which the last checkpoint has been written.

        Raises:
            StorageError: The folder cannot be written.
        """
        self._store.check_writable()
        try:
            yield
        finally:
            self._warn_of(self._writer.close())

    def _warn_of(self, error: Exception | None) -> None:
        if error is not None:
            warn(f"a checkpoint could not be written to {self._store.path!r}: {error}")

    def _write(self, saved: Saved) -> None:
        self._store.write(_RUN, saved)
