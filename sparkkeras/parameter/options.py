"""Settings of the parameter server."""

from __future__ import annotations

from dataclasses import dataclass

from sparkkeras.arguments import known_fields, optional_integer
from sparkkeras.rpc.options import ServerOptions, check_seconds


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
