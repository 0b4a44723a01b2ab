"""Calls that are allowed while a model trains, and checks that `fit` runs on Spark."""

import threading

import keras
import numpy as np
import pytest

from sparkkeras import ModelError, SparkModel
from sparkkeras.spark import cluster, worker_checks
from tests.models import regression


def test_making_a_model_probes_the_workers(sc, monkeypatch):
    monkeypatch.setattr(cluster, "_starting", set())
    monkeypatch.setattr(worker_checks, "equipped", {})
    SparkModel(regression())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "sparkkeras-start"]
    thread.join(60)
    assert len(worker_checks.equipped[sc]) == 2
    assert cluster._starting == {sc}


def test_a_model_in_training_can_predict_and_evaluate_but_not_be_fitted(sc):
    x = np.random.default_rng(0).random((40, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    model = regression(metrics=["mae"])
    spark_model = SparkModel(model, num_workers=2, seed=1)
    seen = []

    class Callback(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with pytest.raises(ModelError, match="from a callback of a fit"):
                spark_model.fit(x, y, verbose=0)
            seen.append((model.predict(x, verbose=0), spark_model.predict(x)))
            seen.append((logs["val_mae"], spark_model.evaluate(x, y, return_dict=True)["mae"]))
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    def elsewhere():
        with pytest.raises(ModelError, match="another thread is training"):
            SparkModel(model).fit(x, y, verbose=0)
        seen.append((model.predict(x, verbose=0), spark_model.predict(x)))

    history = spark_model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=Callback())
    assert len(seen) == 3
    for mine, found in seen:
        np.testing.assert_allclose(mine, found, rtol=1e-5)
    assert list(history.history) == ["loss", "mae", "val_loss", "val_mae"]
    assert len(spark_model.fit(x, y, verbose=0).epoch) == 1


def test_many_partitions_raise_a_warning_and_a_transform_may_fail_on_zeros(sc):
    x = np.random.default_rng(0).random((40, 3)).astype(np.float32) + 1
    y = x.sum(axis=1, keepdims=True)
    rows = sc.parallelize(list(zip(x, y, strict=True)), 9)

    def picky(x, y):
        assert (x > 0).all()
        return x, y

    stop = keras.callbacks.EarlyStopping("loss")
    with pytest.warns(UserWarning, match=r"9 partitions.*2 slots.*num_workers=2") as warned:
        SparkModel(regression()).fit(rows, verbose=0, batch_size=2, transform=picky, worker_callbacks=stop)
    assert [each.filename for each in warned if "partitions" in str(each.message)] == [__file__]
