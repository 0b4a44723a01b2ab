"""The driver's server at the address that Spark's settings give, and a check that workers reach it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Dataset, DriverAddress, TaskContext
from sparkkeras.errors import ConfigurationError, DriverConnectionError
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.rpc.transport import Address, Endpoint, Handler, RefusedError, TransportError, connect, make_transport
from sparkkeras.rpc.wire import Secret

PREFLIGHT_SECONDS = 10.0
"""How long a worker tries to reach the driver before training or a search begins."""


@contextmanager
def serving(
    transport: str, handler: Handler, options: ServerOptions, port: int, driver: DriverAddress, num_workers: int
) -> Iterator[Address]:
    """Serve the workers of a run until the context ends; yields the address that they connect to.

    Args:
        transport: The name of the transport.
        handler: Handles the calls of the workers.
        options: The settings of the server.
        port: The port; 0: any free port.
        driver: The driver's addresses, as configured in Spark.
        num_workers: The number of workers that run at the same time.

    Raises:
        ConfigurationError: The server cannot listen on that address.
    """
    served = driver.served_at(options.host, options.bind)
    endpoint = Endpoint(
        host=served.host,
        listen=served.listen,
        port=port,
        encrypt=options.encrypt,
        timeout=options.timeout,
        expected_sessions=4 + 2 * num_workers,
    )
    with ExitStack() as stack:
        try:
            address = stack.enter_context(make_transport(transport).serve(handler, endpoint, Secret.fresh()))
        except OSError as error:
            raise ConfigurationError(_listen_error(endpoint, error)) from error
        yield address


def _listen_error(endpoint: Endpoint, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return (
            f"the server on the driver cannot listen on {endpoint.listen!r}, which this machine cannot resolve "
            f"({error.strerror}). Check host= and bind= of server_options, spark.driver.host and spark.driver.bindAddress."
        )
    reason = error.strerror or error
    if endpoint.port:
        return (
            f"the server on the driver cannot listen on port {endpoint.port} of {endpoint.listen}: {reason}. "
            "Pass another port=, or port=0 for any free port."
        )
    return (
        f"the server on the driver cannot listen on {endpoint.listen}: {reason}. The address has to be one of this "
        "machine's. Set bind= of server_options, for example bind='0.0.0.0' if workers reach the driver by an address that "
        "this machine does not have."
    )


def check_connectivity(dataset: Dataset, address: Address) -> None:
    """Check that the workers of a dataset can connect to a server on the driver; see `check_reached`.

    An unreachable address is the most common fault, and tasks that notice it themselves fail later and say less.
    """
    check_reached(address, lambda preflight: dataset.run(preflight).collect(), CONFIGURE_SERVER)


def check_reached(address: Address, run: Callable[[Preflight], list[str]], advice: str) -> None:
    """Check that workers can connect to a server in this process.

    Args:
        address: The address of the server.
        run: Runs the check on the workers, and returns all that it yields.
        advice: What to do if some cannot connect, for the message.

    Raises:
        DriverConnectionError: Some of them cannot.
    """
    found = run(Preflight(replace(address, timeout=min(PREFLIGHT_SECONDS, address.timeout))))
    if unreached := list(dict.fromkeys(found)):  # several workers may run on one host
        raise DriverConnectionError(
            f"workers cannot connect to the driver at {address.url}: {', '.join(unreached[:3])}. {advice}"
        )


CONFIGURE_SERVER = (
    "Configure an address of the driver that workers can reach, with host=... and bind='0.0.0.0' in server_options or with "
    "spark.driver.host, and a port= that no firewall blocks."
)
"""What to do if workers do not reach a server that has `ServerOptions`."""

CONFIGURE_DRIVER = (
    "Configure an address of the driver that workers can reach (spark.driver.host, and spark.driver.bindAddress if it "
    "has to listen on another one), and a port= that no firewall blocks."
)
"""What to do if they do not reach another one."""


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
