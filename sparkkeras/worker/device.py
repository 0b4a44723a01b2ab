"""Setup of a process for training: the backend, its threads and devices, and how it is fed with batches.

The code for specific backends is here and in `sparkkeras.modeling.backends`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparkkeras.data.block import EPOCH_BYTES, Block, BlockSpec, changed, concatenate
from sparkkeras.data.text import Text
from sparkkeras.errors import ClusterError, DataError, ModelError
from sparkkeras.modeling import garbage_collection

AUTO_STEPS_PER_EXECUTION = 32
"""Default of ``steps_per_execution`` for backends that work less between two steps than between two executions.

TensorFlow runs the steps in a compiled loop. On JAX, Keras calls callbacks and stores the state once per execution: a step
of the benchmarks' network takes 0.63 instead of 0.72 ms. On PyTorch, Keras rejects other values than 1.
"""


Environment = Callable[[int], Mapping[str, str]]
"""Returns the environment variables of workers that use so many CPU cores for a task."""


def worker_environment(cores: int, backend: str | None = None) -> dict[str, str]:
    """Environment variables for training workers: the backend, the driver's Keras settings, less logging, GPU memory growth.

    Args:
        cores: CPU cores per task, which is also its number of threads.
        backend: The backend; ``None``: the driver's.
    """
    import keras

    logging_level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1")
    return {
        "KERAS_BACKEND": backend or keras.backend.backend(),
        "SPARKKERAS_FLOATX": keras.config.floatx(),
        "SPARKKERAS_DTYPE_POLICY": keras.config.dtype_policy().name,
        "SPARKKERAS_IMAGE_DATA_FORMAT": keras.config.image_data_format(),
        "NPROC": str(cores),  # JAX's threads on the CPU
        "OMP_NUM_THREADS": str(cores),
        "TF_CPP_MIN_LOG_LEVEL": "3" if logging_level == "1" else logging_level,  # 1: not the user's; JAX sets it on import
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # otherwise the import initializes CUDA, which then fails in forks
    }


def forking_environment(cores: int) -> dict[str, str]:
    """Environment variables for workers that fork a process for each piece of work, and never use the backend themselves.

    The additional variable keeps Spark from giving them processes that have trained.

    Args:
        cores: CPU cores per task.
    """
    return {**worker_environment(cores), "SPARKKERAS_FORKS": "1"}


def backend_name() -> str:
    """The name of Keras's current backend."""
    import keras

    return str(keras.backend.backend())


def widest_float() -> str:
    """The dtype with the most bits for real numbers that Keras's current backend has by default."""
    return "float32" if backend_name() == "jax" else "float64"


def load() -> None:
    """Import Keras and its backend without running any operation. Suppresses their messages to standard error."""
    with silenced():
        _import_keras()
    garbage_collection.freeze_loaded()


def _import_keras() -> Any:
    """Import Keras and its backend.

    With OpenVINO, which only scores, Keras does not find the libraries that it could use besides, and which take 170 MB.
    """
    unused = set[str]()
    if os.environ.get("KERAS_BACKEND") == "openvino":
        unused = {"jax", "matplotlib", "pandas", "sklearn"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(unused))  # type: ignore[arg-type]  # with None, a module cannot be imported
    try:
        # A thread of `sparkkeras.spark.probe` may be importing it. If that fails, the statement would return half a module.
        return importlib.import_module("keras")
    finally:
        for name in unused:
            del sys.modules[name]


@functools.cache
def prepare(
    cores: int,
    accelerators: tuple[str, ...] = (),
    environment: tuple[tuple[str, str], ...] = (),
    shared_folder: str | None = None,
) -> None:
    """Import and configure Keras and its backend in this process, once, with one thread per core of the task.

    Outside Spark workers, it only sets ``environment``: the process belongs to the user.

    Args:
        cores: CPU cores per task.
        accelerators: The addresses of the GPUs that Spark assigned to the task.
        environment: Environment variables that were not set when this process started.
        shared_folder: A folder that the processes of the application on this machine share.

    Raises:
        ClusterError: The process has already imported Keras with another backend.
    """
    os.environ.update(environment)
    if not os.environ.get("SPARKKERAS_WORKER"):
        return
    if accelerators:
        _bind(",".join(accelerators))
    with silenced():
        keras = _import_keras()
        keras.config.set_floatx(os.environ["SPARKKERAS_FLOATX"])
        keras.config.set_dtype_policy(os.environ["SPARKKERAS_DTYPE_POLICY"])
        keras.config.set_image_data_format(os.environ["SPARKKERAS_IMAGE_DATA_FORMAT"])
        backend = backend_name()
        if backend != os.environ["KERAS_BACKEND"]:
            raise ClusterError(
                f"a worker process has already imported Keras with the backend {backend!r}; expected "
                f"{os.environ['KERAS_BACKEND']!r}, the driver's. Set KERAS_BACKEND on the workers."
            )
        if backend == "tensorflow":
            import tensorflow

            with suppress(RuntimeError):  # raised if functions of the user in this process have already used TensorFlow
                tensorflow.config.threading.set_intra_op_parallelism_threads(cores)
                tensorflow.config.threading.set_inter_op_parallelism_threads(cores)
            tensorflow.get_logger().addFilter(_concerns_user)
        elif backend == "torch":
            import torch

            torch.set_num_threads(cores)
        elif backend == "jax" and shared_folder:
            _share_compiled_functions(shared_folder)
    garbage_collection.freeze_loaded()


