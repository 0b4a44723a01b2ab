"""The progress of a search: its trials as events, and what standard output shows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparkkeras.errors import counted
from sparkkeras.events import (
    Event,
    Events,
    HyperParameter,
    PhaseStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    TrialChanged,
    WorkersChanged,
)
from sparkkeras.hyperopt.ledger import TrialLedger
from sparkkeras.hyperopt.space import Parameter, Space, describe, shown
from sparkkeras.hyperopt.trials import (
    FAILED,
    OK,
    PRUNED,
    RUNNING,
    STOPPED,
    Metrics,
    Trial,
    pareto_front,
    ranked,
)
from sparkkeras.progress.renderer import Progress
from sparkkeras.progress.status_line import format_duration

TABLE_ROWS = 5
"""The number of best trials in the final table."""

FRONT_ROWS = 10
"""The number of trials of a Pareto front in the table; of a larger front, it has those at even distances."""


class TrialEvents:
    """Emits trials that have changed since the last call.

    Args:
        events: Gets the events.
        ledger: The trials.
        parameters: The hyper-parameters.
    """

    def __init__(self, events: Events, ledger: TrialLedger, parameters: Mapping[str, Parameter]) -> None:
        self._events, self._ledger, self._parameters = events, ledger, parameters
        self._emitted: dict[int, Trial] = {}
        self._earlier = {trial.number for trial in ledger.finished}

    def begin(self, num_workers: int) -> None:
        """Emit the trials of earlier calls, and the number of workers if they have anything to do."""
        over = " All trials of this search have ended already. A larger max_evals= or timeout= continues it."
        if self._earlier:
            resumed = f"Resuming after {counted(len(self._earlier), 'trial')}."
            self._events.emit(RunResumed(resumed + (over if self._ledger.is_over else "")))
        if not self._ledger.is_over:
            self._events.emit(WorkersChanged(num_workers))
        self.tick()

    def tick(self) -> None:
        """Emit what has changed."""
        if self._events:
            running = self._ledger.running  # read first: a trial that ends now is finished, not neither of both
            for trial in [*running, *self._ledger.finished]:
                if self._emitted.get(trial.number) is not trial:
                    self._emitted[trial.number] = trial
                    self._events.emit(TrialChanged(trial, shown(self._parameters, trial), trial.number in self._earlier))


class SearchProgress(Progress):
    """A progress line during a search, and a table of the best trials at its end.

    Args:
        verbose: 0 is silent; 1 updates one progress line (if no line can change, it writes a line for each new best trial,
            and see `StatusLine`); 2 writes a line for each trial.
        metrics: The metrics.
        parameters: The hyper-parameters.
    """

    def __init__(self, verbose: int, metrics: Metrics, parameters: Mapping[str, Parameter]) -> None:
        super().__init__(verbose)
        self._verbose, self._metrics, self._parameters = verbose, metrics, parameters
        self._trials: dict[int, Trial] = {}
        self._durations: list[float] = []

    def _handle(self, event: Event, has_news: bool) -> None:
        match event:
            case PhaseStarted(text) if self._num_workers:  # the reason of its end
                self.status.write(f"{text}.")
            case TrialChanged(trial, _, is_earlier):
                self._trials[trial.number] = trial
                if trial.status != RUNNING and not is_earlier:
                    self._add(trial)
            case RunEnded() if self._num_workers or self._trials:
                is_interrupted = event.status == "interrupted"
                self.status.write(f"{'Interrupted: ' if is_interrupted else ''}{self._summary()}.")
                if not is_interrupted:
                    self._write_table()
            case _:
                super()._handle(event, has_news)

    def _add(self, trial: Trial) -> None:
        """Report a trial that has ended."""
        self._durations.append(trial.seconds)
        finished = self._finished
        is_best = trial in self._best(finished)
        is_first_failure = trial.status == FAILED and sum(each.status == FAILED for each in finished) == 1
        if self._verbose == 2 or is_first_failure or (is_best and not self.status.changes):
            value = "".join(f" {name} {each:.4g}" for name, each in zip(self._metrics, trial.values, strict=False))
            status = "" if trial.status == OK else f" {trial.status}"
            error = f": {trial.error.splitlines()[0]}" if trial.error else ""
            params = describe(self._parameters, trial)
            self.status.write(f"trial {trial.number}{status}{value} {params} ({format_duration(trial.seconds)}){error}")

    def _best(self, finished: Sequence[Trial]) -> list[Trial]:
        """The best trial; with several metrics, the Pareto front."""
        signs = self._metrics.values()
        return pareto_front(finished, *signs) if len(signs) > 1 else ranked(finished, *signs)[:1]

    @property
    def _finished(self) -> list[Trial]:
        return [trial for trial in self._trials.values() if trial.status != RUNNING]

    def _summary(self) -> str:
        """The progress of the search in one line."""
        finished, total = self._finished, self._run.max_trials
        counts = Counter(trial.status for trial in self._trials.values())
        parts = [f"{len(finished)}{'' if total is None else f'/{total}'} trials"]
        parts += [f"{counts[status]} {status}" for status in (RUNNING, PRUNED, STOPPED, FAILED) if counts[status]]
        for index, (metric, sign) in enumerate(self._metrics.items()):
            valued = [(sign * trial.values[index], trial.number) for trial in finished if trial.values]
            parts += [f"best {metric} {sign * value:.4g} (trial {number})" for value, number in sorted(valued)[:1]]
        return " - ".join([*parts, self._elapsed()])

    def _line(self) -> str:
        """The summary, and the time for the other trials, if they take as long as those of this call have."""
        left = 0 if self._run.max_trials is None else self._run.max_trials - len(self._finished)
        if not self._durations or left <= 0:
            return self._summary()
        seconds = sum(self._durations) / len(self._durations) * left / min(self._num_workers, left)
        return f"{self._summary()}, about {format_duration(seconds)} left"

    def _write_table(self) -> None:
        """Write a table of the best trials."""
        finished, signs = self._finished, self._metrics.values()
        best = ranked(finished, *signs)[:TABLE_ROWS]
        if len(signs) > 1 and best:
            front = self._best(finished)
            best = [front[int(index)] for index in np.linspace(0, len(front) - 1, min(len(front), FRONT_ROWS)).round()]
            shown = f"; {len(best)} of them:" if len(best) < len(front) else "."
            self.status.write(f"Pareto front: {counted(len(front), 'trial')} that no other one dominates{shown}")
        if best:
            self.status.write(table(best, list(self._metrics), self._parameters))


def table(trials: Sequence[Trial], metrics: Sequence[str], parameters: Mapping[str, Parameter]) -> str:
    """A table of trials as text."""
    rows = [["trial", *metrics, "status", "best/epochs", "time", "parameters"]]
    for trial in trials:
        epochs = "/".join(str(number) for number in (trial.best_epoch, trial.epochs) if number)
        values = [f"{value:.4g}" for value in trial.values] or [""] * len(metrics)
        params = describe(parameters, trial)
        rows.append([str(trial.number), *values, trial.status, epochs, format_duration(trial.seconds), params])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def started(name: str, space: Space, metrics: Metrics, max_trials: int | None, **settings: Any) -> RunStarted:
    """The event with which a search begins; see `RunStarted`, whose metric is the first one."""
    metric, sign = next(iter(metrics.items()))
    several = {"metrics": ", ".join(metrics)} if len(metrics) > 1 else {}
    return RunStarted(
        "search",
        name,
        {**settings, **several},
        metric=metric,
        minimizes=sign > 0,
        max_trials=max_trials,
        parameters=tuple(HyperParameter(each.label, each.options, each.is_log) for each in space.parameters.values()),
    )
