"""What a checkpoint of `fit` has, and what it belongs to: the same work can be continued, other work is refused.

A `TrainingProgress` is what training needs to continue with the same bits. It refers to arrays and lists that do not change
any more, so a thread can write it while training goes on. Row orders and dropout masks are functions of seed, worker, epoch
and batch, so a seed is all that is stored of random numbers, with the states of the generators in the driver's model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras

from sparkkeras.checkpoints import values
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.data.dataset import common_spec
from sparkkeras.data.placement import SAME_ROWS
from sparkkeras.errors import ConfigurationError, DataError, counted
from sparkkeras.modeling.description import OUTSIDE, description
from sparkkeras.modeling.optimizers import iterations
from sparkkeras.modeling.state import ModelState, learning_rate, put_generators
from sparkkeras.parameter.exchange import EpochReport, LedgerProgress, PartitionProgress
from sparkkeras.parameter.rules import State, rule_config
from sparkkeras.training.recorder import EpochPart
from sparkkeras.training.worker_reports import Report
from sparkkeras.weights import Array, Flat

if TYPE_CHECKING:
    from sparkkeras.training.run import Run

FIT = "SparkModel.fit or KerasEstimator.fit"
"""What writes these checkpoints, as in messages."""

_SHOWN = 4
_ABSENT = "nothing"


@dataclass(frozen=True)
class EpochRecord:
    """What the driver knows besides the model, which changes only between epochs.

    Attributes:
        epochs: The epochs in the history.
        history: The logs of these epochs, by name.
        logs: The logs of the last one.
        histories: The records of the workers.
        callbacks: The states of the callbacks.
    """

    epochs: list[int]
    history: dict[str, list[Any]]
    logs: dict[str, Any]
    histories: list[dict[str, Any]]
    callbacks: list[dict[str, Any]]


@dataclass(frozen=True)
class TrainingProgress:
    """What training has reached at the end of a round.

    Attributes:
        part: The epoch, and what was trained of it; at the end of an epoch, nothing of the next one.
        rounds: The number of rounds since the beginning of training.
        stopped: Whether a callback has stopped training.
        state: The state of the model.
        generators: The states of the model's generators of random numbers.
        rule_state: The state of the rule.
        record: What the driver knows besides.
        result: The state of the model after training, where callbacks or moving averages have changed it at the end.
        finished: Whether training was completed.
        workers: The progress of the workers of a parameter server.
    """

    part: EpochPart
    rounds: int
    stopped: bool
    state: ModelState
    generators: list[Array]
    rule_state: State
    record: EpochRecord
    result: ModelState | None = None
    finished: bool = False
    workers: LedgerProgress | None = None


@dataclass(frozen=True)
class SameWork:
    """What a checkpoint belongs to: a run can continue from those of the same work.

    Attributes:
        compared: The models, the arguments and the settings, which must be the same: values for JSON by name.
        rates: The learning rates of the optimizers, by name in messages; ``None`` for one that has made a step, which may
            have changed it.
        seed: The seed of row orders and dropout masks; of an ensemble, that from which it follows.
        kept: What is restored and not compared: the settings of the SparkModel after this call of `fit`; of an ensemble,
            the number of calls before it.
    """

    compared: dict[str, Any]
    rates: dict[str, float | None]
    seed: int
    kept: dict[str, Any]

    @classmethod
    def of(cls, run: Run, kept: Mapping[str, Any]) -> SameWork:
        """That of a checked call of `SparkModel.fit`."""
        compared = {
            "mode": run.mode,
            "rule": rule_config(run.rule),
            "frequency": run.frequency,
            "gradient_dtype": run.gradient_dtype,
            **run.arguments,
            **description(run.model),
        }
        return cls(compared, {"learning_rate": initial_rate(run.model)}, run.options.seed, dict(kept))

    def check(self, now: SameWork, path: str, name: str) -> None:
        """Check that a run is the same work; the arguments and the error are those of `check_same`."""
        names = [name for name, rate in self.rates.items() if None not in (rate, now.rates.get(name))]
        before, after = ({name: each.rates[name] for name in names} for each in (self, now))
        check_same({**self.compared, **before}, {**now.compared, **after}, path, name)


def initial_rate(model: keras.Model) -> float | None:
    """The learning rate of the optimizer; ``None`` if it has made a step, which may have changed it."""
    return None if any(iterations(model)) else learning_rate(model)


def check_same(stored: Mapping[str, Any], now: Mapping[str, Any], path: str, name: str) -> None:
    """Check that a description in a checkpoint is that of this call: nested values for JSON.

    Args:
        stored: The description in the checkpoint.
        now: That of this call.
        path: The folder of the checkpoint.
        name: Its name.

    Raises:
        ConfigurationError: They differ; the message has what differs.
    """
    before, after = dict(_leaves("", stored)), dict(_leaves("", now))
    found = [
        f"{place}: {_shown(before.get(place, _ABSENT))} in the checkpoint, {_shown(after.get(place, _ABSENT))} now"
        for place in [*before, *(place for place in after if place not in before)]
        if before.get(place) != after.get(place)
    ]
    if found:
        more = f"; and {counted(len(found) - _SHOWN, 'difference')} more" if len(found) > _SHOWN else ""
        raise ConfigurationError(
            f"the checkpoint {name} in {path!r} was written by a fit with another model, other data or other arguments: "
            f"{'; '.join(found[:_SHOWN])}{more}. Resume with what the checkpoint was written with, or pass another path to "
            "train from the start."
        )


def _shown(text: str) -> str:
    """A value as people write it: a float of 32 bits, such as a learning rate, without the digits that it does not have."""
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return f"{number:.7g}" if isinstance(number, float) else text


def _leaves(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values in nested dicts and lists, as text, with where they are."""
    if isinstance(value, Mapping) and value:
        for key, member in value.items():
            yield from _leaves(f"{place}.{key}" if place else key, member)
    elif isinstance(value, (list, tuple)) and value:
        for index, member in enumerate(value):
            yield from _leaves(f"{place}[{index}]", member)
    else:
        yield place, json.dumps(value)


