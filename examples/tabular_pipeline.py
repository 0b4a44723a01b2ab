"""Classify tumours with a Spark ML pipeline: scaling, a Keras model, tuning, saving.

::

    python examples/tabular_pipeline.py [--output DIR] [--epochs N] [--rates 0.001 0.01] [--master local[2]]

The Wisconsin breast cancer data (569 tumours, 30 measurements each) comes with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from matplotlib.figure import Figure
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.feature import StandardScaler, VectorAssembler
    from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit
    from sklearn.datasets import load_breast_cancer

    from sparkkeras.ml import KerasEstimator

SEED = 7
BENIGN, MALIGNANT, FAINT = "#2a7f62", "#c8102e", "#8a8f98"


@hushed()
def main() -> None:
    options = command_line()
    folder, picture = options.output / "tumours", options.output / "tumours.png"
    options.output.mkdir(parents=True, exist_ok=True)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    table = load_breast_cancer(as_frame=True).frame
    names = [name.replace(" ", "_") for name in table.columns if name != "target"]
    tumours = spark.createDataFrame(table.set_axis([*names, "label"], axis=1)).repartition(2).cache()
    train, test = (part.cache() for part in tumours.randomSplit([0.75, 0.25], seed=SEED))

    estimator = KerasEstimator(
        model=build_model(len(names)), featuresCol="scaled", outputCol="score", epochs=options.epochs, seed=SEED, verbose=0
    )
    pipeline = Pipeline(
        stages=[
            VectorAssembler(inputCols=names, outputCol="measured"),
            StandardScaler(inputCol="measured", outputCol="scaled", withMean=True),
            estimator,
        ]
    )
    area = BinaryClassificationEvaluator()  # area under the ROC curve: 0.5 is chance, 1 is perfect
    search = TrainValidationSplit(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.learning_rate, options.rates).build(),
        evaluator=area,
        trainRatio=0.8,
        seed=SEED,
    )
    print(f"Training on {train.count()} tumours, once for each learning rate, then again with the best one.\n")
    found = search.fit(train)
    for rate, metric in zip(options.rates, found.validationMetrics, strict=True):
        print(f"learning rate {rate:<8g} area under the curve {metric:.4f}")

    found.bestModel.write().overwrite().save(folder.resolve().as_uri())
    loaded = PipelineModel.load(folder.resolve().as_uri())
    predicted = loaded.transform(test).select("label", "score", "prediction", "probability", "rawPrediction").cache()
    rows = predicted.toPandas()
    history = loaded.stages[-1].history
    draw(history["loss"], rows["label"].to_numpy(), rows["score"].to_numpy()).savefig(picture, dpi=150)

    correct = int((rows["label"] == rows["prediction"]).sum())
    print(f"""
Test        {correct} of {len(rows)} unseen tumours classified correctly, area under the curve {area.evaluate(predicted):.4f}
Pipeline    saved to {folder} and loaded again for the test
Picture     {picture}""")
    spark.stop()


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify tumours with a Keras model in a Spark ML pipeline.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=15, help="training epochs (default: %(default)s)")
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="RATE", default=[0.0003, 0.01], help="learning rates to try"
    )
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args()


def build_model(width: int) -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((width,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", loss="binary_crossentropy")
    return model


def draw(losses: list[float], labels: np.ndarray, scores: np.ndarray) -> Figure:
    """The loss by epoch on the left; the predicted probabilities of unseen tumours on the right."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses, "o-", color=FAINT, markersize=3)
    left.set(title="Training loss", xlabel="epoch", ylabel="loss")
    left.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    bins = np.linspace(0, 1, 21)
    shares = [scores[labels == 0], scores[labels == 1]]
    right.hist(shares, bins, color=[MALIGNANT, BENIGN], label=["malignant", "benign"])
    right.set(title="Unseen tumours", xlabel="probability of being benign", ylabel="tumours", yscale="symlog")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
