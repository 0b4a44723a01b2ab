"""The params of the Spark ML stages: names, converters that check values, setters and getters.

Arguments of `SparkModel` keep their names and defaults; column params have Spark ML's names (``featuresCol``).
"""

# ruff: noqa: N815 - Spark's names
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pyspark.ml.param import Param, Params

from sparkkeras import arguments
from sparkkeras.checkpoints.checkpoint import Checkpoint
from sparkkeras.errors import UnknownArgumentError, known_names
from sparkkeras.ml import converters
from sparkkeras.ml.grid import as_grid_value, from_grid_value
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import RULES
from sparkkeras.rpc.options import NETWORK_TRANSPORTS
from sparkkeras.training.strategy import MODES
from sparkkeras.worker.lockstep import GRADIENT_DTYPES

T = TypeVar("T")
P = TypeVar("P", bound="KerasParams")


def param(doc: str, convert: Callable[[str, Any], T]) -> Param[T]:
    """Declare a param; it takes the name of the class attribute that it is assigned to.

    Args:
        doc: Its description, for ``explainParams``.
        convert: ``convert(name, value)`` returns the value to store, or raises `ConfigurationError`.
    """
    return Param(Params._dummy(), "", doc, typeConverter=convert)  # type: ignore[arg-type]  # __init_subclass__ sets the name


class KerasParams(Params):
    """Params that check each value when it is set and have generated setters and getters.

    The accessors of a param ``num_workers`` are ``setNumWorkers`` and ``getNumWorkers``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The generated accessors, for type checkers."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Param)}
        for name, each in declared.items():
            if not each.name:  # made by `param`; a user's subclass may also declare plain Spark Params
                each.name, each.typeConverter = name, partial(_converted, name, cast(Any, each.typeConverter))
            for accessor in (_setter(name), _getter(name)):
                accessor.__qualname__ = f"{cls.__qualname__}.{accessor.__name__}"
                if not hasattr(cls, accessor.__name__):
                    setattr(cls, accessor.__name__, accessor)

    def setParams(self: P, **kwargs: Any) -> P:  # noqa: N802 - Spark's name
        """Set several params.

        Raises:
            UnknownArgumentError: There is no param with one of the names.
            ConfigurationError: A value is out of range.
        """
        return self._set(**kwargs)

    def set(self, param: Param[Any], value: Any) -> None:
        """Set one param.

        Raises:
            ConfigurationError: The value is out of range.
        """
        self._shouldOwn(param)
        self._paramMap[param] = from_grid_value(param.typeConverter(value))

    def getParam(self, paramName: str) -> Param[Any]:  # noqa: N802, N803 - Spark's names
        """Return a param by name.

        Raises:
            UnknownArgumentError: There is no such param.
        """
        if not self.hasParam(paramName):
            raise self._unknown(paramName)
        return super().getParam(paramName)

    def copy(self: P, extra: Mapping[Param[Any], Any] | None = None) -> P:
        """Copy the stage, keeping its uid, and override some params.

        Args:
            extra: Values by param; params of other stages are ignored.

        Raises:
            UnknownArgumentError: A key is not a param.
            ConfigurationError: A value is out of range.
        """
        for param in extra or {}:
            if not isinstance(param, Param):
                if not self.hasParam(str(param)):
                    raise self._unknown(param)
                raise UnknownArgumentError(
                    f"the key {param!r} is a name, not a Param: pass the param itself, {{stage.{param}: value}}."
                )
        return super().copy(dict(extra or {}))

    def _set(self: P, **kwargs: Any) -> P:
        known = {param.name: param for param in self.params}
        for name, value in kwargs.items():
            if name not in known:
                raise self._unknown(name)
            self.set(known[name], value)
        return self

    def _setDefault(self: P, **kwargs: Any) -> P:  # noqa: N802 - Spark's name
        super()._setDefault(**kwargs)
        for name in kwargs:
            param = self.getParam(name)
            self._defaultParamMap[param] = from_grid_value(self._defaultParamMap[param])
        return self

    def _unknown(self, name: object) -> UnknownArgumentError:
        known = [param.name for param in self.params]
        return UnknownArgumentError(f"{type(self).__name__} has no param {name!r}. {known_names(name, known)}")

    def _begin(self, constructor: Callable[..., None]) -> None:
        """Take over the constructor's defaults as the params' defaults, and set the arguments of this call."""
        parameters = inspect.signature(constructor).parameters.values()
        known = [each for each in parameters if self.hasParam(each.name)]
        self._setDefault(**{each.name: each.default for each in known if each.default is not REQUIRED})
        self._set(**{each.name: self._input_kwargs[each.name] for each in known if each.name in self._input_kwargs})


class _Required:
    """Marks a param without a default, where ``None`` is a valid value."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()


