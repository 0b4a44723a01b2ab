"""`SparkEnsemble`: trains the members of an ensemble in parallel."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.checkpoints.checkpoint import Checkpoint
from sparkkeras.data.block import describe
from sparkkeras.data.partition_stats import ClassWeight
from sparkkeras.data.placement import Shuffle
from sparkkeras.data.schema import OnInvalid
from sparkkeras.ensembles.compatibility import check_members
from sparkkeras.ensembles.ensemble import EnsembleModel
from sparkkeras.errors import ConfigurationError, ModelError, counted
from sparkkeras.events import EventListener, Events, PhaseStarted
from sparkkeras.modeling.archive import find_outside
from sparkkeras.modeling.compilation import check_trainable
from sparkkeras.modeling.locks import training
from sparkkeras.modeling.schema import schema_of
from sparkkeras.progress.status_line import format_logs
from sparkkeras.scoring.inference import Verbose
from sparkkeras.scoring.progress import ScoringProgress
from sparkkeras.sources.frame import Columns, Loaders
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.job_errors import interruptible
from sparkkeras.training.description import describe_fit
from sparkkeras.training.independent import SAMPLING, IndependentStrategy
from sparkkeras.training.job import Coordination
from sparkkeras.training.member_checkpoints import MemberCheckpoints
from sparkkeras.training.preparation import FitRequest, Partitioning, check_fit, packed, prepare_fit
from sparkkeras.training.row_options import RowOptions
from sparkkeras.training.saved_run import Rows, data_of
from sparkkeras.training.sorted_rows import warn_of_sorted_rows
from sparkkeras.worker.batches import Transform

Build = Callable[[], keras.Model] | Callable[[int], keras.Model]


class SparkEnsemble:
    """Trains several models in parallel on Spark, independently of each other, and combines them into an ensemble.

    All members train in one Spark job, one member per task. If there are more members than task slots, some wait.

    Args:
        models: A function ``build()`` or ``build(index)`` that returns a compiled model and is called on the driver for each
            member; or a list of compiled models, which are trained in place. Architectures may differ, but all members must
            have the same inputs and outputs.
        num_models: The number of members, if ``models`` is a function.
        mode: ``"independent"``: members do not exchange weights.
        sampling: The rows that a member trains on. ``"all"``: all rows; members differ in their initial weights, shuffles
            and architectures. ``"bootstrap"``: as many rows as there are, drawn with replacement (bagging).
            ``"partition"``: the data is divided into one partition per member, and each trains on its partition only.
        voting: How members are combined: ``"soft"``, ``"hard"`` or ``"average"``; see `EnsembleModel`.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.
        batch_size: The default number of rows in a batch.
        seed: The seed of initial weights (if ``models`` is a function), samples, shuffles and dropout masks; ``None``:
            random. The same seed, data and partitions give the same members.

    Attributes:
        models: The members.
        histories: The histories of the last `fit`; empty before.

    Raises:
        ModelError: A model is not compiled or not built, or their inputs or outputs differ.
        ConfigurationError: Another argument is unknown or out of range.

    Example::

        spark_ensemble = SparkEnsemble(build, 8, sampling="bootstrap")
        spark_ensemble.fit(df, epochs=10)
        spark_ensemble.evaluate(x_test, y_test)
        spark_ensemble.save("ensemble.zip")
    """

    @known_arguments
    def __init__(
        self,
        models: Build | Sequence[keras.Model],
        num_models: int | None = None,
        *,
        mode: str = "independent",
        sampling: str = "all",
        voting: str = "soft",
        custom_objects: Mapping[str, Any] | None = None,
        batch_size: int = 32,
        seed: int | None = None,
    ) -> None:
        arguments.one_of("mode", mode, ("independent",))
        arguments.one_of("sampling", sampling, SAMPLING)
        given_seed = arguments.optional_integer("seed", seed, low=0)
        self.seed = int(np.random.default_rng().integers(2**31)) if given_seed is None else given_seed
        self.mode = mode
        self.sampling = sampling
        self.voting = voting
        self.models = list(check_members(_made(models, num_models, self.seed), voting))
        _check_apart(self.models)
        self.custom_objects = arguments.custom_objects("custom_objects", custom_objects)
        self.batch_size = arguments.integer("batch_size", batch_size)
        self.histories: list[keras.callbacks.History] = []
        for model in self.models:
            check_trainable(model)
        self._fits = 0
        self._rows = RowOptions()
        self._ensemble: EnsembleModel | None = None

    def __repr__(self) -> str:
        return f"SparkEnsemble({counted(len(self.models), 'model')}, sampling={self.sampling!r}, voting={self.voting!r})"

    @property
    def ensemble(self) -> EnsembleModel:
        """The trained members as an `EnsembleModel`.

        Raises:
            ConfigurationError: `fit` has not been called.
        """
        if not self.histories:
            raise ConfigurationError("the ensemble has not been trained yet: call fit first.")
        if self._ensemble is None:
            self._ensemble = EnsembleModel(self.models, self.voting, custom_objects=self.custom_objects)
        self._ensemble._rows = self._rows
        return self._ensemble

    @known_arguments
    @interruptible()
    def fit(
        self,
        data: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        validation_split: float = 0.0,
        validation_data: Any = None,
        validation_col: str | None = None,
        validation_freq: int = 1,
        validation_batch_size: int | None = None,
        shuffle: Shuffle = True,
        class_weight: ClassWeight | None = None,
        sample_weight: Any = None,
        steps_per_epoch: int | None = None,
        features: Columns | None = None,
        label: Columns | None = None,
        loader: Loaders | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalid = "error",
        worker_callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        checkpoint: Checkpoint | None = None,
        resume: bool = False,
        monitor: EventListener | Sequence[EventListener] | None = None,
    ) -> list[keras.callbacks.History]:
        """Train all members. A further call continues from their current weights.

        Args:
            data: A DataFrame, an RDD or arrays; see `SparkModel.fit`.
            y: The labels, if the data is arrays.
            epochs: The number of epochs that each member trains.
            batch_size: Rows in a batch; ``None``: the ensemble's ``batch_size``.
            verbose: 0: silent; otherwise a line is printed for each member when all are trained.
            validation_split: The fraction of rows to use for validation. No member trains on them, and each member validates
                on all of them; with ``sampling="partition"``, on those of its partition.
            validation_data: Data to validate on instead.
            validation_col: A column of the DataFrame: rows where it is true are used for validation instead.
            validation_freq: Validate every this many epochs.
            validation_batch_size: Rows in a validation batch; ``None``: ``batch_size``.
            shuffle: Whether each member shuffles its rows before each epoch; see `SparkModel.fit`. ``"global"`` also
                redistributes the rows, which ``sampling="partition"`` requires if they are sorted.
            class_weight: A weight for each class, ``{class index: weight}``, or ``"balanced"``, see `SparkModel.fit`.
            sample_weight: Sample weights: an array for arrays, the name of a column for a DataFrame.
            steps_per_epoch: The maximum number of batches in an epoch; ``None``: all.
            features: The input columns of a DataFrame.
            label: The label columns of a DataFrame.
            loader: Converts a column of a DataFrame into an input, such as `image_loader`.
            transform: ``transform(x, y) -> (x, y)``, applied to each batch.
            on_invalid: What to do with rows that hold nulls, NaN or infinite values: ``"error"``, ``"drop"`` or ``"allow"``.
            worker_callbacks: Keras callbacks that run on the workers, with a copy for each member: ``EarlyStopping``
                monitors the metrics of its member, including validation metrics, and stops only this member.
            checkpoint: Where to write each member when it is trained. Each trains in a Spark job of its own then.
            resume: Whether to continue what an earlier call has written: members that were trained are not trained again,
                and the others get the same bits as without the interruption. The models and the arguments must be the same.
            monitor: A `Monitor`, or other objects with a method ``on_event`` (see `sparkkeras.events`), which gets each
                member when it is trained. Each trains in a Spark job of its own then.

        Returns:
            The history of each member.

        Raises:
            ConfigurationError: An argument is unknown or out of range, a member would have no rows, the checkpoint is of
                other work, or there are checkpoints and ``resume`` is ``False``.
            StorageError: The checkpoint cannot be read, or not be written before training.
            DataError: The data is empty, malformed, or does not fit a member or its loss.
            ModelError: Another call of ``fit`` is training a member.
            DivergenceError: The weights or the loss of a member became NaN or infinite. No member is changed.
            WorkerError: A task failed repeatedly; the message contains its traceback. No member is changed.
        """
        for model in self.models:
            check_trainable(model)
        monitors = arguments.listeners("monitor", monitor)
        checkpoints = MemberCheckpoints.open(checkpoint, resume)
        seed = self.seed, self._fits
        if checkpoints is not None and checkpoints.seed is not None:
            seed = checkpoints.seed
        with training(self.models):
            request = check_fit(
                self.models,
                data=data,
                y=y,
                epochs=epochs,
                batch_size=self.batch_size if batch_size is None else batch_size,
                verbose=verbose,
                validation_split=validation_split,
                validation_data=validation_data,
                validation_col=validation_col,
                validation_freq=validation_freq,
                validation_batch_size=validation_batch_size,
                shuffle=shuffle,
                class_weight=class_weight,
                sample_weight=sample_weight,
                steps_per_epoch=steps_per_epoch,
                features=features,
                label=label,
                loader=loader,
                transform=transform,
                on_invalid=on_invalid,
                worker_callbacks=worker_callbacks,
                seed=int(np.random.SeedSequence(seed).generate_state(1)[0]),
            )
            if checkpoints is not None:
                for model in self.models:
                    find_outside(model, self.custom_objects)
                checkpoints.check(self.models, self.sampling, request)
            progress = ScoringProgress("Training members", None, request.verbose)
            events = Events([*([progress] if request.verbose else []), *monitors])
            settings = {"members": len(self.models), "sampling": self.sampling, "voting": self.voting}
            with (
                events.running(describe_fit("ensemble", self.models[0], request, settings)),
                watching_spark(events, hides_bars=request.verbose == 1),
            ):
                self.histories = self._train(request, seed, checkpoints, events, progress)
            self._rows = RowOptions.of_fit(data, request.source, loader, on_invalid, transform)
        return self.histories

    def _train(
        self,
        request: FitRequest,
        seed: tuple[int, int],
        checkpoints: MemberCheckpoints | None,
        events: Events,
        progress: ScoringProgress,
    ) -> list[keras.callbacks.History]:
        archives = packed(self.models, self.custom_objects, events)
        num_workers = len(self.models) if self.sampling == "partition" else None
        partitioning = Partitioning(num_workers, slices=1)  # a single file of arrays, which all members memory-map
        strategy = IndependentStrategy(self.models, archives, self.sampling, seed[0], checkpoints)
        rows = prepare_fit(
            request,
            self.models,
            archives,
            self.custom_objects,
            partitioning,
            Coordination(events=events),
            workers_validate=True,
        )
        with rows as (job, stored):
            warn_of_sorted_rows(request, job.split, stored, averages=self.sampling == "partition")
            trained = 0
            if checkpoints is not None:
                checkpoints.begin(data_of(job, stored), Rows.of(job, stored), self.models, seed)
                trained = len(checkpoints.trained)
            self.seed, self._fits = seed[0], seed[1] + 1
            rest = f" {trained} of them {'is' if trained == 1 else 'are'} in the checkpoint." if trained else ""
            progress.write(f"Training {counted(len(self.models), 'member')}, each in its own task.{rest}")
            events.emit(PhaseStarted("Training members"))
            strategy.fit(job, stored)
        for number, history in enumerate(strategy.histories):
            logs = format_logs({name: values[-1] for name, values in history.history.items()})
            progress.write(f"Member {number} - {counted(len(history.epoch), 'epoch')} - {logs}")
        return strategy.histories

    def predict(self, data: Any, **options: Any) -> Any:
        """Predict with the trained ensemble; the arguments are those of `EnsembleModel.predict`."""
        return self.ensemble.predict(data, **options)

    def evaluate(self, data: Any, y: Any = None, **options: Any) -> Any:
        """Compute the trained ensemble's loss and metrics; the arguments are those of `EnsembleModel.evaluate`."""
        return self.ensemble.evaluate(data, y, **options)

    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save the trained ensemble as one zip file; see `EnsembleModel.save`. `load_ensemble_model` reads it."""
        self.ensemble.save(path, overwrite)


def _made(models: Any, num_models: int | None, seed: int) -> list[Any]:
    """The members: the models of a list, or ``num_models`` models that a function builds."""
    num_models = arguments.optional_integer("num_models", num_models)
    if isinstance(models, (list, tuple)):
        if num_models not in (None, len(models)):
            raise ConfigurationError(
                f"num_models={num_models}, but the list contains {counted(len(models), 'model')}: leave num_models out, or "
                "pass a function that builds a model."
            )
        return list(models)
    if isinstance(models, keras.Model) or not callable(models):
        raise ConfigurationError(
            f"models is {describe(models)}; expected a function that builds a compiled model, or a list of compiled models."
        )
    if num_models is None:
        raise ConfigurationError(
            "num_models is missing: with a function that builds a model, set num_models to the number of members."
        )
    numbered = any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(models).parameters.values()
    )
    built = []
    for number in range(num_models):
        with _seeded(seed, number):
            built.append(models(number) if numbered else models())
    return built


@contextmanager
def _seeded(*seed: int) -> Iterator[None]:
    """Seed the initial weights of models that are built in the ``with`` block; restores the global random generators."""
    states = random.getstate(), np.random.get_state()
    drawn = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(drawn)  # Keras draws the seeds of initializers and layers from this generator
    np.random.seed(drawn)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _check_apart(members: Sequence[keras.Model]) -> None:
    """Check that members can train in parallel on the same rows.

    Raises:
        ModelError: A model occurs twice, or names of several inputs or outputs differ.
    """
    if len({id(model) for model in members}) < len(members):
        raise ModelError(
            "the list contains the same model twice, and training would change it twice: pass a separate model for each "
            "member, or a function that builds a new one each time."
        )
    for side in ("inputs", "outputs"):
        names = [[spec.name for spec in getattr(schema_of(model), side)] for model in members]
        for number, each in enumerate(names):
            if len(each) > 1 and each != names[0]:
                raise ModelError(
                    f"the {side} of models[{number}] have the names {each}, but those of models[0] have the names "
                    f"{names[0]}: members with several {side} must have the same names in the same order, since they train "
                    "on the same rows."
                )
