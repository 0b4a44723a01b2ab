"""How an objective tells how far it is, and hears that it is hopeless."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.hyperopt.ledger import GO_ON, PRUNE
from sparkkeras.hyperopt.trials import OK, PRUNED, STOPPED
from sparkkeras.weights import Array


class TrialEnd(BaseException):
    """The trial shall end: it was pruned, or the search is over."""


class SearchMistakeError(ConfigurationError):
    """A mistake that every trial would meet, so the search ends at once."""


class Reporter:
    """What is reported of one trial.

    Args:
        tell: Takes an epoch, counted from 1, and its loss (smaller is better), and answers whether to go on.
        sign: 1 where small values are good, -1 where large ones are.

    Attributes:
        epoch: The epoch that was logged last, counted from 1.
        history: All figures, by name.
        best: The best value; ``None`` before there is a finite one.
        best_epoch: Its epoch, counted from 1.
        diverged_at: The epoch, counted from 1, whose value was not finite; training ends there.
        status: What has become of the trial by reports alone.
    """

    def __init__(self, tell: Callable[[int, float], str], sign: float) -> None:
        self._tell, self._sign = tell, sign
        self.epoch = 0
        self.history: dict[str, list[float]] = {}
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.diverged_at: int | None = None
        self.status = OK

    def log(self, figures: Mapping[str, Any]) -> None:
        """Take figures of one more epoch."""
        self.epoch += 1
        for name, value in figures.items():
            self.history.setdefault(name, []).append(float(value))

    def take(self, value: float, is_last: bool = False) -> bool:
        """Take the value of the epoch that was logged; whether it is the best so far. `should_end` says how to go on.

        Args:
            value: The value.
            is_last: Whether this was the last epoch in any case, so that there is nothing to be pruned.
        """
        value = float(value)
        if not np.isfinite(value):
            self.diverged_at = self.epoch
            return False
        is_best = self.best is None or self._sign * value < self._sign * self.best
        if is_best:
            self.best, self.best_epoch = value, self.epoch
        told = self._tell(self.epoch, self._sign * value)
        if told != GO_ON and not is_last:
            self.status = PRUNED if told == PRUNE else STOPPED
        return is_best

    def end(self, how: BaseException) -> None:
        """The trial ends by `TrialEnd`, which it was told, or by another signal: it was stopped."""
        if not isinstance(how, TrialEnd):
            self.status = STOPPED

    @property
    def should_end(self) -> bool:
        """Whether the trial shall end now."""
        return self.status != OK or self.diverged_at is not None


current: Reporter | None = None
"""The trial that runs in this process."""


def report(value: float, **figures: float) -> None:
    """Tell, within an objective, the value that the trial has come to after one more epoch, so that it may be pruned.

    Outside of a search it does nothing. If the trial shall end, this does not return: the trial is recorded with the best
    value that was reported.

    Args:
        value: The same figure that the objective returns in the end.
        figures: Others, for the trial's history.

    Example::

        def objective(params, data):
            for epoch in range(20):
                loss = train_one_epoch(params, data)
                report(loss)
            return loss
    """
    if current is None:
        return
    current.log({"loss": value, **figures})
    current.take(value)
    if current.should_end:
        raise TrialEnd


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports a metric after each epoch of ``keras.Model.fit``, within an objective; ends ``fit`` when the trial shall end.

    Args:
        metric: Which, as in the logs of ``fit``.
        validation_freq: As ``fit`` has it: epochs without validation have no such figure, and are passed over.

    Attributes:
        best_weights: The weights of the best epoch.
    """

    def __init__(self, metric: str = "val_loss", validation_freq: int | Collection[int] = 1) -> None:
        super().__init__()
        self._metric, self._validation_freq = metric, validation_freq
        self.best_weights: list[Array] | None = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report, and keep the weights if they are the best."""
        if current is None:
            return
        logs = logs or {}
        current.log(logs)
        if self._metric not in logs:
            if self._metric.startswith("val_") and (self._metric in current.history or not self._is_validated(epoch + 1)):
                return
            raise SearchMistakeError(unknown_metric(self._metric, logs))
        if current.take(float(logs[self._metric]), is_last=epoch + 1 >= self.params.get("epochs", 0) > 0):
            self.best_weights = [np.array(weight) for weight in self.model.get_weights()]
        if current.should_end:
            self.model.stop_training = True

    def _is_validated(self, epoch: int) -> bool:
        often = self._validation_freq
        return epoch % often == 0 if isinstance(often, int) else epoch in often


def unknown_metric(metric: str, logs: Collection[str]) -> str:
    """What is wrong with a metric that ``fit`` did not give."""
    hint = ""
    if metric.startswith("val_") and not any(name.startswith("val_") for name in logs):
        hint = " Figures with val_ need rows to validate on: give validation_split= or validation_data=."
    return f"metric={metric!r} is not among the figures of fit. {known_names(metric, logs)}{hint}"
