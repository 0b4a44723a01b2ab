"""One call of `KeyedModel.fit`: which keys are trained, in which jobs, and what becomes of the table of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sparkkeras.errors import DataError, WorkerError, counted, warn
from sparkkeras.events import Events, PhaseStarted
from sparkkeras.keyed import rows as keyed_rows
from sparkkeras.keyed import table as tables
from sparkkeras.keyed.rows import OverKeys, TrainingRows
from sparkkeras.keyed.table import DIGEST, FIT, MODEL, WEIGHTS
from sparkkeras.keyed.tasks import Plan, TrainKeys, dump_weights, load_weights
from sparkkeras.modeling.archive import ModelArchive, model_config
from sparkkeras.modeling.state import ModelState, layout, weight_variables
from sparkkeras.preprocessing.adaptation import learned_by
from sparkkeras.sources.column_names import column_named
from sparkkeras.sources.frame import Selection
from sparkkeras.sources.tasks import Deferred
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.spark.job_errors import quietly
from sparkkeras.weights import Array
from sparkkeras.worker.batches import FitOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

PARTITIONS_PER_SLOT = 4
"""Partitions of keys for each task slot: more would start more tasks, fewer would let slots wait for the last one."""

JOBS = 10
"""How many jobs a training with ``save_to`` has at most; each adds its models to the table."""

KEYS_PER_JOB = 16
"""How many keys each slot has at least in such a job."""


@dataclass(frozen=True)
class KeyedTraining:
    """One call of `KeyedModel.fit`, with its arguments checked.

    Attributes:
        model: The model that all keys start from.
        key: The names of the columns of the key.
        custom_objects: Custom classes and functions by name.
        cluster: Where to train.
        archive: The packed model.
        selection: The columns to train on.
        keys: The columns of the key, with their types.
        options: How batches are made.
        given: The arguments of `KeyedModel.fit`.
    """

    model: keras.Model
    key: tuple[str, ...]
    custom_objects: Mapping[str, Any]
    cluster: AnyCluster
    archive: ModelArchive
    selection: Selection
    keys: list[Any]
    options: FitOptions
    given: Mapping[str, Any]

    def train(self, frame: DataFrame, before: DataFrame | None, pack: Callable[[], bytes], events: Events) -> DataFrame:
        """Train the keys that a table of models lacks.

        Args:
            frame: The rows.
            before: The table of the last fit, if it is of this model; that in ``save_to`` takes its place.
            pack: Returns what the table in files has of the model.
            events: Where to report the progress.

        Returns:
            The table of all keys.
        """
        folder, number, state = self.given["save_to"], 1, ModelState.take(self.model)
        if before is not None:
            tables.check_same_keys(self.keys, before, "the last fit")
        base: tables.Base | None = None
        saved = None if folder is None else tables.read(frame.sparkSession, folder)
        if saved is not None:
            tables.check_same_keys(self.keys, saved, f"save_to={folder!r}")
            base, number, before = tables.Base.of(saved), tables.next_number(saved), None
            if base.digest == self.architecture:
                state, before = self._resumed(base, state), tables.latest(saved, self.key, base.number)
            else:
                warn(
                    f"save_to={folder!r} has a table of another model: its layers or the arguments of compile differ. All "
                    "keys are trained, and those models do not count any more. Use another folder to keep them."
                )
                base = None
        elif folder is not None:
            before = None  # the folder has all models
        elif before is not None:
            number = tables.next_number(before)
        events.emit(PhaseStarted("Counting the rows of each key"))
        rows = TrainingRows.of(frame, self.key, self.given["order_by"], self.selection)
        rows.frame.persist()
        try:
            chosen = self._chosen(rows, state, before)
            task = TrainKeys(
                self.cluster.keep(self.archive),
                self.selection,
                len(self.key),
                self.cluster.keep(state),
                self.cluster.keep(self.options),
                Plan(*(self.given[each.name] for each in fields(Plan))),
            )
            done, jobs = 0, self._jobs(chosen, folder is not None)
            if folder is not None and base is None:
                base = tables.Base(number, self.architecture, dump_weights(state.weights), pack())
                self._write(folder, base.row(frame.sparkSession, self._schema))
            for job in jobs:
                many = counted(chosen.num_rows, "model")
                events.emit(PhaseStarted(f"Training {many}" + (f", {done:,} of them done" if done else "")))
                trained = tables.numbered(self._trained(rows, job, task), number)
                if folder is None:
                    before = self._kept(trained, before)
                else:
                    self._write(folder, trained)
                done += job.num_rows
        finally:
            quietly(rows.frame.unpersist)
        if folder is not None and base is not None and (written := tables.read(frame.sparkSession, folder)) is not None:
            before = tables.latest(written, self.key, base.number)
        assert before is not None, "there are keys"
        self._check_errors(before, number, chosen.num_rows)
        return before

    @cached_property
    def architecture(self) -> str:
        """See `architecture_of`."""
        return architecture_of(self.model)

    def _resumed(self, base: tables.Base, state: ModelState) -> ModelState:
        """The state that the models of a table in files started from; warns if it is not that of the model."""
        weights = load_weights(base.weights, layout(weight_variables(self.model)))
        if weights.checksum == state.weights.checksum:
            return state
        warn(
            f"the model has other weights than the models in save_to={self.given['save_to']!r} started from: further keys "
            "start from those in the folder, too. Use another folder to start from these."
        )
        return ModelState(weights, state.optimizer)

    def _chosen(self, rows: TrainingRows, state: ModelState, before: DataFrame | None) -> pa.Table:
        """The keys to train, with their numbers of rows and their digests."""
        found = rows.counted(self._digest(state))
        if before is not None:
            columns = [column_named(name).alias(key) for name, key in zip(self.key, rows.keys, strict=True)]
            trained = before.select(*columns, column_named(DIGEST).alias("before"))
            found = found.join(trained, rows.keys, "left").where("before IS NULL OR before != digest").drop("before")
        chosen = tables.arrow(self.cluster, found)
        if not chosen.num_rows and rows.frame.isEmpty():
            raise DataError("the DataFrame has no rows.")
        keyed_rows.check_keys(chosen, rows.keys, self.key)
        return chosen

    @property
    def _schema(self) -> Any:
        from pyspark.sql import types

        added = [types.StructField(FIT, types.LongType()), types.StructField(MODEL, types.BinaryType())]
        return types.StructType([*tables.trained_schema(self.keys).fields, *added])

    def _digest(self, state: ModelState) -> str:
        """A digest of everything but the rows that the weights of a key depend on."""
        given, options = self.given, self.options
        names = ["epochs", "on_invalid", "order_by", "transform", "callbacks"]
        if given["validation_split"]:
            names += ["validation_split", "validation_freq", "validation_batch_size"]
        parts = {
            **{name: given[name] for name in names},
            **{name: getattr(options, name) for name in ("batch_size", "shuffle", "seed", "class_weight")},
            "model": [self.architecture, state.weights.checksum, state.optimizer.checksum],
            "columns": [[leaf.columns, leaf.loader] for leaf in self.selection.leaves],
        }
        return hashlib.sha256(repr(_described(parts)).encode()).hexdigest()[:16]

    def _jobs(self, chosen: pa.Table, several: bool) -> list[pa.Table]:
        """The keys of each job, in which large and small ones are mixed."""
        if not chosen.num_rows:
            return []
        most = chosen.num_rows // (self.cluster.slots * KEYS_PER_JOB)
        jobs = max(1, min(JOBS, most)) if several else 1
        order = np.argsort(-chosen.column("rows").to_numpy(), kind="stable")
        return [chosen.take(order[job::jobs]) for job in range(jobs)]

    def _trained(self, rows: TrainingRows, chosen: pa.Table, task: TrainKeys) -> DataFrame:
        """The results of training some keys, which are computed when they are used."""
        sizes: Array = chosen.column("rows").to_numpy()
        count = min(len(sizes), self.cluster.slots * PARTITIONS_PER_SLOT)
        dealt = rows.dealt(chosen, keyed_rows.deal(sizes, count), count)
        return over_keys(self.cluster, dealt, task, tables.trained_schema(self.keys))

    def _kept(self, trained: DataFrame, before: DataFrame | None) -> DataFrame:
        """The table with these results, which the executors keep until the session ends, or until there is another one."""
        models = trained.drop(MODEL)
        if before is not None:
            models = models.persist()
            keys = list(self.key)
            others = before.join(models.select(*map(column_named, keys)), keys, "left_anti")
            merged = others.unionByName(models).persist()
        else:
            merged = models.persist()
        tables.arrow(self.cluster, merged.select("rows"))
        if before is not None:
            quietly(models.unpersist)
            quietly(before.unpersist)
        return merged

    def _write(self, folder: str, rows: DataFrame) -> None:
        tables.run(self.cluster, lambda: rows.write.mode("append").parquet(folder))

    def _check_errors(self, table: DataFrame, number: int, trained: int) -> None:
        """Warn of keys that have failed in this fit; raise if no key has a model."""
        failed = table.where((column_named(FIT) == number) & column_named("error").isNotNull())
        errors = tables.arrow(self.cluster, failed.select(*map(column_named, self.key), "error"))
        if not errors.num_rows:
            return
        row = errors.slice(0, 1).to_pylist()[0]
        reason = row.pop("error")
        first = f"{', '.join(f'{name}={value!r}' for name, value in row.items())}: {reason}"
        if table.where(column_named(WEIGHTS).isNotNull()).isEmpty():
            raise WorkerError(f"training failed for {'the only key' if trained == 1 else f'all {trained:,} keys'}. {first}")
        warn(f"training failed for {errors.num_rows:,} of {trained:,} keys: metrics has their errors. {first}")


def architecture_of(model: keras.Model) -> str:
    """A digest of the layers, of what they have learned by ``adapt``, and of the arguments of ``compile``.

    The names of layers do not matter: Keras counts models.
    """
    layers = list(model._flatten_layers(include_self=True))
    names = {layer.name: f"layer {number}" for number, layer in enumerate(layers)}
    parts = [_renamed(model_config(model), names), [learned_by(layer) for layer in layers]]
    config = json.dumps(parts, sort_keys=True, default=lambda each: type(each).__name__)
    return hashlib.sha256(config.encode()).hexdigest()[:16]


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A configuration of Keras with other names of layers."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, Mapping):
        return {names.get(key, key): _renamed(each, names) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(each, names) for each in value]
    return value


def _described(value: Any) -> Any:
    """An argument as values that have the same representation in each process: functions by their names, objects by their
    classes and settings.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return sorted((str(key), _described(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [_described(each) for each in value]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        return [_described(each) for each in (value.func, value.args, value.keywords)]
    simple = (bool, int, float, str, tuple, list, dict, type(None))
    members = getattr(value, "__dict__", {}).items()
    settings = {name: each for name, each in members if isinstance(each, simple) or hasattr(each, "__qualname__")}
    return [_described(type(value)), _described(settings)]


def over_keys(cluster: AnyCluster, rows: DataFrame, task: Callable[..., Any], schema: Any) -> DataFrame:
    """The results of a task for each key of rows that are sorted by it."""
    deferred = Deferred(task, cluster.carried_environment, cluster.backend)
    with cluster.training_workers():
        return rows.mapInArrow(OverKeys(deferred), schema, **cluster.task_options)
