"""Train through Spark Connect, without a SparkContext or a JVM in this process.

::

    python examples/connect.py [--remote sc://host:15002] [--epochs N]

Without ``--remote`` it starts a Connect server on this machine. The digits come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from pyspark.sql import functions
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    from sparkkeras import SparkModel, keras_udf, load_spark_model, to_data_frame

SEED = 7


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments)
    print(f"Connecting to {options.remote} ...")
    spark = start_spark(options.remote, remote=True)
    data = load_digits()
    x_train, x_test, y_train, y_test = train_test_split(
        (data.data / 16).astype("float32"), data.target, test_size=0.25, stratify=data.target, random_state=SEED
    )
    digits = to_data_frame(spark, x_train, y_train).repartition(2)  # one worker for each partition

    print(f"Training on {digits.count():,} digits through {type(spark).__module__}.\n")
    spark_model = SparkModel(build_model(), batch_size=16, seed=SEED)
    spark_model.fit(digits, epochs=options.epochs, validation_split=0.1, verbose=2)
    loss, accuracy = spark_model.evaluate(to_data_frame(spark, x_test, y_test))

    scores = keras_udf(spark_model.model)("features")
    sure = to_data_frame(spark, x_test, y_test).select(scores.alias("p")).select(functions.array_max("p").alias("sure"))
    unsure = sure.where("sure < 0.5").count()

    with tempfile.TemporaryDirectory() as folder:
        spark_model.save(Path(folder) / "digits.keras")
        loaded = load_spark_model(Path(folder) / "digits.keras")
    np.testing.assert_allclose(loaded.predict(x_test), spark_model.predict(x_test), atol=1e-6)
    spark.stop()

    print(f"""
Accuracy    {accuracy:.1%} of {len(y_test)} test digits, loss {loss:.3f}
Uncertain   {unsure} of them: no class has a probability of 0.5 or more
Model       saved on this machine and loaded again, with equal predictions""")


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier through Spark Connect.")
    parser.add_argument(
        "--remote", metavar="URL", default="local[2]", help="server URL sc://host:port, or local[N] (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=10, help="training epochs (default: %(default)s)")
    return parser.parse_args(arguments)


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


if __name__ == "__main__":
    main()
