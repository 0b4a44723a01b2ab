"""Reports of a running trial: the intermediate values go to the driver, which replies whether to continue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.hyperopt.ledger import CONTINUE, PRUNE
from sparkkeras.hyperopt.trials import OK, PRUNED, STOPPED
from sparkkeras.weights import Array


class TrialEnd(BaseException):
    """Raised in a trial to end it: it was pruned or has diverged, or the search is over."""


class SearchDefinitionError(ConfigurationError):
    """The function, metric or data of the search is invalid: every trial would fail, so the search ends immediately."""


class Reporter:
    """Collects the reports of one trial, and sends its intermediate values to the driver.

    Args:
        send: Sends an epoch, counted from 1, and its value; returns the driver's reply, whether to continue.
        sign: 1 if smaller values are better, -1 if larger ones are; of the first metric.
        num_metrics: The number of metrics that the search optimizes.

    Attributes:
        epoch: The last epoch that was logged, counted from 1.
        history: The values of all metrics at each epoch, by name.
        best: The best value of the first metric; ``None`` before the first finite one.
        values: The values of all metrics at its epoch; empty before, or if other metrics are not reported.
        best_epoch: The epoch of the best value, counted from 1.
        diverged_at: The epoch, counted from 1, whose value was not finite; training ends there.
        diverged_metric: The name of the metric that was not finite, if it is not the first one.
        status: The status of the trial according to its reports.
    """

    def __init__(self, send: Callable[[int, float], str], sign: float, num_metrics: int = 1) -> None:
        self._send, self._sign, self._num_metrics = send, sign, num_metrics
        self.epoch = 0
        self.history: dict[str, list[Any]] = {}
        self.best: float | None = None
        self.values: tuple[float, ...] = ()
        self.best_epoch: int | None = None
        self.diverged_at: int | None = None
        self.diverged_metric = ""
        self.status = OK
        self._next_status = OK

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of the next epoch; a metric with several values, such as a score for each class, is a list."""
        self.epoch += 1
        for name, value in metrics.items():
            self.history.setdefault(name, []).append(np.asarray(value, np.float64).tolist())

    def record(
        self,
        value: float,
        is_last: bool = False,
        on_best: Callable[[], None] = lambda: None,
        others: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Record the value of the last logged epoch, and send it to the driver; `should_end` has the reply.

        Args:
            value: The value of the first metric.
            is_last: Whether this seems to be the last epoch, so that pruning would save nothing; see `check_continue`.
            on_best: Called if the value is the best so far, before it is sent: a signal may end the trial at any moment.
            others: The values of further metrics by name; those that the search does not optimize are not used.
        """
        values = tuple(map(float, (value, *others.values())))[: self._num_metrics]
        value = values[0]
        not_finite = [name for name, each in zip(("", *others), values, strict=False) if not np.isfinite(each)]
        if not_finite:
            self.diverged_at, self.diverged_metric = self.epoch, not_finite[0]
            return
        if self.best is None or self._sign * value < self._sign * self.best:
            on_best()
            self.best, self.best_epoch = value, self.epoch
            self.values = values if len(values) == self._num_metrics else ()
        reply = self._send(self.epoch, value)
        if reply != CONTINUE:
            self._next_status = PRUNED if reply == PRUNE else STOPPED
        if not is_last:
            self.status = self._next_status

    def check_continue(self) -> None:
        """Check, when training starts again, whether the trial may continue.

        Raises:
            TrialEnd: The trial should have ended at an earlier epoch, such as one that seemed to be the last.
        """
        self.status = self._next_status
        if self.should_end:
            raise TrialEnd

    def end(self, cause: BaseException) -> None:
        """Record that an exception ended the trial; any other than `TrialEnd` means that it was stopped."""
        if not isinstance(cause, TrialEnd):
            self.status = STOPPED

    @property
    def should_end(self) -> bool:
        """Whether the trial should end now."""
        return self.status != OK or self.diverged_at is not None


current: Reporter | None = None
"""The reporter of the trial that runs in this process; ``None`` without one."""


def report(value: float, **metrics: float) -> None:
    """Report an intermediate value from an objective, after each epoch, so that a pruner can end the trial early.

    Outside of a search it does nothing. If the trial should end, this function raises an internal exception instead of
    returning, and the search records the trial with the best value that was reported.

    Args:
        value: The current value of the metric that the objective returns at the end.
        metrics: Further metrics, for the trial's history.

    Example::

        def objective(params, data):
            for epoch in range(20):
                loss = train_one_epoch(params, data)
                report(loss)
            return loss
    """
    if current is None:
        return
    if isinstance(value, (str, bool)) or np.size(value) != 1:
        raise SearchDefinitionError(f"report received {value!r}: expected a number.")
    current.log({"loss": value, **metrics})
    current.record(value)
    if current.should_end:
        raise TrialEnd


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback for objectives: reports a metric after each epoch of ``fit``, and stops ``fit`` if the trial ends.

    Outside of a search it does nothing.

    Args:
        metric: The name of the metric, as in the logs of ``fit``; of several metrics, the first is reported.
        validation_freq: The ``validation_freq`` of ``fit``, if it has one: epochs without validation are not reported.

    Attributes:
        best_weights: The weights of the best epoch, as NumPy arrays; ``None`` before the first report.
    """

    def __init__(self, metric: str | Sequence[str] = "val_loss", validation_freq: int | Collection[int] = 1) -> None:
        super().__init__()
        self._metrics = tuple(metric) if isinstance(metric, (list, tuple)) else (metric,)
        self._validation_freq = validation_freq
        self.best_weights: list[Array] | None = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """End the trial if it was pruned or stopped in an earlier call of ``fit``."""
        if current is not None:
            current.check_continue()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the metric, and keep the weights if it is the best so far."""
        if current is None:
            return
        logs = logs or {}
        current.log(logs)
        for metric in self._metrics:
            if metric not in logs:
                if metric.startswith("val_") and (metric in current.history or not self._is_validated(epoch + 1)):
                    return
                raise SearchDefinitionError(unknown_metric(metric, logs))
            if np.ndim(logs[metric]):
                raise SearchDefinitionError(
                    f"metric={metric!r} has {np.size(logs[metric])} values, but a search optimizes a single one: use a "
                    'metric that averages them, such as keras.metrics.F1Score(average="macro").'
                )
        first, *others = self._metrics
        is_last = epoch + 1 >= self.params.get("epochs", 0) > 0
        current.record(logs[first], is_last, self._keep_weights, {name: logs[name] for name in others})
        if current.should_end:
            self.model.stop_training = True

    def _keep_weights(self) -> None:
        self.best_weights = [np.array(weight) for weight in self.model.get_weights()]

    def _is_validated(self, epoch: int) -> bool:
        frequency = self._validation_freq
        return epoch % frequency == 0 if isinstance(frequency, int) else epoch in frequency


def unknown_metric(metric: str, logs: Collection[str]) -> str:
    """The error message for a metric that is not in the logs of ``fit``."""
    hint = ""
    if metric.startswith("val_") and not any(name.startswith("val_") for name in logs):
        hint = " Metrics with val_ need validation data: give validation_split= or validation_data=."
    return f"metric={metric!r} is not in the logs of fit. {known_names(metric, logs)}{hint}"
