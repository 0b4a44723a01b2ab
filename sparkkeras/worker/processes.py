"""What child processes of workers have in common, and what is known of how they ended. Independent of Keras.

They end with their worker, and do not hold its connections. Linux may end them for lack of memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path

from sparkkeras.errors import counted

_PR_SET_PDEATHSIG = 1
_KB_PER_GB = 1 << 20


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
