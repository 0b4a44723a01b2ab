"""Warns if the rows that workers train on are sorted, so that each worker would learn a part of the problem."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkkeras.data.dataset import StoredDataset, common_spec
from sparkkeras.data.partition_stats import Difference, largest_difference
from sparkkeras.errors import warn
from sparkkeras.sources.source import FrameSource, Source
from sparkkeras.training.preparation import FitRequest


def warn_of_sorted_rows(request: FitRequest, dataset: StoredDataset, averages: bool) -> None:
    """Warn if partitions differ so much that training on them apart costs accuracy, unless ``shuffle`` is ``False``.

    Args:
        request: The call of `fit`.
        dataset: The stored rows.
        averages: Whether each worker trains on its own partition for some batches; otherwise all take part in every step,
            and only the rows for validation may differ from the others.
    """
    spec = common_spec(dataset.handles)
    if spec is None or request.options.shuffle is False or not (averages or request.validation_split):
        return
    found = largest_difference(spec, {each.partition: each.stats for each in dataset.handles if each.stats is not None})
    if found is None:
        return
    name = _name(request.source, spec.form.labels[found.array], spec.leaves[found.array].shape, found)
    (low, least), (high, most) = found.low, found.high
    if found.group is None:
        what = f"{name} has the mean {least:.4g} in partition {low} and {most:.4g} in partition {high}"
    else:
        what = (
            f"{name} is {found.group} in {most:.0%} of the rows of partition {high}, and in {least:.0%} of partition {low}"
        )
    cost = (
        "Each worker learns from its own partition until the next exchange, so the model may become much worse: digits that "
        "were sorted by label reached an accuracy of 0.43 instead of 0.92."
        if averages
        else "validation_split takes the last rows of each partition, so its metrics may not be those of other rows."
    )
    warn(
        f'the rows seem to be sorted: {what}. {cost} Pass shuffle="global" to redistribute the rows at random, once, while '
        "they are stored. If their order matters, shuffle=False keeps it, without this warning."
    )


def _name(source: Source, label: str, shape: tuple[int, ...], found: Difference) -> str:
    """The column that differs, or the value of an array."""
    columns: Any = ()
    if isinstance(source, FrameSource):
        columns = source.selection.leaves[found.array].columns
    if len(columns) == 1 or found.value is None:
        label = repr(columns[0]) if columns else label
    elif len(columns) == np.prod(shape):
        return repr(columns[found.value])
    return label if found.value is None or np.prod(shape) == 1 else f"value {found.value} of {label}"
