"""All-reduce training: the workers average their gradients at every step.

One Spark job, a barrier stage, runs for all epochs. Each worker starts a process, its rank (`sparkkeras.runner`). The ranks
form a group of the backend's collective operations (`sparkkeras.worker.collectives`) and train in step
(`sparkkeras.worker.lockstep`), so their replicas are equal at the end of an epoch. Then each rank evaluates its validation
rows and sends the driver its metrics, rank 0 also the state. The driver puts the state into the model, runs callbacks, and
answers whether to stop, and which values of the state the callbacks have changed.

If checkpoints are written in the middle of epochs, an epoch is trained in rounds of so many steps. At the end of each, the
ranks do the same, without validation and callbacks. A round is a function of its state and its number, like an epoch.

If a rank fails, the others cannot continue. Then all are started again from the end of the last round, with as many
workers as there are slots; from the beginning of the epoch if these are not as many as before.
"""

from __future__ import annotations

import functools
import pickle
import shutil
import sys
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np

from sparkkeras.data import files
from sparkkeras.data.block import Block, BlockSpec
from sparkkeras.data.dataset import BlockStream, Rows, Shared, TaskContext, common_spec
from sparkkeras.data.files import Handle
from sparkkeras.errors import ClusterError, ConfigurationError, DriverConnectionError, WorkerError, counted, warn
from sparkkeras.events import EpochRestarted, Events, Incident, RowsTrained, WorkersChanged
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import compiled_with
from sparkkeras.modeling.metrics import MetricState
from sparkkeras.modeling.reductions import check_mean_over_rows
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.exchange import EvaluationReport
from sparkkeras.rpc.addresses import split_address
from sparkkeras.runner.group import RankGroup
from sparkkeras.runner.groups import RowsMissingError, run_group
from sparkkeras.runner.rank import RankMain
from sparkkeras.runner.requirements import check_static_allocation
from sparkkeras.runner.service import VALUE_BYTES, RankClient, pack_parts, unpack_parts
from sparkkeras.spark.connect import active_settings
from sparkkeras.spark.job_errors import package_error
from sparkkeras.spark.settings import worker_ports
from sparkkeras.spark.slots import holding_slots
from sparkkeras.training.allreduce_hosts import RankHosts
from sparkkeras.training.recorder import EpochPart
from sparkkeras.training.validation import ValidationPlan, validation_plan
from sparkkeras.training.worker_reports import Report, add_histories, check_finite, warn_of_steps
from sparkkeras.weights import Array, Flat
from sparkkeras.worker.batch_reader import WorkerBatches
from sparkkeras.worker.batches import BatchRange, FitOptions
from sparkkeras.worker.collectives import compiles_collectives, hold_port, join
from sparkkeras.worker.device import silenced
from sparkkeras.worker.lockstep import Lockstep, batches_before
from sparkkeras.worker.trainer import LocalTrainer, Replica, lasting

if TYPE_CHECKING:
    from sparkkeras.training.run import Run

JOIN_SECONDS = 60.0
"""How long the ranks of a group wait for each other before they train."""

UNANSWERED_SECONDS = 20.0, 55.0
"""How long their machines may leave connections unanswered: when training starts, and later, when a link may be cut."""


@dataclass(frozen=True)
class RankEpoch:
    """What a rank sends to the driver at the end of an epoch, or of a round of it.

    Attributes:
        report: The report on its rows; ``None`` if it has none.
        metrics: The state of its metrics over its rows.
        validation: The report on its validation rows; ``None`` if it has none, or the epoch continues.
        state: The state of the model, which is the same on all ranks; only from rank 0.
        stopped: Whether a callback on a worker stopped training in this epoch.
    """

    report: Report | None
    metrics: MetricState
    validation: EvaluationReport | None
    state: ModelState | None
    stopped: bool


