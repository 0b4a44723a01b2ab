"""`KeyedModel`: a model for each key of a DataFrame, such as a store, a sensor or a customer.

Keys are dealt to partitions by their number of rows. A worker trains one key after the other, with one traced model, and
returns a row of the table of models for each (`sparkkeras.keyed.table`). To score, the table is put beside the rows: sorted
by key, they come to the workers after the weights of their model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Unpack

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import AS_IN_FIT, AsInFit, known_arguments, taking
from sparkkeras.data.block import describe
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import ConfigurationError, DataError, ModelError, StorageError
from sparkkeras.events import Events, RunStarted
from sparkkeras.keyed import rows as keyed_rows
from sparkkeras.keyed import table as tables
from sparkkeras.keyed.rows import IDENTITY, MODEL_WEIGHTS
from sparkkeras.keyed.table import METRICS, MODEL, WEIGHTS
from sparkkeras.keyed.tasks import EvaluateKeys, ScoreKeys, dump_weights, load_weights
from sparkkeras.keyed.training import KeyedTraining, architecture_of, over_keys
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_built, check_not_synchronized, check_trainable, needs_labels
from sparkkeras.modeling.description import describe_model
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.labels import check_class_weight, check_label_structure
from sparkkeras.modeling.locks import training
from sparkkeras.modeling.outside import dump_callbacks
from sparkkeras.modeling.own_methods import check_can_evaluate, check_can_train
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.modeling.state import ModelWeights, layout, put_weights, take_weights, weight_variables
from sparkkeras.progress.renderer import Progress
from sparkkeras.scoring.columns import Scorer, with_predictions
from sparkkeras.scoring.inference import batch_options, transform_by_value
from sparkkeras.sources.column_names import column_named
from sparkkeras.sources.frame import ColumnMapping, Columns, Loaders, Selection, is_frame
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.cluster import start_workers
from sparkkeras.spark.connect import AnyCluster, active_session, cluster_of
from sparkkeras.spark.job_errors import interruptible
from sparkkeras.training import persistence
from sparkkeras.training.callbacks import check_monitors, has_monitor
from sparkkeras.training.fit_arguments import KeyedArguments, WorkerArguments
from sparkkeras.training.row_options import RowOptions
from sparkkeras.weights import Flat, Layout
from sparkkeras.worker import device
from sparkkeras.worker.batches import FitOptions, Transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkkeras.scoring.column_functions import ArgumentsToBlocks

BATCH_SIZE = 256
"""The default number of rows in each call of a model to predict: a key has few."""


class KeyedModel:
    """A model for each key of a DataFrame: all have the architecture of one model, and weights of their own.

    The model of each key starts from the weights of ``model`` and trains on the rows of its key alone, as with Keras's
    ``fit``. Thousands of small models train in one Spark job. The rows of a key must fit into the memory of a worker.

    Args:
        model: A compiled Keras model. It is not changed.
        key: The column of keys, or several: strings, whole numbers, dates or booleans, without nulls.
        batch_size: The default number of rows in a batch.
        seed: The seed of shuffles and dropout masks: the same seed, rows and model give the same weights.
        **given: See `WorkerArguments`.

    Raises:
        ModelError: The model is not compiled or not built, or cannot be trained in this way.
        ConfigurationError: Another argument is unknown or out of range.

    Example::

        stores = KeyedModel(model, key="store")
        stores.fit(df, features=["day", "price"], label="sales", epochs=20)
        stores.predict(new_rows).show()
        stores.models["store 17"].summary()
    """

    @known_arguments
    @taking(WorkerArguments)
    def __init__(
        self,
        model: keras.Model,
        key: str | Sequence[str],
        *,
        batch_size: int = 32,
        seed: int = 0,
        **given: Unpack[WorkerArguments],
    ) -> None:
        check_trainable(model)
        check_not_synchronized(model)
        device.check_supported(model)
        if (size := fixed_batch_size(model)) is not None:
            raise ModelError(
                f"the model {model.name!r} has a fixed batch size of {size} rows, and keys have any number of rows: build "
                "it without a batch size."
            )
        self.model = model
        self.key = _key_names(key)
        self.batch_size = arguments.integer("batch_size", batch_size)
        self.seed = arguments.integer("seed", seed, low=0)
        self.custom_objects = arguments.custom_objects("custom_objects", given["custom_objects"])
        self.cores_per_worker, self.gpus_per_worker = given["cores_per_worker"], given["gpus_per_worker"]
        self._rows = RowOptions()
        self._table: DataFrame | None = None
        self._architecture = ""  # the digest of the model that the table is of

    def __repr__(self) -> str:
        return f"KeyedModel({self.model.name!r}, key={self.key[0] if len(self.key) == 1 else list(self.key)!r})"

    @known_arguments
    @taking(KeyedArguments)
    @interruptible()
    def fit(self, data: DataFrame, **given: Unpack[KeyedArguments]) -> DataFrame:
        """Train a model for each key.

        A further call trains the keys whose rows have changed, or are new, from the weights of ``model``; keys without rows
        in ``data`` keep their models. If an argument has changed, all keys are trained; functions and callbacks are compared
        by their names and settings. If ``model`` has other layers or was compiled in another way, the table begins anew.

        A key that fails, because its rows do not fit the model or its loss becomes NaN, does not stop the others: it has no
        model then, also if it had one before, and `metrics` has the error. The next call trains it again.

        Args:
            data: The rows, which are read once, and kept by the executors until training ends.
            **given: See `KeyedArguments`.

        Returns:
            The metrics by key; see `metrics`.

        Raises:
            DataError: A column is missing or does not fit the model, a key is null, or there are no rows.
            ConfigurationError: An argument is unknown or out of range.
            CustomObjectError: The model or a callback cannot be sent.
            WorkerError: No key has a model, or a task failed repeatedly.
            StorageError: ``save_to`` cannot be read, or holds something else.
        """
        frame = _frame(data)
        checked: Mapping[str, Any] = given
        keys = tables.key_fields(frame, self.key)
        options, selection = self._checked(frame, checked)
        verbose = 1 if given["verbose"] == "auto" else given["verbose"]
        events = Events([Progress(verbose)] if verbose else [])
        shown = {"key": ", ".join(self.key), "batch_size": options.batch_size, **describe_model(self.model)}
        with (
            training([self.model]),
            events.running(RunStarted("fit", self.model.name, shown, given["epochs"])),
            watching_spark(events),
        ):
            start_workers()
            cluster = self._cluster(frame)
            archive = ModelArchive.pack(self.model, self.custom_objects)
            if given["callbacks"]:  # packing has found the variables outside the model, which they may refer to
                options = replace(options, callbacks=dump_callbacks(given["callbacks"], [self.model]))
            rows = RowOptions(
                "DataFrame",
                selection.mapped("x", selection.reader.schema.inputs),
                selection.mapped("y", selection.reader.schema.outputs),
                given["loader"],
                given["on_invalid"],
                None if given["transform"] is None else getattr(given["transform"], "__name__", "transform"),
            )
            run = KeyedTraining(
                self.model, self.key, self.custom_objects, cluster, archive, selection, keys, options, checked
            )
            before = self._table if self._architecture == run.architecture else None
            self._table = run.train(frame, before, lambda: self._packed(rows), events)
            self._rows, self._architecture = rows, run.architecture
        return self.metrics

    def _checked(self, frame: DataFrame, given: Mapping[str, Any]) -> tuple[FitOptions, Selection]:
        """Check the arguments of `fit` together, and against the columns."""
        model, transform = self.model, given["transform"]
        if given["validation_split"] and not given["order_by"]:
            raise ConfigurationError(
                f"validation_split={given['validation_split']} needs order_by=: it takes the last rows of each key, for "
                "instance those of the latest days."
            )
        if given["class_weight"] is not None:
            if given["sample_weight"] is not None:
                raise ConfigurationError(
                    "class_weight and sample weights cannot be combined: multiply the sample weights by the class weights."
                )
            if len(schema_of(model).outputs) > 1:
                raise ConfigurationError(
                    "class_weight is not supported for models with several outputs: use sample weights."
                )
            check_class_weight(model, given["class_weight"])
        validates = bool(given["validation_split"])
        if not validates:
            _check_no_validation(given["callbacks"])
        check_monitors([model], self.custom_objects, given["callbacks"], [], validates, False)
        check_can_train(model, validates)
        reader = Reader(
            schema_of(model).before(transform), True, given["on_invalid"], labels_optional=not needs_labels([model])
        )
        columns = ColumnMapping(
            given["features"], given["label"], given["sample_weight"], given["loader"], fits=transform is None
        )
        selection = columns.select(frame, reader)
        if transform is None:
            check_label_structure(model, selection.form.y)
        options = FitOptions(
            batch_size=given["batch_size"] or self.batch_size,
            transform=transform_by_value(transform),
            input_structure=input_structure(model),
            shuffle=given["shuffle"],
            seed=self.seed,
            class_weight=given["class_weight"],
        )
        return options, selection

    def _cluster(self, frame: DataFrame) -> AnyCluster:
        return cluster_of(frame.sparkSession).with_task(self.cores_per_worker, self.gpus_per_worker, "worker")

    @property
    def _models(self) -> DataFrame:
        if self._table is None:
            raise ConfigurationError("the model has not been trained yet: call fit first.")
        return self._table

    @property
    def metrics(self) -> DataFrame:
        """The training of each key, as a DataFrame.

        Its columns are those of the key, ``rows``, ``epochs``, ``loss`` and ``val_loss`` of the last epoch, ``logs`` (a map
        of all metrics of the last epoch by name), and ``error`` (null if the key has a model).

        Raises:
            ConfigurationError: `fit` has not been called.
        """
        return self._models.select(*map(column_named, [*self.key, *METRICS]))

    @property
    def models(self) -> Mapping[Any, keras.Model]:
        """The models by key, each loaded when it is asked for: ``models[17]``, or ``models["A", 17]`` for two columns.

        Raises:
            ConfigurationError: `fit` has not been called.
        """
        return KeyedModels(self, self._models)

    @known_arguments
    def predict(
        self,
        data: DataFrame,
        output_col: str | Sequence[str] | Mapping[str, str] = "prediction",
        *,
        default: keras.Model | None = None,
        batch_size: int = BATCH_SIZE,
        features: Columns | AsInFit | None = AS_IN_FIT,
        loader: Loaders | AsInFit | None = AS_IN_FIT,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalidToPredict | AsInFit = AS_IN_FIT,
    ) -> DataFrame:
        """Add the predictions of each row's model to a DataFrame, which Spark computes lazily. Rows are sorted by key.

        Args:
            data: The rows, with the columns of the key.
            output_col: The new column; for several outputs see `SparkModel.predict`.
            default: A model for keys that have none, with the same layers as ``model``: for instance one that was trained on
                the rows of all keys. ``None``: their predictions are null.
            batch_size: The largest number of rows in each call of a model.
            features: The columns of the inputs; default: those of `fit`.
            loader: See `SparkModel.predict`.
            transform: See `SparkModel.predict`.
            on_invalid: See `SparkModel.predict`.

        Raises:
            ConfigurationError: `fit` has not been called, or an argument is unknown or out of range.
            DataError: A column is missing or does not fit the model.
            ModelError: ``default`` has other variables than the model.
        """
        frame = self._frame_to_score(data)
        used = self._rows.without_transform("predict", transform)
        policy = self._rows.policy_to_predict(frame, on_invalid)
        plain = Scorer.of(
            self.model,
            batch_size=arguments.integer("batch_size", batch_size),
            transform=used,
            custom_objects=self.custom_objects,
            on_invalid=arguments.on_invalid_to_predict("on_invalid", policy),
        )
        columns = self._rows.columns(frame, features, None, loader, used is None)
        selection = columns.select(frame, plain.reader)
        scorer = KeyedScorer(
            **{each.name: getattr(plain, each.name) for each in fields(plain)},
            layout=self._layout,
            default=self._default(default),
        )
        together = keyed_rows.beside_models(frame, self.key, self._models)
        before = [column_named(IDENTITY), column_named(MODEL_WEIGHTS)]
        scored = with_predictions(together, scorer, selection, output_col, before)
        return scored.where(column_named(MODEL_WEIGHTS).isNull()).drop(IDENTITY, MODEL_WEIGHTS)

    def transform(self, data: DataFrame, **options: Any) -> DataFrame:
        """`predict` under the name that Spark ML has for it."""
        return self.predict(data, **options)

    @known_arguments
    def evaluate(
        self,
        data: DataFrame,
        *,
        default: keras.Model | None = None,
        batch_size: int | None = None,
        features: Columns | AsInFit | None = AS_IN_FIT,
        label: Columns | AsInFit | None = AS_IN_FIT,
        sample_weight: Columns | None = None,
        loader: Loaders | AsInFit | None = AS_IN_FIT,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalid | AsInFit = AS_IN_FIT,
    ) -> DataFrame:
        """The loss and the metrics of each key's model on its rows, as a DataFrame that Spark computes lazily.

        Its columns are those of the key, ``rows``, ``loss``, ``logs`` (a map of all metrics by name), and ``error`` (null if
        the key was evaluated).

        Args:
            data: The rows, with the columns of the key.
            default: See `predict`.
            batch_size: Rows per batch; default: that of the constructor.
            features: The columns of the inputs; default: those of `fit`.
            label: The columns of the labels; default: those of `fit`.
            sample_weight: The column of weights.
            loader: See `SparkModel.evaluate`.
            transform: See `SparkModel.evaluate`.
            on_invalid: See `SparkModel.evaluate`.

        Raises:
            ConfigurationError: `fit` has not been called, or an argument is unknown or out of range.
            DataError: A column is missing or does not fit the model.
            ModelError: ``default`` has other variables than the model.
        """
        frame, model = self._frame_to_score(data), self.model
        check_can_evaluate(model)
        used = self._rows.without_transform("evaluate", transform)
        reader = Reader(
            schema_of(model).before(used),
            True,
            self._rows.policy(frame, on_invalid),
            labels_optional=not needs_labels([model]),
        )
        columns = replace(self._rows.columns(frame, features, label, loader, used is None), sample_weight=sample_weight)
        selection = columns.select(frame, reader)
        options = batch_options(model, arguments.optional_integer("batch_size", batch_size) or self.batch_size, used)
        cluster = self._cluster(frame)
        other = self._default(default)
        task = EvaluateKeys(
            cluster.keep(ModelArchive.pack(model, self.custom_objects)),
            selection,
            len(self.key),
            cluster.keep(ModelWeights.take(model)),
            self._layout,
            cluster.keep(replace(options, to_predict=False)),
            None if other is None else cluster.keep(other),
        )
        together = keyed_rows.beside_models(frame, self.key, self._models)
        named = [*self.key, IDENTITY, MODEL_WEIGHTS]
        aliased = [column.alias(f"c{number}") for number, column in enumerate(selection.columns(together))]
        narrowed = together.select(*map(column_named, named), *aliased)
        schema = tables.evaluated_schema(tables.key_fields(frame, self.key))
        return over_keys(cluster, narrowed, task, schema)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Save the table of models as Parquet, with Spark: a path that Spark can write, also of an object store.

        Args:
            path: The folder. With Spark Connect, it is a path of the server.
            overwrite: Whether to replace a table that exists.

        Raises:
            ConfigurationError: `fit` has not been called.
            StorageError: The folder exists, or cannot be written.
        """
        table, folder = self._models, arguments.path("path", path)
        complete = table.withColumn(MODEL, _null_binary())
        initial = dump_weights(take_weights(self.model))
        base = tables.Base(0, self._architecture, initial, self._packed(self._rows)).row(table.sparkSession, complete.schema)
        writer = complete.unionByName(base).write.mode("overwrite" if overwrite else "errorifexists")
        try:
            tables.run(cluster_of(table.sparkSession), lambda: writer.parquet(folder))
        except Exception as error:
            advice = " Pass overwrite=True to replace it." if "PATH_ALREADY_EXISTS" in str(error) else ""
            raise StorageError(f"the models cannot be saved in {folder!r}.{advice} {error}") from error

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        spark: SparkSession | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> KeyedModel:
        """Load a table that `save` or ``fit(save_to=...)`` wrote. Models stay in the files until they are used.

        The table of a training that was interrupted has the models of the keys so far.

        Args:
            path: The folder.
            spark: The session; ``None``: the active one.
            custom_objects: Custom classes and functions by name.
            safe_mode: Whether to reject models with Python lambdas, as in ``keras.models.load_model``.

        Raises:
            StorageError: There is no such table.
            ModelError: The model cannot be loaded.
        """
        folder, session = arguments.path("path", path), spark or active_session()
        table = tables.read(session, folder)
        if table is None:
            raise StorageError(f"there is no table of models in {folder!r}. Pass a folder that KeyedModel.save wrote.")
        objects = arguments.custom_objects("custom_objects", custom_objects)
        base = tables.Base.of(table)
        model, settings, _ = persistence.unpack(base.model, objects, safe_mode)
        if "key" not in settings:
            raise StorageError(f"{folder!r} is not a table of models: its model has no settings of a KeyedModel.")
        keyed = cls(
            model,
            settings["key"],
            batch_size=settings["batch_size"],
            seed=settings["seed"],
            custom_objects=objects,
            cores_per_worker=settings["cores_per_worker"],
            gpus_per_worker=settings["gpus_per_worker"],
        )
        keyed._rows = RowOptions.from_json(model, settings["rows"])
        keyed._table, keyed._architecture = tables.latest(table, keyed.key, base.number), architecture_of(model)
        return keyed

    def _packed(self, rows: RowOptions) -> bytes:
        names = ("batch_size", "seed", "cores_per_worker", "gpus_per_worker")
        settings = {"key": list(self.key), **{name: getattr(self, name) for name in names}}
        return persistence.pack(self.model, {**settings, "rows": rows.as_json(self.model)}, {})

    @property
    def _layout(self) -> Layout:
        return layout(weight_variables(self.model))

    def _default(self, default: keras.Model | None) -> Flat | None:
        if default is None:
            return None
        if not isinstance(default, keras.Model):
            raise ConfigurationError(f"default={default!r}: expected a keras.Model, or None for null.")
        check_built(default)
        if layout(weight_variables(default)) != self._layout:
            raise ModelError(
                f"default is the model {default.name!r}, whose weights differ in number or shape from those of "
                f"{self.model.name!r}: pass a model with the same layers."
            )
        return take_weights(default)

    def _frame_to_score(self, data: Any) -> DataFrame:
        frame = _frame(data)
        if self._table is not None and architecture_of(self.model) != self._architecture:
            raise ModelError(
                f"the model {self.model.name!r} has been adapted, changed or compiled again since fit, so the weights of "
                "the keys do not belong to it: call fit again."
            )
        tables.check_same_keys(tables.key_fields(frame, self.key), self._models, "the last fit")
        return frame


