"""The ports on which workers listen. Imports no cryptography, which the doctor may find missing."""

from __future__ import annotations

import re
from typing import Protocol

from sparkkeras.errors import ConfigurationError

WORKER_PORTS = "spark.sparkkeras.worker.ports"
"""The setting of Spark that limits the ports on which workers of all-reduce training and of `SparkRunner` listen."""


class Settings(Protocol):
    """The settings of a SparkContext, or of a session of Spark Connect."""

    def get(self, key: str, default: str, /) -> str | None:
        """The value of a setting."""
        ...


def worker_ports(settings: Settings) -> range | None:
    """The ports of `WORKER_PORTS`; ``None``: any free ones.

    Raises:
        ConfigurationError: The setting is not a range of ports.
    """
    value = settings.get(WORKER_PORTS, "")
    if not value:
        return None
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value)
    if not found or not 0 < int(found[1]) <= int(found[2]) < 1 << 16:
        raise ConfigurationError(
            f"{WORKER_PORTS}={value!r}: expected the first and the last of 1 to 65535, such as '36000-36031'."
        )
    return range(int(found[1]), int(found[2]) + 1)
