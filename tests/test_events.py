"""Events reach listeners one at a time; their errors end the run, and nothing else."""

import threading

import pytest

from sparkkeras.events import Events, Incident, PhaseStarted, RunEnded, RunStarted, listeners

RUN, INCIDENT = RunStarted("fit", "model"), Incident("retry", "")


class Listener:
    def __init__(self, fails=()):
        self.events, self.fails = [], fails

    def on_event(self, event):
        self.events.append(event)
        if isinstance(event, self.fails):
            raise ValueError("a listener")


def run(*heard, act=lambda events: None):
    """A run in which a function is called with its events."""
    events = Events(heard)
    with events.running(RUN):
        act(events)


def fail(events):
    raise KeyError("of the run")


def emit_in_another_thread(events):
    errors = []

    def emit():
        try:
            events.emit(INCIDENT)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=emit)
    thread.start()
    thread.join()
    assert errors == []


def test_a_run_begins_and_ends_with_its_error():
    listener = Listener()
    run(listener)
    assert listener.events == [RUN, RunEnded()]
    with pytest.raises(KeyError) as caught:
        run(listener, act=fail)
    assert listener.events[2:] == [RUN, RunEnded(caught.value)]


def test_an_error_of_a_listener_ends_the_run():
    listener = Listener(fails=Incident)
    with pytest.raises(ValueError, match="a listener"):
        run(listener, act=lambda events: events.emit(INCIDENT))
    assert isinstance(listener.events[-1].error, ValueError)


def test_an_error_in_another_thread_is_raised_in_that_of_the_run():
    listener = Listener(fails=Incident)

    def act(events):
        emit_in_another_thread(events)
        events.emit(PhaseStarted("next"))
        pytest.fail("the error was lost")

    with pytest.raises(ValueError, match="a listener"):
        run(listener, act=act)
    assert isinstance(listener.events[-1], RunEnded)
    with pytest.raises(ValueError, match="a listener"):  # if nothing follows, at the end
        run(listener, act=emit_in_another_thread)


def test_the_error_of_the_run_comes_first():
    def act(events):
        emit_in_another_thread(events)
        fail(events)

    with pytest.raises(KeyError):
        run(Listener(fails=Incident), act=act)


def test_listeners_have_a_method():
    listener = Listener()
    assert listeners([1, listener, "a"]) == [listener]
    assert [bool(Events()), bool(Events([listener]))] == [False, True]


def test_an_error_at_the_beginning_reaches_the_end_of_all_and_one_at_the_end_hides_no_other():
    first, second = Listener(), Listener(fails=RunStarted)
    with pytest.raises(ValueError, match="a listener"):
        run(first, second, act=lambda events: pytest.fail("the run has begun"))
    assert [type(each) for each in first.events] == [RunStarted, RunEnded]
    first, second = Listener(fails=RunEnded), Listener()
    with pytest.raises(KeyError):
        run(first, second, act=fail)
    assert isinstance(second.events[-1], RunEnded)
