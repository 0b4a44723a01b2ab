"""Errors of Spark's jobs: translates them, finds the worker's traceback, and restores interrupts that py4j hides."""

from __future__ import annotations

import functools
import logging
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sparkkeras import errors
from sparkkeras.data.dataset import Unmerged
from sparkkeras.errors import (
    READER_NOTE,
    ClusterError,
    SparkKerasError,
    StorageError,
    TrainingInterruptedError,
    WorkerError,
)
from sparkkeras.spark.settings import is_local
from sparkkeras.worker.processes import describe_memory, ran_out

if TYPE_CHECKING:
    from pyspark import SparkContext

R = TypeVar("R")
_log = logging.getLogger(__name__)


def translated(error: Exception, context: SparkContext | None = None) -> Exception:
    """Translate an error of Spark: to the error of this package that a worker raised, or to one with its traceback."""
    if isinstance(error, SparkKerasError):
        return error
    text = str(error)
    where = _where(text)
    if "PYTHON_VERSION_MISMATCH" in text:
        return ClusterError(
            f"Spark's workers{where} run another Python version than the driver, which runs "
            f"{sys.executable} (Python {'.'.join(map(str, sys.version_info[:3]))}). Before the SparkContext starts, set the "
            "environment variable PYSPARK_PYTHON (with spark-submit, also spark.pyspark.python) to a Python of that version "
            "with Keras installed."
        )
    no_python = _NO_PYTHON.search(text)
    if no_python and "PythonWorkerFactory" in text:
        return ClusterError(
            f"Spark's workers{where} cannot start Python: {no_python[0]}. Before the SparkContext starts, set the "
            "environment variable PYSPARK_PYTHON (with spark-submit, also spark.pyspark.python) to a Python that all "
            "executors have."
        )
    no_daemon = _NO_DAEMON.search(text)
    if no_daemon:
        return ClusterError(
            f"Spark's workers{where} cannot start Python: {no_daemon[1].strip()}. If a module is missing, install its "
            "package in the Python of every executor; with spark.python.daemon.module=sparkkeras.spark.daemon that is "
            "sparkkeras, and training also works without this setting."
        )
    if "maxResultSize" in text:
        return ClusterError(
            "the results of the job are larger than spark.driver.maxResultSize allows: raise it (for instance "
            "spark.driver.maxResultSize=4g) when the SparkContext starts."
        )
    traceback = worker_traceback(text)
    if not traceback:
        alone = _PACKAGE_ERROR.search(text)  # without a traceback; see `sparkkeras.scoring.column_functions.OverColumns`
        if alone:
            raised = package_error(_until_java(text, alone.start(1)))
            if raised:
                return raised
        stopped = context is not None and (context._jsc is None or context._jsc.sc().isStopped())
        if stopped:
            return ClusterError("the SparkContext was stopped while a job was running.")
        if re.search(r"\bJob \d+ cancelled\b", text):
            return ClusterError("the Spark job was cancelled, for instance by SparkContext.cancelAllJobs or in Spark's UI.")
        master = None if context is None else context.master
        over_limit = _line_with(OVER_LIMIT, text)
        if not over_limit and _LOST_EXECUTORS.search(text):
            over_limit = _memory_exceeded(context, text)
        if over_limit:
            return WorkerError(
                f"executors were ended, because they used more memory than they have. To prevent it, "
                f"{_less_memory(master)}. Spark's message: {over_limit}"
            )
        if _SILENT.search(text):
            return WorkerError(_executor_silent(text))
        if _WORKER_DIED.search(text):
            return WorkerError(_worker_died(text, master))
        raised_alone = _PYTHON_EXCEPTION.search(text)
        if raised_alone:
            return WorkerError(f"a task failed{where or ' on a worker'}: {_until_java(text, raised_alone.start(1))}")
        lines = [line.removeprefix(": ") for line in text.strip().splitlines() if not line.startswith(_PY4J)]
        first = next(iter(lines), repr(error))
        if _DISK_FULL in text:
            return StorageError(
                f"a disk that Spark writes to is full: {first} Free some space, or have Spark use another one "
                "(spark.local.dir)."
            )
        advice = kerberos_advice(text)
        if advice:
            return StorageError(f"a task{where or ' on a worker'} cannot access HDFS: {first}{advice}")
        return WorkerError(f"Spark could not finish the job: {first}")
    missing = MISSING_MODULE.search(traceback.rstrip().rpartition("\n")[2])
    if missing:
        return WorkerError(
            f"Spark's workers{where} lack the Python module {missing[1]!r}: {INSTALL_MODULE}. The traceback:\n\n{traceback}",
            traceback,
        )
    raised = package_error(traceback)
    return raised or task_failed(traceback, where)


