"""Asynchronous and hogwild training: one Spark job whose tasks train all epochs and exchange with a server on the driver.

The driver serves the weights, and runs callbacks and progress from the reports of the workers. An epoch ends when all
workers have reported it. The driver keeps a snapshot of the weights at that moment, for callbacks and for the model. Workers
evaluate the snapshot on their validation rows at the end of an epoch of their own, since a second Spark job would wait for
their slots. `parameter_server_worker.py` has their half.

Optimizer variables stay in the worker for the whole run. At the end, the driver's optimizers get their mean, by rows.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sparkkeras.data.dataset import (
    Results,
    Running,
    check_driver_here,
)
from sparkkeras.errors import ConfigurationError, DivergenceError, counted, warn
from sparkkeras.events import EpochMeasured, Incident, RowsTrained, Updates
from sparkkeras.modeling import metrics
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.backends import read
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.optimizers import iterations, set_iterations
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.exchange import Cut, EpochEnd, LedgerProgress, ParameterServerStats, PartitionPlan
from sparkkeras.parameter.ledger import Ledger
from sparkkeras.parameter.rules import RULES, AsynchronousRule, State, UpdateRule
from sparkkeras.parameter.service import ParameterService, PayloadFormat
from sparkkeras.parameter.store import Snapshot, Store, WeightChange
from sparkkeras.rpc.transport import Address
from sparkkeras.spark.connect import NO_DRIVER
from sparkkeras.spark.connectivity import check_connectivity, serving
from sparkkeras.spark.slots import holding_slots
from sparkkeras.training.parameter_server_worker import TrainTask, WorkerPlan
from sparkkeras.training.recorder import EpochPart
from sparkkeras.training.validation import validation_plan
from sparkkeras.training.worker_reports import Mean, add_histories, gathered, merge
from sparkkeras.weights import Array, Flat

if TYPE_CHECKING:
    from sparkkeras.training.run import Run

PROGRESS_SECONDS = 0.25
"""The interval at which the driver updates the progress bar."""

MAX_SETTINGS = 1024
"""How many values callbacks may set besides weights: they are part of each reply, whose size is limited."""

LEAVE_SECONDS = 2.0
"""How long workers may take to end by themselves, before Spark cancels their tasks and ends their processes."""


class ParameterServerStrategy:
    """Trains with a parameter server on the driver; see the module docstring.

    Args:
        locked: Whether updates are applied one after the other (asynchronous), or at the same time (hogwild).
    """

    def __init__(self, locked: bool) -> None:
        self._locked = locked

    def train(self, run: Run, epochs: range) -> None:
        """Train; see `Strategy.train`."""
        settings = model_state.take_settings(run.model)
        if epochs:
            run.callbacks.on_epoch_begin(epochs.start)
        if epochs or run.recorder.workers is not None:
            _ServedTraining(run, epochs, self._locked, settings).train()


class _ServedTraining:
    """The driver's side of one run; ``settings`` are those before the callbacks at the beginning of the first epoch."""

    def __init__(self, run: Run, epochs: range, locked: bool, settings: tuple[float, ...]) -> None:
        self._run, self._epochs = run, epochs
        check_driver_here(run.dataset, NO_DRIVER)
        self._dataset = run.dataset
        run.recorder.begin_epoch(epochs.start)
        self._reached = run.recorder.workers
        self._num_concurrent = max(1, min(run.num_workers, self._dataset.slots))
        self._state = ModelState.take(run.model)
        self._trainable = model_state.trainable_size(run.model)
        self._settings = model_state.take_settings(run.model)
        self._sets_outside = self._reached is not None and self._reached.sets_outside
        self._changes: list[tuple[int, WeightChange]] = []
        options = run.server.options
        self._store = Store(
            self._state.weights, self._trainable, run.rule, run.rule_state, self._num_concurrent, locked=locked
        )
        self._cuts: dict[int, Cut] = {}
        self._ledger = Ledger(
            self._store,
            self._planned(),
            epochs,
            num_concurrent=self._num_concurrent,
            validates=lambda epoch: run.validation is not None and (epoch + 1) % run.validation.frequency == 0,
            max_staleness=options.max_staleness,
            lease_seconds=options.lease_seconds,
            warmup_timeout=options.warmup_timeout,
            on_epoch=self._keep_epoch,
            on_cut=self._keep_cut if run.recorder.records else None,
            clock=time.monotonic,
            reached=self._reached,
        )
        if self._reached is not None:  # workers have those of before callbacks
            self._put_settings(self._settings, settings)
        self._payload_format = PayloadFormat.of(
            self._state.weights, metrics.take(run.model), self._state.optimizer if run.recorder.records else None
        )
        self._service = ParameterService(self._ledger, self._payload_format)
        self._kept: dict[int, tuple[ParameterServerStats, State]] = {}
        self._iterations = tuple(iterations(run.model))
        self._last_stats: ParameterServerStats | None = None
        self._rows = 0
        self._takeovers = 0
        self._warned = False
        self._epoch = epochs.start

    def train(self) -> None:
        """Train the epochs, and put the mean of the workers' optimizer variables into the model."""
        optimizers = self._run_workers() if self._epochs else []
        if self._reached is not None:
            optimizers = self._kept_optimizers()  # also of workers that had finished before the checkpoint
        if optimizers:
            self._put_optimizer(*merge(optimizers).vectors)

    def _run_workers(self) -> list[Mean]:
        run, dataset, server = self._run, self._dataset, self._run.server
        with ExitStack() as stack:
            validation = validation_plan(run, stack)
            address = stack.enter_context(
                serving(server.transport, self._service, server.options, server.port, dataset.driver, run.num_workers)
            )
            stack.callback(self._end)
            if run.server.options.host is not None or not dataset.driver.is_local:
                check_connectivity(dataset, address)
            task = TrainTask(
                stack.enter_context(dataset.share(run.archive)),
                stack.enter_context(dataset.share(self._state)),
                stack.enter_context(dataset.share(run.options)),
                self._plan(address),
                validation,
                {
                    worker: stack.enter_context(dataset.share(each.optimizer))
                    for worker, each in ({} if self._reached is None else self._reached.partitions).items()
                    if each.optimizer
                },
            )
            return self._supervise(dataset.train(task))

    def _kept_optimizers(self) -> list[Mean]:
        """The optimizer variables of all workers at the end of their last epochs."""
        partitions = self._ledger.reached().partitions.values()
        unpack = self._payload_format.unpack_optimizer
        return [Mean(each.rows, (unpack(each.optimizer),)) for each in partitions if each.optimizer]

    def _supervise(self, results: Results[Mean]) -> list[Mean]:
        """Run the job in the background, and callbacks and progress here; return the results of the workers."""
        size, bound = self._state.optimizer.nbytes, self._dataset.max_result_bytes
        workers = self._run.num_workers

        def train() -> list[Mean]:
            try:
                return gathered(results, workers, size, bound)
            finally:
                self._ledger.wake()

        running = [self._dataset.background(train)]
        try:
            stopped = False
            while not stopped:
                for each in running:
                    if each.done:
                        each.result()  # raise an error at once
                with holding_slots(self._num_concurrent * self._dataset.slots_per_task):
                    stopped = self._stopped(running)
                for worker in self._ledger.pop_missing():
                    text = f"the rows of worker {worker} are read again, since the executor that had them is gone"
                    self._run.events.emit(Incident("repair", text))
                    running.append(self._dataset.background(_Repair(results, worker, self._ledger)))
                    stopped = stopped and self._run.model.stop_training
            return [variables for each in running for variables in each.result()]
        except BaseException:
            try:
                if self._service.failure is None:  # an update that failed may have been applied in part
                    self._record_cut()
            finally:
                self._cancel(running)
            if self._service.failure is not None:
                raise self._service.failure from None
            raise

    def _cancel(self, running: Sequence[Running[Any]]) -> None:
        """End the workers, and the jobs."""
        self._ledger.stop()
        self._ledger.drain(LEAVE_SECONDS)
        for each in running:
            each.cancel()
        for each in running:
            with contextlib.suppress(Exception):
                each.result()

    def _stopped(self, running: Sequence[Running[Any]]) -> bool:
        """Wait for the next event and handle it. Returns whether training has ended."""
        over = all(each.done for each in running)  # checked first: an epoch that ends now is handled below
        end = self._ledger.wait(0.0 if over else PROGRESS_SECONDS)
        if self._service.failure is not None:
            raise self._service.failure
        if end is None:
            self._report_progress()
            return over
        self._end_epoch(end)
        if self._run.model.stop_training:
            self._ledger.stop()
            return True
        return False

    def _keep_epoch(self, epoch: int) -> Snapshot:
        """Keep the weights and the statistics of the server when the last worker has reported an epoch."""
        self._kept[epoch] = (self._service.stats(""), self._store.rule_state())
        return self._store.snapshot()

    def _keep_cut(self, cut: Cut) -> None:
        self._cuts[cut.progress.next_epoch - 1] = cut

    def _cut_of(self, epoch: int) -> Cut | None:
        """The cut after the push that ended an epoch; ``None`` without checkpoints, or if it has ended a later one, too."""
        if not self._run.recorder.records:
            return None
        if epoch not in self._cuts:
            self._ledger.wait_for_cut()
        cut = self._cuts.get(epoch)
        self._cuts = {number: each for number, each in self._cuts.items() if number > epoch}
        return cut

    def _end_epoch(self, end: EpochEnd) -> None:
        run, model = self._run, self._run.model
        snapshot: Snapshot = end.snapshot
        with snapshot:
            if not np.isfinite(snapshot.weights.vector).all():
                raise DivergenceError(
                    f"the rule {run.rule!r} produced weights that are not finite in epoch {end.epoch + 1}. The model keeps "
                    "those of the previous epoch. Try a smaller learning rate, or another rule."
                )
            unmoved = np.array_equal(snapshot.weights.vector, self._state.weights.vector)
            if snapshot.version and model_state.learning_rate(model) > 0 and unmoved:
                warn(unmoved_warning(run.rule, snapshot.version))
            model_state.put_weights(self._changed(snapshot.weights, snapshot.version), model)
        counts = [self._iterations, *(report.iterations for report in end.reports)]
        self._iterations = tuple(map(max, zip(*counts, strict=True)))
        set_iterations(model, self._iterations)
        weights, optimizer = model_state.take_weights(model), _optimizer(model) if self._run.callbacks.given else {}
        logs = metrics.merged_logs(model, end.reports)
        add_histories(run, end.epoch, end.reports)
        stats, rule_state = self._kept.pop(end.epoch)
        cut = self._cut_of(end.epoch)
        rule_state = rule_state if cut is None else cut.rule_state
        run.rule_state.clear()
        run.rule_state.update(rule_state)
        rows, trained = sum(report.rows for report in end.reports), max(report.seconds for report in end.reports)
        run.events.emit(measured(end.epoch, self._last_stats, stats, rows, trained))
        self._last_stats = stats
        if end.num_absent and not self._warned:
            self._warned = True
            warn(
                f"from epoch {end.epoch + 1} on, validation omits the rows of {counted(end.num_absent, 'worker')} that "
                "ended: their callbacks stopped them, or other workers started late (too few slots) or again (a lost "
                "worker)."
            )
        if end.validation:
            logs |= run.callbacks.validated(partial(metrics.merged_logs, model, end.validation))
        self._run.callbacks.on_epoch_end(end.epoch, logs)
        self._send_settings()
        if cut is not None:
            center = self._changed(cut.weights, cut.version)
            WeightChange.between(weights.vector, model_state.take_weights(model).vector).apply(center.vector)
            run.recorder.end_epoch(end.epoch, ModelState(center, model_state.take_optimizer(model)), self._progress(cut))
        elif not run.recorder.records or model.stop_training:  # else updates of the next epoch are in the weights
            run.recorder.end_epoch(end.epoch)
        if not model.stop_training and end.epoch + 1 < self._epochs.stop:
            self._run.callbacks.on_epoch_begin(end.epoch + 1)
            run.recorder.begin_epoch(end.epoch + 1)
            self._changes = [each for each in self._changes if each[0] > snapshot.version]
            self._epoch = end.epoch + 1
            if self._run.callbacks.given:
                self._send_changes(weights, optimizer)
        self._send_settings()

    def _changed(self, weights: Flat, version: int) -> Flat:
        """Weights of a version of the server, with the changes of callbacks that the server has got since."""
        changes = [change for since, change in self._changes if since > version]
        if not changes:
            return weights
        vector = weights.vector.copy()
        for change in changes:
            change.apply(vector)
        return Flat(vector, weights.integer_variables)

    def _send_changes(self, before: Flat, optimizer: Mapping[str, Array]) -> None:
        """Apply what callbacks have changed to the weights of the server.

        Args:
            before: The weights in the driver's model before the callbacks.
            optimizer: The optimizer variables before the callbacks; see `_optimizer`.

        Raises:
            ConfigurationError: They have changed what workers keep for themselves, or average.
        """
        model = self._run.model
        after = model_state.take_weights(model)
        variables = model_state.weight_variables(model)
        layout, count = model_state.layout(variables), len(model_state.statistics_variables(model))
        pairs = [*zip(variables, layout.unpack(before), layout.unpack(after), strict=True)][len(variables) - count :]
        changed = [each.path for each, old, new in pairs if not np.array_equal(old, new)]
        changed += [name for name, value in _optimizer(model).items() if not np.array_equal(value, optimizer[name])]
        if changed:
            raise ConfigurationError(
                f"a callback has changed {', '.join(map(repr, changed[:3]))}. With a parameter server, callbacks can set "
                "trainable weights, the learning rate, and variables outside the model, since each worker has its own "
                'optimizer variables and statistics. Use mode="synchronous" or mode="allreduce", or worker_callbacks.'
            )
        change = WeightChange.between(before.vector, after.vector)
        if change.places.size:
            self._changes.append((self._ledger.change(change), change))

    def _send_settings(self) -> None:
        """Send what a callback has set to the workers: the learning rate, and variables outside the model."""
        settings = model_state.take_settings(self._run.model)
        if settings != self._settings:
            self._put_settings(settings, self._settings)

    def _put_settings(self, settings: tuple[float, ...], before: tuple[float, ...]) -> None:
        """Set the settings of the workers.

        Raises:
            ConfigurationError: Callbacks have changed variables outside the model, which have too many values.
        """
        rates = self._rates(settings)
        self._sets_outside = self._sets_outside or settings[len(rates) :] != before[len(rates) :]
        if self._sets_outside and len(settings) > MAX_SETTINGS:
            raise ConfigurationError(
                "a callback has changed a variable outside the model, which its custom code uses. With a parameter server, "
                f"such variables may have {MAX_SETTINGS} values, and these have {len(settings)}: use smaller variables, or "
                'mode="synchronous" or mode="allreduce".'
            )
        self._settings = settings
        self._ledger.put_settings(settings if self._sets_outside else rates)

    def _rates(self, settings: tuple[float, ...]) -> tuple[float, ...]:
        """The learning rate, if it can be set: the first of the settings."""
        return settings[: model_state.has_settable_rate(self._run.model)]

    def _progress(self, cut: Cut) -> LedgerProgress:
        return replace(cut.progress, sets_outside=self._sets_outside)

    def _record_cut(self) -> None:
        """Record what the server has reached within an epoch, unless an epoch has ended that was not handled yet."""
        if not self._run.recorder.records or self._ledger.next_epoch != self._epoch:
            return
        cut, rule_state = self._ledger.cut(), self._run.rule_state
        partitions = cut.progress.partitions.values()
        batches = max(self._run.batches if each.epoch > self._epoch else each.batch for each in partitions)
        if cut.progress.next_epoch == self._epoch and batches:
            at_epoch_end = dict(rule_state)  # it belongs to the weights in the model
            rule_state.update(cut.rule_state)
            state = ModelState(cut.weights, model_state.take_optimizer(self._run.model))
            self._run.recorder.end_round(EpochPart(self._epoch, batches), state, self._progress(cut))
            rule_state.clear()
            rule_state.update(at_epoch_end)

    def _report_progress(self) -> None:
        if self._run.recorder.is_late:
            self._record_cut()
        before, self._rows = self._rows, self._ledger.rows
        self._run.events.emit(RowsTrained(self._rows - before, self._ledger.progress(self._epoch)))
        takeovers = self._ledger.takeovers
        if takeovers > self._takeovers:
            workers = counted(takeovers - self._takeovers, "lost worker")
            self._takeovers = takeovers
            self._run.events.emit(Incident("takeover", f"another task has continued for {workers}"))

    def _put_optimizer(self, optimizer: Flat) -> None:
        """Set the driver's optimizer to the mean of the workers, except for what the driver decides.

        That is the learning rate, and the variables outside the model if callbacks of the driver have set them.
        """
        model = self._run.model
        ModelState(model_state.take_weights(model), optimizer).put(model)
        model_state.put_settings(self._settings if self._sets_outside else self._rates(self._settings), model)

    def _end(self) -> None:
        """Release snapshots and keep the statistics of the server, also after an error."""
        for end in self._ledger.undelivered():
            end.snapshot.release()
        self._run.server.stats = self._service.stats(self._run.server.transport)

    def _planned(self) -> dict[int, PartitionPlan]:
        run = self._run
        shares = {worker: run.batches_of(worker) for worker in range(len(run.split.train))}
        validating = {worker for worker, batches in shares.items() if batches} if run.validation is not None else set()
        if run.validation is not None and run.validation.spans is not None:
            validating = {worker for worker, (start, stop) in enumerate(run.validation.spans) if stop > start}
        return {worker: PartitionPlan(batches, worker in validating) for worker, batches in shares.items()}

    def _plan(self, address: Address) -> WorkerPlan:
        run = self._run
        assert isinstance(run.rule, AsynchronousRule)
        return WorkerPlan(
            epochs=self._epochs,
            rows=run.split.train,
            batches=tuple(run.batches_of(worker) for worker in range(len(run.split.train))),
            every=None if run.frequency == "epoch" else int(run.frequency),
            rule=ByValue.dump(run.rule, "rule"),
            num_workers=self._num_concurrent,
            trainable=self._trainable,
            payload_format=self._payload_format,
            address=address,
            renew_seconds=run.server.options.lease_seconds / 3,
        )


