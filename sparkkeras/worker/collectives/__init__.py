"""Groups of processes that train in step: the collective operations of each backend, and noticing that a peer is gone.

A process is in one group for its whole life. It is a fork of a process that has only imported the backend, since `join` has
to come before the first operation. After an error in a group, its processes must end: the backends cannot form the group
anew.

A collective operation waits for as long as it takes, since a peer may be compiling or reading. Heartbeats of each backend's
own show which peers are lost.

What the backends listen on is not authenticated (docs/security.md).
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence

from sparkkeras.worker.collectives.group import Group, HostAndPort, PeerLostError, hold_port, holding_port
from sparkkeras.worker.collectives.jax_group import JaxGroup, ended_by_jax
from sparkkeras.worker.collectives.tensorflow_group import TensorFlowGroup
from sparkkeras.worker.collectives.torch_group import TorchGroup
from sparkkeras.worker.device import backend_name

__all__ = ["Group", "PeerLostError", "compiles_collectives", "ended_by_jax", "hold_port", "holding_port", "join"]


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
