"""`HyperParamModel`: the search for the best model on a cluster."""

from __future__ import annotations

import functools
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.ensembles.ensemble import EnsembleModel
from sparkkeras.errors import ClusterError, ConfigurationError, CustomObjectError, SearchError
from sparkkeras.hyperopt.arguments import FitOptions, call_of, check_function, kept_models, limits_of, sign_of
from sparkkeras.hyperopt.data import check_is_sendable, fit_data
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import Suggested, TrialLedger
from sparkkeras.hyperopt.objective import Objective
from sparkkeras.hyperopt.progress import SearchProgress
from sparkkeras.hyperopt.pruners import Pruner
from sparkkeras.hyperopt.results import Loading, SearchResults
from sparkkeras.hyperopt.search_job import SearchTask, Work, supervise
from sparkkeras.hyperopt.service import SearchService
from sparkkeras.hyperopt.space import Algorithm, Space, make_algorithm
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.hyperopt.workers import SparkWorkers, Workers
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.rpc.transport import make_transport
from sparkkeras.rpc.wire import Secret
from sparkkeras.sources.frame import Columns, Named, is_frame
from sparkkeras.sources.source import is_distributed
from sparkkeras.training.connectivity import check_reach, endpoint

Verbose = Literal["auto", 0, 1, 2]
Mode = Literal["auto", "min", "max"]


