"""`SparkRunner`: a function or a script of the user on the cluster, once for each rank."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparkkeras import arguments
from sparkkeras.arguments import flag, integer, known_arguments, listeners, one_of, optional_integer
from sparkkeras.data.block import describe
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.errors import ConfigurationError, CustomObjectError, StorageError, nearest_name
from sparkkeras.events import EventListener, Events, RunStarted
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.progress.renderer import Progress
from sparkkeras.progress.status_line import FIRST_LOG_SECONDS
from sparkkeras.rpc.options import check_seconds
from sparkkeras.runner.data import source_of, stored_on_driver, stored_on_workers
from sparkkeras.runner.group import RankGroup
from sparkkeras.runner.groups import Ranks, RowsMissingError, run_group
from sparkkeras.runner.hosts import Parts
from sparkkeras.runner.launchers import LocalThreads, TaskLauncher, gpus_of_ranks
from sparkkeras.runner.rank import FunctionCall, RankWork, Script
from sparkkeras.runner.requirements import check_gpus, check_slots, check_static_allocation
from sparkkeras.runner.run_checkpoints import RunCheckpoints
from sparkkeras.sources.frame import Columns
from sparkkeras.sources.source import FrameSource, Source
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.connect import AnyCluster, active_cluster, cluster_of
from sparkkeras.spark.settings import worker_ports
from sparkkeras.worker.device import forking_environment

if TYPE_CHECKING:
    from sparkkeras.checkpoints.store import Checkpoint


class SparkRunner:
    """Runs a function or a Python file on the cluster, once for each rank, each in a process of its own.

    The processes have the environment variables in which TensorFlow, JAX, Keras and PyTorch look for the other ranks, and
    `sparkkeras.runner.context` gives them their rank, their rows, and a few operations with the other ranks.

    Args:
        num_workers: The number of ranks.
        use_gpu: Whether the ranks may use GPUs: those that Spark assigns to their tasks
            (``spark.task.resource.gpu.amount``), with ``local_mode`` those of this machine. If not, they see none.
        gpus_per_worker: The number of GPUs for each rank, which Spark assigns by a resource profile for this job. ``None``:
            what ``spark.task.resource.gpu.amount`` says.
        barrier: Whether all ranks start together and know each other's addresses. Otherwise they are independent: Spark may
            run them one after the other, and runs a rank again whose worker was lost.
        port: The port of the driver to which the ranks connect; ``None`` or 0: any free one. The ranks themselves listen on
            the ports of Spark's setting ``spark.sparkkeras.worker.ports``, by default on any.
        local_mode: Whether the ranks run on the driver's machine, without executors. Spark is not needed then, unless the
            data is an RDD or a DataFrame.
        verbose: 0: silent, 1: the output of the ranks, and a line with their progress, 2: the output only.

    Raises:
        ConfigurationError: A value is out of range, or arguments conflict.
        UnknownArgumentError: An argument is not known.

    Example::

        def train(epochs):
            ranks = context()
            torch.distributed.init_process_group("gloo")
            ...
            return loss

        losses = SparkRunner(num_workers=2).run(train, 10, data=df, features=["a", "b"], label="c")
    """

    @known_arguments
    def __init__(
        self,
        num_workers: int,
        *,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        barrier: bool = True,
        port: int | None = None,
        local_mode: bool = False,
        verbose: Literal[0, 1, 2] = 1,
    ) -> None:
        self.num_workers = integer("num_workers", num_workers)
        self.use_gpu = flag("use_gpu", use_gpu)
        self.gpus_per_worker = optional_integer("gpus_per_worker", gpus_per_worker)
        self.barrier = flag("barrier", barrier)
        self.port = arguments.optional(arguments.port)("port", port) or 0
        self.local_mode = flag("local_mode", local_mode)
        self.verbose = one_of("verbose", verbose, (0, 1, 2))
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ConfigurationError(f"gpus_per_worker={gpus_per_worker} requires use_gpu=True.")

    def __repr__(self) -> str:
        names = ("use_gpu", "gpus_per_worker", "barrier", "port", "local_mode")
        return f"SparkRunner({self.num_workers}, {', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def run(
        self,
        function_or_file: Callable[..., Any] | str | os.PathLike[str],
        /,
        *args: Any,
        data: Any = None,
        features: Columns | None = None,
        label: Columns | None = None,
        timeout: float | None = None,
        checkpoint: Checkpoint | None = None,
        resume: bool = False,
        monitor: EventListener | Sequence[EventListener] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function or a Python file once for each rank.

        What the ranks write appears here line by line, after the number of the rank. If a rank fails, the others are ended.

        Args:
            function_or_file: A function, which is called with ``args`` and ``kwargs``; or the path of a Python file on the
                driver, which is run as a program with ``args`` as its command line.
            *args: Positional arguments, the same for all ranks.
            data: The rows to distribute among the ranks, which read them with ``context().batches``: a DataFrame, an RDD of
                ``x`` or ``(x, y)``, an array ``x``, or a pair ``(x, y)`` of arrays, dicts or tuples of arrays.
            features: The columns of a DataFrame with the features: a name, a list of names, or a dict of these.
            label: The columns of a DataFrame with the labels; ``None``: the rows have no labels.
            timeout: How long the ranks may run after all have started, in seconds; ``None``: as long as they want.
            checkpoint: Where ``context().save(epoch, state)`` writes what rank 0 passes, and how many are kept.
            resume: Whether ``context().restored()`` returns what was saved last by an earlier run, if there was one.
            monitor: A `Monitor`, or other objects with a method ``on_event`` (see `sparkkeras.events`), which gets the
                output and the states of the ranks.
            **kwargs: Arguments of the function by name. Those of a parameter with one of the names above are bound with
                ``functools.partial``.

        Returns:
            The results of the function by rank, 1 GiB each at most; of a file, ``None`` for each rank.

        Raises:
            WorkerError: A rank failed; has the traceback, and the last 100 lines of the rank's output.
            WorkerTimeoutError: The ranks did not end in time; also a ``TimeoutError``.
            ConfigurationError: An argument is out of range, arguments conflict, Spark has too few slots, or there are
                checkpoints and ``resume`` is ``False``.
            CustomObjectError: The function or an argument cannot be pickled.
            DataError: The data is malformed.
            StorageError: The file, or checkpoints, cannot be read.
            ClusterError: Spark is not available, or lacks a requirement.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        if data is None and (features is not None or label is not None):
            named = "features" if features is not None else "label"
            raise ConfigurationError(f"{named}= names columns of data, which is missing: pass data= with a DataFrame.")
        progress = Progress(self.verbose, FIRST_LOG_SECONDS)
        events = Events([*([progress] if self.verbose else []), *listeners("monitor", monitor)])
        work = _work_of(function_or_file, args, kwargs, _own_arguments())
        checkpoints = RunCheckpoints.open(checkpoint, resume, self.barrier)
        source = None if data is None else source_of(data, features, label)
        with (
            events.running(RunStarted("function", _name(function_or_file), self._described())),
            watching_spark(events),
            nullcontext() if checkpoints is None else checkpoints.writing(),
        ):
            try:
                return self._run(work, source, timeout, checkpoints, events, progress)
            except RowsMissingError:
                return self._run(work, source, timeout, checkpoints, events, progress, moves_rows=True)

    def _described(self) -> dict[str, Any]:
        """The settings, for display."""
        names = ("num_workers", "local_mode", "use_gpu", "gpus_per_worker", "barrier")
        return {name: getattr(self, name) for name in names}

    def _run(
        self,
        work: RankWork,
        source: Source | None,
        timeout: float | None,
        checkpoints: RunCheckpoints | None,
        events: Events,
        progress: Progress,
        moves_rows: bool = False,
    ) -> list[Any]:
        group = RankGroup(self.num_workers, together=self.barrier)
        with ExitStack() as stack:
            if self.local_mode:
                ranks = self._on_driver(stack, group, work, source)
            else:
                ranks = self._on_cluster(stack, work, source, moves_rows)
            return run_group(
                *(group, ranks, timeout),
                port=self.port,
                checkpoints=checkpoints,
                events=events,
                refresh=progress.refresh,
            )

    def _on_driver(self, stack: ExitStack, group: RankGroup, work: RankWork, source: Source | None) -> Ranks:
        gpus = gpus_of_ranks(self.num_workers, self.gpus_per_worker) if self.use_gpu else ((),) * self.num_workers
        parts = Parts() if source is None else stack.enter_context(stored_on_driver(source, self.num_workers))
        return Ranks(LocalThreads(group, gpus), LocalShared(work), parts)

    def _on_cluster(self, stack: ExitStack, work: RankWork, source: Source | None, moves_rows: bool) -> Ranks:
        if isinstance(source, FrameSource):
            cluster = cluster_of(source.frame.sparkSession, forking_environment)
        else:
            cluster = active_cluster(forking_environment, _WITHOUT_SPARK)
        everywhere = moves_rows or not self.barrier  # a rank that starts alone cannot be stopped for another one's rows
        if source is not None and everywhere and not cluster.is_driver_here:
            raise ConfigurationError(
                "with Spark Connect, rows stay on the workers that have read them, and Spark runs ranks elsewhere if they "
                "do not start together (barrier=False) or these workers are busy: leave slots free, or read the rows in the "
                "function, with context().rank and context().world_size."
            )
        cluster = self._checked(cluster)
        if isinstance(work, Script) and not (cluster.is_local and cluster.is_driver_here):
            work = work.with_source()
        rows = nullcontext(Parts()) if source is None else stored_on_workers(source, self.num_workers, everywhere)
        # A script may set variables for libraries before it imports them.
        forks = isinstance(work, FunctionCall) and cluster.is_driver_here
        tasks = TaskLauncher(cluster, forks, _WITHOUT_CONNECTION, self.use_gpu)
        return Ranks(tasks, stack.enter_context(cluster.share(work)), stack.enter_context(rows))

    def _checked(self, cluster: AnyCluster) -> AnyCluster:
        """The cluster with tasks for the ranks. Those that Spark cannot start are rejected before any rows are read."""
        settings = cluster.settings
        worker_ports(settings)
        if self.barrier:
            check_static_allocation(settings)
        if self.use_gpu:
            check_gpus(settings, self.num_workers, self.gpus_per_worker)
        cluster = cluster.with_task(None, self.gpus_per_worker, "worker")
        if self.barrier:
            check_slots(cluster, settings, self.num_workers)
        return cluster


_WITHOUT_CONNECTION = (
    "the ranks of SparkRunner connect to the client: run it on a machine that they reach, on the cluster itself "
    "(spark-submit), or with all ranks on this machine: SparkRunner(num_workers, local_mode=True)."
)
"""What to do if the workers cannot connect to this process, for the message."""


_WITHOUT_SPARK = "Without Spark, ranks run on this machine: SparkRunner(num_workers, local_mode=True)."


def _own_arguments() -> list[str]:
    """The arguments of `SparkRunner.run` that are not those of the function."""
    parameters = inspect.signature(SparkRunner.run).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def _name(function_or_file: Any) -> str:
    """The name of a function, or of a file."""
    if isinstance(function_or_file, (str, os.PathLike)):
        return Path(function_or_file).name
    return str(getattr(function_or_file, "__name__", type(function_or_file).__name__))


def _work_of(function_or_file: Any, args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[str]) -> RankWork:
    """The work of each rank; see `SparkRunner.run`.

    Args:
        function_or_file: The function, or the path of the file.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        others: The arguments of ``run`` that are not passed on, for messages.

    Raises:
        ConfigurationError: It is neither a function nor a path, or does not take these arguments.
        CustomObjectError: The function or an argument cannot be pickled.
        StorageError: The file cannot be read.
    """
    if isinstance(function_or_file, (str, os.PathLike)):
        return _script(Path(function_or_file), args, kwargs)
    if not callable(function_or_file):
        raise ConfigurationError(
            f"run received {describe(function_or_file)}; expected a function, or the path of a Python file."
        )
    return _function_call(function_or_file, args, kwargs, others)


def _script(path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Script:
    if kwargs:
        raise ConfigurationError(
            f"{next(iter(kwargs))}= is an argument by name, which a Python file does not take: pass its command line as "
            'positional arguments, such as run("train.py", "--epochs", 3).'
        )
    for value in args:
        if not isinstance(value, (str, int, float, os.PathLike)):
            raise ConfigurationError(f"{value!r} is no command-line argument: expected strings, numbers and paths.")
    try:
        path.open("rb").close()
    except FileNotFoundError as error:
        raise StorageError(f"there is no file {str(path)!r} (working directory {str(Path.cwd())!r}).") from error
    except IsADirectoryError as error:
        raise StorageError(f"{str(path)!r} is a folder: expected the path of a Python file.") from error
    except OSError as error:
        raise StorageError(f"the file {str(path)!r} cannot be read: {error.strerror}.") from error
    return Script(str(path.resolve()), None, tuple(map(str, args)))


def _function_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[str]
) -> FunctionCall:
    name = f"the function {getattr(function, '__name__', type(function).__name__)}"
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs)
    except ValueError:
        pass  # a builtin without a signature
    except TypeError as error:
        raise ConfigurationError(
            f"run received other arguments than {name} takes: {error}. {_advice(signature, kwargs, others)}"
        ) from error
    try:
        return FunctionCall(ByValue.dump((function, args, kwargs), name))
    except CustomObjectError:
        ByValue.dump(args, "args")  # names what cannot be pickled
        ByValue.dump(kwargs, "kwargs")
        ByValue.dump(function, name)
        raise


def _advice(signature: inspect.Signature, kwargs: Mapping[str, Any], others: Sequence[str]) -> str:
    """What to do about arguments that a function does not take."""
    unpacked = [f"{each}=" for each in ("args", "kwargs") if each in kwargs]
    if unpacked:
        return (
            f"It received {' and '.join(unpacked)}, whose values it does not unpack: pass them as run(function, 1, name=2)."
        )
    taken = [each for each in others if each in signature.parameters]
    if taken:
        own = taken[0]
        return (
            f"{own}= is an argument of run itself, which is not passed on: bind it, functools.partial(function, {own}=...)."
        )
    unknown = [each for each in kwargs if each not in signature.parameters]
    nearest = nearest_name(unknown[0], [*others, *signature.parameters]) if unknown else ""
    return f"Pass them as run(function, 1, name=2). Arguments of run itself are {', '.join(others)}.{nearest}"
