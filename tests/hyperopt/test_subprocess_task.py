"""Work in a process of its own: what comes back, and that nothing is left of it."""

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil
import pytest

from sparkkeras.hyperopt import subprocess_task
from sparkkeras.hyperopt.subprocess_task import ChildLostError, ChildStoppedError, StopWork, run_here, run_in_child

# The backend may have been used in this process, whose threads the children lack: none of them uses it.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SOON = 0.02


def run(work, answer=lambda question: question, beat=lambda: True, every=SOON):
    return run_in_child(work, answer, beat, every)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves a child or an open file behind."""
    me = psutil.Process()
    before = me.num_fds()
    yield
    assert [each for each in me.children(recursive=True) if each.name() != "java"] == []
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


# What comes back


def test_the_result_comes_back_from_another_process():
    assert run(lambda ask: ("result", os.getpid()))[0] == "result"
    assert run(lambda ask: os.getpid()) != os.getpid()
    assert run(lambda ask: os.getppid()) == os.getpid()


def test_what_the_child_does_stays_there():
    there = []
    assert run(lambda ask: (there.append(1), len(there))[1]) == 1
    assert there == []


def test_large_results_come_back():
    assert len(run(lambda ask: b"x" * 50_000_000)) == 50_000_000


def test_questions_are_answered_in_this_process():
    asked = []

    def answer(question):
        asked.append((os.getpid(), question))
        return question * 10

    assert run(lambda ask: [ask(number) for number in range(5)], answer) == [0, 10, 20, 30, 40]
    assert asked == [(os.getpid(), number) for number in range(5)]


def test_what_the_work_raises_is_raised_here():
    def work(ask):
        raise KeyError("the key", 3)

    with pytest.raises(KeyError) as caught:
        run(work)
    assert caught.value.args == ("the key", 3)


def test_what_the_answer_raises_is_raised_here_and_ends_the_child():
    with pytest.raises(ZeroDivisionError):
        run(lambda ask: (ask(1), time.sleep(600)), lambda question: 1 / 0)


def test_what_the_beat_raises_is_raised_here_and_ends_the_child():
    with pytest.raises(ZeroDivisionError):
        run(lambda ask: time.sleep(600), beat=lambda: 1 / 0)


class NoPickleError(Exception):
    def __reduce__(self):
        raise TypeError("not this one")


def test_what_cannot_be_pickled_is_told():
    with pytest.raises(TypeError, match="what came of it cannot leave its process: .*[lL]ock"):
        run(lambda ask: threading.Lock())


class OneWayError(Exception):
    """Can be pickled, and not be read again."""

    def __init__(self, one, two):
        super().__init__(one)


@pytest.mark.parametrize("error", [NoPickleError("words"), OneWayError("words", 2)], ids=["one", "other"])
def test_errors_that_cannot_be_pickled_are_told_by_their_words(error):
    def work(ask):
        raise error

    with pytest.raises(TypeError, match=rf"what it raised cannot leave its process \(.*\): {type(error).__name__}: words"):
        run(work)


def test_the_plain_twin_works_here():
    assert run_here(lambda ask: (ask(2), os.getpid()), lambda question: question * 10, lambda: True, SOON) == (
        20,
        os.getpid(),
    )


def test_what_is_written_in_the_child_is_not_lost(tmp_path):
    for place in range(5):
        with (tmp_path / f"{place}").open("w", buffering=1_000_000) as file:

            def work(ask, file=file):
                sys.stdout = file
                sys.stdout.write("words" * 1000)

            run(work)
        assert (tmp_path / f"{place}").read_text() == "words" * 1000


# How a child may end


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"its process was killed by SIGKILL \(perhaps for its memory\)"),
        (signal.SIGUSR1, "its process was killed by SIGUSR1$"),
        (signal.SIGTERM, "its process was killed by SIGTERM$"),
        (signal.SIGRTMIN + 1, f"its process was killed by signal {signal.SIGRTMIN + 1}$"),
    ],
)
def test_a_child_that_is_killed_is_lost(number, words):
    with pytest.raises(ChildLostError, match=words):
        run(lambda ask: os.kill(os.getpid(), number))


@pytest.mark.parametrize("code", [0, 3])
def test_a_child_that_ends_its_process_is_lost(code):
    with pytest.raises(ChildLostError, match=f"its process ended with the exit code {code}"):
        run(lambda ask: os._exit(code))


def test_a_child_that_is_killed_between_questions_is_lost():
    def work(ask):
        ask(1)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ChildLostError, match="SIGKILL"):
        run(work)


def test_a_child_that_does_not_wait_for_its_answer_is_lost():
    def work(ask):
        threading.Thread(target=ask, args=(1,)).start()
        time.sleep(0.1)
        os._exit(7)

    with pytest.raises(ChildLostError, match="exit code 7"):
        run(work, lambda question: time.sleep(0.5))


def test_threads_of_the_person_are_not_waited_for():
    def work(ask):
        threading.Thread(target=time.sleep, args=(600,)).start()
        return "done"

    assert run(work) == "done"


def left_behind(then, is_daemon):
    """Work that forks a process which stays, tells its number and then does something."""

    def work(ask):
        pid = os.fork()
        if pid == 0:
            if is_daemon:
                os.setsid()
            time.sleep(600)
            os._exit(0)
        ask(pid)
        return then()

    return work


@pytest.mark.parametrize("is_daemon", [False, True], ids=["plain", "daemon"])
@pytest.mark.parametrize("how", ["returns", "is killed", "exits"])
def test_a_process_that_the_child_left_behind_holds_nobody_up(how, is_daemon):
    pids = []
    then = {
        "returns": lambda: "done",
        "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exits": lambda: os._exit(3),
    }
    try:
        if how == "returns":
            assert run(left_behind(then[how], is_daemon), pids.append) == "done"
        else:
            with pytest.raises(ChildLostError, match="SIGKILL" if how == "is killed" else "exit code 3"):
                run(left_behind(then[how], is_daemon), pids.append)
        if not is_daemon:  # whoever has left the child's group stays
            until(lambda: not is_alive(pids[0]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)


@pytest.mark.parametrize("how", ["stopped", "raised"])
def test_programs_that_the_child_has_begun_end_with_it(how, monkeypatch):
    """Loaders of data, say."""
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", 0.1)
    pids = []

    def work(ask):
        ask(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        if how == "raised":
            raise KeyError
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    with pytest.raises(KeyError if how == "raised" else ChildStoppedError):
        run(work, pids.append, beat=lambda: how == "raised" or not pids)
    until(lambda: not is_alive(pids[0]))


def test_a_process_of_the_childs_does_not_speak_for_it():
    """It has no end of the pipe, so its own death and the worker's answers are nothing to it."""

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