def _optimizer(model: keras.Model) -> dict[str, Array]:
    """The optimizer variables, except for a learning rate that can be set, by their paths."""
    settings = {id(variable) for variable in model_state.settings_variables(model)}
    return {
        variable.path: np.array(read(variable))
        for variable in model_state.optimizer_variables(model)
        if id(variable) not in settings
    }


@dataclass(frozen=True)
class _Repair:
    """Trains a partition whose rows have to be read again."""

    results: Results[Mean]
    worker: int
    ledger: Ledger

    def __call__(self) -> list[Mean]:
        try:
            return self.results.from_source([self.worker])[self.worker]
        finally:
            self.ledger.wake()


def measured(
    epoch: int, last: ParameterServerStats | None, stats: ParameterServerStats, rows: int, trained: float
) -> EpochMeasured:
    """The speed of an epoch; the time before the first one is that in which workers started.

    Args:
        epoch: The epoch.
        last: The statistics of the server at the end of the epoch before; ``None`` if it is the first one.
        stats: Those at the end of this epoch.
        rows: The rows of the epoch.
        trained: The training time of the slowest worker.
    """
    startup = max(0.0, stats.seconds - trained) if last is None else 0.0
    last = last or ParameterServerStats(seconds=startup)
    counts = Counter(stats.staleness)
    counts.subtract(last.staleness)
    recent = ParameterServerStats(
        seconds=stats.seconds - last.seconds,
        pushes=stats.pushes - last.pushes,
        staleness=dict(+counts),
    )
    updates = Updates(
        recent.pushes, recent.updates_per_second, recent.staleness, recent.mean_staleness, recent.max_staleness
    )
    return EpochMeasured(epoch, rows, recent.seconds, startup, updates)


def unmoved_warning(rule: UpdateRule, updates: int) -> str:
    """The warning that so many updates have not changed the weights."""
    reason = "the learning rate may be too small, or the loss does not depend on the weights"
    if type(rule) not in RULES.values():
        reason = f"apply of {rule!r} must change center in place (center += ..., not center = center + ...)"
    return f"the weights did not change by {counted(updates, 'update')}: {reason}."
