"""`SparkMLlibModel`: a Keras model that works with the LabeledPoints, matrices and vectors of Spark MLlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from sparkkeras.arguments import AS_IN_FIT, AsInFit, documented, known_arguments, taking
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import ConfigurationError, ModelError, counted
from sparkkeras.mllib.conversions import (
    features_of,
    from_matrix,
    from_vector,
    kind_of,
    lp_to_simple_rdd,
    to_matrix,
    to_vector,
)
from sparkkeras.modeling.schema import schema_of
from sparkkeras.parameter.exchange import ParameterServerStats
from sparkkeras.scoring.backends import Backend
from sparkkeras.scoring.inference import Verbose
from sparkkeras.sources.source import is_rdd
from sparkkeras.spark_model import SparkModel, load_saved, save_as
from sparkkeras.training.fit_arguments import ModelSettings, PointArguments, SettingArguments
from sparkkeras.worker.batches import Transform

if TYPE_CHECKING:
    import keras
    from pyspark import RDD
    from pyspark.mllib.regression import LabeledPoint


@documented(ModelSettings)
class SparkMLlibModel:
    """Trains a Keras model on RDDs of LabeledPoints, and predicts for MLlib matrices and vectors.

    It wraps a `SparkModel`, whose arguments it takes.

    Args:
        model: A built Keras model; compiled, for `fit` and `evaluate`. Training changes it in place.
        **given: See `ModelSettings`.

    Attributes:
        spark_model: The wrapped `SparkModel`.

    Raises:
        ModelError: The model is not a Keras model, or not built.
        ConfigurationError: Another argument is unknown or out of range.

    Example::

        mllib_model = SparkMLlibModel(model)
        history = mllib_model.fit(to_labeled_point(sc, x_train, y_train), epochs=10)
        scores = from_matrix(mllib_model.predict(to_matrix(x_test)))
    """

    @known_arguments
    @taking(SettingArguments)
    def __init__(
        self,
        model: keras.Model,
        mode: str = "synchronous",
        frequency: str | int | None = None,
        num_workers: int | None = None,
        **given: Unpack[SettingArguments],
    ) -> None:
        self.spark_model = SparkModel(model, mode, frequency, num_workers, **given)

    def __repr__(self) -> str:
        return repr(self.spark_model).replace("SparkModel", "SparkMLlibModel", 1)

    @property
    def model(self) -> keras.Model:
        """The Keras model; training changes it in place."""
        return self.spark_model.model

    @property
    def master_network(self) -> keras.Model:
        """The Keras model; an alias of `model`, for compatibility with Elephas."""
        return self.model

    @property
    def training_histories(self) -> list[dict[str, Any]]:
        """A record of each worker in each epoch of all calls of `fit`; see `SparkModel.training_histories`."""
        return self.spark_model.training_histories

    @property
    def parameter_server_stats(self) -> ParameterServerStats | None:
        """Statistics of the last `fit`'s parameter server; see `SparkModel.parameter_server_stats`."""
        return self.spark_model.parameter_server_stats

    @known_arguments
    @taking(PointArguments)
    def fit(
        self,
        lp_rdd: RDD[LabeledPoint],
        *,
        categorical: bool = False,
        nb_classes: int | None = None,
        **given: Unpack[PointArguments],
    ) -> keras.callbacks.History:
        """Train the model on Spark. A further call continues from the current weights.

        Args:
            lp_rdd: An RDD of LabeledPoints, with dense or sparse features.
            categorical: Whether to convert labels, which are class indices, to one-hot rows for
                ``categorical_crossentropy``. ``False`` keeps the labels as they are, for regression and
                ``sparse_categorical_crossentropy``.
            nb_classes: The number of classes, with ``categorical`` only; ``None``: the number of units of the output.
            **given: See `PointArguments`.

        Returns:
            A ``keras.callbacks.History`` with metrics over the full dataset, one value per epoch.

        Raises:
            ConfigurationError: An argument is unknown or out of range, or ``nb_classes`` does not fit the model.
            DataError: The data is not an RDD of LabeledPoints, is empty, or does not fit the model or its loss.
            SparkKerasError: Any other error of `SparkModel.fit`.
        """
        transform = given["transform"]
        if is_rdd(given["validation_data"]):
            given["validation_data"] = self._pairs(given["validation_data"], categorical, nb_classes, transform)
        return self.spark_model.fit(self._pairs(lp_rdd, categorical, nb_classes, transform), **given)

    def train(self, lp_rdd: RDD[LabeledPoint], **arguments: Any) -> keras.callbacks.History:
        """An alias of `fit`, for compatibility with Elephas."""
        return self.fit(lp_rdd, **arguments)

    @known_arguments
    def evaluate(
        self,
        lp_rdd: RDD[LabeledPoint],
        *,
        categorical: bool = False,
        nb_classes: int | None = None,
        batch_size: int | None = None,
        return_dict: bool = False,
        verbose: Verbose = 0,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalid | AsInFit | None = AS_IN_FIT,
        backend: Backend | None = None,
    ) -> Any:
        """Compute the loss and metrics over all LabeledPoints, like ``keras.Model.evaluate``.

        Args:
            lp_rdd: The LabeledPoints to evaluate on.
            categorical: Whether to convert labels to one-hot rows; see `fit`.
            nb_classes: The number of classes, with ``categorical`` only; see `fit`.
            batch_size: Rows in a batch; ``None``: the model's ``batch_size``.
            return_dict: Whether to return the values by name.
            verbose: ``"auto"``, 1 or 2 prints the values.
            transform: ``transform(x, y) -> (x, y)``, applied to each batch on the workers. If `fit` had one, a warning says
                so, unless this is ``None``.
            on_invalid: What to do with rows that hold NaN or infinite values: ``"error"``, ``"drop"`` or ``"allow"``.
                ``AS_IN_FIT``: as in `SparkModel.evaluate`.
            backend: The Keras backend that scores; see `SparkModel.predict`.

        Returns:
            A list of values, or a single value if there is only the loss; a dict with ``return_dict=True``.

        Raises:
            ConfigurationError: An argument is unknown or out of range, or ``nb_classes`` does not fit the model.
            DataError: The data is not an RDD of LabeledPoints, is empty, or does not fit the model or its loss.
        """
        return self.spark_model.evaluate(
            self._pairs(lp_rdd, categorical, nb_classes, transform),
            batch_size=batch_size,
            return_dict=return_dict,
            verbose=verbose,
            transform=transform,
            on_invalid=on_invalid,
            backend=backend,
        )

    @known_arguments
    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        verbose: Verbose = 0,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalidToPredict | AsInFit | None = AS_IN_FIT,
        backend: Backend | None = None,
    ) -> Any:
        """Predict for MLlib data; the result has the same form as the data.

        Args:
            data: Of ``pyspark.mllib.linalg`` or ``pyspark.ml.linalg``:

                - a Matrix, shape (samples, features);
                - a Vector, the features of one sample. Each call runs a Spark job, so prefer a Matrix for several samples;
                - an RDD of Vectors or of LabeledPoints, whose labels are ignored.
            batch_size: Rows in a batch; ``None``: the model's ``batch_size``.
            verbose: ``"auto"``, 1 or 2 prints the number of rows, unless the predictions are lazy.
            transform: ``transform(x, None) -> x``, applied to each batch on the workers; as in `evaluate`.
            on_invalid: ``"error"`` raises for NaN and infinite values; ``"allow"`` predicts for them. ``AS_IN_FIT``: as in
                `SparkModel.predict`.
            backend: The Keras backend that scores; see `SparkModel.predict`.

        Returns:
            For a Matrix a DenseMatrix, shape (samples, units); for a Vector a DenseVector, shape (units,); for an RDD a
            lazy RDD with one DenseVector per row, in the same order and partitions. All are of ``pyspark.mllib.linalg``;
            ``asML()`` converts them to ``pyspark.ml.linalg``. Classifiers return scores: the predicted class is the
            ``argmax`` of a row. For a regression with one unit the Matrix has one column.

        Raises:
            DataError: The data has another type, or does not fit the model.
            ModelError: The model has several outputs, or its output is not one row of numbers per sample.
        """
        kind = kind_of(data)
        self._check_output()
        arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "verbose": verbose,
            "transform": transform,
            "on_invalid": on_invalid,
            "backend": backend,
        }
        if kind == "rdd":
            return self.spark_model.predict(data.map(features_of), collect=False, **arguments).map(to_vector)
        if kind == "matrix":
            return to_matrix(self.spark_model.predict(from_matrix(data), **arguments))
        return to_vector(self.spark_model.predict(from_vector(data)[None], **arguments)[0])

    @known_arguments
    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save the model and its settings to one ``.keras`` file, which `load` and `load_spark_model` read.

        Args:
            path: A local path, or a URI that Spark can write to (``hdfs://``, ``s3a://``, ``file:``).
            overwrite: Whether to replace an existing file.

        Raises:
            StorageError: The path cannot be written, or already exists and ``overwrite`` is ``False``.
            ConfigurationError: The path does not end in ``.keras``.
        """
        save_as(SparkMLlibModel.__name__, self.spark_model, path, overwrite)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, safe_mode: bool = True
    ) -> SparkMLlibModel:
        """Load a file that `save` or `SparkModel.save` wrote, another ``.keras`` file, or an HDF5 file.

        Args:
            path: A local path, or a URI that Spark can read.
            custom_objects: Custom classes and functions of the model, by name.
            safe_mode: Whether to reject Python code in the file (lambdas). Turn it off only for files that you trust.

        Raises:
            StorageError: The path cannot be read.
            ModelError: The file contains no model, or contains code that ``safe_mode`` rejects.
        """
        return cls.of(load_saved(path, custom_objects, safe_mode)[0])

    @classmethod
    def of(cls, spark_model: SparkModel) -> SparkMLlibModel:
        """Wrap an existing SparkModel."""
        made = cls.__new__(cls)
        made.spark_model = spark_model
        return made

    def _pairs(self, lp_rdd: Any, categorical: bool, nb_classes: int | None, transform: Transform | AsInFit | None) -> Any:
        """Convert LabeledPoints to rows that a SparkModel accepts.

        Raises:
            ConfigurationError: ``nb_classes`` is set without ``categorical``, or one-hot labels do not fit the model.
            DataError: ``lp_rdd`` is not an RDD of LabeledPoints.
        """
        if nb_classes is not None and not categorical:
            raise ConfigurationError(
                f"nb_classes={nb_classes!r} requires categorical=True, which converts labels to one-hot rows: pass both or "
                "neither."
            )
        outputs = schema_of(self.model).outputs
        width = outputs[0].shape[-1] if len(outputs) == 1 and outputs[0].shape else None
        classes = width if nb_classes is None else nb_classes
        if categorical and transform in (None, AS_IN_FIT) and width is not None and (width == 1 or classes != width):
            raise ConfigurationError(
                f"categorical=True and nb_classes={nb_classes!r} do not fit the model {self.model.name!r}, whose output has "
                f"{counted(width, 'unit')}: one-hot labels need one unit for each of two or more classes. Leave nb_classes "
                "out, change the model's last layer, or leave categorical out to train on the labels as they are."
            )
        return lp_to_simple_rdd(lp_rdd, categorical, classes if categorical else None)

    def _check_output(self) -> None:
        outputs = schema_of(self.model).outputs
        if len(outputs) > 1 or any(spec.shape is None or len(spec.shape) != 1 for spec in outputs):
            received = ", ".join(f"{spec.name!r} with rows of shape {spec.shape}" for spec in outputs)
            raise ModelError(
                f"predictions of the model {self.model.name!r} do not fit into a Matrix or Vector: it has the outputs "
                f"{received}; expected one with rows of shape (n,). Flatten the output, or call spark_model.predict, which "
                "returns arrays."
            )
