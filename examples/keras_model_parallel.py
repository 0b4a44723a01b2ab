"""Train a digit classifier under Keras's ModelParallel on JAX: no single worker holds all weights, the driver joins them.

::

    python examples/keras_model_parallel.py [--epochs N] [--workers N] [--master local[2]]

The kernels are split over the ranks, and so are the optimizer's variables. All ranks train on the same batches. Each returns
its parts of the weights, which the driver joins to an ordinary model. Needs JAX. The digits come with scikit-learn: nothing
is downloaded.
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
    from digits import BATCH_SIZE, SEED, command_line, print_accuracy, split_digits

    from sparkkeras import SparkRunner
    from sparkkeras.runner import context

UNITS = 512  # a multiple of the number of ranks


def train(x: Any, y: Any, epochs: int) -> list[Any]:
    """Train on all rows, together with the other ranks; returns the parts of each weight that this rank holds."""
    ranks = context()
    keras.distribution.initialize()  # finds the others in KERAS_DISTRIBUTION_JOB_ADDRESSES and so on
    mesh = keras.distribution.DeviceMesh((1, ranks.world_size), ["batch", "model"], keras.distribution.list_devices())
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["digits/wide/kernel"] = None, "model"  # each rank computes some of the units
    layouts["digits/wide/bias"] = ("model",)
    layouts["digits/narrow/kernel"] = "model", None  # and its part of the sums over them, which JAX adds up
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False)
    )
    keras.utils.set_random_seed(SEED)  # the same on all ranks: they shuffle alike
    model = build_model()
    unused = set(layouts) - {weight.path for weight in model.weights}
    assert not unused, f"no weight has the path {unused}"  # Keras would ignore the layout
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = []
    if ranks.rank == 0:
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=functools.partial(ranks.report, epochs=epochs)))
    model.fit(x, y, BATCH_SIZE, epochs, callbacks=callbacks, verbose=0)
    return [[(part.index, np.asarray(part.data)) for part in weight.value.addressable_shards] for weight in model.weights]


def join(model: keras.Model, parts: list[Any]) -> None:
    """Set the weights of a model, given the parts that each rank has returned."""
    weights = [np.empty(weight.shape, weight.dtype) for weight in model.weights]
    for of_rank in parts:
        for weight, of_weight in zip(weights, of_rank, strict=True):
            for index, part in of_weight:
                weight[index] = part
    model.set_weights(weights)


def build_model() -> keras.Model:
    layers = [keras.layers.Dense(UNITS, "relu", name="wide"), keras.layers.Dense(10, name="narrow")]
    return keras.Sequential([keras.Input((64,)), *layers], name="digits")


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments, "Train a digit classifier under Keras's ModelParallel on Spark.", epochs=10)
    spark = start_spark(options.master)
    x_train, x_test, y_train, y_test = split_digits()
    parts = SparkRunner(options.workers).run(train, x_train, y_train, options.epochs)
    spark.stop()

    model = build_model()
    join(model, parts)
    held = max(sum(part.size for of_weight in of_rank for _, part in of_weight) for of_rank in parts)
    print(f"Weights     {model.count_params():,}, of which a rank had {held:,}")
    print_accuracy(model.predict(x_test, verbose=0), y_test, len(parts))


if __name__ == "__main__":
    main()