@dataclass(frozen=True, kw_only=True)
class KeyedScorer(Scorer):
    """Makes the column of predictions of rows that are sorted by key; see `ScoreKeys`."""

    layout: Layout
    default: Flat | None

    def task(self, cluster: AnyCluster, read: Selection | ArgumentsToBlocks) -> ScoreKeys:
        """What the workers run."""
        plain = super().task(cluster, read)
        default = None if self.default is None else cluster.keep(self.default)
        return ScoreKeys(plain.archive, plain.state, plain.options, read, self.outputs, self.layout, default)


class KeyedModels(Mapping[Any, keras.Model]):
    """The models of a `KeyedModel` by key; each is a new Keras model, compiled like the one that all started from.

    Each access runs a Spark job.
    """

    def __init__(self, keyed: KeyedModel, table: DataFrame) -> None:
        self._keyed, self._table = keyed, table

    def __repr__(self) -> str:
        return f"KeyedModels({self._keyed.model.name!r} by {', '.join(self._keyed.key)})"

    def __getitem__(self, key: Any) -> keras.Model:
        """The model of a key.

        Raises:
            KeyError: There is no such key, or its training has failed; then the message has the error.
        """
        names = self._keyed.key
        values = tuple(each.item() if isinstance(each, np.generic) else each for each in _as_tuple(key))
        if len(values) != len(names):
            raise KeyError(f"{key!r}: expected a value for each of the columns {', '.join(names)}")
        fields = [field for field in self._table.schema.fields if field.name in names]
        try:
            wanted = self._table.sparkSession.createDataFrame([values], tables.as_schema(fields))
        except (TypeError, ValueError) as error:  # Spark's own are both
            kinds = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields)
            raise KeyError(f"{key!r}: expected a key of the type of {kinds}") from error
        rows = self._table.join(wanted, list(names)).select("error", WEIGHTS).collect()
        if not rows:
            raise KeyError(key)
        if rows[0][WEIGHTS] is None:
            raise KeyError(f"{key!r} has no model, since its training failed: {rows[0]['error']}")
        model = ModelArchive.pack(self._keyed.model, self._keyed.custom_objects).unpack()
        put_weights(load_weights(bytes(rows[0][WEIGHTS]), self._keyed._layout), model)
        return model

    def __iter__(self) -> Iterator[Any]:
        names = self._keyed.key
        for row in self._trained.select(*map(column_named, names)).toLocalIterator():
            yield tuple(row) if len(names) > 1 else row[0]

    def __len__(self) -> int:
        return self._trained.count()

    @property
    def _trained(self) -> DataFrame:
        return self._table.where(column_named(WEIGHTS).isNotNull())


