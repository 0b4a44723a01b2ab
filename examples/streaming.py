"""Train on a stream: score each batch of digits as it arrives, then train on it, and plot the accuracy.

::

    python examples/streaming.py [--output DIR] [--batches N] [--epochs N] [--master local[2]]

Digits arrive as files in a folder, and a streaming query reads one after the other. The digits come with scikit-learn:
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from matplotlib.figure import Figure
    from pyspark.sql import DataFrame, SparkSession
    from sklearn.datasets import load_digits

    from sparkkeras import SparkModel, to_data_frame

SEED = 7
COLOUR = "#2a7f62"


@dataclass
class Learner:
    """Processes each batch of a stream: evaluates the model on it, then trains on it."""

    spark_model: SparkModel
    epochs: int
    accuracies: list[float] = field(default_factory=list)

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Process one batch. Spark calls this on the driver."""
        rows = batch.repartition(2).cache()
        accuracy = self.spark_model.evaluate(rows, return_dict=True)["accuracy"]
        self.spark_model.fit(rows, epochs=self.epochs, verbose=0)
        print(f"batch {number + 1:<4}{rows.count()} digits, {accuracy:.1%} accuracy before training on them")
        self.accuracies.append(accuracy)
        rows.unpersist()


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments)
    picture = options.output / "streaming.png"
    options.output.mkdir(parents=True, exist_ok=True)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    learner = Learner(SparkModel(build_model(), batch_size=16, seed=SEED), options.epochs)
    with tempfile.TemporaryDirectory() as folder:
        arriving, last = write_batches(spark, folder, options.batches)
        stream = (
            spark.readStream.schema(arriving)
            .option("recursiveFileLookup", "true")
            .option("maxFilesPerTrigger", 1)
            .parquet(folder)
        )
        stream.writeStream.foreachBatch(learner).trigger(availableNow=True).start().awaitTermination()

        # A stream of predictions, with the model after training on all batches.
        scores = learner.spark_model.predict(spark.readStream.schema(arriving).parquet(f"{folder}/{last}"))
        query = scores.writeStream.format("memory").queryName("scored").trigger(availableNow=True).start()
        query.awaitTermination()
        result = spark.sql("SELECT avg(int(array_position(prediction, array_max(prediction)) - 1 = label)) FROM scored")
        print(f"\nThe last batch once more, as a stream of predictions: {result.first()[0]:.1%} accuracy")

    draw(learner.accuracies).savefig(picture, dpi=150)
    spark.stop()
    print(f"Picture {picture}")


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier on a stream.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--batches", type=int, metavar="N", default=8, help="number of batches (default: %(default)s)")
    parser.add_argument(
        "--epochs", type=int, metavar="N", default=4, help="training epochs for each batch (default: %(default)s)"
    )
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args(arguments)


def write_batches(spark: SparkSession, folder: str, batches: int) -> tuple[object, str]:
    """Write one file of digits for each batch; returns their schema and the name of the last batch's folder."""
    data = load_digits()
    order = np.random.default_rng(SEED).permutation(len(data.target))
    for number, part in enumerate(np.array_split(order, batches)):
        frame = to_data_frame(spark, (data.data[part] / 16).astype("float32"), data.target[part])
        frame.coalesce(1).write.mode("append").parquet(f"{folder}/{number}")
    return frame.schema, str(batches - 1)


def build_model() -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(5e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def draw(accuracies: list[float]) -> Figure:
    """The accuracy on each batch before the model trained on it."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(accuracies) + 1), accuracies, "o-", color=COLOUR)
    axes.set(title="Accuracy before training on each batch", xlabel="batch", ylabel="accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return figure


if __name__ == "__main__":
    main()