class HyperParamModel:
    """Searches hyper-parameters on the workers of a Spark cluster.

    Workers stay in one Spark job. Each asks for the next trial as soon as it is free, and what it gets is suggested then,
    from all trials that have ended so far. Every trial has a process of its own.

    Args:
        sc: A SparkContext or a SparkSession; ``None`` takes the active one, or starts one on this machine.
        num_workers: How many trials run at the same time, at most one for each free slot. ``None``: that many. A trial has
            as many cores and GPUs as a Spark task (``spark.task.cpus``, ``spark.task.resource.gpu.amount``).
        transport: How workers talk to the driver: ``"socket"``, which notices a lost worker at once, or ``"http"``.
        port: The driver's port; 0 takes any that is free.
        server_options: Further settings of what listens on the driver: ``host``, ``bind``, ``encrypt``, ``timeout`` and
            ``lease_seconds``, after which a worker that gives no sign of life is taken for lost.
        custom_objects: Custom classes and functions by name, for models that an objective returns.
        safe_mode: Whether to refuse Python code (lambdas) in models that an objective returns. Like ``custom_objects`` it is
            an attribute, too, which counts whenever a model is loaded: a search that is done need not be repeated for it.

    Attributes:
        seed: What the suggestions and the trials' random numbers were drawn from; ``None`` before the first search.
        seconds: How long the search took, in all calls that went on with it.

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
        transport: str = "socket",
        port: int = 0,
        server_options: ServerOptions | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> None:
        self.num_workers = arguments.optional_number("num_workers", num_workers)
        arguments.one_of("transport", transport, ("socket", "http"))
        if isinstance(server_options, ParameterServerOptions):
            raise ConfigurationError(
                "server_options: ParameterServerOptions are for asynchronous training; trials share no weights. Give "
                "sparkkeras.ServerOptions(...), which has host, bind, encrypt, lease_seconds and timeout."
            )
        self._transport, self._port = transport, arguments.port(port)
        self._server_options = arguments.instance("server_options", server_options, ServerOptions) or ServerOptions()
        self.custom_objects = arguments.custom_objects(custom_objects)
        self._workers = _workers_of(sc)
        self.safe_mode = safe_mode
        self.seed: int | None = None
        self.seconds = 0.0
        self._found: SearchResults | None = None

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
        metric: str = "val_loss",
        mode: Mode = "auto",
        validation_split: float = 0.0,
        validation_data: Any = None,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        class_weight: Mapping[int, float] | None = None,
        features: Columns | None = None,
        label: Columns | None = None,
        sample_weight: str | None = None,
        algo: str | Algorithm = "tpe",
        pruner: str | Pruner | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        loss_threshold: float | None = None,
        early_stop_fn: Callable[..., Any] | None = None,
        max_failures: int | None = None,
        save_to: str | Path | None = None,
        keep_models: int | str = 10,
        verbose: Verbose = "auto",
    ) -> keras.Model | None:
        """Search for the hyper-parameters with the smallest (``mode="max"``: the largest) value.

        Args:
            model: ``build(params)``: gives a compiled model, or ``(model, arguments of fit)``. Hyper-parameters called
                ``epochs``, ``batch_size`` and ``callbacks`` go to ``fit`` as well.
            data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, or a dict of ``x``, ``y``, ``sample_weight`` and
                ``validation_data``: sent to every worker once. Or a function without arguments that returns one of these,
                called once in each worker. Or an RDD or a DataFrame that is small enough to be collected. With ``objective``
                anything that can be pickled.
            space: What to choose from: a dict of ``hyperopt.hp`` expressions, or any other expression of hyperopt's.
            max_evals: So many trials altogether, failed and pruned ones included; ``None``: until the timeout.
            objective: Instead of ``model``: ``objective(params, data)`` returns a loss, or hyperopt's dict with ``loss``,
                ``status`` and, to have it kept, ``model``. It may call `report` after each epoch, or give `ReportCallback`
                to its ``fit``.
            epochs: Epochs of each trial.
            batch_size: Rows in a batch.
            metric: What to optimize: a figure of ``fit``, at its best epoch.
            mode: ``"min"``, ``"max"``, or ``"auto"``: by words in the metric's name; one without such words is refused.
            validation_split: The share of rows, in [0, 1), that validates: the last ones.
            validation_data: ``(x, y)`` or ``(x, y, sample_weight)``, an RDD or a DataFrame to validate on instead.
            callbacks: Keras callbacks; each trial has copies of its own, which run on its worker.
            class_weight: As in ``keras.Model.fit``.
            features: The columns of a DataFrame that the model takes, as in `SparkModel.fit`.
            label: The columns of the labels, likewise.
            sample_weight: The column of the weights, likewise.
            algo: ``"tpe"``, ``"random"``, ``"anneal"``, or a suggest function of hyperopt's.
            pruner: Ends hopeless trials early: ``"median"`` (`MedianPruner`), ``"asha"`` (`ASHAPruner`), one with other
                settings, or an object of your own with their method.
            seed: With the same seed and one worker a search has the same trials. ``None`` draws one.
            timeout: Seconds, from the first trial on, after which none begins and those that run are stopped (within 10
                seconds); they have the value of their best epoch. A search that goes on runs them anew.
            loss_threshold: The search ends with the first trial whose value is at least as good as this.
            early_stop_fn: As in ``hyperopt.fmin``, such as ``no_progress_loss(20)`` of ``hyperopt.early_stop``; called with
                the trials that have ended.
            max_failures: The search fails if more trials than this do. ``None``: if all do.
            save_to: A folder (any path that Spark reaches) that holds every trial that has ended. Called again with it, the
                search goes on there, and repeats nothing.
            keep_models: How many trained models are kept on disk, those of the best trials; ``"all"``, or 0 for none.
            verbose: 0 is silent, 1 keeps a line alive, 2 writes a line for each trial; ``"auto"`` is 1.

        Returns:
            The best model, compiled, with the weights of its best epoch; ``None`` where no models are kept.

        Raises:
            ConfigurationError: An argument is unknown or out of range, the space cannot be searched, the metric is not among
                the figures of ``fit``, or ``save_to`` holds another search.
            DataError: The data is no data, malformed, or not finite.
            CustomObjectError: The function or the space holds something that cannot travel.
            SearchError: All trials failed, or more than ``max_failures``, or none had a value in time; `trials` has
                their tracebacks.
            DriverConnectionError: Workers cannot reach the driver.
            WorkerError: Workers were lost again and again.
        """
        if (model is None) == (objective is None):
            raise ConfigurationError("give one of model= (a function that builds models) and objective= (one that trains).")
        function = check_function("model" if objective is None else "objective", model or objective)
        fitting = FitOptions(epochs, batch_size, metric, validation_split, validation_data, callbacks, class_weight)
        algorithm, searched = make_algorithm(algo), Space(space)
        told = metric if objective is None else "loss"
        sign = sign_of(told, mode)
        limits = limits_of(
            searched,
            sign,
            max_evals=max_evals,
            pruner=pruner,
            timeout=timeout,
            loss_threshold=loss_threshold,
            early_stop_fn=early_stop_fn,
            max_failures=max_failures,
            lease_seconds=self._server_options.lease_seconds,
        )
        arguments.one_of("verbose", verbose, ("auto", 0, 1, 2))
        keep = kept_models(keep_models)
        arguments.optional_number("seed", seed, low=0)
        if not is_frame(data) and (features, label, sample_weight) != (None, None, None):
            raise ConfigurationError("features=, label= and sample_weight= name columns, and data is no DataFrame.")
        read = ByValue.dump(data, "data") if callable(data) else None
        chosen: Objective
        if objective is None:
            chosen = fitting.fit(function, data)
        else:
            fitting.refuse()
            chosen = call_of(function, data)
        folder = None if save_to is None else arguments.path("save_to", save_to)
        workers = self._workers()
        named = Named(features, label, sample_weight=sample_weight)
        shared = None
        if read is None:
            shared = _any_data(workers, data, named) if model is None else _fit_data(workers, data, fitting, named)
        journal = Journal(folder, keep, sign)
        drawn = _seed(seed, journal)
        work = Work(chosen, ByValue.dump(searched.objects, "space"), sign, drawn, read, workers.in_children)
        settings = {
            "parameters": sorted(searched.labels),
            "space": searched.digest,
            "metric": told,
            "mode": "min" if sign > 0 else "max",
            "seed": drawn,
        }
        with journal.opened(settings, searched.params) as before:
            suggest = functools.partial(_suggested, searched, algorithm, drawn, sign)
            ledger = TrialLedger(suggest, limits, time.monotonic, before, journal.write)
            sample = None if shared is None or model is None else shared["x"]
            found = SearchResults(ledger, journal, searched, told, sign, model, sample, work.objects)
            self._found, self.seed = found, drawn
            self._search(workers, work, shared, found, limits.max_evals, 1 if verbose == "auto" else verbose)
        found.check(limits.max_failures)
        return self.best_model

    @property
    def trials(self) -> list[Trial]:
        """What is known of each trial, running ones included, in the order of their numbers."""
        return [] if self._found is None else self._found.trials

    @property
    def reason(self) -> str:
        """Why the search ended before its time, in words; empty where it did not."""
        return "" if self._found is None else self._found.ledger.reason

    @property
    def metric(self) -> str:
        """What was optimized; of an objective ``"loss"``."""
        return "" if self._found is None else self._found.metric

    @property
    def best_trial(self) -> Trial:
        """The best trial.

        Raises:
            SearchError: No trial has a value yet.
        """
        best = self._known().ranked
        if not best:
            reason = f" ({self.reason})" if self.reason else ""
            raise SearchError(
                f"none of {len(self.trials)} trials has a value{reason}: look at trials, and call minimize again."
            )
        return best[0]

    @property
    def best_params(self) -> Any:
        """The hyper-parameters of the best trial."""
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        """The metric of the best trial, at its best epoch."""
        value = self.best_trial.value
        assert value is not None
        return value

    @property
    def best_model(self) -> keras.Model | None:
        """The best trial's model, a new one each time; ``None`` where it was not kept."""
        number = self.best_trial.number
        found = self._known()
        return found.model_of(number, self._loading) if found.journal.has_model(number) else None

    def best_models(self, nb_models: int = 5) -> list[keras.Model]:
        """The trained models of the best trials, the best first; fewer if there are no more trials with a value.

        Raises:
            ConfigurationError: So many were not kept.
            SearchError: There are no trials yet.
        """
        return self._known().models(arguments.whole_number("nb_models", nb_models), self._loading)

    @known_arguments
    def best_ensemble(
        self, nb_models: int = 5, voting: str = "soft", weights: Sequence[float] | None = None
    ) -> EnsembleModel:
        """The models of the best trials as one; see `EnsembleModel`.

        Raises:
            ConfigurationError: So many were not kept, or they cannot vote like that.
            SearchError: There are no trials yet.
        """
        return EnsembleModel(self.best_models(nb_models), voting=voting, weights=weights, custom_objects=self.custom_objects)

    def model_of(self, number: int) -> keras.Model:
        """The trained model of a trial, compiled, with the weights of its best epoch.

        Raises:
            ConfigurationError: There is no such model.
            ModelError: The function that builds models gives another one now.
            SearchError: There are no trials yet.
        """
        return self._known().model_of(number, self._loading)

    def plot(self, path: str | Path) -> None:
        """Draw the search as a PNG: the best value over time, and the value by each hyper-parameter.

        Args:
            path: Where to; a local path.

        Raises:
            ConfigurationError: matplotlib is not installed.
            SearchError: No trial has a value yet.
        """
        from sparkkeras.hyperopt.plot import plot_search

        _ = self.best_trial
        found = self._known()
        plot_search(found.trials, path, metric=found.metric, sign=found.sign, parameters=found.space.parameters)

    @property
    def _loading(self) -> Loading:
        return Loading(self.custom_objects, self.safe_mode)

    def _known(self) -> SearchResults:
        if self._found is None:
            raise SearchError("there are no trials yet: call minimize first.")
        return self._found

    def _search(
        self, workers: Workers, work: Work, data: Any, found: SearchResults, max_evals: int | None, verbose: int
    ) -> None:
        ledger, slots = found.ledger, workers.free_slots
        count = min(self.num_workers or slots, slots)
        if self.num_workers is not None and self.num_workers > slots:
            free = "1 free slot" if slots == 1 else f"{slots} free slots"
            warnings.warn(
                f"num_workers={self.num_workers}, but Spark has {free}, and each trial takes one: no more than {slots} will "
                "run at the same time. Leave num_workers out, or give Spark more cores.",
                stacklevel=4,  # the line that calls minimize
            )
        progress = SearchProgress(verbose, ledger, found.metric, found.sign, max_evals, count, found.space.parameters)
        progress.begin()
        dataset = workers.dataset(count)
        service = SearchService(ledger, found.journal, found.space.encode)
        try:
            with ExitStack() as stack:
                where = endpoint(self._server_options, self._port, workers.driver, 4 + 2 * count)
                serve = make_transport(self._transport).serve
                address = stack.enter_context(serve(service, where, Secret.fresh()))
                if self._server_options.host is not None or not workers.driver.is_local:
                    check_reach(dataset, address)
                try:
                    shared = stack.enter_context(dataset.share(data))
                except pickle.PicklingError as error:
                    raise CustomObjectError(
                        f"data cannot be sent to the workers ({error}): give arrays, or a function that reads them there."
                    ) from error
                task = SearchTask(stack.enter_context(dataset.share(work)), shared, address)
                supervise(dataset, task, ledger, workers.background, progress.tick)
        finally:
            self.seconds = ledger.seconds
            found.journal.drop_drafts()
        progress.end()


