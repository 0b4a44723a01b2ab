"""What the URL of Spark's master says."""

from __future__ import annotations


def is_local(master: str) -> bool:
    """Whether tasks run on the machine of the driver, or of the Spark Connect server, and share its files."""
    return master.startswith("local") and not master.startswith("local-cluster")
