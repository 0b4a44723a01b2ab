"""Large values, and all-reduce training, when an executor is killed, on a Spark Connect server with separate executors.

``python -m tests.connect.executors FOLDER CLASSIC`` trains, and fails if the result differs from that of a classic session
or of a training in which nothing is killed.
"""

import sys
import warnings
from pathlib import Path

import sparkkeras.sources.connect_partitions
import sparkkeras.sources.connect_values
from sparkkeras import SparkModel
from tests.connect import cases
from tests.integration.test_recovery import Idle, Kill
from tests.models import same


def all_reduced(callback):
    """All-reduce training; the rows to validate on pass through this process."""
    trained = SparkModel(cases.model(), "allreduce", batch_size=16, seed=7)
    given = {"validation_data": cases.arrays(50), "worker_callbacks": [callback]}
    history = trained.fit(*cases.arrays(), epochs=3, verbose=0, **given)
    return trained, history.history["val_loss"]


def main(folder, classic):
    from pyspark.sql import SparkSession

    sparkkeras.sources.connect_partitions.INLINE_BYTES = 0
    sparkkeras.sources.connect_values.CHUNK_BYTES = 3000
    builder = SparkSession.builder.remote("local-cluster[2,1,1024]")
    for key, value in cases.SETTINGS.items():
        builder = builder.config(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spark = builder.getOrCreate()
    mark = Path(folder) / "mark"
    trained = SparkModel(cases.model(), batch_size=16, seed=7)
    kill = Kill(str(mark), 1, 3, executor=True)
    trained.fit(cases.frame(spark), epochs=3, verbose=0, worker_callbacks=[kill])
    assert mark.exists()
    cases.Classic(Path(classic)).check("three_epochs", trained)
    mark = Path(folder) / "mark of all-reduce training"
    found, expected = (all_reduced(callback(str(mark), 1, 3, executor=True)) for callback in (Kill, Idle))
    assert mark.exists()
    assert same(found[0], expected[0])
    assert found[1] == expected[1]
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
