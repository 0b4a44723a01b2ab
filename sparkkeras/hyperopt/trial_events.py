"""The trials of a search as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkkeras.errors import counted
from sparkkeras.events import Events, RunResumed, TrialChanged, WorkersChanged
from sparkkeras.hyperopt.ledger import TrialLedger
from sparkkeras.hyperopt.parameters import Parameter
from sparkkeras.hyperopt.trials import Trial


class TrialEvents:
    """Emits trials that have changed since the last call.

    Args:
        events: Gets the events.
        ledger: The trials.
        parameters: The hyper-parameters.
    """

    def __init__(self, events: Events, ledger: TrialLedger, parameters: Sequence[Parameter]) -> None:
        self._events, self._ledger, self._parameters = events, ledger, parameters
        self._emitted: dict[int, Trial] = {}
        self._earlier = {trial.number for trial in ledger.finished}

    def begin(self, num_workers: int) -> None:
        """Emit the number of workers, and the trials of earlier calls."""
        if self._earlier:
            self._events.emit(RunResumed(f"Resuming after {counted(len(self._earlier), 'trial')}."))
        self._events.emit(WorkersChanged(num_workers))
        self.tick()

    def tick(self) -> None:
        """Emit what has changed."""
        if self._events:
            running = self._ledger.running  # read first: a trial that ends now is finished, not neither of both
            for trial in [*running, *self._ledger.finished]:
                if self._emitted.get(trial.number) is not trial:
                    self._emitted[trial.number] = trial
                    self._events.emit(
                        TrialChanged(trial, params_by_name(self._parameters, trial), trial.number in self._earlier)
                    )


def params_by_name(parameters: Sequence[Parameter], trial: Trial) -> dict[str, Any]:
    """The hyper-parameters of a trial by their display names: numbers, and for a choice the name of the option."""
    used = (each for each in parameters if each.is_used(trial.chosen))
    return {each.name: each.text(trial.chosen) if each.options else each.value(trial.chosen) for each in used}
