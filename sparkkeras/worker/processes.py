"""Child processes: forks, or new Pythons, how they end, and what is known of how they ended. Independent of Keras.

A fork shares what its worker has imported, so it starts at once. Scripts get a new Python, as if a user had started them,
and so do ranks on the driver's machine and tasks of Spark Connect, whose process may have threads or have used the backend.
Children end with their parent, and forks do not hold its connections. Linux may end children for lack of memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import select
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkkeras.errors import counted

END_SECONDS = 1.0
"""The time that a process has to end after SIGTERM, before it is killed."""

DRAIN_SECONDS = 1.0
"""How long the output is read after the end of the process, whose own children may still write."""

STOPPED_SECONDS = 10.0
"""A process that is stopped by a signal (SIGSTOP) for this time counts as dead."""

_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_KB_PER_GB = 1 << 20

Main = Callable[[], int]
"""What a process does; returns its exit code."""

Start = Callable[[Main, Mapping[str, str], Sequence[int], int | None], int]
"""Starts a process, `fork` or `spawn`, and returns its ID. Takes what it does, environment variables, both ends of the pipe
for its output or nothing, and the connection that it keeps, if there is one; see `Child`."""


class Child:
    """A child process that leads a process group.

    Args:
        start: Starts it.
        main: What it does.
        environment: Environment variables that it has besides those of this process.
        connection: The file descriptor of a connection that it keeps. It writes where this process does then; without a
            connection, its output is in a pipe, see `read`.
    """

    def __init__(self, start: Start, main: Main, environment: Mapping[str, str], connection: int | None = None) -> None:
        self._exitcode: int | None = None
        self._stopped_since: float | None = None
        pipe: Sequence[int] = os.pipe() if connection is None else ()
        self._outputs = pipe[:1]
        try:
            self.pid = start(main, environment, pipe, connection)
        except BaseException:
            self._close_output()
            raise
        finally:
            for writing in pipe[1:]:
                os.close(writing)

    def read(self, seconds: float) -> bytes:
        """Output of the process; empty if there is none for this time."""
        if not select.select(self._outputs, [], [], seconds)[0]:
            return b""
        data = os.read(self._outputs[0], _READ_BYTES)
        if not data:
            time.sleep(seconds)  # the process has closed its output, and may go on
        return data

    def drain(self) -> bytes:
        """The output that remains when the process has ended."""
        found = []
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline and (data := self.read(0)):
            found.append(data)
        return b"".join(found)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        if self._exitcode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid and os.WIFSTOPPED(status):
                self._stopped_since = time.monotonic()
            elif pid and os.WIFCONTINUED(status):
                self._stopped_since = None
            elif pid:
                self._exitcode = os.waitstatus_to_exitcode(status)
        return self._exitcode

    @property
    def hangs(self) -> bool:
        """Whether the process was stopped by a signal `STOPPED_SECONDS` ago and has not continued."""
        return self._stopped_since is not None and time.monotonic() - self._stopped_since >= STOPPED_SECONDS

    def how(self) -> str:
        """How the process has ended, for messages. Waits for its end, unless it hangs."""
        while not self.hangs and self.poll() is None:
            time.sleep(_POLL_SECONDS / 10)
        if self.hangs:
            return f"its process was stopped by a signal (SIGSTOP) for {STOPPED_SECONDS:g} seconds"
        return describe_exit(self._exitcode)

    def end(self, seconds: float = END_SECONDS) -> None:
        """End the process and all in its group: with SIGTERM, and with SIGKILL after this time."""
        if self.poll() is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + seconds
            while self.poll() is None and time.monotonic() < deadline:
                self.read(_POLL_SECONDS)  # a full pipe would block it
        self._signal(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(_POLL_SECONDS / 10)

    def close(self, seconds: float = END_SECONDS) -> None:
        """End the process, if it runs, and close the pipe; see `end`."""
        self.end(seconds)
        self._close_output()

    def _close_output(self) -> None:
        for reading in self._outputs:
            os.close(reading)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        if self._exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork(main: Main, environment: Mapping[str, str], pipe: Sequence[int], connection: int | None) -> int:
    """Run a function in a fork of this process, which must have no other threads; see `Start`."""
    parent = os.getpid()
    flush()
    pid = os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)  # in both, since either may come first
        return pid
    exitcode = 1
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        _die_with_parent(parent)
        _close_inherited_sockets(connection)
        if pipe:
            _redirect(*pipe)
        else:
            _redirect_input()
        os.environ.update(environment)
        exitcode = _run(main)
    finally:
        os._exit(exitcode)  # without the worker's cleanup, and without waiting for threads of the user


def spawn(main: Main, environment: Mapping[str, str], pipe: Sequence[int], connection: int | None) -> int:
    """Run a function, which is pickled, in a new Python with the import path of this one; see `Start`."""
    if connection is not None:
        os.set_inheritable(connection, True)
    with tempfile.TemporaryFile() as payload:
        pickle.dump((os.getpid(), main), payload)
        payload.seek(0)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", __name__],
            {**os.environ, "PYTHONPATH": path, **environment},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, payload.fileno(), 0),
                *((os.POSIX_SPAWN_DUP2, writing, target) for writing in pipe[1:] for target in (1, 2)),
            ],
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM],
        )


def _main() -> None:
    """The main function of a new Python, whose standard input is what to do; then it is empty."""
    parent, main = pickle.load(sys.stdin.buffer)
    _redirect_input()
    _die_with_parent(parent)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(_run(main))


def _run(main: Main) -> int:
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exitcode = 1
    try:
        exitcode = main()
    except BaseException:
        traceback.print_exc()
    flush()
    return exitcode


def picklable(error: BaseException) -> BaseException:
    """The error, or a TypeError that describes it if it cannot be pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as why:
        return TypeError(
            f"the child process raised an error that cannot be pickled ({why}): {type(error).__name__}: {error}"
        )
    return error


