"""Runs a group of ranks from the driver: starts their hosts, shows their output, and notices how the group ends.

Ranks join on the driver, in milliseconds, and in the same way with ``local_mode``; ``BarrierTaskContext.allGather`` takes a
second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from sparkkeras.data.dataset import DriverAddress, Running, Shared
from sparkkeras.errors import (
    ClusterError,
    DriverConnectionError,
    SparkKerasError,
    WorkerError,
    WorkerTimeoutError,
    counted,
    warn,
)
from sparkkeras.events import Events
from sparkkeras.progress.renderer import Progress
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.runner.group import RankFailure, RankGroup
from sparkkeras.runner.hosts import Host, Parts
from sparkkeras.runner.output import TAIL_LINES
from sparkkeras.runner.rank import RankWork
from sparkkeras.runner.run_checkpoints import RunCheckpoints
from sparkkeras.runner.service import VALUE_BYTES, GroupService, unpack_parts
from sparkkeras.spark.connectivity import serving
from sparkkeras.spark.job_errors import INSTALL_MODULE, MISSING_MODULE, OVER_LIMIT, interrupts_here
from sparkkeras.worker.collectives import ended_by_jax

TICK_SECONDS = 0.05
"""The interval at which the driver shows output and looks how the group is doing."""

STOP_SECONDS = 4.0, 5.0
"""How long the hosts have to end their processes before the driver cancels their tasks, and how long the tasks have then."""

INTERRUPT_SECONDS = 2.0, 0.8
"""The same after an interrupt (Ctrl-C)."""

EXIT_SECONDS = 10.0
"""How long the processes of ranks have to exit when the results of all have arrived, before they are ended."""

WAIT_SECONDS = 10.0
"""How long the ranks wait for slots before the driver says so. It says so again after three times that time, and so on."""

JOIN_SECONDS = 60.0
"""How long ranks may wait for others, which have slots, before the driver says so."""

Answer = Callable[[list[list[memoryview]]], bytes]
"""Answers what the ranks ask, given what each has sent, in parts; see `sparkkeras.runner.exchanges.ASK_DRIVER`."""


class Hosts(Protocol):
    """Where ranks run: in processes of the driver's machine, of Spark tasks, or of tasks of Spark Connect."""

    @property
    def driver(self) -> DriverAddress:
        """How the hosts reach this process."""
        ...

    @property
    def ports(self) -> range | None:
        """The ports on which ranks listen; ``None``: any free ones."""
        ...

    def start(self, host: Host, handles: Any) -> Running[Any]:
        """Run the host of each rank in the background.

        Args:
            host: What each host does.
            handles: See `Parts.handles`.
        """
        ...


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run.

    Attributes:
        hosts: Where they run.
        work: What each does.
        parts: Their rows.
    """

    hosts: Hosts
    work: Shared[RankWork]
    parts: Parts


@runtime_checkable
class WaitsForSlots(Protocol):
    """Tasks in the background that may have to wait until there are slots for all of them."""

    def slots_while_waiting(self) -> tuple[int, int] | None:
        """The numbers of free slots and of all slots, while no task runs; ``None`` when one does."""
        ...


class RowsMissingError(Exception):
    """Spark ran the task of a rank where its rows are not. No rank has started."""


def run_group(
    group: RankGroup,
    ranks: Ranks,
    timeout: float | None = None,
    answer: Answer | None = None,
    port: int = 0,
    max_value: int = VALUE_BYTES,
    checkpoints: RunCheckpoints | None = None,
    events: Events | None = None,
    refresh: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Run a group until all processes and tasks have ended; returns the results of the ranks.

    Args:
        group: The group.
        ranks: Its ranks.
        timeout: How long the ranks may run after all have started, in seconds; ``None``: as long as they want.
        answer: Answers what the ranks ask the driver, in this thread. An error that it raises ends the group.
        port: The port to which the hosts connect; 0: any free one.
        max_value: The largest size of what a rank asks the driver, in bytes.
        checkpoints: Writes what rank 0 saves.
        events: Gets the output, reports and states of the ranks; ``None``: their output is printed.
        refresh: Called several times a second, to show the time that passes.

    Raises:
        WorkerError: A rank failed; the message contains its traceback and the last lines of its output.
        WorkerTimeoutError: The ranks did not end within the timeout.
        SparkKerasError: The task of a rank failed, or the job was cancelled.
        RowsMissingError: A host did not find the rows of its rank.
    """
    events = Events([Progress(2)]) if events is None else events
    service = GroupService(group, max_value, checkpoints)
    with serving("socket", service, ServerOptions(), port, ranks.hosts.driver, group.size) as address, interrupts_here():
        parts = replace(ranks.parts, handles=None)
        host = Host(ranks.work, address, group.size, group.together, parts, ranks.hosts.ports)
        running = ranks.hosts.start(host, ranks.parts.handles)
        try:
            error = _watch(group, running, timeout, answer, events, refresh)
        except BaseException:
            _end(group, running, INTERRUPT_SECONDS)
            raise
        ended_itself = _end(group, running, STOP_SECONDS)
        cause = _error_of(running) if ended_itself else None
        _emit_news(group, events)
        if error is not None:
            # Hosts that had reached this process have lost it since: it was stopped, or the network was cut.
            is_consequence = isinstance(cause, DriverConnectionError) and group.has_started
            if cause is not None and not is_consequence and _explains(cause, group.failure(is_final=True)):
                raise cause
            raise error from cause
    if group.unfinished:
        running.result()
    if group.has_missing_rows:
        raise RowsMissingError
    if group.unfinished:
        raise WorkerError(f"{_named(group.unfinished)} ended without a result: its task was lost.")
    return [_result(group, rank) for rank in range(group.size)]