@dataclass(frozen=True)
class Change:
    """The values of a vector that callbacks on the driver have changed.

    Attributes:
        places: The indices of the changed values; ``None``: all.
        values: The new values.
        integer_variables: The integer variables.
    """

    places: Array | None
    values: Array
    integer_variables: tuple[Array, ...]

    @classmethod
    def between(cls, before: Flat, after: Flat) -> Change:
        """The change from one vector to another."""
        places = np.flatnonzero(before.vector != after.vector)
        if 3 * len(places) > after.vector.size:  # with their indices, they would be larger
            return cls(None, after.vector, after.integer_variables)
        return cls(places, after.vector[places], after.integer_variables)

    def applied(self, before: Flat) -> Flat:
        """The vector after the change."""
        if self.places is None:
            return Flat(self.values, self.integer_variables)
        vector = before.vector.copy() if len(self.places) else before.vector
        vector[self.places] = self.values
        return Flat(vector, self.integer_variables)


@dataclass(frozen=True)
class EpochAnswer:
    """The driver's answer to all ranks at the end of an epoch.

    Attributes:
        stop: Whether training ends.
        weights: How callbacks have changed the weights.
        optimizer: How they have changed the optimizer variables, such as the learning rate.
    """

    stop: bool
    weights: Change
    optimizer: Change


