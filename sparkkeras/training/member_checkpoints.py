"""Checkpoints of an ensemble: what its members begin with, and each member that has been trained.

The folder has one checkpoint with the seed and the initial states, from which members that were not finished are trained
again, to the same bits; and a folder for each trained member, with the name of this checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkkeras.checkpoints import values
from sparkkeras.checkpoints.store import CheckpointStore, DamagedError
from sparkkeras.errors import ConfigurationError, StorageError, counted, warn
from sparkkeras.modeling.description import description
from sparkkeras.modeling.state import ModelState
from sparkkeras.spark import filesystem
from sparkkeras.training.saved_run import SameWork, WorkerRows, check_same, initial_rate

if TYPE_CHECKING:
    from sparkkeras.training.run import Run

_ENSEMBLE, _MEMBER = "SparkEnsemble.fit", "a member of SparkEnsemble.fit"
_FOLDER = re.compile("member-[0-9]{5,}")


@dataclass(frozen=True)
class Trained:
    """The result of a member: its state after training, and its logs for each epoch."""

    member: int
    state: ModelState
    logs: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class SavedEnsemble:
    """What the members of an ensemble begin with: their initial states, and what they belong to."""

    work: SameWork
    rows: WorkerRows
    states: list[ModelState]


class MemberCheckpoints:
    """The checkpoints of one call of `SparkEnsemble.fit`.

    Args:
        store: The folder.
        resume: Whether to read what an earlier call has written.

    Attributes:
        seed: The seed of the ensemble in the checkpoint, and the number of its calls of ``fit`` before this one; ``None``
            without a checkpoint.
        states: The initial states of the members.
        trained: The members that are trained, by index.

    Raises:
        ConfigurationError: The checkpoint is not of an ensemble, or there are members without it.
        StorageError: The folder cannot be read, or the checkpoint is damaged.
    """

    def __init__(self, store: CheckpointStore, resume: bool) -> None:
        self._store = store
        self.seed: tuple[int, int] | None = None
        self.states: list[ModelState] = []
        self.trained: dict[int, Trained] = {}
        stored = store.newest(_ENSEMBLE) if resume else None
        self._saved: SavedEnsemble | None = None
        if stored is not None:
            self._name, self._saved = stored.name, stored.value
            self.seed = stored.value.work.seed, stored.value.work.kept["fits"]
            self.states = stored.value.states
            return
        members = [name for name in filesystem.folders_in(store.path) if _FOLDER.fullmatch(name)]
        if members:
            raise ConfigurationError(
                f"{store.path!r} has {counted(len(members), 'member')} of an earlier ensemble, but not the checkpoint that "
                "they began with: pass another path."
            )

    @classmethod
    def open(cls, checkpoint: object, resume: object) -> MemberCheckpoints | None:
        """Check the arguments of `SparkEnsemble.fit`, and read the checkpoint; ``None`` without checkpoints.

        Raises:
            ConfigurationError: An argument is not valid, or there are checkpoints that would not be used.
            StorageError: The folder cannot be read, or the checkpoint is damaged.
        """
        store = CheckpointStore.open(checkpoint, resume, "each member of an ensemble is written when it is trained")
        return None if store is None else cls(store, bool(resume))

    def check(self, run: Run, sampling: str, seed: tuple[int, int]) -> None:
        """Check that the models and the arguments of a checked run are those of the checkpoint.

        Args:
            run: The run.
            sampling: The rows that each member is trained on.
            seed: The seed of the ensemble, and the number of its calls of ``fit`` before this one.

        Raises:
            ConfigurationError: They differ.
        """
        members = [description(model) for model in run.models]
        compared = {"epochs": run.epochs, "sampling": sampling, **run.arguments, "members": members}
        rates = {f"learning_rate of member {number}": initial_rate(each) for number, each in enumerate(run.models)}
        self._work = SameWork(compared, rates, seed[0], {"fits": seed[1]})
        if self._saved is not None:
            self._saved.work.check(self._work, self._store.path, self._name)

    def begin(self, run: Run) -> None:
        """Check the rows, and read what is trained; or write the initial states of the members. Warns of changed rows.

        Raises:
            ConfigurationError: The rows differ.
            StorageError: The checkpoint cannot be written, or that of a member not be read.
        """
        rows = WorkerRows.of(run)
        if self._saved is None:
            self.states = [ModelState.take(model) for model in run.models]
            self._name = self._store.write(_ENSEMBLE, SavedEnsemble(self._work, rows, self.states))
            return
        before, now = ({"data": each.described, "partitions": each.counts} for each in (self._saved.rows, rows))
        check_same(before, now, self._store.path, self._name)
        if rows.differ_from(self._saved.rows):
            warn(
                f"the members that are trained now get other rows than those in {self._store.path!r}, or the same in "
                "another order, as after repartition(n) of a DataFrame: validation_split may take rows that others were "
                "trained on, and results are not those of a training without interruption."
            )
        self.trained = {number: trained for number in range(len(run.models)) if (trained := self._read(number))}

    def keep(self, trained: Trained) -> None:
        """Write a trained member. Warns if it cannot be written."""
        try:
            self._of(trained.member).write(_MEMBER, (self._name, trained))
        except StorageError as error:
            warn(f"member {trained.member} is trained, but its checkpoint could not be written: {error}")

    def _read(self, number: int) -> Trained | None:
        """A member that is trained; ``None`` if it is to be trained. Warns if its checkpoint cannot be used."""
        try:
            stored = self._of(number).newest(_MEMBER)
        except DamagedError as error:
            warn(f"member {number} is trained again: {error}")
            return None
        if stored is None:
            return None
        ensemble: str
        trained: Trained
        ensemble, trained = stored.value
        if ensemble != self._name:
            warn(f"member {number} is trained again: {self._of(number).path} is of an ensemble {ensemble}.")
            return None
        return trained

    def _of(self, number: int) -> CheckpointStore:
        return CheckpointStore(f"{self._store.path}/member-{number:05d}")


values.register(Trained, SavedEnsemble)
