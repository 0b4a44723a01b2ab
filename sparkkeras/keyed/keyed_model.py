"""`KeyedModel`: a model for each key of a DataFrame, such as a store, a sensor or a customer.

Keys are dealt to partitions by their number of rows. A worker trains one key after the other, with one traced model, and
returns a row of the table of models for each (`sparkkeras.keyed.table`). To score, the table is put beside the rows: sorted
by key, they come to the workers after the weights of their model.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Unpack

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import AS_IN_FIT, AsInFit, known_arguments, taking
from sparkkeras.data.block import describe
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import ConfigurationError, DataError, ModelError, StorageError, WorkerError, counted, warn
from sparkkeras.events import Events, PhaseStarted, RunStarted
from sparkkeras.keyed import rows as keyed_rows
from sparkkeras.keyed import table as tables
from sparkkeras.keyed.rows import IDENTITY, MODEL_WEIGHTS, OverKeys, TrainingRows
from sparkkeras.keyed.table import DIGEST, FIT, METRICS, MODEL, WEIGHTS
from sparkkeras.keyed.tasks import EvaluateKeys, Plan, ScoreKeys, TrainKeys, load_weights
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_built, check_not_synchronized, check_trainable, needs_labels
from sparkkeras.modeling.description import describe_model
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.labels import check_class_weight, check_label_structure
from sparkkeras.modeling.locks import training
from sparkkeras.modeling.outside import dump_callbacks
from sparkkeras.modeling.own_methods import check_can_evaluate, check_can_train
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.modeling.state import ModelState, layout, put_weights, take_weights, weight_variables
from sparkkeras.progress.renderer import Progress
from sparkkeras.scoring.columns import Scorer, with_predictions
from sparkkeras.scoring.inference import batch_options, transform_by_value
from sparkkeras.sources.column_names import column_named
from sparkkeras.sources.frame import ColumnMapping, Columns, Loaders, Selection, is_frame
from sparkkeras.sources.tasks import Deferred
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.cluster import start_workers
from sparkkeras.spark.connect import AnyCluster, active_session, cluster_of
from sparkkeras.spark.job_errors import interruptible, quietly
from sparkkeras.training import persistence
from sparkkeras.training.callbacks import check_callbacks
from sparkkeras.training.fit_arguments import KeyedArguments, WorkerArguments
from sparkkeras.training.row_options import RowOptions
from sparkkeras.weights import Array, Flat, Layout
from sparkkeras.worker import device
from sparkkeras.worker.batches import FitOptions, Transform

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkkeras.scoring.column_functions import ArgumentsToBlocks

PARTITIONS_PER_SLOT = 4
"""Partitions of keys for each task slot: more would start more tasks, fewer would let slots wait for the last one."""

JOBS = 10
"""How many jobs a training with ``save_to`` has at most; each adds its models to the table."""

KEYS_PER_JOB = 16
"""How many keys each slot has at least in such a job."""

NOTHING = Layout((), ())
"""The layout of no variables."""

BATCH_SIZE = 256
"""The default number of rows in each call of a model to predict: a key has few."""


class KeyedModel:
    """A model for each key of a DataFrame: all have the architecture of one model, and weights of their own.

    The model of each key starts from the weights of ``model`` and trains on the rows of its key alone, with Keras's ``fit``.
    Thousands of small models train in one Spark job. The rows of a key must fit into the memory of a worker.

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

    def __repr__(self) -> str:
        return f"KeyedModel({self.model.name!r}, key={self.key[0] if len(self.key) == 1 else list(self.key)!r})"

    @known_arguments
    @taking(KeyedArguments)
    @interruptible()
    def fit(self, data: DataFrame, **given: Unpack[KeyedArguments]) -> DataFrame:
        """Train a model for each key.

        A further call trains the keys whose rows have changed, or are new, once more from the weights of ``model``; keys
        without rows in ``data`` keep their models. If an argument or ``model`` has changed, all keys are trained.

        A key that fails, because its rows do not fit the model or its loss becomes NaN, does not stop the others: it has no
        model, and `metrics` has the error. The next call trains it again.

        Args:
            data: The rows. They are read twice: to count the rows of each key, and to train.
            **given: See `KeyedArguments`.

        Returns:
            The metrics by key; see `metrics`.

        Raises:
            DataError: A column is missing or does not fit the model, a key is null, or there are no rows.
            ConfigurationError: An argument is unknown or out of range.
            CustomObjectError: The model or a callback cannot be sent.
            WorkerError: No key could be trained, or a task failed repeatedly.
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
            events.emit(PhaseStarted("Counting the rows of each key"))
            rows = TrainingRows.of(frame, self.key, checked["order_by"], selection)
            run = _Training(self, cluster, rows, selection, keys, options, checked)
            self._table = run.train(self._table, events)
            self._rows = RowOptions(
                "DataFrame",
                selection.mapped("x", selection.reader.schema.inputs),
                selection.mapped("y", selection.reader.schema.outputs),
                given["loader"],
                given["on_invalid"],
                None if given["transform"] is None else getattr(given["transform"], "__name__", "transform"),
            )
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
            check_class_weight(model, given["class_weight"])
        check_callbacks(given["callbacks"], model)
        check_can_train(model, bool(given["validation_split"]))
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
            callbacks=dump_callbacks(given["callbacks"], [model]) if given["callbacks"] else None,
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
            self._layout,
            cluster.keep(replace(options, to_predict=False)),
            None if other is None else cluster.keep(other),
        )
        together = keyed_rows.beside_models(frame, self.key, self._models)
        named = [*self.key, IDENTITY, MODEL_WEIGHTS]
        aliased = [column.alias(f"c{number}") for number, column in enumerate(selection.columns(together))]
        narrowed = together.select(*map(column_named, named), *aliased)
        schema = tables.evaluated_schema(tables.key_fields(frame, self.key))
        return _over_keys(cluster, narrowed, task, schema)

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
        model = tables.model_row(table.sparkSession, complete.schema, self._packed(), time.time_ns())
        writer = complete.unionByName(model).write.mode("overwrite" if overwrite else "errorifexists")
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
        model, settings, _ = persistence.unpack(tables.archive_of(table), objects, safe_mode)
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
        keyed._table = tables.latest(table, keyed.key)
        return keyed

    def _packed(self) -> bytes:
        names = ("batch_size", "seed", "cores_per_worker", "gpus_per_worker")
        settings = {"key": list(self.key), **{name: getattr(self, name) for name in names}}
        return persistence.pack(self.model, {**settings, "rows": self._rows.as_json(self.model)}, {})

    @property
    def _layout(self) -> Layout:
        return layout(weight_variables(self.model))

    def _default(self, default: keras.Model | None) -> Flat | None:
        if default is None:
            return None
        check_built(default)
        if layout(weight_variables(default)) != self._layout:
            raise ModelError(
                f"default is the model {default.name!r}, whose weights differ in number or shape from those of "
                f"{self.model.name!r}: pass a model with the same layers."
            )
        return take_weights(default)

    def _frame_to_score(self, data: Any) -> DataFrame:
        frame, table = _frame(data), self._models
        known = {field.name: field.dataType for field in table.schema.fields}
        for field in tables.key_fields(frame, self.key):
            if field.dataType != known[field.name]:
                raise DataError(
                    f"key={field.name!r} has the type {field.dataType.simpleString()}, but the models were trained with "
                    f"{known[field.name].simpleString()}: cast it."
                )
        return frame


@dataclass(frozen=True)
class KeyedScorer(Scorer):
    """Makes the column of predictions of rows that are sorted by key; see `ScoreKeys`."""

    layout: Layout = NOTHING
    default: Flat | None = None

    def task(self, cluster: AnyCluster, read: Selection | ArgumentsToBlocks) -> ScoreKeys:
        """What the workers run."""
        plain = super().task(cluster, read)
        default = None if self.default is None else cluster.keep(self.default)
        return ScoreKeys(plain.archive, plain.state, plain.options, read, self.outputs, self.layout, default)


class KeyedModels(Mapping[Any, keras.Model]):
    """The models of a `KeyedModel` by key; each is a new Keras model, compiled like the one that all started from."""

    def __init__(self, keyed: KeyedModel, table: DataFrame) -> None:
        self._keyed, self._table = keyed, table

    def __getitem__(self, key: Any) -> keras.Model:
        """The model of a key.

        Raises:
            KeyError: There is no such key.
            ModelError: Training has failed for it; the message has the error.
        """
        from pyspark.sql import functions

        names = self._keyed.key
        values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(names):
            raise KeyError(f"{key!r}: expected a value for each of the columns {', '.join(names)}")
        found = self._table
        for name, value in zip(names, values, strict=True):
            found = found.where(column_named(name) == functions.lit(value))
        try:
            rows = found.select("error", WEIGHTS).collect()
        except Exception as error:
            raise KeyError(f"{key!r} cannot be compared with the keys: {error}") from error
        if not rows:
            raise KeyError(key)
        if rows[0][WEIGHTS] is None:
            raise ModelError(f"the key {key!r} has no model, since its training failed: {rows[0]['error']}")
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


@dataclass(frozen=True)
class _Training:
    """One call of `KeyedModel.fit`, with its arguments checked."""

    keyed: KeyedModel
    cluster: AnyCluster
    rows: TrainingRows
    selection: Selection
    keys: list[Any]
    options: FitOptions
    given: Mapping[str, Any]

    def train(self, before: DataFrame | None, events: Events) -> DataFrame:
        """Train the keys that ``before``, or the table in ``save_to``, lacks; returns the table of all."""
        keyed, folder, number = self.keyed, self.given["save_to"], time.time_ns()
        session = self.rows.frame.sparkSession
        archive, state = ModelArchive.pack(keyed.model, keyed.custom_objects), ModelState.take(keyed.model)
        if folder is not None and (saved := tables.read(session, folder)) is not None:
            self._check_keys(saved)
            before = tables.latest(saved, keyed.key)
        found = self.rows.counted(self._digest(archive, state))
        chosen = tables.arrow(self.cluster, found if before is None else self._changed(found, before))
        if before is None or chosen.num_rows:
            keyed_rows.check_keys(chosen, self.rows.keys, keyed.key)
        task = TrainKeys(
            self.cluster.keep(archive),
            self.selection,
            len(keyed.key),
            self.cluster.keep(state),
            self.cluster.keep(self.options),
            Plan(*(self.given[each.name] for each in fields(Plan))),
        )
        done = 0
        jobs = self._jobs(chosen, folder is not None)
        if folder is not None and jobs:
            self._write(folder, tables.model_row(session, self._schema, keyed._packed(), number))
        for job in jobs:
            many = counted(chosen.num_rows, "model")
            events.emit(PhaseStarted(f"Training {many}" + (f", {done:,} of them done" if done else "")))
            trained = tables.numbered(self._trained(job, task), number)
            if folder is None:
                before = self._kept(trained, before)
            else:
                self._write(folder, trained)
            done += job.num_rows
        if folder is not None:
            written = tables.read(session, folder)
            assert written is not None, "models were written, or had been"
            before = tables.latest(written, keyed.key)
        assert before is not None, "there are keys"
        self._check_errors(before, number, chosen.num_rows)
        return before

    @property
    def _schema(self) -> Any:
        from pyspark.sql import types

        added = [types.StructField(FIT, types.LongType()), types.StructField(MODEL, types.BinaryType())]
        return types.StructType([*tables.trained_schema(self.keys).fields, *added])

    def _digest(self, archive: ModelArchive, state: ModelState) -> str:
        """A digest of everything but the rows that the weights of a key depend on."""
        given, options = self.given, self.options
        names = ("epochs", "validation_split", "validation_freq", "validation_batch_size", "on_invalid", "order_by")
        parts = [
            archive.digest,
            state.weights.checksum,
            state.optimizer.checksum,
            *(given[name] for name in names),
            *(getattr(options, name) for name in ("batch_size", "shuffle", "seed", "class_weight")),
            *("" if each is None else each.payload.hex() for each in (options.transform, options.callbacks)),
            self.selection.form,
            [leaf.columns for leaf in self.selection.leaves],
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _check_keys(self, table: DataFrame) -> None:
        known = {field.name: field.dataType for field in table.schema.fields}
        for field in self.keys:
            if known.get(field.name) != field.dataType:
                kind = known[field.name].simpleString() if field.name in known else "no such column"
                raise StorageError(
                    f"save_to={self.given['save_to']!r} has a table of models with other keys: {field.name} is "
                    f"{field.dataType.simpleString()} here, and there {kind}. Use another folder."
                )

    def _changed(self, found: DataFrame, before: DataFrame) -> DataFrame:
        """The keys whose digests differ from those of the table, or are not in it."""
        columns = [column_named(name).alias(key) for name, key in zip(self.keyed.key, self.rows.keys, strict=True)]
        trained = before.select(*columns, column_named(DIGEST).alias("before"))
        joined = found.join(trained, self.rows.keys, "left")
        return joined.where("before IS NULL OR before != digest").drop("before")

    def _jobs(self, chosen: pa.Table, several: bool) -> list[pa.Table]:
        """The keys of each job, in which large and small ones are mixed."""
        if not chosen.num_rows:
            return []
        most = chosen.num_rows // (self.cluster.slots * KEYS_PER_JOB)
        jobs = max(1, min(JOBS, most)) if several else 1
        order = np.argsort(-chosen.column("rows").to_numpy(), kind="stable")
        return [chosen.take(order[job::jobs]) for job in range(jobs)]

    def _trained(self, chosen: pa.Table, task: TrainKeys) -> DataFrame:
        """The results of training some keys, which are computed when they are used."""
        sizes: Array = chosen.column("rows").to_numpy()
        count = min(len(sizes), self.cluster.slots * PARTITIONS_PER_SLOT)
        rows = self.rows.dealt(chosen, keyed_rows.deal(sizes, count), count)
        return _over_keys(self.cluster, rows, task, tables.trained_schema(self.keys))

    def _kept(self, trained: DataFrame, before: DataFrame | None) -> DataFrame:
        """The table with these results, which the executors keep."""
        models = trained.drop(MODEL).persist()
        weakref.finalize(self.keyed, quietly, models.unpersist)
        tables.arrow(self.cluster, models.select("rows"))
        if before is None:
            return models
        others = before.join(models.select(*map(column_named, self.keyed.key)), list(self.keyed.key), "left_anti")
        return others.unionByName(models)

    def _write(self, folder: str, rows: DataFrame) -> None:
        tables.run(self.cluster, lambda: rows.write.mode("append").parquet(folder))

    def _check_errors(self, table: DataFrame, number: int, trained: int) -> None:
        """Warn of keys that have failed in this fit; raise if all have."""
        failed = table.where((column_named(FIT) == number) & column_named("error").isNotNull())
        errors = tables.arrow(self.cluster, failed.select(*map(column_named, self.keyed.key), "error"))
        if not errors.num_rows:
            return
        row = errors.slice(0, 1).to_pylist()[0]
        reason = row.pop("error")
        first = f"{', '.join(f'{name}={value!r}' for name, value in row.items())}: {reason}"
        if errors.num_rows == trained:
            raise WorkerError(f"training failed for {'the only key' if trained == 1 else f'all {trained:,} keys'}. {first}")
        warn(f"training failed for {errors.num_rows:,} of {trained:,} keys: metrics has their errors. {first}")


def _over_keys(cluster: AnyCluster, rows: DataFrame, task: Callable[..., Any], schema: Any) -> DataFrame:
    """The results of a task for each key of rows that are sorted by it."""
    deferred = Deferred(task, cluster.carried_environment, cluster.backend)
    with cluster.training_workers():
        return rows.mapInArrow(OverKeys(deferred), schema, **cluster.task_options)


def _null_binary() -> Any:
    from pyspark.sql import functions

    return functions.lit(None).cast("binary")


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
