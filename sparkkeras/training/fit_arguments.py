"""The arguments of those that train, and of their `fit`, declared once: types, defaults, checks and descriptions.

Signatures, docstrings, the params of Spark ML, what a checkpoint compares and what a `Monitor` shows follow from them.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias, TypedDict, cast, get_args

import keras

from sparkkeras import arguments
from sparkkeras.arguments import Argument
from sparkkeras.checkpoints.store import Checkpoint
from sparkkeras.data.block import by_name, describe
from sparkkeras.data.columns import Loader
from sparkkeras.data.partition_stats import ClassWeight
from sparkkeras.data.placement import Shuffle
from sparkkeras.data.schema import OnInvalid
from sparkkeras.errors import ConfigurationError
from sparkkeras.events import EventListener
from sparkkeras.parameter.rules import UpdateRule, as_rule
from sparkkeras.rpc.options import NETWORK_TRANSPORTS, ParameterServerOptions
from sparkkeras.scoring.inference import Verbose
from sparkkeras.sources.column_names import column_names
from sparkkeras.sources.frame import Columns, Loaders
from sparkkeras.training.callbacks import as_callbacks
from sparkkeras.worker.batches import Transform
from sparkkeras.worker.lockstep import GRADIENT_DTYPES

MODES = ("synchronous", "asynchronous", "hogwild", "allreduce")
"""The training modes; each has a strategy."""

ASYNCHRONOUS_MODES = ("asynchronous", "hogwild")
"""The modes with a parameter server."""

Callbacks: TypeAlias = Sequence[keras.callbacks.Callback] | keras.callbacks.Callback
"""One or several callbacks."""


def _mode(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{name}={value!r}: expected {', '.join(map(repr, MODES))}. The second positional argument is mode; for "
            f"the number of workers, use num_workers={value!r}."
        )
    return str(arguments.one_of(name, value, MODES))


def _rule(_: str, value: Any) -> str | UpdateRule:
    as_rule(value)  # `fit` checks that it fits the mode, which may be set later
    return cast(str | UpdateRule, value)


def _loaders(name: str, value: Any) -> Loaders:
    if isinstance(value, Mapping):
        return {key: _loader(f"{name}[{key!r}]", each) for key, each in by_name(value).items()}
    return _loader(name, value)


def _loader(name: str, value: Any) -> Loader:
    missing = [member for member in ("shape", "on_error", "check", "__call__") if not hasattr(value, member)]
    if missing or isinstance(value, type):
        raise ConfigurationError(
            f"{name} is {describe(value)}; expected a loader such as image_loader(...): a callable object with shape, "
            "on_error and check(name, kind)."
        )
    return cast(Loader, value)


def _worker_callbacks(name: str, value: Any) -> list[keras.callbacks.Callback]:
    found = as_callbacks(name, value)
    for callback in found:
        if isinstance(callback, EventListener):
            raise ConfigurationError(
                f"{name}: {type(callback).__name__} follows the run on the driver, where its events are: pass it as "
                "callbacks=, or as monitor= of an ensemble."
            )
    return found


class ModeArguments(TypedDict, total=False):
    """Those of a `SparkModel` that may be passed by position."""

    mode: Annotated[
        str,
        Argument(
            "synchronous",
            _mode,
            """``"synchronous"``: all workers train from the same weights until the next exchange, then their weights are
            averaged. ``"asynchronous"``: each worker exchanges updates with a parameter server on the driver, without
            waiting for the others. ``"hogwild"``: like asynchronous, but the server applies updates without a lock.
            ``"allreduce"``: the workers average their gradients at every step, so n workers with batches of b rows train
            like Keras with batches of n * b rows.""",
        ),
    ]
    frequency: Annotated[
        str | int | None,
        Argument(
            None,
            arguments.optional(arguments.frequency),
            """How long a worker trains between two exchanges: ``"epoch"``, a number of batches, or ``"batch"``, which is 1.
            ``None``: 1 in the mode ``"allreduce"``, which has no other, and ``"epoch"`` in the others. An epoch is long for
            asynchronous workers: start with 5 to 12 batches.""",
        ),
    ]
    num_workers: Annotated[
        int | None,
        Argument(
            None,
            arguments.optional_integer,
            """The number of workers. ``None``: one for each partition of the data; for arrays, one for each Spark slot.
            Except in synchronous mode, all workers run at the same time, each in a slot; partitions are coalesced if needed.
            Asynchronous modes use the slots that are free, with a warning if ``num_workers`` is more. The mode
            ``"allreduce"`` waits for slots that other jobs use, and raises an error if ``num_workers`` is more than all.""",
        ),
    ]


class ObjectArguments(TypedDict, total=False):
    """That of those that load a model on workers."""

    custom_objects: Annotated[
        Mapping[str, Any] | None,
        Argument(
            None,
            arguments.optional(arguments.custom_objects),
            """Custom classes and functions by name; only needed for those that sparkkeras does not find in the model.""",
        ),
    ]


class ResourceArguments(TypedDict, total=False):
    """Those of the size of workers."""

    cores_per_worker: Annotated[
        int | None,
        Argument(
            None,
            arguments.optional_integer,
            """The CPU cores of each worker while it trains; ``None``: those of a Spark task (``spark.task.cpus``). On a
            cluster, Spark gives tasks this size by a resource profile. With a local master, fewer workers train at the same
            time.""",
        ),
    ]
    gpus_per_worker: Annotated[
        int | None,
        Argument(
            None,
            arguments.optional_integer,
            """The GPUs of each worker while it trains, by a resource profile; ``None``: those of a Spark task
            (``spark.task.resource.gpu.amount``). Not with a local master.""",
        ),
    ]


class WorkerArguments(ObjectArguments, ResourceArguments):
    """Those of a `KeyedModel`."""


class SettingArguments(ObjectArguments, ResourceArguments, total=False):
    """The others of a `SparkModel`."""

    parameter_server_mode: Annotated[
        str | None,
        Argument(
            None,
            arguments.optional(partial(arguments.one_of, known=NETWORK_TRANSPORTS)),
            """The transport between workers and parameter server in the asynchronous modes: ``"http"`` or ``"socket"``,
            which is faster. ``None``: ``"http"``.""",
        ),
    ]
    port: Annotated[
        int | None,
        Argument(
            None,
            arguments.optional(arguments.port),
            """The port of the driver to which workers connect in the asynchronous modes and in the mode ``"allreduce"``;
            ``None`` or 0: any free one.""",
        ),
    ]
    rule: Annotated[
        str | UpdateRule | None,
        Argument(
            None,
            arguments.optional(_rule),
            """The update rule, which computes new weights of the model from those of the workers: the name of a built-in
            one, such as ``"slowmo"`` or ``"easgd"``, or an `UpdateRule`; each is for one or two modes. ``None``:
            ``"average"`` in synchronous training and ``"downpour"`` with a parameter server, also if the mode is changed
            later. The mode ``"allreduce"`` has no rule.""",
        ),
    ]
    gradient_dtype: Annotated[
        str | None,
        Argument(
            None,
            partial(arguments.gradient_dtype, known=GRADIENT_DTYPES),
            """The dtype in which the mode ``"allreduce"`` sends gradients: ``"float16"`` or ``"bfloat16"`` halves the
            network traffic. ``None``: their own.""",
        ),
    ]
    max_restarts: Annotated[
        int | None,
        Argument(
            None,
            partial(arguments.optional_integer, low=0),
            """How often the mode ``"allreduce"`` continues from the last finished epoch after a worker has failed, before
            `fit` raises the error. ``None``: 3 times.""",
        ),
    ]
    server_options: Annotated[
        ParameterServerOptions | None,
        Argument(
            None,
            partial(arguments.instance, kind=ParameterServerOptions),
            """Further settings of the parameter server.""",
        ),
    ]
    batch_size: Annotated[int, Argument(32, arguments.integer, """The default batch size of each worker, in rows.""")]
    seed: Annotated[
        int | None,
        Argument(
            None,
            partial(arguments.optional_integer, low=0),
            """The seed for shuffling, dropout and other random numbers. ``None``: a random seed. With the same seed, data,
            partitions and model, synchronous training gives the same weights.""",
        ),
    ]


class ModelSettings(ModeArguments, SettingArguments):
    """Those of a `SparkModel`."""


class EpochArguments(TypedDict, total=False):
    """Those of everything that trains, also a model for each key."""

    epochs: Annotated[
        int,
        Argument(
            1,
            arguments.integer,
            """The number of epochs, including those before ``initial_epoch``, as in ``keras.Model.fit``.""",
        ),
    ]
    verbose: Annotated[
        Verbose,
        Argument(
            "auto",
            partial(arguments.one_of, known=get_args(Verbose)),
            """0: silent; 1: a progress line; 2: one line per epoch; ``"auto"``: 1.""",
        ),
    ]
    validation_freq: Annotated[
        int, Argument(1, arguments.integer, """The number of epochs between two validations.""", is_setting=True)
    ]
    validation_batch_size: Annotated[
        int | None,
        Argument(None, arguments.optional_integer, """Rows in each batch of validation; ``None``: ``batch_size``."""),
    ]
    transform: Annotated[
        Transform | None,
        Argument(
            None,
            arguments.function,
            """``transform(x, y) -> (x, y)``, which the workers apply to each batch. Data without labels has ``None`` as
            ``y``. To check the result, the driver also calls it before the job starts: with the first batch of arrays, or
            with one row of zeros for a DataFrame or an RDD. If it fails on zeros, the first rows on the workers are
            checked instead.""",
        ),
    ]


class TrainingArguments(EpochArguments, total=False):
    """Those of everything that trains."""

    validation_split: Annotated[
        float,
        Argument(
            0.0,
            arguments.fraction,
            """The fraction of rows to validate on, in [0, 1): the last rows of arrays, as in Keras, and the last ones of
            each partition of an RDD or a DataFrame; with ``shuffle="global"`` random ones. No worker trains on them.""",
            is_setting=True,
        ),
    ]
    shuffle: Annotated[
        Shuffle,
        Argument(
            True,
            arguments.shuffle,
            """Whether each worker shuffles its rows before each epoch, and arrays are dealt to the workers at random.
            ``"global"`` also redistributes the rows of an RDD or a DataFrame at random over the workers, once, while they
            are stored: for rows that are sorted, by label, date or key. ``False`` keeps the order of all rows.""",
            is_setting=True,
        ),
    ]
    class_weight: Annotated[
        ClassWeight | None,
        Argument(
            None,
            arguments.class_weight_or_balanced,
            """A weight for each class, as in ``keras.Model.fit``. Cannot be combined with sample weights.
            ``"balanced"``: inversely proportional to the rows of each class, ``rows / (classes * rows of the class)``.""",
            is_setting=True,
        ),
    ]
    steps_per_epoch: Annotated[
        int | None,
        Argument(
            None,
            arguments.optional_integer,
            """The maximum number of batches of each worker per epoch; workers with fewer batches end earlier. ``None``:
            all rows. Required if ``data`` is a function whose batches have no end, such as those of ``dataset.repeat()``
            or of a generator with ``while True``.""",
            is_setting=True,
        ),
    ]
    worker_callbacks: Annotated[
        Callbacks | None,
        Argument(
            None,
            _worker_callbacks,
            """Keras callbacks that run on the workers. In synchronous training each worker gets new copies in each round;
            in the other modes it keeps one copy for all epochs. A member of an ensemble has its own: ``EarlyStopping``
            monitors its metrics, including those of validation, and stops only this member.""",
        ),
    ]
    checkpoint: Annotated[
        Checkpoint | None,
        Argument(
            None,
            partial(arguments.instance, kind=Checkpoint),
            """Where and how often to write checkpoints. SIGTERM, Ctrl-C and errors of Spark end training with a checkpoint
            of the last completed round, or with a parameter server of the updates so far. Ensembles write each member when
            it is trained; each trains in a Spark job of its own then.""",
        ),
    ]
    resume: Annotated[
        bool,
        Argument(
            False,
            arguments.flag,
            """Whether to continue from the newest checkpoint. Synchronous and all-reduce training, and the members of an
            ensemble, end with the same bits as without the interruption; with a parameter server, every update counts
            once. If there is none, training begins at the start; if it was completed, the data is compared, and nothing is
            trained. The model, the data and the other arguments must be the same, ``epochs`` may be larger.""",
        ),
    ]


class RowArguments(TypedDict, total=False):
    """How rows are read and become batches."""

    batch_size: Annotated[
        int | None,
        Argument(
            None, arguments.optional_integer, """Rows in each batch of a worker; ``None``: those of the constructor."""
        ),
    ]
    on_invalid: Annotated[
        OnInvalid,
        Argument(
            "error",
            partial(arguments.one_of, known=get_args(OnInvalid)),
            """How to handle rows with nulls, NaN or infinite values: ``"error"`` raises, ``"drop"`` drops them,
            ``"allow"`` keeps them, with nulls as NaN. ``None`` in rows and arrays is a null.""",
        ),
    ]


class BatchArguments(RowArguments, total=False):
    """Those of rows and batches, but for Spark ML."""

    validation_data: Annotated[
        Any,
        Argument(
            None,
            arguments.anything,
            """A DataFrame, an RDD, ``(x, y)``, ``(x, y, sample_weight)``, or a function like ``data``, to validate on.""",
        ),
    ]


class ModelArguments(TypedDict, total=False):
    """Those of the training of one model."""

    callbacks: Annotated[
        Callbacks | None,
        Argument(
            None,
            as_callbacks,
            """Keras callbacks. They run on the driver with the driver's model, once per epoch.""",
        ),
    ]
    initial_epoch: Annotated[
        int,
        Argument(
            0,
            partial(arguments.integer, low=0),
            """The epoch at which training starts, counted from 0.""",
            is_setting=True,
        ),
    ]


