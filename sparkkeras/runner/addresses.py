"""The addresses of ranks, and the environment variables in which libraries look for them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparkkeras.rpc.addresses import split_address


def local_rank(rank: int, addresses: Sequence[str]) -> int:
    """The number of lower ranks on the same machine; 0 without addresses."""
    if not addresses:
        return 0
    hosts = [split_address(address)[0] for address in addresses]
    return hosts[:rank].count(hosts[rank])


def environment(rank: int, world_size: int, addresses: Sequence[str]) -> dict[str, str]:
    """The environment variables that tell libraries about the group.

    Args:
        rank: The rank of the process.
        world_size: The number of ranks.
        addresses: The address of each rank; empty for ranks that do not know each other.
    """
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if not addresses:
        return variables
    host, port = split_address(addresses[0])
    return {
        **variables,
        "LOCAL_RANK": str(local_rank(rank, addresses)),
        "MASTER_ADDR": host,  # torch.distributed
        "MASTER_PORT": str(port),
        "TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}),
        "TF_GRPC_REUSE_PORT": "1",  # TensorFlow's server binds beside the socket that holds the port
        "JAX_COORDINATOR_ADDRESS": addresses[0],
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": ",".join(addresses),
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(world_size),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
    }
