"""Receives the progress of workers within an epoch, as events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from sparkkeras.data.dataset import Dataset
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.events import Events
from sparkkeras.rpc.options import ServerOptions

if TYPE_CHECKING:
    from sparkkeras.rpc.transport import Address

_WORKERS = 64
"""So many workers may always connect."""


@contextmanager
def live_progress(
    events: Events, dataset: Dataset | None, options: ServerOptions, num_workers: int = 0
) -> Iterator[Address | None]:
    """Receive the progress of workers until the context ends.

    Args:
        events: Gets it, a `WorkerProgress` for each report, from several threads.
        dataset: The rows of the workers, which says how they reach this process.
        options: The settings of the server.
        num_workers: The number of workers, if it is known.

    Yields:
        Where the workers send it; ``None`` if no listener needs it, or the workers cannot reach this process.
    """
    driver = None
    if dataset is not None and events and events.within_epochs:
        with suppress(ClusterError):
            driver = dataset.driver
    if driver is None:
        yield None
        return
    with ExitStack() as stack:
        target = None
        with suppress(ImportError, ConfigurationError):  # without cryptography, or a port; training does not need it
            from sparkkeras.spark.progress_service import receiving

            target = stack.enter_context(receiving(events.emit, driver, options, max(num_workers, _WORKERS)))
        yield target
