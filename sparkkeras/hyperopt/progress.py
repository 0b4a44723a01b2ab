"""Reports on standard output how far a search is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from sparkkeras.hyperopt.ledger import TrialLedger
from sparkkeras.hyperopt.parameters import Parameter, described
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Trial, ranked

SHOWN = 5
"""So many of the best trials are in the table at the end."""


class SearchProgress:
    """A line that lives while the search goes on, and a table at its end.

    Args:
        verbose: 0 says nothing; 1 keeps a line alive (where the output is no terminal, it writes one whenever there is a new
            best trial); 2 writes a line for each trial.
        ledger: The trials.
        metric: What is optimized.
        sign: 1 where small values are good, -1 where large ones are.
        max_evals: How many trials there will be.
        num_workers: How many workers there are.
        parameters: The hyper-parameters.
    """

    def __init__(
        self,
        verbose: int,
        ledger: TrialLedger,
        metric: str,
        sign: float,
        max_evals: int | None,
        num_workers: int,
        parameters: Sequence[Parameter],
    ) -> None:
        self._verbose, self._ledger, self._metric, self._sign = verbose, ledger, metric, sign
        self._max_evals, self._num_workers, self._parameters = max_evals, num_workers, parameters
        self._told = {trial.number for trial in ledger.finished}
        self._before = len(self._told)
        self._began = ledger.seconds
        self._is_live = verbose == 1 and sys.stdout.isatty()

    def begin(self) -> None:
        """Say what takes a while."""
        if self._verbose:
            workers = f"{self._num_workers} worker{'s' if self._num_workers != 1 else ''}"
            resumed = f", going on after {self._before} trials" if self._before else ""
            self._write(f"Searching on {workers}, which load Keras first{resumed}.\n")

    def tick(self) -> None:
        """Report what is new."""
        if not self._verbose:
            return
        finished = self._ledger.finished
        for trial in finished:
            if trial.number in self._told:
                continue
            self._told.add(trial.number)
            seen = [each for each in finished if each.number in self._told]
            is_best = ranked(seen, self._sign)[:1] == [trial]
            is_first_failure = trial.status == FAILED and sum(each.status == FAILED for each in seen) == 1
            if self._verbose == 2 or is_first_failure or (is_best and not self._is_live):
                self._write(f"{self._start()}{self._line(trial)}\n")
        if self._is_live:
            self._write(self._start() + self.summary())

    def end(self) -> None:
        """Write the table."""
        if self._verbose:
            self.tick()
            reason = f" The search ended before its time: {self._ledger.reason}." if self._ledger.reason else ""
            self._write(f"{self._start()}{self.summary()}.{reason}\n")
            best = ranked(self._ledger.finished, self._sign)[:SHOWN]
            if best:
                self._write(table(best, self._metric, self._parameters) + "\n")

    def summary(self) -> str:
        """How far the search is, in one line."""
        finished, running = self._ledger.finished, self._ledger.running
        counts = Counter(trial.status for trial in finished)
        parts = [f"{len(finished)}{'' if self._max_evals is None else f'/{self._max_evals}'} trials"]
        parts += [f"{len(running)} running"] if running else []
        parts += [f"{counts[status]} {status}" for status in (PRUNED, STOPPED, FAILED) if counts[status]]
        best = ranked(finished, self._sign)[:1]
        parts += [f"best {self._metric} {best[0].value:.4g} (trial {best[0].number})"] if best else []
        parts.append(duration(self._ledger.seconds))
        left = self._seconds_left(len(finished))
        return " - ".join(parts) + (f", about {duration(left)} left" if left else "")

    def _seconds_left(self, finished: int) -> float:
        done = finished - self._before
        if self._max_evals is None or not done or self._ledger.over:
            return 0.0
        return (self._ledger.seconds - self._began) / done * (self._max_evals - finished)

    def _line(self, trial: Trial) -> str:
        value = "" if trial.value is None else f" {self._metric} {trial.value:.4g}"
        status = "" if trial.status == OK else f" {trial.status}"
        error = f": {trial.error.splitlines()[0]}" if trial.error else ""
        params = described(self._parameters, trial.chosen)
        return f"trial {trial.number}{status}{value} {params} ({duration(trial.seconds)}){error}"

    def _start(self) -> str:
        return "\r\033[K" if self._is_live else ""

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def table(trials: Sequence[Trial], metric: str, parameters: Sequence[Parameter]) -> str:
    """Trials as lines of text."""
    rows = [["trial", metric, "status", "best/epochs", "time", "parameters"]]
    for trial in trials:
        epochs = "/".join(str(number) for number in (trial.best_epoch, trial.epochs) if number)
        value = "" if trial.value is None else f"{trial.value:.4g}"
        params = described(parameters, trial.chosen)
        rows.append([str(trial.number), value, trial.status, epochs, duration(trial.seconds), params])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def duration(seconds: float) -> str:
    """Seconds in words: ``3.2s``, ``4m 05s``, ``2h 10m``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
