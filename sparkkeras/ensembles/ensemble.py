"""`EnsembleModel`: several trained models that vote, or whose predictions are averaged, as one.

The members and the vote are one Keras model, made of copies (`sparkkeras.ensembles.compatibility`). So everything that a
model can do on Spark, an ensemble can; `SparkModel` does the work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.block import Block
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict, label_ranges
from sparkkeras.ensembles import compatibility
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import (
    ModelArchive,
    compile_arguments,
    compile_to_judge,
    copy_of,
    custom_objects_of,
    schema_of,
)
from sparkkeras.modeling.custom_code import already_loaded
from sparkkeras.modeling.locks import locks_state
from sparkkeras.scoring import inference
from sparkkeras.scoring.inference import Verbose
from sparkkeras.sources.frame import Columns, Loaders, is_frame
from sparkkeras.sources.source import ArraySource, NamedColumns
from sparkkeras.spark import storage
from sparkkeras.spark_model import SparkModel
from sparkkeras.training import persistence
from sparkkeras.weights import Array
from sparkkeras.worker.trainer import BatchOptions, Transform, transformed


class EnsembleModel:
    """Trained models that vote, or whose predictions are averaged. Their architectures may differ, their inputs may not.

    The ensemble follows its members: one that is trained on votes as it then is. They themselves are never changed.

    Args:
        models: Built Keras models with the same inputs and outputs.
        voting: ``"soft"``: the weighted mean of the members' probabilities. ``"hard"``: each member votes for its likeliest
            class, and the class with most votes gets 1, the others 0; between classes with equally many votes the mean
            probability decides. A sigmoid unit votes yes above 0.5. ``"average"``: the weighted mean of whatever the members
            give, as for regression.
        weights: How much each member counts, 0 or more; ``None``: all the same. They are scaled to add up to 1.
        custom_objects: Custom classes and functions by name, where they cannot be found in the models.

    Attributes:
        models: The members.
        voting: How they vote.
        weights: What each counts, adding up to 1.

    Raises:
        ModelError: There are no models, one is not built or is no model, or they do not belong together.
        ConfigurationError: ``voting`` or ``weights`` cannot be, or do not fit what the models give.

    Example::

        ensemble = EnsembleModel([wide, deep, convolutional])
        ensemble.evaluate(x_test, y_test)
        scored = ensemble.predict(df, features="pixels")
    """

    @known_arguments
    def __init__(
        self,
        models: Sequence[keras.Model],
        voting: str = "soft",
        weights: Sequence[float] | None = None,
        *,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        self.models = compatibility.check_members(models, voting)
        self.voting = voting
        self.weights = compatibility.shares(weights, len(self.models))
        self.custom_objects = arguments.custom_objects(custom_objects)
        voters = [(model, weight) for model, weight in zip(self.models, self.weights, strict=True) if weight > 0]
        self._voters = [model for model, _ in voters]  # one that counts nothing must not make NaN of the others either
        self._copies = [copy_of(model, self.custom_objects) for model in self._voters]
        self._model = compatibility.as_one_model(
            self.models[0],
            self._copies,
            [weight for _, weight in voters],
            voting == "hard",
            compatibility.exclusive(self.models),
        )
        compiled = compatibility.first_compiled(self.models) or self.models[0]
        objects = custom_objects_of(compiled, self.custom_objects)
        compile_to_judge(self._model, compile_arguments(compiled), objects, safe_mode=False)

    def __repr__(self) -> str:
        names = ", ".join(repr(model.name) for model in self.models)
        return f"EnsembleModel([{names}], voting={self.voting!r}, weights={[round(weight, 4) for weight in self.weights]})"

    @property
    @locks_state
    def model(self) -> keras.Model:
        """The ensemble as one Keras model: to save with Keras, for `keras_udf`, or to nest.

        Compile it anew (``ensemble.model.compile(loss=..., metrics=[...])``) for other figures than those that the first
        compiled member has.
        """
        for copy, member in zip(self._copies, self._voters, strict=True):
            copy.set_weights(member.get_weights())
        return self._model

    @known_arguments
    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collect: bool = True,
        verbose: Verbose = 0,
        features: Columns | None = None,
        output_col: str | Sequence[str] | Mapping[str, str] = "prediction",
        loader: Loaders | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalidToPredict = "error",
    ) -> Any:
        """The ensemble's predictions, in the shape that one member's have.

        Arrays are predicted in this process, an RDD or a DataFrame on Spark.

        Args:
            data: A DataFrame, arrays of features, or an RDD; this and all else as in `SparkModel.predict`.
            batch_size: Rows in a batch.
            collect: ``False`` returns a lazy RDD with one prediction a row.
            verbose: ``"auto"``, 1 or 2 prints the number of rows, where the predictions are not lazy.
            features: The columns of a DataFrame that the members take, by the names of the first one's inputs.
            output_col: The column that a DataFrame gets.
            loader: What turns a column of a DataFrame into an input.
            transform: ``transform(x, None) -> x`` on each batch.
            on_invalid: ``"error"`` or ``"allow"``.

        Returns:
            An array, or for several outputs what a member returns. For a DataFrame the same with the predictions beside its
            rows.

        Raises:
            DataError: The data is malformed or does not fit the members.
        """
        arguments.on_invalid_to_predict(on_invalid)
        arguments.one_of("verbose", verbose, get_args(Verbose))
        if is_frame(data):
            return SparkModel(self.model, custom_objects=self.custom_objects).predict(
                data,
                batch_size=batch_size,
                features=features,
                output_col=output_col,
                loader=loader,
                transform=transform,
                on_invalid=on_invalid,
            )
        model = self.model
        source, options = inference.check_predict(
            model,
            data,
            NamedColumns(features, loader=loader),
            batch_size=_BATCH_SIZE if batch_size is None else batch_size,
            transform=transform,
            on_invalid=on_invalid,
        )
        if collect and type(source) is ArraySource:
            rows = source.block
            here = [compatibility.predicted(model, transformed(rows, options).x, options.batch_size)] if rows.rows else []
            return inference.concatenated(here, model, verbose)
        archive = ModelArchive.pack_to_predict(model, self.custom_objects)
        if not collect:
            return inference.lazily(model, source, archive, options)
        return inference.concatenated(inference.predict_source(model, source, archive, options), model, verbose)

    @known_arguments
    def predict_classes(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalidToPredict = "error",
    ) -> Array:
        """The number of the class that the ensemble decides for, shape (rows,).

        Args:
            data: Arrays or an RDD; this and all else as in `predict`.
            batch_size: Rows in a batch.
            transform: As in `predict`.
            on_invalid: As in `predict`.

        Raises:
            ConfigurationError: The ensemble does not decide between classes, or the data is a DataFrame.
        """
        outputs = schema_of(self._model).outputs
        if self.voting == "average" or len(outputs) > 1:
            told = 'voting="average"' if self.voting == "average" else f"{len(outputs)} outputs"
            raise ConfigurationError(f"an ensemble with {told} does not decide between classes: take predict.")
        if is_frame(data):
            raise ConfigurationError(
                "predict_classes gives an array, and the rows of a DataFrame stay where they are: take predict, and the "
                "place of the largest value of its column (KerasTransformer(model=ensemble.model) does that)."
            )
        shape = outputs[0].shape
        single = bool(shape) and shape is not None and shape[-1] == 1
        if not single and not compatibility.exclusive(self.models)[0]:
            raise ConfigurationError(
                "the classes do not exclude each other (a sigmoid for each), so a row has no one class: take "
                "predict(...) > 0.5."
            )
        (predicted,) = keras.tree.flatten(
            self.predict(data, batch_size=batch_size, transform=transform, on_invalid=on_invalid)
        )
        classes: Array = (predicted[..., 0] > 0.5).astype(np.int64) if single else predicted.argmax(axis=-1)
        return classes

    @known_arguments
    def evaluate(
        self,
        data: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        return_dict: bool = False,
        verbose: Verbose = 0,
        features: Columns | None = None,
        label: Columns | None = None,
        loader: Loaders | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalid = "error",
    ) -> Any:
        """The loss and metrics of the ensemble, as ``keras.Model.evaluate`` gives them.

        They are those that the first compiled member was compiled with; see `model` for others. A member's penalties on its
        weights are not part of the loss. After a hard vote, which gives zeros and ones, the loss says little: look at the
        accuracy.

        Args:
            data: A DataFrame, an RDD or arrays; this and all else as in `SparkModel.evaluate`. Arrays are evaluated in this
                process.
            y: The labels that go with arrays.
            batch_size: Rows in a batch.
            sample_weight: Weights that go with arrays; of a DataFrame their column.
            return_dict: Whether to return figures by name.
            verbose: ``"auto"``, 1 or 2 prints the figures.
            features: As in `predict`.
            label: The columns of the labels.
            loader: As in `predict`.
            transform: ``transform(x, y) -> (x, y)`` on each batch.
            on_invalid: ``"error"``, ``"drop"`` or ``"allow"``.

        Returns:
            A list of figures, or a single one where there is only the loss; a dict with ``return_dict=True``.

        Raises:
            ModelError: No member says what to measure.
            DataError: The data is empty, malformed, or does not fit the members or the loss.
        """
        if self._model.loss is None:
            raise ModelError(
                "there is nothing to measure the ensemble by, since none of its members is compiled: call "
                "ensemble.model.compile(loss=..., metrics=[...]) first."
            )
        model = self.model
        source, options = inference.check_evaluate(
            model,
            data,
            y,
            sample_weight,
            NamedColumns(features, label, loader, fits=transform is None),
            batch_size=_BATCH_SIZE if batch_size is None else batch_size,
            transform=transform,
            on_invalid=on_invalid,
            verbose=verbose,
        )
        if type(source) is ArraySource:
            found: inference.Evaluated | None = _evaluated_here(model, source.block, options)
        else:
            found = inference.evaluate_source(model, source, ModelArchive.pack(model, self.custom_objects), options)
        return inference.reported(model, inference.results(model, found), return_dict, verbose)

    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save all members with their optimizers, and how they vote, as one file (a zip).

        The file is there whole or not at all. `load_ensemble_model` reads it; each ``.keras`` file in it is Keras's own.

        Args:
            path: A path of this machine, or a URI that Spark can write (``hdfs://``, ``s3a://``, ``file:``).
            overwrite: ``False`` refuses to replace a file.

        Raises:
            StorageError: The path cannot be written, or is there and ``overwrite`` is off.
            ConfigurationError: The path ends in ``.keras``.
        """
        target = arguments.path("path", path)
        if target.endswith((".keras", ".h5")):
            raise ConfigurationError(
                f"path={target!r}: what ends so is a single model to Keras. Name the file otherwise, such as "
                "ensemble.zip, or save the ensemble as one model: ensemble.model.save(path)."
            )
        settings = {"voting": self.voting, "weights": self.weights, "compiled": compile_arguments(self._model)}
        storage.write_bytes(target, persistence.pack_ensemble(self.models, settings), overwrite)


