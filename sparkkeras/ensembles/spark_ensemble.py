"""`SparkEnsemble`: the members of an ensemble, trained at the same time."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.block import describe
from sparkkeras.data.schema import OnInvalid
from sparkkeras.ensembles.compatibility import check_members
from sparkkeras.ensembles.ensemble import EnsembleModel
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.modeling.archive import ModelArchive, check_trainable, schema_of
from sparkkeras.modeling.locks import training
from sparkkeras.scoring.inference import Verbose, as_line
from sparkkeras.sources.frame import Columns, Loaders
from sparkkeras.spark.cluster import interruptible
from sparkkeras.training.independent import SAMPLING, IndependentStrategy
from sparkkeras.training.job import Coordination
from sparkkeras.training.preparation import FitRequest, Partitioning, check_fit, prepare_fit
from sparkkeras.worker.trainer import Transform

Build = Callable[[], keras.Model] | Callable[[int], keras.Model]


class SparkEnsemble:
    """Models that train on Spark at the same time, each on its own, and vote afterwards.

    All members train in one Spark job, one a task; those beyond the free slots wait for their turn.

    Args:
        models: A function ``build()`` or ``build(number)`` that returns a compiled model, called here for each member; or a
            list of compiled models, which are trained in place. Architectures may differ, inputs and outputs may not.
        num_models: How many members ``build`` makes.
        mode: ``"independent"``: members never exchange anything.
        sampling: What a member trains on. ``"all"``: all rows, so that members differ by where they begin, their shuffles
            and their architecture. ``"bootstrap"``: as many rows as there are, drawn from all with replacement (bagging).
            ``"partition"``: its own partition of ``num_models``; rows go nowhere else.
        voting: As of `EnsembleModel`.
        custom_objects: Custom classes and functions by name, where they cannot be found in the models.
        batch_size: Rows in a batch, where `fit` does not say.
        seed: What first weights (of ``build``), rows, shuffles and dropout masks are drawn from. ``None`` draws one. With
            the same seed, data and partitions, members come out the same.

    Attributes:
        models: The members.
        histories: What `fit` returned last.

    Raises:
        ModelError: A model is not compiled or not built, or they do not belong together.
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
        given_seed = arguments.optional_number("seed", seed, low=0)
        self.seed = int(np.random.default_rng().integers(2**31)) if given_seed is None else given_seed
        self.mode = mode
        self.sampling = sampling
        self.voting = voting
        self.models = list(check_members(_made(models, num_models, self.seed), voting))
        _check_apart(self.models)
        self.custom_objects = arguments.custom_objects(custom_objects)
        self.batch_size = arguments.whole_number("batch_size", batch_size)
        self.histories: list[keras.callbacks.History] = []
        for model in self.models:
            check_trainable(model)
        self._fits = 0
        self._ensemble: EnsembleModel | None = None

    def __repr__(self) -> str:
        return f"SparkEnsemble({len(self.models)} models, sampling={self.sampling!r}, voting={self.voting!r})"

    @property
    def ensemble(self) -> EnsembleModel:
        """The members as they are now, as one.

        Raises:
            ConfigurationError: They have not been trained yet.
        """
        if not self.histories:
            raise ConfigurationError("the ensemble has not been trained yet: call fit first.")
        if self._ensemble is None:
            self._ensemble = EnsembleModel(self.models, self.voting, custom_objects=self.custom_objects)
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
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        steps_per_epoch: int | None = None,
        features: Columns | None = None,
        label: Columns | None = None,
        loader: Loaders | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalid = "error",
        worker_callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
    ) -> list[keras.callbacks.History]:
        """Train all members. Called again, they go on from where they stood.

        Args:
            data: A DataFrame, an RDD or arrays; this and all else as in `SparkModel.fit`.
            y: The labels that go with arrays.
            epochs: How many epochs each member trains.
            batch_size: Rows in a batch; ``None`` takes the ensemble's.
            verbose: 0 is silent; else a line for each member is written when all are trained.
            validation_split: The share of rows that validates. No member trains on any of them, and each validates on all,
                but with ``sampling="partition"`` on those of its own partition.
            validation_data: What each member validates on instead.
            validation_col: A column of the DataFrame: its rows that are true validate instead.
            validation_freq: Validate every so many epochs.
            validation_batch_size: Rows in a batch of validation.
            shuffle: Whether members go through their rows in another order each epoch.
            class_weight: A weight for each class.
            sample_weight: Weights that go with arrays; of a DataFrame their column.
            steps_per_epoch: At most so many batches in an epoch.
            features: The columns of a DataFrame that the members take.
            label: The columns of the labels.
            loader: What turns a column into an input.
            transform: ``transform(x, y) -> (x, y)`` on each batch.
            on_invalid: ``"error"``, ``"drop"`` or ``"allow"``.
            worker_callbacks: Keras callbacks that run with each member, a copy of them for each: ``EarlyStopping`` sees the
                member's own figures, validation included, and ends this member only.

        Returns:
            The history of each member.

        Raises:
            ConfigurationError: An argument is unknown or out of range, or a member would have no rows.
            DataError: The data is empty, malformed, or does not fit a member or its loss.
            ModelError: Another call of ``fit`` is training a member.
            DivergenceError: Weights or loss of a member became NaN or infinite; no member is changed then.
            WorkerError: A task failed for good; the message has its traceback. No member is changed then.
        """
        for model in self.models:
            check_trainable(model)
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
                seed=int(np.random.SeedSequence([self.seed, self._fits]).generate_state(1)[0]),
            )
            self.histories = self._train(request)
        return self.histories

    def _train(self, request: FitRequest) -> list[keras.callbacks.History]:
        archives = [ModelArchive.pack(model, self.custom_objects) for model in self.models]
        one_file = None if request.source.block is None else 1  # that all members map into memory
        partitioning = Partitioning(len(self.models) if self.sampling == "partition" else one_file, 1)
        strategy = IndependentStrategy(self.models, archives, self.sampling, self.seed)
        rows = prepare_fit(
            request, self.models, archives, self.custom_objects, partitioning, Coordination(), workers_validate=True
        )
        with rows as (job, stored):
            self._fits += 1
            if request.verbose:
                sys.stdout.write(f"Training {len(self.models)} members, each in a task of its own.\n")
            strategy.fit(job, stored)
        if request.verbose:
            for number, history in enumerate(strategy.histories):
                logs = as_line({name: values[-1] for name, values in history.history.items()})
                sys.stdout.write(f"Member {number} - {len(history.epoch)} epochs - {logs}\n")
        return strategy.histories

    def predict(self, data: Any, **options: Any) -> Any:
        """As `EnsembleModel.predict`, with its arguments."""
        return self.ensemble.predict(data, **options)

    def evaluate(self, data: Any, y: Any = None, **options: Any) -> Any:
        """As `EnsembleModel.evaluate`, with its arguments."""
        return self.ensemble.evaluate(data, y, **options)

    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """As `EnsembleModel.save`; `load_ensemble_model` reads it."""
        self.ensemble.save(path, overwrite)


