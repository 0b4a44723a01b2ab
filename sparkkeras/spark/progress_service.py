"""The service on the driver that receives the progress of workers; see `sparkkeras.worker.progress`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.events import WorkerProgress
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.rpc.service import Service
from sparkkeras.rpc.transport import Address, Call, Reply
from sparkkeras.spark.connectivity import serving

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
) -> Iterator[Address]:
    """Receive reports until the context ends; yields the address to which workers send them.

    Raises:
        ConfigurationError: The driver cannot listen at its address.
    """
    with serving("socket", ProgressService(take), options, 0, driver, num_workers) as address:
        yield address
