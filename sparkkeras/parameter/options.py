"""How the parameter server is set up, as a person says it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from sparkkeras.arguments import known_fields, optional_number
from sparkkeras.errors import ConfigurationError


@known_fields
@dataclass(frozen=True)
class ParameterServerOptions:
    """Settings of the parameter server that asynchronous and hogwild training use.

    Args:
        host: The name or IP address by which workers reach the driver. ``None``: Spark's ``spark.driver.host``, and this
            machine's own address (127.0.0.1) where the workers are on it (``local[...]``).
        bind: The name or IP address to listen on. ``None``: ``spark.driver.bindAddress`` where that is set, else ``host``.
        max_staleness: By how many exchanges a worker may be ahead of the slowest one; it waits for it then. 0 is lock-step,
            ``None`` is no bound. Stale synchronous parallel, Ho et al., 2013.
        encrypt: Whether bodies (weights, updates, metric states) are encrypted on their way. What a call says beside them
            is, and everything is signed, whatever this says.
        lease_seconds: How long a worker that gives no sign of life keeps its partition if another attempt asks for it.
        timeout: Seconds that a worker tries to reach the server before its task fails, and that the server waits for the
            rest of what a worker has begun to send.
        warmup_timeout: Seconds that workers wait, after their first exchange, for those that still load Keras or trace
            the model.

    Raises:
        ConfigurationError: A value is out of range.
    """

    host: str | None = None
    bind: str | None = None
    max_staleness: int | None = None
    encrypt: bool = False
    lease_seconds: float = 10.0
    timeout: float = 30.0
    warmup_timeout: float = 60.0

    def __post_init__(self) -> None:
        optional_number("max_staleness", self.max_staleness, low=0)
        for name in ("host", "bind"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not _HOST.fullmatch(value)):
                raise ConfigurationError(
                    f"{name}={value!r}: expected a host name or an IP address, without a scheme or a port, or None."
                )
        if not isinstance(self.encrypt, bool):
            raise ConfigurationError(f"encrypt={self.encrypt!r}: expected True or False.")
        for name in ("lease_seconds", "timeout", "warmup_timeout"):
            _check_seconds(name, getattr(self, name))


_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.%]+[0-9A-Za-z]*")
_LONGEST = 1e6  # seconds, twelve days: beyond that operating systems lose count


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value <= _LONGEST:
        raise ConfigurationError(f"{name}={value!r}: expected a positive number of seconds, {_LONGEST:,.0f} at most.")
