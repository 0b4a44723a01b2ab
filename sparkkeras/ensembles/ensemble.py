"""`EnsembleModel`: several trained models that predict as one, by voting or averaging.

The ensemble is itself a Keras model, built from copies of its members (`sparkkeras.ensembles.compatibility`). So it can be
used on Spark like any other model; `SparkModel` does the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import AS_IN_FIT, AsInFit, known_arguments
from sparkkeras.data.block import Block
from sparkkeras.data.labels import label_ranges
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.ensembles import compatibility
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import copy_of, custom_objects_of
from sparkkeras.modeling.compilation import compile_arguments, compile_to_evaluate
from sparkkeras.modeling.custom_code import already_loaded
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.locks import locks_state
from sparkkeras.modeling.schema import schema_of
from sparkkeras.parameter.exchange import EvaluationReport
from sparkkeras.scoring import inference
from sparkkeras.scoring.backends import Backend
from sparkkeras.scoring.inference import Verbose
from sparkkeras.sources.frame import Columns, Loaders, is_frame
from sparkkeras.sources.source import is_batch_function, is_distributed
from sparkkeras.spark import filesystem
from sparkkeras.spark_model import SparkModel
from sparkkeras.training import persistence
from sparkkeras.training.row_options import RowOptions
from sparkkeras.weights import Array
from sparkkeras.worker.batches import BatchOptions, Transform, transformed


class EnsembleModel:
    """Combines trained models into one that predicts by voting or averaging.

    Architectures may differ, but all members must have the same inputs and outputs. The ensemble never changes its members,
    and always uses their current weights: if a member is trained further, so is the ensemble.

    Args:
        models: Built Keras models with the same inputs and outputs.
        voting: ``"soft"``: the weighted mean of the members' probabilities. ``"hard"``: each member votes for its most
            probable class; the class with the most votes gets 1, the others 0, and in a tie the class with the highest mean
            probability wins. A sigmoid unit votes yes above 0.5. ``"average"``: the weighted mean of any outputs, for
            regression.
        weights: The weight of each member, 0 or more; ``None``: equal weights. They are scaled to add up to 1.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.

    Attributes:
        models: The members.
        voting: The voting.
        weights: The weight of each member; they add up to 1.

    Raises:
        ModelError: There are no models, one is not a built Keras model, or their inputs or outputs differ.
        ConfigurationError: ``voting`` or ``weights`` is invalid, or does not fit the models' outputs.

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
        self.weights = compatibility.normalized_weights(weights, len(self.models))
        self.custom_objects = arguments.custom_objects("custom_objects", custom_objects)
        self._rows = RowOptions()  # those of the members' training, if a `SparkEnsemble` trained them
        voters = [(model, weight) for model, weight in zip(self.models, self.weights, strict=True) if weight > 0]
        # Without members of weight 0: if one predicts NaN, 0 * NaN would make the result NaN.
        self._voters = [model for model, _ in voters]
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
        compile_to_evaluate(self._model, compile_arguments(compiled), objects, safe_mode=False)

    def __repr__(self) -> str:
        names = ", ".join(repr(model.name) for model in self.models)
        return f"EnsembleModel([{names}], voting={self.voting!r}, weights={[round(weight, 4) for weight in self.weights]})"

    @property
    @locks_state
    def model(self) -> keras.Model:
        """The ensemble as one Keras model, to save with Keras, for `keras_udf`, or as a part of another model.

        It has the loss and metrics of the first compiled member; compile it for others:
        ``ensemble.model.compile(loss=..., metrics=[...])``.
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
        keyed: bool = False,
        verbose: Verbose = 0,
        features: Columns | AsInFit | None = AS_IN_FIT,
        output_col: str | Sequence[str] | Mapping[str, str] = "prediction",
        loader: Loaders | AsInFit | None = AS_IN_FIT,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalidToPredict | AsInFit | None = AS_IN_FIT,
        backend: Backend | None = None,
    ) -> Any:
        """Predict with the ensemble. The predictions have the shape of one member's.

        Dense arrays are processed in this process, unless members have stateful layers; all other data on Spark.

        Args:
            data: A DataFrame, arrays of features, or an RDD; see `SparkModel.predict`.
            batch_size: Rows in a batch; ``None``: 32, or what stateful layers require.
            collect: ``False`` returns a lazy RDD with one prediction per row.
            keyed: Whether the rows of an RDD are ``(key, x)``; the result is then ``(key, prediction)`` pairs.
            verbose: ``"auto"``, 1 or 2 prints the number of rows, unless the predictions are lazy.
            features: The input columns of a DataFrame, or ``{input name: column(s)}`` with the first member's input names.
                ``AS_IN_FIT``, the default of this argument and of ``loader`` and ``on_invalid``: what `SparkEnsemble.fit`
                used, if its data was of the same kind.
            output_col: The new column or columns of a DataFrame.
            loader: Converts a column of a DataFrame into an input, such as `image_loader`.
            transform: ``transform(x, None) -> x``, applied to each batch. If the members were trained with one, a warning
                says so, unless this is ``None``.
            on_invalid: What to do with rows that hold nulls, NaN or infinite values: ``"error"``, ``"allow"`` or, for a
                DataFrame, ``"null"``; see `SparkModel.predict`.
            backend: The Keras backend that scores, on Spark; see `SparkModel.predict`.

        Returns:
            An array, or for several outputs the structure that a member returns. For a DataFrame, the DataFrame with the
            predictions as new columns.

        Raises:
            DataError: The data is malformed or does not fit the members.
        """
        policy = self._rows.policy_to_predict(data, on_invalid)
        model, rows, transform = self.model, None, self._rows.without_transform("predict", transform)
        if collect and not arguments.flag("keyed", keyed) and backend is None and self._is_here(data):
            arguments.on_invalid_to_predict("on_invalid", policy)
            arguments.one_of("verbose", verbose, get_args(Verbose))
            source, options = inference.check_predict(
                model,
                data,
                self._rows.columns(data, features, None, loader, fits=transform is None),
                batch_size=self._batch_size(batch_size),
                transform=transform,
                on_invalid=policy,
            )
            rows = None if source.block is None or source.block.is_sparse else source.block
        if rows is not None:
            here = [compatibility.predicted(model, transformed(rows, options).x, options.batch_size)] if rows.rows else []
            return inference.concatenated(here, model, verbose)
        return self._on_spark(model).predict(
            data,
            batch_size=batch_size,
            collect=collect,
            keyed=keyed,
            verbose=verbose,
            features=features,
            output_col=output_col,
            loader=loader,
            transform=transform,
            on_invalid=on_invalid,
            backend=backend,
        )

    @known_arguments
    def predict_classes(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalidToPredict | AsInFit | None = AS_IN_FIT,
    ) -> Array:
        """Predict class indices, shape (rows,).

        Args:
            data: Arrays or an RDD.
            batch_size: Rows in a batch; ``None``: 32, or what stateful layers require.
            transform: As in `predict`.
            on_invalid: As in `predict`.

        Raises:
            ConfigurationError: The ensemble does not predict a single class per row, or the data is a DataFrame.
        """
        outputs = schema_of(self._model).outputs
        if self.voting == "average" or len(outputs) > 1:
            reason = 'voting="average"' if self.voting == "average" else f"{len(outputs)} outputs"
            raise ConfigurationError(f"an ensemble with {reason} does not predict classes: use predict.")
        if is_frame(data):
            raise ConfigurationError(
                "predict_classes returns an array and does not accept a DataFrame. Use "
                "KerasTransformer(model=ensemble.model), which adds a column of class indices, or predict, which adds a "
                "column with the ensemble's output."
            )
        shape = outputs[0].shape
        single = bool(shape) and shape is not None and shape[-1] == 1
        if not single and not compatibility.exclusive(self.models)[0]:
            raise ConfigurationError(
                "the classes are not mutually exclusive (one sigmoid for each), so a row can have several: use "
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
        features: Columns | AsInFit | None = AS_IN_FIT,
        label: Columns | AsInFit | None = AS_IN_FIT,
        loader: Loaders | AsInFit | None = AS_IN_FIT,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalid | AsInFit | None = AS_IN_FIT,
        backend: Backend | None = None,
    ) -> Any:
        """Compute the loss and metrics of the ensemble, like ``keras.Model.evaluate``.

        Loss and metrics are those of the first compiled member; see `model` for others. The loss does not include the
        members' regularization penalties. With hard voting, whose outputs are 0 and 1, the loss is not meaningful: use the
        accuracy.

        Args:
            data: A DataFrame, an RDD or arrays; see `SparkModel.evaluate`. Where arrays are processed: see `predict`.
            y: The labels, if the data is arrays.
            batch_size: Rows in a batch; ``None``: 32, or what stateful layers require.
            sample_weight: Sample weights: an array for arrays, the name of a column for a DataFrame.
            return_dict: Whether to return the values by name.
            verbose: ``"auto"``, 1 or 2 prints the values.
            features: As in `predict`.
            label: The label columns of a DataFrame; as ``features``.
            loader: As in `predict`.
            transform: ``transform(x, y) -> (x, y)``, applied to each batch; as in `predict`.
            on_invalid: What to do with rows that hold nulls, NaN or infinite values: ``"error"``, ``"drop"`` or ``"allow"``.
            backend: As in `predict`.

        Returns:
            A list of values, or a single value if there is only the loss; a dict with ``return_dict=True``.

        Raises:
            ModelError: No member is compiled, so there is no loss.
            DataError: The data is empty, malformed, or does not fit the members or the loss.
        """
        if self._model.loss is None:
            raise ModelError(
                "the ensemble cannot be evaluated, since none of its members is compiled: call "
                "ensemble.model.compile(loss=..., metrics=[...]) first."
            )
        model, rows, transform = self.model, None, self._rows.without_transform("evaluate", transform)
        if backend is None and self._is_here(data):
            source, options = inference.check_evaluate(
                model,
                data,
                y,
                sample_weight,
                self._rows.columns(data, features, label, loader, fits=transform is None),
                batch_size=self._batch_size(batch_size),
                transform=transform,
                on_invalid=self._rows.policy(data, on_invalid),
                verbose=verbose,
            )
            rows = None if source.block is None or source.block.is_sparse else source.block
        if rows is not None:
            found = _evaluated_here(model, rows, options)
            return inference.reported(model, inference.results(model, found), return_dict, verbose)
        return self._on_spark(model).evaluate(
            data,
            y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            return_dict=return_dict,
            verbose=verbose,
            features=features,
            label=label,
            loader=loader,
            transform=transform,
            on_invalid=on_invalid,
            backend=backend,
        )

    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save the ensemble as one zip file: the members with their optimizers, the voting and the weights.

        The file is written atomically. `load_ensemble_model` reads it; Keras can load each ``.keras`` file in the zip.

        Args:
            path: A local path, or a URI that Spark can write to (``hdfs://``, ``s3a://``, ``file:``).
            overwrite: Whether to replace an existing file.

        Raises:
            StorageError: The path cannot be written, or already exists and ``overwrite`` is ``False``.
            ConfigurationError: The path ends in ``.keras`` or ``.h5``.
        """
        target = arguments.path("path", path)
        if target.endswith((".keras", ".h5")):
            raise ConfigurationError(
                f"path={target!r}: Keras uses this extension for a single model. Choose another one, such as ensemble.zip, "
                "or save the ensemble as a single model: ensemble.model.save(path)."
            )
        settings = {
            "voting": self.voting,
            "weights": self.weights,
            "compiled": compile_arguments(self._model),
            "rows": self._rows.as_json(self._model),
        }
        filesystem.write_bytes(target, persistence.pack_ensemble(self.models, settings), overwrite)

    def _batch_size(self, given: int | None) -> int:
        return (fixed_batch_size(self._model) or _BATCH_SIZE) if given is None else given

    def _on_spark(self, model: keras.Model) -> SparkModel:
        """The ensemble as a SparkModel; arrays are one partition for stateful layers, which continue from batch to batch."""
        size = fixed_batch_size(model)
        spark_model = SparkModel(
            model,
            num_workers=None if size is None else 1,
            batch_size=self._batch_size(None),
            custom_objects=self.custom_objects,
        )
        spark_model._rows = self._rows
        return spark_model

    def _is_here(self, data: Any) -> bool:
        """Whether this process may predict and evaluate the data: arrays, unless layers are stateful."""
        return fixed_batch_size(self._model) is None and not is_distributed(data) and not is_batch_function(data)


