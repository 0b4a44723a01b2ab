"""The process of a rank: forked from its worker or started as a new Python, with its output in a pipe.

A fork shares what the worker has imported, so a rank starts at once. Scripts get a new Python, as if a user had started
them, and so do ranks on the driver's machine, whose process has threads and may have used the backend.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkkeras.worker.processes import close_inherited_sockets, describe_exit, die_with_parent

END_SECONDS = 1.0
"""The time that a process has to end after SIGTERM, before it is killed."""

DRAIN_SECONDS = 1.0
"""How long the output is read after the end of the process, whose own children may still write."""

STOPPED_SECONDS = 10.0
"""A process that is stopped by a signal (SIGSTOP) for this time counts as dead."""

_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.05

Main = Callable[[], int]
"""What a process does; returns its exit code."""


class Process:
    """A child process that leads a process group, and the pipe with its output.

    Args:
        pid: The process ID.
        output: The file descriptor of the pipe's end to read.
    """

    def __init__(self, pid: int, output: int) -> None:
        self.pid, self._output = pid, output
        self._exitcode: int | None = None
        self._stopped_since: float | None = None

    def read(self, seconds: float) -> bytes:
        """Output of the process; empty if there is none for this time."""
        if not select.select([self._output], [], [], seconds)[0]:
            return b""
        data = os.read(self._output, _READ_BYTES)
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
        """How the process has ended, for messages."""
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

    def close(self) -> None:
        """End the process, if it runs, and close the pipe."""
        self.end()
        os.close(self._output)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        if self._exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork(main: Main, environment: Mapping[str, str]) -> Process:
    """Run a function in a fork of this process, which must have no other threads."""
    parent = os.getpid()
    reading, writing = os.pipe()
    _flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        with suppress(OSError):
            os.setpgid(pid, pid)  # in both, since either may come first
        return Process(pid, reading)
    exitcode = 1
    try:
        os.close(reading)
        with suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent(parent)
        close_inherited_sockets()
        _redirect(writing)
        os.environ.update(environment)
        exitcode = _run(main)
    finally:
        os._exit(exitcode)  # without the worker's cleanup, and without waiting for threads of the user


def spawn(main: Main, environment: Mapping[str, str]) -> Process:
    """Run a function, which is pickled, in a new Python with the import path of this one."""
    with tempfile.TemporaryFile() as payload, Path(os.devnull).open("rb") as nothing:
        pickle.dump((os.getpid(), main), payload)
        payload.seek(0)
        reading, writing = os.pipe()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", __name__],
                {**os.environ, "PYTHONPATH": path, **environment},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, payload.fileno(), _PAYLOAD),
                    (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, writing, 1),
                    (os.POSIX_SPAWN_DUP2, writing, 2),
                ],
                setpgroup=0,
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM],
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
    return Process(pid, reading)


_PAYLOAD = 3
"""The file descriptor of the pickled function in a new Python."""


def _main() -> None:
    """The main function of a new Python."""
    with os.fdopen(_PAYLOAD, "rb") as payload:
        parent, main = pickle.load(payload)
    die_with_parent(parent)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(_run(main))


def _run(main: Main) -> int:
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exitcode = 1
    try:
        exitcode = main()
    except BaseException:
        traceback.print_exc()
    _flush()
    return exitcode


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _redirect(output: int) -> None:
    """Make a pipe standard output and error of this process, and close its input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream: Any = os.fdopen(number, "w" if number else "r", 1, "utf-8", "replace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    _main()
