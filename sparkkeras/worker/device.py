"""Making a process ready to train: the backend, its threads, its devices, its way of taking batches.

The only file that names a backend.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from sparkkeras.data.block import Block, BlockSpec, changed
from sparkkeras.errors import ClusterError, DataError
from sparkkeras.modeling import garbage

AUTO_STEPS_PER_EXECUTION = 32
"""Steps in one compiled call, where the person left the choice and the backend runs them in a loop."""


def worker_environment(cores: int) -> dict[str, str]:
    """Environment variables for the workers that train: the driver's backend, quiet, taking memory as it is needed.

    Args:
        cores: CPU cores of a task, which are the threads that it gets.
    """
    import keras

    return {
        "KERAS_BACKEND": keras.backend.backend(),
        "SPARKKERAS_FLOATX": keras.config.floatx(),
        "SPARKKERAS_DTYPE_POLICY": keras.config.dtype_policy().name,
        "SPARKKERAS_IMAGE_DATA_FORMAT": keras.config.image_data_format(),
        "NPROC": str(cores),  # the threads of JAX on the CPU
        "OMP_NUM_THREADS": str(cores),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else the import begins with CUDA, and no fork could use it
    }


def load() -> None:
    """Import Keras and its backend, without what they write to standard error then, and run nothing."""
    with _hushed():
        import keras  # noqa: F401
    garbage.keep_loaded()


@functools.cache
def prepare(cores: int, accelerators: tuple[str, ...] = (), environment: tuple[tuple[str, str], ...] = ()) -> None:
    """Import Keras and its backend in this process, once, with as many threads as the task has cores.

    Outside a Spark worker nothing is touched: the process is the person's.

    Args:
        cores: CPU cores of a task.
        accelerators: The addresses of the GPUs that Spark gave the task.
        environment: Environment variables that were not set when this process began.
    """
    os.environ.update(environment)
    if not os.environ.get("SPARKKERAS_WORKER"):
        return
    if accelerators:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(accelerators)
    with _hushed():
        import keras

        keras.config.set_floatx(os.environ["SPARKKERAS_FLOATX"])
        keras.config.set_dtype_policy(os.environ["SPARKKERAS_DTYPE_POLICY"])
        keras.config.set_image_data_format(os.environ["SPARKKERAS_IMAGE_DATA_FORMAT"])
        backend = keras.backend.backend()
        if backend != os.environ["KERAS_BACKEND"]:
            raise ClusterError(
                f"Keras was loaded with the backend {backend!r} in a worker process that shall train with "
                f"{os.environ['KERAS_BACKEND']!r}: a function of yours has imported it there. Set KERAS_BACKEND for workers."
            )
        if backend == "tensorflow":
            import tensorflow

            with suppress(RuntimeError):  # where the person's own functions share this process, and have used it already
                tensorflow.config.threading.set_intra_op_parallelism_threads(cores)
                tensorflow.config.threading.set_inter_op_parallelism_threads(cores)
            tensorflow.get_logger().addFilter(_is_for_the_person)
        elif backend == "torch":
            import torch

            torch.set_num_threads(cores)
    garbage.keep_loaded()


def _is_for_the_person(record: logging.LogRecord) -> bool:
    """Whether a log record of TensorFlow's concerns the person's code.

    TensorFlow counts how often Keras's functions are traced over all models together, so it warns when a process has
    trained or called a few models, each of which it traced once.
    """
    message = record.getMessage()
    return not ("triggered tf.function retracing" in message and "TensorFlowTrainer." in message)


def is_untouched() -> bool:
    """Whether the backend has run nothing in this process yet, so that a fork of it can use it."""
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        from tensorflow.python.eager import context

        return not getattr(context.context(), "_initialized", False)
    if backend == "jax":
        from jax._src import xla_bridge

        return not getattr(xla_bridge, "_backends", {})
    import torch

    return not torch.cuda.is_initialized()


def wake() -> None:
    """Have the backend begin in this process, without what it writes to standard error then."""
    import keras

    with _hushed():
        keras.ops.zeros(())


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep what a backend writes to standard error while it loads from the person's terminal, unless loading fails."""
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(kept, said.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def steps_per_execution(model: Any, chosen: int, single: bool, every: int | None = None) -> int:
    """How many steps a compiled call of this model runs.

    Args:
        model: The model.
        chosen: What it was compiled with. 1 is Keras's default, so it leaves the choice to us.
        single: Whether somebody listens to every batch.
        every: After how many steps somebody wants to come between two calls, if anybody does.
    """
    import keras

    if chosen > 1 or single or keras.backend.backend() != "tensorflow" or model.run_eagerly:
        most = chosen
    else:
        most = AUTO_STEPS_PER_EXECUTION
    return most if every is None else max(steps for steps in range(1, most + 1) if every % steps == 0)


Pieces = Callable[[], Iterator[Block]]
"""Gives blocks in the order of training; each but the last has a whole number of batches."""


@contextmanager
def feed(spec: BlockSpec, batch_size: int, pieces: Pieces, held_out: bool = False) -> Iterator[Any]:
    """Something that ``fit``, ``evaluate`` and ``predict`` of this backend's Keras take one epoch of batches from.

    It is good until the context ends, and holds on to no row after that.

    Args:
        spec: The shapes and dtypes of the blocks.
        batch_size: Rows in a batch.
        pieces: The rows.
        held_out: Whether ``fit`` validates on them while it holds others to train on.
    """
    import keras

    if keras.backend.backend() == "tensorflow":
        source = _tensorflow_source(spec, batch_size, held_out)
        source.pieces, source.error = pieces, None
        try:
            yield source.dataset
        except Exception as error:
            if source.error is not None:  # TensorFlow reports it in words of its own
                raise source.error from error
            raise
        finally:
            source.pieces, source.error = _nothing, None
    else:
        yield (_packed(batch) for piece in _alike(pieces(), spec) for batch in piece.batches(batch_size))


def _alike(pieces: Iterator[Block], spec: BlockSpec) -> Iterator[Block]:
    for piece in pieces:
        if piece.spec != spec:
            raise DataError(changed(spec, piece.spec))
        yield piece


def _nothing() -> Iterator[Block]:
    return iter(())


def given_away(block: Block) -> Block:
    """The block as a backend may have it: in memory that it may write into, copied where that is needed.

    TensorFlow and JAX take memory that begins at a multiple of 64 bytes (16 in older builds) as it is, and may compute in
    place there; all other memory they copy. PyTorch takes any. Rows that lie in a file, or that the person holds, must stay
    as they are.
    """
    import keras

    copies = keras.backend.backend() in {"tensorflow", "jax"}
    arrays = (
        array if array.base is None or (copies and array.ctypes.data % 16) else np.array(array) for array in block.arrays
    )
    return Block(block.form, tuple(arrays))


def to_predict(model: Any) -> Any:
    """The model, ready for calls of ``predict_on_batch``. Under PyTorch, ``predict`` puts it into evaluation mode first."""
    import keras

    if keras.backend.backend() == "torch":
        model.eval()
    return model


def lent(block: Block) -> Block:
    """The block as a backend may have it for one call.

    TensorFlow and JAX only read what they are called with. A PyTorch module may work in place, so it gets a copy of rows
    that lie in a file, or that the person holds.
    """
    import keras

    return given_away(block) if keras.backend.backend() == "torch" else block


def _packed(block: Block) -> tuple[Any, ...]:
    sides = (block.x, block.y, block.sample_weight)
    return sides[: 1 + max(index for index, side in enumerate(sides) if side is not None)]


@functools.lru_cache(maxsize=4)
def _tensorflow_source(spec: BlockSpec, batch_size: int, held_out: bool) -> Any:
    """A dataset that is built once for all rounds over blocks of one kind: building one takes longer than a short round.

    ``held_out``: one beside that, so that two are fed at the same time.
    """
    return _TensorFlowSource(spec, batch_size)


class _TensorFlowSource:
    def __init__(self, spec: BlockSpec, batch_size: int) -> None:
        import tensorflow as tf

        self.pieces: Pieces = _nothing
        self.error: Exception | None = None
        specs = tuple(tf.TensorSpec((None, *leaf.shape), leaf.dtype) for leaf in spec.leaves)

        def generate() -> Iterator[Any]:
            try:
                yield from (_packed(piece) for piece in _alike(self.pieces(), spec))
            except Exception as error:
                self.error = error
                raise

        # No prefetch: a worker has one core for most, and a second thread only gets in the first one's way.
        dataset = tf.data.Dataset.from_generator(generate, output_signature=_packed(Block(spec.form, specs)))
        dataset = dataset.rebatch(batch_size)
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = False
        options.deterministic = True
        self.dataset = dataset.with_options(options)