def _share_compiled_functions(folder: str) -> None:
    """Have JAX write what it compiles to a folder, and read it from there, unless the user has chosen another one.

    Otherwise each trial of a search and each new Python worker compiles the same model again.
    """
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        config.update("jax_compilation_cache_dir", str(Path(folder) / "sparkkeras-jax"))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _bind(addresses: str) -> None:
    """Let the backend see only these GPUs. A process keeps its first ones: a backend that has started cannot change them."""
    global _bound
    _bound = _bound or addresses
    os.environ["CUDA_VISIBLE_DEVICES"] = _bound
    if _bound != addresses:
        _log.warning(
            "Spark assigned the GPU %s to a task whose Python worker already uses the GPU %s: it keeps using that one, "
            "perhaps together with another worker. Give each executor one GPU (spark.executor.resource.gpu.amount=1).",
            addresses,
            _bound,
        )


_bound = ""
"""The addresses of the GPUs of this process."""

_log = logging.getLogger(__name__)


def _concerns_user(record: logging.LogRecord) -> bool:
    """Whether a log record of TensorFlow concerns the user's code.

    TensorFlow counts the traces of Keras's functions over all models, so it warns about retracing when a process has used a
    few models, although it traced each of them only once.
    """
    message = record.getMessage()
    ours = "TensorFlowTrainer." in message or _tensorflow_loop.__name__ in message
    return not ("triggered tf.function retracing" in message and ours)


@contextmanager
def without_retracing_warnings() -> Iterator[None]:
    """Suppress the log records in this process that do not concern the user's code, while several models predict."""
    logger = logging.getLogger("tensorflow")
    ours = functools.partial(_concerns_user)  # a new object: `prepare` may have added the function, for good
    logger.addFilter(ours)
    try:
        yield
    finally:
        logger.removeFilter(ours)


def is_uninitialized() -> bool:
    """Whether the backend is still uninitialized in this process, so that forks of the process can use it."""
    backend = backend_name()
    if backend == "tensorflow":
        from tensorflow.python.eager import context

        return not getattr(context.context(), "_initialized", False)
    if backend == "jax":
        from jax._src import xla_bridge

        return not getattr(xla_bridge, "_backends", {})
    import torch

    cuda: Any = torch.cuda
    return not cuda.is_initialized()


@functools.cache
def prepare_to_fork(cores: int) -> None:
    """In a worker, let PyTorch use one thread before forks and one per core in them.

    Its OpenMP threads start with the first operation that uses several. They do not exist in a fork, which would wait for
    them forever.
    """
    if os.environ.get("SPARKKERAS_WORKER") and backend_name() == "torch":
        import torch

        torch.set_num_threads(1)
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, cores))


def initialize_backend() -> None:
    """Initialize the backend in this process. Suppresses its messages to standard error."""
    import keras

    with silenced():
        keras.ops.zeros(())


@contextmanager
def silenced(descriptor: int = 2) -> Iterator[None]:
    """Suppress what a backend writes to standard error, or output (1), while it loads or starts; print it if that fails."""
    with tempfile.TemporaryFile() as captured:
        kept = os.dup(descriptor)
        os.dup2(captured.fileno(), descriptor)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(kept, captured.read())
            raise
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def check_supported(model: Any) -> None:
    """Reject a model that Keras's current backend cannot train.

    Raises:
        ModelError: The backend is PyTorch, and the model has ``steps_per_execution`` or stateful recurrent layers.
    """
    from sparkkeras.modeling.fixed_batch import fixed_batch_size  # it imports Keras

    if backend_name() != "torch":
        return
    if model.steps_per_execution > 1:
        raise ModelError(
            f"the model {model.name!r} was compiled with steps_per_execution={model.steps_per_execution}; with the backend "
            "'torch', Keras supports only 1: call model.compile(...) without it."
        )
    if fixed_batch_size(model) is not None:
        raise ModelError(
            f"the model {model.name!r} has stateful recurrent layers, which Keras cannot train with the backend 'torch', "
            "since it computes gradients through the states of earlier batches: use stateful=False or another backend."
        )


