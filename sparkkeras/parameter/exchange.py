"""The record of an exchange: made by the worker's callback, sent with its push, and read by the store and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkkeras.weights import Array

MAX_LOG_VALUES = 100
"""The logs of a worker leave out longer vectors; the metrics of all workers have them, from the metric state."""


ReadField = Callable[[str, Callable[[Any], Any]], Any]
"""The method ``field`` of a call: reads a field by its name, and converts it."""


@dataclass(frozen=True)
class ExchangePoint:
    """A worker's progress in an epoch when it exchanges weights.

    Attributes:
        epoch: The index of the epoch.
        batch: The number of batches of the epoch that are done.
        steps: The optimizer steps since the last exchange.
        rows: The rows of these steps.
        learning_rate: The optimizer's learning rate at the last of these steps.
        seconds: The duration of the epoch so far; if the worker was replaced, of the last attempt's part of it.
        metrics: The metric state of the epoch so far.
        logs: This worker's logs at the end of the epoch; ``None`` before.
        iterations: The number of iterations of each optimizer, with those before this run: a ``train_step`` may apply one
            more often than another.
    """

    epoch: int
    batch: int
    steps: int
    rows: int
    learning_rate: float
    seconds: float
    metrics: tuple[Array, ...] = ()
    logs: dict[str, Any] | None = None
    iterations: tuple[int, ...] = ()

    def pack(self) -> dict[str, Any]:
        """The fields of a call. The metric state is not one of them: it travels in the body."""
        logs = None if self.logs is None else _json_values(self.logs)
        numbers = {name: getattr(self, name) for name in (*_INTEGERS, *_FLOATS)}
        return {**numbers, "logs": logs, "iterations": self.iterations}

    @classmethod
    def unpack(cls, field: ReadField, metrics: tuple[Array, ...]) -> ExchangePoint:
        """The record from a call, given its method ``field``."""
        epoch, batch, steps, rows = (field(name, int) for name in _INTEGERS)
        learning_rate, seconds = (field(name, float) for name in _FLOATS)
        iterations = field("iterations", lambda counts: tuple(map(int, counts)))
        logs = field("logs", lambda logs: None if logs is None else dict(logs))
        return cls(epoch, batch, steps, rows, learning_rate, seconds, metrics, logs, iterations)


@dataclass(frozen=True)
class EvaluationReport:
    """What a worker has found on rows that it has evaluated.

    Attributes:
        metrics: The metric state.
        rows: The number of rows.
        logs: The values that its model has reported, by name.
    """

    metrics: tuple[Array, ...]
    rows: int
    logs: dict[str, Any]

    def pack(self) -> dict[str, Any]:
        """The fields of a call, without the metric state."""
        return {"rows": self.rows, "logs": _json_values(self.logs)}

    @classmethod
    def unpack(cls, field: ReadField, metrics: tuple[Array, ...]) -> EvaluationReport:
        """The inverse of `pack`, given the method ``field`` of a call."""
        return cls(metrics, field("rows", int), field("logs", dict))


_INTEGERS, _FLOATS = ("epoch", "batch", "steps", "rows"), ("learning_rate", "seconds")


def _json_values(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _json_value(value) for name, value in logs.items()}


def _json_value(value: Any) -> Any:
    array = np.asarray(value)
    return array.tolist() if array.size <= MAX_LOG_VALUES else None
