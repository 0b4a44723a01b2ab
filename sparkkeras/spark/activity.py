"""What Spark does to a run, as events: tasks that are done, tasks that failed, executors that were lost or added.

Spark's own store of its status has it, also without the web UI, for the driver's SparkContext. The clients of Spark Connect
see the tasks of their queries only.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sparkkeras.errors import counted, warn
from sparkkeras.events import Events, Incident, SparkTasks
from sparkkeras.rpc.addresses import connect_error, split_address
from sparkkeras.spark.connect import active_remote_session
from sparkkeras.spark.job_errors import quietly
from sparkkeras.spark.settings import is_local

POLL_SECONDS = 1.0
"""The shortest interval at which the store is read."""

STALLED_SECONDS = 20.0
"""How long no task may end, before it is checked whether Spark can run tasks at all."""

_LAST_SECONDS = 0.05
"""If reading the store takes longer, it is not read at the end of a run, which would wait for it."""

_MAX_COST = 0.005
"""The largest fraction of the time to spend on reading: with many executors, the interval is longer."""


@dataclass(frozen=True)
class ExecutorState:
    """What Spark knows of an executor.

    Attributes:
        host: Its host and port.
        failed_tasks: The number of its tasks that have failed so far.
        lost: Why it is gone; empty while it runs.
    """

    host: str
    failed_tasks: int = 0
    lost: str = ""


@contextmanager
def watching_spark(events: Events) -> Iterator[None]:
    """Emit an `Incident` for each change, and `SparkTasks`, while the context is open; with Spark Connect the latter only.

    Warn if tasks wait for executors that do not come, or that the driver cannot reach.

    Args:
        events: Gets them, from another thread.
    """
    context, session = _spark_here()
    ends = threading.Event()
    if session is not None and events:
        watch = functools.partial(_watch_remote, session, events, ends)
    elif context is not None and context._jsc is not None and (events or not is_local(context.master)):
        watch = functools.partial(_watch, context, events, ends)
    else:
        yield
        return
    # Without what it reads, which is no public API of Spark, there are no incidents.
    thread = threading.Thread(target=quietly, args=(watch,), name="sparkkeras-spark-activity", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _spark_here() -> tuple[Any, Any]:
    """The active SparkContext, and the active Spark Connect session; each ``None`` if there is none."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return context, active_remote_session() if context is None else None


def incidents(before: dict[str, ExecutorState], after: dict[str, ExecutorState]) -> list[Incident]:
    """What has happened between two readings of the executors by their IDs."""
    found = []
    for name, now in after.items():
        then = before.get(name)
        if then is None and name != "driver" and before and not now.lost:
            found.append(Incident("executor", f"executor {name} on {now.host} was added"))
        failed = now.failed_tasks - (0 if then is None else then.failed_tasks)
        if failed > 0:
            again = f" on executor {name} ({now.host}); Spark runs a task up to spark.task.maxFailures times"
            found.append(Incident("retry", f"{counted(failed, 'task')} failed{'' if name == 'driver' else again}"))
        if now.lost and (then is None or not then.lost) and before:
            found.append(Incident("executor", f"executor {name} on {now.host} was lost: {now.lost.rstrip('.')}"))
    return found


def _watch(context: Any, events: Events, ends: threading.Event) -> None:
    before, seconds, is_last = executor_states(context), 0.0, False
    stall = None if is_local(context.master) else _Stall(context, events)
    while not is_last:
        is_last = ends.wait(max(POLL_SECONDS, seconds / _MAX_COST))
        if is_last and seconds > _LAST_SECONDS:
            return  # the end of the run would wait for it
        began = time.perf_counter()
        after, tasks = executor_states(context), running_stages(context)
        seconds = time.perf_counter() - began
        for event in [*incidents(before, after), *([] if tasks is None else [tasks])]:
            events.emit(event)
        if stall is not None:
            stall.check(after, tasks)
        before = after


class _Stall:
    """Warns once if no task ends because there are no executors, or because the driver cannot connect to them."""

    def __init__(self, context: Any, events: Events) -> None:
        self._settings, self._events = context.getConf(), events
        self._tasks: SparkTasks | None = None
        self._since, self._has_warned = time.monotonic(), False
        self._reached: set[str] = set()

    def check(self, executors: dict[str, ExecutorState], tasks: SparkTasks | None) -> None:
        """Look at the executors and the tasks of the stages that run."""
        now = time.monotonic()
        if tasks is None or tasks != self._tasks:
            self._tasks, self._since = tasks, now
        elif now - self._since >= STALLED_SECONDS and not self._has_warned:
            message = self._reason(executors)
            self._since, self._has_warned = now, bool(message)
            if message:
                self._events.emit(Incident("waiting", message))
                warn(message)

    def _reason(self, executors: dict[str, ExecutorState]) -> str:
        here = f"{self._settings.get('spark.driver.host', '?')}:{self._settings.get('spark.driver.port', '?')}"
        running = [state.host for name, state in executors.items() if name != "driver" and not state.lost]
        if not running:
            return (
                f"Spark has no executor, and waits for one. Either the cluster has no room for it (its UI says so), or its "
                f"machines cannot resolve or reach the driver at {here}: set spark.driver.host to an address that they "
                "reach, and open spark.driver.port and spark.driver.blockManager.port"
            )
        for host in running:
            if host not in self._reached and (error := connect_error(*split_address(host))):
                return (
                    f"the driver cannot connect to the executor at {host} ({error}), so that Spark may wait for minutes and "
                    "fail. Set spark.blockManager.port to a port that is open from the driver to all executors, and between "
                    "these"
                )
            self._reached.add(host)
        return ""


def _watch_remote(session: Any, events: Events, ends: threading.Event) -> None:
    running: dict[str | None, tuple[int, int]] = {}  # of each query, the tasks that are done, and all

    def take(stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        """Take the stages of a query: a progress handler, which Spark calls in the thread that waits for the query."""
        if done:
            running.pop(operation_id, None)
        else:
            found = list(stages or ())
            running[operation_id] = sum(s.num_completed_tasks for s in found), sum(s.num_tasks for s in found)

    session.registerProgressHandler(take)
    try:
        while not ends.wait(POLL_SECONDS):
            if counts := list(running.values()):
                events.emit(SparkTasks(sum(done for done, _ in counts), sum(total for _, total in counts)))
    finally:
        session.removeProgressHandler(take)


def running_stages(context: Any) -> SparkTasks | None:
    """The tasks of the stages that run now; ``None`` if there are none."""
    tracker = context.statusTracker()
    stages = [stage for stage in map(tracker.getStageInfo, tracker.getActiveStageIds()) if stage is not None]
    return SparkTasks(sum(s.numCompletedTasks for s in stages), sum(s.numTasks for s in stages)) if stages else None


def executor_addresses(context: Any) -> tuple[tuple[str, int], ...]:
    """Host and port of Spark's server on each executor that runs."""
    states = executor_states(context).items()
    return tuple(split_address(state.host) for name, state in states if name != "driver" and not state.lost)


def executor_states(context: Any) -> dict[str, ExecutorState]:
    """All executors of a SparkContext by their IDs, also those that are gone."""
    found = context._jsc.sc().statusStore().executorList(False)
    states = {}
    for index in range(found.size()):
        executor = found.apply(index)
        reason = executor.removeReason()
        lost = "" if executor.isActive() else str(reason.get()) if reason.isDefined() else "Spark gives no reason"
        states[executor.id()] = ExecutorState(executor.hostPort(), executor.failedTasks(), lost)
    return states