def steps_per_execution(model: Any, chosen: int, single: bool, every: int | None = None) -> int:
    """The ``steps_per_execution`` to train this model with.

    Args:
        model: The model.
        chosen: The value that the model was compiled with. 1, Keras's default, means an automatic choice.
        single: Whether a callback has batch hooks, so that the automatic choice is 1.
        every: The number of steps between two exchanges of weights, of which the result is a divisor; ``None``: any.
    """
    is_automatic = chosen == 1 and not single and backend_name() != "torch" and not model.run_eagerly
    most = AUTO_STEPS_PER_EXECUTION if is_automatic else chosen
    return most if every is None else max(steps for steps in range(1, most + 1) if every % steps == 0)


@contextmanager
def feed(spec: BlockSpec, batch_size: int | None, pieces: Iterator[Block], held_out: bool = False) -> Iterator[Any]:
    """One epoch of batches as a data argument for Keras's ``fit``, ``evaluate`` and ``predict`` with the current backend.

    It is valid inside the ``with`` block, and holds no references to rows afterwards.

    Args:
        spec: The shapes and dtypes of the blocks.
        batch_size: Rows per batch; ``None``: each piece is a batch.
        pieces: The rows in the order of training; each piece but the last consists of whole batches. Iterated once.
        held_out: Whether these are the validation data of a ``fit`` whose training data is open at the same time.

    Raises:
        DataError: A block has another spec.
    """
    pieces = _alike(pieces, spec)
    if backend_name() != "tensorflow":
        yield (_in_tuple(_packed(batch)) for piece in pieces for batch in piece.batches(batch_size or piece.rows))
        return
    if batch_size is not None:
        ahead = _read_ahead(pieces, EPOCH_BYTES)
        following = next(pieces, None)
        if following is None:
            yield _dataset_in_memory(spec, batch_size, concatenate(list(_drained(ahead)) or [spec.zeros(0)]))
            return
        pieces = chain(_drained(ahead), [following], pieces)
    source = _tensorflow_source(spec, batch_size, held_out)
    source.pieces, source.error = pieces, None
    try:
        yield source.dataset
    except Exception:
        if source.error is not None:  # TensorFlow wraps it in an error of its own, which says nothing more
            raise source.error from None
        raise
    finally:
        source.pieces, source.error = iter(()), None


def in_step(batches: Any, padding: Block, flags: Sequence[bool]) -> Any:
    """What `feed` returned, with a copy of ``padding`` for each flag that is not set.

    Each batch comes in a pair with its flag, of shape (1,): 1, or 0 for a copy of ``padding``.
    """
    if backend_name() != "tensorflow":
        own, zeros = iter(batches), _in_tuple(_packed(padding))
        batches = (next(own) if flag else zeros for flag in flags)
    elif not all(flags):
        import tensorflow as tf

        dataset = tf.data.Dataset
        choices = dataset.from_tensor_slices(np.array(flags, np.int64))
        datasets = [dataset.from_tensors(_packed(padding)).repeat(), batches]
        batches = dataset.choose_from_datasets(datasets, choices, stop_on_empty_dataset=False)
    return flagged(batches, flags)


def flagged(batches: Any, flags: Iterable[bool]) -> Any:
    """What `feed` returned, each batch in a pair with a flag as in `in_step`. A flag is read after its batch."""
    if backend_name() != "tensorflow":
        return ((batch, np.full(1, flag, np.float32)) for batch, flag in zip(batches, flags, strict=False))
    import tensorflow as tf

    dataset = tf.data.Dataset
    if isinstance(flags, Sequence):
        numbers = dataset.from_tensor_slices(np.array(flags, np.float32)[:, None])
    else:

        def generate() -> Iterator[Any]:
            return (np.full(1, flag, np.float32) for flag in flags)

        numbers = dataset.from_generator(generate, output_signature=tf.TensorSpec((1,), tf.float32))
    return dataset.zip((batches, numbers)).with_options(_tensorflow_options())


