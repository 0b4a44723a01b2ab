"""The params of the classes in this room: names, checked values, setters and getters.

`SparkModel`'s arguments keep their names and defaults; columns are named as Spark ML names them.
"""

# ruff: noqa: N815 - Spark's names
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pyspark.ml.param import Param, Params

from sparkkeras.errors import UnknownArgumentError, known_names
from sparkkeras.ml import values
from sparkkeras.ml.grid import as_grid_value, from_grid_value
from sparkkeras.parameter.rules import RULES
from sparkkeras.training.strategy import MODES

T = TypeVar("T")
P = TypeVar("P", bound="KerasParams")


def param(doc: str, convert: Callable[[str, Any], T]) -> Param[T]:
    """A param of a class of this room; it is called as the attribute that it is assigned to.

    Args:
        doc: What it is for.
        convert: Called with its name and a value; returns what is kept, or raises `ConfigurationError`.
    """
    return Param(Params._dummy(), "", doc, typeConverter=convert)  # type: ignore[arg-type]  # __init_subclass__ gives it the name


class KerasParams(Params):
    """Params whose every value is checked when it is set, with a setter and a getter for each.

    The accessors of a param ``num_workers`` are called ``setNumWorkers`` and ``getNumWorkers``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The accessors, which are made below."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Param)}
        for name, each in own.items():
            if not each.name:  # made by `param`; a subclass may have plain ones of Spark's
                each.name, each.typeConverter = name, partial(_converted, name, cast(Any, each.typeConverter))
            for accessor in (_setter(name), _getter(name)):
                accessor.__qualname__ = f"{cls.__qualname__}.{accessor.__name__}"
                if not hasattr(cls, accessor.__name__):
                    setattr(cls, accessor.__name__, accessor)

    def setParams(self: P, **kwargs: Any) -> P:  # noqa: N802 - Spark's name
        """Set several params.

        Raises:
            UnknownArgumentError: There is no param of a name.
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
        """The param of a name.

        Raises:
            UnknownArgumentError: There is none.
        """
        if not self.hasParam(paramName):
            raise self._unknown(paramName)
        return super().getParam(paramName)

    def copy(self: P, extra: Mapping[Param[Any], Any] | None = None) -> P:
        """A copy with the same uid, and other values of some params.

        Args:
            extra: The values by param; those of other stages are left aside.

        Raises:
            UnknownArgumentError: A key is no param.
            ConfigurationError: A value is out of range.
        """
        for param in extra or {}:
            if not isinstance(param, Param):
                if not self.hasParam(str(param)):
                    raise self._unknown(param)
                raise UnknownArgumentError(
                    f"{param!r} is no param: give the param itself, such as {{stage.{param}: value}}."
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
        """Take the constructor's defaults as the params', and set what it was called with."""
        parameters = inspect.signature(constructor).parameters.values()
        known = [each for each in parameters if self.hasParam(each.name)]
        self._setDefault(**{each.name: each.default for each in known if each.default is not REQUIRED})
        self._set(**{each.name: self._input_kwargs[each.name] for each in known if each.name in self._input_kwargs})


class _Required:
    """The default of an argument that has none, where ``None`` means something."""

    def __repr__(self) -> str:
        return "<to be given>"


REQUIRED: Any = _Required()


def _converted(name: str, convert: Callable[[str, Any], Any], value: Any) -> Any:
    """What Spark's grids keep of a value."""
    return as_grid_value(name, convert(name, from_grid_value(value)))


def _setter(name: str) -> Callable[..., Any]:
    def setter(self: P, value: Any) -> P:
        return self._set(**{name: value})

    return _called(setter, "set", f"Set the param `{name}`.", name)


def _getter(name: str) -> Callable[..., Any]:
    def getter(self: KerasParams) -> Any:
        return self.getOrDefault(name)

    return _called(getter, "get", f"The value of the param `{name}`.", name)


def _called(function: Callable[..., Any], verb: str, doc: str, name: str) -> Callable[..., Any]:
    function.__name__ = verb + "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    function.__doc__ = doc
    return function


# The params that several classes have


class InferenceParams(KerasParams):
    """What it takes to turn rows into predictions, in columns."""

    featuresCol = param(
        "the columns that the model takes: one column, several (laid side by side), or {input name: column(s)}; None: the "
        "column 'features', or columns named as the model's inputs",
        values.optional(values.columns),
    )
    labelCol = param(
        "the columns of the labels, likewise by output; None: the column 'label', or columns named as the model's outputs",
        values.optional(values.columns),
    )
    weightCol = param("the column of the rows' weights; None: all rows weigh the same", values.optional(values.columns))
    outputCol = param(
        "the new column of what the model gives; several outputs: a list, {output: column}, or a name that each output's "
        "name is appended to; '' leaves it out",
        values.names,
    )
    predictionCol = param(
        "the new column of the predicted number: a value, the number of a class, or (multilabel) an array of such; likewise",
        values.names,
    )
    rawPredictionCol = param(
        "the new column of the vector of the classes' logits, or of the logarithms of their probabilities; likewise",
        values.names,
    )
    probabilityCol = param("the new column of the vector of the classes' probabilities; likewise", values.names)
    outputType = param(
        "what outputCol holds where an output has several units: 'array' or 'vector'", values.choice("array", "vector")
    )
    task = param(
        f"what the outputs mean, or {{output: what it means}}: one of {', '.join(values.TASKS)}; 'auto' asks the loss",
        values.task,
    )
    thresholds = param(
        "a threshold for each class, over 0 (one may be 0): the class with the largest probability / threshold is "
        "predicted; several outputs: {output: thresholds}; None: the class with the largest probability",
        values.optional(values.thresholds),
    )
    inferenceBatchSize = param("rows that the model is called on at a time to predict", values.number())
    custom_objects = param(
        "custom classes and functions by name, where they cannot be found in the model",
        values.optional(values.by_name),
    )
    loader = param(
        "what turns a column into an input of the model, such as image_loader(...), or {input: loader}",
        values.optional(values.loaders),
    )


class TrainingParams(InferenceParams):
    """What `SparkModel` and its ``fit`` take."""

    model = param("the compiled Keras model that each fit trains a copy of", values.optional(values.network))
    validationIndicatorCol = param(
        "a column whose rows that are true, or not 0, validate and do not train", values.optional(values.text)
    )
    epochs = param("how many epochs to train", values.number())
    batch_size = param("rows in a batch of one worker", values.number())
    learning_rate = param("the optimizer's learning rate; None: as it was compiled", values.optional(values.positive))
    mode = param(f"how workers train together: one of {', '.join(MODES)}", values.choice(*MODES))
    frequency = param(
        "how long a worker trains between two exchanges: 'epoch', 'batch', or a number of batches", values.frequency
    )
    rule = param(
        f"what becomes of workers' weights: one of {', '.join(RULES)}, or an UpdateRule; None: the mode's plain one",
        values.optional(values.rule),
    )
    num_workers = param("how many workers share the rows; None: one for each partition", values.optional_number())
    parameter_server_mode = param(
        "how workers talk to the parameter server: 'http' or 'socket'", values.choice("http", "socket")
    )
    port = param("the parameter server's port; 0: any that is free", values.port)
    server_options = param("further settings: a ParameterServerOptions", values.server_options)
    seed = param("what shuffles, dropout masks and the like are drawn from; None draws one", values.optional_number(low=0))
    callbacks = param(
        "Keras callbacks that run on the driver once an epoch; they are not saved", values.optional(values.callbacks)
    )
    worker_callbacks = param(
        "Keras callbacks that run on the workers; they are not saved", values.optional(values.callbacks)
    )
    validation_split = param(
        "the share of rows, in [0, 1), that validates: the last ones of each partition", values.fraction
    )
    validation_freq = param("validate every so many epochs", values.number())
    validation_batch_size = param("rows in a batch of validation; None: batch_size", values.optional_number())
    shuffle = param("whether each worker goes through its rows in another order each epoch", values.flag)
    class_weight = param("a weight for each class, {class number: weight}", values.optional(values.class_weight))
    initial_epoch = param("the epoch to begin at", values.number(low=0))
    steps_per_epoch = param(
        "at most so many batches of each worker in an epoch; None: all of its rows", values.optional_number()
    )
    transform = param(
        "transform(x, y) -> (x, y) on each batch, on the workers; to predict, y is None and x alone may be returned",
        values.optional(values.function),
    )
    handleInvalid = param(
        "what to do with rows that hold nulls, NaN or infinite values: 'error', or 'skip' them",
        values.choice("error", "skip"),
    )
    verbose = param(
        "0 is silent, 1 keeps a line alive, 2 writes a line an epoch; 'auto' is 1", values.choice("auto", 0, 1, 2)
    )
