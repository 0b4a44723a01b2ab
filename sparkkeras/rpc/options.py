"""Settings of the server on the driver that workers connect to."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from sparkkeras.arguments import known_fields, optional_integer
from sparkkeras.errors import ConfigurationError

NETWORK_TRANSPORTS = ("http", "socket")
"""The names of the transports between machines; each is a module of this package."""


@known_fields
@dataclass(frozen=True)
class ServerOptions:
    """Settings of the server on the driver that workers connect to in a hyper-parameter search.

    Asynchronous training takes `ParameterServerOptions`, which has two settings more.

    Args:
        host: The host name or IP address by which workers reach the driver. ``None``, the default, takes
            ``spark.driver.host``, and 127.0.0.1 with a master ``local[...]``, whose workers run on the driver's machine.
        bind: The host name or IP address to listen on. ``None``, the default, takes ``spark.driver.bindAddress`` if it is
            set, else ``host``.
        encrypt: Whether bodies (weights, updates, metric states) are encrypted in transit. All other fields of a call are
            always encrypted, and everything is authenticated.
        lease_seconds: Seconds without a heartbeat after which another worker may take over the worker's partition or trial.
        timeout: Seconds that a worker retries a call before its task fails, and that the server waits for the rest of a
            message.

    Raises:
        ConfigurationError: A value is out of range.
    """

    host: str | None = None
    bind: str | None = None
    encrypt: bool = False
    lease_seconds: float = 10.0
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in ("host", "bind"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not _HOST.fullmatch(value)):
                raise ConfigurationError(
                    f"{name}={value!r}: expected a host name or an IP address, without a scheme or a port, or None."
                )
        if not isinstance(self.encrypt, bool):
            raise ConfigurationError(f"encrypt={self.encrypt!r}: expected True or False.")
        for name in ("lease_seconds", "timeout"):
            check_seconds(name, getattr(self, name))


_HOST = re.compile(r"[A-Za-z0-9._-]+|(?=.*:.*:)[0-9A-Fa-f:.%]+[0-9A-Za-z]*")
_MAX_SECONDS = 1e6  # twelve days; operating systems do not support much longer timeouts


def check_seconds(name: str, value: object) -> None:
    """Check that a value is a positive number of seconds that a timer supports.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value <= _MAX_SECONDS:
        raise ConfigurationError(f"{name}={value!r}: expected a positive number of seconds, {_MAX_SECONDS:,.0f} at most.")


@known_fields
@dataclass(frozen=True)
class ParameterServerOptions(ServerOptions):
    """Settings of the parameter server of the asynchronous and hogwild modes: those of `ServerOptions`, and two more.

    Args:
        host: The host name or IP address by which workers reach the driver; see `ServerOptions`.
        bind: The host name or IP address to listen on; see `ServerOptions`.
        encrypt: Whether bodies (weights, updates, metric states) are encrypted in transit; see `ServerOptions`.
        lease_seconds: Seconds without a heartbeat after which another attempt takes over a worker's partition.
        timeout: Seconds that a worker retries a call before its task fails; see `ServerOptions`.
        max_staleness: The number of exchanges by which a worker may be ahead of the slowest worker before it waits for it.
            0 is lockstep; ``None``, the default, is no bound. Stale synchronous parallel, Ho et al., 2013.
        warmup_timeout: Seconds that workers wait after their first exchange for workers that still load Keras or trace
            the model.

    Raises:
        ConfigurationError: A value is out of range.
    """

    max_staleness: int | None = None
    warmup_timeout: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        optional_integer("max_staleness", self.max_staleness, low=0)
        check_seconds("warmup_timeout", self.warmup_timeout)