@dataclass(frozen=True)
class RankPlan:
    """The settings that all ranks share.

    Attributes:
        epochs: The epochs to train.
        partitions: The partitions of each rank.
        rows: The number of training rows of each partition; ``None``: all rows of a stream.
        spec: The spec of the rows, for ranks without any.
        batches: The largest number of batches of a rank in an epoch; ``sys.maxsize`` if nothing limits it.
        gradient_dtype: See `Lockstep`.
        validation_frequency: The number of epochs from one validation to the next.
        window: The number of steps of a round; ``None``: all of an epoch.
        first: The number of steps of the first epoch that need not be trained again.
        patience: How long machines may leave connections unanswered.
    """

    epochs: range
    partitions: tuple[tuple[int, ...], ...]
    rows: tuple[int | None, ...]
    spec: BlockSpec
    batches: int
    gradient_dtype: str | None
    validation_frequency: int
    window: int | None = None
    first: int = 0
    patience: float = UNANSWERED_SECONDS[0]

    def last(self, first: int) -> int:
        """The end of the round that begins after ``first`` steps; `batches` if the epoch ends with it."""
        return self.batches if self.window is None else min(first + self.window, self.batches)

    def own_batches(self, first: int, rows: int | None, batch_size: int) -> tuple[int, int]:
        """The batches of a rank with so many rows in the round that begins after ``first`` steps, as (first, last)."""
        last = self.last(first)
        if self.window is None or rows is None:  # an epoch is one round, as always with streams
            return first, last
        own = min(-(-rows // batch_size), self.batches)
        return batches_before(first, own, self.batches), batches_before(last, own, self.batches)


@dataclass(frozen=True)
class Streams:
    """The batches of several streams, one of each in turn: a `BlockStream`."""

    parts: tuple[BlockStream, ...]

    def blocks(self, epoch: int = 0, seed: int = 0) -> Generator[Block, None, None]:
        """Read the batches of an epoch."""
        with ExitStack() as stack:
            waiting = deque(stack.enter_context(closing(part.blocks(epoch, seed))) for part in self.parts)
            while waiting:
                blocks = waiting.popleft()
                block = next(blocks, None)
                if block is not None:
                    yield block
                    waiting.append(blocks)


@dataclass(frozen=True)
class TrainInStep:
    """Trains all epochs in the process of a rank: a `sparkkeras.runner.rank.Work`."""

    archive: Shared[ModelArchive]
    state: Shared[ModelState]
    options: Shared[FitOptions]
    plan: RankPlan
    validation: ValidationPlan | None

    def __call__(self, rank: RankMain, client: RankClient) -> None:
        """Train."""
        number = rank.placement.rank
        addresses = [split_address(address) for address in rank.addresses]
        with closing(hold_port(*addresses[number])) as held, ExitStack() as stack:
            with silenced():
                group = join(number, addresses, held, JOIN_SECONDS, self.plan.patience)
            trainer = LocalTrainer(self.archive.value, TaskContext(number, rank.placement.attempt, rank.placement.cores))
            lockstep = Lockstep(group, self.plan.gradient_dtype)
            self._train(trainer, lockstep, _RankRows.open(self.plan, number, rank.parts, stack), client)
            group.leave()

    def _train(self, trainer: LocalTrainer, lockstep: Lockstep, part: _RankRows, client: RankClient) -> None:
        plan, options, state = self.plan, self.options.value, self.state.value
        callbacks = lasting(list(options.callbacks.fresh())) if options.callbacks else []
        epoch, first, begins, stopped = plan.epochs.start, plan.first, True, False
        for number in count(1):
            last = plan.last(first)
            for callback in callbacks:
                callback.begins, callback.ends = begins, last == plan.batches
            batches = BatchRange(epoch, part.count, *plan.own_batches(first, part.count, options.batch_size))
            replica = trainer.fit(state, part.rows, batches, options, callbacks=callbacks, lockstep=lockstep)
            assert replica is not None, "with lockstep there is always a replica"
            stopped |= replica.stopped
            result = self._result(trainer, replica, part, epoch, last == plan.batches, stopped)
            packed = pack_parts(result, f"the epoch of rank {replica.worker}")
            answer: EpochAnswer | None = pickle.loads(client.ask_driver(number, packed))
            if answer is None:
                state, first, begins = replica.state, last, False
                continue
            if answer.stop:
                break
            state = ModelState(
                answer.weights.applied(replica.state.weights), answer.optimizer.applied(replica.state.optimizer)
            )
            epoch, first, begins, stopped = epoch + 1, 0, True, False
        for callback in callbacks:
            callback.end()

    def _result(
        self, trainer: LocalTrainer, replica: Replica, part: _RankRows, epoch: int, is_end: bool, stopped: bool
    ) -> RankEpoch:
        validation = None
        if is_end and self.validation is not None and (epoch + 1) % self.plan.validation_frequency == 0:
            found = trainer.evaluate(replica.state, part.held_out(self.validation), self.validation.options)
            validation = None if found is None else found[0]
        return RankEpoch(
            Report.of(replica) if replica.rows else None,
            replica.metrics,
            validation,
            replica.state if replica.worker == 0 else None,
            stopped,
        )


@dataclass(frozen=True)
class _RankRows:
    """The rows of a rank.

    Attributes:
        rows: Those to train on, perhaps followed by those to validate on.
        count: The number of those to train on; ``None``: all of a stream.
        partitions: The index and the rows of each partition of this rank.
    """

    rows: Block | BlockStream
    count: int | None
    partitions: tuple[tuple[int, Block | BlockStream], ...]

    @classmethod
    def open(cls, plan: RankPlan, rank: int, parts: Sequence[Rows], stack: ExitStack) -> _RankRows:
        """Open the parts of a rank. Several blocks are joined in a file, which the stack removes."""
        empty = plan.spec.zeros()[:0]
        opened = [part if isinstance(part, WorkerBatches) else part.open() or empty for part in parts]
        partitions = tuple(zip(plan.partitions[rank], opened, strict=True))
        streams = tuple(rows for rows in opened if not isinstance(rows, Block))
        if streams:
            return cls(streams[0] if len(streams) == 1 else Streams(streams), None, partitions)
        counts = [plan.rows[partition] or 0 for partition in plan.partitions[rank]]
        blocks = [rows for rows in opened if isinstance(rows, Block)]
        if len(blocks) == 1:
            return cls(blocks[0], counts[0], partitions)
        # In this worker's folder of the rows, which is removed with them, also if this process is killed.
        names = (Path(part.directory).parent.name for part in parts if isinstance(part, Handle) and part.directory)
        new = uuid.uuid4().hex
        folder = files.home(next(names, f"sparkkeras-{new}")) / f"joined-{new}"
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        to_train = (block[:count] for block, count in zip(blocks, counts, strict=True) if count)
        return cls(files.write(to_train, rank, folder).open() or empty, sum(counts), partitions)

    def held_out(self, validation: ValidationPlan) -> Iterator[Block]:
        """The rows to validate on."""
        return (block for partition, rows in self.partitions for block in validation.blocks(partition, rows))


def check_all_reduce(model: keras.Model) -> None:
    """Reject what all-reduce training cannot do, before data is read.

    Raises:
        ModelError: The loss is not a mean over rows.
        ConfigurationError: Spark cannot start all workers together, or a setting of ports is invalid.
    """
    check_mean_over_rows(model)
    settings = active_settings()
    if settings is not None:
        check_static_allocation(settings, 'use mode="synchronous".')
        worker_ports(settings)
    if compiled_with(model).get("jit_compile") is True and not compiles_collectives():
        warn(
            f"the model {model.name!r} was compiled with jit_compile=True, but XLA does not compile TensorFlow's "
            'collectives: several workers train it without XLA. To train with XLA, use mode="synchronous".'
        )


def _without_padding(model: keras.Model, rank: RankEpoch, steps: int) -> Report:
    """The report of a rank, without logs that are about padding.

    If the rank had fewer batches than ``steps``, its last step may have been padding. What a custom ``train_step`` returned
    there becomes ``None``, unless it is a metric of the model, which is computed anew.
    """
    report = rank.report
    assert report is not None
    if report.steps >= steps:
        return report
    found = metrics.results(model, rank.metrics)
    if found.keys() == report.logs.keys():
        return report
    known = metrics.updated(model, rank.metrics) & found.keys()
    return replace(report, logs={name: found[name] if name in known else None for name in report.logs})


class AllReduceStrategy:
    """The strategy of all-reduce training; see the module docstring."""

    def train(self, run: Run, epochs: range) -> None:
        """Train; see `Strategy.train`.

        Raises:
            DriverConnectionError: With Spark Connect, the workers cannot connect to this process.
        """
        if epochs:
            run.callbacks.on_epoch_begin(epochs.start)
            _RankTraining(run, epochs).train()


@dataclass
class _Restarts:
    """The restarts of a run, and the decision whether there is another one.

    Attributes:
        limit: The largest number of restarts.
        events: Gets each restart.
        count: Their number so far.
        reason: The failure before the last restart.
    """

    limit: int
    events: Events
    count: int = 0
    reason: WorkerError | None = None
    _causes: set[tuple[int | None, str]] = field(default_factory=set)

    def add(self, error: WorkerError, epoch: int | None, batches: int = 0) -> None:
        """Count a restart after a failure, and warn.

        Args:
            error: The failure.
            epoch: The number of the epoch to continue with, from 1; ``None``: no epochs are left.
            batches: The number of batches of this epoch that are not trained again.

        Raises:
            WorkerError: No restart is left, or none would help: the epoch has failed with the same error before.
            SparkKerasError: A worker raised an error of this package, which would occur again or has.
        """
        raised = package_error(error.worker_traceback)
        if raised is not None and not isinstance(raised, DriverConnectionError):  # the driver may have been stopped
            raise raised from error
        cause = epoch, error.worker_traceback.rstrip().rpartition("\n")[2]
        if "NeverMetError" in cause[1]:
            cause = epoch, "NeverMetError"  # the ports in its message are new ones
        recurs = not _is_loss(error) and cause in self._causes
        self._causes.add(cause)
        if recurs or epoch is None or self.count >= self.limit:
            after = f" (after {counted(self.count, 'restart')}, max_restarts={self.limit})" if self.count else ""
            if recurs:
                after = f" (for the second time in epoch {epoch})"
            if raised is not None:
                raise raised from error
            raise WorkerError(f"{error}{after}", error.worker_traceback) from error
        self.count, self.reason = self.count + 1, error
        where = f"epoch {epoch}, after {counted(batches, 'batch')}" if batches else f"the beginning of epoch {epoch}"
        message = f"training continues from {where} (restart {self.count} of at most {self.limit}), since {_reason(error)}"
        self.events.emit(Incident("restart", message))
        warn(message)


def _reason(error: WorkerError) -> str:
    """What has happened to a rank, in one line."""
    return str(error).splitlines()[0].removesuffix(" The traceback:")


def _is_loss(error: WorkerError) -> bool:
    """Whether a rank was lost, of which the others only know that it is gone."""
    return not error.worker_traceback or "PeerLostError" in _reason(error)


class _RankTraining:
    """The driver's side of one run. Only `_size` and `_run_group` use Spark."""

    def __init__(self, run: Run, epochs: range) -> None:
        self._run, self._epochs = run, epochs
        self._part = run.recorder.begin_epoch(epochs.start)
        self._is_resumed = self._part.batches > 0  # in the middle of this epoch, whose first state is not known
        self._state = self._at_begin = ModelState.take(run.model)
        self._stopped = self._has_met = False
        self._started = 0.0
        self._raised: BaseException | None = None

    def train(self) -> None:
        """Train all epochs; start again after failures.

        Raises:
            WorkerError: A worker failed once more often than restarts are allowed, or raised the same error again.
            SparkKerasError: A worker raised an error of this package, which would occur again.
        """
        restarts, moves_rows = _Restarts(self._run.max_restarts, self._run.events), False
        while True:
            try:
                error = self._start(moves_rows)
            except RowsMissingError:
                if moves_rows:
                    raise ClusterError(
                        "the files with the rows were removed from Spark's temporary folder (spark.local.dir) during "
                        "training, or, with Spark Connect, other jobs keep the executors that have them busy. Exclude that "
                        "folder from any cleanup, leave slots free, and try again."
                    ) from restarts.reason
                moves_rows = True
                continue
            except (ClusterError, ConfigurationError) as rejected:
                if restarts.reason is None or rejected is self._raised:
                    raise
                raise rejected from restarts.reason  # too few slots are left, or the rows are too large to be moved after it
            if error is None:
                return
            if self._is_over and _is_loss(error):
                warn(f"after the last epoch, {_reason(error)}")
                return
            restarts.add(error, None if self._is_over else self._epochs.start + 1, self._part.batches)

    @property
    def _is_over(self) -> bool:
        return self._stopped or not self._epochs

    def _start(self, moves_rows: bool) -> WorkerError | None:
        """Train the remaining epochs with as many workers as possible; returns the error of a worker that failed.

        Args:
            moves_rows: Whether workers have not found their rows.
        """
        run, size = self._run, self._size()
        if self._part.batches and self._part.workers != size:  # its batches are those of other workers
            if self._is_resumed:
                warn(
                    f"training continues with {counted(size, 'worker')} in the middle of an epoch that had "
                    f"{counted(self._part.workers, 'worker')}: the first {counted(self._part.batches, 'batch')} of epoch "
                    f"{self._part.epoch + 1} are trained again."
                )
            self._part, self._state = EpochPart(self._part.epoch), self._at_begin
        plan = self._plan = self._planned(size)
        training = sum(any(run.split.train[part] != 0 for part in parts) for parts in plan.partitions)
        run.events.emit(WorkersChanged(training, [run.rows_of_epoch(parts) for parts in plan.partitions]))
        run.events.emit(EpochRestarted(sum(report.rows for report in self._part.reports)))
        error = self._run_group(plan, moves_rows)
        if error is not None and error is self._raised:  # by a callback
            raise error
        return error

    @functools.cached_property
    def _hosts(self) -> RankHosts:
        return RankHosts.of(self._run.dataset)

    def _size(self) -> int:
        """The number of ranks that can run now."""
        return self._hosts.size()

    def _run_group(self, plan: RankPlan, moves_rows: bool) -> WorkerError | None:
        """Run a group of ranks; see `_start`.

        After an error, contexts do not remove shared values: with Spark Connect, that query would have the rows of a lost
        executor read again on those that are left, before another one has replaced it.
        """
        run, dataset, size = self._run, self._run.dataset, len(plan.partitions)
        failure: WorkerError | None = None
        try:
            with ExitStack() as stack:
                work = TrainInStep(
                    stack.enter_context(dataset.share(run.archive)),
                    stack.enter_context(dataset.share(self._state)),
                    stack.enter_context(dataset.share(run.options)),
                    plan,
                    validation_plan(run, stack),
                )
                ranks = stack.enter_context(self._hosts.ranks(work, size, moves_rows))
                self._started = time.perf_counter()
                largest = max(VALUE_BYTES, self._state.nbytes + VALUE_BYTES // 4)
                try:
                    run_group(RankGroup(size), ranks, answer=self._answer, port=run.server.port, max_value=largest)
                except WorkerError as error:
                    failure = error
                    raise
        except WorkerError as error:
            if error is not failure:
                raise
        return failure

    def _planned(self, size: int) -> RankPlan:
        run, number = self._run, self._run.dataset.num_partitions
        spec = common_spec(run.dataset.handles)
        assert spec is not None, "there are rows"
        partitions = tuple(tuple(range(number)[rank::size]) for rank in range(size))
        batches, window = sys.maxsize if run.steps_per_epoch is None else run.steps_per_epoch, run.recorder.every_steps
        if window is not None:
            most = max(sum(run.split.train[part] or 0 for part in parts) for parts in partitions)
            batches = min(batches, -(-most // run.options.batch_size))
        return RankPlan(
            epochs=self._epochs,
            partitions=partitions,
            rows=run.split.train,
            spec=spec,
            batches=batches,
            gradient_dtype=run.gradient_dtype,
            validation_frequency=1 if run.validation is None else run.validation.frequency,
            window=window,
            first=self._part.batches,
            patience=UNANSWERED_SECONDS[self._has_met],
        )

    def _answer(self, ended: list[list[memoryview]]) -> bytes:
        """End a round, and answer the ranks."""
        self._has_met = True
        try:
            with holding_slots(len(ended) * self._run.dataset.slots_per_task):
                return pickle.dumps(self._end_round([unpack_parts(parts) for parts in ended]), 5)
        except BaseException as error:
            self._raised = error
            raise

    def _end_round(self, ranks: list[RankEpoch]) -> EpochAnswer | None:
        """End a round, and the epoch if it ends with it; ``None``: the ranks continue with the next round."""
        run, model, plan, part = self._run, self._run.model, self._plan, self._part
        trained = [each.report for each in ranks if each.report is not None]
        # Streams that end earlier than others may end with padding; the last batch of stored rows is in the last step.
        most = max(report.steps for report in trained) if None in plan.rows else 0
        check_finite([report for report in trained if report.steps >= most], part.epoch, "epoch", in_step=True)
        state = ranks[0].state
        assert state is not None, "rank 0 sends it"
        startup = time.perf_counter() - self._started - max(report.seconds for report in trained) if self._started else 0.0
        self._started = 0.0
        last = plan.last(part.batches)
        is_end = last == plan.batches
        done = 1.0 if is_end else last / plan.batches
        run.events.emit(RowsTrained(sum(report.rows for report in trained), done, max(0.0, startup)))
        reports = (_without_padding(model, each, most) for each in ranks if each.report is not None)
        so_far = [part.metrics] if part.reports else []
        self._part = EpochPart(
            part.epoch,
            last,
            metrics.merge([*so_far, *(each.metrics for each in ranks if each.report is not None)]),
            (*part.reports, *reports),
            len(ranks),
            part.stopped or any(each.stopped for each in ranks),
        )
        if is_end:
            return self._end_epoch(self._part, state, ranks)
        self._state = state
        run.recorder.end_round(self._part, state)
        return None

    def _end_epoch(self, part: EpochPart, state: ModelState, ranks: list[RankEpoch]) -> EpochAnswer:
        run, model, epoch = self._run, self._run.model, part.epoch
        state.put(model)
        complete = [report for report in part.reports if None not in report.logs.values()]
        logs = metrics.logs(model, part.metrics, complete or part.reports)
        add_histories(run, epoch, part.reports)
        if epoch == run.initial_epoch:
            warn_of_steps(run, part.reports)
        validated = [each.validation for each in ranks if each.validation is not None]
        if validated:
            logs |= run.callbacks.validated(partial(metrics.merged_logs, model, validated))
        run.callbacks.on_epoch_end(epoch, logs)
        self._stopped = model.stop_training = model.stop_training or part.stopped
        run.recorder.end_epoch(epoch)
        self._epochs, self._part = self._epochs[1:], EpochPart(epoch + 1)
        if not self._is_over:
            run.callbacks.on_epoch_begin(epoch + 1)
            self._part, self._is_resumed = run.recorder.begin_epoch(epoch + 1), False
        self._state = self._at_begin = ModelState.take(model)
        return EpochAnswer(
            self._is_over,
            Change.between(state.weights, self._state.weights),
            Change.between(state.optimizer, self._state.optimizer),
        )
