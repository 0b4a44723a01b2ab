"""What runs in the process of a rank: the function or the script of the user, and the report of how it ended."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from sparkkeras.data import files
from sparkkeras.data.dataset import Rows
from sparkkeras.data.values import DelayedValue
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc.addresses import split_address
from sparkkeras.rpc.transport import Address
from sparkkeras.runner import rank_context
from sparkkeras.runner.rank_context import RankContext
from sparkkeras.runner.service import RankClient, check_size, pack_parts
from sparkkeras.spark.connect import session_files
from sparkkeras.worker import device


class RankWork(Protocol):
    """What each rank does."""

    def __call__(self, rank: RankMain, client: RankClient) -> Any:
        """Do it in the process of a rank, and return the result."""
        ...


@dataclass(frozen=True)
class FunctionCall:
    """A call of a user's function, with its arguments."""

    call: ByValue[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]

    def __call__(self, rank: RankMain, client: RankClient) -> Any:
        """Call the function."""
        rank.enter_context(client)
        function, args, kwargs = self.call.fresh()
        return function(*args, **kwargs)


@dataclass(frozen=True)
class DelayedWork:
    """Work that is unpickled in a new process of its rank, which it has set up first: its classes import Keras."""

    work: DelayedValue[RankWork]

    def __call__(self, rank: RankMain, client: RankClient) -> Any:
        """Set up this process, and do the work."""
        device.prepare(rank.placement.cores, shared_folder=session_files())
        return self.work.value(rank, client)


@dataclass(frozen=True)
class Script:
    """A Python file, run as a program.

    Attributes:
        path: The path of the file on the driver.
        source: Its text. ``None``: the file exists at its path on the machines of the ranks.
        args: The command-line arguments.
    """

    path: str
    source: bytes | None
    args: tuple[str, ...]

    def with_source(self) -> Script:
        """The script with its text, for machines that do not have the file.

        Raises:
            OSError: The file cannot be read.
        """
        return replace(self, source=Path(self.path).read_bytes())

    def on_host(self, stack: ExitStack) -> Script:
        """The script as a file on this machine, until the stack is closed."""
        if self.source is None:
            return self
        folder = folder_for(stack)
        folder.mkdir(parents=True)
        path = folder / Path(self.path).name
        path.write_bytes(self.source)
        return Script(str(path), None, self.args)

    def __call__(self, rank: RankMain, client: RankClient) -> None:
        """Run the file, with its folder on the import path."""
        rank.enter_context(client)
        sys.argv = [self.path, *self.args]
        sys.path.insert(0, str(Path(self.path).parent))
        runpy.run_path(self.path, run_name="__main__")


@dataclass(frozen=True)
class Placement:
    """Where a rank runs.

    Attributes:
        rank: The rank.
        attempt: The number of Spark's attempt at its task.
        host: The name or IP address of its machine, for the other ranks.
        cores: The number of CPU cores for the rank.
        accelerators: The addresses of its GPUs.
    """

    rank: int
    attempt: int
    host: str
    cores: int
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankMain:
    """The main function of the process of a rank.

    Attributes:
        work: What the rank does.
        driver: The address of the driver.
        placement: The rank, and where it runs.
        world_size: The number of ranks.
        addresses: The address of each rank; empty for ranks that do not know each other.
        parts: The rows of the rank.
        counts: The number of rows of each rank; ``None``: the run has no data.
    """

    work: RankWork
    driver: Address
    placement: Placement
    world_size: int
    addresses: tuple[str, ...]
    parts: tuple[Rows, ...]
    counts: tuple[int, ...] | None

    def __call__(self) -> int:
        """Run the work and report its result or exception to the driver; returns the exit code."""
        with RankClient(self.driver, self.placement.rank, self.placement.attempt) as client:
            client.start()
            try:
                client.finish(self._result(client))
            except BaseException as error:
                report(error, client)
                return 1
            if self.addresses:
                client.leave()
        return 0

    def enter_context(self, client: RankClient) -> None:
        """Make the context of this rank available to code of the user."""
        placement, block = self.placement, self.parts[0].open() if self.parts else None
        place = local_rank(placement.rank, self.addresses)
        rank_context.enter(
            RankContext(
                placement.rank,
                self.world_size,
                place,
                placement.cores,
                placement.accelerators,
                self.addresses,
                client,
                block,
                self.counts,
            )
        )

    def _result(self, client: RankClient) -> tuple[memoryview, ...]:
        """The pickled result of the work."""
        try:
            result = self.work(self, client)
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise
            result = None
        name = f"the result of rank {self.placement.rank}"
        parts = pack_parts(result, name)
        size = sum(part.nbytes for part in parts)
        check_size(name, size, "write it to a file system that both reach, and return its path")
        return parts


def folder_for(stack: ExitStack) -> Path:
    """The path of a new folder on this machine, which is removed when the stack is closed."""
    folder = files.home(f"sparkkeras-{uuid.uuid4().hex}")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def report(error: BaseException, client: RankClient) -> None:
    """Report an exception of a rank, or of its worker, to the driver."""
    client.fail(_in_one_line(error), _traceback(error))


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it exited with the code {error.code}" if isinstance(error.code, int) else f"it exited: {error.code}"
    if isinstance(error, SyntaxError):  # whose formatted form begins with the line of the file
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def _traceback(error: BaseException) -> str:
    """The traceback from the user's function on, unless the error has no frame of the user."""
    frames = error.__traceback__
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


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
