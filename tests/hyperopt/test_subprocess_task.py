"""Functions that run in a child process: their results, and that the process leaves nothing behind."""

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil
import pytest

from sparkkeras.data.values import DelayedValue
from sparkkeras.hyperopt import subprocess_task
from sparkkeras.hyperopt.subprocess_task import (
    ChildLostError,
    ChildStoppedError,
    InNewPython,
    StopWork,
    run_in_child,
)
from sparkkeras.spark.connect import FILES
from sparkkeras.worker import processes

# This process may have used the backend, whose threads do not exist in children; no child here uses it.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SOON = 0.02


def run(work, answer=lambda request: request, heartbeat=lambda: True, interval=SOON):
    return run_in_child(work, answer, heartbeat, interval)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves a child or an open file behind."""
    me = psutil.Process()
    before, others = me.num_fds(), set(me.children(recursive=True))  # other tests in this process may have started Spark
    yield
    assert set(me.children(recursive=True)) <= others
    assert me.num_fds() <= before


def until(condition, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.01)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Results


def test_large_results_are_returned():
    assert len(run(lambda ask: b"x" * 50_000_000)) == 50_000_000


def test_work_runs_in_another_process_and_its_requests_are_answered_here():
    requests = []

    def answer(request):
        requests.append((os.getpid(), request))
        return request * 10

    child, parent, *replies = run(lambda ask: [os.getpid(), os.getppid(), *map(ask, range(5))], answer)
    assert child != parent == os.getpid()
    assert replies == [0, 10, 20, 30, 40]
    assert requests == [(os.getpid(), number) for number in range(5)]


def test_an_error_of_the_work_is_raised_here():
    def work(ask):
        raise KeyError("the key", 3)

    with pytest.raises(KeyError) as caught:
        run(work)
    assert caught.value.args == ("the key", 3)


def test_an_error_of_the_answer_or_of_a_heartbeat_is_raised_here_and_ends_the_child():
    with pytest.raises(ZeroDivisionError):
        run(lambda ask: (ask(1), time.sleep(600)), lambda request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(lambda ask: time.sleep(600), heartbeat=lambda: 1 / 0)


def test_a_result_that_cannot_be_pickled_is_reported():
    with pytest.raises(TypeError, match="result of .*[lL]ock"):
        run(lambda ask: threading.Lock())


class OneWayError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


def test_an_error_that_cannot_be_pickled_is_described():
    def work(ask):
        raise OneWayError("text", 2)

    with pytest.raises(TypeError, match="cannot be pickled .* OneWayError: text"):
        run(work)


def test_buffered_output_of_the_child_is_flushed(tmp_path):
    for number in range(5):
        with (tmp_path / f"{number}").open("w", buffering=1_000_000) as file:

            def work(ask, file=file):
                sys.stdout = file
                sys.stdout.write("text" * 1000)

            run(work)
        assert (tmp_path / f"{number}").read_text() == "text" * 1000


# The end of a child


def kill(number):
    return lambda ask: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (kill(signal.SIGKILL), r"SIGKILL \(.* GB of memory"),
        (kill(signal.SIGTERM), "by SIGTERM$"),
        (kill(signal.SIGRTMIN + 1), f"signal {signal.SIGRTMIN + 1}$"),
        (lambda ask: os._exit(0), "exit code 0"),
    ],
    ids=range(4),
)
def test_a_child_that_is_killed_or_ends_its_process_is_lost(work, words):
    with pytest.raises(ChildLostError, match=words):
        run(work)


def test_a_child_that_exits_before_the_reply_is_lost():
    def work(ask):
        threading.Thread(target=ask, args=(1,)).start()
        time.sleep(0.1)
        os._exit(7)

    with pytest.raises(ChildLostError, match="exit code 7"):
        run(work, lambda request: time.sleep(0.5))


def test_threads_of_the_user_are_not_waited_for():
    def work(ask):
        threading.Thread(target=time.sleep, args=(600,)).start()
        return "done"

    assert run(work) == "done"


def test_a_child_that_is_stopped_is_lost(monkeypatch):
    monkeypatch.setattr(processes, "STOPPED_SECONDS", 0.3)
    with pytest.raises(ChildLostError, match=r"\(SIGSTOP\) for 0.3"):
        run(kill(signal.SIGSTOP))


@pytest.mark.parametrize("is_daemon", [False, True], ids=["of a child that returns", "a daemon of one that is killed"])
def test_a_process_that_outlives_the_child_does_not_block_the_worker(is_daemon):
    pids = []

    def work(ask):
        pid = os.fork()
        if pid == 0:
            if is_daemon:
                os.setsid()
            time.sleep(600)
            os._exit(0)
        ask(pid)
        if is_daemon:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with pytest.raises(ChildLostError) if is_daemon else contextlib.nullcontext():
            run(work, pids.append)
        if not is_daemon:  # a daemon has left the child's process group, so it keeps running
            until(lambda: not is_alive(pids[0]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)


def test_a_child_that_does_not_stop_is_killed_with_the_programs_that_it_started(monkeypatch):
    """For example data loaders."""
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", 0.1)
    pids = []

    def work(ask):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ask(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        time.sleep(600)

    with pytest.raises(ChildStoppedError):
        run(work, pids.append, heartbeat=lambda: not pids)
    until(lambda: not is_alive(pids[0]))


def test_a_grandchild_cannot_send_requests():
    """A grandchild has no end of the pipe, so neither its death nor the worker's replies affect it."""

    def work(ask):
        pid = os.fork()
        if pid == 0:
            try:
                ask("the wrong one")
            except OSError:
                os._exit(5)
            os._exit(0)
        return ask("the right one"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert run(work) == ("the right one", 5)


# Heartbeats and stop requests


def test_a_silent_child_causes_heartbeats(tmp_path, monkeypatch):
    """It is not killed, since it may continue."""
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", SOON)
    heartbeats, mark = [], tmp_path / "mark"

    def heartbeat():
        heartbeats.append(1)
        if len(heartbeats) == 4:
            mark.touch()
        return True

    assert run(lambda ask: until(mark.exists) or "done", heartbeat=heartbeat) == "done"


@pytest.fixture
def patient(monkeypatch):
    """Gives children so much time to stop that none is killed."""
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", 600.0)


def busy(ask):
    """Ignores every ``Exception``."""
    while True:
        with contextlib.suppress(Exception):
            sum(range(1000))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("work", [lambda ask: time.sleep(500), busy], ids=["asleep", "busy"])
def test_a_stop_request_interrupts_the_child_anywhere(work):
    requests, started = [], time.monotonic()
    with pytest.raises(ChildStoppedError):
        run(lambda ask: (ask("begun"), work(ask)), requests.append, heartbeat=lambda: not requests)
    assert time.monotonic() - started < 60


@pytest.mark.usefixtures("patient")
def test_a_stop_request_may_arrive_before_the_work_starts():
    for _ in range(8):
        with pytest.raises(ChildStoppedError):
            run(lambda ask: time.sleep(500), heartbeat=lambda: False, interval=0.0005)


@pytest.mark.usefixtures("patient")
def test_a_stopped_child_may_still_return_a_result():
    """It gets several signals, but `StopWork` is raised once."""
    heartbeats, requests = [], []

    def work(ask):
        try:
            ask("begun")
            time.sleep(500)
        except StopWork:
            while ask("ending")[1] < 3:
                time.sleep(0.05)
            return ask("ended")

    def answer(request):
        requests.append(request)
        return request, len(heartbeats)

    result, count = run(work, answer, heartbeat=lambda: not requests or heartbeats.append(1))
    assert result == "ended"
    assert count >= 3


@pytest.mark.usefixtures("patient")
def test_a_stop_request_waits_for_the_reply_to_a_pending_request():
    """So that the next reply belongs to the next request."""

    def work(ask):
        try:
            ask(os.getpid())
        except StopWork:
            return [ask("one"), ask("two")]

    def answer(request):
        if isinstance(request, int):
            os.kill(request, signal.SIGTERM)
            time.sleep(0.1)
        return request

    assert run(work, answer) == ["one", "two"]


class LateError(Exception):
    """Its process receives the stop signal while the error is pickled."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return LateError, ()


def test_a_stop_request_after_the_end_is_ignored():
    def work(ask):
        raise LateError

    with pytest.raises(LateError):
        run(work)


# Cleanup


def test_a_child_closes_the_connections_of_its_worker():
    """The worker's peers must notice its end, although its child may live a little longer."""
    one_end, other_end = socket.socketpair()
    with one_end, other_end:

        def work(ask):
            try:
                os.fstat(other_end.fileno())
            except OSError:
                return ask("closed")
            return "open"

        assert run(work) == "closed"
        other_end.sendall(b"x")
        assert one_end.recv(1) == b"x"


PARENT = """
import os, sys, time
from sparkkeras.hyperopt.subprocess_task import run_in_child

def work(ask):
    ask(os.getpid())
    time.sleep(600)

def answer(pid):
    print(pid, flush=True)

run_in_child(work, answer, lambda: True, 0.1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux signals the end of the parent to children")
def test_a_child_dies_with_its_worker():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        pid = int(worker.stdout.readline())
        assert is_alive(pid)
        worker.kill()
        worker.wait(120)
        until(lambda: not is_alive(pid))


# New Pythons


def in_new_python(ask):
    sys.stdout.write("to standard output\n")
    number = run(lambda ask: ask(2), lambda request: request + 1)
    return ask(number), os.environ["SET"], sys.stdin.read(), os.getppid(), os.getpid() == os.getpgid(0)


def test_work_runs_in_a_new_python_that_may_fork(capfd):
    found = run_in_child(in_new_python, lambda request: request * 2, lambda: True, SOON, processes.spawn, {"SET": "here"})
    assert found == (6, "here", "", os.getpid(), True)
    assert capfd.readouterr().out == "to standard output\n"


def test_a_new_python_ends_with_what_it_has_started():
    pids = []
    with pytest.raises(ZeroDivisionError):
        run_in_child(starts_a_program, lambda pid: pids.append(pid) or 1 / 0, lambda: True, SOON, processes.spawn)
    until(lambda: not is_alive(pids[0]))


def starts_a_program(ask):
    ask(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    time.sleep(600)


@dataclass(frozen=True)
class Logs:
    """A task that notes each of its runs in a file, and kills its process in the first ones."""

    path: str
    killed: int

    def __call__(self, context, blocks):
        with open(self.path, "a+") as file:
            file.write("x")
            file.seek(0)
            count = len(file.read())
        if count <= self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.killed:
            raise KeyError("it raised")
        return iter([context.cores, os.environ["SET"], *blocks])


@pytest.mark.parametrize(("killed", "runs", "error"), [(0, 1, "'it raised'"), (1, 2, ""), (2, 2, "lost 2 times: .*SIGKILL")])
def test_a_task_runs_again_if_its_new_python_is_lost(killed, runs, error, tmp_path, monkeypatch):
    monkeypatch.setenv(FILES, str(tmp_path))
    monkeypatch.setattr(subprocess_task, "_ATTEMPTS", 2)
    path = tmp_path / "runs"
    call = pickle.loads(pickle.dumps(InNewPython(DelayedValue(Logs(str(path), killed)), 3, {"SET": "here"})))
    found = list(call(0, iter([1, 2])))
    assert path.read_text() == "x" * runs
    assert re.search(error, found[0].message) if error else found == [3, "here"]
