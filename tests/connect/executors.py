"""Large values where an executor is killed, behind a server of Spark Connect with executors of their own.

``python -m tests.connect.executors FOLDER`` trains twice, the second time with a kill, and says what differs.
"""

import sys
import warnings
from pathlib import Path

import numpy as np

import sparkkeras.data.remote
import sparkkeras.data.remote_values
from sparkkeras import SparkModel
from tests.connect import cases
from tests.spark.test_recovery import Kill


def fitted(spark, **named):
    trained = SparkModel(cases.model(), batch_size=16, seed=7)
    trained.fit(cases.frame(spark), epochs=3, verbose=0, **named)
    return trained.model.get_weights()


def main(folder):
    from pyspark.sql import SparkSession

    sparkkeras.data.remote.INLINE_BYTES = 0
    sparkkeras.data.remote_values.SENT_BYTES = 3000
    builder = SparkSession.builder.remote("local-cluster[2,1,1024]")
    for key, value in cases.SETTINGS.items():
        builder = builder.config(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spark = builder.getOrCreate()
    expected = fitted(spark)
    mark = Path(folder) / "mark"
    found = fitted(spark, worker_callbacks=[Kill(str(mark), 1, 3, executor=True)])
    assert mark.exists()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