def _as_tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _null_binary() -> Any:
    from pyspark.sql import functions

    return functions.lit(None).cast("binary")


def _check_no_validation(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    for callback in callbacks:
        if has_monitor(callback) and str(callback.monitor).startswith("val_"):
            raise ConfigurationError(
                f"callbacks: {type(callback).__name__}(monitor={callback.monitor!r}) monitors a validation metric, but "
                "there is no validation: pass validation_split= with order_by=, or monitor a metric of training."
            )


def _key_names(key: Any) -> tuple[str, ...]:
    names = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(f"key={key!r}: expected the name of a column, or a list of names.")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"key={list(names)!r} names a column twice.")
    for name in names:
        if name.lower() in tables.RESERVED:
            raise ConfigurationError(
                f"key={name!r}: the table of models has a column of this name. Rename yours: "
                f"df.withColumnRenamed({name!r}, 'the_{name}')."
            )
    return names


def _frame(data: Any) -> DataFrame:
    if not is_frame(data):
        raise DataError(
            f"data is {describe(data)}; expected a Spark DataFrame, whose rows have keys: for a pandas DataFrame, use "
            "spark.createDataFrame(data)."
        )
    if data.isStreaming:
        raise DataError("data is a stream, whose rows cannot be sorted by key: use foreachBatch.")
    return data
