"""`HyperParamModel`: distributed hyper-parameter search on a Spark cluster."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import keras
import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.ensembles.ensemble import EnsembleModel
from sparkkeras.errors import ConfigurationError, CustomObjectError, counted, warn
from sparkkeras.events import EventListener, Events, PhaseStarted
from sparkkeras.hyperopt.algorithms import make_algorithm, make_pruner, make_storage
from sparkkeras.hyperopt.arguments import (
    TrialFitArguments,
    make_limits,
    make_objective,
    metrics_of,
    names_of,
    num_kept_models,
)
from sparkkeras.hyperopt.data import ReadRows, SearchData, check_columns, prepared, reader_of
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import TrialLedger
from sparkkeras.hyperopt.progress import SearchProgress, TrialEvents, started
from sparkkeras.hyperopt.results import SearchResults, SearchView
from sparkkeras.hyperopt.saving import TrialSaver
from sparkkeras.hyperopt.search_job import SearchTask, TrialSettings, supervise
from sparkkeras.hyperopt.service import SearchService
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import SearchStudy
from sparkkeras.hyperopt.workers import ClusterWorkers, Workers
from sparkkeras.modeling.archive import load_bytes
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc.options import NETWORK_TRANSPORTS, ParameterServerOptions, ServerOptions
from sparkkeras.sources.copies import copied
from sparkkeras.sources.frame import ColumnMapping, Columns
from sparkkeras.sources.source import is_distributed
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.connect import active_cluster, cluster_of
from sparkkeras.spark.connectivity import serving
from sparkkeras.worker.device import forking_environment

Verbose = Literal["auto", 0, 1, 2]
Mode = Literal["auto", "min", "max"]


class HyperParamModel(SearchView):
    """Searches hyper-parameters on the workers of a Spark cluster.

    The whole search is one Spark job. A worker asks the driver for a new trial as soon as it is free, and the search
    algorithm then suggests it from all trials that have ended so far. Every trial runs in a separate process.

    Args:
        sc: A SparkContext, or a SparkSession, also one of Spark Connect if the workers can connect to this process; ``None``
            uses the active one, or starts one on this machine.
        num_workers: The number of trials that run at the same time, at most one per free task slot. ``None`` uses all
            free slots.
        cores_per_trial: The CPU cores of each trial; ``None``: those of a Spark task (``spark.task.cpus``). On a cluster,
            Spark assigns these and GPUs by a resource profile for the search. With a local master, fewer trials run at the
            same time.
        gpus_per_trial: The GPUs of each trial; ``None``: those of a Spark task (``spark.task.resource.gpu.amount``). Not
            with a local master.
        transport: How workers connect to the driver: ``"socket"``, which notices a lost worker immediately, or ``"http"``.
        port: The port that the driver listens on; 0 chooses a free one.
        server_options: Further settings of the driver's server: ``host``, ``bind``, ``encrypt``, ``timeout`` and
            ``lease_seconds``, the time without a heartbeat after which a worker counts as lost.
        custom_objects: Custom classes and functions by name, for loading models that an objective returns.
        safe_mode: Whether to reject Python code (lambdas) in models that an objective returns. Like ``custom_objects``, it
            is also an attribute, which is read whenever a model is loaded, so a finished search need not be repeated to
            change it.

    Attributes:
        seed: The seed of the suggestions and of the trials' random numbers; ``None`` before the first search.
        seconds: The duration of the search in seconds, including earlier calls that it resumed.

    Raises:
        ConfigurationError: An argument is unknown or out of range.

    Example::

        def build(params):
            model = keras.Sequential([
                keras.Input((64,)), keras.layers.Dense(params["units"], "relu"), keras.layers.Dense(10, "softmax"),
            ])
            model.compile(keras.optimizers.Adam(params["lr"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
            return model

        search = HyperParamModel(sc)
        best = search.minimize(model=build, data=(x, y), space=space, max_evals=50, epochs=20, validation_split=0.2)
    """

    @known_arguments
    def __init__(
        self,
        sc: Any = None,
        num_workers: int | None = None,
        *,
        cores_per_trial: int | None = None,
        gpus_per_trial: int | None = None,
        transport: str = "socket",
        port: int = 0,
        server_options: ServerOptions | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> None:
        self.num_workers = arguments.optional_integer("num_workers", num_workers)
        arguments.one_of("transport", transport, NETWORK_TRANSPORTS)
        if isinstance(server_options, ParameterServerOptions):
            raise ConfigurationError(
                "server_options: ParameterServerOptions are for asynchronous training; trials share no weights. Give "
                "sparkkeras.ServerOptions(...), which has host, bind, encrypt, lease_seconds and timeout."
            )
        self._transport, self._port = transport, arguments.port("port", port)
        self._server_options = arguments.instance("server_options", server_options, ServerOptions) or ServerOptions()
        self.custom_objects = arguments.custom_objects("custom_objects", custom_objects)
        cores = arguments.optional_integer("cores_per_trial", cores_per_trial)
        gpus = arguments.optional_integer("gpus_per_trial", gpus_per_trial)
        self._workers = _workers_factory(sc, cores, gpus)
        self.safe_mode = safe_mode
        self.seed: int | None = None
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"HyperParamModel(num_workers={self.num_workers}, trials={len(self.trials)})"

    @known_arguments
    def minimize(
        self,
        model: Callable[[Any], Any] | None = None,
        data: Any = None,
        space: Any = None,
        max_evals: int | None = None,
        *,
        objective: Callable[..., Any] | None = None,
        epochs: int = 1,
        batch_size: int = 32,
        metric: str | Sequence[str] = "val_loss",
        mode: Mode | Sequence[Mode] = "auto",
        validation_split: float = 0.0,
        validation_data: Any = None,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        class_weight: Mapping[int, float] | None = None,
        features: Columns | None = None,
        label: Columns | None = None,
        sample_weight: str | None = None,
        algo: str | BaseSampler | Callable[..., Any] = "tpe",
        pruner: str | BasePruner | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        loss_threshold: float | None = None,
        early_stop_fn: Callable[..., Any] | None = None,
        max_failures: int | None = None,
        save_to: str | Path | None = None,
        storage: str | optuna.storages.BaseStorage | None = None,
        keep_models: int | str = 10,
        verbose: Verbose = "auto",
        monitor: EventListener | Sequence[EventListener] | None = None,
    ) -> keras.Model | None:
        """Search for the hyper-parameters with the smallest (``mode="max"``: the largest) value.

        Args:
            model: ``build(params)``: returns a compiled model, or ``(model, fit_arguments)``. Hyper-parameters named
                ``epochs``, ``batch_size`` and ``callbacks`` are passed to ``fit`` as well. Without ``space``, it gets a
                `HyperParameters` instead, with the methods of KerasTuner's ``hp`` and of Optuna's ``trial``, and each call
                chooses a value.
            data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, or a dict with ``x``, ``y``, ``sample_weight`` and
                ``validation_data``: sent to every worker once. Or a function without arguments that returns one of these;
                each worker calls it once. Or an RDD or a DataFrame: more than 64 MiB of rows do not pass through the driver,
                but are copied to the disk of each executor, where trials read them batch by batch. With ``objective``, any
                object that can be pickled.
            space: The search space: a dict from names to distributions (`choice`, `integer`, `loguniform`, `normal`,
                `uniform`), or ``hyperopt.hp`` expressions. ``None``: trials define it, see ``model``.
            max_evals: The total number of trials, including failed and pruned ones; ``None`` continues until ``timeout``.
            objective: Use instead of ``model``: ``objective(params, data)`` returns a loss, or hyperopt's dict with
                ``loss``, ``status`` and optionally ``model``, the trained model to keep. It may call `report` after each
                epoch, or pass `ReportCallback` to its ``fit``.
            epochs: The number of epochs of each trial.
            batch_size: The number of rows in a batch.
            metric: The metric to optimize, named as in the logs of ``fit``; its value at the best epoch counts. Or a
                sequence of several: all count at the first one's best epoch. With ``objective``, several names mean that it
                returns a sequence of losses in their order.
            mode: ``"min"``, ``"max"``, or ``"auto"``, which infers the direction from words in the metric's name and raises
                an error if there are none. For several metrics, one for all or a sequence.
            validation_split: The fraction of rows, in [0, 1), to use for validation: the last ones.
            validation_data: ``(x, y)`` or ``(x, y, sample_weight)``, an RDD or a DataFrame to validate on instead.
            callbacks: Keras callbacks; each trial has separate copies, which run on its worker.
            class_weight: As in ``keras.Model.fit``.
            features: The feature columns of a DataFrame, as in `SparkModel.fit`.
            label: The label columns of a DataFrame, as in `SparkModel.fit`.
            sample_weight: The sample weight column of a DataFrame, as in `SparkModel.fit`.
            algo: The search algorithm, by name: Optuna's ``"tpe"`` (multivariate, for groups of conditional
                hyper-parameters), ``"random"``, ``"cmaes"``, ``"gp"``, ``"nsgaii"``, hyperopt's ``"anneal"``, ``"atpe"``. Or
                a sampler of Optuna, which has its own seed (a new object for each search: it may keep what it knows of a
                study), or a suggest function of hyperopt, such as ``hyperopt.tpe.suggest``, which needs ``space``.
            pruner: Ends unpromising trials early, a pruner of Optuna or its name: ``"median"``, ``"percentile"``,
                ``"asha"`` (successive halving), ``"hyperband"``, ``"patient"``. A step is an epoch, counted from 1.
            seed: The random seed: with the same seed and one worker, a search has the same trials. ``None`` draws one.
            timeout: Seconds after the start of the first trial at which the search starts no more trials and stops the
                running ones (within 10 seconds). Stopped trials have the value of their best epoch; a resumed search runs
                them again.
            loss_threshold: The search ends with the first trial whose value is at least as good as this.
            early_stop_fn: As in ``hyperopt.fmin``, for example ``no_progress_loss(20)`` from ``hyperopt.early_stop``; called
                with the trials that have ended.
            max_failures: The search fails if more than this number of trials fail. ``None``: only if all fail.
            save_to: A folder (any path that Spark can access) in which the search saves every trial that has ended. Another
                call with the same folder resumes the search and repeats no finished trial.
            storage: A storage of Optuna, or its URL, such as ``"sqlite:///search.db"``, for the study with the name
                ``"sparkkeras"``, which several programs may share; ``max_evals`` counts the trials that it has at the start.
                ``save_to`` then only has the models, and identifies the search: another call with the same folder repeats
                the trials that were running when this one was killed.
            keep_models: How many trained models to keep on disk, those of the best trials; ``"all"``, or 0 for none. With
                several metrics, all models of `pareto_front` are kept, and others up to this number in total.
            verbose: 0 is silent, 1 shows a progress line, 2 writes a line for each trial; ``"auto"`` is 1.
            monitor: A `Monitor`, or other objects with a method ``on_event`` (see `sparkkeras.events`), which gets each
                trial when it starts, reports an epoch and ends.

        Returns:
            The best model, compiled, with the weights of its best epoch; ``None`` if no models are kept, or with several
            metrics: see `pareto_front` and `model_of`.

        Raises:
            ConfigurationError: An argument is unknown or out of range, the space cannot be searched, the metric is not in
                the logs of ``fit``, or ``save_to`` holds another search.
            DataError: The data has an unsupported type, is malformed, or is not finite.
            CustomObjectError: The function or the space holds an object that cannot be sent to workers.
            SearchError: All trials failed, more than ``max_failures`` failed, or none had a value before the search ended;
                `trials` has their tracebacks.
            DriverConnectionError: Workers cannot reach the driver.
            WorkerError: Workers were lost repeatedly.
        """
        fit_arguments = TrialFitArguments(
            epochs, batch_size, metric, validation_split, validation_data, callbacks, class_weight
        )
        read_data, columns = reader_of(data), ColumnMapping(features, label, sample_weight=sample_weight)
        trial_objective = make_objective(
            model, objective, fit_arguments, has_rows=read_data is None, has_data=data is not None
        )
        search_space = Space(space)
        trials_know_epochs = objective is not None or search_space.is_open or "epochs" in search_space.parameters
        metrics = metrics_of(metric if objective is None or len(names_of(metric)) > 1 else "loss", mode)
        algorithm, algorithm_name = make_algorithm(algo, search_space, metrics)
        trial_pruner = make_pruner(pruner, None if trials_know_epochs else epochs)
        limits = make_limits(
            search_space,
            metrics,
            max_evals=max_evals,
            pruner=pruner,
            timeout=timeout,
            loss_threshold=loss_threshold,
            early_stop_fn=early_stop_fn,
            max_failures=max_failures,
            lease_seconds=self._server_options.lease_seconds,
        )
        arguments.one_of("verbose", verbose, ("auto", 0, 1, 2))
        monitors = arguments.listeners("monitor", monitor)
        num_models = num_kept_models(keep_models)
        arguments.optional_integer("seed", seed, low=0)
        check_columns(data, columns)
        folder = None if save_to is None else arguments.path("save_to", save_to)
        verbose = 1 if verbose == "auto" else verbose
        progress = SearchProgress(verbose, metrics, search_space.parameters)
        events = Events([*([progress] if verbose else []), *monitors])
        shared = make_storage(storage)
        with progress.status.showing("Starting workers ..."):
            workers = self._workers()
        journal = Journal(folder, num_models, *metrics.values(), has_study=shared is None)
        objects = ByValue.dump(search_space.objects, "space")
        with ExitStack() as stack:
            opened = stack.enter_context(journal.opened())
            search_id = "" if shared is None else folder or uuid.uuid4().hex
            study = SearchStudy(search_space, metrics, algorithm, seed, trial_pruner, shared or opened, search_id)
            self.seed = study.seed
            begins = started(
                getattr(objective or model, "__name__", "search"),
                search_space,
                metrics,
                limits.max_evals,
                algo=algorithm_name,
                pruner=pruner if isinstance(pruner, str) or pruner is None else type(pruner).__name__,
                epochs=epochs if objective is None else None,
                batch_size=batch_size if objective is None else None,
                timeout=timeout,
                save_to=folder,
                seed=study.seed,
            )
            stack.enter_context(events.running(begins))
            stack.enter_context(watching_spark(events))
            search_data = SearchData()
            if read_data is None:
                reading = _reading(data, fit_arguments if objective is None else None, workers, columns, events)
                search_data = stack.enter_context(reading)
            saver = TrialSaver(journal)
            ledger = TrialLedger(study, limits, time.monotonic, save=saver.save)
            journal.add(ledger.finished)
            sample = None if model is None else search_data.sample
            results = SearchResults(ledger, journal, search_space, metrics, model, sample, objects)
            self._results = results
            settings = TrialSettings(
                trial_objective,
                objects,
                metrics,
                study.seed,
                read_data,
                workers.in_child_processes,
                tuple(search_data.kept),
                search_data.labels,
            )
            with saver.running(ledger):
                self._search(workers, settings, search_data, results, events, progress)
            results.check(limits.max_failures)
            if search_space.is_open and len(self.trials) > 1 and not any(trial.params for trial in self.trials):
                warn(
                    "the function chose no hyper-parameter, so all trials are alike: have it call hp.Int, "
                    "trial.suggest_float or the like, or pass space=."
                )
        return self.best_model if len(metrics) == 1 else None

    @property
    def best_model(self) -> keras.Model | None:
        """The best trial's model, loaded anew at each access; ``None`` if it was not kept."""
        number = self.best_trial.number
        results = self._require_results()
        return results.model_of(number, self._load) if results.journal.has_model(number) else None

    def best_models(self, nb_models: int = 5) -> list[keras.Model]:
        """The trained models of the best trials, the best first; fewer if fewer trials have a value.

        Raises:
            ConfigurationError: Fewer models were kept, or the search has several metrics.
            SearchError: There are no trials yet.
        """
        return self._require_results().models(arguments.integer("nb_models", nb_models), self._load)

    @known_arguments
    def best_ensemble(
        self, nb_models: int = 5, voting: str = "soft", weights: Sequence[float] | None = None
    ) -> EnsembleModel:
        """Combine the models of the best trials into one; see `EnsembleModel`.

        Raises:
            ConfigurationError: Fewer models were kept, the models do not support this kind of voting, or the search has
                several metrics.
            SearchError: There are no trials yet.
        """
        return EnsembleModel(self.best_models(nb_models), voting=voting, weights=weights, custom_objects=self.custom_objects)

    def model_of(self, number: int) -> keras.Model:
        """The trained model of a trial, compiled, with the weights of its best epoch.

        Raises:
            ConfigurationError: There is no such trial, or its model was not kept.
            ModelError: The function that builds models now returns a different model.
            SearchError: There are no trials yet.
        """
        return self._require_results().model_of(number, self._load)

    def _load(self, data: bytes) -> keras.Model:
        return load_bytes(data, self.custom_objects, safe_mode=self.safe_mode)

    def _search(
        self,
        workers: Workers,
        settings: TrialSettings,
        data: SearchData,
        results: SearchResults,
        events: Events,
        progress: SearchProgress,
    ) -> None:
        ledger, slots = results.ledger, workers.free_slots
        count = min(self.num_workers or slots, slots)
        if self.num_workers is not None and self.num_workers > slots:
            warn(
                f"num_workers={self.num_workers}, but Spark has room for {counted(slots, 'trial')}: no more than {slots} "
                "will run at the same time. Omit num_workers, or give Spark more cores."
            )
        trials = TrialEvents(events, ledger, results.space.parameters)
        trials.begin(count)
        if ledger.is_over:  # a search that is resumed, and has nothing left to do
            self.seconds = ledger.seconds
            return

        def tick() -> None:
            trials.tick()
            progress.refresh()

        dataset = workers.dataset(count)
        service = SearchService(ledger, results.journal, results.space.encode)
        try:
            with ExitStack() as stack:
                address = stack.enter_context(
                    serving(self._transport, service, self._server_options, self._port, workers.driver, count)
                )
                workers.check_connection(count, address)
                try:
                    shared = stack.enter_context(dataset.share(data.sent))
                except pickle.PicklingError as error:
                    raise CustomObjectError(
                        f"data cannot be sent to the workers ({error}): give arrays, or a function that reads them on the "
                        "workers."
                    ) from error
                task = SearchTask(stack.enter_context(dataset.share(settings)), shared, address)
                rows = tuple(data.kept.values())
                run = stack.enter_context(copied(rows, count)).run if rows else dataset.run
                supervise(run, task, ledger, workers.background, tick)
        finally:
            self.seconds = ledger.seconds
            trials.tick()
        if ledger.reason:
            events.emit(PhaseStarted(f"The search ended early: {ledger.reason}"))


def _workers_factory(sc: Any, cores: int | None, gpus: int | None) -> Callable[[], Workers]:
    """A factory of the workers; `minimize` calls it, since it may start Spark."""
    if isinstance(sc, Workers):
        return lambda: sc
    if sc is not None and not hasattr(sc, "parallelize") and not hasattr(sc, "createDataFrame"):
        raise ConfigurationError(f"sc={sc!r}: expected a SparkContext, a SparkSession, or None.")

    def made() -> Workers:
        cluster = active_cluster(forking_environment) if sc is None else cluster_of(sc, forking_environment)
        return ClusterWorkers(cluster.with_task(cores, gpus, "trial"))

    return made


@contextmanager
def _reading(
    data: Any,
    fit_arguments: TrialFitArguments | None,
    workers: Workers,
    columns: ColumnMapping,
    events: Events,
) -> Iterator[SearchData]:
    """The data of a search for as long as the context is open.

    Args:
        data: The data, as the user gave it.
        fit_arguments: The arguments for fitting models; ``None`` for an objective, which gets the data as it is.
        workers: The workers, which read an RDD or a DataFrame.
        columns: The columns of a DataFrame.
        events: Where to report that rows are read.
    """
    validation_data = None if fit_arguments is None else fit_arguments.validation_data
    in_dict = data.get("validation_data") if fit_arguments is not None and isinstance(data, Mapping) else None
    has_validation_data = validation_data is not None or in_dict is not None
    if fit_arguments is not None and fit_arguments.validation_split and has_validation_data:
        raise ConfigurationError("give only one of validation_split and validation_data.")
    if is_distributed(data) or is_distributed(validation_data):
        events.emit(PhaseStarted("Storing rows on the workers"))

    def keep(rows: Any, number: int) -> AbstractContextManager[ReadRows]:
        return workers.keep(rows, columns, number)

    with prepared(data, keep, fit_arguments is not None, validation_data) as search_data:
        yield search_data