def task_failed(traceback: str, where: str = "") -> WorkerError:
    """The error for a task that failed with this traceback. Its first line names the exception that was raised.

    Args:
        traceback: The traceback.
        where: The host, as `_where` returns it.
    """
    lines = traceback.rpartition(_TRACEBACK)[2].splitlines()
    ending = [line for line in lines if line and not line.startswith(" ")] or ["an unknown error"]
    reader = next((line for line in ending[1:] if line.startswith(READER_NOTE)), "")
    first = ending[0] if len(ending[0]) <= 300 else f"{ending[0][:297]}..."
    found = f"{first.rstrip('.')}.{f' {reader}' if reader else ''}"
    shortened = _without_frames_of(_OURS, traceback)
    shown = shortened if "\n  File " in shortened else traceback
    return WorkerError(f"a task failed{where or ' on a worker'}: {found} The traceback:\n\n{shown}", traceback)


_NO_PYTHON = re.compile(r'Cannot run program "[^"]+": [^\n]*')
"""The message of Java for a program that it cannot start."""

_NO_DAEMON = re.compile(r"Error from python worker:\n(.*?)\nPYTHONPATH was:", re.DOTALL)
"""What a Python that ended before Spark had a worker has written."""

_HOST = re.compile(r"\(TID \d+\) \((\S+) executor (?!driver)")
"""The host of a task that failed, unless its executor is the driver."""


def _where(text: str) -> str:
    """The host that Spark's message names, for our messages; empty if it names none."""
    host = _HOST.search(text)
    return f" on {host[1]}" if host else ""


_DISK_FULL = "No space left on device"
"""What the message of an executor says if it cannot write the rows of a shuffle."""

_TOKEN_EXPIRED = re.compile(r"Token\b.* has expired, current time|token\b.* can't be found in cache", re.IGNORECASE)
_NO_TICKET = re.compile(r"GSS initiate failed|GSSException|Client cannot authenticate via:")


def kerberos_advice(reason: str) -> str:
    """What to append to the reason of an error of Hadoop: what to do if Kerberos caused it, else nothing."""
    if _TOKEN_EXPIRED.search(reason):
        cause = "The application's delegation token has expired."
    elif _NO_TICKET.search(reason):
        cause = "There is no valid Kerberos ticket: it has expired, or no one has logged in with kinit."
    else:
        return ""
    return (
        f". {cause} Submit with spark.kerberos.principal and spark.kerberos.keytab, with which Spark renews tickets and "
        "tokens. In client mode, kinit may renew the ticket, with spark.kerberos.renewal.credentials=ccache."
    )


_OURS, _PYSPARK = re.compile(r'^  File ".*/sparkkeras/'), re.compile(r"^  File .*/pyspark(\.zip)?/")


def _without_frames_of(package: re.Pattern[str], traceback: str) -> str:
    """A traceback without the frames of a package."""
    kept, skipping = [], False
    for line in traceback.splitlines():
        if not line.startswith("    "):
            skipping = bool(package.match(line))
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def worker_traceback(text: str) -> str:
    """The Python traceback in a message of Spark, without PySpark's frames; empty if there is none."""
    start = text.find(_TRACEBACK)
    return "" if start < 0 else _without_frames_of(_PYSPARK, _until_java(text, start))


def _line_with(pattern: re.Pattern[str], text: str) -> str:
    """The first line of Spark's message in which a pattern occurs; empty if there is none."""
    return next((line.strip() for line in text.splitlines() if pattern.search(line)), "")


def _executor_silent(text: str) -> str:
    """The message for an executor that Spark has given up because it heard nothing from it."""
    return (
        f"an executor{_where(text)} was lost while it ran a task: Spark received no heartbeats from it. The network between "
        "its machine and the driver or the master is interrupted, or the machine was stopped or is overloaded. Check them; "
        f"spark.network.timeout says how long Spark waits. Spark's message: {_line_with(_SILENT, text)}"
    )


