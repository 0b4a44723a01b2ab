"""Writing one run of MLflow, by its id and from any thread.

The tracking store may be slow or out of reach, and training must not wait for it. So calls to it are queued, and a thread
makes them in order. MLflow's fluent API (``mlflow.log_metric``) belongs to the thread that has started the run; the client
with explicit ids does not.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from sparkkeras.errors import ConfigurationError
from sparkkeras.progress.pace import logs_by_epoch

FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"
"""The statuses of MLflow's runs that have ended."""

MAX_FAILURES = 3
"""After this number of failed calls in a row, a store counts as lost. MLflow itself tries each call for minutes."""

_PARAM_LENGTH, _TAG_LENGTH, _KEY_LENGTH = 500, 5000, 250
"""The longest values and names that servers of all versions take, in characters."""

_PARAMS, _METRICS = 100, 1000
"""How many parameters and metrics MLflow takes in one call."""


def now() -> int:
    """The time as MLflow counts it, in milliseconds."""
    return int(time.time() * 1000)


class Outbox:
    """Calls to a tracking store, made one after the other in a thread of its own. Methods may be called from any thread.

    Args:
        client: The ``mlflow.MlflowClient`` of the store.

    Attributes:
        client: The client.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._error: Exception | None = None
        self._failures = 0

    def put(self, call: Callable[[], object]) -> None:
        """Make a call after those before it; an error that it raises is kept for `take_error`."""
        with self._lock:
            self._executor = self._executor or ThreadPoolExecutor(1, "sparkkeras-mlflow")
            self._executor.submit(self._make, call)

    def wait(self) -> None:
        """Wait until all calls have been made, and end the thread."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def take_error(self) -> Exception | None:
        """The first error since the last call of this method, and ``None`` if there was none."""
        error, self._error = self._error, None
        return error

    @property
    def is_lost(self) -> bool:
        """Whether so many calls in a row have failed that no more are made."""
        return self._failures >= MAX_FAILURES

    def _make(self, call: Callable[[], object]) -> None:
        if self.is_lost:
            return
        try:
            call()
            self._failures = 0
        except Exception as error:  # of any kind: stores are plug-ins
            self._error = self._error or error
            self._failures += 1


class RunWriter:
    """Writes one run.

    Args:
        outbox: Makes the calls.
        run_id: The id of a run that exists; empty: call `create`.

    Attributes:
        outbox: See above.
        run_id: The id; of a new run, set when the call has been made.
        has_ended: Whether `end` was called.
    """

    def __init__(self, outbox: Outbox, run_id: str = "") -> None:
        self.outbox, self._client = outbox, outbox.client
        self.run_id, self.has_ended = run_id, False

    def create(self, experiment_id: str, name: str, parent_id: str) -> None:
        """Create the run, as a child of another one."""
        started, tags = now(), {"mlflow.parentRunId": parent_id}

        def call() -> None:
            run = self._client.create_run(experiment_id, start_time=started, tags=tags, run_name=name)
            self.run_id = run.info.run_id

        self.outbox.put(call)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Write parameters; nested ones get names with dots. A run keeps the first value of a parameter."""
        from mlflow.entities import Param

        given = {_key(name): _text(value, _PARAM_LENGTH) for name, value in _flat(values)}

        def call() -> None:
            known = self._client.get_run(self.run_id).data.params
            new = [Param(name, value) for name, value in given.items() if name not in known]
            for part in _parts(new, _PARAMS):
                self._client.log_batch(self.run_id, params=part)
            changed = [name for name, value in given.items() if known.get(name, value) != value]
            if changed:
                first = changed[0]
                raise ConfigurationError(
                    f"the run has the parameter {first}={known[first]!r}, and parameters cannot change, so {first}="
                    f"{given[first]!r} was not logged. Use a run for each training."
                )

        self.outbox.put(call)

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        """Write the metrics of a step. The values of an array get numbers: ``f1_score_0``, ``f1_score_1``."""
        self.log_epochs([step], [values])

    def log_history(self, steps: Sequence[int], history: Mapping[str, Sequence[Any]]) -> None:
        """Write the metrics of several steps; ``history`` is as in ``keras.callbacks.History``."""
        self.log_epochs(steps, logs_by_epoch(steps, history))

    def log_epochs(self, steps: Sequence[int], logs: Sequence[Mapping[str, Any]]) -> None:
        """Write the metrics of several steps, given the logs of each."""
        from mlflow.entities import Metric

        time = now()
        metrics = [
            Metric(_key(key), number, time, step)
            for step, values in zip(steps, logs, strict=True)
            for name, value in values.items()
            for key, number in _numbers(name, value)
        ]

        def call() -> None:
            for part in _parts(metrics, _METRICS):
                self._client.log_batch(self.run_id, metrics=part)

        if metrics:
            self.outbox.put(call)

    def set_tags(self, values: Mapping[str, Any]) -> None:
        """Write tags, which may change."""
        from mlflow.entities import RunTag

        tags = [RunTag(_key(name), _text(value, _TAG_LENGTH)) for name, value in values.items()]
        self.outbox.put(lambda: self._client.log_batch(self.run_id, tags=tags))

    def set_tag_of(self, name: str, value: Callable[[], Any]) -> None:
        """Write a tag whose value is known when the calls before it have been made."""
        self.outbox.put(lambda: self._client.set_tag(self.run_id, name, value()))

    def log_text(self, text: str, file: str) -> None:
        """Write a text file."""
        self.outbox.put(lambda: self._client.log_text(self.run_id, text, file))

    def log_json(self, value: Any, file: str) -> None:
        """Write a JSON file."""
        self.log_text(json.dumps(value, indent=1, default=_plain), file)

    def end(self, status: str) -> None:
        """End the run."""
        ended, self.has_ended = now(), True
        self.outbox.put(lambda: self._client.set_terminated(self.run_id, status, ended))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _key(name: Any) -> str:
    """A name in the characters that all stores take."""
    return re.sub(r"[^\w\-. /]", "_", str(name)).strip(" /.")[:_KEY_LENGTH] or "_"


def _text(value: Any, length: int) -> str:
    text = str(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a metric, with their names; nothing for values that are not numbers, such as ``None``."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return
    if value is None:
        return
    if array.ndim == 0:
        yield name, float(array)
    else:
        yield from ((f"{name}_{index}", float(number)) for index, number in enumerate(array.ravel()))


def _plain(value: Any) -> Any:
    """Values of NumPy and of backends for JSON, and others as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return float(value) if hasattr(value, "__float__") else str(value)


def _parts(values: Sequence[Any], size: int) -> Iterator[list[Any]]:
    remaining = iter(values)
    while part := list(islice(remaining, size)):
        yield part