# Signs of life


def test_a_silent_child_has_its_worker_beat(tmp_path):
    beats, mark = [], tmp_path / "mark"

    def beat():
        beats.append(1)
        if len(beats) == 2:
            mark.touch()
        return True

    assert run(lambda ask: until(mark.exists) or "done", beat=beat) == "done"


def test_a_child_that_talks_needs_no_beats():
    beats = []
    run(lambda ask: [ask(number) for number in range(200)], beat=lambda: beats.append(1) or True, every=60)
    assert beats == []


@pytest.fixture
def patient(monkeypatch):
    """Children have so long to stop that none is ended."""
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", 600.0)


def busy(ask):
    """Does not stop for any error of the usual kind."""
    while True:
        with contextlib.suppress(Exception):
            sum(range(1000))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("work", [lambda ask: time.sleep(500), busy], ids=["asleep", "busy"])
def test_a_child_that_shall_stop_does_so_wherever_it_is(work):
    said, began = [], time.monotonic()
    with pytest.raises(ChildStoppedError):
        run(lambda ask: (ask("begun"), work(ask)), said.append, beat=lambda: not said)
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("patient")
def test_a_child_may_be_told_to_stop_before_it_has_begun():
    for _ in range(20):
        with pytest.raises(ChildStoppedError):
            run(lambda ask: time.sleep(500), beat=lambda: False, every=0.0005)


