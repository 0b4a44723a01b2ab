"""The variables in which libraries look for addresses."""

import json

from sparkkeras.runner.rank import environment


def test_libraries_find_the_group():
    addresses = ["[::1]:1", "b:2", "[::1]:3"]
    variables = environment(2, 3, tuple(addresses))
    assert json.loads(variables.pop("TF_CONFIG")) == {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": 2},
    }
    assert variables == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "1",
        "TF_GRPC_REUSE_PORT": "1",
        "JAX_COORDINATOR_ADDRESS": "[::1]:1",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "[::1]:1,b:2,[::1]:3",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        "KERAS_DISTRIBUTION_PROCESS_ID": "2",
    }
