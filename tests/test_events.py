"""Events reach listeners one at a time; their errors end the run, and nothing else."""

import threading

import pytest

from sparkkeras.events import Events, Incident, PhaseStarted, RunEnded, RunStarted, listeners

RUN = RunStarted("fit", "model")


class Listener:
    def __init__(self, fails=()):
        self.events, self.fails = [], fails

    def on_event(self, event):
        self.events.append(event)
        if isinstance(event, self.fails):
            raise ValueError("a listener")


def in_another_thread(call):
    errors = []

    def run():
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_a_run_begins_and_ends():
    listener = Listener()
    with Events([listener]).running(RUN):
        pass
    assert listener.events == [RUN, RunEnded()]


def test_an_error_ends_a_run():
    listener, error = Listener(), KeyError("it")
    with pytest.raises(KeyError), Events([listener]).running(RUN):
        raise error
    assert listener.events == [RUN, RunEnded(error)]


def test_an_error_of_a_listener_ends_the_run():
    listener = Listener(fails=Incident)
    events = Events([listener])
    with pytest.raises(ValueError, match="a listener"), events.running(RUN):
        events.emit(Incident("retry", ""))
    assert isinstance(listener.events[-1].error, ValueError)


def test_an_error_in_another_thread_is_raised_in_that_of_the_run():
    listener = Listener(fails=Incident)
    events, errors = Events([listener]), []

    def run():
        with events.running(RUN):
            errors.extend(in_another_thread(lambda: events.emit(Incident("retry", ""))))
            events.emit(PhaseStarted("next"))
            pytest.fail("the error was lost")

    with pytest.raises(ValueError, match="a listener"):
        run()
    assert errors == []
    assert isinstance(listener.events[-1], RunEnded)


def test_an_error_in_another_thread_is_not_lost_at_the_end_of_a_run():
    events = Events([Listener(fails=Incident)])
    with pytest.raises(ValueError, match="a listener"), events.running(RUN):
        in_another_thread(lambda: events.emit(Incident("retry", "")))


def test_the_error_of_the_run_comes_first():
    events = Events([Listener(fails=Incident)])

    def run():
        with events.running(RUN):
            in_another_thread(lambda: events.emit(Incident("retry", "")))
            raise KeyError("of the run")

    with pytest.raises(KeyError):
        run()


def test_listeners_have_a_method():
    listener = Listener()
    assert listeners([1, listener, "a"]) == [listener]
    assert not Events()
    assert Events([listener])


def test_an_error_at_the_beginning_reaches_the_end_of_all():
    first, second = Listener(), Listener(fails=RunStarted)
    with pytest.raises(ValueError, match="a listener"), Events([first, second]).running(RUN):
        pytest.fail("the run has begun")
    assert [type(each) for each in first.events] == [RunStarted, RunEnded]


def test_an_error_at_the_end_hides_no_other():
    first, second = Listener(fails=RunEnded), Listener()
    with pytest.raises(KeyError), Events([first, second]).running(RUN):
        raise KeyError("it")
    assert isinstance(second.events[-1], RunEnded)
