"""Models with a fixed batch size: stateful recurrent layers continue row i of each batch from row i of the batch before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras

from sparkkeras.errors import ConfigurationError, DataError, counted, warn


def fixed_batch_size(model: keras.Model) -> int | None:
    """The batch size that stateful recurrent layers of a model require; ``None`` if it has none."""
    stateful = any(getattr(layer, "stateful", False) and hasattr(layer, "reset_state") for layer in model._flatten_layers())
    sizes = [tensor.shape[0] for tensor in getattr(model, "inputs", None) or ()] if stateful else []
    return next((int(size) for size in sizes if size is not None), None)


def check_batch_size(model: keras.Model, argument: str, batch_size: int) -> None:
    """Check that batches have the size that the model requires.

    Raises:
        ConfigurationError: They have another size.
    """
    fixed = fixed_batch_size(model)
    if fixed is not None and batch_size != fixed:
        raise ConfigurationError(
            f"the model {model.name!r} has stateful layers, and its inputs a fixed batch size of {fixed}, but "
            f"{argument}={batch_size}: set {argument}={fixed}, or build the model with keras.Input(..., "
            f"batch_size={batch_size})."
        )


def check_partitions(model: keras.Model, rows: Sequence[int | None], purpose: str, max_batches: int | None = None) -> None:
    """Check that each partition consists of whole batches, for a model with a fixed batch size.

    Args:
        model: The model.
        rows: The number of rows of each partition; ``None`` if it is unknown.
        purpose: What the rows are for, in messages.
        max_batches: The largest number of batches of a partition that are used; ``None``: all.

    Raises:
        ConfigurationError: The last batch of a partition has fewer rows.
    """
    fixed = fixed_batch_size(model)
    if fixed is None:
        return
    for partition, count in enumerate(rows):
        if count is not None and count % fixed and (max_batches is None or count // fixed < max_batches):
            steps = " or steps_per_epoch=" if purpose == "training" else ""
            raise ConfigurationError(
                f"the model {model.name!r} has stateful layers, and its inputs a fixed batch size of {fixed}, but partition "
                f"{partition} has {counted(count, 'row')} for {purpose}, so its last batch has only {count % fixed}: the "
                f"rows of each partition must be a multiple of {fixed}. Leave rows out, or set num_workers={steps}."
            )


def check_whole_batches(model: keras.Model, rows: int) -> None:
    """Check on a worker that rows make whole batches, for a model with a fixed batch size.

    Raises:
        DataError: The last batch has fewer rows.
    """
    fixed = fixed_batch_size(model)
    if fixed is not None and rows % fixed:
        raise DataError(
            f"the model {model.name!r} has stateful layers, and its inputs a fixed batch size of {fixed}, but there are "
            f"{counted(rows, 'row')}, which leaves a batch of {rows % fixed}: the rows of each partition must be a multiple "
            f"of {fixed}. Leave rows out, or change the number of partitions."
        )


@contextmanager
def whole_batches(model: keras.Model, sizes: list[int]) -> Iterator[None]:
    """Raise the error of `check_whole_batches` if the model fails on the last batch.

    Args:
        model: The model.
        sizes: The numbers of rows that the model receives in the ``with`` block; they are added in it.
    """
    try:
        yield
    except Exception:
        check_whole_batches(model, sum(sizes))
        raise


def warn_of_shuffle(model: keras.Model, shuffle: bool) -> None:
    """Warn if rows are shuffled, so that the states of recurrent layers would continue those of other rows."""
    if shuffle and fixed_batch_size(model) is not None:
        warn(
            f"the model {model.name!r} has stateful layers, which continue from the states of the batch before, but "
            "shuffle=True reorders the rows in each epoch: pass shuffle=False if batches continue each other."
        )