Loop = Callable[[Iterator[Block], int], None]
"""Takes steps over rows, in pieces of which all but the last one of an epoch consist of whole batches, of this size."""


def loop(model: Any, kind: Literal["train", "test"]) -> Loop | None:
    """What Keras's ``fit`` or ``evaluate`` compute, without what they do between two steps.

    With a small model, that is most of the time: ten epochs of 200 rows in batches of 32 take 76 ms with ``fit`` on
    TensorFlow and 17 ms in this way.

    Args:
        model: A model with Keras's own steps.
        kind: Whether to train or to evaluate.

    Returns:
        The loop, which is kept with the model. ``None`` if steps are not compiled: on PyTorch, or by the user's choice.
    """
    backend = backend_name()
    if model.run_eagerly or backend not in ("tensorflow", "jax") or (backend == "jax" and not model.jit_compile):
        return None
    loops: dict[str, Loop] = vars(model).setdefault("_sparkkeras_loops", {})  # out of sight of Keras's tracking
    if kind not in loops:
        loops[kind] = (_jax_loop if backend == "jax" else _tensorflow_loop)(model, kind)
    return loops[kind]


def _jax_loop(model: Any, kind: str) -> Loop:
    import jax

    method, fixed = getattr(model, f"{kind}_step"), int(kind == "test")  # which does not change trainable variables
    step = jax.jit(lambda constant, state, batch: method((*constant, *state), batch)[1][fixed:])

    def run(pieces: Iterator[Block], batch_size: int) -> None:
        optimizer = [model.optimizer.variables] if kind == "train" else []
        groups = [model.trainable_variables, model.non_trainable_variables, *optimizer, model.metrics_variables]
        values = tuple([variable.value for variable in group] for group in groups)
        constant, state = values[:fixed], values[fixed:]
        for piece in _alike_first(pieces):
            for batch in piece.batches(batch_size):
                state = step(constant, state, _packed(batch))
        for group, found in zip(groups[fixed:], state, strict=True):
            for variable, value in zip(group, found, strict=True):
                variable.assign(value)

    return run