def _watch(
    group: RankGroup,
    running: Running[Any],
    timeout: float | None,
    answer: Answer | None,
    events: Events,
    refresh: Callable[[], None],
) -> WorkerError | None:
    """Emit events and answer the ranks until the hosts have ended or the group has failed; returns the error."""
    exits_until: float | None = None
    waiting = _SlotWarning(group, running)
    while True:
        is_done = running.done
        _emit_news(group, events)
        refresh()
        cannot_start = waiting.check()
        if cannot_start is not None:
            return cannot_start
        if answer is not None and (asked := group.asked()) is not None:
            number, values = asked
            group.answer(number, answer(values))
        failure = group.failure(is_done)
        if failure is not None:
            return failed(group, failure)
        if exits_until is None and not group.unfinished:
            exits_until = time.monotonic() + EXIT_SECONDS
        if is_done or (exits_until is not None and time.monotonic() >= exits_until):
            return None
        if timeout is not None and group.seconds > timeout and group.unfinished:
            return timed_out(group, timeout)
        group.wait(TICK_SECONDS)


def _emit_news(group: RankGroup, events: Events) -> None:
    for event in group.news():
        events.emit(event)


class _SlotWarning:
    """Warns, and then seldom again, while the ranks of a group wait for slots that other jobs use."""

    def __init__(self, group: RankGroup, running: Running[Any]) -> None:
        self._group, self._running = group, running
        self._started, self._next, self._has_joined = time.monotonic(), WAIT_SECONDS, False
        self._has_too_few = False  # slots, when it looked last

    def check(self) -> WorkerError | None:
        """Warn if it is time; returns the error of ranks for which there are no slots any more."""
        now = time.monotonic()
        if not self._group.together or not (absent := self._group.absent):
            return None
        if len(absent) < self._group.size and not self._has_joined:
            self._started, self._next, self._has_joined = now, JOIN_SECONDS, True
        waited = now - self._started
        if waited < self._next:
            return None
        self._next *= 3
        if self._has_joined:
            warn(
                f"{_named(absent)} of {self._group.size} did not start for {waited:.0f} seconds, while others wait: Spark "
                "may not have sent their tasks what they need, if executors cannot connect to each other "
                "(spark.blockManager.port)."
            )
            return None
        size = self._group.size
        together = f"Spark starts {counted(size, 'rank')} together, which needs as many free slots, and has"
        jobs = "The ranks start when these jobs end (Spark's UI lists them)."
        if not isinstance(self._running, WaitsForSlots):
            warn(f"{together} not started any for {waited:.0f} seconds: other jobs may use the slots. {jobs}")
            return None
        free, total = self._running.slots_while_waiting() or (size, size)
        had_too_few, self._has_too_few = self._has_too_few, total < size
        if self._has_too_few:  # Spark itself waits for ten minutes
            if had_too_few:
                return WorkerError(
                    f"Spark has only {counted(total, 'slot')} left for {counted(size, 'rank')} that start together: an "
                    "executor was lost, and none has replaced it."
                )
            self._next = waited + WAIT_SECONDS
        elif free < size:
            warn(
                f"{together} had too few for {waited:.0f} seconds: {free} of {total} are free, and other jobs use the rest. "
                f"{jobs}"
            )
        return None


