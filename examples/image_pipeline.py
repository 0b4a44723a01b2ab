"""Teach a network some digits, then let it look at others: images as files, features, a classifier of Spark ML.

::

    python examples/image_pipeline.py [--output DIR] [--epochs N] [--labelled N] [--master local[2]]

A small convolutional network learns the digits 0 to 4. What it has learned to look for is then taken as features of the
digits 5 to 9, which it has never seen: a logistic regression on them does with few labelled images. The images are PNG files
made of the digits that come with scikit-learn: nothing is downloaded.
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
RIGHT, WRONG = "#2a7f62", "#c8102e"


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
    featurizer = ImageFeaturizer(model=network, inputCol="content", preprocessing=1 / 255)  # what goes into its last layer
    regression = LogisticRegression(labelCol="digit", regParam=0.01, maxIter=50)
    predicted = Pipeline(stages=[featurizer, regression]).fit(labelled).transform(others).cache()
    accuracy = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy").evaluate(predicted)
    draw(predicted).savefig(picture, dpi=150)

    print(f"""
Accuracy    {accuracy:.1%} of {others.count()} images of 5 to 9, learned from {labelled.count()} with labels
Picture     {picture}""")
    spark.stop()


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Use what a network has learned of some images to tell others apart.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="where files go (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=int, metavar="N", default=10, help="how often the network sees each image (default: %(default)s)"
    )
    parser.add_argument(
        "--labelled", type=int, metavar="N", default=50, help="labelled images of 5 to 9 (default: %(default)s)"
    )
    parser.add_argument("--master", default="local[2]", help="the Spark to work on (default: %(default)s)")
    return parser.parse_args()


def write_images(folder: Path) -> None:
    """The digits as PNG files, in a folder for each digit."""
    data = load_digits()
    for number, (image, digit) in enumerate(zip(data.images, data.target, strict=True)):
        path = folder / str(digit) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(path)


def read_images(spark: SparkSession, folder: Path) -> DataFrame:
    """The columns path, content and digit. Spark puts few files into a partition, so they are dealt out anew."""
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
    """Images with their predictions, the mistakes first."""
    rows = predicted.select("path", "digit", "prediction").toPandas()
    rows = rows.assign(right=rows["digit"] == rows["prediction"]).sort_values("right", kind="stable").head(48)
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    figure.suptitle("Digits that the network was never taught, the mistakes first")
    for axes in figure.subplots(6, 8).flat:
        axes.axis("off")
    for axes, row in zip(figure.axes, rows.itertuples(), strict=False):
        axes.imshow(Image.open(row.path.removeprefix("file:")), cmap="gray_r")
        told = f"{row.prediction:.0f} ✓" if row.right else f"{row.prediction:.0f} ✗ is {row.digit:.0f}"
        axes.set_title(told, color=RIGHT if row.right else WRONG, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
