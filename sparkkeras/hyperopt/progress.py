"""Reports the progress of a search on standard output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sparkkeras.errors import counted
from sparkkeras.hyperopt.ledger import TrialLedger
from sparkkeras.hyperopt.parameters import Parameter, describe_params
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Metrics, Trial, losses, pareto_front, ranked
from sparkkeras.progress.status_line import StatusLine, format_duration

TABLE_ROWS = 5
"""The number of best trials in the final table."""

FRONT_ROWS = 10
"""The number of trials of a Pareto front in the table; of a larger front, it has those at even distances."""


class SearchProgress:
    """A progress line during a search, and a table of the best trials at its end.

    Args:
        verbose: 0 is silent; 1 updates one progress line (if no line can change, it writes a line for each new best trial,
            and see `StatusLine`); 2 writes a line for each trial.
        ledger: The trials.
        metrics: The metrics.
        max_evals: The total number of trials; ``None`` if unlimited.
        num_workers: The number of workers.
        parameters: The hyper-parameters.
    """

    def __init__(
        self,
        verbose: int,
        ledger: TrialLedger,
        metrics: Metrics,
        max_evals: int | None,
        num_workers: int,
        parameters: Sequence[Parameter],
    ) -> None:
        self._verbose, self._ledger, self._metrics = verbose, ledger, metrics
        self._max_evals, self._num_workers, self._parameters = max_evals, num_workers, parameters
        self._earlier = frozenset(trial.number for trial in ledger.finished)
        self._reported = set(self._earlier)
        self._status = StatusLine(verbose)

    def begin(self) -> None:
        """Report the start: workers take a few seconds to load Keras."""
        if self._verbose and self._ledger.is_over:
            self._status.write("All trials of this search have ended already. A larger max_evals= or timeout= continues it.")
        elif self._verbose:
            workers = f"{self._num_workers} worker{'s' if self._num_workers != 1 else ''}"
            resumed = f", resuming after {len(self._earlier)} trials" if self._earlier else ""
            self._status.write(f"Loading Keras, then searching on {workers}{resumed}.")

    def tick(self) -> None:
        """Report the trials that have ended since the last call, and update the progress line."""
        if not self._verbose:
            return
        finished, signs = self._ledger.finished, self._metrics.values()
        for trial in finished:
            if trial.number in self._reported:
                continue
            self._reported.add(trial.number)
            seen = [each for each in finished if each.number in self._reported]
            is_best = trial in (pareto_front(seen, *signs) if len(signs) > 1 else ranked(seen, *signs)[:1])
            is_first_failure = trial.status == FAILED and sum(each.status == FAILED for each in seen) == 1
            if self._verbose == 2 or is_first_failure or (is_best and not self._status.changes):
                self._status.write(self._line(trial))
        self._status.update(self.summary())

    def end(self) -> None:
        """Write the summary and the table."""
        if self._verbose:
            self.tick()
            reason = f" The search ended early: {self._ledger.reason}." if self._ledger.reason else ""
            self._status.write(f"{self.summary()}.{reason}")
            finished, signs = self._ledger.finished, self._metrics.values()
            best = ranked(finished, *signs)[:TABLE_ROWS]
            if len(signs) > 1 and best:
                front = pareto_front(finished, *signs)
                best = [front[int(index)] for index in np.linspace(0, len(front) - 1, min(len(front), FRONT_ROWS)).round()]
                shown = f"; {len(best)} of them:" if len(best) < len(front) else "."
                self._status.write(f"Pareto front: {counted(len(front), 'trial')} that no other one dominates{shown}")
            if best:
                self._status.write(table(best, list(self._metrics), self._parameters))

    def interrupted(self) -> None:
        """Write the summary after an interrupt (Ctrl-C)."""
        if self._verbose:
            self._status.write(f"Interrupted: {self.summary()}.")

    def clear(self) -> None:
        """Remove the progress line, after an error."""
        self._status.clear()

    def summary(self) -> str:
        """The progress of the search in one line."""
        finished, running = self._ledger.finished, self._ledger.running
        counts = Counter(trial.status for trial in finished)
        parts = [f"{len(finished)}{'' if self._max_evals is None else f'/{self._max_evals}'} trials"]
        parts += [f"{len(running)} running"] if running else []
        parts += [f"{counts[status]} {status}" for status in (PRUNED, STOPPED, FAILED) if counts[status]]
        found = [(losses(trial.values, tuple(self._metrics.values())), trial.number) for trial in finished if trial.values]
        for index, (metric, sign) in enumerate(self._metrics.items()):
            value, _, number = min(((each[index], each, number) for each, number in found), default=(0.0, (), -1))
            parts += [f"best {metric} {sign * value:.4g} (trial {number})"] if number >= 0 else []
        parts.append(format_duration(self._ledger.seconds) + (" with earlier calls" if self._earlier else ""))
        seconds_left = self._seconds_left(finished)
        return " - ".join(parts) + (f", about {format_duration(seconds_left)} left" if seconds_left else "")

    def _seconds_left(self, finished: Sequence[Trial]) -> float:
        """The time for the other trials, if they take as long as those of this call; without the loading of Keras."""
        durations = [trial.seconds for trial in finished if trial.number not in self._earlier]
        if self._max_evals is None or not durations or self._ledger.is_over:
            return 0.0
        left = self._max_evals - len(finished)
        return sum(durations) / len(durations) * left / max(1, min(self._num_workers, left))

    def _line(self, trial: Trial) -> str:
        value = "".join(f" {name} {each:.4g}" for name, each in zip(self._metrics, trial.values, strict=False))
        status = "" if trial.status == OK else f" {trial.status}"
        error = f": {trial.error.splitlines()[0]}" if trial.error else ""
        params = describe_params(self._parameters, trial.chosen)
        return f"trial {trial.number}{status}{value} {params} ({format_duration(trial.seconds)}){error}"


def table(trials: Sequence[Trial], metrics: Sequence[str], parameters: Sequence[Parameter]) -> str:
    """A table of trials as text."""
    rows = [["trial", *metrics, "status", "best/epochs", "time", "parameters"]]
    for trial in trials:
        epochs = "/".join(str(number) for number in (trial.best_epoch, trial.epochs) if number)
        values = [f"{value:.4g}" for value in trial.values] or [""] * len(metrics)
        params = describe_params(parameters, trial.chosen)
        rows.append([str(trial.number), *values, trial.status, epochs, format_duration(trial.seconds), params])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
