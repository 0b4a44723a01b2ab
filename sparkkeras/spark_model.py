"""`SparkModel`: a Keras model that trains, evaluates and predicts on Spark."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import AS_IN_FIT, AsInFit, declared, documented, known_arguments, taking
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import ConfigurationError, ModelError, StorageError, known_names, warn
from sparkkeras.events import Events, PhaseStarted, WorkersChanged, listeners
from sparkkeras.modeling.archive import find_outside, load_bytes
from sparkkeras.modeling.compilation import check_built, check_trainable
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.locks import training
from sparkkeras.parameter.exchange import ParameterServerStats
from sparkkeras.parameter.rules import (
    State,
    UpdateRule,
    as_rule,
    check_optimizer,
    make_rule,
    rule_config,
    rule_from_config,
)
from sparkkeras.progress.renderer import Progress
from sparkkeras.rpc.options import ParameterServerOptions
from sparkkeras.scoring import inference
from sparkkeras.scoring.backends import Backend, other_backend
from sparkkeras.scoring.columns import BATCH_SIZE, Scorer, with_predictions
from sparkkeras.scoring.inference import Verbose
from sparkkeras.sources.frame import Columns, Loaders, is_frame
from sparkkeras.sources.source import FrameSource, SlotLimit, check_row_count, free_slots, is_batch_function, local_slots
from sparkkeras.spark import filesystem
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.cluster import missing_settings, start_workers
from sparkkeras.spark.connect import check_driver
from sparkkeras.spark.job_errors import interruptible
from sparkkeras.spark.settings import WorkerSize
from sparkkeras.spark.slots import warn_of_partitions
from sparkkeras.training import persistence
from sparkkeras.training.callbacks import DriverCallbacks
from sparkkeras.training.checkpointing import CheckpointRecorder
from sparkkeras.training.fit_arguments import (
    ASYNCHRONOUS_MODES,
    FitArguments,
    ModeArguments,
    ModelSettings,
    ResourceArguments,
    SettingArguments,
)
from sparkkeras.training.preparation import check_fit, rows_stored
from sparkkeras.training.recorder import Recorder
from sparkkeras.training.row_options import RowOptions
from sparkkeras.training.run import MAX_RESTARTS, Run, ServerSettings, train
from sparkkeras.training.saved_run import SavedRun
from sparkkeras.training.sorted_rows import warn_of_sorted_rows
from sparkkeras.worker.batches import Transform

P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(fit: Callable[Concatenate[SparkModel, P], R]) -> Callable[Concatenate[SparkModel, P], R]:
    """Raise if another call is training the same model."""

    @functools.wraps(fit)
    def exclusive(self: SparkModel, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with training([self.model]):
            self._is_training = True
            try:
                return fit(self, *args, **kwargs)
            finally:
                self._is_training = False

    return exclusive


def _built(_: str, model: Any) -> keras.Model:
    check_built(model)
    return model


_SETTINGS: Mapping[str, Callable[[str, Any], Any]] = {
    name: each.check
    for name, each in {**declared(ModeArguments), **declared(SettingArguments)}.items()
    if name != "custom_objects"
}
"""The settings that `SparkModel.get_config` returns, and the function that checks each one when it is set."""

_WITHOUT_SERVER = "which has no parameter server: leave it out, or use mode='asynchronous' or mode='hogwild'"

_OF_ALL_REDUCE: Mapping[str, tuple[bool, str]] = {
    "gradient_dtype": (True, "whose workers exchange weights and no gradients: leave it out, or use mode='allreduce'"),
    "max_restarts": (True, "in which Spark runs failed tasks again: leave it out, or use mode='allreduce'"),
    "parameter_server_mode": (False, _WITHOUT_SERVER),
    "server_options": (False, _WITHOUT_SERVER),
}
"""Settings that only the mode ``"allreduce"`` has, or that it does not have; and why others do not, for the message.