def _worker_died(text: str, master: str | None) -> str:
    """The message for a worker process that died without a Python error: what is known, and what helps.

    Args:
        text: Spark's message.
        master: Spark's master; ``None`` if unknown.
    """
    on_one_machine = master is not None and is_local(master)
    attempts = re.search(r"failed (\d+) times", text)
    times = "" if attempts is None else f" (attempts at the task: {attempts[1]})"
    lost = _line_with(_WORKER_DIED, text)
    exited = _EXIT_CODE.search(text)
    memory = describe_memory() if on_one_machine else ""
    if exited is not None:
        known = f"Its executor ended with the exit code {exited[1]}{_SIGNALS.get(int(exited[1]), '')}."
        may_lack_memory = int(exited[1]) in (52, 137)
    else:
        known = f"Spark does not know its exit code{f'; {memory}' if memory else ''}."
        may_lack_memory = not (on_one_machine and ran_out() is False)
    advice = []
    if may_lack_memory or _NAMES_MEMORY.search(lost):
        advice.append(
            f"If memory ran out, which the log of the machine (dmesg) or of the cluster says, {_less_memory(master)}."
        )
    if exited is None:
        advice.append(
            "If native code crashed, spark.python.worker.faulthandler.enabled=true shows where. A program or a person may "
            "also have ended it (kill)."
        )
    if on_one_machine and attempts is not None and attempts[1] == "1":
        advice.append("With the master local[N], Spark runs a task only once; with local[N,4], up to four times.")
    return " ".join(
        [
            f"a worker process died while it ran a task, without a Python error{times}.",
            known,
            *advice,
            f"Spark's message: {lost}",
        ]
    )


def _less_memory(master: str | None) -> str:
    """What needs less memory, or gives more of it."""
    if master is None or not is_local(master):
        return (
            "use smaller batches (batch_size=), fewer concurrent tasks per machine (fewer cores per executor, or a larger "
            "spark.task.cpus), or more off-heap memory for the executors (spark.executor.memoryOverhead)"
        )
    slots = re.match(r"local\[(\d+|\*)", master)
    if slots is None or slots[1] == "1":
        return "use smaller batches (batch_size=)"
    fewer = "local[2]" if slots[1] == "*" else f"local[{int(slots[1]) // 2}]"
    return f"use smaller batches (batch_size=), or fewer slots than the master {master!r} has, such as {fewer}"


_EXIT_CODE = re.compile(r"\bexit(?:ed with)?(?: exit)? (?:code|status):? (\d+)", re.IGNORECASE)
"""How cluster managers report the exit code of an executor."""

_SIGNALS = {
    52: " (out of memory in Java: raise spark.executor.memory)",
    134: " (SIGABRT: native code crashed)",
    137: " (SIGKILL)",
    139: " (SIGSEGV: native code crashed)",
    143: " (SIGTERM: the cluster manager or a person ended it)",
}
"""What exit codes of executors mean."""

_NAMES_MEMORY = re.compile("memory|OOM", re.IGNORECASE)

_PYTHON_EXCEPTION = re.compile(r"\borg\.apache\.spark\.api\.python\.PythonException: (\S)")
"""The exception of a task in a message of PySpark before 4.2, which may lack the traceback."""

_SILENT = re.compile(r"Not receiving heartbeat|Executor heartbeat timed out")
"""How Spark and its standalone master say that an executor, or its machine, has not answered."""

_WORKER_DIED = re.compile(r"Python worker exited unexpectedly|ExecutorLostFailure|Container killed")


_LOST_EXECUTORS = re.compile(r"Python worker exited unexpectedly|ExecutorLostFailure|FetchFailed")
"""What Spark says if executors died, perhaps with rows that later tasks need: the failure of one that fetches them."""

OVER_LIMIT = re.compile(r"exceeding (?:physical |virtual )?memory limits|OOMKilled")
"""What YARN and Kubernetes say of an executor that they have ended for its memory."""


_EXECUTOR = re.compile(r"\b(?:executor |BlockManagerId\()(\w+)")
"""The ID of an executor: of one that ran the task, or had what it fetched."""


def _memory_exceeded(context: SparkContext | None, text: str) -> str:
    """What Spark says of an executor in a message that was ended for its memory; empty if there was none.

    A fetch that fails since all copies are lost (``null``) names no executor: then it may be any one.
    """
    from sparkkeras.spark.activity import executor_states  # which imports this module

    found: list[str] = []
    named = set() if "FetchFailed(null" in text else set(_EXECUTOR.findall(text))

    def look() -> None:
        if context is not None and context._jsc is not None:
            states = executor_states(context)
            lost = [state.lost for name, state in states.items() if not named or name in named]
            found.extend(filter(OVER_LIMIT.search, lost))

    quietly(look)
    return found[-1] if found else ""


