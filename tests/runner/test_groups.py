"""How the driver ends a group whose tasks fail, hang or are cancelled, without tasks."""

import pytest

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.errors import ClusterError, WorkerError
from sparkkeras.runner import groups
from sparkkeras.runner.group import Failure, Group
from sparkkeras.runner.groups import run_group

HERE = DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)


class Tasks:
    """Tasks that end when they are cancelled, as Spark's do: with an error that says so."""

    def __init__(self, done=False):
        self.done = done

    def cancel(self):
        self.done = True

    def result(self):
        assert self.done
        raise ClusterError("the Spark job was cancelled")


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(groups, "STOP_SECONDS", (0.05, 0.05))
    group = Group(1)
    group.join(0, 1, "host", 1)
    return group


def test_tasks_that_do_not_end_are_cancelled_and_that_is_not_the_cause(group):
    group.fail(Failure(0, "ValueError: on purpose"))
    tasks = Tasks()
    with pytest.raises(WorkerError, match="ValueError: on purpose"):
        run_group(group, HERE, lambda address: tasks, None)
    assert tasks.done
    assert group.is_stopping


def test_a_job_that_the_user_cancels_is_the_cause_of_lost_ranks(group):
    group.disconnect(0)
    with pytest.raises(ClusterError, match="was cancelled"):
        run_group(group, HERE, lambda address: Tasks(done=True), None)


def test_an_interrupt_cancels_the_tasks(group, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(groups, "_show", interrupted)
    monkeypatch.setattr(groups, "INTERRUPT_SECONDS", (0.05, 0.05))
    tasks = Tasks()
    with pytest.raises(KeyboardInterrupt):
        run_group(group, HERE, lambda address: tasks, None)
    assert tasks.done
