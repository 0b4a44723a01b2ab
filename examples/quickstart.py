"""Train a digit classifier on Spark and plot the results.

::

    python examples/quickstart.py [--output DIR] [--epochs N] [--master local[2]] [--checkpoint DIR]

It starts Spark on this machine. The 1,797 handwritten digits come with scikit-learn: nothing is downloaded.
With ``--checkpoint``, the same command continues a training that was killed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    from sparkkeras import Checkpoint, SparkModel, load_spark_model, to_simple_rdd

SEED = 7
CORRECT, INCORRECT, FAINT = "#2a7f62", "#c8102e", "#8a8f98"


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments)
    model_file, picture = options.output / "digits.keras", options.output / "digits.png"
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    x_train, x_test, y_train, y_test = digits()
    rdd = to_simple_rdd(spark.sparkContext, x_train, y_train)

    print(f"Training on {len(x_train):,} digits in {rdd.getNumPartitions()} partitions.\n")
    spark_model = SparkModel(build_model(), seed=SEED)
    checkpoints = {"checkpoint": Checkpoint(options.checkpoint), "resume": True} if options.checkpoint else {}
    history = spark_model.fit(rdd, epochs=options.epochs, validation_split=0.1, **checkpoints)

    loss, accuracy = spark_model.evaluate(x_test, y_test)
    probabilities = spark_model.predict(x_test)

    spark_model.save(model_file)
    loaded = load_spark_model(model_file)
    np.testing.assert_allclose(loaded.predict(x_test), probabilities, atol=1e-6)

    predicted = probabilities.argmax(axis=1)
    errors = int((predicted != y_test).sum())
    draw(history.history, x_test, y_test, predicted, accuracy).savefig(picture, dpi=150)
    spark.stop()

    print(f"""
Accuracy    {accuracy:.1%} of {len(y_test)} test digits ({errors} misclassified), loss {loss:.3f}
Time        {time.perf_counter() - started:.0f} s, including the start of Spark
Picture     {picture}
Model       {model_file}; the loaded model gives equal predictions""")


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier on Spark and plot the results.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=20, help="training epochs (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    parser.add_argument("--checkpoint", metavar="DIR", help="write checkpoints here, and continue from the newest")
    return parser.parse_args(arguments)


def digits() -> list[np.ndarray]:
    """Train and test images of shape (rows, 8, 8, 1), values from 0 to 1; then train and test labels."""
    data = load_digits()
    images = data.images[..., np.newaxis].astype("float32") / 16
    return train_test_split(images, data.target, test_size=0.25, stratify=data.target, random_state=SEED)


def build_model() -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def draw(
    history: dict[str, list[float]], images: np.ndarray, labels: np.ndarray, predicted: np.ndarray, accuracy: float
) -> Figure:
    """Learning curves on the left; digits with their predictions on the right, misclassified ones first."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5, 8))
    left.suptitle("Learning curves", fontsize=13)
    for axes, metric in zip(left.subplots(2, 1, sharex=True), ("loss", "accuracy"), strict=True):
        draw_curves(axes, history, metric)
    axes.set_xlabel("epoch")

    rows, columns = 6, 8
    incorrect, correct = np.flatnonzero(predicted != labels), np.flatnonzero(predicted == labels)
    chosen = [*incorrect[: 2 * columns], *correct, *incorrect[2 * columns :]][: rows * columns]
    right.suptitle(
        f"{accuracy:.1%} of {len(labels)} test digits classified correctly, {len(incorrect)} misclassified", fontsize=13
    )
    for axes, index in zip(right.subplots(rows, columns).flat, chosen, strict=True):
        draw_digit(axes, images[index], labels[index], predicted[index])
    for part in (left, right):
        part.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    return figure


def draw_curves(axes: Axes, history: dict[str, list[float]], metric: str) -> None:
    for name, values, colour in ("train", history[metric], FAINT), ("validation", history[f"val_{metric}"], CORRECT):
        epochs = range(1, len(values) + 1)
        axes.plot(epochs, values, "o-", color=colour, markersize=3, label=f"{name}: final {values[-1]:.3f}")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.legend(frameon=False)


def draw_digit(axes: Axes, image: np.ndarray, label: int, predicted: int) -> None:
    correct = predicted == label
    colour = CORRECT if correct else INCORRECT
    axes.imshow(image.squeeze(), cmap="gray_r")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{predicted} ✓" if correct else f"{predicted} ✗ is {label}", color=colour, fontsize=10, pad=4)
    axes.spines[:].set(color=colour, linewidth=1 if correct else 2.5)


if __name__ == "__main__":
    main()
