"""What child processes of workers have in common: they end with their worker, and do not hold its connections."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from contextlib import suppress

from sparkkeras.worker.memory import describe_memory, used_by_children

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make the operating system kill this process when its parent ends (only on Linux).

    Args:
        parent: The process ID of the parent, which may have ended before this call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def close_inherited_sockets(*kept: int) -> None:
    """Close the parent's connections, else Spark and the driver would not notice its death.

    Args:
        kept: File descriptors that stay open.
    """
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
            with suppress(OSError):
                number = int(name)
                if number > 2 and number not in kept and stat.S_ISSOCK(os.fstat(number).st_mode):
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