def _end(group: RankGroup, running: Running[Any], seconds: tuple[float, float]) -> bool:
    """Stop the group, and cancel its tasks if they have not ended; see `STOP_SECONDS`. Returns whether they had ended."""
    group.stop()
    has_ended = False
    try:
        has_ended = _wait(group, running, seconds[0])
    finally:
        if not has_ended:
            running.cancel()
    if not has_ended:
        _wait(group, running, seconds[1])
    return has_ended


def _wait(group: RankGroup, running: Running[Any], seconds: float) -> bool:
    """Wait until the tasks have ended, and the hosts: Spark may give up a stage while some of its tasks still run."""
    deadline = time.monotonic() + seconds
    while not (running.done and group.has_ended) and time.monotonic() < deadline:
        time.sleep(TICK_SECONDS)
    return running.done and group.has_ended


def _error_of(running: Running[Any]) -> BaseException | None:
    """The error of tasks that have ended, which may say more about a worker that was lost."""
    if running.done:
        try:
            running.result()
        except Exception as error:
            return error
    return None


def _explains(cause: BaseException, failure: RankFailure | None) -> bool:
    """Whether the error of the tasks says more than the failure of a rank, for instance that the job was cancelled."""
    if failure is not None and failure.is_loss:
        if isinstance(cause, WorkerError):
            return bool(cause.worker_traceback or OVER_LIMIT.search(str(cause)))
        return isinstance(cause, SparkKerasError)
    return isinstance(cause, ClusterError) and not isinstance(cause, WorkerError)


def _result(group: RankGroup, rank: int) -> Any:
    try:
        return unpack_parts(group.result(rank))
    except Exception as error:
        raise ClusterError(
            f"the result of rank {rank} cannot be unpickled on the driver: {type(error).__name__}: {error}. Return arrays, "
            "numbers and strings, or install the package of the result's class here."
        ) from error


def failed(group: RankGroup, failure: RankFailure) -> WorkerError:
    """The error for a failed rank: what happened, its traceback, and its last lines."""
    host = group.host(failure.rank)
    where = f"rank {failure.rank} of {group.size}{f' on {host}' if host else ''}"
    message = f"{where} failed: {failure.error.rstrip('.')}."
    if failure.may_be_consequence and (reason := ended_by_jax(group.console.tail(failure.rank))):
        message += f" {reason}"
    missing = MISSING_MODULE.search(failure.error)
    if missing:
        message += f" If the ranks need the module {missing[1]!r}, {INSTALL_MODULE}."
    if failure.is_loss and not group.together:
        message += (
            " Spark starts a rank again until spark.task.maxFailures attempts have failed; with the master local[N] it does "
            "not (with local[N,4], up to three times)."
        )
    if failure.traceback:
        message += f" The traceback:\n\n{failure.traceback.rstrip()}"
    return WorkerError(message + _tail(group, failure.rank), failure.traceback)


def timed_out(group: RankGroup, timeout: float) -> WorkerTimeoutError:
    """The error for ranks that exceed the timeout, with the last lines of the first one."""
    ranks = group.unfinished
    return WorkerTimeoutError(
        f"{_named(ranks)} of {group.size} did not end within timeout={timeout:g} seconds after all ranks had started."
        f"{_tail(group, ranks[0])}"
    )


def _tail(group: RankGroup, rank: int) -> str:
    lines = group.console.tail(rank)
    if not lines:
        return ""
    shown = f"the last {TAIL_LINES} lines" if len(lines) == TAIL_LINES else counted(len(lines), "line")
    return f"\n\nThe output of rank {rank}, {shown}:\n\n" + "\n".join(lines)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