def flush() -> None:
    """Flush what this process has written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _redirect(reading: int, writing: int) -> None:
    """Make a pipe standard output and error of this process, and close its input."""
    os.close(reading)
    _redirect_input()
    for target in (1, 2):
        os.dup2(writing, target)
    os.close(writing)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream: Any = os.fdopen(number, "w" if number else "r", 1, "utf-8", "replace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _redirect_input() -> None:
    """Make standard input of this process empty."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _die_with_parent(parent: int) -> None:
    """Make the operating system kill this process when its parent ends (only on Linux).

    Args:
        parent: The process ID of the parent, which may have ended before this call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _close_inherited_sockets(kept: int | None) -> None:
    """Close the parent's connections, except one: else Spark and the driver would not notice its death."""
    for folder in ("/proc/self/fd", "/dev/fd"):  # of Linux, of macOS
        with suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208 - numbers, not paths
                with suppress(OSError):
                    number = int(name)
                    if number > 2 and number != kept and stat.S_ISSOCK(os.fstat(number).st_mode):
                        os.close(number)


def describe_exit(exitcode: int | None) -> str:
    """How a process that this one has waited for ended, for messages; negative exit codes are signals."""
    if exitcode is not None and exitcode < 0:
        known = {each.value: each.name for each in signal.Signals}
        name = known.get(-exitcode, f"signal {-exitcode}")
        facts = filter(None, (used_by_children(), describe_memory())) if name == "SIGKILL" else ()
        memory = "; ".join(facts)
        return f"its process was killed by {name}{f' ({memory})' if memory else ''}"
    return f"its process ended with the exit code {exitcode}"


def ended_processes() -> int | None:
    """The number of processes that Linux has ended for lack of memory, of the machine or of a container, since it started.

    ``None`` on other systems.
    """
    return _numbers("/proc/vmstat").get("oom_kill")


def ran_out() -> bool | None:
    """Whether memory ran out since this process imported this module; ``None`` if that is unknown."""
    ended = ended_processes()
    return None if ended is None or _ended_before is None else ended > _ended_before


def describe_memory() -> str:
    """The memory that is available now, and whether it ran out, for messages; empty if that is unknown."""
    found = _numbers("/proc/meminfo")
    total, available = found.get("MemTotal:"), found.get("MemAvailable:")
    facts = []
    if total is not None and available is not None:
        facts.append(f"{available / _KB_PER_GB:.1f} of {total / _KB_PER_GB:.1f} GB of memory are available now")
    ended = ended_processes()
    if ended is not None and _ended_before is not None:
        count = ended - _ended_before
        processes = f"{counted(count, 'process')} for lack of memory meanwhile, perhaps this one"
        facts.append(f"the operating system has ended {processes if count else 'no process for lack of memory meanwhile'}")
    return ", and ".join(facts)


def used_by_children() -> str:
    """The most memory that a process has used which this one started and waited for, for messages; empty if unknown."""
    if sys.platform != "linux":  # other systems have no such number, or in other units
        return ""
    import resource

    return f"it used at most {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / _KB_PER_GB:.1f} GB of memory"


def _numbers(path: str) -> dict[str, int]:
    """The first two words of each line of a file of Linux: a name and a number."""
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in Path(path).read_text().splitlines()]
        return {words[0]: int(words[1]) for words in lines}
    return {}


_ended_before = ended_processes()

if __name__ == "__main__":
    _main()
