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


@contextmanager
def receiving(
    take: Callable[[WorkerProgress], None], driver: DriverAddress, options: ServerOptions, num_workers: int
) -> Iterator[Address]:
    """Receive the reports of workers until the context ends; yields the address to which workers send them.

    Args:
        take: Called with each report, from several threads.
        driver: The driver's addresses.
        options: The settings of the server.
        num_workers: The number of workers that run at the same time.

    Raises:
        ConfigurationError: The driver cannot listen at its address.
    """

    def handle(call: Call) -> Reply:
        logs = {str(name): float(value) for name, value in json.loads(bytes(call.body)).items()}
        worker, epoch, rows = (call.field(name, int) for name in ("worker", "epoch", "rows"))
        take(WorkerProgress(worker, epoch, rows, call.field("seconds", float), logs))
        return Reply({})

    service = Service({"progress": (handle, LOGS_BYTES)}, lambda lease: None)
    with serving("socket", service, options, 0, driver, num_workers) as address:
        yield address
