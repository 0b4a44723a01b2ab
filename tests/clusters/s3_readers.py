"""Functions that read objects of S3 on the workers: with pyarrow, and in a pipeline of tf.data.

python s3_readers.py ENDPOINT
"""

import sys

import keras
import numpy as np
import pyarrow as pa
from pyarrow import fs, parquet

from sparkkeras import SparkModel

STORE = {"access_key": "key", "secret_key": "secret", "region": "us-east-1", "scheme": "http"}


def rows(store, worker, num_workers):
    """The rows of the objects of a worker, in batches."""
    objects = sorted(each.path for each in store.get_file_info(fs.FileSelector("data/objects")))
    for path in objects[worker::num_workers]:
        with store.open_input_file(path) as file:
            for batch in parquet.ParquetFile(file).iter_batches(50):
                yield np.stack(batch["x"].to_numpy(zero_copy_only=False)), batch["y"].to_numpy()


def main(endpoint):
    store = fs.S3FileSystem(**STORE, endpoint_override=endpoint.removeprefix("http://"))
    rng = np.random.default_rng(0)
    for number in range(4):
        x = rng.normal(size=(200, 4)).astype("float32")
        table = pa.table({"x": list(x), "y": x.sum(axis=1)})
        parquet.write_table(table, f"data/objects/{number}.parquet", filesystem=store)

    def with_pyarrow(worker, num_workers):
        yield from rows(store, worker, num_workers)

    def with_tf_data(worker, num_workers):
        import tensorflow as tf

        kinds = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.float32)
        read = tf.data.Dataset.from_generator(lambda: rows(store, worker, num_workers), output_signature=kinds)
        return read.unbatch().shuffle(200, seed=1).batch(50).prefetch(2)

    for make in (with_pyarrow, with_tf_data):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
        spark_model = SparkModel(model, num_workers=2, seed=7)
        before = spark_model.evaluate(make)
        history = spark_model.fit(make, epochs=10, verbose=0)
        sys.stdout.write(f"{make.__name__}: {before:.2f} {history.history['loss'][-1]:.2f}\n")
        assert history.history["loss"][-1] < before / 4, history.history["loss"]


if __name__ == "__main__":
    main(sys.argv[1])
