"""The addresses of ranks, and the environment variables in which libraries look for them."""

from __future__ import annotations

import json
from collections.abc import Sequence


def host_and_port(host: str, port: int) -> str:
    """An address as ``host:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The inverse of `host_and_port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def local_rank(rank: int, addresses: Sequence[str]) -> int:
    """The number of lower ranks on the same machine; 0 without addresses."""
    if not addresses:
        return 0
    hosts = [address.rpartition(":")[0] for address in addresses]
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
    host, _, port = addresses[0].rpartition(":")
    return {
        **variables,
        "LOCAL_RANK": str(local_rank(rank, addresses)),
        "MASTER_ADDR": host.strip("[]"),  # torch.distributed
        "MASTER_PORT": port,
        "TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}),
        "TF_GRPC_REUSE_PORT": "1",  # TensorFlow's server binds beside the socket that holds the port
        "JAX_COORDINATOR_ADDRESS": addresses[0],
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": ",".join(addresses),
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(world_size),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
    }
