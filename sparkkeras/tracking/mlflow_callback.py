"""`MLflowCallback`: runs of MLflow for training, searches and ensembles.

MLflow's autologging cannot do this: it replaces ``keras.Model.fit``, which workers call here. On the driver it would see
nothing, and on the workers it would make a run of each round.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, guarded, warn
from sparkkeras.events import (
    CheckpointWritten,
    EpochMeasured,
    Event,
    Incident,
    MemberTrained,
    RunEnded,
    RunResumed,
    RunStarted,
    TrialChanged,
    WorkersChanged,
)
from sparkkeras.modeling.optimizers import optimizer_of
from sparkkeras.tracking.mlflow_model import check_example, log_model
from sparkkeras.tracking.mlflow_run import FAILED, FINISHED, KILLED, Outbox, RunWriter

_RUN_STATUSES = {"finished": FINISHED, "failed": FAILED, "interrupted": KILLED}
"""The statuses of MLflow for those of `RunEnded`."""

_TRIAL_STATUSES = {"ok": FINISHED, "pruned": KILLED, "stopped": KILLED, "failed": FAILED}
"""MLflow's statuses by those of a trial. A running trial has none."""


_left_open: set[str] = set()
"""The runs of trainings of ``keras.Model.fit`` that have not ended: Keras calls no callback after an error."""


@dataclass
class _ChildRun:
    """The run of a trial.

    Attributes:
        writer: Writes it.
        logged: The number of intermediate values that it has.
        value: The value of the trial.
        params: The hyper-parameters.
    """

    writer: RunWriter
    params: Mapping[str, Any]
    logged: int = 0
    value: float | None = None


@dataclass
class _Tracked:
    """The run of one training, search or ensemble.

    Attributes:
        writer: Writes it.
        experiment_id: The experiment that it belongs to.
        is_own: Whether this callback has started it, and so ends it.
        is_new: Whether it had no metrics before.
        started: The event that began it; that of a plain ``keras.Model.fit`` is made up.
    """

    writer: RunWriter
    experiment_id: str
    is_own: bool
    is_new: bool
    started: RunStarted
    children: dict[int, _ChildRun] = field(default_factory=dict)
    incidents: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    history: dict[str, list[Any]] = field(default_factory=dict)


class MLflowCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Tracks training, searches and ensembles with MLflow, in the current experiment.

    - `SparkModel.fit` and ``keras.Model.fit`` (``callbacks=``): a run with parameters, metrics by epoch, ``history.json``
      and, after training, the model with its signature and an input example. ``mlflow.pyfunc.spark_udf`` scores it.
    - `HyperParamModel.minimize` (``monitor=``): a run with a nested run for each trial: hyper-parameters, metrics by epoch,
      status. A failed trial is ``FAILED``; a pruned or stopped one is ``KILLED``.
    - `SparkEnsemble.fit` (``monitor=``): a run with a nested run for each member. `SparkRunner.run`: a run.

    It writes to the active run (``with mlflow.start_run():``), if there is one, and does not end it. Otherwise it starts a
    run, which is the active one until training ends: ``FAILED`` after an error, ``KILLED`` after Ctrl-C and SIGTERM. (Plain
    ``keras.Model.fit`` reports no errors to callbacks: use ``with mlflow.start_run()`` there.)

    Errors of the tracking store do not end training: the first one is a warning, and after three calls in a row that have
    failed, nothing more is written. Calls are made in a thread, and ``fit`` waits for them at its end.

    Args:
        run: The run to write to, or its id; it is not ended. ``None``: the active run, or a new one.
        log_model: Whether to log the model after training.
        input_example: Rows to log with the model, as ``predict`` takes them: an array, or a dict of arrays by input.
            ``None``: one row of zeros. For models whose inputs are unknown, the signature is inferred from it.
        custom_objects: Custom classes and functions by name; only needed for those that sparkkeras does not find in the
            model.
        registered_model_name: The name under which to register the model; ``None``: it is not registered.

    Attributes:
        run_id: The id of the last run; ``None`` before the first one.
        model_uri: The URI of the last model that was logged; ``None`` without one.

    Raises:
        ConfigurationError: MLflow is not installed, or an argument is not of the kind described above.

    Example::

        tracking = MLflowCallback()
        spark_model.fit(df, epochs=10, callbacks=[tracking])
        score = mlflow.pyfunc.spark_udf(spark, tracking.model_uri, env_manager="local")
        df.select(score("features"))
    """

    @known_arguments
    def __init__(
        self,
        *,
        run: Any = None,
        log_model: bool = True,
        input_example: Any = None,
        custom_objects: Mapping[str, Any] | None = None,
        registered_model_name: str | None = None,
    ) -> None:
        super().__init__()
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "MLflowCallback needs MLflow, which is not installed: pip install sparkkeras[mlflow]."
            ) from error
        self._given_run = _run_id(run)
        self._log_model = arguments.flag("log_model", log_model)
        self._input_example = input_example
        self._custom_objects = arguments.custom_objects("custom_objects", custom_objects)
        if registered_model_name is not None and (not isinstance(registered_model_name, str) or not registered_model_name):
            raise ConfigurationError(f"registered_model_name={registered_model_name!r}: expected a name (str) or None.")
        if registered_model_name is not None and not log_model:
            raise ConfigurationError(
                f"registered_model_name={registered_model_name!r} registers the model that is logged, but log_model=False: "
                "leave one of them out."
            )
        self._registered_model_name = registered_model_name
        self.run_id: str | None = None
        self.model_uri: str | None = None
        self._lock = threading.RLock()
        self._tracked: _Tracked | None = None
        self._has_warned = False
        self._has_events = False

    def set_model(self, model: keras.Model) -> None:
        """Take the model; before training, so that an example that does not fit it ends nothing that took hours.

        Raises:
            ConfigurationError: ``input_example`` does not fit the model, or there is no such run.
        """
        super().set_model(model)
        if self._log_model and self._input_example is not None:
            check_example(model, self._input_example)
        if self._given_run is not None and self._tracked is None:
            _check_exists(self._given_run)

    @guarded
    def on_event(self, event: Event) -> None:
        """Write what has happened; events of other kinds than those of this class are ignored."""
        if isinstance(event, RunStarted):
            self._has_events = True
            self._begin(event)
        elif isinstance(event, RunEnded):
            self._has_events = False
            self._end(event)
        elif self._tracked is not None:
            self._write(event, self._tracked)

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a run, unless an event has, and write the optimizer's parameters and the summary of the model."""
        if not self._has_events:
            epochs, steps = (self.params or {}).get("epochs"), (self.params or {}).get("steps")
            settings = {} if steps is None else {"steps": steps}
            self._begin(RunStarted("fit", self.model.name, settings, epochs))
        if self._tracked is not None:
            optimizer = optimizer_of(self.model)
            if optimizer is not None:
                config = optimizer.get_config()
                self._tracked.writer.log_params({f"optimizer_{name}": value for name, value in config.items()})
            lines: list[str] = []
            self.model.summary(print_fn=lambda line, *_, **__: lines.append(line))
            self._tracked.writer.log_text("\n".join(lines), "model_summary.txt")

    @guarded
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the metrics of an epoch; the step is its number, from 0."""
        if self._tracked is not None:
            _append(self._tracked, epoch, logs or {})
            self._tracked.writer.log_metrics(logs or {}, epoch)
            self._report(self._tracked)

    @guarded
    def on_train_end(self, logs: Any = None) -> None:
        """End the run, unless an event will."""
        if not self._has_events:
            self._end(RunEnded())

    def _begin(self, started: RunStarted) -> None:
        import mlflow

        if self._tracked is not None:  # training that has raised an error
            self._finish(self._tracked, FAILED)
        self._has_warned, self.run_id = False, None
        run_id, is_own = self._given_run, False
        if run_id is None:
            active = mlflow.active_run()
            if active is not None and active.info.run_id in _left_open:  # by a training of Keras that has raised an error
                mlflow.end_run(FAILED)
                active = None
            is_own = active is None
            run_id = (mlflow.start_run(run_name=started.name or None) if active is None else active).info.run_id
        client = mlflow.MlflowClient()
        run = client.get_run(run_id)
        self.run_id = run_id
        writer = RunWriter(Outbox(client), run_id)
        if is_own and not self._has_events:
            _left_open.add(run_id)
        self._tracked = _Tracked(writer, run.info.experiment_id, is_own, not run.data.metrics, started)
        writer.set_tags({"sparkkeras.kind": started.kind, "keras.backend": keras.backend.backend()})
        counts = {"epochs": started.epochs, "max_trials": started.max_trials, "metric": started.metric or None}
        params = {name: value for name, value in counts.items() if value is not None}
        writer.log_params({**params, **started.settings})

    def _write(self, event: Event, tracked: _Tracked) -> None:
        writer = tracked.writer
        if isinstance(event, TrialChanged):
            if tracked.is_new or not event.is_earlier:  # a run that is continued has earlier trials
                self._write_trial(event, tracked)
        elif isinstance(event, MemberTrained):
            child = self._child(tracked, event.member, f"member {event.member}", {})
            child.writer.log_epochs(event.epochs, event.logs)
            child.writer.end(FINISHED)
        elif isinstance(event, RunResumed):
            for epoch, logs in zip(event.epochs, event.logs, strict=True):
                _append(tracked, epoch, logs)
            if tracked.is_new:  # a run that is continued has them
                writer.log_epochs(event.epochs, event.logs)
        elif isinstance(event, EpochMeasured):
            speed = {"rows_per_second": event.rows / event.seconds} if event.seconds > 0 else {}
            updates = {"updates": event.updates.count, "mean_staleness": event.updates.mean_staleness}
            writer.log_metrics({**speed, **updates}, event.epoch)
        elif isinstance(event, WorkersChanged):
            writer.set_tags({"sparkkeras.workers": event.count})
        elif isinstance(event, CheckpointWritten):
            writer.set_tags({"sparkkeras.checkpoint": event.path})
        elif isinstance(event, Incident):
            tracked.incidents.append(f"{event.kind}: {event.text}")
            writer.set_tags({"sparkkeras.incidents": len(tracked.incidents)})

    def _write_trial(self, event: TrialChanged, tracked: _Tracked) -> None:
        trial, metric = event.trial, tracked.started.metric or "value"
        child = self._child(tracked, trial.number, f"trial {trial.number}", event.params)
        values: Sequence[float] = trial.intermediate_values
        if len(values) < child.logged:  # the trial runs again, on another worker
            child.logged = 0
        child.writer.log_history(range(child.logged, len(values)), {metric: values[child.logged :]})
        child.logged = len(values)
        status = _TRIAL_STATUSES.get(trial.status)
        if status is None:
            return
        others = {name: history for name, history in trial.history.items() if name != metric}
        child.writer.log_history(range(trial.epochs), others)
        child.value = trial.value
        if trial.value is not None:
            child.writer.log_metrics({f"best_{metric}": trial.value}, max(0, (trial.best_epoch or 1) - 1))
        details = {"status": trial.status, "worker": trial.worker, "attempts": trial.attempts, "error": trial.error}
        child.writer.set_tags({f"sparkkeras.{name}": value for name, value in details.items() if value})
        if trial.traceback:
            child.writer.log_text(trial.traceback, "traceback.txt")
        child.writer.end(status)

    @staticmethod
    def _child(tracked: _Tracked, number: int, name: str, params: Mapping[str, Any]) -> _ChildRun:
        if number not in tracked.children:
            child = tracked.children[number] = _ChildRun(RunWriter(tracked.writer.outbox), params)
            child.writer.create(tracked.experiment_id, name, tracked.writer.run_id)
            if params:
                child.writer.log_params(params)
        return tracked.children[number]

    def _end(self, ended: RunEnded) -> None:
        tracked, error = self._tracked, ended.error
        if tracked is None:
            return
        status = _RUN_STATUSES[ended.status]
        if error is not None:
            tracked.writer.set_tags({"sparkkeras.error": f"{type(error).__name__}: {error}"})
        try:
            if tracked.started.kind == "search":
                self._write_best(tracked)
            if status == FINISHED and self._log_model and tracked.started.kind == "fit" and self.model is not None:
                tracked.writer.outbox.wait()  # the metrics of the last epoch, which belong to the model
                if not tracked.writer.outbox.is_lost:
                    self.model_uri = log_model(
                        self.model,
                        tracked.writer.run_id,
                        custom_objects=self._custom_objects,
                        input_example=self._input_example,
                        registered_model_name=self._registered_model_name,
                        step=tracked.epochs[-1] if tracked.epochs else 0,
                    )
        finally:
            self._finish(tracked, status)

    def _write_best(self, tracked: _Tracked) -> None:
        sign = 1 if tracked.started.minimizes else -1
        valued = {number: child for number, child in tracked.children.items() if child.value is not None}
        if not valued:
            return
        number, best = min(valued.items(), key=lambda item: (sign * (item[1].value or 0.0), item[0]))
        tracked.writer.log_params({f"best_{name}": value for name, value in best.params.items()})
        tracked.writer.log_metrics({f"best_{tracked.started.metric or 'value'}": best.value}, 0)
        tracked.writer.set_tags({"sparkkeras.best_trial": number})
        tracked.writer.set_tag_of("sparkkeras.best_run_id", lambda: best.writer.run_id)

    def _finish(self, tracked: _Tracked, status: str) -> None:
        """Write what is written once, wait for all calls, and end the run if it is of this callback."""
        import mlflow

        self._tracked = None
        _left_open.discard(tracked.writer.run_id)
        for child in tracked.children.values():
            if not child.writer.has_ended:
                child.writer.end(KILLED)
        if tracked.epochs:
            tracked.writer.log_json({"epoch": tracked.epochs, "history": tracked.history}, "history.json")
        if tracked.incidents:
            tracked.writer.log_text("\n".join(tracked.incidents), "incidents.txt")
        active = mlflow.active_run()
        is_active = active is not None and active.info.run_id == tracked.writer.run_id
        if tracked.is_own and not is_active:  # the event came in another thread
            tracked.writer.end(status)
        tracked.writer.outbox.wait()
        try:
            if tracked.is_own and is_active:
                mlflow.end_run(status)
        finally:
            self._report(tracked)

    def _report(self, tracked: _Tracked) -> None:
        if error := tracked.writer.outbox.take_error():
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = str(error).rstrip(".")
            warn(
                f"MLflow: {type(error).__name__}: {text}. Training goes on, and what could not be logged is missing in the "
                "run; further errors of this run are not reported."
            )


def _run_id(run: Any) -> str | None:
    run_id = getattr(getattr(run, "info", None), "run_id", run)
    if run_id is not None and (not isinstance(run_id, str) or not run_id):
        raise ConfigurationError(f"run={run!r}: expected a run of MLflow (mlflow.start_run()), its id, or None.")
    return run_id


def _check_exists(run_id: str) -> None:
    """Reject a run that the tracking store does not have; that the store cannot be reached does not end a training."""
    import mlflow

    try:
        mlflow.MlflowClient().get_run(run_id)
    except mlflow.MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise ConfigurationError(
                f"run={run_id!r}: the tracking store {mlflow.get_tracking_uri()!r} has no such run. Pass one of its runs, "
                "or None for a new one."
            ) from error


def _append(tracked: _Tracked, epoch: int, logs: Mapping[str, Any]) -> None:
    """Append to the history, as `keras.callbacks.History` does."""
    tracked.epochs.append(epoch)
    for name, value in logs.items():
        tracked.history.setdefault(name, []).append(value)
