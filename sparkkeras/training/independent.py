"""Independent training of several models, the members of an ensemble: each trains in its own task, all in one Spark job.

A trained member is a function of its model, its index and the seed, from which its rows, their order and its dropout masks
are derived. So a task that Spark runs again returns a bit-identical member.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np

from sparkkeras.data.block import Block, concatenate_alike
from sparkkeras.data.dataset import (
    Dataset,
    Results,
    Rows,
    Running,
    Shared,
    TaskContext,
    check_driver_here,
)
from sparkkeras.errors import ConfigurationError, DataError, DivergenceError, counted
from sparkkeras.events import MemberTrained
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.fixed_batch import check_batch_size, check_partitions, check_rows
from sparkkeras.modeling.state import ModelState
from sparkkeras.spark.settings import AS_CONFIGURED
from sparkkeras.training.member_checkpoints import MemberCheckpoints, Trained
from sparkkeras.training.worker_reports import divergence
from sparkkeras.worker.batches import BatchOptions, BatchRange, FitOptions
from sparkkeras.worker.trainer import HeldOut, LocalTrainer, lasting

if TYPE_CHECKING:
    from sparkkeras.training.run import Run

SAMPLING = ("all", "partition", "bootstrap")
"""The ways to choose the rows that a member trains on."""

_BOOTSTRAP = 0xB007

NO_SHARED_ROWS = (
    "rows that all workers need pass through the driver, which Spark Connect does not provide: use validation_split= "
    'instead of validation_data=, sampling="partition" for an ensemble, or run the script on the cluster itself '
    "(spark-submit)."
)

TICK_SECONDS = 0.05
"""The interval at which the driver looks for members that are trained, if it writes checkpoints or reports them."""

Spans = tuple[tuple[int, int | None], ...]
"""For each partition the rows [start, stop); ``None``: to the end."""


@dataclass(frozen=True)
class Member:
    """A packed model to train, and its initial state."""

    archive: ModelArchive
    state: ModelState


@dataclass(frozen=True)
class Diverged:
    """The result of a member whose weights or loss became NaN or infinite in ``epoch``."""

    member: int
    epoch: int
    loss: Any


class Sample(Protocol):
    """Selects the rows of a member."""

    def of(self, member: int, partition: Block | None) -> Block | None:
        """The rows of a member; ``None``: no rows. ``partition`` holds the rows of the partition that its task runs on."""
        ...


@dataclass(frozen=True)
class PartitionRows:
    """The rows ``spans[member]`` of the partition that the member's task runs on."""

    spans: Spans

    def of(self, member: int, partition: Block | None) -> Block | None:
        """The rows of the partition; see `Sample.of`."""
        start, stop = self.spans[member]
        return None if partition is None or stop == start else partition[start:stop]


@dataclass(frozen=True)
class AllRows:
    """The rows ``spans[i]`` of every partition i, the same for all members."""

    parts: tuple[Rows, ...]
    spans: Spans

    def of(self, member: int, partition: Block | None) -> Block | None:
        """The rows of all partitions. Those of a single partition stay memory-mapped; several are concatenated in memory."""
        blocks = [
            block[start:stop]
            for part, (start, stop) in zip(self.parts, self.spans, strict=True)
            if stop != start and (block := part.open()) is not None
        ]
        return concatenate_alike(blocks)


@dataclass(frozen=True)
class BootstrapRows:
    """A bootstrap sample for each member: as many rows as there are in all partitions, drawn with replacement."""

    rows: AllRows
    seed: int

    def of(self, member: int, partition: Block | None) -> Block | None:
        """The bootstrap sample of a member, in the order of the rows; see `Sample.of`."""
        block = self.rows.of(member, partition)
        if block is None:
            return None
        drawn = np.random.default_rng((_BOOTSTRAP, self.seed, member)).integers(block.rows, size=block.rows)
        return block[np.sort(drawn)]


@dataclass(frozen=True)
class ValidationRows:
    """The rows that a member validates on, every ``frequency`` epochs."""

    sample: Sample
    options: BatchOptions
    frequency: int