class InputArguments(TypedDict, total=False):
    """What a model is trained on."""

    sample_weight: Annotated[
        Any,
        Argument(
            None,
            arguments.anything,
            """For arrays, weights of 0 or more, shape (samples,). For a DataFrame, the column of weights.""",
        ),
    ]
    features: Annotated[
        Columns | None,
        Argument(
            None,
            arguments.anything,
            """The columns of a DataFrame to use as model inputs: one column (numbers, arrays, vectors, bytes of raw
            tensors), a list of columns to concatenate, or for several inputs ``{input name: column(s)}``, nested as they
            are, or a list with a column for each: by name if these are the names of the inputs, else by position.
            ``None``: the column ``features``, or columns with the names of the inputs.""",
        ),
    ]
    label: Annotated[
        Columns | None,
        Argument(
            None,
            arguments.anything,
            """The label columns, in the same form by output. ``None``: the column ``label``, or columns with the names of
            the outputs.""",
        ),
    ]


class ColumnArguments(InputArguments, total=False):
    """Those of columns and of arrays."""

    validation_col: Annotated[
        str | None,
        Argument(
            None,
            arguments.anything,
            """A boolean or numeric column of the DataFrame; rows where it is true or not 0 are used for validation and not
            for training.""",
        ),
    ]


class LoaderArguments(TypedDict, total=False):
    """That of columns with images and the like."""

    loader: Annotated[
        Loaders | None,
        Argument(
            None,
            arguments.optional(_loaders),
            """A loader that converts a column of a DataFrame into a model input, such as `image_loader`, or
            ``{input name: loader}``. `PadSequences` also converts rows of RDDs and arrays.""",
        ),
    ]


