"""The params of the Spark ML stages: their declarations, setters and getters.

They hold Python values, each of which a function checks when it is set: Spark's converters know numbers and strings only.
"""

# ruff: noqa: N815 - Spark's names
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import keras
from pyspark.ml.param import Param, Params
from pyspark.sql import DataFrame

from sparkkeras import arguments
from sparkkeras.arguments import Argument, declared, documented
from sparkkeras.errors import UnknownArgumentError, known_names
from sparkkeras.ml import converters
from sparkkeras.ml.converters import Names
from sparkkeras.ml.persistence import as_grid_value, from_grid_value
from sparkkeras.scoring.backends import Backend, known_backend
from sparkkeras.scoring.columns import BATCH_SIZE
from sparkkeras.sources.frame import Columns
from sparkkeras.training.fit_arguments import (
    LoaderArguments,
    ModeArguments,
    ModelArguments,
    ObjectArguments,
    SettingArguments,
    TrainingArguments,
)

P = TypeVar("P", bound="KerasParams")


class KerasParams(Params):
    """Params that check each value when it is set and have generated setters and getters.

    The accessors of a param ``num_workers`` are ``setNumWorkers`` and ``getNumWorkers``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The generated accessors, for type checkers."""

    def __init_subclass__(cls, declares: type | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if declares is not None:
            documented(declares)(cls)
            cls._declared = declared(declares)
            for name, each in cls._declared.items():
                text = each.text.replace("`", "").rstrip(".")
                setattr(cls, name, Param(Params._dummy(), name, text, typeConverter=partial(_converted, name, each.check)))
        for name in [name for name, value in vars(cls).items() if isinstance(value, Param)]:  # also a user's own
            _add_accessors(cls, name)

    _declared: Mapping[str, Argument] = MappingProxyType({})
    _new_columns: tuple[str, ...] = ("outputCol", "rawPredictionCol", "probabilityCol", "predictionCol")
    """The params that name new columns, for messages."""

    def _begin(self, given: Mapping[str, Any]) -> None:
        """Take over the defaults of all params, and set those that were given."""
        self._setDefault(**{name: each.default for name, each in self._declared.items() if each.default is not REQUIRED})
        self._set(**given)

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


class _Required:
    """Marks a param without a default, where ``None`` is a valid value."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()


def _converted(name: str, convert: Callable[[str, Any], Any], value: Any) -> Any:
    """Check a value and wrap it if a param grid could not be saved with it; see `as_grid_value`."""
    return as_grid_value(name, convert(name, from_grid_value(value)))


def _add_accessors(cls: type[KerasParams], name: str) -> None:
    """Add the setter and the getter of a param, unless the class has others."""

    def setter(self: P, value: Any) -> P:
        return self._set(**{name: value})

    def getter(self: KerasParams) -> Any:
        return self.getOrDefault(name)

    setter.__doc__, getter.__doc__ = f"Set the param `{name}`.", f"Return the value of the param `{name}`."
    accessor: Callable[..., Any]
    for verb, accessor in (("set", setter), ("get", getter)):
        accessor.__name__ = verb + "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        accessor.__qualname__ = f"{cls.__qualname__}.{accessor.__name__}"
        if not hasattr(cls, accessor.__name__):
            setattr(cls, accessor.__name__, accessor)


# Params that several classes share


class InferenceArguments(LoaderArguments, total=False):
    """Params for prediction: input columns, output columns and their tasks."""

    featuresCol: Annotated[
        Columns | None,
        Argument(
            "features",
            arguments.optional(converters.columns),
            """The input columns: one column (numbers, arrays or vectors), a list of columns to concatenate, or
            ``{input name: column(s)}``. ``None``: the column ``features``, or the columns named like the model's inputs.""",
        ),
    ]
    labelCol: Annotated[
        Columns | None,
        Argument(
            "label",
            arguments.optional(converters.columns),
            """The label columns, in the same forms; a dict maps output names to columns. ``None``: the column ``label``, or
            the columns named like the model's outputs.""",
        ),
    ]
    weightCol: Annotated[
        Columns | None,
        Argument(
            None,
            arguments.optional(converters.columns),
            """The column of sample weights. ``None``: all rows weigh the same.""",
        ),
    ]
    outputCol: Annotated[
        Names,
        Argument(
            "output",
            converters.names,
            """The new column for the model's output. A model with several outputs has one for each: a list,
            ``{output name: column}``, or a prefix for the output names (``output_left``, ``output_right``). ``""`` omits
            it.""",
        ),
    ]
    predictionCol: Annotated[
        Names,
        Argument(
            "prediction",
            converters.names,
            """The new column for predictions, in the same forms: a value, a class index, or (multilabel) an array of label
            indices.""",
        ),
    ]
    probabilityCol: Annotated[
        Names,
        Argument("probability", converters.names, """The new vector column for class probabilities, in the same forms."""),
    ]
    rawPredictionCol: Annotated[
        Names,
        Argument(
            "rawPrediction",
            converters.names,
            """The new vector column for logits or log-probabilities, in the same forms.""",
        ),
    ]
    outputType: Annotated[
        str,
        Argument(
            "array",
            converters.choice("array", "vector"),
            """The type of ``outputCol`` where an output has several units: ``"array"`` or ``"vector"``.""",
        ),
    ]
    task: Annotated[
        str | Mapping[str, str],
        Argument(
            "auto",
            converters.task,
            """``"auto"``, which infers it from the loss, ``"regression"``, ``"binary"``, ``"multiclass"``,
            ``"multilabel"``, or ``{output name: task}``.""",
        ),
    ]
    thresholds: Annotated[
        Sequence[float] | Mapping[str, Sequence[float]] | None,
        Argument(
            None,
            arguments.optional(converters.thresholds),
            """One threshold for each class of a binary or multiclass output, all greater than 0 except that one may be 0:
            the class with the largest probability / threshold is predicted. For a model with several outputs,
            ``{output name: thresholds}``. ``None``: the class with the largest probability.""",
        ),
    ]
    inferenceBatchSize: Annotated[int, Argument(BATCH_SIZE, arguments.integer, """Rows per batch when predicting.""")]
    backend: Annotated[
        Backend | None,
        Argument(
            None,
            known_backend,
            """The Keras backend that scores: ``"openvino"``, ``"jax"``, ``"torch"`` or ``"tensorflow"``; ``None``: that of
            this process. See `SparkModel.predict`.""",
        ),
    ]