_BATCH_SIZE = 32
"""The default number of rows in a batch, as in Keras."""

_evaluating = threading.Lock()
"""Held from an evaluation in this process until its metrics are read, because threads may share an ensemble."""


def _evaluated_here(model: keras.Model, block: Block, options: BatchOptions) -> inference.EvaluationResult:
    """Evaluate arrays in this process."""
    rows = transformed(block, options)
    x = compatibility.as_input(rows.x)
    with _evaluating:
        logs = model.evaluate(x, rows.y, options.batch_size, sample_weight=rows.sample_weight, verbose=0, return_dict=True)
        report = EvaluationReport(metrics.take(model), rows.rows, logs)
        return inference.EvaluationResult((report,), rows.spec, label_ranges(rows))


@known_arguments
def load_ensemble_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, safe_mode: bool = True
) -> EnsembleModel:
    """Load an ensemble from a file that `EnsembleModel.save` or `SparkEnsemble.save` wrote.

    Args:
        path: A local path, or a URI that Spark can read.
        custom_objects: Custom classes and functions of the members, by name.
        safe_mode: Whether to reject Python code in the file (lambdas). Turn it off only for files that you trust.

    Returns:
        An ensemble of new models with the same voting and weights.

    Raises:
        StorageError: The path cannot be read.
        ModelError: The file is not an ensemble file, or contains code that ``safe_mode`` rejects.
        ConfigurationError: ``path`` is not a path, or ``custom_objects`` contains plain values.
    """
    objects = arguments.custom_objects("custom_objects", custom_objects)
    data = filesystem.read_bytes(arguments.path("path", path))
    try:
        models, settings = persistence.unpack_ensemble(data, objects, safe_mode)
        ensemble = EnsembleModel(models, settings["voting"], settings["weights"], custom_objects=objects)
        found = {**already_loaded(settings["compiled"]), **objects}
        ensemble._rows = RowOptions.from_json(ensemble._model, settings.get("rows"))
        compile_to_evaluate(ensemble.model, settings["compiled"], found, safe_mode=safe_mode)
    except ModelError as error:
        raise type(error)(f"{str(path)!r}: {error}") from error.__cause__
    except (ConfigurationError, KeyError) as error:
        raise ModelError(f"{str(path)!r}: the ensemble's settings are damaged ({type(error).__name__}: {error}).") from error
    return ensemble
