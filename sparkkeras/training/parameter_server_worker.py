"""The workers' half of asynchronous and hogwild training: a task trains all epochs and exchanges with the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkkeras.data.block import Block, describe
from sparkkeras.data.dataset import BlockStream, FilesMissing, Shared, TaskContext
from sparkkeras.errors import ConfigurationError, DataError, DriverConnectionError
from sparkkeras.modeling import metrics
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.metrics import MetricState
from sparkkeras.modeling.state import ModelState, ModelWeights
from sparkkeras.parameter.exchange import Directive, ExchangePoint, ResumePoint
from sparkkeras.parameter.rules import AsynchronousRule, ExchangeWindow, adds_progress
from sparkkeras.parameter.service import ParameterClient, PayloadFormat
from sparkkeras.rpc.transport import Address
from sparkkeras.training.validation import ValidationPlan
from sparkkeras.training.worker_reports import Mean
from sparkkeras.weights import Array, Flat
from sparkkeras.worker.batches import BatchRange, FitOptions
from sparkkeras.worker.trainer import ExchangeResult, LocalTrainer, lasting


@dataclass(frozen=True)
class WorkerPlan:
    """The settings that all tasks of a run share.

    Attributes:
        epochs: The epochs to train.
        rows: The number of training rows of each worker; ``None``: all rows of a stream.
        batches: The number of batches of each worker in an epoch.
        every: The number of batches between exchanges; ``None``: an epoch.
        rule: The update rule.
        num_workers: The number of workers that train at the same time.
        trainable: The number of trainable values, which come first in the weight vector.
        payload_format: The format of weights and metric states.
        address: The address of the server.
        renew_seconds: The interval at which leases are renewed.
    """

    epochs: range
    rows: tuple[int | None, ...]
    batches: tuple[int, ...]
    every: int | None
    rule: ByValue[AsynchronousRule]
    num_workers: int
    trainable: int
    payload_format: PayloadFormat
    address: Address
    renew_seconds: float


class WorkerExchange:
    """A worker's half of an exchange: pull, the rule's exchange, push. An `Exchange`.

    Attributes:
        begun: The weights to start from.
        directive: The last directive of the server.
        before: The metric state of the epoch that earlier attempts have pushed.
    """

    def __init__(self, plan: WorkerPlan, client: ParameterClient, times_set: int) -> None:
        self.every = plan.every
        self._plan, self._client, self._rule = plan, client, plan.rule.load()
        self._times_set = times_set
        pulled = client.pull()
        self.keeps_optimizer = plan.payload_format.optimizer is not None
        self._version = pulled.version
        self._base = pulled.weights.vector.copy()
        self.begun = Flat(self._base, pulled.weights.integer_variables)
        self.directive = Directive()
        self.before: MetricState = ()

    @property
    def stopped(self) -> bool:
        """Whether the server has asked the worker to stop, possibly in a reply to the thread that renews the lease."""
        return self._client.stopped

    def __call__(self, weights: Flat, point: ExchangePoint, optimizer: Flat | None = None) -> ExchangeResult:
        """Exchange weights with the server; see `Exchange`."""
        plan, pulls_after = self._plan, adds_progress(self._rule)
        trained = slice(None, plan.trainable)
        center = None if pulls_after else self._client.pull()
        window = ExchangeWindow(point.steps, point.rows, point.learning_rate, plan.num_workers)
        shared = self._base if center is None else center.weights.vector
        given = self._rule.exchange(weights.vector[trained], self._base[trained], shared[trained], window)
        statistics = weights.vector[plan.trainable :]
        sent, onward = self._checked(given)
        point = dataclasses.replace(point, metrics=self._metrics(point.metrics))
        if optimizer is not None:
            self._client.keep_optimizer(optimizer)
        parts, integers = (sent, statistics), weights.integer_variables
        directive, after = self._client.push(parts, integers, self._version, point, pulls_after)
        if center is None:
            assert after is not None, "it was asked for"
            self._base[:] = after.weights.vector
            self._version = after.version
        else:
            theirs = center.weights.vector[plan.trainable :]
            self._base[trained] = onward
            self._base[plan.trainable :] = theirs + (statistics - theirs) / plan.num_workers
            # It has its own update, which the server applies after the version that was pulled.
            self._version = center.version + 1
        self.directive = self._client.proceed() if directive.wait else directive
        return ExchangeResult(Flat(self._base, weights.integer_variables), self._settings(), self.directive.stop)

    def _settings(self) -> tuple[float, ...] | None:
        if self.directive.settings is None or self.directive.settings[0] <= self._times_set:
            return None
        self._times_set, values = self.directive.settings
        return values

    def _metrics(self, state: MetricState) -> MetricState:
        expected = [shape for shape, _ in self._plan.payload_format.metrics.specs]
        if [array.shape for array in state] != expected:
            raise DataError(
                f"a worker's model has {len(state)} metric variables and the driver's {len(expected)}, or other shapes: a "
                "metric makes them depend on the data. Create a metric's variables in its __init__ or build()."
            )
        return metrics.merge([self.before, state]) if self.before else state

    def _checked(self, given: Any) -> tuple[Array, Array]:
        vectors = given if isinstance(given, tuple) else ()
        shape = (self._plan.trainable,)
        if len(vectors) != 2 or not all(isinstance(each, np.ndarray) and each.shape == shape for each in vectors):
            received = ", ".join(map(describe, vectors)) or describe(given)
            raise ConfigurationError(
                f"exchange of the rule {self._rule!r} must return two vectors of shape {shape}: the update to send, and the "
                f"weights to continue from. It returned {received}."
            )
        sent, onward = (each.astype(self._base.dtype, copy=False) for each in vectors)
        return sent, onward


@dataclass(frozen=True)
class TrainTask:
    """Trains all epochs of a worker.

    Attributes:
        archive: The model.
        state: Its state at the beginning.
        options: The training options.
        plan: The settings that all tasks share.
        validation: How to validate.
        optimizers: The optimizer variables of each worker in the checkpoint from which training continues, as its client
            has sent them.
    """

    archive: Shared[ModelArchive]
    state: Shared[ModelState]
    options: Shared[FitOptions]
    plan: WorkerPlan
    validation: ValidationPlan | None
    optimizers: Mapping[int, Shared[bytes]] = field(default_factory=dict)

    def optimizer_of(self, worker: int) -> Flat:
        """The optimizer variables with which a worker begins."""
        packed = self.optimizers.get(worker)
        if packed is None:
            return self.state.value.optimizer
        return self.plan.payload_format.unpack_optimizer(packed.value)

    def __call__(self, context: TaskContext, rows: Iterator[Block | BlockStream]) -> Iterator[Mean]:
        """Train what other attempts have not trained; yield the optimizer variables, if there was anything to train."""
        if not self.plan.batches[context.worker]:
            return
        with ParameterClient(self.plan.address, self.plan.payload_format, context.worker, context.attempt) as client:
            resumed = client.lease()
            if resumed is None:
                return
            try:
                with client.renewing(self.plan.renew_seconds):
                    part = next(rows, None)
                    if part is None:
                        raise DataError(_FEWER.format(worker=context.worker))
                    run = _Attempt(self, context, client, part, resumed)
                    run.train()
                    if resumed.epoch < self.plan.epochs.stop:
                        yield Mean(run.rows, (run.state.optimizer,))
                # A waiting copy of this task must not end before the optimizer variables are sent. The lease is no longer
                # renewed, since a renewal after this call would be rejected; it is long enough for this one call.
                client.finish()
            except DriverConnectionError:
                raise  # the server is gone, or has leased the partition to another attempt
            except FilesMissing:
                client.release(missing=True)  # the driver has the rows read again by another task
            except BaseException:
                client.release()
                raise


_FEWER = (
    "partition {worker} has fewer rows than when it was first read: its source returns different rows each time. Return "
    "batches in each epoch from a function that reads them; cache other data, or write it to files first."
)


class _Attempt:
    """One attempt to train the epochs of a worker.

    Attributes:
        state: The weights and optimizer variables.
        rows: The number of rows on which they were trained, over all epochs.
    """

    def __init__(
        self,
        task: TrainTask,
        context: TaskContext,
        client: ParameterClient,
        rows: Block | BlockStream,
        resumed: ResumePoint,
    ) -> None:
        self._plan, self._validation = task.plan, task.validation
        self._options = task.options.value
        self._trainer = LocalTrainer(task.archive.value, context)
        self._worker = context.worker
        self._client, self._rows = client, rows
        self._resumed = resumed
        times_set, settings = resumed.settings or (0, None)
        self._exchange = WorkerExchange(task.plan, client, times_set)
        self.state = ModelState(self._exchange.begun, task.optimizer_of(context.worker))
        self.rows = 0
        if resumed.iterations or settings is not None:
            model = self._trainer.prepared(rows, self._options)
            self.state = model_state.advanced(self.state, model, resumed.iterations, settings)

    def train(self) -> None:
        """Train from the progress of earlier attempts to the end."""
        plan, batch, before = self._plan, self._resumed.batch, self._resumed.metrics
        callbacks = lasting(self._options.callbacks.fresh() if self._options.callbacks else ())
        for number in range(self._resumed.epoch, plan.epochs.stop):
            self._exchange.before = before
            batch_range = BatchRange(number, plan.rows[self._worker], batch, plan.batches[self._worker])
            replica = self._trainer.fit(
                self.state, self._rows, batch_range, self._options, callbacks=callbacks, exchange=self._exchange
            )
            if replica is None:
                raise DataError(_FEWER.format(worker=self._worker))
            self.state = replica.state
            self.rows += replica.rows
            self._evaluate(self._exchange.directive)
            if replica.stopped:  # by the server or by a callback
                break
            batch, before = 0, ()
        for callback in callbacks:
            callback.end()
        for directive in self._client.staying():
            self._evaluate(directive)

    def _evaluate(self, directive: Directive) -> None:
        """Evaluate the snapshots that the server asks for."""
        if self._validation is None:
            return
        while directive.evaluate and not directive.stop:
            epoch = directive.evaluate[0]
            state = ModelWeights(self._client.snapshot(epoch))
            blocks = self._validation.blocks(self._worker, self._rows)
            found = self._trainer.evaluate(state, blocks, self._validation.options)
            directive = self._client.report(epoch, None if found is None else found[0])
