"""The variables in which libraries look for addresses."""

import json

from sparkkeras.runner.rank import environment, local_rank

ADDRESSES = ("a:1", "b:2", "a:3")


def test_ranks_of_a_machine_are_counted():
    assert [local_rank(rank, ADDRESSES) for rank in range(3)] == [0, 0, 1]


def test_libraries_find_the_group():
    variables = environment(2, 3, ADDRESSES)
    assert json.loads(variables.pop("TF_CONFIG")) == {
        "cluster": {"worker": ["a:1", "b:2", "a:3"]},
        "task": {"type": "worker", "index": 2},
    }
    assert variables == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "TF_GRPC_REUSE_PORT": "1",
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:2,a:3",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        "KERAS_DISTRIBUTION_PROCESS_ID": "2",
    }


def test_independent_ranks_have_no_addresses():
    assert environment(1, 3, ()) == {"RANK": "1", "WORLD_SIZE": "3"}


def test_ipv6_addresses_have_no_brackets_where_the_port_is_separate():
    assert environment(0, 1, ("[::1]:5",))["MASTER_ADDR"] == "::1"
