"""A checkpoint of `fit` that was read, and what it belongs to: the same work can be continued, other work is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from sparkkeras.checkpoints.differences import differences
from sparkkeras.checkpoints.store import CheckpointStore, StoredCheckpoint
from sparkkeras.data.dataset import StoredDataset, common_spec
from sparkkeras.data.placement import SAME_ROWS
from sparkkeras.errors import ConfigurationError, DataError, counted
from sparkkeras.modeling.description import OUTSIDE, description
from sparkkeras.modeling.optimizers import iterations
from sparkkeras.modeling.state import learning_rate, put_generators
from sparkkeras.parameter.rules import UpdateRule, rule_config
from sparkkeras.training.job import Job
from sparkkeras.training.preparation import FitRequest
from sparkkeras.training.saved_progress import TrainingProgress

Rates = Mapping[str, float | None]


@dataclass(frozen=True)
class Work:
    """What a checkpoint belongs to.

    Attributes:
        fit: The model and the arguments, which must be the same to resume.
        learning_rate: The learning rate of the optimizer; ``None`` if it has made a step, which may have changed it.
        seed: The seed of row orders and dropout masks.
        settings: The settings of the SparkModel after this call of `fit`.
    """

    fit: dict[str, Any]
    learning_rate: float | None
    seed: int
    settings: dict[str, Any]

    @classmethod
    def of(
        cls, model: keras.Model, request: FitRequest, rule: UpdateRule, frequency: str | int, settings: Mapping[str, Any]
    ) -> Work:
        """The description of a checked call of `fit`."""
        fit = {
            "mode": settings["mode"],
            "rule": rule_config(rule),
            "frequency": frequency,
            "gradient_dtype": settings["gradient_dtype"],
            **request.settings,
            **description(model),
        }
        return cls(fit, initial_rate(model), request.options.seed, dict(settings))

    def differences(self, now: Work) -> list[str]:
        """What differs in another call of `fit`, in words."""
        before, after = known_rates({"learning_rate": self.learning_rate}, {"learning_rate": now.learning_rate})
        return differences({**self.fit, **before}, {**now.fit, **after})


def initial_rate(model: keras.Model) -> float | None:
    """The learning rate of the optimizer; ``None`` if it has made a step, which may have changed it."""
    return None if any(iterations(model)) else learning_rate(model)


def known_rates(stored: Rates, now: Rates) -> tuple[Rates, Rates]:
    """The learning rates that can be compared, by name: those that are known in both of two calls of ``fit``."""
    names = [name for name in stored if stored[name] is not None and now.get(name) is not None]
    return {name: stored[name] for name in names}, {name: now[name] for name in names}


@dataclass(frozen=True)
class WorkerRows:
    """The rows of each worker.

    Attributes:
        counts: The numbers of those to train on.
        checksums: The checksums of all, see `Handle`.
        repeat: Whether the same rows have the same places each time that they are read.
    """

    counts: list[int | None]
    checksums: list[int | None]
    repeat: bool = False

    @classmethod
    def of(cls, job: Job, dataset: StoredDataset) -> WorkerRows:
        """The rows of a dataset, as a job splits them."""
        return cls(list(job.split.train), [handle.checksum for handle in dataset.handles], job.options.shuffle == "global")

    def differ_from(self, checksums: Sequence[int | None]) -> bool:
        """Whether a checksum differs from one in a checkpoint, of those that are known.

        Raises:
            DataError: One differs, although the places of rows depend on the rows alone.
        """
        pairs = zip(self.checksums, checksums, strict=False)
        differ = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        if differ and self.repeat:
            raise DataError(f"the rows are not those of the training that is resumed. {SAME_ROWS}")
        return differ


def data_of(job: Job, dataset: StoredDataset) -> dict[str, Any]:
    """What must be the same of the data to resume, as values for JSON."""
    spec = common_spec(dataset.handles)
    leaves = () if spec is None else zip(spec.form.labels, spec.leaves, strict=True)
    found = job.validation
    validated = job.split.validate if found is None or found.spans else [each.rows for each in found.dataset.handles]
    return {
        "rows": _total(job.split.train),
        "validation rows": _total(validated),
        "arrays": {label: f"{leaf.shape} {leaf.dtype}" for label, leaf in leaves},
    }


def _total(rows: Sequence[int | None]) -> int | None:
    return None if None in rows else sum(each or 0 for each in rows)


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint that was read.

    Attributes:
        name: Its name.
        progress: What training had reached.
        work: What it belongs to.
        data: The data, see `data_of`.
        partitions: The number of training rows of each worker.
        checksums: The checksum of the rows of each worker, see `Handle`.
        backend: The backend of Keras.
        every: How often checkpoints were written, see `Checkpoint`.
        model: The bytes of the ``.keras`` file.
    """

    name: str
    progress: TrainingProgress
    work: Work
    data: dict[str, Any]
    partitions: list[int | None]
    checksums: list[int | None]
    backend: str
    every: str | int
    model: bytes

    @classmethod
    def newest(cls, store: CheckpointStore, at_epoch_end: bool = False) -> SavedRun | None:
        """The newest checkpoint that is not damaged; ``None`` if there is no checkpoint.

        Args:
            store: The folder.
            at_epoch_end: Skip those in the middle of an epoch.

        Raises:
            StorageError: The folder cannot be read, or all checkpoints are damaged.
            ConfigurationError: The checkpoint is not of a call of `fit`.
        """
        stored = store.newest("fit", _is_at_epoch_end) if at_epoch_end else store.newest("fit")
        if stored is None:
            return None
        values = stored.values
        progress, work = TrainingProgress.unpack(values["progress"]), Work(**values["work"])
        others = {name: values[name] for name in ("data", "partitions", "checksums", "backend", "every")}
        return cls(stored.name, progress, work, **others, model=stored.model)

    def has_rows_of(self, now: WorkerRows) -> bool:
        """Whether each worker has the same rows in the same order, as far as that is known."""
        return self.partitions == now.counts and not self.has_changed_rows(now)

    def has_changed_rows(self, now: WorkerRows) -> bool:
        """Whether workers have as many rows as before, but others, or in another order."""
        return self.partitions == now.counts and now.differ_from(self.checksums)

    def restore_result(self, model: keras.Model) -> None:
        """Put the state after training into a model, or what training had reached.

        Raises:
            ConfigurationError: The model has other variables outside it than that of the checkpoint.
        """
        before, now = (each.get(OUTSIDE, []) for each in (self.work.fit, description(model)))
        if before != now:
            raise ConfigurationError(
                f"the custom code of the model in the checkpoint {self.name} has {counted(len(before), 'variable')} outside "
                f"the model, and this one {counted(len(now), 'variable')}, or others: pass the code with which the "
                "checkpoint was written as custom_objects=."
            )
        (self.progress.result or self.progress.state).put(model)
        put_generators(self.progress.generators, model)


def _is_at_epoch_end(stored: StoredCheckpoint) -> bool:
    return not stored.values["progress"]["part"]["batches"]
