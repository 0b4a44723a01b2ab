"""Score rows in SQL: train a Keras model on wines, register it as a function, and run queries.

::

    python examples/sql_scoring.py [--epochs N] [--query SQL] [--master local[2]]

The view ``wines`` has the columns id, cultivar (0, 1 or 2), alcohol, flavanoids, proline and color_intensity, and the
function ``classify`` takes the last four of these and returns the probabilities of the cultivars. The 178 wines come with
scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse

from surroundings import hushed, start_spark

with hushed():
    import keras
    from sklearn.datasets import load_wine

    from sparkkeras import SparkModel, register_keras_udf

SEED = 7
MEASURED = ["alcohol", "flavanoids", "proline", "color_intensity"]
SCORED = f"SELECT *, classify({', '.join(MEASURED)}) AS p FROM wines"
QUERIES = {
    "How many wines of each cultivar does the model predict correctly?": f"""
        SELECT cultivar, count(*) AS wines, count_if(array_position(p, array_max(p)) - 1 = cultivar) AS correct
        FROM ({SCORED}) GROUP BY cultivar ORDER BY cultivar""",
    "Which predictions are the least certain?": f"""
        SELECT id, cultivar, alcohol, proline, transform(p, x -> round(x, 2)) AS p
        FROM ({SCORED}) ORDER BY array_max(p) LIMIT 3""",
    "What does it predict if all wines have a third more alcohol?": f"""
        SELECT array_position(p, array_max(p)) - 1 AS predicted, count(*) AS wines
        FROM (SELECT classify(alcohol * 4 / 3, {", ".join(MEASURED[1:])}) AS p FROM wines)
        GROUP BY predicted ORDER BY predicted""",
}


@hushed()
def main() -> None:
    options = command_line()
    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    table = load_wine(as_frame=True).frame.rename(columns={"target": "cultivar"}).rename_axis("id").reset_index()
    wines = spark.createDataFrame(table[["id", "cultivar", *MEASURED]]).repartition(2).cache()
    wines.createOrReplaceTempView("wines")

    model = build_model(table[MEASURED].to_numpy())
    print(f"Training on {wines.count()} wines.\n")
    spark_model = SparkModel(model, batch_size=8, seed=SEED)
    history = spark_model.fit(wines, features=MEASURED, label="cultivar", epochs=options.epochs, verbose=0)
    print(f"{history.history['accuracy'][-1]:.1%} training accuracy in the last epoch")

    register_keras_udf(spark, "classify", model)
    for question, query in {"Your query": options.query}.items() if options.query else QUERIES.items():
        print(f"\n{question}")
        spark.sql(query).show(truncate=False)
    spark.stop()


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Use a Keras model as an SQL function.")
    parser.add_argument("--epochs", type=int, metavar="N", default=15, help="training epochs (default: %(default)s)")
    parser.add_argument("--query", metavar="SQL", help=f"a custom query, for example: {SCORED}")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args()


def build_model(measured: object) -> keras.Model:
    """A classifier with a normalization layer, so that SQL can pass the raw measurements."""
    keras.utils.set_random_seed(SEED)
    scale = keras.layers.Normalization()
    scale.adapt(measured)
    model = keras.Sequential(
        [
            keras.Input((len(MEASURED),)),
            scale,
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    main()
