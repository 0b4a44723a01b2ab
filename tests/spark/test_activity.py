"""What Spark's status store says of executors becomes incidents."""

import time
from types import SimpleNamespace

import pytest

from sparkkeras.events import Events, Incident, SparkTasks
from sparkkeras.spark import activity
from sparkkeras.spark.activity import ExecutorState, incidents, watching_spark
from tests.rpc.test_transports import eventually
from tests.training.runs import RecordedEvents

ONE, TWO = ExecutorState("host-1:1"), ExecutorState("host-2:1")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"1": ONE}, []),
        ({"1": ONE}, {"1": ONE, "2": TWO}, ["executor 2 on host-2:1 was added"]),
        ({"1": ONE}, {"1": ExecutorState("host-1:1", lost="it died")}, ["executor 1 on host-1:1 was lost: it died"]),
        ({"1": ExecutorState("host-1:1", lost="it died")}, {"1": ExecutorState("host-1:1", lost="it died")}, []),
        ({"1": ONE}, {"1": ExecutorState("host-1:1", 2)}, ["2 tasks failed on executor 1 (host-1:1); Spark runs a task"]),
        ({"driver": ONE}, {"driver": ExecutorState("host-1:1", 1)}, ["1 task failed"]),
        ({"1": ONE}, {"1": ONE, "2": ExecutorState("host-2:1", lost="it died")}, ["executor 2 on host-2:1 was lost"]),
    ],
)
def test_changes_are_incidents(before, after, expected):
    found = incidents(before, after)
    assert len(found) == len(expected)
    for incident, text in zip(found, expected, strict=True):
        assert incident.text.startswith(text)
        assert incident.kind == ("retry" if "failed" in text else "executor")


def test_a_failed_task_of_spark_is_an_incident_and_tasks_that_take_long_are_counted(sc, monkeypatch):
    monkeypatch.setattr(activity, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(activity, "_MAX_COST", 1.0)
    recorded = RecordedEvents()

    def run(number):
        time.sleep(0.2)
        return 1 // number

    with watching_spark(Events([recorded])):
        sc.parallelize(range(1, 9), 8).map(run).collect()
        with pytest.raises(Exception, match="ZeroDivisionError"):
            sc.parallelize([0], 1).map(run).collect()
        assert eventually(lambda: recorded.of(Incident))
    assert {event.kind for event in recorded.of(Incident)} == {"retry"}
    assert any(0 < event.done < event.total == 8 for event in recorded.of(SparkTasks))


def test_a_stopped_context_ends_the_watch(sc, monkeypatch):
    def stopped(context):
        raise RuntimeError("the context was stopped")

    monkeypatch.setattr(activity, "executor_states", stopped)
    with watching_spark(Events([RecordedEvents()])):
        pass


def test_the_tasks_of_the_queries_of_spark_connect_are_counted(monkeypatch):
    monkeypatch.setattr(activity, "POLL_SECONDS", 0.01)
    handlers = []
    session = SimpleNamespace(registerProgressHandler=handlers.append, removeProgressHandler=handlers.remove)
    monkeypatch.setattr(activity, "_spark_here", lambda: (None, session))
    recorded = RecordedEvents()
    with watching_spark(Events([recorded])):
        assert eventually(lambda: handlers)
        (handler,) = handlers
        stages = [SimpleNamespace(num_tasks=4, num_completed_tasks=count) for count in (4, 1)]
        handler(stages=stages, inflight_tasks=1, operation_id="one", done=False)
        handler(stages=stages[1:], inflight_tasks=1, operation_id="two", done=False)
        assert eventually(lambda: SparkTasks(6, 12) in recorded.of(SparkTasks))
        handler(stages=stages, inflight_tasks=0, operation_id="one", done=True)
        assert eventually(lambda: recorded.of(SparkTasks)[-1] == SparkTasks(1, 4))
    assert handlers == []
