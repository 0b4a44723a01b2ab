"""Train a digit classifier with a loop of its own in JAX: a training function, once on each of several workers.

::

    python examples/jax_distributed.py [--epochs N] [--workers N] [--master local[2]]

Spark starts the processes and distributes the rows; in JAX, the devices of all processes form one mesh. Needs JAX. The
digits come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surroundings import hushed, start_spark

with hushed():
    import numpy as np
    from digits import BATCH_SIZE, SEED, command_line, print_accuracy, same, split_digits

    from sparkkeras import SparkRunner
    from sparkkeras.runner import context


def train(epochs: int) -> list[Any]:
    """Train on the rows of this rank, together with the other ranks; returns the weights, the same on all of them."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    ranks = context()
    jax.distributed.initialize(num_processes=ranks.world_size, process_id=ranks.rank)  # reads JAX_COORDINATOR_ADDRESS
    mesh = Mesh(jax.devices(), ("ranks",))
    by_rows, replicated = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())

    def loss_of(weights: Any, x: Any, y: Any, counts: Any) -> Any:
        kernel, bias = weights
        scores = jax.nn.log_softmax(x @ kernel + bias)
        return -(scores[np.arange(len(y)), y] * counts).sum() / counts.sum()

    def step(weights: Any, *batch: Any) -> Any:
        """A step of gradient descent on the union of the batches of all ranks: JAX adds the collectives."""
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)
        return [weight - 0.5 * gradient for weight, gradient in zip(weights, gradients, strict=True)], loss

    compiled = jax.jit(step, out_shardings=replicated)
    kernel = np.random.default_rng(SEED).normal(size=(64, 10)).astype(np.float32) / 8
    weights = jax.device_put([kernel, np.zeros(10, np.float32)], replicated)
    for epoch in range(epochs):
        for batch in padded(ranks):
            parts = [jax.make_array_from_process_local_data(by_rows, part) for part in batch]
            weights, loss = compiled(weights, *parts)
        if ranks.rank == 0:
            ranks.report(epoch, {"loss": loss}, epochs)
    return [np.asarray(weight) for weight in weights]


def padded(ranks: Any) -> Any:
    """Batches of the same size, as many on all ranks: filled up with rows that count 0 and not 1."""
    batches = list(ranks.batches(BATCH_SIZE))
    batches += [(np.zeros((0, 64), np.float32), np.zeros(0, np.int64))] * (ranks.steps(BATCH_SIZE) - len(batches))
    for x, y in batches:
        missing = BATCH_SIZE - len(x)
        counts = np.ones(len(x), np.float32)
        yield np.pad(x, [(0, missing), (0, 0)]), np.pad(y, (0, missing)), np.pad(counts, (0, missing))


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments, "Train a digit classifier with jax.distributed on Spark.", epochs=10)
    spark = start_spark(options.master)
    x_train, x_test, y_train, y_test = split_digits()
    weights = SparkRunner(options.workers).run(train, options.epochs, data=(x_train, y_train))
    spark.stop()

    kernel, bias = same(weights)
    print_accuracy(x_test @ kernel + bias, y_test, len(weights))


if __name__ == "__main__":
    main()
