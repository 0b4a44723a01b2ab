"""The state of a group of ranks on the driver: who has joined, started and ended, and why the group fails. No I/O."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sparkkeras.errors import counted
from sparkkeras.events import Event, OutputWritten, RankChanged
from sparkkeras.rpc.addresses import host_and_port
from sparkkeras.runner.exchanges import Exchanges, Kind
from sparkkeras.runner.output import Console

SILENT_SECONDS = 10.0
"""A rank whose host has not called for this time is lost."""

RECONNECT_SECONDS = 2.0
"""A rank whose host's connection has closed is lost after this time, unless the host connects again."""

PAUSE_SECONDS = 1.0
"""If the driver has not looked at the ranks for this time, it was stopped (Ctrl-Z), or its threads waited for the
interpreter's lock, and has not read what they have sent since."""

SETTLE_SECONDS = 1.0
"""How long after the first failure others count: ranks may report that a peer is lost before the host of that peer does."""

_LOST = "its worker died, or lost the connection to the driver"


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed.

    Attributes:
        rank: The rank.
        error: What happened, in one line: the exception, or how the process died.
        traceback: The Python traceback; empty if there is none.
        is_death: Whether the process ended without reporting an error. Errors of its peers may have arrived before.
    """

    rank: int
    error: str
    traceback: str = ""
    is_death: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether all that is known is that the rank's worker is gone."""
        return self.error == _LOST

    @property
    def is_consequence(self) -> bool:
        """Whether the reason is another rank's failure."""
        return "PeerLostError" in self.error.partition(":")[0]

    @property
    def may_be_consequence(self) -> bool:
        """Whether the reason may be another rank's failure: JAX aborts a process that has lost its peers."""
        return self.is_death and "SIGABRT" in self.error


@dataclass
class _Rank:
    attempt: int | None = None
    host: str = ""
    port: int = 0
    heard: float = 0.0
    disconnected: float | None = None
    has_started: bool = False
    has_ended: bool = False
    result: list[memoryview] | None = None
    is_complete: bool = False
    emitted: str = ""


