"""Where the driver listens, and whether workers reach it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Dataset, DriverAddress, TaskContext
from sparkkeras.errors import ParameterServerError
from sparkkeras.rpc.transport import Address, Endpoint, RefusedError, TransportError, connect
from sparkkeras.training.job import Server

PREFLIGHT_SECONDS = 10.0
"""How long a worker tries to reach the driver before work begins."""


def endpoint(server: Server, driver: DriverAddress, members: int) -> Endpoint:
    """Where the driver is to listen.

    Args:
        server: What the person said of it.
        driver: What Spark says of it.
        members: How many conversations are to be expected at the same time.
    """
    options = server.options
    host = options.host or driver.host
    return Endpoint(
        host=host,
        listen=options.bind or (host if options.host else driver.listen),
        port=server.port,
        encrypt=options.encrypt,
        timeout=options.timeout,
        members=members,
    )


def check_reach(dataset: Dataset, address: Address) -> None:
    """See whether the workers of a dataset reach a server on the driver.

    Raises:
        ParameterServerError: Some do not.
    """
    patient = replace(address, timeout=min(PREFLIGHT_SECONDS, address.timeout))
    unreached = dataset.run(Preflight(patient)).collect()
    if unreached:
        raise ParameterServerError(
            f"workers do not reach the parameter server on the driver at {address.told}: {', '.join(unreached[:3])}. "
            "Give an address of the driver that they reach, ParameterServerOptions(host=..., bind='0.0.0.0') or "
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
