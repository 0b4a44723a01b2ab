"""The address that the driver's server listens on, and a check that workers can reach it."""

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
"""How long a worker tries to reach the driver before training or a search begins."""


def endpoint(options: ServerOptions, port: int, driver: DriverAddress, expected_sessions: int) -> Endpoint:
    """The endpoint of the driver's server: the address that it listens on, and the one that workers connect to.

    Args:
        options: The settings of the server.
        port: The port; 0: any free port.
        driver: The driver's addresses, as configured in Spark.
        expected_sessions: The number of clients that connect at the same time.
    """
    host = options.host or driver.host
    return Endpoint(
        host=host,
        listen=options.bind or (host if options.host else driver.listen),
        port=port,
        encrypt=options.encrypt,
        timeout=options.timeout,
        expected_sessions=expected_sessions,
    )


def check_reach(dataset: Dataset, address: Address) -> None:
    """Check that the workers of a dataset can connect to a server on the driver.

    Raises:
        DriverConnectionError: Some of them cannot.
    """
    patient = replace(address, timeout=min(PREFLIGHT_SECONDS, address.timeout))
    unreached = dataset.run(Preflight(patient)).collect()
    if unreached:
        raise DriverConnectionError(
            f"workers cannot connect to the driver at {address.url}: {', '.join(unreached[:3])}. "
            "Configure an address of the driver that workers can reach, with host=... and bind='0.0.0.0' in server_options "
            "or with spark.driver.host, and a port= that no firewall blocks."
        )


@dataclass(frozen=True)
class Preflight:
    """Tries to connect to the server from a worker; yields the host name and the error if that fails."""

    address: Address

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[str]:
        """Call the server once."""
        caller = connect(self.address)
        try:
            caller.call("health", {})
        except (TransportError, RefusedError) as error:
            yield f"{socket.gethostname()} ({error})"
        finally:
            caller.close()
