"""Receives the progress of workers within an epoch, as events; see `sparkkeras.worker.progress`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from sparkkeras.data.dataset import Dataset, DriverAddress
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.events import Events, WorkerProgress
from sparkkeras.rpc.options import ServerOptions

if TYPE_CHECKING:
    from sparkkeras.rpc.transport import Address, Call

_WORKERS = 64
"""So many workers may always connect."""

LOGS_BYTES = 1 << 20
"""The largest size of the metrics of a report."""


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
            target = stack.enter_context(receiving(events.emit, driver, options, max(num_workers, _WORKERS)))
        yield target


def receiving(
    take: Callable[[WorkerProgress], None], driver: DriverAddress, options: ServerOptions, num_workers: int
) -> AbstractContextManager[Address]:
    """Receive the reports of workers until the context ends; yields the address to which workers send them.

    Args:
        take: Called with each report, from several threads.
        driver: The driver's addresses.
        options: The settings of the server.
        num_workers: The number of workers that run at the same time.

    Raises:
        ConfigurationError: The driver cannot listen at its address.
        ImportError: There is no cryptography.
    """
    from sparkkeras.rpc.service import Service
    from sparkkeras.rpc.transport import Reply
    from sparkkeras.spark.connectivity import serving

    def handle(call: Call) -> Reply:
        logs = {str(name): float(value) for name, value in json.loads(bytes(call.body)).items()}
        worker, epoch, rows = (call.field(name, int) for name in ("worker", "epoch", "rows"))
        take(WorkerProgress(worker, epoch, rows, call.field("seconds", float), logs))
        return Reply({})

    service = Service({"progress": (handle, LOGS_BYTES)}, lambda lease: None)
    return serving("socket", service, options, 0, driver, num_workers)
