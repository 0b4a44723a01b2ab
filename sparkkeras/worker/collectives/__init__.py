"""Groups of processes that train in step: the collective operations of each backend, and noticing that a peer is gone.

A process is in one group for its whole life. It is a fork of a process that has only imported the backend, since `join` has
to come before the first operation. After an error in a group, its processes must end: the backends cannot form the group
anew.

A collective operation waits for as long as it takes, since a peer may be compiling or reading. Heartbeats of each backend's
own show which peers are lost.

What the backends listen on is not authenticated (docs/security.md).
"""

from sparkkeras.worker.collectives.backends import compiles_collectives, join
from sparkkeras.worker.collectives.group import Group, PeerLostError, hold_port, holding_port
from sparkkeras.worker.collectives.jax_group import ended_by_jax

__all__ = ["Group", "PeerLostError", "compiles_collectives", "ended_by_jax", "hold_port", "holding_port", "join"]
