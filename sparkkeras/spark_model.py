"""`SparkModel`: a Keras model that trains, evaluates and predicts on Spark."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.dataset import DriverDataset
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import ConfigurationError, ModelError, known_names
from sparkkeras.modeling import archive as models
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.locks import training
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import (
    State,
    UpdateRule,
    as_rule,
    check_optimizer,
    make_rule,
    rule_config,
    rule_from_config,
)
from sparkkeras.parameter.service import ParameterServerStats
from sparkkeras.scoring import inference
from sparkkeras.scoring.columns import BATCH_SIZE, with_predictions
from sparkkeras.scoring.inference import Verbose
from sparkkeras.sources.frame import Columns, Loaders, is_frame
from sparkkeras.sources.rows import warn_of_partitions
from sparkkeras.sources.source import NamedColumns
from sparkkeras.spark import storage
from sparkkeras.spark.cluster import interruptible
from sparkkeras.training import persistence
from sparkkeras.training.callbacks import DriverCallbacks, Progress
from sparkkeras.training.job import Coordination, Server
from sparkkeras.training.preparation import Partitioning, check_fit, prepare_fit
from sparkkeras.training.strategy import MODES, make_strategy
from sparkkeras.worker.trainer import Transform

P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(fit: Callable[Concatenate[SparkModel, P], R]) -> Callable[Concatenate[SparkModel, P], R]:
    """Refuse a call while another one trains the same model."""

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
    models.check_built(model)
    return model


def _mode(name: str, mode: Any) -> str:
    if not isinstance(mode, str):
        raise ConfigurationError(
            f"{name}={mode!r}: expected {', '.join(map(repr, MODES))}. By position mode comes second and num_workers "
            f"fourth: name it, num_workers={mode!r}."
        )
    return str(arguments.one_of(name, mode, MODES))


def _seed(name: str, value: Any) -> int:
    given = arguments.optional_integer(name, value, low=0)
    return int(np.random.default_rng().integers(2**31)) if given is None else given


def _rule(_: str, value: Any) -> UpdateRule | None:
    return None if value is None else as_rule(value)  # whether it fits the mode is seen in `fit`: that may be set after it


_SETTINGS: Mapping[str, Callable[[str, Any], Any]] = {
    "mode": _mode,
    "frequency": arguments.frequency,
    "num_workers": arguments.optional_integer,
    "parameter_server_mode": functools.partial(arguments.one_of, known=("http", "socket")),
    "port": arguments.port,
    "rule": _rule,
    "server_options": functools.partial(arguments.instance, kind=ParameterServerOptions),
    "batch_size": arguments.integer,
    "seed": _seed,
}
"""What `SparkModel.get_config` gives, and what checks each of them when it is set."""

_ATTRIBUTES: Mapping[str, Callable[[str, Any], Any]] = {
    "model": _built,
    "custom_objects": arguments.custom_objects,
    **_SETTINGS,
}
_OUTCOMES = ("training_histories", "parameter_server_stats")


class SparkModel:
    """A Keras model that trains on the partitions of a DataFrame, of an RDD, or of arrays.

    Args:
        model: A built ``keras.Model``. It is the master: training changes it in place. It has to be compiled for `fit` and
            `evaluate`; `predict` needs no loss, metrics or optimizer.
        mode: ``"synchronous"``: all workers train from common weights for a while, then their weights are averaged.
            ``"asynchronous"``: each worker exchanges with a parameter server on the driver whenever it is ready.
            ``"hogwild"``: likewise, and the server takes updates up without a lock.
        frequency: How long a worker trains between two exchanges: ``"epoch"``, ``"batch"``, or a number of batches. An epoch
            is long for asynchronous workers: begin with 5 to 12 batches.
        num_workers: How many workers share the rows. ``None``: one for each partition of the data; arrays are cut for
            the slots that Spark has. Asynchronous and hogwild workers hold their slots to the end, so there are no more of
            them than free slots; neighbouring partitions are put together for that.
        parameter_server_mode: How workers talk to the parameter server: ``"http"`` or ``"socket"``, which is faster.
        port: The parameter server's port; 0 takes any that is free.
        rule: What becomes of the common weights when the workers' weights come back. Synchronous: ``"average"`` (default),
            ``"slowmo"``, ``"diloco"``. Asynchronous: ``"downpour"`` (default), ``"agn"``, ``"dynsgd"``, ``"easgd"``,
            ``"eamsgd"``, ``"dcasgd"``; hogwild the first two of these. Or an `UpdateRule`. ``None`` is the default of the
            mode, also of one that is set later.
        server_options: Further settings of the parameter server.
        custom_objects: Custom classes and functions by name, where they cannot be found in the model itself.
        batch_size: Rows in a batch of one worker, where a call does not say.
        seed: What shuffles, dropout masks and the like are drawn from. ``None`` draws one. With the same seed, data,
            partitions and model, synchronous training gives the same weights.

    Attributes:
        training_histories: One entry for each worker and epoch of all calls of `fit`.
        parameter_server_stats: What the parameter server of the last `fit` did; ``None`` in synchronous mode.

    The arguments are attributes of the same names, which may be set between two calls and are checked then. The attribute
    ``rule`` is the `UpdateRule` that the next `fit` takes, the mode's default where none was given.

    Raises:
        ModelError: The model is no Keras model, or not built.
        ConfigurationError: Another argument is unknown or out of range.

    Example::

        spark_model = SparkModel(model)
        history = spark_model.fit(to_simple_rdd(sc, x_train, y_train), epochs=10)
        spark_model.evaluate(x_test, y_test)
    """

    @known_arguments
    def __init__(
        self,
        model: keras.Model,
        mode: str = "synchronous",
        frequency: str | int = "epoch",
        num_workers: int | None = None,
        *,
        parameter_server_mode: str = "http",
        port: int = 0,
        rule: str | UpdateRule | None = None,
        server_options: ParameterServerOptions | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        batch_size: int = 32,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.mode = mode
        self.frequency = frequency
        self.num_workers = num_workers
        self.rule = None if rule is None else make_rule(rule, self.mode)
        if model.compiled:
            check_optimizer(self.rule, model.optimizer)
        self.parameter_server_mode = parameter_server_mode
        self.port = port
        self.server_options = server_options
        self.custom_objects = arguments.custom_objects("custom_objects", custom_objects)
        self.batch_size = batch_size
        self.seed = _seed("seed", seed)
        self.training_histories: list[dict[str, Any]] = []
        self.parameter_server_stats: ParameterServerStats | None = None
        self._rule_state: State = {}
        self._fits = 0

    _is_training = False

    if not TYPE_CHECKING:  # to type checkers, an attribute that is not among those of __init__ is an error already

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute; those that arguments of the constructor have made are checked as these are."""
            if name in _ATTRIBUTES:
                if self._is_training:
                    raise ConfigurationError(
                        f"{name} of {self!r} cannot be set while fit is running, in another thread or around this callback: "
                        "set it when fit has returned."
                    )
                value = _ATTRIBUTES[name](name, value)
            elif type(self) is SparkModel and not (name.startswith("_") or name in _OUTCOMES or hasattr(SparkModel, name)):
                of_fit = f"{name} is an argument of fit. " if name in inspect.signature(SparkModel.fit).parameters else ""
                raise ConfigurationError(
                    f"SparkModel has no attribute {name!r} to set. {of_fit}{known_names(name, _ATTRIBUTES)}"
                )
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return (
            f"SparkModel({self.model.name!r}, mode={self.mode!r}, frequency={self.frequency!r}, "
            f"num_workers={self.num_workers}, rule={self.rule})"
        )

    @property
    def rule(self) -> UpdateRule:
        """The update rule: the one that was given, or the default of the mode."""
        return make_rule(None, self.mode) if self._given_rule is None else self._given_rule

    @rule.setter
    def rule(self, rule: str | UpdateRule | None) -> None:
        self._given_rule = _rule("rule", rule)

    @property
    def master_network(self) -> keras.Model:
        """The trained Keras model, the same as `model`."""
        return self.model

    @known_arguments
    @_exclusive
    @interruptible()
    def fit(
        self,
        data: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        validation_col: str | None = None,
        validation_freq: int = 1,
        validation_batch_size: int | None = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        features: Columns | None = None,
        label: Columns | None = None,
        loader: Loaders | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalid = "error",
        worker_callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
    ) -> keras.callbacks.History:
        """Train the model on Spark. Called again, it goes on from where it stood.

        One call at a time trains a model: another one meanwhile, from a second thread or from a callback, is refused, also
        through another SparkModel or a model with some of the same layers. `predict` and `evaluate` may be called
        meanwhile, from callbacks and from other threads; they use the weights of the last finished round (in the
        asynchronous modes: of the last finished epoch). In the asynchronous modes they need a free slot: without one, those
        of callbacks are refused, since training waits for the callback, and those of other threads wait until it has ended.
        ``self.model.predict`` and ``self.model.evaluate`` of a callback need none.

        Args:
            data: A DataFrame, an RDD of ``(x, y)`` or ``(x, y, sample_weight)`` rows, or arrays of features with the samples
                on the first axis. Several inputs: ``x`` is a tuple or a dict of arrays.
            y: The labels that go with arrays.
            epochs: Train up to this epoch, counted from 0.
            batch_size: Rows in a batch of one worker; ``None`` takes the SparkModel's.
            verbose: 0 is silent, 1 keeps a line alive, 2 writes a line an epoch; ``"auto"`` is 1.
            callbacks: Keras callbacks. They run on the driver, on the master model, once an epoch.
            validation_split: The share of rows, in [0, 1), that validates: the last ones of each partition.
            validation_data: A DataFrame, an RDD, ``(x, y)`` or ``(x, y, sample_weight)`` to validate on instead.
            validation_col: A boolean or numeric column of the DataFrame: its rows that are true, or not 0, validate instead.
            validation_freq: Validate every so many epochs.
            validation_batch_size: Rows in a batch of validation; ``None`` takes ``batch_size``.
            shuffle: Whether each worker goes through its rows in another order each epoch.
            class_weight: A weight for each class, as in ``keras.Model.fit``. Not together with sample weights.
            sample_weight: Weights of 0 or more that go with arrays, shape (samples,); of a DataFrame the column of weights.
            initial_epoch: The epoch to begin at.
            steps_per_epoch: At most so many batches of each worker in an epoch; a worker that has fewer ends earlier.
                ``None``: all of its rows.
            features: The columns of a DataFrame that the model takes: one column (numbers, arrays, vectors, bytes of raw
                tensors), a list of columns to be laid side by side, or for several inputs ``{input name: column(s)}`` or a
                list with a column for each. ``None``: the column ``features``, or columns named as the inputs.
            label: The columns of the labels, likewise by output. ``None``: the column ``label``, or columns named as the
                outputs.
            loader: What turns a column of a DataFrame into model inputs, such as `image_loader`, or
                ``{input name: loader}``.
            transform: ``transform(x, y) -> (x, y)`` on each batch, on the workers. It is also called on the driver, before
                a job starts, to check what it returns: with the first batch of arrays, and for a DataFrame or an RDD with
                one row of zeros. If it fails on zeros, its first rows on the workers are checked instead.
            on_invalid: What to do with rows that hold nulls, NaN or infinite values: ``"error"``, ``"drop"`` them, or
                ``"allow"`` (nulls are NaN then). ``None`` in rows and arrays is a null.
            worker_callbacks: Keras callbacks that run on the workers: new copies in each round of each worker; in the
                asynchronous modes one copy for all epochs of a worker.

        Returns:
            A ``keras.callbacks.History`` with the figures of the whole data, one value an epoch.

        Raises:
            ModelError: The model is not compiled, its optimizer does not fit its weights, it cannot be trained for another
                reason, or another call of ``fit`` is training it.
            ConfigurationError: An argument is unknown or out of range.
            DataError: The data is empty, malformed, or does not fit the model or its loss.
            CustomObjectError: Custom code cannot travel, or would load as something else.
            DivergenceError: Weights or loss became NaN or infinite; the model keeps the last finished round or epoch.
            DriverConnectionError: Workers cannot reach the parameter server.
            WorkerError: A task failed for good; the message has its traceback.
        """
        models.check_trainable(self.model)
        rule = make_rule(self._given_rule, self.mode)
        check_optimizer(rule, self.model.optimizer)
        request = check_fit(
            [self.model],
            data=data,
            y=y,
            epochs=epochs,
            batch_size=self.batch_size if batch_size is None else batch_size,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            validation_col=validation_col,
            validation_freq=validation_freq,
            validation_batch_size=validation_batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            features=features,
            label=label,
            loader=loader,
            transform=transform,
            on_invalid=on_invalid,
            worker_callbacks=worker_callbacks,
            seed=int(np.random.SeedSequence([self.seed, self._fits]).generate_state(1)[0]),  # another one for each call
        )
        partitioning = Partitioning(self.num_workers, self.num_workers, at_once=self.mode != "synchronous")
        server = Server(self.parameter_server_mode, self.port, self.server_options or ParameterServerOptions())
        coordination = Coordination(self.frequency, rule, self._rule_state, server, self.training_histories)
        archives = [ModelArchive.pack(self.model, self.custom_objects)]
        with prepare_fit(request, [self.model], archives, self.custom_objects, partitioning, coordination) as (job, stored):
            self._fits += 1
            if self.mode == "synchronous" and self.num_workers is None and isinstance(stored, DriverDataset):
                batches = job.batches if job.frequency == "epoch" else min(job.batches, int(job.frequency))
                warn_of_partitions(job.num_workers, stored.slots, batches, job.options.batch_size)
            progress = Progress(request.verbose, job.epochs, job.num_workers)
            on_driver = DriverCallbacks(request.callbacks, self.model, job.epochs, job.batches, progress)
            try:
                make_strategy(self.mode).fit(job, stored, on_driver)
            finally:
                self.parameter_server_stats = None if self.mode == "synchronous" else job.server.stats
            return on_driver.history

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
        features: Columns | None = None,
        label: Columns | None = None,
        loader: Loaders | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalid = "error",
    ) -> Any:
        """The loss and metrics over all rows, as ``keras.Model.evaluate`` gives them.

        Metrics are merged from their state over the workers, so that AUC, precision or RMSE are those of the whole data.
        Of a model with several outputs, the loss of each single output is a mean over the batches of all workers, as in
        Keras, so it depends on how rows fall into batches; the total loss does not.

        Args:
            data: As in `fit`.
            y: As in `fit`.
            batch_size: Rows in a batch; ``None`` takes the SparkModel's.
            sample_weight: As in `fit`.
            return_dict: Whether to return figures by name.
            verbose: ``"auto"``, 1 or 2 prints the figures.
            features: As in `fit`.
            label: As in `fit`.
            loader: As in `fit`.
            transform: As in `fit`.
            on_invalid: As in `fit`.

        Returns:
            A list of figures, or a single one where there is only the loss; a dict with ``return_dict=True``.

        Raises:
            ModelError: The model is not compiled.
            ConfigurationError: An argument is unknown or out of range, or the call is made in a callback of asynchronous
                training that leaves no slot free.
            DataError: The data is empty, malformed, or does not fit the model or its loss.
        """
        source, options = inference.check_evaluate(
            self.model,
            data,
            y,
            sample_weight,
            NamedColumns(features, label, loader, fits=transform is None),
            batch_size=self._batch_size(batch_size),
            transform=transform,
            on_invalid=on_invalid,
            verbose=verbose,
        )
        archive = ModelArchive.pack(self.model, self.custom_objects)
        found = inference.evaluate_source(self.model, source, archive, options, self.num_workers)
        return inference.reported(self.model, inference.results(self.model, found), return_dict, verbose)

    @known_arguments
    @interruptible()
    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collect: bool = True,
        verbose: Verbose = 0,
        features: Columns | None = None,
        output_col: str | Sequence[str] | Mapping[str, str] = "prediction",
        loader: Loaders | None = None,
        transform: Transform | None = None,
        on_invalid: OnInvalidToPredict = "error",
    ) -> Any:
        """The model's predictions for all rows, in their order and without a shuffle.

        Args:
            data: A DataFrame (also a stream), arrays of features, or an RDD of features or of ``(x, y)`` rows, whose labels
                are left aside.
            batch_size: Rows in a batch; ``None`` takes the SparkModel's, and for a DataFrame without a loader 1024 if that
                is less.
            collect: ``False`` returns a lazy RDD with one prediction a row instead. A DataFrame is always lazy.
            verbose: ``"auto"``, 1 or 2 prints how many rows were predicted, where the predictions are not lazy.
            features: As in `fit`.
            output_col: The column that a DataFrame gets: a float for one output of shape (batch, 1), else a (nested) array
                of floats. Several outputs: a list of names, or ``{output name: column}``; one name makes the columns
                ``{output_col}_{output name}``.
            loader: As in `fit`.
            transform: As in `fit`; it is called with ``y=None`` and may return ``x`` alone.
            on_invalid: As in `fit`; rows cannot be dropped here. With ``"allow"``, rows of a DataFrame with nulls get null.

        Returns:
            What ``keras.Model.predict`` returns: an array, or a list or dict of arrays where there are several outputs. For
            a DataFrame the same with the predictions beside its rows.

        Raises:
            ConfigurationError: An argument is unknown or out of range, or the call is made in a callback of asynchronous
                training that leaves no slot free.
            DataError: The data is malformed or does not fit the model.
        """
        arguments.on_invalid_to_predict("on_invalid", on_invalid)
        arguments.one_of("verbose", verbose, ("auto", 0, 1, 2))
        if is_frame(data):
            return with_predictions(
                data,
                self.model,
                features=features,
                output_col=output_col,
                batch_size=self._batch_size(batch_size, self.batch_size if loader else max(self.batch_size, BATCH_SIZE)),
                transform=transform,
                loader=loader,
                custom_objects=self.custom_objects,
                on_invalid=on_invalid,
            )
        source, options = inference.check_predict(
            self.model,
            data,
            NamedColumns(features, loader=loader),
            batch_size=self._batch_size(batch_size),
            transform=transform,
            on_invalid=on_invalid,
        )
        archive = ModelArchive.pack_to_predict(self.model, self.custom_objects)
        if not collect:
            return inference.lazily(self.model, source, archive, options)
        parts = inference.predict_source(self.model, source, archive, options, self.num_workers)
        return inference.concatenated(parts, self.model, verbose)

    def get_config(self) -> dict[str, Any]:
        """The settings: ``SparkModel(model, **spark_model.get_config())`` has the same, and begins without a rule's state.

        Returns:
            The arguments of the constructor by name, but for ``model`` and ``custom_objects``; ``rule`` is ``None`` where
            none was given.
        """
        return {name: getattr(self, name) for name in _SETTINGS} | {"rule": self._given_rule}

    @known_arguments
    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save the model with its optimizer and this SparkModel's settings as one ``.keras`` file.

        Plain ``keras.saving.load_model`` reads it too. The file is there whole or not at all: it is written beside the
        target and then renamed.

        Args:
            path: A path of this machine, or a URI that Spark can write (``hdfs://``, ``s3a://``, ``file:``).
            overwrite: ``False`` refuses to replace a file.

        Raises:
            StorageError: The path cannot be written, or is there and ``overwrite`` is off.
            ConfigurationError: The path does not end in ``.keras``.
        """
        save_as(SparkModel.__name__, self, path, overwrite)

    def _settings(self) -> dict[str, Any]:
        """What is saved beside the model, as JSON can hold it."""
        return self.get_config() | {
            "rule": None if self._given_rule is None else rule_config(make_rule(self._given_rule, self.mode)),
            "server_options": dataclasses.asdict(self.server_options) if self.server_options else None,
            "fits": self._fits,
        }

    def _batch_size(self, value: int | None, default: int | None = None) -> int:
        return (default or self.batch_size) if value is None else arguments.integer("batch_size", value)


def save_as(kind: str, spark_model: SparkModel, path: str | os.PathLike[str], overwrite: bool) -> None:
    """Write what `load_saved` reads.

    Args:
        kind: The name of the class that is saved: a SparkModel, or what has one inside.
        spark_model: The SparkModel.
        path: As in `SparkModel.save`.
        overwrite: As in `SparkModel.save`.

    Raises:
        StorageError: The path cannot be written, or exists and ``overwrite`` is off.
        ConfigurationError: The path does not end in ``.keras``.
    """
    _check_suffix(path)
    settings = {"kind": kind, **spark_model._settings()}
    data = persistence.pack(spark_model.model, settings, spark_model._rule_state)
    storage.write_bytes(str(path), data, overwrite)


def load_saved(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> tuple[SparkModel, str]:
    """What a file holds as a SparkModel, and the name of the class that saved it; see `load_spark_model`.

    Raises:
        StorageError: The path cannot be read.
        ModelError: It holds no model, or code that ``safe_mode`` refuses.
        ConfigurationError: The path is none, or ``custom_objects`` holds something else.
    """
    objects = arguments.custom_objects("custom_objects", custom_objects)
    data = storage.read_bytes(arguments.path("path", path))
    try:
        model, settings, rule_state = persistence.unpack(data, objects, safe_mode)
    except ModelError as error:
        raise type(error)(f"{str(path)!r}: {error}") from error.__cause__
    kind, fits = settings.pop("kind", SparkModel.__name__), settings.pop("fits", 0)
    if settings.get("rule"):
        settings["rule"] = rule_from_config(settings["rule"], objects)
    if settings.get("server_options"):
        settings["server_options"] = ParameterServerOptions(**settings["server_options"])
    spark_model = SparkModel(model, custom_objects=objects, **settings)
    spark_model._fits = fits
    spark_model._rule_state = rule_state
    return spark_model, kind


def _check_suffix(path: Any) -> None:
    target = arguments.path("path", path)
    if not target.endswith(".keras"):
        raise ConfigurationError(f"path={target!r} must end in .keras, which is the format that Keras and sparkkeras load.")
