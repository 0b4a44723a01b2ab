"""Warns if rows are sorted: each worker would learn a part of the problem, or rows for validation are unlike the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.data.block import Block, BlockSpec
from sparkkeras.data.dataset import TaskContext, common_spec
from sparkkeras.data.partition_stats import Difference, PartitionStats, largest_difference
from sparkkeras.errors import warn
from sparkkeras.sources.source import FrameSource, Source

if TYPE_CHECKING:
    from sparkkeras.training.run import Run


@dataclass(frozen=True)
class SplitStats:
    """Yields the statistics of the rows of a partition to train on, with the number 0, and of those to validate on, with 1.

    Attributes:
        train: The number of rows of each partition to train on.
    """

    train: tuple[int | None, ...]

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[tuple[int, PartitionStats]]:
        """Compute them."""
        rows = self.train[context.worker]
        for block in blocks:
            for number, part in enumerate((block[:rows], block[rows:])):
                if part.rows:
                    yield number, PartitionStats.of(part)


def warn_of_sorted_rows(run: Run, averages: bool) -> None:
    """Warn if differences between rows cost accuracy, or make metrics of validation misleading.

    Args:
        run: The run, whose rows are stored. It is silent for arrays, which are dealt at random, and for ``shuffle=False``.
        averages: Whether each worker trains on its own partition for some batches; otherwise all take part in every step.
    """
    source, dataset, spec = run.source, run.dataset, common_spec(run.dataset.handles)
    if spec is None or run.options.shuffle is not True or source.block is not None or source.in_batches:
        return
    reasons = []
    if averages:
        stats = {each.partition: each.stats for each in dataset.handles if each.stats is not None}
        found = largest_difference(spec, stats)
        if found is not None:
            places = [f"partition {number}" for number, _ in (found.low, found.high)]
            example = "" if found.group is None else ": digits sorted by label reached an accuracy of 0.57 instead of 0.85"
            reasons.append(
                f"{_described(source, spec, found, places)}. Each worker learns from its own partition until the next "
                f"exchange, so the model may become much worse{example}."
            )
    if run.given["validation_split"]:
        parts: dict[int, list[PartitionStats]] = {}
        for number, each in dataset.run(SplitStats(run.split.train)).collect():
            parts.setdefault(number, []).append(each)
        found = largest_difference(spec, {number: reduce(PartitionStats.union, each) for number, each in parts.items()})
        if found is not None:
            names = ("the rows to train on", "those of validation_split, the last ones of each partition")
            places = [names[number] for number, _ in (found.low, found.high)]
            reasons.append(f"{_described(source, spec, found, places)}: the metrics of validation may be misleading.")
    if reasons:
        warn(
            f'the rows seem to be sorted. {" ".join(reasons)} Pass shuffle="global" to redistribute the rows at random, '
            "once, while they are stored. If their order matters, shuffle=False keeps it, without this warning."
        )


def _described(source: Source, spec: BlockSpec, found: Difference, places: list[str]) -> str:
    """A difference between the rows in two places, of which the second one has the larger mean or share."""
    name = _name(source, spec.form.labels[found.array], spec.leaves[found.array].shape, found)
    (_, least), (_, most) = found.low, found.high
    if found.group is None:
        return f"{name} has the mean {least:.4g} in {places[0]}, and {most:.4g} in {places[1]}"
    return f"{name} is {found.group} in {most:.0%} of {places[1]}, and in {least:.0%} of {places[0]}"


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