@dataclass(frozen=True)
class TrainMember:
    """Trains the member with the index of the partition for all epochs."""

    members: tuple[Shared[Member], ...]
    options: Shared[FitOptions]
    epochs: range
    steps_per_epoch: int | None
    sample: Sample
    validation: ValidationRows | None

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Trained | Diverged]:
        """Train the member, and yield its result."""
        partition = concatenate_alike(blocks)
        block = self.sample.of(context.worker, partition)
        if block is None:
            raise DataError(
                f"member {context.worker} has no rows: the data changed between two reads. Cache it, or store it, before "
                "training."
            )
        held_out = self._held_out(context.worker, partition)
        member, options = self.members[context.worker].value, self.options.value
        trainer = LocalTrainer(member.archive, context)
        trainer.check((block,) if held_out is None else (block, held_out.block), options)
        callbacks = lasting(options.callbacks.fresh() if options.callbacks else ())
        batches = -(-block.rows // options.batch_size)
        last = batches if self.steps_per_epoch is None else min(batches, self.steps_per_epoch)
        state, logs = member.state, []
        for epoch in self.epochs:
            validates = self.validation is not None and (epoch + 1) % self.validation.frequency == 0
            replica = trainer.fit(
                state,
                block,
                BatchRange(epoch, block.rows, 0, last),
                options,
                callbacks=callbacks,
                held_out=held_out if validates else None,
            )
            assert replica is not None
            if not replica.is_finite:
                yield Diverged(context.worker, epoch, replica.logs.get("loss"))
                return
            state = replica.state
            logs.append(replica.logs)
            if replica.stopped:
                break
        for callback in callbacks:
            callback.end()
        # The model after fit, not the last replica: callbacks may restore weights, and use_ema overwrites them.
        yield Trained(context.worker, ModelState.take(member.archive.cached()), tuple(logs))

    def _held_out(self, member: int, partition: Block | None) -> HeldOut | None:
        if self.validation is None:
            return None
        block = self.validation.sample.of(member, partition)
        return None if block is None else HeldOut(block, self.validation.options)


class IndependentStrategy:
    """Trains several models on one dataset, all in one Spark job.

    Args:
        sampling: ``"all"``: each member trains on all rows. ``"partition"``: on the rows of its partition; there must be as
            many partitions as members. ``"bootstrap"``: on as many rows as there are, drawn with replacement.
        seed: The seed of the bootstrap samples.
        checkpoints: Has the members that are already trained, and keeps others as soon as they are.
    """

    def __init__(self, sampling: str, seed: int, checkpoints: MemberCheckpoints | None = None) -> None:
        self._sampling, self._seed, self._checkpoints = sampling, seed, checkpoints

    def train(self, run: Run, epochs: range) -> None:
        """Train all members, which get their histories; see `Strategy.train`. Each runs its callbacks on its worker.

        Raises:
            ConfigurationError: A member has no rows, or the weights of all members exceed Spark's limit on results.
            DivergenceError: The weights or the loss of a member became NaN or infinite.
        """
        checkpoints, dataset = self._checkpoints, run.dataset
        states = [ModelState.take(model) for model in run.models] if checkpoints is None else checkpoints.states
        _check_size(states, dataset.max_result_bytes)
        with ExitStack() as stack:
            where, sample, validation = self._rows(run, stack)
            task = TrainMember(
                tuple(
                    stack.enter_context(dataset.share(Member(archive, state)))
                    for archive, state in zip(run.archives, states, strict=True)
                ),
                stack.enter_context(dataset.share(run.options)),
                epochs,
                run.steps_per_epoch,
                sample,
                validation,
            )
            results = where.run(task)
            together = checkpoints is None and not run.events and run.worker_size == AS_CONFIGURED
            found = results.collect() if together else self._train_each(results, run)
        for each in found:
            if isinstance(each, Diverged):
                raise DivergenceError(
                    f"member {each.member} diverged in epoch {each.epoch + 1}: {divergence(each.loss)}. All members keep "
                    "the weights from before this fit. Try a smaller learning rate or clipnorm= in its optimizer, or look "
                    "for extreme values in the data, and for NaN from transform= or on_invalid='allow'."
                )
        trained = {each.member: each for each in found if isinstance(each, Trained)}
        for number, model in enumerate(run.models):
            _finish(model, trained[number], run)

    def _train_each(self, results: Results[Trained | Diverged], run: Run) -> list[Trained | Diverged]:
        """Train the members that are not in a checkpoint, each in a Spark job of its own; keep and report each.

        Spark has jobs wait for slots, but a local master does not know how many cores a member has.
        """
        checkpoints, dataset = self._checkpoints, run.dataset
        trained = {} if checkpoints is None else checkpoints.trained
        found: list[Trained | Diverged] = [*trained.values()]
        for member in trained.values():
            run.events.emit(_reported(member, run))

        def take(of_member: Running[list[Trained | Diverged]]) -> None:
            for each in of_member.result():
                found.append(each)
                if isinstance(each, Trained):
                    run.events.emit(_reported(each, run))
                    if checkpoints is not None:
                        checkpoints.keep(each)

        pending = [number for number in range(len(run.models)) if number not in trained]
        most = len(pending) if run.worker_size == AS_CONFIGURED else dataset.slots
        running: list[Running[list[Trained | Diverged]]] = []
        try:
            while pending or running:
                while pending and len(running) < most:
                    running.append(dataset.background(partial(results.of, pending.pop(0))))
                for each in [each for each in running if each.done]:
                    running.remove(each)  # if it has failed, those that ended with it are still kept below
                    take(each)
                time.sleep(TICK_SECONDS)
        except BaseException:
            _end(running)
            for each in running:
                with suppress(Exception):
                    take(each)
            raise
        return found

    def _rows(self, run: Run, stack: ExitStack) -> tuple[Dataset, Sample, ValidationRows | None]:
        """The dataset that the tasks run on, the rows that each member trains on, and those that it validates on."""
        spans: Spans = tuple((0, rows) for rows in run.split.train)
        held_out = run.split.validation_spans
        where: Dataset = run.dataset
        sample: Sample
        validation_rows: Sample
        if self._sampling == "partition":
            _check_partitions(len(run.models), run.split.train)
            sample, validation_rows = PartitionRows(spans), PartitionRows(held_out)
        else:
            check_driver_here(run.dataset, NO_SHARED_ROWS)
            where = run.dataset.without_rows(len(run.models))
            parts = stack.enter_context(run.dataset.everywhere())
            rows, validation_rows = AllRows(parts, spans), AllRows(parts, held_out)
            sample = rows if self._sampling == "all" else BootstrapRows(rows, self._seed)
        self._check_batches(run, run.split.train, run.options, run.steps_per_epoch)
        validation = run.validation
        if validation is None:
            return where, sample, None
        if validation.spans is not None:
            self._check_batches(run, run.split.validate, validation.options)
        else:
            stored = stack.enter_context(validation.dataset.stored())
            spans = tuple((0, handle.rows) for handle in stored.handles)
            counts = [handle.rows for handle in stored.handles]
            self._check_batches(run, counts, validation.options, together=True)
            check_driver_here(stored, NO_SHARED_ROWS)
            parts = stack.enter_context(stored.everywhere())
            validation_rows = AllRows(parts, spans)
        options = replace(validation.options, in_batches=False)  # members read all batches into one block
        return where, sample, ValidationRows(validation_rows, options, validation.frequency)

    def _check_batches(
        self,
        run: Run,
        rows: Sequence[int | None],
        options: BatchOptions,
        max_batches: int | None = None,
        together: bool = False,
    ) -> None:
        """Check that members with a fixed batch size get whole batches of that size.

        Args:
            run: The run, with the members.
            rows: The number of rows of each partition; ``None`` if it is unknown.
            options: How batches are made of them. Members make their own of those that a function of the user reads.
            max_batches: The largest number of batches that are used; ``None``: all.
            together: Whether each member uses the rows of all partitions also with ``sampling="partition"``.
        """
        purpose, argument = "validation", "validation_batch_size"
        if isinstance(options, FitOptions):
            purpose, argument = "training", "batch_size"
        for model in run.models:
            check_batch_size(model, argument, options.batch_size)
            if self._sampling == "partition" and not together:
                check_partitions(model, rows, purpose, max_batches)
            else:
                total = None if None in rows else sum(each or 0 for each in rows)
                check_rows(model, total, purpose, max_batches)


def _check_partitions(count: int, rows: Sequence[int | None]) -> None:
    filled = sum(each != 0 for each in rows)
    if len(rows) != count or filled < count:
        raise ConfigurationError(
            f'sampling="partition": each of the {count} members needs a partition with training rows, but only {filled} '
            f'of {counted(len(rows), "partition")} have any. Use more rows, fewer members, or sampling="bootstrap".'
        )


def _check_size(states: Sequence[ModelState], bound: int) -> None:
    size = sum(state.nbytes for state in states)
    if bound and size > bound:
        raise ConfigurationError(
            f"the {len(states)} members return {size / 1e9:.2f} GB of weights and optimizer variables, but "
            f"spark.driver.maxResultSize allows {bound / 1e9:.2f} GB for one job: raise it, or train fewer members at a "
            "time and combine them with EnsembleModel."
        )


def _end(running: Sequence[Running[Any]]) -> None:
    """Cancel jobs, and wait until they have ended. One that Spark has not begun yet takes another attempt."""
    while left := [each for each in running if not each.done]:
        for each in left:
            each.cancel()
        time.sleep(TICK_SECONDS)


def _reported(trained: Trained, run: Run) -> MemberTrained:
    epochs = range(run.initial_epoch, run.initial_epoch + len(trained.logs))
    return MemberTrained(trained.member, epochs, trained.logs)


def _finish(model: keras.Model, trained: Trained, run: Run) -> None:
    """Put the trained state and its history into the model."""
    trained.state.put(model)
    history = keras.callbacks.History()
    history.set_model(model)
    history.set_params({"epochs": run.epochs, "steps": None, "verbose": 0})
    history.on_train_begin()
    for epoch, logs in enumerate(trained.logs, run.initial_epoch):
        history.on_epoch_end(epoch, logs)
    model.history = history