def _suggested(
    space: Space, algorithm: Algorithm, seed: int, sign: float, number: int, trials: Sequence[Trial]
) -> Suggested | None:
    """What to try next, drawn from the search's seed and the trial's number."""
    own = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    chosen = space.suggest(algorithm, number, trials, own, sign)
    if chosen is None:
        return None
    params = space.params(chosen)
    space.encode(params)  # says what cannot travel
    return Suggested(chosen, params)


def _workers_of(sc: Any) -> Callable[[], Workers]:
    """Where the trials run; called when a search begins, which may start Spark."""
    if isinstance(sc, Workers):
        return lambda: sc
    return functools.partial(SparkWorkers, _context_of(sc))


def _context_of(sc: Any) -> Any:
    if sc is None or hasattr(sc, "parallelize"):
        return sc
    if type(sc).__module__.startswith("pyspark.sql.connect"):
        raise ClusterError(
            "a search needs a SparkContext: its workers ask the driver for trials, and behind Spark Connect they cannot "
            "reach this process. Run it where the driver is."
        )
    if hasattr(sc, "sparkContext"):
        return sc.sparkContext
    raise ConfigurationError(f"sc={sc!r}: expected a SparkContext, a SparkSession, or None.")


def _fit_data(workers: Workers, data: Any, fitting: FitOptions, named: Named) -> dict[str, Any]:
    validation_data = fitting.validation_data
    if is_distributed(data):
        data = workers.collected(data, named)
    if validation_data is not None and is_distributed(validation_data):
        validation_data = workers.collected(validation_data, named)
    read = fit_data(data, validation_data)
    if "validation_data" in read and fitting.validation_split:
        raise ConfigurationError("give one of validation_split and validation_data.")
    return read


def _any_data(workers: Workers, data: Any, named: Named) -> Any:
    check_is_sendable(data)
    return workers.collected(data, named) if is_distributed(data) else data


def _seed(given: int | None, journal: Journal) -> int:
    """The seed that was given, else that of the search that goes on, else a new one."""
    drawn = int(np.random.default_rng().integers(2**31))
    return int(journal.settings().get("seed", drawn)) if given is None else int(given)
