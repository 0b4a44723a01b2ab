"""The ranks of all-reduce training without Spark: forks of a process that has imported the backend, as on workers."""

import functools
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.data.local_dataset import LocalDataset, LocalRunning, LocalShared, LocalStream
from sparkkeras.modeling import archive
from sparkkeras.runner.groups import Ranks
from sparkkeras.runner.hosts import Parts
from sparkkeras.runner.rank import Placement
from sparkkeras.worker.processes import describe_exit
from tests.worker.groups import CONTEXT


@functools.cache
def start_fork_server():
    """Its first process starts when it has imported the backend, which may take longer than a rank may be silent."""
    process = CONTEXT.Process(target=int)
    process.start()
    process.join()


@dataclass(frozen=True)
class LocalHosts:
    """Where the ranks that train on a dataset in memory run: a `RankHosts`. There is one for each partition."""

    dataset: LocalDataset

    def size(self):
        return self.dataset.num_partitions

    @contextmanager
    def ranks(self, work, size, moves_rows):
        assert not moves_rows, "rows in memory are not lost"
        if size > 1:
            start_fork_server()
        with self.dataset.everywhere() as stored:
            rows = [Stream(part) if isinstance(part, LocalStream) else part for part in stored]
            yield Ranks(Threads(), LocalShared(work), Parts(tuple(tuple(rows[rank::size]) for rank in range(size))))


@dataclass(frozen=True)
class Stream:
    """A stream that ranks read anew in each epoch, as `WorkerBatches`."""

    of: LocalStream

    def open(self):
        return self

    def blocks(self, epoch=0, seed=0):
        return self.of.blocks(epoch, seed)


class Threads:
    """Runs each host in a thread: a `Hosts`."""

    driver = DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)
    ports = None

    def start(self, host, handles):
        def run_all():
            running = [LocalRunning(lambda rank=rank: self._run(host, rank)) for rank in range(host.world_size)]
            for each in running:
                each.result()

        return LocalRunning(run_all)

    def _run(self, host, rank):
        host.run(Placement(rank, 0, "127.0.0.1", 1), InThread if host.world_size == 1 else Fork, {})


class Fork:
    """A process of the fork server, without output; see `sparkkeras.worker.processes.Child`."""

    hangs = False

    def __init__(self, main, environment):
        self._process = CONTEXT.Process(target=_run, args=(main, dict(environment)), daemon=True)
        self._process.start()

    def poll(self):
        return self._process.exitcode

    def read(self, seconds):
        self._process.join(seconds)
        return b""

    def drain(self):
        return b""

    def how(self):
        return describe_exit(self.poll())

    def end(self):
        self._process.kill()
        self._process.join()

    close = end


def _run(main, environment):
    os.environ.update(environment)
    sys.exit(main())


class InThread(Fork):
    """A rank that is alone needs no process: it has no collectives."""

    def __init__(self, main, environment):
        self._running = LocalRunning(lambda: _in_own_models(main))

    def poll(self):
        return self._running.result() if self._running.done else None

    def read(self, seconds):
        self._running._thread.join(seconds)
        return b""

    def end(self):
        self._running.result()

    close = end


def _in_own_models(main):
    with mock.patch.dict(archive._kept, clear=True):  # their training steps are those of the group
        return main()