@dataclass(frozen=True)
class WorkerRows:
    """The rows of a training.

    Attributes:
        counts: The numbers of those of each worker to train on.
        checksums: The checksums of all rows of each worker, see `Handle`.
        described: What must be the same to resume, as values for JSON.
        repeat: Whether the same rows have the same places each time that they are read.
    """

    counts: list[int | None]
    checksums: list[int | None]
    described: dict[str, Any]
    repeat: bool = False

    @classmethod
    def of(cls, run: Run) -> WorkerRows:
        """The stored rows of a run."""
        spec = common_spec(run.dataset.handles)
        leaves = () if spec is None else zip(spec.form.labels, spec.leaves, strict=True)
        found = run.validation
        validated = run.split.validate if found is None or found.spans else [each.rows for each in found.dataset.handles]
        described = {
            "rows": _total(run.split.train),
            "validation rows": _total(validated),
            "arrays": {label: f"{leaf.shape} {leaf.dtype}" for label, leaf in leaves},
        }
        checksums = [handle.checksum for handle in run.dataset.handles]
        return cls(list(run.split.train), checksums, described, run.options.shuffle == "global")

    def differ_from(self, stored: WorkerRows) -> bool:
        """Whether a checksum differs from one in a checkpoint, of those that are known.

        Raises:
            DataError: One differs, although the places of rows depend on the rows alone.
        """
        pairs = zip(self.checksums, stored.checksums, strict=False)
        differ = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        if differ and self.repeat:
            raise DataError(f"the rows are not those of the training that is resumed. {SAME_ROWS}")
        return differ


def _total(rows: Sequence[int | None]) -> int | None:
    return None if None in rows else sum(each or 0 for each in rows)


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of `fit`.

    Attributes:
        progress: What training had reached.
        work: What it belongs to.
        rows: The rows.
        backend: The backend of Keras.
        every: How often checkpoints were written, see `Checkpoint`.
        name: The name of the checkpoint that was read.
        model: The bytes of the packed model, if they were read.
    """

    progress: TrainingProgress
    work: SameWork
    rows: WorkerRows
    backend: str
    every: str | int
    name: str = ""
    model: bytes = b""

    @classmethod
    def newest(cls, store: CheckpointStore, at_epoch_end: bool = False, with_model: bool = False) -> SavedRun | None:
        """The newest checkpoint that is not damaged; ``None`` if there is no checkpoint.

        Args:
            store: The folder.
            at_epoch_end: Skip those in the middle of an epoch.
            with_model: Whether to read the model, too.

        Raises:
            StorageError: The folder cannot be read, or all checkpoints are damaged.
            ConfigurationError: The checkpoint is not of a call of `fit`.
        """
        found = store.newest(FIT, lambda run: not (at_epoch_end and run.progress.part.batches), with_model)
        return None if found is None else replace(found.value, name=found.name, model=found.model)

    def write(self, store: CheckpointStore, model: bytes) -> str:
        """Write it with the packed model; returns its name."""
        return store.write(FIT, self, model)

    def restore_result(self, model: keras.Model) -> None:
        """Put the state after training into a model, or what training had reached.

        Raises:
            ConfigurationError: The model has other variables outside it than that of the checkpoint.
        """
        before, now = (each.get(OUTSIDE, []) for each in (self.work.compared, description(model)))
        if before != now:
            raise ConfigurationError(
                f"the custom code of the model in the checkpoint {self.name} has {counted(len(before), 'variable')} outside "
                f"the model, and this one {counted(len(now), 'variable')}, or others: pass the code with which the "
                "checkpoint was written as custom_objects=."
            )
        (self.progress.result or self.progress.state).put(model)
        put_generators(self.progress.generators, model)


values.register(SavedRun, SameWork, WorkerRows, TrainingProgress, EpochRecord, EpochPart, Report, ModelState, Flat)
values.register(LedgerProgress, PartitionProgress, EpochReport)