The synchronous mode accepts settings of the parameter server, as Elephas does; they have no effect.
"""

_ATTRIBUTES = {"model": _built, "custom_objects": arguments.custom_objects, **_SETTINGS}
_OUTCOMES = ("training_histories", "parameter_server_stats")


@documented(ModelSettings)
class SparkModel:
    """A Keras model that trains on the partitions of a DataFrame, of an RDD, or of arrays.

    Args:
        model: A built ``keras.Model``, which training changes in place. `fit` and `evaluate` require a compiled model;
            `predict` needs no loss, metrics or optimizer.
        **given: See `ModelSettings`.

    Attributes:
        training_histories: One entry for each worker and epoch of all calls of `fit`.
        parameter_server_stats: Statistics of the parameter server of the last `fit`; ``None`` in the other modes.

    Each argument is also an attribute that can be set between calls, with the same checks. The attributes ``rule`` and
    ``frequency`` are what the next `fit` uses: the value that was set, or the default of the mode.

    Raises:
        ModelError: The model is not a Keras model, or not built.
        ConfigurationError: Another argument is unknown, out of range, or does not fit the mode.

    Example::

        spark_model = SparkModel(model)
        history = spark_model.fit(to_simple_rdd(sc, x_train, y_train), epochs=10)
        spark_model.evaluate(x_test, y_test)
    """

    @known_arguments
    @taking(SettingArguments)
    def __init__(
        self,
        model: keras.Model,
        mode: str = "synchronous",
        frequency: str | int | None = None,
        num_workers: int | None = None,
        **given: Unpack[SettingArguments],
    ) -> None:
        self.model = model
        self.mode = mode
        self.frequency = frequency
        self.num_workers = num_workers
        self.rule = None if given["rule"] is None else make_rule(given["rule"], self.mode)
        if model.compiled:
            check_optimizer(self.rule, model.optimizer)
        self.gradient_dtype = given["gradient_dtype"]
        self.max_restarts = given["max_restarts"]
        self.parameter_server_mode = given["parameter_server_mode"]
        self.port = given["port"]
        self.server_options = given["server_options"]
        self._check_mode()
        self.custom_objects = arguments.custom_objects("custom_objects", given["custom_objects"])
        self.batch_size = given["batch_size"]
        self.seed = given["seed"]
        self.cores_per_worker = given["cores_per_worker"]
        self.gpus_per_worker = given["gpus_per_worker"]
        self.training_histories: list[dict[str, Any]] = []
        self.parameter_server_stats: ParameterServerStats | None = None
        self._rule_state: State = {}
        self._fits = 0
        start_workers()

    _is_training = False
    _rows = RowOptions()

    if not TYPE_CHECKING:  # type checkers already report attributes that __init__ does not define

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute, with the same checks as in the constructor."""
            if name in _ATTRIBUTES:
                if self._is_training:
                    raise ConfigurationError(
                        f"{name} of {self!r} cannot be set while fit is running, in another thread or around this callback: "
                        "set it after fit has returned."
                    )
                value = _ATTRIBUTES[name](name, value)
            elif type(self) is SparkModel and not (name.startswith("_") or name in _OUTCOMES or hasattr(SparkModel, name)):
                of_fit = f"{name} is an argument of fit. " if name in inspect.signature(SparkModel.fit).parameters else ""
                raise ConfigurationError(
                    f"SparkModel has no attribute {name!r} to set. {of_fit}{known_names(name, _ATTRIBUTES)}"
                )
            super().__setattr__(name, value)
            if name == "model":
                self._rows = RowOptions()

    def __repr__(self) -> str:
        shown = f"SparkModel({self.model.name!r}, mode={self.mode!r}, num_workers={self.num_workers}"
        return f"{shown})" if self.mode == "allreduce" else f"{shown}, frequency={self.frequency!r}, rule={self.rule})"

    @property
    def rule(self) -> UpdateRule:
        """The update rule: the one that was set, or the default of the mode."""
        return make_rule(None, self.mode) if self._given_rule is None else self._given_rule

    @rule.setter
    def rule(self, rule: str | UpdateRule | None) -> None:
        self._given_rule = None if rule is None else as_rule(rule)

    @property
    def seed(self) -> int:
        """The seed of random numbers: the one that was set, a random one, or after resuming that of the checkpoint."""
        return self._seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed

    @property
    def frequency(self) -> str | int:
        """How long a worker trains between two exchanges: what was set, or the default of the mode."""
        if self._given_frequency is None:
            return 1 if self.mode == "allreduce" else "epoch"
        return self._given_frequency

    @frequency.setter
    def frequency(self, frequency: str | int | None) -> None:
        self._given_frequency: str | int | None = _SETTINGS["frequency"]("frequency", frequency)

    def _check_mode(self) -> None:
        """Reject settings that the mode does not have; it may have been set after them."""
        if self.mode == "allreduce" and self.frequency != 1:
            raise ConfigurationError(
                f"frequency={self.frequency!r} does not fit mode='allreduce', which averages the gradients of every batch: "
                "leave frequency out, or use mode='synchronous' to average weights after several batches."
            )
        for name, (of_all_reduce, reason) in _OF_ALL_REDUCE.items():
            value = getattr(self, name)
            if value is not None and of_all_reduce != (self.mode == "allreduce"):
                raise ConfigurationError(f"{name}={value!r} does not fit mode={self.mode!r}, {reason}.")

    def _check_model(self) -> None:
        """Reject a model, an optimizer or a session that the mode cannot train with."""
        check_optimizer(make_rule(self._given_rule, self.mode), self.model.optimizer)
        if self.mode in ASYNCHRONOUS_MODES:
            check_driver()
        if self.mode == "allreduce":
            from sparkkeras.training.allreduce import check_all_reduce

            check_all_reduce(self.model)

    @property
    def master_network(self) -> keras.Model:
        """The Keras model, the same as `model`; for compatibility with Elephas."""
        return self.model

    @known_arguments
    @taking(FitArguments)
    @_exclusive
    @interruptible()
    def fit(self, data: Any, y: Any = None, **given: Unpack[FitArguments]) -> keras.callbacks.History:
        """Train the model on Spark. Further calls continue from the current weights.

        Only one call at a time can train a model: a second call, from another thread, from a callback, or through another
        model with some of the same layers, raises an error. `predict` and `evaluate` can be called during training, from
        callbacks and from other threads; they use the weights of the last completed round (in synchronous training) or
        epoch (in the other modes, in which they need a free slot). If there is none, calls from callbacks raise an error,
        since training waits for the callback; calls from other threads wait until training has ended.
        ``self.model.predict`` and ``self.model.evaluate`` in a callback need no slot.

        `evaluate` and `predict` use the ``features``, ``label``, ``loader`` and ``on_invalid`` of the last call by default,
        also after `save` and `from_checkpoint`.

        Args:
            data: A DataFrame, an RDD of ``(x, y)`` or ``(x, y, sample_weight)`` rows, or arrays of features with the
                samples on the first axis, or sparse matrices of SciPy, which workers convert to dense arrays piece by
                piece. For several inputs, ``x`` is a tuple or a dict of arrays, nested as they are. Or a function
                ``make(worker, num_workers)``, which each worker calls at the beginning of each epoch; it may have a third
                parameter ``epoch``, the number of the epoch from 0. It returns the batches of this worker: a
                ``tf.data.Dataset``, a ``keras.utils.PyDataset``, or an iterable of ``(x, y)`` or ``(x, y, sample_weight)``.
                Their order and size are not changed: ``shuffle`` and ``batch_size`` do not apply.
            y: The labels, if ``data`` is arrays.
            **given: See `FitArguments`.

        Returns:
            A ``keras.callbacks.History`` with the logs of each epoch: loss and metrics over the full dataset.

        Raises:
            ModelError: The model is not compiled, its optimizer does not fit its weights, it cannot be trained for another
                reason, or another call of ``fit`` is training it.
            ConfigurationError: An argument is unknown or out of range, the checkpoint is of other work, or there are
                checkpoints and ``resume`` is ``False``.
            DataError: The data is empty, malformed, or does not fit the model or its loss.
            CustomObjectError: Custom code cannot be pickled, or another definition would be loaded in its place.
            DivergenceError: Weights or loss became NaN or infinite; the model keeps the weights of the last completed round
                or epoch.
            DriverConnectionError: Workers cannot reach the parameter server, or, in the mode ``"allreduce"`` with Spark
                Connect, this process.
            WorkerError: A task failed repeatedly; the message contains its traceback. In the mode ``"allreduce"``, more
                than ``max_restarts`` times.
            TrainingInterruptedError: The process received a SIGTERM; with ``checkpoint`` only.
            StorageError: A disk of the workers is full, checkpoints cannot be read, or the last one cannot be written.
        """
        check_trainable(self.model)
        start_workers()
        if given["batch_size"] is not None and is_batch_function(data):
            warn(
                f"batch_size={given['batch_size']} has no effect: data is a function, and the batches that it returns are "
                "used as they are. Return batches of this size, for instance with dataset.batch(batch_size)."
            )
        self._check_mode()
        self._check_model()
        recorder = CheckpointRecorder.open(given["checkpoint"], given["resume"], self.mode)
        limit = self._slot_limit()
        saved = None if recorder is None else recorder.saved
        verbose = 1 if given["verbose"] == "auto" else given["verbose"]
        checked: Mapping[str, Any] = given
        progress, others = Progress(verbose), listeners(checked["callbacks"])
        if missing := missing_settings():
            configured = "".join(f'.config("{name}", "{value}")' for name, value in missing.items())
            progress.status.write(f"Spark would start tasks faster with SparkSession.builder{configured}")
        events = Events([*([progress] if verbose else []), *others], verbose == 1 or bool(others))
        run = self._run(checked, recorder or Recorder(), events)
        with progress.status.showing("Checking the model and the data ...", in_log=False):
            seed = int(np.random.SeedSequence([self.seed, self._fits]).generate_state(1)[0])  # differs from call to call
            check_fit(run, data, y, self.batch_size, seed if saved is None else saved.work.seed)
        if self.mode == "synchronous" and self.frequency != "epoch":
            check_row_count(
                run.source,
                f"frequency={self.frequency!r}",
                "use another mode, or steps_per_epoch= for shorter epochs. Each epoch calls the function anew: shuffle in "
                "it, or read on where the previous epoch ended, with make(worker, num_workers, epoch).",
            )
        rows_read = RowOptions.of_fit(data, run)
        fits, own_seed = self._fits + 1, self.seed
        if saved is not None:
            fits, own_seed = saved.work.kept["fits"], saved.work.kept["seed"]
        if recorder is not None:
            find_outside(self.model, self.custom_objects)
            recorder.check(run, self._settings(rows_read) | {"fits": fits, "seed": own_seed})
        with (
            events.running(run.started()),
            watching_spark(events),
            rows_stored(run, self.num_workers, self.num_workers, limit),
        ):
            if recorder is not None:
                recorder.check_data(run)
            self._fits, self._seed, self._rows = fits, own_seed, rows_read
            if recorder is not None and recorder.is_complete(run.epochs):
                return recorder.restore_result(run)
            warn_of_sorted_rows(run, averages=self.mode != "allreduce")
            if self.mode == "synchronous" and self.num_workers is None and run.dataset.is_driver_here:
                batches = run.batches if run.frequency == "epoch" else min(run.batches, int(run.frequency))
                warn_of_partitions(run.num_workers, run.dataset.slots, batches, run.options.batch_size)
            rows = [run.rows_of_epoch([worker]) for worker in range(len(run.split.train))]
            events.emit(WorkersChanged(run.num_workers, rows))
            events.emit(PhaseStarted("Loading Keras on the workers, and compiling the model"))
            run.callbacks = DriverCallbacks(checked["callbacks"], self.model, run.epochs, run.steps, events)
            try:
                with nullcontext() if recorder is None else recorder.recording(run):
                    train(run)
            finally:
                self.parameter_server_stats = run.server.stats if self.mode in ASYNCHRONOUS_MODES else None
            return run.callbacks.history

    @known_arguments
    @interruptible()
    def evaluate(
        self,
        data: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        return_dict: bool = False,
        verbose: Verbose = 0,
        features: Columns | AsInFit | None = AS_IN_FIT,
        label: Columns | AsInFit | None = AS_IN_FIT,
        loader: Loaders | AsInFit | None = AS_IN_FIT,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalid | AsInFit | None = AS_IN_FIT,
        backend: Backend | None = None,
    ) -> Any:
        """Compute the loss and metrics over all rows, in the format of ``keras.Model.evaluate``.

        The driver merges the metric states of the workers, so AUC, precision or RMSE are exact for the full dataset. For a
        model with several outputs, the loss of each single output is a mean over the batches of all workers, as in Keras,
        so it depends on the division of rows into batches; the total loss does so only with a mask or ``ignore_class``.

        Args:
            data: As in `fit`.
            y: As in `fit`.
            batch_size: Rows in each batch; ``None``: that of the SparkModel.
            sample_weight: As in `fit`.
            return_dict: Whether to return a dict of metrics by name.
            verbose: ``"auto"``, 1 or 2 prints the metrics.
            features: As in `fit`. ``AS_IN_FIT``, the default of this argument and of ``label``, ``loader`` and
                ``on_invalid``: what the last `fit` used, if its data was of the same kind (DataFrame, RDD, arrays or a
                function); ``None``: the default of `fit`.
            label: As in `fit`.
            loader: As in `fit`.
            transform: As in `fit`. It is never taken from the last `fit`, since it may be augmentation; if `fit` had one, a
                warning says so, unless this is ``None``.
            on_invalid: As in `fit`.
            backend: As in `predict`.

        Returns:
            A list of the loss and metrics, or a number if there is only the loss; a dict with ``return_dict=True``.

        Raises:
            ModelError: The model is not compiled.
            ConfigurationError: An argument is unknown or out of range, or a callback of asynchronous training calls this
                while no slot is free.
            DataError: The data is empty, malformed, or does not fit the model or its loss.
        """
        return_dict, other = arguments.flag("return_dict", return_dict), other_backend(backend)
        transform = self._rows.without_transform("evaluate", transform)
        columns = self._rows.columns(data, features, label, loader, fits=transform is None)
        source, options = inference.check_evaluate(
            self.model,
            data,
            y,
            sample_weight,
            columns,
            batch_size=self._batch_size(batch_size),
            transform=transform,
            on_invalid=self._rows.policy(data, on_invalid),
            verbose=verbose,
            backend=other,
        )
        if isinstance(source, FrameSource):
            self._rows.warn_of_columns(source.selection)
        found = inference.evaluate_source(self.model, source, self.custom_objects, options, self.num_workers, verbose, other)
        return inference.reported(self.model, inference.results(self.model, found), return_dict, verbose)

    @known_arguments
    @interruptible()
    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collect: bool = True,
        keyed: bool = False,
        verbose: Verbose = 0,
        features: Columns | AsInFit | None = AS_IN_FIT,
        output_col: str | Sequence[str] | Mapping[str, str] = "prediction",
        loader: Loaders | AsInFit | None = AS_IN_FIT,
        transform: Transform | AsInFit | None = AS_IN_FIT,
        on_invalid: OnInvalidToPredict | AsInFit | None = AS_IN_FIT,
        backend: Backend | None = None,
    ) -> Any:
        """Predict all rows, in their order and without a shuffle.

        Args:
            data: A DataFrame (also a streaming one), arrays of features, or an RDD of features or of ``(x, y)`` rows, whose
                labels are ignored. Or a function as in `fit`, whose batches are ``x`` or tuples that begin with it; the
                predictions are in the order of the workers.
            batch_size: Rows in each batch; ``None``: that of the SparkModel, but at least 1024 for a DataFrame without a
                loader. For a model with stateful layers, its fixed batch size.
            collect: ``False`` returns a lazy RDD with one prediction per row. Predictions for a DataFrame are always lazy.
            keyed: Whether the rows of an RDD are ``(key, x)`` with any keys that can be pickled. The result is then
                ``(key, prediction)`` pairs: a list, or a lazy RDD with ``collect=False``. For several outputs, a
                prediction is a tuple or a dict of arrays.
            verbose: ``"auto"``, 1 or 2 prints the number of predicted rows, unless the predictions are lazy.
            features: As in `evaluate`. ``AS_IN_FIT``: what the last `fit` used for data of the same kind.
            output_col: The new column of a DataFrame: a float for one output of shape (batch, 1), else a (nested) array of
                floats. For several outputs: a list of names, or ``{output name: column}``; a single name creates the
                columns ``{output_col}_{output name}``, such as ``prediction_b_c`` for ``{"b": {"c": ...}}``.
            loader: As in `evaluate`.
            transform: As in `evaluate`; it is called with ``y=None`` and may return ``x`` alone.
            on_invalid: ``"error"`` or ``"allow"``, as in `fit`; or for a DataFrame ``"null"``, which predicts null for rows
                with nulls, NaN or infinite values. ``AS_IN_FIT`` is ``"error"`` if `fit` dropped such rows.
            backend: The Keras backend of the workers that score: ``"openvino"``, ``"jax"``, ``"torch"`` or ``"tensorflow"``,
                whatever this process uses; ``None``: that of this process. For each model a process on this machine first
                checks that the backend predicts the same; see `ModelError` below.

        Returns:
            Predictions as from ``keras.Model.predict``: an array, or a list or dict of arrays for several outputs. For a
            DataFrame, a new DataFrame with the predictions as additional columns.

        Raises:
            ConfigurationError: An argument is unknown or out of range, or a callback of asynchronous training calls this
                while no slot is free.
            DataError: The data is malformed or does not fit the model.
            ModelError: ``backend`` cannot load the model, lacks one of its operations, or predicts something else.
            ClusterError: This machine or a worker lacks the package of ``backend``.
        """
        other = other_backend(backend)
        policy = self._rows.policy_to_predict(data, on_invalid)
        arguments.on_invalid_to_predict("on_invalid", policy)
        arguments.one_of("verbose", verbose, ("auto", 0, 1, 2))
        keyed, collect = arguments.flag("keyed", keyed), arguments.flag("collect", collect)
        transform = self._rows.without_transform("predict", transform)
        columns = self._rows.columns(data, features, None, loader, fits=transform is None)
        if is_frame(data) and not keyed:
            most = self.batch_size if columns.loader else max(self.batch_size, BATCH_SIZE)
            scorer = Scorer.of(
                self.model,
                batch_size=self._batch_size(batch_size, fixed_batch_size(self.model) or most),
                transform=transform,
                custom_objects=self.custom_objects,
                on_invalid=policy,
                backend=other,
            )
            selection = columns.select(data, scorer.reader)
            self._rows.warn_of_columns(selection)
            return with_predictions(data, scorer, selection, output_col)
        source, options = inference.check_predict(
            self.model,
            data,
            columns,
            batch_size=self._batch_size(batch_size, fixed_batch_size(self.model)),
            transform=transform,
            on_invalid=policy,
            keyed=keyed,
            backend=other,
        )
        objects = self.custom_objects
        if not collect:
            return inference.lazily(self.model, source, objects, options, self.num_workers, keyed, other)
        parts = inference.predict_source(self.model, source, objects, options, self.num_workers, keyed, verbose, other)
        return inference.in_pairs(parts, verbose) if keyed else inference.concatenated(parts, self.model, verbose)

    def get_config(self) -> dict[str, Any]:
        """The settings. ``SparkModel(model, **spark_model.get_config())`` has the same settings but not the rule's state.

        Returns:
            The arguments of the constructor by name, except ``model`` and ``custom_objects``; ``rule`` and
            ``frequency`` are ``None`` if they were not set.
        """
        given = {"rule": self._given_rule, "frequency": self._given_frequency}
        return {name: getattr(self, name) for name in _SETTINGS} | given

    @known_arguments
    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save the model with its optimizer and this SparkModel's settings as one ``.keras`` file.

        ``keras.saving.load_model`` can read it, too. The file is written under a temporary name and then renamed, so it is
        never incomplete.

        Args:
            path: A local path, or a URI that Spark can write (``hdfs://``, ``s3a://``, ``file:``).
            overwrite: Whether to replace an existing file.

        Raises:
            StorageError: The path cannot be written, or it exists and ``overwrite`` is ``False``.
            ConfigurationError: The path does not end in ``.keras``.
        """
        save_as(SparkModel.__name__, self, path, overwrite)

    def export(
        self, filepath: str | os.PathLike[str], format: str = "tf_saved_model", verbose: bool | None = None, **options: Any
    ) -> None:
        """Export the model for serving, without its optimizer, as `keras.Model.export` does.

        Args:
            filepath: A path of this machine.
            format: ``"tf_saved_model"``, a folder for TensorFlow Serving; ``"onnx"``, or another format of Keras.
            verbose: Whether to print what was exported. ``None``: Keras decides.
            options: Further arguments of ``keras.Model.export``, such as ``input_signature``.

        Raises:
            ConfigurationError: ``filepath`` is not a path, or a URI, which Keras cannot write.
        """
        path = arguments.path("filepath", filepath)
        if filesystem.has_scheme(path):
            raise ConfigurationError(
                f"filepath={path!r} is a URI: expected a path of this machine. Copy what Keras exports to it, or use "
                "save(), which writes URIs."
            )
        self.model.export(path, format=format, verbose=verbose, **options)

    @known_arguments
    def summary(
        self,
        line_length: int | None = None,
        positions: Sequence[float] | None = None,
        print_fn: Callable[[str], Any] | None = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Sequence[str] | None = None,
    ) -> None:
        """Print the layers of the model with their shapes and numbers of parameters, as `keras.Model.summary` does.

        Args:
            line_length: The length of printed lines.
            positions: The positions of the columns, relative or absolute.
            print_fn: A function that is called with each line or the whole text; ``None`` prints.
            expand_nested: Whether to show the layers of nested models.
            show_trainable: Whether to show which layers are trainable.
            layer_range: The names of the first and of the last layer to show, or regular expressions.
        """
        self.model.summary(line_length, positions, print_fn, expand_nested, show_trainable, layer_range)

    @classmethod
    @known_arguments
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> SparkModel:
        """The model in the newest checkpoint, with its optimizer and the settings of its SparkModel.

        `fit` with ``checkpoint=Checkpoint(path), resume=True`` continues its training.

        Args:
            path: The folder of the checkpoints, the ``path`` of their `Checkpoint`.
            custom_objects: Custom classes and functions of the model, and the class of a custom update rule, by name.
            safe_mode: Whether to reject Python code inside the model's file (lambdas).

        Raises:
            StorageError: There is no checkpoint, or it cannot be read.
            ModelError: The model needs custom code that is missing, or code that ``safe_mode`` rejects.
            ConfigurationError: ``path`` is not a path, or a value in ``custom_objects`` is not an object such as a class.
        """
        objects = arguments.custom_objects("custom_objects", custom_objects)
        folder = arguments.path("path", path)
        saved = SavedRun.newest(CheckpointStore(folder), with_model=True)
        if saved is None:
            raise StorageError(f"{folder!r} has no complete checkpoint: expected the path of Checkpoint(path).")
        model = load_bytes(saved.model, objects, safe_mode=safe_mode, is_packed=True)
        find_outside(model, objects)
        saved.restore_result(model)
        spark_model = _restored(model, dict(saved.work.kept), saved.progress.rule_state, objects)
        spark_model.training_histories.extend(saved.progress.record.histories)
        return spark_model

    def _slot_limit(self) -> SlotLimit | None:
        """How many workers the mode can have; ``None`` for as many as wanted."""
        if self.mode == "synchronous":
            return None if self.cores_per_worker is None else local_slots
        if self.mode in ASYNCHRONOUS_MODES:
            return free_slots
        from sparkkeras.training.allreduce_hosts import all_slots

        return all_slots

    def _run(self, given: Mapping[str, Any], recorder: Recorder, events: Events) -> Run:
        """A call of `fit` with these arguments."""
        rule = make_rule(self._given_rule, self.mode)
        names = ("mode", "frequency", "num_workers", "gradient_dtype", *declared(ResourceArguments))
        settings = {name: getattr(self, name) for name in names}
        if self.mode in ASYNCHRONOUS_MODES:
            settings["parameter_server_mode"] = self.parameter_server_mode or "http"
        if self.mode != "allreduce":
            settings["rule"] = repr(rule)
        return Run(
            self.mode,
            [self.model],
            given,
            settings,
            custom_objects=self.custom_objects,
            frequency=self.frequency,
            rule=rule,
            rule_state=self._rule_state,
            server=ServerSettings(
                self.parameter_server_mode or "http", self.port or 0, self.server_options or ParameterServerOptions()
            ),
            gradient_dtype=self.gradient_dtype,
            max_restarts=MAX_RESTARTS if self.max_restarts is None else self.max_restarts,
            worker_size=WorkerSize(self.cores_per_worker, self.gpus_per_worker),
            histories=self.training_histories,
            recorder=recorder,
            events=events,
        )

    def _settings(self, rows: RowOptions) -> dict[str, Any]:
        """The settings to save with the model, and how `fit` read its rows, as values for JSON."""
        return self.get_config() | {
            "rule": None if self._given_rule is None else rule_config(make_rule(self._given_rule, self.mode)),
            "server_options": dataclasses.asdict(self.server_options) if self.server_options else None,
            "fits": self._fits,
            "rows": rows.as_json(self.model),
        }

    def _batch_size(self, value: int | None, default: int | None = None) -> int:
        return (default or self.batch_size) if value is None else arguments.integer("batch_size", value)


def save_as(kind: str, spark_model: SparkModel, path: str | os.PathLike[str], overwrite: bool) -> None:
    """Write a file for `load_saved`.

    Args:
        kind: The name of the class to save: SparkModel, or a class that contains one.
        spark_model: The SparkModel.
        path: As in `SparkModel.save`.
        overwrite: As in `SparkModel.save`.

    Raises:
        StorageError: The path cannot be written, or it exists and ``overwrite`` is ``False``.
        ConfigurationError: The path does not end in ``.keras``.
    """
    _check_suffix(path)
    settings = {"kind": kind, **spark_model._settings(spark_model._rows)}
    data = persistence.pack(spark_model.model, settings, spark_model._rule_state)
    filesystem.write_bytes(str(path), data, overwrite)


def load_saved(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> tuple[SparkModel, str]:
    """Load a file as a SparkModel, with the name of the class that saved it; see `load_spark_model`.

    Raises:
        StorageError: The path cannot be read.
        ModelError: The file has no model, or code that ``safe_mode`` rejects.
        ConfigurationError: ``path`` is not a path, or a value in ``custom_objects`` is not an object such as a class.
    """
    objects = arguments.custom_objects("custom_objects", custom_objects)
    data = filesystem.read_bytes(arguments.path("path", path))
    try:
        model, settings, rule_state = persistence.unpack(data, objects, safe_mode)
    except ModelError as error:
        raise type(error)(f"{str(path)!r}: {error}") from error.__cause__
    kind = settings.pop("kind", SparkModel.__name__)
    return _restored(model, settings, rule_state, objects), kind


def _restored(model: keras.Model, settings: dict[str, Any], rule_state: State, objects: dict[str, Any]) -> SparkModel:
    """A SparkModel with the settings of `SparkModel._settings`."""
    fits, rows = settings.pop("fits", 0), settings.pop("rows", None)
    if settings.get("rule"):
        settings["rule"] = rule_from_config(settings["rule"], objects)
    if settings.get("server_options"):
        settings["server_options"] = ParameterServerOptions(**settings["server_options"])
    spark_model = SparkModel(model, custom_objects=objects, **settings)
    spark_model._fits, spark_model._rows = fits, RowOptions.from_json(model, rows)
    spark_model._rule_state = rule_state
    return spark_model


def _check_suffix(path: Any) -> None:
    target = arguments.path("path", path)
    if not target.endswith(".keras"):
        raise ConfigurationError(f"path={target!r} must end in .keras, the format that Keras and sparkkeras can load.")
