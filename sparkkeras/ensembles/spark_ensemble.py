"""`SparkEnsemble`: trains the members of an ensemble in parallel."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments, taking
from sparkkeras.data.block import describe
from sparkkeras.ensembles.compatibility import check_members
from sparkkeras.ensembles.ensemble import EnsembleModel
from sparkkeras.errors import ConfigurationError, ModelError, counted
from sparkkeras.events import Events, PhaseStarted, RunResumed, WorkersChanged
from sparkkeras.modeling.archive import find_outside
from sparkkeras.modeling.compilation import check_trainable
from sparkkeras.modeling.locks import training
from sparkkeras.modeling.schema import schema_of
from sparkkeras.progress.renderer import Progress
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.job_errors import interruptible
from sparkkeras.spark.settings import WorkerSize
from sparkkeras.training.fit_arguments import EnsembleArguments
from sparkkeras.training.independent import SAMPLING, IndependentStrategy
from sparkkeras.training.member_checkpoints import MemberCheckpoints
from sparkkeras.training.preparation import check_fit, rows_stored
from sparkkeras.training.row_options import RowOptions
from sparkkeras.training.run import Run
from sparkkeras.training.sorted_rows import warn_of_sorted_rows
from sparkkeras.worker.generators import seeded

Build = Callable[[], keras.Model] | Callable[[int], keras.Model]


class SparkEnsemble:
    """Trains several models in parallel on Spark, independently of each other, and combines them into an ensemble.

    All members train in one Spark job, one member per task. If there are more members than task slots, some wait.

    Args:
        models: A function ``build()`` or ``build(index)`` that returns a compiled model and is called on the driver for each
            member; or a list of compiled models, which are trained in place. Architectures may differ, but all members must
            have the same inputs and outputs.
        num_models: The number of members, if ``models`` is a function.
        sampling: The rows that a member trains on. ``"all"``: all rows; members differ in their initial weights, shuffles
            and architectures. ``"bootstrap"``: as many rows as there are, drawn with replacement (bagging).
            ``"partition"``: the data is divided into one partition per member, and each trains on its partition only.
        voting: How members are combined: ``"soft"``, ``"hard"`` or ``"average"``; see `EnsembleModel`.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.
        batch_size: The default number of rows in a batch.
        cores_per_worker: See `SparkModel`; a worker trains one member.
        gpus_per_worker: See `SparkModel`.
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
        sampling: str = "all",
        voting: str = "soft",
        custom_objects: Mapping[str, Any] | None = None,
        batch_size: int = 32,
        seed: int | None = None,
        cores_per_worker: int | None = None,
        gpus_per_worker: int | None = None,
    ) -> None:
        arguments.one_of("sampling", sampling, SAMPLING)
        given_seed = arguments.optional_integer("seed", seed, low=0)
        self.seed = int(np.random.default_rng().integers(2**31)) if given_seed is None else given_seed
        self.sampling = sampling
        self.voting = voting
        self.models = list(check_members(_made(models, num_models, self.seed), voting))
        _check_apart(self.models)
        self.custom_objects = arguments.custom_objects("custom_objects", custom_objects)
        self.batch_size = arguments.integer("batch_size", batch_size)
        self.cores_per_worker = arguments.optional_integer("cores_per_worker", cores_per_worker)
        self.gpus_per_worker = arguments.optional_integer("gpus_per_worker", gpus_per_worker)
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
    @taking(EnsembleArguments)
    @interruptible()
    def fit(self, data: Any, y: Any = None, **given: Unpack[EnsembleArguments]) -> list[keras.callbacks.History]:
        """Train all members. A further call continues from their current weights.

        Args:
            data: A DataFrame, an RDD or arrays; see `SparkModel.fit`.
            y: The labels, if the data is arrays.
            **given: See `EnsembleArguments`.

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
        checked: Mapping[str, Any] = {**given, "callbacks": [], "initial_epoch": 0}
        checkpoints = MemberCheckpoints.open(given["checkpoint"], given["resume"])
        seed = self.seed, self._fits
        if checkpoints is not None and checkpoints.seed is not None:
            seed = checkpoints.seed
        verbose = 1 if given["verbose"] == "auto" else given["verbose"]
        events = Events([*([Progress(verbose)] if verbose else []), *checked["monitor"]])
        with training(self.models):
            run = Run(
                "independent",
                self.models,
                checked,
                {"members": len(self.models), "sampling": self.sampling, "voting": self.voting},
                custom_objects=self.custom_objects,
                worker_size=WorkerSize(self.cores_per_worker, self.gpus_per_worker),
                events=events,
            )
            check_fit(run, data, y, self.batch_size, int(np.random.SeedSequence(seed).generate_state(1)[0]))
            if checkpoints is not None:
                for model in self.models:
                    find_outside(model, self.custom_objects)
                checkpoints.check(run, self.sampling, seed)
            with events.running(run.started()), watching_spark(events):
                self._train(run, seed, checkpoints)
            self.histories = [model.history for model in self.models]
            self._rows = RowOptions.of_fit(data, run)
        return self.histories

    def _train(self, run: Run, seed: tuple[int, int], checkpoints: MemberCheckpoints | None) -> None:
        by_partition = self.sampling == "partition"
        # Arrays are stored in a single file, which all members memory-map.
        with rows_stored(run, len(self.models) if by_partition else None, slices=1):
            warn_of_sorted_rows(run, averages=by_partition)
            if checkpoints is not None:
                checkpoints.begin(run)
                if trained := len(checkpoints.trained):
                    run.events.emit(RunResumed(f"The checkpoint has {counted(trained, 'member')}."))
            self.seed, self._fits = seed[0], seed[1] + 1
            run.events.emit(WorkersChanged(len(self.models)))
            run.events.emit(PhaseStarted("Training each member in its own task"))
            IndependentStrategy(self.sampling, seed[0], checkpoints).train(run, range(run.initial_epoch, run.epochs))

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
        with seeded((seed, number)):  # Keras draws the seeds of initializers and layers from them
            built.append(models(number) if numbered else models())
    return built


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
