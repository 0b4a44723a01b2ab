"""Training cases that must give bit-identical results in a Spark Connect session and in a classic session."""

import json
import os
import signal
from pathlib import Path

import keras
import numpy as np

from sparkkeras import SparkModel, to_data_frame
from sparkkeras.ml import KerasTransformer
from tests.conftest import SOAK
from tests.models import classifier

ROOT = Path(__file__).parent.parent.parent
WIDTH, CLASSES, ROWS = 8, 4, 240
SECONDS = 900
CLASSIC = "SPARKKERAS_TESTS_CLASSIC"
"""The environment variable with the folder of results that already exist."""

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "8g" if SOAK else "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
}


def model(**compiled):
    return classifier(WIDTH, 16, CLASSES, **({"optimizer": keras.optimizers.Adam(0.01)} | compiled))


def arrays(rows=ROWS):
    """Features and labels that a model can learn."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, WIDTH)).astype(np.float32)
    return x, (x @ generator.normal(size=(WIDTH, CLASSES))).argmax(1)


def frame(spark, rows=ROWS):
    """The rows in two partitions, with sample weights and a column that marks validation rows."""
    x, y = arrays(rows)
    x = {"features": x, "held_out": np.arange(rows) % 5 == 0}
    return to_data_frame(spark, x, y, sample_weight=np.linspace(0.5, 2, rows).astype(np.float32))


def nested(seed=0):
    """A model with nested inputs and outputs."""
    keras.utils.set_random_seed(seed)
    left, right, top = keras.Input((WIDTH,), name="left"), keras.Input((1,)), keras.Input((1,))
    joined = keras.layers.Concatenate(name="joined")([left, right, top])
    outputs = {"u": keras.layers.Dense(1, name="u")(joined), "v": {"w": keras.layers.Dense(2, name="w")(joined)}}
    found = keras.Model({"left": left, "others": {"top": top, "right": right}}, outputs, name="nested")
    found.compile(keras.optimizers.SGD(0.01, name="sgd"), {"u": "mse", "v": {"w": "mae"}})
    return found


def nested_frame(spark):
    """Columns of the nested model: fields of structs under the names of inputs and outputs."""
    x, _ = arrays()
    flat = {"left": x, "one": x[:, 0], "two": x[:, 1]}
    rows = to_data_frame(spark, flat, {"u": x.sum(1), "sums": x[:, :2]})
    return rows.selectExpr("left", "struct(one AS right, two AS top) AS others", "u", "struct(sums AS w) AS v")


RATE = keras.Variable(1.0, name="rate")


def annealed(y, scores):
    return RATE * keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, scores))


class Anneal(keras.callbacks.Callback):
    """Sets a variable outside the model, which its loss uses."""

    def on_epoch_begin(self, epoch, logs=None):
        RATE.assign(1 / (1 + epoch))


def with_a_variable_outside():
    RATE.assign(7.0)
    return model(loss=annealed)


class Once(keras.callbacks.Callback):
    """Calls a function once, in one worker, at the end of a batch: from an epoch on, of a rank if it is given."""

    def __init__(self, folder, act, epoch=0, rank=None):
        super().__init__()
        self.folder, self.act, self.first, self.rank = str(folder), act, epoch, rank
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch >= self.first and self.rank in (None, os.environ.get("RANK")):
            try:
                (Path(self.folder) / "done").touch(exist_ok=False)
            except FileExistsError:
                return
            self.act()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def doubled(x, y):
    return 2 * x, y


def read(worker, num_workers):
    """Batches of 16 rows for each worker."""
    x, y = arrays()
    for start in range(16 * worker, len(x), 16 * num_workers):
        yield x[start : start + 16], y[start : start + 16]


class Case:
    """A training case.

    Args:
        fit: A function that returns the arguments of ``fit`` for a session.
        model: Builds the model.
        spark_model: Further arguments of the SparkModel.
    """

    def __init__(self, fit, model=model, **spark_model):
        self._fit, self._model, self._settings = fit, model, spark_model

    def train(self, spark):
        """Train; return the SparkModel and its history."""
        trained = SparkModel(self._model(), **({"batch_size": 16, "seed": 7} | self._settings))
        data, *labels, named = self._fit(spark)
        return trained, trained.fit(data, *labels, **({"epochs": 2, "verbose": 0} | named)).history


CASES = {
    "plain": Case(lambda spark: (frame(spark), {})),
    "three_epochs": Case(lambda spark: (frame(spark), {"epochs": 3})),
    "validation_frame": Case(lambda spark: (frame(spark), {"validation_data": frame(spark, 50)})),
    "columns": Case(
        lambda spark: (
            frame(spark),
            {"validation_col": "held_out", "sample_weight": "weight", "transform": doubled},
        )
    ),
    "arrays_of_three": Case(lambda spark: (*arrays(), {"validation_split": 0.25}), num_workers=3),
    "global_shuffle": Case(lambda spark: (frame(spark), {"shuffle": "global", "validation_split": 0.25}), num_workers=3),
    "allreduce": Case(lambda spark: (*arrays(), {"validation_split": 0.25}), mode="allreduce"),
    "batches": Case(lambda spark: (read, {"validation_data": read}), num_workers=2),
    "nested": Case(lambda spark: (nested_frame(spark), {"validation_split": 0.25}), nested, frequency=3),
    "anneal": Case(lambda spark: (frame(spark), {"callbacks": [Anneal()], "epochs": 3}), with_a_variable_outside),
}


QUICK = {
    "plain",
    "validation_frame",
    "arrays_of_three",
    "global_shuffle",
    "allreduce",
    "batches",
    "nested",
    "anneal",
}
"""The cases that run different code; the others run in the long version of the suite only."""

CHOSEN = [name for name in CASES if SOAK or name in QUICK]


class Classic:
    """The results of a classic session, read from the folder that `train_all` has written.

    Attributes:
        folder: That folder; its subfolder ``transformer`` contains a saved transformer.
    """

    def __init__(self, folder):
        self.folder = folder

    def check(self, name, trained, history=None):
        """Check that a case has the same weights and history in the classic session, to the bit."""
        with np.load(self.folder / f"{name}.npz") as expected:
            for key, weights in zip(expected.files, trained.model.get_weights(), strict=True):
                np.testing.assert_array_equal(weights, expected[key])
        assert history in (None, json.loads((self.folder / "histories.json").read_text())[name])


def train_all(spark, folder):
    """Train the cases, and save a transformer, in a classic session."""
    histories = {}
    for name in CHOSEN:
        trained, histories[name] = CASES[name].train(spark)
        np.savez(folder / f"{name}.npz", *trained.model.get_weights())
    (folder / "histories.json").write_text(json.dumps(histories))
    KerasTransformer(model=classifier(4, 5, 3)).save(str(folder / "transformer"))
