"""Receives the progress of workers within an epoch, as events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from sparkkeras.data.dataset import DriverAddress, ReachesClient, ReachesDriver
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.events import Events, WorkerProgress
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.rpc.service import Service
from sparkkeras.rpc.transport import Call, Reply
from sparkkeras.spark.connectivity import serving
from sparkkeras.worker.progress import ProgressTarget

_WORKERS = 64
"""So many workers may always connect."""


@contextmanager
def live_progress(
    events: Events, dataset: object, options: ServerOptions, num_workers: int = 0
) -> Iterator[ProgressTarget | None]:
    """Receive the progress of workers until the context ends.

    Args:
        events: Gets it, a `WorkerProgress` for each report, from several threads.
        dataset: The rows of the workers, which says how they reach this process.
        options: The settings of the server.
        num_workers: The number of workers, if it is known.

    Yields:
        Where the workers send it; ``None`` if no listener needs it, or the workers cannot reach this process.
    """
    driver = _address(dataset) if events and events.within_epochs else None
    if driver is None:
        yield None
        return
    with ExitStack() as stack:
        target = None
        with suppress(ImportError, ConfigurationError):  # without cryptography, or a port; training does not need it
            from sparkkeras.spark.live_progress import receiving

            target = stack.enter_context(receiving(events.emit, driver, options, max(num_workers, _WORKERS)))
        yield target


def _address(dataset: object) -> DriverAddress | None:
    """How the workers of a dataset reach this process; ``None`` if they cannot."""
    if isinstance(dataset, ReachesDriver):
        return dataset.driver
    if isinstance(dataset, ReachesClient):
        with suppress(ClusterError):
            return dataset.client_address()
    return None


LOGS_BYTES = 1 << 20
"""The largest size of the metrics of a report."""


class ProgressService(Service):
    """Handles the reports of workers.

    Args:
        take: Called with each report, from several threads.
    """

    def __init__(self, take: Callable[[WorkerProgress], None]) -> None:
        def handle(call: Call) -> Reply:
            logs = {str(name): float(value) for name, value in json.loads(bytes(call.body)).items()}
            worker, epoch, rows = (call.field(name, int) for name in ("worker", "epoch", "rows"))
            take(WorkerProgress(worker, epoch, rows, call.field("seconds", float), logs))
            return Reply({})

        super().__init__({"progress": (handle, LOGS_BYTES)}, lambda lease: None)


@contextmanager
def receiving(
    take: Callable[[WorkerProgress], None], driver: DriverAddress, options: ServerOptions, num_workers: int
) -> Iterator[ProgressTarget]:
    """Receive reports until the context ends; yields where workers send them.

    Raises:
        ConfigurationError: The driver cannot listen at its address.
    """
    with serving("socket", ProgressService(take), options, 0, driver, num_workers) as address:
        yield ProgressTarget(address)
