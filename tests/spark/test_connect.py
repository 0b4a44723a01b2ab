"""Spark Connect: results in cells of bounded size, and stopped sessions."""

from types import SimpleNamespace

import numpy as np
import pytest
from hyperopt import hp
from pyspark import SparkContext

from sparkkeras import (
    ClusterError,
    ConfigurationError,
    load_tfrecords,
    register_keras_udf,
    to_data_frame,
    to_simple_rdd,
)
from sparkkeras.hyperopt import HyperParamModel
from sparkkeras.sources.tasks import Missing
from sparkkeras.spark.connect import (
    PLAN_CACHE,
    RemoteCluster,
    check_session,
    pack_cells,
    unpack_cells,
)
from sparkkeras.spark.job_errors import TaskFailure
from sparkkeras.spark.slots import holding_slots


@pytest.mark.parametrize("most", [1, 10, 11, 1000])
def test_results_survive_the_round_trip_through_cells_of_bounded_size(most):
    results = ["a", Missing(3), "b" * 100, None, TaskFailure("DataError", "c" * 50, ""), "d" * 5000]
    cells = [cell for result in results for cell in pack_cells(result, most)]
    assert list(unpack_cells(cells)) == results
    assert max(map(len, cells)) < most + 200


def test_a_stopped_session_raises_an_error_in_every_entry_point():
    """After ``stop()``, a SparkContext has no Java object, and ``is_stopped`` of a Connect session is true."""
    stopped = SparkContext.__new__(SparkContext)
    stopped._jsc = None
    session = SimpleNamespace(sparkContext=stopped, createDataFrame=None, read=None)
    x, y = np.zeros((2, 3)), np.zeros(2)
    for call in (
        lambda: to_simple_rdd(session.sparkContext, x, y),
        lambda: to_data_frame(session, x, y),
        lambda: load_tfrecords(session, "nowhere"),
        lambda: register_keras_udf(session, "classify", None),
        lambda: HyperParamModel(session).minimize(objective=abs, space=hp.uniform("x", 0, 1), max_evals=1),
        lambda: check_session(remote(is_stopped=True, createDataFrame=None)),
    ):
        with pytest.raises(ClusterError, match="stopped, .*a new one"):
            call()


def remote(**attributes):
    """A session of Spark Connect."""
    return type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"} | attributes)()


def test_an_object_that_is_not_a_session_raises_an_error():
    with pytest.raises(ConfigurationError, match="^spark=.*a SparkSession"):
        register_keras_udf(SimpleNamespace(parallelize=None), "classify", None)


def test_the_last_user_of_a_session_restores_its_cache_of_plans():
    class Conf(dict):
        set = dict.__setitem__

    conf = Conf({PLAN_CACHE: "true"})
    cluster = RemoteCluster.__new__(RemoteCluster)
    cluster.session, cluster.is_lost = remote(conf=conf), False
    with cluster.in_rounds():
        with cluster.in_rounds():
            assert conf[PLAN_CACHE] == "false"
        assert conf[PLAN_CACHE] == "false"
    assert conf[PLAN_CACHE] == "true"


def test_a_job_that_finds_no_free_slot_is_rejected():
    cluster = RemoteCluster.__new__(RemoteCluster)
    cluster.session, cluster.task_cores = remote(sql=lambda self, query: SimpleNamespace(collect=lambda: [(4,)])), 2
    with holding_slots(2):
        assert cluster.slots == 2  # before they are counted, nothing is known of them
        with pytest.raises(ConfigurationError, match=r"all slots \(2\)"):
            cluster.collect(None)
        with pytest.raises(ConfigurationError, match=r"all slots \(2\)"):
            _ = cluster.slots
    with holding_slots(1):
        assert cluster.slots == 2
