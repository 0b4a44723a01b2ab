"""`SparkMLlibModel`: a compiled Keras model for those who have MLlib's LabeledPoints, matrices and vectors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkkeras.arguments import known_arguments
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.mllib.conversions import (
    as_vectors,
    features_of,
    from_matrix,
    from_vector,
    is_rdd,
    kind_of,
    lp_to_simple_rdd,
    to_matrix,
    to_vector,
)
from sparkkeras.modeling import archive as models
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import UpdateRule
from sparkkeras.parameter.service import ParameterServerStats
from sparkkeras.scoring.inference import Verbose
from sparkkeras.spark_model import SparkModel, load_saved, save_as
from sparkkeras.worker.trainer import Transform

if TYPE_CHECKING:
    import keras
    from pyspark import RDD
    from pyspark.mllib.regression import LabeledPoint


class SparkMLlibModel:
    """A Keras model that trains on an RDD of LabeledPoints and predicts for matrices and vectors of MLlib.

    It has a `SparkModel` inside, which does the work and takes the same arguments.

    Args:
        model: As in `SparkModel`.
        mode: As in `SparkModel`.
        frequency: As in `SparkModel`.
        num_workers: As in `SparkModel`.
        parameter_server_mode: As in `SparkModel`.
        port: As in `SparkModel`.
        rule: As in `SparkModel`.
        server_options: As in `SparkModel`.
        custom_objects: As in `SparkModel`.
        batch_size: As in `SparkModel`.
        seed: As in `SparkModel`.

    Attributes:
        spark_model: The `SparkModel` inside.

    Raises:
        ModelError: The model is no Keras model, or not built.
        ConfigurationError: Another argument is unknown or out of range.

    Example::

        mllib_model = SparkMLlibModel(model)
        history = mllib_model.fit(to_labeled_point(sc, x_train, y_train), epochs=10)
        scores = from_matrix(mllib_model.predict(to_matrix(x_test)))
    """

    @known_arguments
    def __init__(
        self,
        model: keras.Model,
        mode: str = "synchronous",
        frequency: str | int = "epoch",
        num_workers: int | None = None,
        *,
        parameter_server_mode: str = "http",
        port: int = 0,
        rule: str | UpdateRule | None = None,
        server_options: ParameterServerOptions | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        batch_size: int = 32,
        seed: int | None = None,
    ) -> None:
        self.spark_model = SparkModel(
            model,
            mode,
            frequency,
            num_workers,
            parameter_server_mode=parameter_server_mode,
            port=port,
            rule=rule,
            server_options=server_options,
            custom_objects=custom_objects,
            batch_size=batch_size,
            seed=seed,
        )

    def __repr__(self) -> str:
        return repr(self.spark_model).replace("SparkModel", "SparkMLlibModel", 1)

    @property
    def model(self) -> keras.Model:
        """The Keras model, which training changes in place."""
        return self.spark_model.model

    @property
    def master_network(self) -> keras.Model:
        """The trained Keras model, the same as `model`."""
        return self.model

    @property
    def training_histories(self) -> list[dict[str, Any]]:
        """As `SparkModel.training_histories`."""
        return self.spark_model.training_histories

    @property
    def parameter_server_stats(self) -> ParameterServerStats | None:
        """As `SparkModel.parameter_server_stats`."""
        return self.spark_model.parameter_server_stats

    @known_arguments
    def fit(
        self,
        lp_rdd: RDD[LabeledPoint],
        *,
        categorical: bool = False,
        nb_classes: int | None = None,
        epochs: int = 1,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        validation_freq: int = 1,
        validation_batch_size: int | None = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalid = "error",
        worker_callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
    ) -> keras.callbacks.History:
        """Train the model on Spark. Called again, it goes on from where it stood.

        Args:
            lp_rdd: An RDD of LabeledPoints, with dense or sparse features.
            categorical: Whether labels are class numbers that become one-hot rows, for ``categorical_crossentropy``.
                ``False`` leaves them the numbers that they are: for regression, and ``sparse_categorical_crossentropy``.
            nb_classes: How many classes; ``None`` takes the number of the model's outputs. With ``categorical`` only.
            epochs: As in `SparkModel.fit`.
            batch_size: As in `SparkModel.fit`.
            verbose: As in `SparkModel.fit`.
            callbacks: As in `SparkModel.fit`.
            validation_split: As in `SparkModel.fit`.
            validation_data: An RDD of LabeledPoints, or arrays as in `SparkModel.fit`, whose labels are taken as they are.
            validation_freq: As in `SparkModel.fit`.
            validation_batch_size: As in `SparkModel.fit`.
            shuffle: As in `SparkModel.fit`.
            class_weight: As in `SparkModel.fit`.
            initial_epoch: As in `SparkModel.fit`.
            steps_per_epoch: As in `SparkModel.fit`.
            transform: As in `SparkModel.fit`, for instance to reshape features into images.
            on_invalid: As in `SparkModel.fit`.
            worker_callbacks: As in `SparkModel.fit`.

        Returns:
            A ``keras.callbacks.History`` with the figures of the whole data, one value an epoch.

        Raises:
            ConfigurationError: An argument is unknown or out of range, or ``nb_classes`` does not fit the model.
            DataError: It is no RDD of LabeledPoints, it is empty, or it does not fit the model or its loss.
            SparkKerasError: What `SparkModel.fit` raises besides.
        """
        if is_rdd(validation_data):
            validation_data = self._pairs(validation_data, categorical, nb_classes, transform)
        return self.spark_model.fit(
            self._pairs(lp_rdd, categorical, nb_classes, transform),
            epochs=epochs,
            batch_size=batch_size,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            validation_freq=validation_freq,
            validation_batch_size=validation_batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            transform=transform,
            on_invalid=on_invalid,
            worker_callbacks=worker_callbacks,
        )

    def train(self, lp_rdd: RDD[LabeledPoint], **arguments: Any) -> keras.callbacks.History:
        """An alias of `fit`, under the name that Elephas had for it."""
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
        transform: Transform | None = None,
        on_invalid: OnInvalid = "error",
    ) -> Any:
        """The loss and metrics over all LabeledPoints, as ``keras.Model.evaluate`` gives them.

        Args:
            lp_rdd: As in `fit`.
            categorical: As in `fit`.
            nb_classes: As in `fit`.
            batch_size: As in `SparkModel.evaluate`.
            return_dict: As in `SparkModel.evaluate`.
            verbose: As in `SparkModel.evaluate`.
            transform: As in `fit`.
            on_invalid: As in `fit`.

        Returns:
            A list of figures, or a single one where there is only the loss; a dict with ``return_dict=True``.

        Raises:
            ConfigurationError: An argument is unknown or out of range, or ``nb_classes`` does not fit the model.
            DataError: It is no RDD of LabeledPoints, it is empty, or it does not fit the model or its loss.
        """
        return self.spark_model.evaluate(
            self._pairs(lp_rdd, categorical, nb_classes, transform),
            batch_size=batch_size,
            return_dict=return_dict,
            verbose=verbose,
            transform=transform,
            on_invalid=on_invalid,
        )

    @known_arguments
    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        verbose: Verbose = 0,
        transform: Transform | None = None,
        on_invalid: OnInvalidToPredict = "error",
    ) -> Any:
        """The model's predictions for MLlib's data, in the form that the data has.

        Args:
            data: One of these, of ``pyspark.mllib.linalg`` or ``pyspark.ml.linalg``:

                - a Matrix, shape (samples, features);
                - a Vector, the features of one sample. It costs as much as a Matrix of many: a Spark job;
                - an RDD of Vectors or of LabeledPoints, whose labels are left aside.
            batch_size: As in `SparkModel.predict`.
            verbose: As in `SparkModel.predict`.
            transform: As in `SparkModel.predict`.
            on_invalid: As in `SparkModel.predict`.

        Returns:
            For a Matrix a DenseMatrix, shape (samples, outputs); for a Vector a DenseVector of ``outputs`` values; for an
            RDD a lazy RDD with one DenseVector a row, in the same order and partitions. All are of
            ``pyspark.mllib.linalg``; their ``asML()`` gives those of ``pyspark.ml.linalg``. A classifier's outputs are its
            scores: the class is the ``argmax`` of a row. A regression has one output, so its Matrix has one column.

        Raises:
            DataError: The data is none of these, or does not fit the model.
            ModelError: The model has several outputs, or one that is no row of numbers.
        """
        kind = kind_of(data)
        self._check_output()
        arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "verbose": verbose,
            "transform": transform,
            "on_invalid": on_invalid,
        }
        if kind == "rdd":
            return as_vectors(self.spark_model.predict(features_of(data), collect=False, **arguments))
        if kind == "matrix":
            return to_matrix(self.spark_model.predict(from_matrix(data), **arguments))
        return to_vector(self.spark_model.predict(from_vector(data)[None], **arguments)[0])

    @known_arguments
    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save the model and its settings, as `SparkModel.save`; `load` and `load_spark_model` read it.

        Args:
            path: As in `SparkModel.save`.
            overwrite: As in `SparkModel.save`.

        Raises:
            StorageError: The path cannot be written, or is there and ``overwrite`` is off.
            ConfigurationError: The path does not end in ``.keras``.
        """
        save_as(SparkMLlibModel.__name__, self.spark_model, path, overwrite)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, safe_mode: bool = True
    ) -> SparkMLlibModel:
        """Load what `save` or `SparkModel.save` wrote, any ``.keras`` file, or an HDF5 file; see `load_spark_model`.

        Args:
            path: As in `load_spark_model`.
            custom_objects: As in `load_spark_model`.
            safe_mode: As in `load_spark_model`.

        Raises:
            StorageError: The path cannot be read.
            ModelError: It holds no model, or code that ``safe_mode`` refuses.
        """
        return cls.of(load_saved(path, custom_objects, safe_mode)[0])

    @classmethod
    def of(cls, spark_model: SparkModel) -> SparkMLlibModel:
        """A SparkMLlibModel around a SparkModel."""
        made = cls.__new__(cls)
        made.spark_model = spark_model
        return made

    def _pairs(self, lp_rdd: Any, categorical: bool, nb_classes: int | None, transform: Transform | None) -> Any:
        """The LabeledPoints as rows that a SparkModel takes."""
        if nb_classes is not None and not categorical:
            raise ConfigurationError(
                f"nb_classes={nb_classes!r} goes with categorical=True, which makes one-hot labels: give both or neither."
            )
        outputs = models.schema_of(self.model).outputs
        width = outputs[0].shape[-1] if len(outputs) == 1 and outputs[0].shape else None
        classes = width if nb_classes is None else nb_classes
        if categorical and transform is None and width is not None and (width == 1 or classes != width):
            raise ConfigurationError(
                f"categorical=True and nb_classes={nb_classes!r} do not fit the model {self.model.name!r}, which has "
                f"{width} output(s): one-hot labels need an output for each of two or more classes. Leave nb_classes out, "
                "change the model's last layer, or leave categorical out to train on the numbers."
            )
        return lp_to_simple_rdd(lp_rdd, categorical, classes if categorical else None)

    def _check_output(self) -> None:
        outputs = models.schema_of(self.model).outputs
        if len(outputs) > 1 or any(spec.shape is None or len(spec.shape) != 1 for spec in outputs):
            told = ", ".join(f"{spec.name!r} with rows of shape {spec.shape}" for spec in outputs)
            raise ModelError(
                f"predictions of the model {self.model.name!r} do not fit into a Matrix or Vector: it has the output(s) "
                f"{told}; expected one with rows of shape (n,). Flatten it, or call spark_model.predict, which gives arrays."
            )