class RankGroup:
    """The state of the ranks of a run. Thread-safe: calls of hosts and ranks change it, and `run_group` watches it.

    Args:
        size: The number of ranks.
        together: Whether all ranks run at the same time and know each other's addresses. Otherwise Spark may start them
            one after the other, and again when the worker of one was lost.
        clock: A monotonic clock in seconds.

    Attributes:
        size: The number of ranks.
        together: See above.
        console: The output of the ranks.
        is_stopping: Whether the hosts are to end their processes.
        has_missing_rows: Whether a host did not find the rows of its rank.
    """

    def __init__(self, size: int, together: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.size, self.together = size, together
        self.console = Console(size)
        self._clock = clock
        self._lock = threading.RLock()
        self._has_asked = threading.Event()
        self._ranks = [_Rank() for _ in range(size)]
        self._exchanges = Exchanges(size)
        self._failures: list[RankFailure] = []
        self._failed_at = 0.0  # the first one
        self.is_stopping = self.has_missing_rows = False
        self._all_started: float | None = None
        self._watched: float | None = None

    # Calls of hosts

    def join(self, rank: int, attempt: int, host: str, port: int) -> tuple[str, ...] | None:
        """Add a rank. Returns the addresses of all ranks; ``None`` while some are missing; empty if they need none.

        Spark may start a rank a second time while it runs (``spark.speculation``): then also ``None``.
        """
        with self._lock:
            state = self._ranks[rank]
            if state.attempt != attempt:
                if self.together and state.attempt is not None:
                    self._add_restarted(rank)
                elif self._is_taken(state):
                    return None
                state = self._ranks[rank] = _Rank(attempt, host, port)
            self._hear(state)
            if not self.together:
                return ()
            if self._failures or any(each.attempt is None for each in self._ranks):
                return None
            return tuple(host_and_port(each.host, each.port) for each in self._ranks)

    def report_missing_rows(self) -> None:
        """Note that a host does not find the rows of its rank: the group cannot start."""
        with self._lock:
            self.is_stopping = self.has_missing_rows = True

    def is_current(self, rank: int, attempt: int) -> bool:
        """Whether an attempt at a rank has not been replaced by a later one."""
        with self._lock:
            return self._ranks[rank].attempt in (None, attempt)

    def heartbeat(self, rank: int) -> bool:
        """Note that the host of a rank is alive; returns whether it should end the process."""
        with self._lock:
            self._hear(self._ranks[rank])
            return self.is_stopping

    def disconnect(self, rank: int) -> None:
        """Note that the connection of a rank's host has closed."""
        with self._lock:
            self._ranks[rank].disconnected = self._clock()

    def end(self, rank: int, how: str) -> None:
        """Note that the process of a rank has ended, and how."""
        with self._lock:
            state = self._ranks[rank]
            if not state.has_ended:
                state.has_ended = True
                self._exchanges.end(rank)
                if not state.is_complete and not self._has_failed(rank) and not self.is_stopping:
                    self._add(RankFailure(rank, how, is_death=True))

    # Calls of the processes of ranks

    def start(self, rank: int) -> None:
        """Note that the process of a rank is about to call the function."""
        with self._lock:
            self._ranks[rank].has_started = True
            if self._all_started is None and all(each.has_started for each in self._ranks):
                self._all_started = self._clock()

    def expect(self, rank: int, sizes: list[int]) -> None:
        """Prepare for the pickled result of a rank, or for what it asks, in parts of so many bytes; see `pack_parts`."""
        with self._lock:
            self._ranks[rank].result = [memoryview(bytearray(size)) for size in sizes]

    def receive(self, rank: int, part: int, start: int, piece: memoryview) -> None:
        """Receive a piece of what `expect` has announced.

        Raises:
            IndexError: There is no such part.
            ValueError: The piece is too large, or the rank has announced nothing.
        """
        with self._lock:
            result = self._ranks[rank].result
        if result is None:
            raise ValueError(f"rank {rank} has announced no result")
        result[part][start : start + len(piece)] = piece

    def complete(self, rank: int) -> None:
        """Note that all of a rank's result has arrived. It will take part in no further exchange."""
        with self._lock:
            self._ranks[rank].is_complete = True
            self._exchanges.end(rank)

    def is_complete(self, rank: int) -> bool:
        """Whether all of a rank's result has arrived."""
        with self._lock:
            return self._ranks[rank].is_complete

    @property
    def may_exit(self) -> bool:
        """Whether processes that have sent their results may exit: rank 0 has JAX's coordinator or PyTorch's store."""
        with self._lock:
            return self.is_stopping or all(state.is_complete for state in self._ranks)

    def fail(self, failure: RankFailure) -> None:
        """Note that a rank failed. What fails because the group is being stopped does not count."""
        with self._lock:
            if not self.is_stopping:
                self._add(failure)

    def give(self, rank: int, number: int, kind: Kind, value: bytes) -> None:
        """See `Exchanges.give`."""
        with self._lock:
            self._exchanges.give(rank, number, kind, value)
            if self._exchanges.asked() is not None:
                self._has_asked.set()

    def take(self, number: int) -> bytes | None:
        """See `Exchanges.take`."""
        with self._lock:
            return self._exchanges.take(number)

    # The view of the driver

    def wait(self, seconds: float) -> None:
        """Wait for this time, or until the ranks ask the driver."""
        if self._has_asked.wait(seconds):
            self._has_asked.clear()

    def asked(self) -> tuple[int, list[list[memoryview]]] | None:
        """The number of the exchange that waits for the driver's answer, and what each rank has sent for it, in parts.

        These are not kept. ``None`` if no exchange waits.
        """
        with self._lock:
            number = self._exchanges.asked()
            return None if number is None else (number, [self.result(rank) for rank in range(self.size)])

    def answer(self, number: int, result: bytes) -> None:
        """See `Exchanges.answer`."""
        with self._lock:
            self._exchanges.answer(number, result)

    def stop(self) -> None:
        """Have all hosts end their processes."""
        with self._lock:
            self.is_stopping = True

    @property
    def absent(self) -> list[int]:
        """The ranks that have not joined."""
        with self._lock:
            return [rank for rank, each in enumerate(self._ranks) if each.attempt is None]

    @property
    def has_ended(self) -> bool:
        """Whether the processes of all ranks that have joined have ended, or their hosts are gone."""
        with self._lock:
            joined = (each for each in self._ranks if each.attempt is not None)
            return all(each.has_ended or each.disconnected is not None for each in joined)

    def news(self) -> list[Event]:
        """What has not been returned before: output of the ranks, changes of their states, and their reports."""
        lines, reports = self.console.take()
        found: list[Event] = [
            OutputWritten(rank, "".join(f"{line}\n" for _, line in of_rank))
            for rank, of_rank in itertools.groupby(lines, key=lambda line: line[0])
        ]
        with self._lock:
            for rank, each in enumerate(self._ranks):
                state = "finished" if each.is_complete else "started" if each.has_started else ""
                if self._has_failed(rank):
                    state = "failed"
                if state != each.emitted:
                    each.emitted = state
                    found.append(RankChanged(rank, state, each.host))
        return [*found, *reports]

    @property
    def seconds(self) -> float:
        """The time since all ranks have started; 0 before that."""
        with self._lock:
            return 0.0 if self._all_started is None else self._clock() - self._all_started

    @property
    def has_started(self) -> bool:
        """Whether all ranks have started."""
        with self._lock:
            return self._all_started is not None

    @property
    def unfinished(self) -> list[int]:
        """The ranks without a complete result."""
        with self._lock:
            return [rank for rank, state in enumerate(self._ranks) if not state.is_complete]

    def host(self, rank: int) -> str:
        """The machine of a rank; empty if it has not joined."""
        with self._lock:
            return self._ranks[rank].host

    def result(self, rank: int) -> list[memoryview]:
        """The parts of the result of a rank, which is complete. They are not kept."""
        with self._lock:
            result, self._ranks[rank].result = self._ranks[rank].result, None
        assert result is not None
        return result

    def failure(self, is_final: bool = False) -> RankFailure | None:
        """The failure that caused the others, once it is known; ``None`` if no rank has failed.

        Args:
            is_final: Whether all hosts have ended, so that no further reports will arrive.
        """
        with self._lock:
            self._excuse_pause()
            self._add_lost(is_final)
            found = self._failures
            is_settled = is_final or all(each.has_ended for each in self._ranks)
            if not found or not (is_settled or self._clock() >= self._failed_at + SETTLE_SECONDS):
                return None
            return next((each for each in found if each.is_death and not each.may_be_consequence), None) or next(
                (each for each in found if not each.is_consequence), found[0]
            )

    def _add_lost(self, is_final: bool) -> None:
        """Add a failure for each rank whose host is gone, unless Spark may start the rank again."""
        if self.is_stopping or not (self.together or is_final):
            return
        now = self._clock()
        patience = 0.0 if is_final else RECONNECT_SECONDS
        for rank, state in enumerate(self._ranks):
            if state.attempt is None or state.has_ended or self._has_failed(rank):
                continue
            if state.is_complete and not self.together:
                continue  # Spark may kill a task while another one at the rank ends
            if state.disconnected is not None and now >= state.disconnected + patience:
                self._add(RankFailure(rank, _LOST, is_death=True))
            elif now >= state.heard + SILENT_SECONDS:
                silent = counted(round(now - state.heard), "second")
                self._add(
                    RankFailure(rank, f"its worker has sent nothing for {silent}: it hangs or is stopped", is_death=True)
                )

    def _excuse_pause(self) -> None:
        """Do not count the time in which this process was paused as silence of the ranks; see `PAUSE_SECONDS`."""
        now = self._clock()
        gap, self._watched = 0.0 if self._watched is None else now - self._watched, now
        if gap > PAUSE_SECONDS:
            for state in self._ranks:
                state.heard = min(now, state.heard + gap)

    def _add_restarted(self, rank: int) -> None:
        """Add a failure of the rank whose host was lost first: Spark has started all ranks again, from the beginning."""
        if self.is_stopping or self._failures:
            return
        gone = {each: state.disconnected for each, state in enumerate(self._ranks) if state.disconnected is not None}
        self._add(RankFailure(min(gone, key=gone.__getitem__, default=rank), _LOST, is_death=True))

    def _add(self, failure: RankFailure) -> None:
        if not self._failures:
            self._failed_at = self._clock()
        self._failures.append(failure)

    def _has_failed(self, rank: int) -> bool:
        return any(failure.rank == rank for failure in self._failures)

    def _is_taken(self, state: _Rank) -> bool:
        """Whether an attempt at a rank has sent its result, or runs."""
        is_connected = state.attempt is not None and state.disconnected is None
        return state.is_complete or (is_connected and self._clock() < state.heard + SILENT_SECONDS)

    def _hear(self, state: _Rank) -> None:
        state.heard, state.disconnected = self._clock(), None
