"""Trackers with a callback for Keras, on the driver: Weights & Biases, offline."""

import keras
import numpy as np
import pytest

from sparkkeras import SparkModel
from tests.models import regression

wandb = pytest.importorskip("wandb", reason="pip install wandb")


def test_weights_and_biases(sc, tmp_path, monkeypatch):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("its callback imports TensorFlow")
    from wandb.integration.keras import WandbMetricsLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    with wandb.init(project="tests", dir=tmp_path, mode="offline", settings={"console": "off"}) as run:
        spark_model = SparkModel(regression(), num_workers=2)
        with pytest.warns(UserWarning, match="on_batch_end is never called"):  # it is needed for log_freq="batch" only
            history = spark_model.fit(x, x[:, 0], epochs=3, verbose=0, callbacks=[WandbMetricsLogger()])
        summary = dict(run.summary)
    wandb.teardown()
    assert summary["epoch/epoch"] == 2
    assert summary["epoch/loss"] == pytest.approx(history.history["loss"][-1])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