def _tensorflow_loop(model: Any, kind: str) -> Loop:
    import tensorflow as tf

    step = getattr(model, f"{kind}_step")
    if model.jit_compile:
        step = tf.function(step, jit_compile=True, reduce_retracing=True)

    @tf.function(reduce_retracing=True, autograph=False)  # type: ignore[untyped-decorator]
    def steps(batches: Any) -> None:
        """Take a step with each batch of arrays of the shape (batches, rows of each, ...)."""
        count = tf.shape(tf.nest.flatten(batches)[0])[0]

        def take(number: Any) -> Any:
            step(tf.nest.map_structure(lambda array: array[number], batches))
            return number + 1

        tf.while_loop(lambda number: number < count, take, [0], parallel_iterations=1)

    def run(pieces: Iterator[Block], batch_size: int) -> None:
        for piece in _alike_first(pieces):
            whole = piece.rows // batch_size * batch_size
            for part, size in ((piece[:whole], batch_size), (piece[whole:], piece.rows - whole)):
                if part.rows:
                    shape = (part.rows // size, size)
                    arrays = (tf.convert_to_tensor(array.reshape(*shape, *array.shape[1:])) for array in part.arrays)
                    steps(_packed(Block(part.form, tuple(arrays))))

    return run


@functools.cache
def _has_gpu() -> bool:
    """Whether this process may use a GPU with TensorFlow. Initializes the backend."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _alike(pieces: Iterator[Block], spec: BlockSpec) -> Iterator[Block]:
    for piece in pieces:
        if piece.spec != spec:
            raise DataError(changed(spec, piece.spec))
        yield piece


def _alike_first(pieces: Iterator[Block]) -> Iterator[Block]:
    first = next(pieces)
    return _alike(chain([first], pieces), first.spec)


def _read_ahead(pieces: Iterator[Block], size: int) -> deque[Block]:
    """The first pieces, until they have ``size`` bytes or there are no more."""
    ahead: deque[Block] = deque()
    while size > 0 and (piece := next(pieces, None)) is not None:
        ahead.append(piece)
        size -= piece.nbytes
    return ahead


def _drained(pieces: deque[Block]) -> Iterator[Block]:
    """The pieces, of which none is referenced after it was returned."""
    while pieces:
        yield pieces.popleft()


def overwritable(block: Block) -> Block:
    """The block in memory that the backend may overwrite, copied if necessary.

    TensorFlow and JAX use memory that is aligned to 64 bytes (16 in older builds) without a copy, and may compute in place;
    all other memory they copy. PyTorch copies none. Rows in memory-mapped files and arrays of the user must not change.
    """
    copies = backend_name() in {"tensorflow", "jax"}
    arrays = (
        array if isinstance(array, Text) or array.base is None or (copies and array.ctypes.data % 16) else np.array(array)
        for array in block.arrays
    )
    return Block(block.form, tuple(arrays))


def to_predict(model: Any, cores: int) -> Any:
    """A model for ``predict_on_batch``: with PyTorch in evaluation mode, as in ``predict``; with OpenVINO see its module."""
    if backend_name() == "torch":
        model.eval()
    if backend_name() == "openvino":
        from sparkkeras.worker import openvino_model

        return openvino_model.to_predict(model, cores)
    return model


def predicts_ahead() -> bool:
    """Whether ``predict`` for several batches is faster than ``predict_on_batch`` for each, which waits for the device."""
    return backend_name() == "jax"


def call_argument(block: Block, batch_size: int) -> Block:
    """The block as the argument of one call of the model.

    JAX and OpenVINO compile a model for every batch size, so it is padded by copies of its last row to a power of two; with
    OpenVINO, which holds the weights once more for each size, to an eighth of the batch size at least. TensorFlow and JAX
    never change arguments. A PyTorch module may compute in place, so it gets a copy of rows in memory-mapped files and of
    arrays of the user.
    """
    backend, rows = backend_name(), block.rows
    if backend in ("jax", "openvino"):
        least = batch_size // 8 if backend == "openvino" else 1
        rows = min(batch_size, max(least, 1 << (rows - 1).bit_length()))
    if rows > block.rows:
        return block[np.minimum(np.arange(rows), block.rows - 1)]
    return overwritable(block) if backend == "torch" else block


def _packed(block: Block) -> Any:
    """What Keras passes to ``train_step``: a tuple, or features alone if there is one input and there are no labels."""
    import keras

    return keras.utils.pack_x_y_sample_weight(block.x, block.y, block.sample_weight)


def _in_tuple(packed: Any) -> tuple[Any, ...]:
    """Keras takes tuples only from a generator."""
    return packed if isinstance(packed, tuple) else (packed,)


@functools.lru_cache(maxsize=4)
def _tensorflow_source(spec: BlockSpec, batch_size: int | None, held_out: bool) -> Any:
    """The cached dataset for all rounds over blocks of this spec: building one takes 25 ms, longer than a short round.

    ``held_out`` selects a second dataset for validation, which is used at the same time as the one for training.
    """
    return _TensorFlowSource(spec, batch_size)


class _TensorFlowSource:
    def __init__(self, spec: BlockSpec, batch_size: int | None) -> None:
        import tensorflow as tf

        self.pieces: Iterator[Block] = iter(())
        self.error: Exception | None = None

        def generate() -> Iterator[Any]:
            try:
                yield from map(_packed, self.pieces)
            except Exception as error:
                self.error = error
                raise

        dataset = tf.data.Dataset.from_generator(generate, output_signature=_signature(spec))
        if batch_size is not None:
            dataset = dataset.rebatch(batch_size)
        self.dataset = _prefetched(dataset).with_options(_tensorflow_options())


def _dataset_in_memory(spec: BlockSpec, batch_size: int, block: Block) -> Any:
    """A dataset of these rows. It calls no Python function, so that its first batch is there 15 ms earlier."""
    import tensorflow as tf

    whole = block.rows // batch_size
    batches = (array.reshape(whole, batch_size, *array.shape[1:]) for array in block[: whole * batch_size].arrays)
    dataset = tf.data.Dataset.from_tensor_slices(_packed(Block(spec.form, tuple(batches))))
    if block.rows > whole * batch_size:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(_packed(block[whole * batch_size :])))
    # With the signature of other datasets of the spec, so that Keras's functions are not traced for both.
    variant = tf.data.experimental.to_variant(_prefetched(dataset).with_options(_tensorflow_options()))
    return tf.data.experimental.from_variant(variant, _signature(spec))


def _prefetched(dataset: Any) -> Any:
    """The dataset with a batch read ahead if a GPU trains; a worker's only CPU core would rather train than read ahead."""
    return dataset.prefetch(1) if _has_gpu() else dataset


def _signature(spec: BlockSpec) -> Any:
    import tensorflow as tf

    return _packed(Block(spec.form, tuple(tf.TensorSpec((None, *leaf.shape), leaf.dtype) for leaf in spec.leaves)))


@functools.cache
def _tensorflow_options() -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    options.deterministic = True
    return options
