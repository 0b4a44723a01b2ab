"""Checkpoints of an ensemble: what its members begin with, and each member that has been trained.

The folder has one checkpoint with the seed and the initial states, from which members that were not finished are trained
again, to the same bits; and a folder for each trained member, with the name of this checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from sparkkeras.checkpoints.checkpoint import Checkpoint
from sparkkeras.checkpoints.differences import differences, other_work
from sparkkeras.checkpoints.store import CheckpointStore, DamagedError
from sparkkeras.errors import ConfigurationError, StorageError, counted, warn
from sparkkeras.modeling.description import description
from sparkkeras.modeling.state import ModelState
from sparkkeras.spark import filesystem
from sparkkeras.training.preparation import FitRequest
from sparkkeras.training.saved_progress import pack_state, unpack_state
from sparkkeras.training.saved_run import Rates, WorkerRows, initial_rate, known_rates

_MEMBER = re.compile("member-[0-9]{5,}")


@dataclass(frozen=True)
class Trained:
    """The result of a member: its state after training, and its logs for each epoch."""

    member: int
    state: ModelState
    logs: tuple[dict[str, Any], ...]


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
        self._stored = store.newest("ensemble") if resume else None
        self.seed: tuple[int, int] | None = None
        self.states: list[ModelState] = []
        self.trained: dict[int, Trained] = {}
        if self._stored is not None:
            self._name, found = self._stored.name, self._stored.values
            self.seed = found["seed"], found["fits"]
            self.states = [unpack_state(state) for state in found["members"]]
            return
        members = [name for name in filesystem.folders_in(store.path) if _MEMBER.fullmatch(name)]
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
        if isinstance(checkpoint, Checkpoint) and (checkpoint.every != "epoch" or checkpoint.every_seconds is not None):
            raise ConfigurationError(
                f"Checkpoint(every={checkpoint.every!r}, every_seconds={checkpoint.every_seconds!r}): each member of an "
                "ensemble is written when it is trained. Leave these out."
            )
        store = CheckpointStore.open(checkpoint, resume)
        return None if store is None else cls(store, bool(resume))

    def check(self, members: Sequence[keras.Model], sampling: str, request: FitRequest) -> None:
        """Check that the models and the arguments are those of the checkpoint.

        Raises:
            ConfigurationError: They differ.
        """
        self._work: dict[str, Any] = {
            "epochs": request.given["epochs"],
            "sampling": sampling,
            **request.settings,
            "members": [description(model) for model in members],
        }
        self._rates: Rates = {f"learning_rate of member {number}": initial_rate(each) for number, each in enumerate(members)}
        if self._stored is not None:
            before, now = known_rates(self._stored.values["rates"], self._rates)
            self._check({**self._stored.values["work"], **before}, {**self._work, **now})

    def begin(
        self,
        data: Mapping[str, Any],
        rows: WorkerRows,
        members: Sequence[keras.Model],
        seed: tuple[int, int],
    ) -> None:
        """Check the data, and read what is trained; or write the initial states of the members. Warns of changed rows.

        Args:
            data: The data; see `sparkkeras.training.saved_run.data_of`.
            rows: The rows of each partition.
            members: The models.
            seed: The seed of the ensemble, and the number of its calls of ``fit`` before this one.

        Raises:
            ConfigurationError: The data differs.
            StorageError: The checkpoint cannot be written, or that of a member not be read.
        """
        found = {"data": dict(data), "partitions": rows.counts}
        if self._stored is not None:
            stored = self._stored.values
            self._check({name: stored[name] for name in found}, found)
            if rows.differ_from(stored["checksums"]):
                warn(
                    f"the members that are trained now get other rows than those in {self._store.path!r}, or the same in "
                    "another order, as after repartition(n) of a DataFrame: validation_split may take rows that others were "
                    "trained on, and results are not those of a training without interruption."
                )
            self.trained = {number: trained for number in range(len(members)) if (trained := self._read(number))}
            return
        self.states = [ModelState.take(model) for model in members]
        states = [pack_state(state) for state in self.states]
        work = {"work": self._work, "rates": self._rates}
        self._name = self._store.write(
            {
                "kind": "ensemble",
                "members": states,
                "seed": seed[0],
                "fits": seed[1],
                "checksums": rows.checksums,
                **work,
                **found,
            }
        )

    def keep(self, trained: Trained) -> None:
        """Write a trained member. Warns if it cannot be written."""
        try:
            state = {"state": pack_state(trained.state), "logs": list(trained.logs)}
            self._of(trained.member).write({"kind": "member", "ensemble": self._name, **state})
        except StorageError as error:
            warn(f"member {trained.member} is trained, but its checkpoint could not be written: {error}")

    def _read(self, number: int) -> Trained | None:
        """A member that is trained; ``None`` if it is to be trained. Warns if its checkpoint cannot be used."""
        try:
            stored = self._of(number).newest("member")
        except DamagedError as error:
            warn(f"member {number} is trained again: {error}")
            return None
        if stored is None:
            return None
        found = stored.values
        if found["ensemble"] != self._name:
            warn(f"member {number} is trained again: {self._of(number).path} is of an ensemble {found['ensemble']}.")
            return None
        return Trained(number, unpack_state(found["state"]), tuple(found["logs"]))

    def _of(self, number: int) -> CheckpointStore:
        return CheckpointStore(f"{self._store.path}/member-{number:05d}")

    def _check(self, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        found = differences(stored, now)
        if found:
            assert self._stored is not None
            raise other_work(self._store.path, self._stored.name, found)
