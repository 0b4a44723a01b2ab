"""Train a digit classifier under TensorFlow's MultiWorkerMirroredStrategy: a training function, once on each worker.

::

    python examples/mirrored_strategy.py [--epochs N] [--workers N] [--master local[2]]

The function has a training loop of its own; Spark starts its processes and distributes the rows. Needs TensorFlow. The
digits come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from digits import BATCH_SIZE, SEED, command_line, print_accuracy, same, split_digits

    from sparkkeras import SparkRunner
    from sparkkeras.runner import context


def train(epochs: int) -> list[Any]:
    """Train on the rows of this rank, together with the other ranks; returns the weights, the same on all of them."""
    import tensorflow as tf

    ranks = context()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # finds the others in TF_CONFIG
    with strategy.scope():
        total = tf.VariableAggregation.SUM  # what the ranks assign or subtract is added up
        kernel = tf.Variable(tf.random.stateless_normal((64, 10), (SEED, 0)) / 8, aggregation=total)
        bias = tf.Variable(tf.zeros(10), aggregation=total)

    @tf.function(autograph=False)  # no Python control flow to convert
    def step(x: Any, y: Any, rows: Any) -> Any:
        """A step of gradient descent on the union of the batches of all ranks, which may differ in size."""

        def of_rank(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ kernel + bias)
                loss = tf.reduce_sum(losses) / rows
            for variable, gradient in zip([kernel, bias], tape.gradient(loss, [kernel, bias]), strict=True):
                variable.assign_sub(0.5 * gradient)
            return loss

        return strategy.reduce("sum", strategy.run(of_rank, (x, y)), None)

    none = np.zeros((0, 64), np.float32), np.zeros(0, np.int64)
    for epoch in range(epochs):
        batches = list(ranks.batches(BATCH_SIZE))
        batches += [none] * (ranks.steps(BATCH_SIZE) - len(batches))  # all ranks make the same number of steps
        rows = ranks.all_reduce([len(x) for x, _ in batches])
        losses = [float(step(x, y, float(count))) for (x, y), count in zip(batches, rows, strict=True)]
        if ranks.rank == 0:
            ranks.report(epoch, {"loss": np.average(losses, weights=rows)}, epochs)
    return [kernel.numpy(), bias.numpy()]


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments, "Train a digit classifier under MultiWorkerMirroredStrategy on Spark.", epochs=10)
    spark = start_spark(options.master)
    x_train, x_test, y_train, y_test = split_digits()
    weights = SparkRunner(options.workers).run(train, options.epochs, data=(x_train, y_train))
    spark.stop()

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.set_weights(same(weights))
    print_accuracy(model.predict(x_test, verbose=0), y_test, len(weights))


if __name__ == "__main__":
    main()
