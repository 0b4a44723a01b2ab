"""Train a digit classifier under Keras's DataParallel on JAX: a training function, once on each of several workers.

::

    python examples/keras_data_parallel.py [--epochs N] [--workers N] [--master local[2]]

Each rank passes its own rows to an ordinary ``fit``, and JAX adds the gradients up in each step. Needs JAX. The digits come
with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from surroundings import hushed, start_spark

os.environ["KERAS_BACKEND"] = "jax"  # of this process, and so of the ranks

with hushed():
    import keras
    import numpy as np
    from digits import BATCH_SIZE, SEED, command_line, print_accuracy, same, split_digits

    from sparkkeras import SparkRunner
    from sparkkeras.runner import context


def train(epochs: int) -> list[Any]:
    """Train on the rows of this rank, together with the other ranks; returns the weights, the same on all of them."""
    ranks = context()
    keras.distribution.initialize()  # finds the others in KERAS_DISTRIBUTION_JOB_ADDRESSES and so on
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    keras.utils.set_random_seed(SEED)
    model = build_model()
    # Rows that fill up batches have the weight 0, so the mean is over the others.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(3e-3), loss)
    callbacks = []
    if ranks.rank == 0:
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=functools.partial(ranks.report, epochs=epochs)))
    x, y, weight = padded(ranks)
    model.fit(x, y, BATCH_SIZE, epochs, sample_weight=weight, callbacks=callbacks, verbose=0)
    return [np.asarray(weight.value) for weight in model.weights]


def padded(ranks: Any) -> tuple[Any, Any, Any]:
    """The rows of this rank with their weights, filled up so that all ranks have the same number of full batches."""
    x, y = map(np.concatenate, zip(*ranks.batches(BATCH_SIZE), strict=True))
    missing = ranks.steps(BATCH_SIZE) * BATCH_SIZE - len(x)
    return np.pad(x, [(0, missing), (0, 0)]), np.pad(y, (0, missing)), np.pad(np.ones(len(x), np.float32), (0, missing))


def build_model() -> keras.Model:
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments, "Train a digit classifier under Keras's DataParallel on Spark.", epochs=10)
    spark = start_spark(options.master)
    x_train, x_test, y_train, y_test = split_digits()
    weights = SparkRunner(options.workers).run(train, options.epochs, data=(x_train, y_train))
    spark.stop()

    model = build_model()
    model.set_weights(same(weights))
    print_accuracy(model.predict(x_test, verbose=0), y_test, len(weights))


if __name__ == "__main__":
    main()
