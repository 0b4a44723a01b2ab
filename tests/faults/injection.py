"""Faults that strike a worker at a given step of its work, and the times of all steps.

The functions that workers run call a `Probe` before each step, with the number of the unit of work: the partition, rank,
ensemble member or trial. The probe notes the time, and at one step of one unit it injects the fault, once.
"""

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

STEP_SECONDS = 0.02
"""How long a step takes at least, so that faults from outside strike while work is under way."""

STOPPED_SECONDS = 5.0
"""How long a stopped process stays stopped; leases expire after less."""


@dataclass(frozen=True)
class Probe:
    """Notes steps, and injects a fault once.

    Args:
        folder: For the notes: ``step-UNIT`` has one line with the time for each step; ``fault`` the time of the fault.
        fault: A name in `FAULTS`, or ``None``.
        unit: The unit that it strikes; ``None`` for any.
        step: The number of steps of this unit before it.
        every: Seconds after which the fault strikes again; 0: it strikes once.
    """

    folder: str
    fault: str | None = None
    unit: int | None = 0
    step: int = 10
    every: float = 0.0

    def __call__(self, unit):
        path = Path(self.folder) / f"step-{unit}"
        with path.open("a") as file:
            file.write(f"{time.time()}\n")
        time.sleep(STEP_SECONDS)
        if self.fault and self.unit in (None, unit) and len(path.read_text().splitlines()) > self.step and self._claim(unit):
            FAULTS[self.fault](Path(self.folder))

    def _claim(self, unit):
        name = f"fault-{time.time() // self.every:.0f}" if self.every else "fault"
        try:
            handle = os.open(Path(self.folder) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(handle, f"{time.time()} {unit}".encode())
        os.close(handle)
        return True


def steps(folder):
    """The times of the steps of each unit."""
    found = {}
    for path in Path(folder).glob("step-*"):
        found[int(path.name.partition("-")[2])] = [float(line) for line in path.read_text().splitlines()]
    return found


def seconds_to_next_step(folder):
    """The seconds from the fault to the next step of the unit that it struck; ``None`` if there was none."""
    at, unit = (Path(folder) / "fault").read_text().split()
    later = [step - float(at) for step in steps(folder)[int(unit)] if step > float(at)]
    return round(later[0], 1) if later else None


def worker_and_executor():
    """The Spark worker that runs this code, or has forked the process that does, and its executor's JVM."""
    import psutil

    found = psutil.Process()
    while "java" not in (daemon := found.parent()).parent().name():
        found = daemon
    return found, daemon.parent()


def kill_process(folder):
    """The process that runs the code: the worker, or a process that the worker has forked for a rank or trial."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker(folder):
    worker_and_executor()[0].kill()
    time.sleep(60)


def kill_executor(folder):
    worker_and_executor()[1].kill()
    time.sleep(60)


def kill_executor_and_disk(folder):
    _, executor = worker_and_executor()
    executor.suspend()  # else it could report missing files before it dies
    for home in os.environ["SPARK_LOCAL_DIRS"].split(","):
        shutil.rmtree(home)
    executor.kill()
    time.sleep(60)


def stop_worker(folder):
    """SIGSTOP, and SIGCONT by another process after `STOPPED_SECONDS`."""
    import psutil

    pids = {os.getpid(), worker_and_executor()[0].pid}
    continued = " ".join(map(str, pids))
    subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -CONT {continued}"], start_new_session=True)
    for pid in pids - {os.getpid()}:
        psutil.Process(pid).suspend()
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_once(folder):
    raise RuntimeError("injected by a test")


def decommission_executor(folder):
    """What a spot instance's notice causes: the executor gets no new tasks, and ends after the running ones."""
    worker_and_executor()[1].send_signal(signal.SIGPWR)


def slow_down(folder):
    """The attempt stays slow until another one, which Spark starts elsewhere, has ended or has waited for long enough."""
    time.sleep(STOPPED_SECONDS)


def nothing(folder):
    """For faults from outside, which strike when this step is reached."""


FAULTS = {
    "process killed": kill_process,
    "worker killed": kill_worker,
    "executor killed": kill_executor,
    "executor and its disk lost": kill_executor_and_disk,
    "worker stopped": stop_worker,
    "error raised once": raise_once,
    "executor decommissioned": decommission_executor,
    "speculation": slow_down,
    "outside": nothing,
}