class FitArguments(TrainingArguments, BatchArguments, ColumnArguments, LoaderArguments, ModelArguments):
    """Those of `SparkModel.fit`."""


class PointArguments(TrainingArguments, BatchArguments, ModelArguments):
    """Those of `SparkMLlibModel.fit`."""


class EnsembleArguments(TrainingArguments, BatchArguments, ColumnArguments, LoaderArguments, total=False):
    """Those of `SparkEnsemble.fit`."""

    monitor: Annotated[
        EventListener | Sequence[EventListener] | None,
        Argument(
            None,
            arguments.listeners,
            """A `Monitor`, or other objects with a method ``on_event`` (see `sparkkeras.events`), which gets each member
            when it is trained. Each trains in a Spark job of its own then.""",
        ),
    ]


def _names(name: str, value: Any) -> list[str]:
    return [] if value is None else list(column_names(name, [value] if isinstance(value, str) else value))


def _key_callbacks(name: str, value: Any) -> list[keras.callbacks.Callback]:
    found = as_callbacks(name, value)
    for callback in found:
        kind = type(callback).__name__
        if isinstance(callback, EventListener):
            raise ConfigurationError(
                f"{name}: {kind} follows a run on the driver, but these run on the workers: leave it out."
            )
        if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
            raise ConfigurationError(
                f"{name}: all keys would write {kind}'s files at once. Pass save_to= to store the models, and "
                "EarlyStopping(restore_best_weights=True) to keep the best weights of each."
            )
    return found