def _made(models: Any, num_models: int | None, seed: int) -> list[Any]:
    """The members: those of a list, or what a function builds."""
    num_models = arguments.optional_number("num_models", num_models)
    if isinstance(models, (list, tuple)):
        if num_models not in (None, len(models)):
            raise ConfigurationError(
                f"num_models={num_models}, but there are {len(models)} models in the list: leave num_models out, or give a "
                "function that builds a model."
            )
        return list(models)
    if isinstance(models, keras.Model) or not callable(models):
        raise ConfigurationError(
            f"models is {describe(models)}; expected a function that builds a compiled model, or a list of compiled models."
        )
    if num_models is None:
        raise ConfigurationError("num_models is missing: how many members shall the function build?")
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
    """What is built in here draws its first weights from a seed; the caller's generators stay as they were."""
    states = random.getstate(), np.random.get_state()
    drawn = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(drawn)  # Keras draws the seeds of initializers and layers from it
    np.random.seed(drawn)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _check_apart(members: Sequence[keras.Model]) -> None:
    """Refuse members that cannot train side by side on the same rows."""
    if len({id(model) for model in members}) < len(members):
        raise ModelError(
            "a model is among the members twice, and training would change it twice: give a model for each, or a function "
            "that builds a new one each time."
        )
    for side in ("inputs", "outputs"):
        names = [[spec.name for spec in getattr(schema_of(model), side)] for model in members]
        for number, each in enumerate(names):
            if len(each) > 1 and each != names[0]:
                raise ModelError(
                    f"models[{number}] names its {side} {each}, but models[0] {names[0]}: where there are several, members "
                    "that train on the same rows name them alike, in the same order."
                )
