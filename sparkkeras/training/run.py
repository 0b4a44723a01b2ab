"""One call of `fit`: a `Run`, from the arguments to the result; and the strategy of each training mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import keras

from sparkkeras.arguments import declared
from sparkkeras.data.dataset import StoredDataset
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.events import Events, RunStarted
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.description import describe_model
from sparkkeras.modeling.reductions import check_without_mask
from sparkkeras.parameter.exchange import ParameterServerStats
from sparkkeras.parameter.rules import Average, State, UpdateRule
from sparkkeras.rpc.options import ParameterServerOptions
from sparkkeras.sources.source import Source
from sparkkeras.spark.settings import AS_CONFIGURED, WorkerSize
from sparkkeras.training.callbacks import DriverCallbacks
from sparkkeras.training.fit_arguments import FitArguments
from sparkkeras.training.recorder import Recorder
from sparkkeras.training.validation import Validation
from sparkkeras.worker.batches import BatchOptions, FitOptions

MAX_RESTARTS = 3
"""How often all-reduce training starts again, unless the user says otherwise."""


@dataclass
class ServerSettings:
    """The parameter server of a run.

    Attributes:
        transport: The name of the transport, ``"http"`` or ``"socket"``.
        port: The port; 0: any free port.
        options: Further settings.
        stats: The server's statistics, set when training ends.
    """

    transport: str = "http"
    port: int = 0
    options: ParameterServerOptions = field(default_factory=ParameterServerOptions)
    stats: ParameterServerStats = field(default_factory=ParameterServerStats)


@dataclass(eq=False, repr=False)  # most attributes are set later
class Run:
    """One call of `fit`: made of its arguments, checked by `check_fit`, stored by `rows_stored`, trained by a strategy.

    Attributes:
        mode: The training mode, one of `MODES`; ``"independent"`` for the members of an ensemble.
        models: The models to train: that of a SparkModel, into which the strategy puts the state of the last completed
            round, or the members of an ensemble.
        given: The arguments of `fit` by name; see `FitArguments`.
        settings: Those of the SparkModel or the ensemble, for display.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.
        frequency: ``"epoch"``, or the number of batches between two exchanges.
        rule: The update rule, which computes the next weights from the workers' weights.
        rule_state: The state of the rule, such as momentum; changed in place.
        server: The parameter server of the asynchronous modes.
        gradient_dtype: The dtype in which all-reduce training sends gradients; ``None``: their own.
        max_restarts: How often all-reduce training starts again after a worker has failed.
        worker_size: The CPU cores and GPUs of each worker.
        histories: Receives a record for each worker and epoch.
        recorder: Gets the progress, to write checkpoints.
        events: Passes on what happens.

        source: The rows to train on. `check_fit` sets this and what follows.
        held_out: The rows to validate on, unless they are a part of ``source``.
        options: How a worker trains.
        validation_options: How rows to validate on become batches.

        archives: The packed models. `rows_stored` sets this and what follows, and adds to ``options``.
        dataset: The rows to train on.
        split: Those to train on, and those to validate on.
        validation: The validation; ``None``: no validation.

        callbacks: The callbacks on the driver. `SparkModel.fit` sets them right before training; an ensemble has none.
    """

    mode: str
    models: Sequence[keras.Model]
    given: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    frequency: str | int = "epoch"
    rule: UpdateRule = field(default_factory=Average)
    rule_state: State = field(default_factory=dict)
    server: ServerSettings = field(default_factory=ServerSettings)
    gradient_dtype: str | None = None
    max_restarts: int = MAX_RESTARTS
    worker_size: WorkerSize = AS_CONFIGURED
    histories: list[dict[str, Any]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    events: Events = field(default_factory=Events)

    source: Source = field(init=False)
    held_out: Source | None = field(init=False, default=None)
    options: FitOptions = field(init=False)
    validation_options: BatchOptions = field(init=False)

    archives: Sequence[ModelArchive] = field(init=False)
    dataset: StoredDataset = field(init=False)
    split: TrainValidationSplit = field(init=False)
    validation: Validation | None = field(init=False, default=None)

    callbacks: DriverCallbacks = field(init=False)

    @property
    def model(self) -> keras.Model:
        """The model, or the first member of an ensemble."""
        return self.models[0]

    @property
    def archive(self) -> ModelArchive:
        """The packed `model`."""
        return self.archives[0]

    @property
    def epochs(self) -> int:
        """The epoch, counted from 0, at which training ends."""
        return int(self.given["epochs"])

    @property
    def initial_epoch(self) -> int:
        """The epoch at which it begins."""
        return int(self.given["initial_epoch"])

    @property
    def steps_per_epoch(self) -> int | None:
        """The largest number of batches of a worker in an epoch; ``None``: all."""
        steps: int | None = self.given["steps_per_epoch"]
        return steps

    @property
    def validates(self) -> bool:
        """Whether there are rows to validate on."""
        others = self.given["validation_data"], self.given["validation_col"]
        return bool(self.given["validation_split"]) or any(each is not None for each in others)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `fit` that must be the same to resume, and that are shown: values for JSON by name."""
        found = {name: self.given[name] for name, each in declared(FitArguments).items() if each.is_setting}
        weights = found["class_weight"]
        by_text = {str(index): weight for index, weight in weights.items()} if isinstance(weights, Mapping) else weights
        return {"batch_size": self.options.batch_size, **found, "class_weight": by_text}

    def started(self) -> RunStarted:
        """The event with which it begins, after `check_fit`."""
        settings = {**self.settings, **self.arguments, "seed": self.options.seed, **describe_model(self.model)}
        kind = "ensemble" if self.mode == "independent" else "fit"
        return RunStarted(kind, self.model.name, settings, self.epochs, self.initial_epoch)

    @property
    def batches(self) -> int:
        """The number of batches per epoch of the worker with the most batches; see `batches_of`."""
        return max((self.batches_of(worker) for worker in range(len(self.split.train))), default=0)

    @property
    def steps(self) -> int | None:
        """`batches`, or ``None`` if their number is unknown until they have been read."""
        return None if self.steps_per_epoch is None and None in self.split.train else self.batches

    def batches_of(self, worker: int) -> int:
        """The largest possible number of batches per epoch of one worker; ``sys.maxsize`` if nothing limits it."""
        rows = self.split.train[worker]
        batches = sys.maxsize if rows is None else -(-rows // self.options.batch_size)
        return batches if self.steps_per_epoch is None else min(batches, self.steps_per_epoch)

    def rows_of_epoch(self, partitions: Sequence[int]) -> int | None:
        """The rows that a worker with these partitions trains on in an epoch; ``None`` if they are unknown."""
        counts = [self.split.train[partition] for partition in partitions]
        most = sys.maxsize if self.steps_per_epoch is None else self.steps_per_epoch * self.options.batch_size
        if None in counts:
            return None if self.steps_per_epoch is None else most
        return min(most, sum(count or 0 for count in counts))

    @property
    def num_workers(self) -> int:
        """The number of partitions with rows to train on."""
        return len(self.split.workers)


class Strategy(Protocol):
    """A way to train; implements both the driver's and the workers' half of its protocol."""

    def train(self, run: Run, epochs: range) -> None:
        """Train the models, update the histories, and call the callbacks on the driver in every epoch."""
        ...


def train(run: Run) -> None:
    """Train what remains with the strategy of the mode, from the callbacks at the beginning to those at the end.

    Raises:
        ModelError: In all-reduce training, an output of the model has a mask.
    """
    if run.mode == "allreduce":
        check_without_mask(run.model)
    make_strategy(run.mode).train(run, range(run.recorder.begin(run), run.epochs))
    if run.model.optimizer is not None and run.epochs > run.initial_epoch:
        run.model.optimizer.finalize_variable_values(run.model.trainable_weights)
    run.callbacks.on_train_end()
    run.recorder.end()


def make_strategy(mode: str) -> Strategy:
    """The strategy of a training mode."""
    from sparkkeras.training.allreduce import AllReduceStrategy
    from sparkkeras.training.averaging import AveragingStrategy
    from sparkkeras.training.parameter_server import ParameterServerStrategy

    strategies: dict[str, Callable[[], Strategy]] = {
        "synchronous": AveragingStrategy,
        "asynchronous": partial(ParameterServerStrategy, locked=True),
        "hogwild": partial(ParameterServerStrategy, locked=False),
        "allreduce": AllReduceStrategy,
    }
    return strategies[mode]()
