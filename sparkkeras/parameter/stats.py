"""Statistics of the parameter server. Workers of every training mode load this file, so it imports no transport."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ParameterServerStats:
    """Statistics of the parameter server over one ``fit``.

    Attributes:
        transport: ``"http"`` or ``"socket"``.
        seconds: How long the server ran, in seconds.
        pulls: The number of pulls.
        cached_pulls: The pulls that sent no weights, because the worker already had the newest.
        pushes: The number of applied updates.
        duplicates: The updates that a worker sent again after a lost reply; they were not applied again.
        rejected_requests: The number of rejected calls, by reason.
        received_bytes: The size of all received updates and reports, in bytes.
        sent_bytes: The size of all sent weights, in bytes.
        staleness: The number of updates, by staleness: the number of other updates that were applied since the update's
            base.
        steps: The number of applied optimizer steps, by worker.
        takeovers: How often another attempt of a worker's task continued for one that was lost.
    """

    transport: str = ""
    seconds: float = 0.0
    pulls: int = 0
    cached_pulls: int = 0
    pushes: int = 0
    duplicates: int = 0
    rejected_requests: dict[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    sent_bytes: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    takeovers: int = 0

    def __str__(self) -> str:
        return (
            f"{self.pushes} updates in {self.seconds:.1f} s over {self.transport or 'no transport'} "
            f"({self.updates_per_second:.1f} per second), staleness {self.mean_staleness:.1f} on average and "
            f"{self.max_staleness} at most; {self.pulls} pulls, {self.received_bytes / 1e6:.1f} MB received, "
            f"{self.sent_bytes / 1e6:.1f} MB sent; {self.duplicates} duplicates, "
            f"{sum(self.rejected_requests.values())} rejected, {self.takeovers} takeovers"
        )

    @property
    def updates_per_second(self) -> float:
        """Applied updates per second; 0 if the server did not run."""
        return self.pushes / self.seconds if self.seconds else 0.0

    @property
    def mean_staleness(self) -> float:
        """The mean staleness over all updates; 0 if there were none."""
        return sum(value * count for value, count in self.staleness.items()) / max(1, self.pushes)

    @property
    def max_staleness(self) -> int:
        """The largest staleness of an update; 0 if there were none."""
        return max(self.staleness, default=0)
