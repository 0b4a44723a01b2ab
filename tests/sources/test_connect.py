"""Datasets of Spark Connect, with stand-ins for a session and its DataFrames."""

from types import SimpleNamespace

import pytest

from sparkkeras.sources.connect_partitions import ConnectPartitions
from sparkkeras.sources.reader_dataset import ReaderDataset
from sparkkeras.sources.spark_dataset import SparkDataset
from sparkkeras.spark.connect import PLAN_CACHE, RemoteCluster


class Conf(dict):
    set = dict.__setitem__


class Frame:
    """A DataFrame of which one method fails."""

    def __init__(self, failing):
        self._failing = failing

    def mapInArrow(self, call, schema):
        return self

    def persist(self):
        return self._called("persist")

    def unpersist(self):
        return self._called("unpersist")

    def collect(self):
        return self._called("collect")

    def _called(self, name):
        if name == self._failing:
            raise RuntimeError(f"{name} failed")
        return self


class Session:
    """A session whose cache of plans is on, and whose jobs fail."""

    def __init__(self):
        self.conf = Conf({PLAN_CACHE: "true"})

    def range(self, *numbers):
        return Frame("collect")


@pytest.fixture
def cluster(monkeypatch):
    """The cluster of such a session; the jobs of datasets have no results."""
    monkeypatch.setattr(RemoteCluster, "collect", lambda cluster, frame: [])
    made = RemoteCluster.__new__(RemoteCluster)
    made.session, made.carried_environment, made.task_cores, made.is_lost = Session(), {}, 1, False
    made.backend = None
    return made


def test_the_cache_of_plans_is_restored_if_the_files_cannot_be_removed(cluster):
    with SparkDataset(ConnectPartitions(cluster, Frame(None), None)).stored():
        assert cluster.session.conf[PLAN_CACHE] == "false"
    assert cluster.session.conf[PLAN_CACHE] == "true"


def test_the_cache_of_plans_is_restored_if_rows_cannot_be_stored(cluster):
    with (
        pytest.raises(RuntimeError, match="persist failed"),
        SparkDataset(ConnectPartitions(cluster, Frame("persist"), None)).stored(),
    ):
        pass
    assert cluster.session.conf[PLAN_CACHE] == "true"


def test_nothing_more_is_asked_of_a_server_that_is_lost(cluster, monkeypatch):
    """Each request would wait for minutes."""
    asked = []
    monkeypatch.setattr(Session, "range", lambda *numbers: asked.append(numbers))
    with SparkDataset(ConnectPartitions(cluster, Frame("unpersist"), None)).stored():
        pass
    assert asked == []
    assert cluster.session.conf[PLAN_CACHE] == "false"  # not restored


def test_the_cache_of_plans_is_off_while_workers_read_batches(cluster):
    with ReaderDataset.of(cluster, SimpleNamespace(num_workers=1, workers=())).stored():
        assert cluster.session.conf[PLAN_CACHE] == "false"
    assert cluster.session.conf[PLAN_CACHE] == "true"
