"""Models with a fixed batch size: stateful recurrent layers continue row i of each batch from row i of the batch before."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from sparkkeras.data.placement import Shuffle
from sparkkeras.errors import ConfigurationError, DataError, counted, warn


def fixed_batch_size(model: keras.Model) -> int | None:
    """The batch size that stateful recurrent layers of a model require; ``None`` if it has none."""
    sizes = (tensor.shape[0] for tensor in getattr(model, "inputs", None) or ())
    fixed = next((int(size) for size in sizes if size is not None), None)
    if fixed is None:
        return None
    is_stateful = any(
        getattr(layer, "stateful", False) and hasattr(layer, "reset_state") for layer in model._flatten_layers()
    )
    return fixed if is_stateful else None


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
    for partition, count in enumerate(rows):
        check_rows(model, count, purpose, max_batches, partition)


def check_rows(
    model: keras.Model, rows: int | None, purpose: str, max_batches: int | None = None, partition: int | None = None
) -> None:
    """Check that rows make whole batches, for a model with a fixed batch size.

    Args:
        model: The model.
        rows: The number of rows; ``None`` if it is unknown.
        purpose: What the rows are for, in messages.
        max_batches: The largest number of batches that are used; ``None``: all.
        partition: The partition that has the rows; ``None``: they are those of all partitions.

    Raises:
        ConfigurationError: The last batch has fewer rows.
    """
    fixed = fixed_batch_size(model)
    if fixed is None or rows is None or not rows % fixed or (max_batches is not None and rows // fixed >= max_batches):
        return
    there_are, of_each, settings = "there are", "", []
    if partition is not None:
        there_are, of_each, settings = f"partition {partition} has", " of each partition", ["num_workers="]
    if purpose == "training":
        settings.append("steps_per_epoch=")
    other = f", or set {' or '.join(settings)}" if settings else ""
    raise ConfigurationError(
        f"the model {model.name!r} has stateful layers, and its inputs a fixed batch size of {fixed}, but {there_are} "
        f"{counted(rows, 'row')} for {purpose}, so the last batch has only {rows % fixed}: the rows{of_each} must be a "
        f"multiple of {fixed}. Leave rows out{other}."
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


def check_batch(model: keras.Model, rows: int) -> None:
    """Check the size of a batch that a function of the user has read on a worker, for a model with a fixed batch size.

    Raises:
        DataError: The batch has another size.
    """
    fixed = fixed_batch_size(model)
    if fixed is not None and rows != fixed:
        raise DataError(
            f"the model {model.name!r} has stateful layers, and its inputs a fixed batch size of {fixed}, but the function "
            f"that reads batches returned one of {counted(rows, 'row')}: return batches of {fixed} rows, such as those of "
            f"dataset.batch({fixed}, drop_remainder=True)."
        )


def warn_of_shuffle(model: keras.Model, shuffle: Shuffle) -> None:
    """Warn if rows are shuffled, so that the states of recurrent layers would continue those of other rows."""
    if shuffle and fixed_batch_size(model) is not None:
        warn(
            f"the model {model.name!r} has stateful layers, which continue from the states of the batch before, but "
            "shuffle=True reorders the rows in each epoch: pass shuffle=False if batches continue each other."
        )