@pytest.mark.usefixtures("patient")
def test_a_child_that_shall_stop_may_tell_what_it_has():
    """It is told again and again, and hears it once."""
    beats, heard = [], []

    def work(ask):
        try:
            ask("begun")
            time.sleep(500)
        except StopWork:
            while ask("ending")[1] < 3:
                time.sleep(0.05)
            return ask("ended")

    def answer(question):
        heard.append(question)
        return question, len(beats)

    said, count = run(work, answer, beat=lambda: not heard or beats.append(1))
    assert said == "ended"
    assert count >= 3


@pytest.mark.usefixtures("patient")
def test_who_shall_stop_hears_the_answer_to_its_question_first():
    """So the next answer is that to the next question."""

    def work(ask):
        try:
            ask(os.getpid())
        except StopWork:
            return [ask("one"), ask("two")]

    def answer(question):
        if isinstance(question, int):
            os.kill(question, signal.SIGTERM)
            time.sleep(0.1)
        return question

    assert run(work, answer) == ["one", "two"]


def test_a_child_that_somebody_else_ends_is_lost():
    def work(ask):
        ask(os.getpid())
        time.sleep(500)

    with pytest.raises(ChildLostError, match="its process was killed by SIGTERM$"):
        run(work, lambda pid: os.kill(pid, signal.SIGTERM))


class LateError(Exception):
    """Its process is told to stop when it travels already."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return LateError, ()


def test_who_has_ended_cannot_be_stopped_any_more():
    def work(ask):
        raise LateError

    with pytest.raises(LateError):
        run(work)


def test_a_child_that_does_not_stop_is_ended(monkeypatch):
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", 0.1)
    pids = []

    def work(ask):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ask(os.getpid())
        time.sleep(600)

    with pytest.raises(ChildStoppedError):
        run(work, pids.append, beat=lambda: not pids)
    assert not is_alive(pids[0])


def test_a_child_that_may_go_on_is_not_ended(monkeypatch):
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", 0.05)
    assert run(lambda ask: time.sleep(0.4) or "done", beat=lambda: True) == "done"


# What is left


def test_after_many_children_nothing_is_open(monkeypatch):
    monkeypatch.setattr(subprocess_task, "STOP_SECONDS", 0.02)
    me = psutil.Process()
    run(lambda ask: None)
    gc.collect()
    files, threads = me.num_fds(), threading.active_count()
    for number in range(50):
        with contextlib.suppress(ChildLostError, ChildStoppedError, ZeroDivisionError, TypeError):
            run(
                (
                    lambda ask: ask(3),
                    lambda ask: 1 / 0,
                    lambda ask: os._exit(1),
                    lambda ask: time.sleep(600),
                    lambda ask: threading.Lock(),
                )[number % 5],
                beat=lambda: False,
            )
    assert me.num_fds() <= files
    assert threading.active_count() <= threads
    assert [each for each in me.children() if each.status() == psutil.STATUS_ZOMBIE] == []


def test_a_child_holds_no_connection_of_its_worker():
    """Who talks to the worker must notice its end, though a child of it may live a little longer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def work(ask):
            try:
                os.fstat(theirs.fileno())
            except OSError:
                return ask("closed")
            return "open"

        assert run(work) == "closed"
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells children of their parent's end")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_dies_with_its_worker(number):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        pid = int(worker.stdout.readline())
        assert is_alive(pid)
        worker.send_signal(number)
        worker.wait(120)
        until(lambda: not is_alive(pid))


@dataclass(frozen=True)
class Work:
    """As tasks have it."""

    factor: int

    def __call__(self, ask):
        return self.factor * ask(2)


def test_work_may_be_an_object():
    assert run(pickle.loads(pickle.dumps(Work(3)))) == 6
