"""The group for Keras's current backend."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence

from sparkkeras.worker.collectives.group import Group, HostAndPort
from sparkkeras.worker.collectives.jax_group import JaxGroup
from sparkkeras.worker.collectives.tensorflow_group import TensorFlowGroup
from sparkkeras.worker.collectives.torch_group import TorchGroup
from sparkkeras.worker.device import backend_name


def compiles_collectives() -> bool:
    """Whether Keras's current backend trains with collectives if it is to compile the step with XLA."""
    return backend_name() != "tensorflow"


def join(
    rank: int,
    addresses: Sequence[HostAndPort],
    held: socket.socket,
    timeout: float = 60.0,
    patience: float = math.inf,
) -> Group:
    """Join a group with the collectives of Keras's current backend, which must not have run any operation.

    Args:
        rank: The index of this process in the group.
        addresses: Host and port of each process, by rank, as the others reach it.
        held: The socket of `hold_port` that is bound to the port of this process.
        timeout: How long to wait for the others, in seconds.
        patience: How long their machines may leave connections unanswered; see `Group.meet`.

    Raises:
        ClusterError: A process cannot reach another one.
        PeerLostError: Some processes did not join.
    """
    kinds: dict[str, type[Group]] = {"tensorflow": TensorFlowGroup, "jax": JaxGroup, "torch": TorchGroup}
    group = kinds[backend_name()](rank, addresses)
    if group.size > 1:
        group.meet(timeout, patience)
        group.connect(held, timeout)
    return group