def _converted(name: str, convert: Callable[[str, Any], Any], value: Any) -> Any:
    """Check a value and wrap it if a param grid could not be saved with it; see `as_grid_value`."""
    return as_grid_value(name, convert(name, from_grid_value(value)))


def _setter(name: str) -> Callable[..., Any]:
    def setter(self: P, value: Any) -> P:
        return self._set(**{name: value})

    return _named(setter, "set", f"Set the param `{name}`.", name)


def _getter(name: str) -> Callable[..., Any]:
    def getter(self: KerasParams) -> Any:
        return self.getOrDefault(name)

    return _named(getter, "get", f"Return the value of the param `{name}`.", name)


def _named(function: Callable[..., Any], verb: str, doc: str, name: str) -> Callable[..., Any]:
    function.__name__ = verb + "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    function.__doc__ = doc
    return function


# Params that several classes share


class InferenceParams(KerasParams):
    """Params for prediction: input columns, output columns and their tasks."""

    _new_columns: tuple[str, ...] = ("outputCol", "rawPredictionCol", "probabilityCol", "predictionCol")
    """The params that name new columns, for messages."""

    featuresCol = param(
        "the input columns: one column, a list of columns to concatenate, or {input name: column(s)}; None: the column "
        "'features', or the columns named like the model's inputs",
        arguments.optional(converters.columns),
    )
    labelCol = param(
        "the label columns, or {output name: column(s)}; None: the column 'label', or the columns named like the model's "
        "outputs",
        arguments.optional(converters.columns),
    )
    weightCol = param("the column of sample weights; None: all rows weigh the same", arguments.optional(converters.columns))
    outputCol = param(
        "the new column for the model's output; several outputs: a list, {output: column}, or a prefix for the output "
        "names; '' omits it",
        converters.names,
    )
    predictionCol = param(
        "the new column for the prediction: a value, a class index, or (multilabel) an array of label indices; several "
        "outputs: as outputCol",
        converters.names,
    )
    rawPredictionCol = param(
        "the new vector column for the classes' logits or log-probabilities; several outputs: as outputCol",
        converters.names,
    )
    probabilityCol = param(
        "the new vector column for the classes' probabilities; several outputs: as outputCol", converters.names
    )
    outputType = param(
        "the type of outputCol where an output has several units: 'array' or 'vector'",
        converters.choice("array", "vector"),
    )
    task = param(
        f"the outputs' task, or {{output: task}}: one of {', '.join(converters.TASKS)}; 'auto' infers it from the loss",
        converters.task,
    )
    thresholds = param(
        "a threshold for each class, over 0 (one may be 0): the class with the largest probability / threshold is "
        "predicted; several outputs: {output: thresholds}; None: the class with the largest probability",
        arguments.optional(converters.thresholds),
    )
    inferenceBatchSize = param("rows per batch when predicting", converters.number())
    custom_objects = param(
        "custom classes and functions by name, where they cannot be found from the model",
        arguments.optional(arguments.custom_objects),
    )
    loader = param(
        "converts a column into a model input, such as image_loader(...), or {input: loader}",
        arguments.optional(converters.loaders),
    )