class TransformerArguments(InferenceArguments, ObjectArguments, total=False):
    """The params of `KerasTransformer`."""

    batch_transform: Annotated[
        Callable[[Any, Any], Any] | None,
        Argument(
            None,
            arguments.function,
            """``batch_transform(x, None) -> x``, applied to each batch on the workers; the estimator's ``transform``.""",
        ),
    ]
    handleInvalid: Annotated[
        str,
        Argument(
            "error",
            converters.choice("error", "skip", "keep"),
            """What to do with rows that hold nulls, NaN or infinite values: ``"error"`` raises, ``"skip"`` drops them,
            ``"keep"`` keeps them with null predictions. `evaluate` drops them with ``"skip"`` and with ``"keep"``.""",
        ),
    ]


class EstimatorArguments(
    InferenceArguments, ModeArguments, SettingArguments, TrainingArguments, ModelArguments, total=False
):
    """The params of `KerasEstimator`: those of `SparkModel` and of its `fit` keep their names, columns have Spark ML's."""

    model: Annotated[
        keras.Model | None,
        Argument(
            None,
            arguments.optional(converters.keras_model),
            """A compiled and built ``keras.Model``, of which each fit trains a copy.""",
        ),
    ]
    validationIndicatorCol: Annotated[
        str | None,
        Argument(
            None,
            arguments.optional(converters.text),
            """A boolean or numeric column: rows where it is true or not 0 are used for validation, not for training.
            `SparkModel.fit` calls it ``validation_col``.""",
        ),
    ]
    adapt: Annotated[
        bool,
        Argument(
            False,
            arguments.flag,
            """Whether each fit first adapts the preprocessing layers of the model, in place, to its rows without those of
            ``validationIndicatorCol``; see `adapt`. Not with ``transform``.""",
        ),
    ]
    learning_rate: Annotated[
        float | None,
        Argument(
            None,
            arguments.optional(converters.positive),
            """The optimizer's learning rate for this fit. ``None``: the compiled one.""",
        ),
    ]
    validation_data: Annotated[
        DataFrame | None,
        Argument(
            None,
            arguments.optional(converters.data_frame),
            """A DataFrame to validate on, with the columns of the training data. In a pipeline these are the columns that
            the estimator gets from the stages before it; ``validationIndicatorCol`` marks rows of the pipeline's data
            instead. Every fit validates on it, also those of a ``CrossValidator``. It is not saved. Only one of
            ``validation_split``, ``validation_data`` and ``validationIndicatorCol`` can be set.""",
        ),
    ]
    handleInvalid: Annotated[
        str,
        Argument(
            "error",
            converters.choice("error", "skip"),
            """What to do with rows that hold nulls, NaN or infinite values: ``"error"`` raises, ``"skip"`` drops them. The
            fitted KerasTransformer has the same value; its ``setHandleInvalid("keep")`` keeps such rows and predicts
            null.""",
        ),
    ]
