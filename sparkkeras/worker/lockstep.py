"""Training in step: the workers of a group average the gradients of their replicas at every step of Keras's ``fit``.

A gradient is weighted by the rows of its batch, since a loss of Keras is a mean over rows. So n workers with batches of b
rows compute what one computes with batches of n * b rows, up to rounding errors; sample and class weights are factors of a
row's loss, and do not change its part in the mean.

All workers make as many steps as the busiest one. A worker with fewer batches trains on zeros with the weight 0 in the
other steps, and restores whatever such a step changed besides the weights. Its batches are spread evenly over the steps: if
the last steps were those of one worker alone, whose rows may be unlike the others, the model would forget the others.

Replicas stay equal to the last bit: they start equal and receive the same sums. The exceptions are the statistics of
batches (BatchNormalization), which are averaged at the end of each epoch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from sparkkeras.data.block import Block, BlockSpec, Form, LeafSpec, Structure, changed
from sparkkeras.errors import ClusterError, DataError
from sparkkeras.modeling import backends
from sparkkeras.modeling.optimizers import inner_of, optimizers_of, step_is_stateless
from sparkkeras.modeling.state import ModelState, statistics_variables
from sparkkeras.weights import Array, Flat, Layout, average
from sparkkeras.worker import device
from sparkkeras.worker.batches import EpochBatches
from sparkkeras.worker.collectives import Group

GRADIENT_DTYPES = ("float16", "bfloat16")
"""The dtypes in which gradients can be sent instead of their own."""

STREAM_WINDOW = 8
"""Workers that read streams tell each other after so many batches whether they have more. They are read ahead."""


class EpochInStep:
    """The batches of one worker in an epoch in which all workers make the same number of steps: an `EpochBatches`.

    Attributes:
        spec: The shapes and dtypes of the batches of all workers.
        batch_size: The number of rows in a batch; ``None``: each piece is a batch.
        steps: The number of steps of all workers; ``None``, as for streams, if it is unknown until the end.
    """

    def __init__(
        self, lockstep: Lockstep, own: EpochBatches | None, spec: BlockSpec, batch_size: int | None, steps: int | None
    ) -> None:
        self.spec, self.batch_size, self.steps = spec, batch_size, steps
        self._lockstep, self._group, self._own = lockstep, lockstep.group, own
        self._flags: list[bool] = []  # of the steps of streams so far: whether each has a batch of this worker

    def pieces(self) -> Iterator[Block]:
        """The rows of this worker; of streams also the padding that other workers need."""
        own = iter(()) if self._own is None else self._own.pieces()
        return own if self.steps is not None else self._in_windows(own)

    def trained(self, steps: int = sys.maxsize) -> tuple[int, int]:
        """See `EpochBatches.trained`; without padding."""
        if self._own is None:
            return 0, 0
        if self.steps is None:
            return self._own.trained(sum(self._flags[:steps]))
        return self._own.trained(batches_before(min(steps, self.steps), self._own.steps or 0, self.steps))

    def is_last(self, steps: int) -> bool:
        """See `EpochBatches.is_last`."""
        return self._own is None or self._own.is_last(self.trained(steps)[0])

    @contextmanager
    def training(self, model: Any, batches: Any) -> Iterator[Any]:
        """What to call the ``fit`` of a model on: what `device.feed` made of the pieces, with padding and flags.

        Raises:
            PeerLostError: Another worker is gone.
        """
        self._lockstep.install(model)
        with self._group.naming_lost_peers():
            if self.steps is not None and self.batch_size is not None:
                own = 0 if self._own is None else self._own.steps or 0
                yield device.in_step(batches, self.spec.zeros(self.batch_size), spread(own, self.steps))
            else:
                yield device.flagged(batches, iter(self._flags))

    def end(self, model: Any, before: ModelState, stop: bool) -> tuple[ModelState, bool]:
        """Average the statistics of batches, and compare the states of all workers at the end of an epoch.

        Args:
            model: The model at the end of an epoch.
            before: Its state at the beginning.
            stop: Whether this worker wants to stop training.

        Returns:
            The common state, and whether any worker wants to stop.

        Raises:
            ClusterError: The states differ.
        """
        self._average_statistics(model, before)
        state = ModelState.take(model)
        found = self._group.gather_bytes(_digest(state) + bytes([stop]))
        differing = [rank for rank, each in enumerate(found) if each[:-1] != found[0][:-1]]
        if differing:
            raise ClusterError(
                f"after an epoch of training in step, the weights or optimizer variables of the workers {differing} differ "
                "from those of worker 0. Either their machines compute differently (use the same kind of processors and the "
                "same versions of libraries), or a callback or layer changes weights on each worker in its own way."
            )
        return state, any(each[-1] for each in found)

    def _average_statistics(self, model: Any, before: ModelState) -> None:
        """Average the weights that training changes without gradients, such as batch statistics.

        Floating-point values are averaged by rows; of integers, the largest is taken.
        """
        variables = statistics_variables(model)
        values = [np.array(backends.read(variable)) for variable in variables]
        old = Layout.of(values).unpack(_tail(before.weights, values))
        mine = np.array([not np.array_equal(new, then) for new, then in zip(values, old, strict=True)], np.int32)
        flags = np.any(self._group.gather(mine), axis=0)
        changes = [index for index in range(len(values)) if flags[index]]
        if not changes:
            return
        layout = Layout.of([values[index] for index in changes])
        flat = layout.pack([values[index] for index in changes])
        weights = [int(each) for each in self._group.gather(np.array(self.trained()[1], np.int64))]
        vectors = self._group.gather(flat.vector)
        integers = zip(*(self._group.gather(each) for each in flat.integer_variables), strict=True)
        merged = [tuple(each) for each in integers] or [()] * len(vectors)
        mean = average(
            (Flat(vector, counts), weight) for vector, counts, weight in zip(vectors, merged, weights, strict=True)
        )
        for index, value in zip(changes, layout.unpack(mean), strict=True):
            backends.assign(variables[index], value)

    def _in_windows(self, batches: Iterator[Block]) -> Iterator[Block]:
        longest, rows = STREAM_WINDOW, 0
        while longest == STREAM_WINDOW:
            window = list(islice(batches, STREAM_WINDOW))
            rows = window[-1].rows if window else rows
            lengths, sizes = np.stack(self._group.gather(np.array([len(window), rows], np.int32)), axis=1)
            longest = int(lengths.max())
            # As many rows as in a batch: a model may take no other number, and JAX compiles for each one.
            padding = self.spec.zeros(rows or int(sizes.max()))
            own = iter(window)
            for flag in spread(len(window), longest):
                self._flags.append(flag)
                yield next(own) if flag else padding


def batches_before(step: int, batches: int, steps: int) -> int:
    """How many of the batches that are spread evenly over ``steps`` come before a step. The last one is in the last step."""
    return step * batches // steps


def spread(batches: int, steps: int) -> list[bool]:
    """Whether each step has one of the batches that are spread evenly over the steps."""
    before = [batches_before(step, batches, steps) for step in range(steps + 1)]
    return [after > until for until, after in pairwise(before)]


@dataclass
class Lockstep:
    """Trains models in step with the other processes of a group.

    Attributes:
        group: The group. All its processes call the same methods in the same order.
        gradient_dtype: The dtype in which gradients are exchanged; ``None``: their own.
    """

    group: Group
    gradient_dtype: str | None = None
    _weight: Any = dataclasses.field(default=None, init=False, repr=False)

    def epoch(self, own: EpochBatches | None, batch_size: int) -> EpochInStep:
        """What all workers train in an epoch.

        Args:
            own: The batches of this worker; ``None`` if it has no rows.
            batch_size: The number of rows in a batch of other workers.

        Raises:
            DataError: The rows of workers have different specs, or none has any.
        """
        mine = [None, 0] if own is None else [dataclasses.asdict(own.spec), own.steps]
        plans = [json.loads(plan) for plan in self.group.gather_bytes(json.dumps(mine).encode())]
        specs = {rank: _spec(packed) for rank, (packed, _) in enumerate(plans) if packed is not None}
        if not specs:
            raise DataError("no worker has any rows, so there is nothing to train on.")
        first, common = next(iter(specs.items()))
        for rank, other in specs.items():
            if other != common:
                raise DataError(f"the rows of worker {rank} differ from those of worker {first}: {changed(common, other)}")
        steps = [count for _, count in plans]
        known = None if None in steps else max(steps)
        return EpochInStep(self, own, common, None if known is None else batch_size, known)

    def install(self, model: Any) -> None:
        """Have the training steps of a model average gradients, from now on."""
        if vars(model).get("_sparkkeras_lockstep") is self:
            return
        vars(model)["_sparkkeras_lockstep"] = self
        for optimizer in optimizers_of(model).values():
            if step_is_stateless():
                vars(optimizer)["stateless_apply"] = self._stateless(optimizer.stateless_apply)
            else:
                vars(optimizer)["apply"] = self._stateful(optimizer.apply, optimizer)
        step, wrap = model.train_step, self._stateless_step if step_is_stateless() else self._stateful_step
        vars(model)["train_step"] = wrap(step, model)
        model.train_function = None
        self.group.adopt(model)

    def _mean(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self.group.mean(gradients, variables, self._weight, self.gradient_dtype)

    def _begin(self, batch: Any, flag: Any) -> Any:
        """The data of a batch, whose weight counts from now on."""
        from keras import ops, tree

        self.group.begin_step()
        rows = ops.shape(tree.flatten(batch)[0])[0]
        self._weight = flag[0] * ops.cast(rows, "float32")
        return batch

    def _stateful(self, apply: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        """The ``apply`` of an optimizer, with averaged gradients."""

        def averaged(grads: Any, trainable_variables: Any = None) -> Any:
            built_for = inner_of(optimizer)._trainable_variables
            variables = list(built_for if trainable_variables is None else trainable_variables)
            return apply(self._mean(list(grads), variables), variables)

        return averaged

    def _stateless(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """The ``stateless_apply`` of an optimizer, with averaged gradients."""

        def averaged(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            return apply(optimizer_variables, self._mean(list(grads), list(trainable_variables)), trainable_variables)

        return averaged

    def _stateful_step(self, step: Callable[[Any], Any], model: Any) -> Callable[[Any], Any]:
        """A ``train_step`` for batches with a flag, see `device.in_step`."""
        from keras import ops

        def train_step(data: Any) -> Any:
            batch, flag = data
            if self.group.runs_eagerly and flag[0] > 0:
                return step(self._begin(batch, flag))
            variables = [*_changing(model), *model.metrics_variables]
            kept = [ops.copy(ops.convert_to_tensor(variable)) for variable in variables]
            logs = step(self._begin(batch, flag))
            for variable, value in zip(variables, kept, strict=True):
                variable.assign(ops.where(flag[0] > 0, variable, value))
            return logs

        return train_step

    def _stateless_step(self, step: Callable[[Any, Any], Any], model: Any) -> Callable[[Any, Any], Any]:
        """A ``train_step`` for batches with a flag, see `device.in_step`."""
        from keras import ops

        def train_step(state: Any, data: Any) -> Any:
            batch, flag = data
            changing = {id(variable) for variable in _changing(model)}
            logs, (weights, others, optimizer, metrics) = step(state, self._begin(batch, flag))
            others = [
                ops.where(flag[0] > 0, new, old) if id(variable) in changing else new
                for variable, new, old in zip(model.non_trainable_variables, others, state[1], strict=True)
            ]
            metrics = [ops.where(flag[0] > 0, new, old) for new, old in zip(metrics, state[3], strict=True)]
            return logs, (weights, others, optimizer, metrics)

        return train_step


def _changing(model: Any) -> list[Any]:
    """The variables that a step may change without gradients: seeds, statistics, states; not those of frozen layers."""
    frozen = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
    return [variable for variable in model.non_trainable_variables if id(variable) not in frozen]


def _spec(packed: Any) -> BlockSpec:
    """The inverse of ``dataclasses.asdict``."""

    def structure(given: Any) -> Structure | None:
        return None if given is None else Structure(tuple(map(tuple, given["paths"])))

    x, y, weight = (structure(packed["form"][side]) for side in ("x", "y", "weight"))
    assert x is not None
    return BlockSpec(Form(x, y, weight), tuple(LeafSpec(tuple(leaf["shape"]), leaf["dtype"]) for leaf in packed["leaves"]))


def _tail(weights: Flat, last: Sequence[Array]) -> Flat:
    """The part of the weights that holds the last variables."""
    layout = Layout.of(last).pack(last)
    integers = len(weights.integer_variables) - len(layout.integer_variables)
    return Flat(weights.vector[weights.vector.size - layout.vector.size :], weights.integer_variables[integers:])


def _digest(state: ModelState) -> bytes:
    digest = hashlib.sha256()
    for flat in (state.weights, state.optimizer):
        for array in (flat.vector, *flat.integer_variables):
            digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