class TrainingParams(InferenceParams):
    """Params for training: the arguments of `SparkModel` and of `SparkModel.fit`."""

    model = param("the compiled Keras model; each fit trains a copy of it", arguments.optional(converters.keras_model))
    validationIndicatorCol = param(
        "a column: rows where it is true or not 0 are used for validation, not for training",
        arguments.optional(converters.text),
    )
    epochs = param("how many epochs to train", converters.number())
    batch_size = param("rows in a batch of one worker", converters.number())
    learning_rate = param("the optimizer's learning rate; None: the compiled one", arguments.optional(converters.positive))
    mode = param(f"how workers train together: one of {', '.join(MODES)}", converters.choice(*MODES))
    frequency = param(
        "how long a worker trains between two exchanges: 'epoch', 'batch', a number of batches; None: the mode's default",
        arguments.optional(arguments.frequency),
    )
    rule = param(
        f"how workers' updates are combined: one of {', '.join(RULES)}, or an UpdateRule; None: the mode's default",
        arguments.optional(converters.rule),
    )
    gradient_dtype = param(
        f"the dtype in which mode='allreduce' sends gradients: one of {', '.join(GRADIENT_DTYPES)}; None: their own",
        partial(arguments.gradient_dtype, known=GRADIENT_DTYPES),
    )
    max_restarts = param(
        "how often mode='allreduce' continues after a worker has failed; None: 3 times",
        partial(arguments.optional_integer, low=0),
    )
    num_workers = param("the number of workers; None: one for each partition", arguments.optional_integer)
    parameter_server_mode = param(
        f"the transport to the parameter server: one of {', '.join(NETWORK_TRANSPORTS)}; None: {NETWORK_TRANSPORTS[0]}",
        arguments.optional(converters.choice(*NETWORK_TRANSPORTS)),
    )
    port = param("the parameter server's port; None or 0: any free port", arguments.optional(arguments.port))
    server_options = param(
        "further settings: a ParameterServerOptions", partial(arguments.instance, kind=ParameterServerOptions)
    )
    seed = param(
        "the seed of shuffles, dropout masks and other random numbers; None: random",
        partial(arguments.optional_integer, low=0),
    )
    callbacks = param(
        "Keras callbacks that run on the driver after each epoch; they are not saved",
        arguments.optional(converters.callbacks),
    )
    worker_callbacks = param(
        "Keras callbacks that run on the workers; they are not saved", arguments.optional(converters.callbacks)
    )
    validation_split = param(
        "the fraction of rows, in [0, 1), used for validation: the last ones of each partition", arguments.fraction
    )
    validation_data = param(
        "a DataFrame to validate on, with the columns of the training data; it is not saved",
        arguments.optional(converters.data_frame),
    )
    validation_freq = param("validate every this many epochs", converters.number())
    validation_batch_size = param("rows in a validation batch; None: batch_size", arguments.optional_integer)
    shuffle = param(
        "whether each worker shuffles its rows before each epoch; 'global' also redistributes them at random",
        arguments.shuffle,
    )
    class_weight = param("a weight for each class, {class index: weight}, or 'balanced'", arguments.class_weight_or_balanced)
    initial_epoch = param("the epoch to start at, counted from 0", converters.number(low=0))
    steps_per_epoch = param(
        "the maximum number of batches of one worker in an epoch; None: all of its rows", arguments.optional_integer
    )
    transform = param(
        "transform(x, y) -> (x, y) on each batch, on the workers; for prediction y is None and x alone may be returned",
        arguments.function,
    )
    handleInvalid = param(
        "what to do with rows that hold nulls, NaN or infinite values: 'error', or 'skip' (drop)",
        converters.choice("error", "skip"),
    )
    checkpoint = param(
        "where and how often to write checkpoints: a Checkpoint; None: nowhere", partial(arguments.instance, kind=Checkpoint)
    )
    resume = param("whether to continue from the newest checkpoint", arguments.flag)
    verbose = param("0: silent, 1: a progress bar, 2: one line per epoch; 'auto': 1", converters.choice("auto", 0, 1, 2))
