"""The host of a rank: holds a port, starts the process of the rank, forwards its output, and ends it.

Hosts run in Spark's Python workers, or in threads of the driver (`sparkkeras.runner.launchers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sparkkeras.data import files
from sparkkeras.data.dataset import Rows, Shared
from sparkkeras.data.files import Handle
from sparkkeras.errors import DriverConnectionError
from sparkkeras.rpc.transport import Address
from sparkkeras.runner.output import Lines, OutputLimit
from sparkkeras.runner.rank import Placement, RankMain, RankWork, Script, environment, folder_for, report
from sparkkeras.runner.service import GroupStoppedError, RankClient
from sparkkeras.sources.tasks import SharedRows
from sparkkeras.worker.collectives import holding_port
from sparkkeras.worker.processes import Child

HEARTBEAT_SECONDS = 0.5
"""The interval of heartbeats, whose replies say whether to end the process."""

OUTPUT_SECONDS = 0.1
"""How long output may wait for more, before it is sent to the driver."""

READ_SECONDS = 0.05
"""How long a host waits for output before it looks whether the process still runs."""

_MAX_LINES = 500


@dataclass(frozen=True)
class Parts:
    """The rows of the ranks; by default none, as in a run without data.

    Attributes:
        rows: Those of each rank, in parts that its host can open; ``None``: the partitions of ``handles`` have them.
        counts: Their numbers; ``None``: the ranks need not know them.
        handles: Partitions with the handles of each rank, over which Spark runs tasks where the files are; ``None``: any
            host can open the rows.
    """

    rows: tuple[tuple[Rows, ...], ...] | None = None
    counts: tuple[int, ...] | None = None
    handles: Any = None


@dataclass(frozen=True)
class Host:
    """Runs the process of a rank, from its start to its end.

    Attributes:
        work: What each rank does.
        driver: The address of the driver.
        world_size: The number of ranks.
        together: Whether all ranks run at the same time.
        parts: The rows of the ranks, without ``handles``.
        ports: The ports on which ranks listen; ``None``: any free ones.
    """

    work: Shared[RankWork]
    driver: Address
    world_size: int
    together: bool
    parts: Parts = Parts()
    ports: range | None = None

    def run(
        self,
        placement: Placement,
        start: Callable[[RankMain, Mapping[str, str]], Child],
        inherited: Mapping[str, str],
        parts: tuple[Rows, ...] = (),
    ) -> None:
        """Run a rank. If it fails, the driver knows, and no error is raised here.

        So Spark neither retries the stage nor ends Python workers that could run the next ranks.

        Args:
            placement: The rank, and where it runs.
            start: Starts its process, given what it does and its environment variables.
            inherited: Environment variables of the process besides those of this rank.
            parts: Its rows, if they are not in ``self.parts``.
        """
        parts = parts if self.parts.rows is None else self.parts.rows[placement.rank]
        with ExitStack() as stack:
            client = stack.enter_context(RankClient(self.driver, placement.rank, placement.attempt, is_host=True))
            if self.together:
                stack.enter_context(_reporting_errors(client))
            if not all(map(_exists, parts)):
                client.report_missing_rows()
                return
            work, stored = self.work.value, tuple(_stored(part, stack) for part in parts)
            if isinstance(work, Script):
                work = work.on_host(stack)
            port = stack.enter_context(holding_port(self.ports)) if self.together else 0
            try:
                addresses = client.join(placement.host, port)
            except GroupStoppedError:
                return
            main = RankMain(work, self.driver, placement, self.world_size, addresses, stored, self.parts.counts)
            variables = environment(placement.rank, self.world_size, addresses) | _resources(placement)
            process = stack.enter_context(closing(start(main, {**inherited, **variables})))
            _watch(process, client)
            client.end(process.how())


@contextmanager
def _reporting_errors(client: RankClient) -> Iterator[None]:
    """Report errors of the worker: Spark may start all ranks again, and then end its job without the error."""
    try:
        yield
    except DriverConnectionError:
        raise
    except Exception as error:
        with suppress(Exception):
            report(error, client)
        raise


def _watch(process: Child, client: RankClient) -> None:
    """Forward the output of a process until it has ended, and end it if the driver says so."""
    lines, limit = Lines(), OutputLimit()
    waiting: list[str] = []
    sent = time.monotonic()
    while process.poll() is None and not process.hangs:
        waiting += limit.apply(lines.split(process.read(READ_SECONDS)))
        idle = time.monotonic() - sent
        if idle >= HEARTBEAT_SECONDS or len(waiting) >= _MAX_LINES or (waiting and idle >= OUTPUT_SECONDS):
            must_end = client.heartbeat(waiting)
            waiting, sent = [], time.monotonic()
            if must_end:
                process.end()
    process.end()
    waiting += limit.apply([*lines.split(process.drain()), *lines.rest()])
    waiting += limit.last()
    for first in range(0, len(waiting), _MAX_LINES):
        client.heartbeat(waiting[first : first + _MAX_LINES])


def _resources(placement: Placement) -> dict[str, str]:
    """The environment variables that limit a process to its cores and GPUs."""
    cores = str(placement.cores)
    return {"NPROC": cores, "OMP_NUM_THREADS": cores, "CUDA_VISIBLE_DEVICES": ",".join(placement.accelerators)}


def _exists(rows: Rows) -> bool:
    """Whether the files of rows are on this machine, if they are in files."""
    try:
        if isinstance(rows, Handle):
            rows.open()
    except FileNotFoundError:
        return False
    return True


def _stored(rows: Rows, stack: ExitStack) -> Rows:
    """Rows that a new process can open: those in memory are written to files, which are removed in the end."""
    if not isinstance(rows, SharedRows):
        return rows
    return files.write(rows.blocks(), 0, folder_for(stack))
