"""Functions and scripts on the cluster: one process for each rank, with addresses, rows and a connection to the driver.

Who owns what:

- `spark_runner`: the arguments of a user, on the driver; `requirements`: what ranks need of Spark; `data`: their rows.
- `groups`: runs a group of ranks from the driver until it ends, wherever they run: `launchers` implement its
  protocol `Hosts`. `group` and `exchanges` are its state, without I/O; `service` is the
  protocol between the ranks and this state.
- `hosts`: the host of a rank, in its Spark task: holds a port, starts the process, forwards its output, ends it
  (`output`).
- `rank`: what runs in the process of a rank; `rank_context`: what a user's function sees there.
- `run_checkpoints`: what rank 0 saves, written on the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkkeras.runner.rank_context import Saved as Saved
from sparkkeras.runner.rank_context import context as context

if TYPE_CHECKING:
    from sparkkeras.runner.spark_runner import SparkRunner as SparkRunner

__all__ = ["Saved", "SparkRunner", "context"]


def __getattr__(name: str) -> Any:
    if name == "SparkRunner":  # loaded when it is used: the process of a rank does not need Spark
        from sparkkeras.runner.spark_runner import SparkRunner

        return SparkRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
