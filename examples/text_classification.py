"""Classify film reviews in a DataFrame: TextVectorization in the model, predictions as a column.

::

    python examples/text_classification.py [--output DIR] [--epochs N] [--reviews N] [--master local[2]]

The reviews are sentences made of a few hundred phrases: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from pyspark.sql import Row, functions

    from sparkkeras import SparkModel, load_spark_model

SEED = 7
SUBJECTS = ["the film", "the story", "the plot", "every scene", "the cast", "the music", "the ending", "this remake"]
PRAISE = ["great", "moving", "a delight", "clever", "full of warmth", "never dull", "a small wonder", "not bad at all"]
BLAME = ["awful", "tedious", "a mess", "dull", "full of clichés", "never clever", "a great waste", "not good at all"]
ASIDES = ["I saw it twice", "my sister disagrees", "the seats were full", "it rained all evening", "it is three hours long"]


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    model_file = options.output / "reviews.keras"

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    reviews = spark.createDataFrame(write_reviews(options.reviews)).repartition(2).cache()
    train, test = (part.cache() for part in reviews.randomSplit([0.8, 0.2], seed=SEED))

    # The vocabulary is that of a sample; words that are not in it share one index.
    sample = [row.text for row in train.select("text").limit(1000).collect()]
    spark_model = SparkModel(build_model(sample), seed=SEED)
    print(f"Training on {train.count():,} reviews.\n")
    spark_model.fit(train, features="text", epochs=options.epochs, validation_split=0.1)

    loss, accuracy = spark_model.evaluate(test, features="text")
    spark_model.save(model_file)
    unseen = spark.createDataFrame([Row(text="a clever plot, never dull 🎬"), Row(text="Tedious. The ending was a mess!")])
    scored = load_spark_model(model_file).predict(unseen, features="text", output_col="positive")

    print(f"\nAccuracy    {accuracy:.1%} of {test.count()} unseen reviews, loss {loss:.3f}")
    for row in scored.orderBy(functions.desc("positive")).collect():
        print(f"{row.positive:>8.0%}    {row.text}")
    print(f"Model       {model_file}")
    spark.stop()


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify film reviews in a DataFrame.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=8, help="training epochs (default: %(default)s)")
    parser.add_argument("--reviews", type=int, metavar="N", default=4000, help="number of reviews (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args(arguments)


def write_reviews(count: int) -> list[Row]:
    """Reviews of three or four sentences, of which most agree with the label, 1 for praise."""
    random = np.random.default_rng(SEED)
    rows = []
    for label in random.integers(0, 2, count):
        opinions = (BLAME, PRAISE)
        kinds = [*[opinions[label]] * 2, opinions[1 - label]] if random.random() < 0.3 else [opinions[label]] * 2
        sentences = [f"{random.choice(SUBJECTS)} was {random.choice(kind)}" for kind in kinds] + [random.choice(ASIDES)]
        random.shuffle(sentences)
        rows.append(Row(text=". ".join(map(str.capitalize, sentences)) + ".", label=int(label)))
    return rows


def build_model(sample: list[str]) -> keras.Model:
    """A classifier of strings: word pairs become indices, and the mean of their embeddings a probability."""
    keras.utils.set_random_seed(SEED)
    vectorize = keras.layers.TextVectorization(max_tokens=5000, ngrams=2, output_sequence_length=40)
    vectorize.adapt(sample)
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string", name="text"),
            vectorize,
            keras.layers.Embedding(5000, 16),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    main()