class KeyedArguments(EpochArguments, RowArguments, InputArguments, LoaderArguments, total=False):
    """Those of `KeyedModel.fit`."""

    order_by: Annotated[
        str | Sequence[str] | None,
        Argument(
            None,
            _names,
            """The column, or columns, by which the rows of each key are ordered before training. ``None``: by a hash of
            their values, so that the order is the same each time.""",
        ),
    ]
    validation_split: Annotated[
        float,
        Argument(
            0.0,
            arguments.fraction,
            """The fraction of the rows of each key to validate on, in [0, 1): the last ones in the order of ``order_by``,
            which is required then. The model does not train on them.""",
        ),
    ]
    shuffle: Annotated[
        bool,
        Argument(
            True,
            arguments.flag,
            """Whether the rows of each key are shuffled before each epoch, with ``seed``. ``False`` keeps their order.""",
        ),
    ]
    class_weight: Annotated[
        Mapping[int, float] | None,
        Argument(
            None,
            arguments.class_weight,
            """A weight for each class, as in ``keras.Model.fit``. Cannot be combined with sample weights.""",
        ),
    ]
    callbacks: Annotated[
        Callbacks | None,
        Argument(
            None,
            _key_callbacks,
            """Keras callbacks. Each key has new copies, which run on its worker: ``EarlyStopping`` stops only its model.""",
        ),
    ]
    save_to: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            None,
            arguments.optional(arguments.path),
            """A folder for the table of models, to which Spark writes while it trains. The same call goes on where a
            training that was interrupted has stopped, from the initial weights in the folder; a call with other rows trains
            only the keys that have changed. With Spark Connect, it is a path of the server. ``None``: the executors keep
            the models until the session ends, and train those again that are lost with an executor.""",
        ),
    ]
