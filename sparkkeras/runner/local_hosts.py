"""The hosts of ranks as threads of the driver: the implementation without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from sparkkeras.data.dataset import DriverAddress, Running
from sparkkeras.data.local_dataset import LocalRunning
from sparkkeras.errors import ConfigurationError, counted
from sparkkeras.runner.group import RankGroup
from sparkkeras.runner.hosts import Host
from sparkkeras.runner.rank import Placement
from sparkkeras.worker import device
from sparkkeras.worker.processes import Child, spawn


@dataclass(frozen=True)
class LocalThreads:
    """Runs each host in a thread of the driver: a `sparkkeras.runner.groups.Hosts`.

    Attributes:
        group: The group.
        gpus: The addresses of the GPUs of each rank.
    """

    group: RankGroup
    gpus: tuple[tuple[str, ...], ...]

    @property
    def driver(self) -> DriverAddress:
        """The loopback address."""
        return DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)

    @property
    def ports(self) -> None:
        """Any free ones."""

    def start(self, host: Host, handles: None) -> Running[None]:
        """See `Hosts.start`."""
        group = self.group
        cores = max(1, (os.cpu_count() or 1) // group.size)
        # If Keras is loaded here, the ranks use the same backend; otherwise they load what they need.
        inherited = device.worker_environment(cores) if "keras" in sys.modules else {}

        def run(rank: int) -> None:
            try:
                host.run(Placement(rank, 0, "127.0.0.1", cores, self.gpus[rank]), partial(Child, spawn), inherited)
            except BaseException:
                group.stop()  # others may wait for this rank
                raise

        def run_all() -> None:
            with ThreadPoolExecutor(group.size, "sparkkeras-rank") as threads:
                for done in [threads.submit(run, rank) for rank in range(group.size)]:
                    done.result()

        return LocalRunning(run_all)


def gpus_of_ranks(ranks: int, each: int | None) -> tuple[tuple[str, ...], ...]:
    """Distribute the GPUs of this machine.

    Args:
        ranks: The number of ranks.
        each: The number of GPUs for each; ``None``: as many as there are for all.

    Raises:
        ConfigurationError: There are too few.
    """
    found = _gpus()
    count = max(1, len(found) // ranks) if each is None else each
    if count * ranks > len(found):
        raise ConfigurationError(
            f"{counted(ranks, 'rank')} with {counted(count, 'GPU')} each need {count * ranks}, but this machine has "
            f"{len(found)}: use fewer ranks or gpus_per_worker, or use_gpu=False."
        )
    return tuple(tuple(found[rank * count : (rank + 1) * count]) for rank in range(ranks))


def _gpus() -> list[str]:
    """The addresses of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [address for address in visible.split(",") if address not in ("", "-1")]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []
