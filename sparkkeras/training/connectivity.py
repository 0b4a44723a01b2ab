"""The address that the driver listens on, and whether workers reach it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Dataset, DriverAddress, TaskContext
from sparkkeras.errors import DriverConnectionError
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.rpc.transport import Address, Endpoint, RefusedError, TransportError, connect

PREFLIGHT_SECONDS = 10.0
"""How long a worker tries to reach the driver before work begins."""


def endpoint(options: ServerOptions, port: int, driver: DriverAddress, members: int) -> Endpoint:
    """The address that the driver listens on.

    Args:
        options: The settings of the server.
        port: The port; 0 lets the system choose.
        driver: The addresses that Spark has for the driver.
        members: The number of connections that are expected at the same time.
    """
    host = options.host or driver.host
    return Endpoint(
        host=host,
        listen=options.bind or (host if options.host else driver.listen),
        port=port,
        encrypt=options.encrypt,
        timeout=options.timeout,
        members=members,
    )


def check_reach(dataset: Dataset, address: Address) -> None:
    """See whether the workers of a dataset reach a server on the driver.

    Raises:
        DriverConnectionError: Some do not.
    """
    patient = replace(address, timeout=min(PREFLIGHT_SECONDS, address.timeout))
    unreached = dataset.run(Preflight(patient)).collect()
    if unreached:
        raise DriverConnectionError(
            f"workers cannot connect to the driver at {address.told}: {', '.join(unreached[:3])}. "
            "Give an address of the driver that they reach, server_options with host=... and bind='0.0.0.0', or "
            "spark.driver.host, and a port= that no firewall closes."
        )


@dataclass(frozen=True)
class Preflight:
    """Whether a worker reaches the server; yields what is wrong if anything is."""

    address: Address

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[str]:
        """Call once."""
        caller = connect(self.address)
        try:
            caller.call("health", {})
        except (TransportError, RefusedError) as error:
            yield f"{socket.gethostname()} ({error})"
        finally:
            caller.close()
