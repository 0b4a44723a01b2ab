"""Events: what happens during training, a search or a run, for monitoring, progress and experiment tracking.

A Keras callback of the driver that has a method ``on_event(event)`` gets them, in addition to Keras's own calls::

    class LogIncidents(keras.callbacks.Callback):
        def on_event(self, event):
            if isinstance(event, sparkkeras.events.Incident):
                logging.warning("%s: %s", event.kind, event.text)

    spark_model.fit(df, epochs=10, callbacks=[LogIncidents()])

`HyperParamModel.minimize`, `SparkEnsemble.fit` and `SparkRunner.run` take such objects as ``monitor=``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sparkkeras.errors import TrainingInterruptedError


@dataclass(frozen=True)
class Event:
    """The base class of all events."""


@dataclass(frozen=True)
class HyperParameter:
    """A hyper-parameter of a search.

    Attributes:
        name: The label in the space.
        options: The options of a choice, as text; empty for numbers.
        is_log: Whether it is sampled on a logarithmic scale.
    """

    name: str
    options: tuple[str, ...] = ()
    is_log: bool = False


@dataclass(frozen=True)
class RunStarted(Event):
    """A run begins; it has been checked, and nothing has been sent to workers.

    Attributes:
        kind: ``"fit"``, ``"search"``, ``"ensemble"``, ``"score"`` or ``"function"`` (of `SparkRunner`). `Monitor` calls a
            training of ``keras.Model.fit``, which emits no events, ``"keras"``.
        name: The name of the model or the function.
        settings: The settings of the run by name, for display; without those that are ``None``.
        epochs: The epoch at which training ends; ``None`` if there are none.
        initial_epoch: The epoch at which it begins.
        metric: The metric that a search optimizes, the first one of several; empty otherwise.
        minimizes: Whether smaller values of it are better.
        max_trials: The number of trials of a search; ``None`` if it is not limited.
        parameters: The hyper-parameters of a search.
    """

    kind: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    initial_epoch: int = 0
    metric: str = ""
    minimizes: bool = True
    max_trials: int | None = None
    parameters: tuple[HyperParameter, ...] = ()

    def __post_init__(self) -> None:
        """Leave out settings that are not set."""
        given = {name: value for name, value in self.settings.items() if value is not None}
        object.__setattr__(self, "settings", given)


@dataclass(frozen=True)
class PhaseStarted(Event):
    """The driver begins something that may take long, such as storing rows; ``text`` describes it."""

    text: str


@dataclass(frozen=True)
class WorkersChanged(Event):
    """``count`` workers (or processes of a search, or members of an ensemble) train from now on.

    Attributes:
        count: Their number.
        rows: The rows that each trains on in an epoch; ``None``: unknown. Empty if there are none.
    """

    count: int
    rows: Sequence[int | None] = ()


@dataclass(frozen=True)
class EpochStarted(Event):
    """An epoch of `SparkModel.fit` begins, counted from 0."""

    epoch: int


@dataclass(frozen=True)
class EpochEnded(Event):
    """An epoch of `SparkModel.fit` has ended, counted from 0; ``logs`` are its metrics over all rows."""

    epoch: int
    logs: Mapping[str, Any]


@dataclass(frozen=True)
class RunResumed(Event):
    """A run continues what was saved before, such as a checkpoint.

    Attributes:
        text: From where, in a sentence.
        epochs: The epochs that were trained before, counted from 0.
        logs: The logs of each.
    """

    text: str
    epochs: Sequence[int] = ()
    logs: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class RowsTrained(Event):
    """Workers have trained on more rows.

    Attributes:
        rows: The rows since the last such event.
        done: The fraction of the epoch that is complete.
        startup_seconds: The part of the time since the last such event in which workers loaded Keras; ``None``: unknown.
    """

    rows: int
    done: float
    startup_seconds: float | None = None


@dataclass(frozen=True)
class WorkerProgress(Event):
    """What a worker has reached within an epoch, about once a second if an epoch takes longer.

    Attributes:
        worker: The index of the worker.
        epoch: The epoch, counted from 0.
        rows: The rows of the epoch that it has trained on.
        seconds: How long it has trained in the current round.
        logs: Its metrics over them.
    """

    worker: int
    epoch: int
    rows: int
    seconds: float
    logs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EpochRestarted(Event):
    """A part of the epoch is trained again; only ``rows`` rows of it count."""

    rows: int


@dataclass(frozen=True)
class SparkTasks(Event):
    """How many tasks of the stages that Spark runs are done, while they run for longer than a second."""

    done: int
    total: int


@dataclass(frozen=True)
class Updates:
    """The updates of a parameter server in an epoch.

    Attributes:
        count: Their number.
        per_second: Their number per second.
        staleness: How many updates had which staleness: the number of other updates since their base.
        mean_staleness: The mean of it.
        max_staleness: The largest one.
    """

    count: int
    per_second: float
    staleness: Mapping[int, int]
    mean_staleness: float
    max_staleness: int


@dataclass(frozen=True)
class EpochMeasured(Event):
    """The speed of an epoch with a parameter server, which replaces the sums of its `RowsTrained`.

    Attributes:
        epoch: The epoch, counted from 0.
        rows: The rows of all workers.
        seconds: The duration, without the start of the workers.
        startup_seconds: The time that workers took to start before it.
        updates: The updates.
    """

    epoch: int
    rows: int
    seconds: float
    startup_seconds: float
    updates: Updates


@dataclass(frozen=True)
class WorkerEpoch:
    """A worker's part of an epoch.

    Attributes:
        worker: The index of the worker.
        rows: The rows that it trained on.
        seconds: The time that this took.
        logs: Its metrics.
    """

    worker: int
    rows: int
    seconds: float
    logs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkersReported(Event):
    """All workers have ended an epoch, counted from 0; its metrics follow in ``on_epoch_end``."""

    epoch: int
    workers: tuple[WorkerEpoch, ...]


@dataclass(frozen=True)
class Incident(Event):
    """Something went wrong, and the run continues.

    Attributes:
        kind: ``"retry"`` (Spark runs a failed task again), ``"repair"`` (rows are read again), ``"takeover"`` (another
            worker continues for a lost one), ``"restart"`` (all workers start again), ``"executor"`` (executors were lost
            or added), ``"waiting"`` (for executors, or for connections to them) or ``"warning"``.
        text: What happened, in a sentence.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A checkpoint is complete.

    Attributes:
        path: Its path.
        epoch: The epoch that training continues with, counted from 0.
        seconds: The time that writing took, in the background.
    """

    path: str
    epoch: int
    seconds: float


@dataclass(frozen=True)
class TrialChanged(Event):
    """A trial of a search has started, reported an epoch, or ended.

    Attributes:
        trial: The trial, a `sparkkeras.hyperopt.Trial`.
        params: Its hyper-parameters by label, with the options of choices as text.
        is_earlier: Whether an earlier call, which this search resumes, has run it.
    """

    trial: Any
    params: Mapping[str, Any]
    is_earlier: bool = False


@dataclass(frozen=True)
class MemberTrained(Event):
    """A member of an ensemble is trained.

    Attributes:
        member: Its index.
        epochs: The epochs that it was trained for, counted from 0.
        logs: The logs of each.
    """

    member: int
    epochs: Sequence[int]
    logs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RankChanged(Event):
    """A rank of `SparkRunner` has changed its state, or Spark has started it again.

    Attributes:
        rank: The rank.
        state: ``"started"``, ``"finished"`` or ``"failed"``.
        host: The machine that it runs on.
    """

    rank: int
    state: str
    host: str = ""


@dataclass(frozen=True)
class RankReported(Event):
    """A rank of `SparkRunner` has reported the metrics of an epoch with ``context().report``.

    Attributes:
        rank: The rank.
        epoch: The epoch, counted from 0.
        epochs: The number of epochs; ``None`` if it is unknown.
        logs: The metrics.
    """

    rank: int
    epoch: int
    epochs: int | None
    logs: Mapping[str, float]


@dataclass(frozen=True)
class OutputWritten(Event):
    """A rank has written complete lines to its standard output or error."""

    rank: int
    text: str


@dataclass(frozen=True)
class RunEnded(Event):
    """A run has ended; ``error`` is the exception that ended it, ``None`` without one."""

    error: BaseException | None = None

    @property
    def status(self) -> str:
        """``"finished"``, ``"failed"``, or ``"interrupted"``: by Ctrl-C, a SIGTERM or an exit of the program."""
        if self.error is None:
            return "finished"
        interrupts = (KeyboardInterrupt, SystemExit, TrainingInterruptedError)
        return "interrupted" if isinstance(self.error, interrupts) else "failed"


@runtime_checkable
class EventListener(Protocol):
    """Gets the events of runs, one at a time, from any thread of the driver."""

    def on_event(self, event: Event) -> None:
        """Handle an event. It must return quickly, and may be called while another thread of the driver trains."""
        ...


class Events:
    """Passes the events of one run on to listeners.

    An error of a listener ends the run, like that of a Keras callback. If a listener raises it in another thread than that
    of the run, it is raised in the thread of the run with the next event: what the other thread does must not fail for it.

    Args:
        listeners: The listeners.
        within_epochs: Whether they need the reports of workers within an epoch (`WorkerProgress`), for which the driver
            listens on a port.
    """

    def __init__(self, listeners: Iterable[EventListener] = (), within_epochs: bool = True) -> None:
        self.within_epochs = within_epochs
        self._listeners = tuple({id(each): each for each in listeners}.values())  # each once
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._error: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def emit(self, event: Event) -> None:
        """Pass an event on to all listeners; then raise the first error of one."""
        if not self._listeners:
            return
        with self._lock:
            for listener in self._listeners:
                try:
                    listener.on_event(event)
                except Exception as error:
                    self._error = self._error or error
        if self._thread in (None, threading.get_ident()):
            self._raise()

    @contextmanager
    def running(self, run: RunStarted) -> Iterator[None]:
        """Emit the beginning of a run, and its end when the ``with`` block ends, also after an error."""
        self._thread = threading.get_ident()
        try:
            self.emit(run)
            yield
            self._raise()
        except BaseException as error:
            with suppress(Exception):  # an error of a listener must not hide this one
                self.emit(RunEnded(error))
            raise
        self.emit(RunEnded())

    def _raise(self) -> None:
        """Raise the error that a listener has raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def listeners(objects: Iterable[Any]) -> list[EventListener]:
    """Those of several objects that get events."""
    return [each for each in objects if isinstance(each, EventListener)]