_BATCH_SIZE = 32
"""Rows in a batch where a call does not say, as in Keras."""


def _evaluated_here(model: keras.Model, block: Block, options: BatchOptions) -> inference.Evaluated:
    """Evaluate arrays in this process."""
    rows = transformed(block, options)
    x = compatibility.as_input(rows.x)
    model.evaluate(x, rows.y, options.batch_size, sample_weight=rows.sample_weight, verbose=0)
    return inference.Evaluated(metrics.take(model), rows.spec, label_ranges(rows))


def load_ensemble_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, safe_mode: bool = True
) -> EnsembleModel:
    """Load what `EnsembleModel.save` wrote.

    Args:
        path: A path of this machine, or a URI that Spark can read.
        custom_objects: Custom classes and functions of the members, by name.
        safe_mode: Whether to refuse Python code inside the file (lambdas). Turn it off for files that you trust only.

    Returns:
        An ensemble of new models with the same voting and weights.

    Raises:
        StorageError: The path cannot be read.
        ModelError: It holds no ensemble, or code that ``safe_mode`` refuses.
        ConfigurationError: The path is none, or ``custom_objects`` holds something else.
    """
    objects = arguments.custom_objects(custom_objects)
    data = storage.read_bytes(arguments.path("path", path))
    try:
        models, settings = persistence.unpack_ensemble(data, objects, safe_mode)
        ensemble = EnsembleModel(models, settings["voting"], settings["weights"], custom_objects=objects)
        found = {**already_loaded(settings["compiled"]), **objects}
        compile_to_judge(ensemble.model, settings["compiled"], found, safe_mode=safe_mode)
    except ModelError as error:
        raise type(error)(f"{str(path)!r}: {error}") from error.__cause__
    except (ConfigurationError, KeyError) as error:
        raise ModelError(f"{str(path)!r}: the ensemble's settings are damaged ({type(error).__name__}: {error}).") from error
    return ensemble
