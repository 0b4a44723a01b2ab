"""How an objective reports how far it is, and hears that it is hopeless."""

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
        self.history: dict[str, list[Any]] = {}
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.diverged_at: int | None = None
        self.status = OK
        self._then = OK

    def log(self, figures: Mapping[str, Any]) -> None:
        """Take figures of one more epoch; one that has several values, as a score for each class, stays a list."""
        self.epoch += 1
        for name, value in figures.items():
            self.history.setdefault(name, []).append(np.asarray(value, np.float64).tolist())

    def take(self, value: float, is_last: bool = False, keep: Callable[[], None] = lambda: None) -> None:
        """Take the value of the epoch that was logged. `should_end` says how to go on.

        Args:
            value: The value.
            is_last: Whether this seems to be the last epoch, so that there is nothing to be pruned; see `go_on`.
            keep: Called if the value is the best so far, before anything else: the trial may be ended at any moment.
        """
        value = float(value)
        if not np.isfinite(value):
            self.diverged_at = self.epoch
            return
        if self.best is None or self._sign * value < self._sign * self.best:
            keep()
            self.best, self.best_epoch = value, self.epoch
        told = self._tell(self.epoch, self._sign * value)
        if told != GO_ON:
            self._then = PRUNED if told == PRUNE else STOPPED
        if not is_last:
            self.status = self._then

    def go_on(self) -> None:
        """Training goes on.

        Raises:
            TrialEnd: The trial was to end after what seemed to be its last epoch, or before.
        """
        self.status = self._then
        if self.should_end:
            raise TrialEnd

    def end(self, how: BaseException) -> None:
        """The trial ends by `TrialEnd`, which it was sent, or by another signal: it was stopped."""
        if not isinstance(how, TrialEnd):
            self.status = STOPPED

    @property
    def should_end(self) -> bool:
        """Whether the trial shall end now."""
        return self.status != OK or self.diverged_at is not None


current: Reporter | None = None
"""The trial that runs in this process."""


def report(value: float, **figures: float) -> None:
    """Report, within an objective, the value that the trial has come to after one more epoch, so that it may be pruned.

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

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """An objective may call ``fit`` several times; the trial ends here if it shall not go on."""
        if current is not None:
            current.go_on()

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
        value = logs[self._metric]
        if np.ndim(value):
            raise SearchMistakeError(
                f"metric={self._metric!r} has {np.size(value)} values, and one is to be optimized: give the metric an "
                'average, as keras.metrics.F1Score(average="macro") has.'
            )
        current.take(value, is_last=epoch + 1 >= self.params.get("epochs", 0) > 0, keep=self._keep)
        if current.should_end:
            self.model.stop_training = True

    def _keep(self) -> None:
        self.best_weights = [np.array(weight) for weight in self.model.get_weights()]

    def _is_validated(self, epoch: int) -> bool:
        often = self._validation_freq
        return epoch % often == 0 if isinstance(often, int) else epoch in often


def unknown_metric(metric: str, logs: Collection[str]) -> str:
    """What is wrong with a metric that ``fit`` did not give."""
    hint = ""
    if metric.startswith("val_") and not any(name.startswith("val_") for name in logs):
        hint = " Figures with val_ need rows to validate on: give validation_split= or validation_data=."
    return f"metric={metric!r} is not among the figures of fit. {known_names(metric, logs)}{hint}"
