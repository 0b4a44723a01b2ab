"""Transfer learning on image files: features of a Keras network in a Spark ML pipeline.

::

    python examples/image_pipeline.py [--output DIR] [--epochs N] [--labelled N] [--master local[2]]

A small convolutional network learns the digits 0 to 4. The inputs of its last layer are then the features of the
digits 5 to 9, which it has never seen: a logistic regression on them needs only a few labelled images. The images are PNG
files, made from the digits that come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from matplotlib.figure import Figure
    from PIL import Image
    from pyspark.ml import Pipeline
    from pyspark.ml.classification import LogisticRegression
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.sql import DataFrame, SparkSession, functions
    from sklearn.datasets import load_digits

    from sparkkeras import SparkModel, image_loader
    from sparkkeras.ml import ImageFeaturizer

SEED = 7
CORRECT, INCORRECT = "#2a7f62", "#c8102e"


@hushed()
def main() -> None:
    options = command_line()
    folder, picture = options.output / "images", options.output / "images.png"
    write_images(folder)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    images = read_images(spark, folder)
    known, unknown = images.where("digit < 5"), images.where("digit >= 5")

    network = build_network()
    loader = image_loader((8, 8), mode="L", preprocessing=1 / 255)
    print(f"Training a network on {known.count()} images of 0 to 4.\n")
    SparkModel(network, batch_size=16, seed=SEED).fit(
        known, features="content", label="digit", loader=loader, epochs=options.epochs, validation_split=0.1, verbose=2
    )

    labelled = unknown.orderBy(functions.rand(SEED)).limit(options.labelled).cache()
    others = unknown.join(labelled, "path", "left_anti").cache()
    featurizer = ImageFeaturizer(model=network, inputCol="content", preprocessing=1 / 255)  # the inputs of the last layer
    regression = LogisticRegression(labelCol="digit", regParam=0.01, maxIter=50)
    predicted = Pipeline(stages=[featurizer, regression]).fit(labelled).transform(others).cache()
    accuracy = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy").evaluate(predicted)
    draw(predicted).savefig(picture, dpi=150)

    print(f"""
Accuracy    {accuracy:.1%} of {others.count()} images of 5 to 9, learned from {labelled.count()} labelled images
Picture     {picture}""")
    spark.stop()


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Use features of a trained network to classify other images.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=int, metavar="N", default=10, help="training epochs of the network (default: %(default)s)"
    )
    parser.add_argument(
        "--labelled", type=int, metavar="N", default=50, help="number of labelled images of 5 to 9 (default: %(default)s)"
    )
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args()


def write_images(folder: Path) -> None:
    """Write the digits as PNG files, one folder for each digit."""
    data = load_digits()
    for number, (image, digit) in enumerate(zip(data.images, data.target, strict=True)):
        path = folder / str(digit) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(path)


def read_images(spark: SparkSession, folder: Path) -> DataFrame:
    """The columns path, content and digit. Spark makes many small partitions of the files, so repartition them."""
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(folder.resolve().as_uri())
    digit = functions.regexp_extract("path", r"/(\d)/\d+\.png$", 1).cast("double")
    return files.select("path", "content", digit.alias("digit")).repartition(2).cache()


def build_network() -> keras.Model:
    keras.utils.set_random_seed(SEED)
    network = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(5, activation="softmax"),
        ]
    )
    network.compile(keras.optimizers.Adam(3e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return network


def draw(predicted: DataFrame) -> Figure:
    """Images with their predictions, misclassified ones first."""
    rows = predicted.select("path", "digit", "prediction").toPandas()
    rows = rows.assign(correct=rows["digit"] == rows["prediction"]).sort_values("correct", kind="stable").head(48)
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    figure.suptitle("Digits that the network was not trained on, misclassified ones first")
    for axes in figure.subplots(6, 8).flat:
        axes.axis("off")
    for axes, row in zip(figure.axes, rows.itertuples(), strict=False):
        axes.imshow(Image.open(row.path.removeprefix("file:")), cmap="gray_r")
        label = f"{row.prediction:.0f} ✓" if row.correct else f"{row.prediction:.0f} ✗ is {row.digit:.0f}"
        axes.set_title(label, color=CORRECT if row.correct else INCORRECT, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