def _until_java(text: str, start: int) -> str:
    """The Python part of a message of Spark from ``start``, without the Java stack trace after it."""
    end = re.compile(r"\n\tat |\n\nJVM stacktrace:").search(text, start)
    return re.sub(r"\s*SQLSTATE: \w+\s*$", "", text[start : None if end is None else end.start()]).strip()


_PACKAGE_ERROR = re.compile(r"(?:^|Python worker: )(sparkkeras\.errors\.\w+: )", re.MULTILINE)  # Connect: in the same line


MISSING_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'")
"""The last line of the traceback of an import that fails."""

INSTALL_MODULE = "install it on the workers (in the Python of PYSPARK_PYTHON), or ship it with SparkContext.addPyFile"
"""What to do about a missing module, for messages."""


_PY4J = "An error occurred while calling "
"""How Py4J begins an error of the JVM, whose own message is on the next line, after a colon."""

_TRACEBACK = "Traceback (most recent call last):"


def package_error(traceback: str) -> SparkKerasError | None:
    """The error at the end of a worker's traceback, if it is one of this package."""
    last = traceback.rpartition(_TRACEBACK)[2].splitlines()
    for number, line in enumerate(last):
        if line.startswith("sparkkeras.errors."):
            name, _, message = line.removeprefix("sparkkeras.errors.").partition(": ")
            return error_named(name, "\n".join([message, *last[number + 1 :]]).strip())
    return None


def error_named(name: str, message: str) -> SparkKerasError | None:
    """An error of this package by the name of its class; ``None`` if there is none."""
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, SparkKerasError) else None


@dataclass(frozen=True)
class TaskFailure(Unmerged):
    """The error of a task, as its result.

    Spark would run the task again and log the error each time, and Spark Connect truncates long messages.
    """

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> TaskFailure:
        """Describe an exception that is being handled."""
        return cls(type(error).__name__, str(error), traceback.format_exc())

    def error(self) -> Exception:
        """The same error, if it is one of this package; otherwise a `WorkerError` with its traceback."""
        return error_named(self.kind, self.message) or translated(RuntimeError(self.traceback))


def without_failures(found: list[R]) -> list[R]:
    """The results of tasks.

    Raises:
        SparkKerasError: One of them is a `TaskFailure`.
    """
    for item in found:
        if isinstance(item, TaskFailure):
            raise item.error()
    return found


def quietly(call: Callable[[], Any]) -> None:
    """Call a cleanup function and only log its errors, because Spark may already be stopped. Interrupts are raised."""
    try:
        with interruptible():
            call()
    except Exception:
        _log.debug("cleanup failed", exc_info=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise an interrupt (Ctrl-C) as KeyboardInterrupt, even if py4j has replaced it by an error of its own.

    PySpark's SIGINT handler calls Java, possibly in the middle of another call to Java, which fails; before PySpark 4.2 it
    then raises no KeyboardInterrupt. So Python's own handler replaces it meanwhile. While py4j handles the
    KeyboardInterrupt, it closes its connection, which fails with a ``Py4JError``. Before it raises the KeyboardInterrupt, it
    logs its traceback, which is left out: Python prints it as well.
    """
    handled = sys.exception()  # an interrupt that was already caught does not count
    no_interrupts = functools.partial(_is_no_interrupt)  # an object of its own, as these contexts may be nested
    logging.getLogger().addFilter(no_interrupts)
    try:
        with interrupts_here():
            yield
    except TrainingInterruptedError:  # which comes from an interrupt, and says more
        raise
    except Exception as error:
        if _hides_interrupt(error, handled):
            raise KeyboardInterrupt from None
        raise
    finally:
        logging.getLogger().removeFilter(no_interrupts)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Whether a log record is not the one that py4j writes about a KeyboardInterrupt: a filter."""
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt) and "py4j" in record.pathname)


def _hides_interrupt(error: BaseException | None, handled: BaseException | None) -> bool:
    """Whether py4j raised the error, or one in its chain of contexts, while it handled a KeyboardInterrupt."""
    from py4j.protocol import Py4JError

    while error is not None and error is not handled:
        before = error.__context__
        if isinstance(error, Py4JError) and isinstance(before, KeyboardInterrupt) and before is not handled:
            return True
        error = before
    return False


@contextmanager
def interrupts_here() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, so that workers can still end: PySpark's handler would cancel all jobs first."""
    handler = signal.getsignal(signal.SIGINT)
    is_pysparks = str(getattr(handler, "__module__", "")).startswith("pyspark.")
    if threading.current_thread() is not threading.main_thread() or not is_pysparks:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
