"""Text on one worker: equal to plain Keras, with the layer in the model or, for any backend, in the transform."""

import keras
import numpy as np
import pytest

from sparkkeras.data import files
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.reader import Reader
from sparkkeras.errors import ModelError
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelState
from sparkkeras.worker.batches import BatchRange, FitOptions
from sparkkeras.worker.trainer import LocalTrainer

WORDS = ["good", "bad", "film", "😀"]
Y = np.random.default_rng(0).integers(0, 2, 22)
X = np.array([" ".join(["film", WORDS[1 - label], *["😀"] * (row % 4)]) for row, label in enumerate(Y)], object)
WHOLE = BatchRange(epoch=0, rows=22, first=0, last=6)


def vectorization():
    return keras.layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4)


def model(*first, shape=(4,), dtype="int32"):
    keras.utils.set_random_seed(0)
    entry = keras.Input(shape, dtype=dtype, name="text")
    inner = entry
    for layer in first:
        inner = layer(inner)
    inner = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(6, 3)(inner))
    made = keras.Model(entry, keras.layers.Dense(1, activation="sigmoid")(inner))
    made.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", run_eagerly=dtype != "string")
    return made


def equals_keras(mine, theirs, rows, options, folder, *data):
    """Check an epoch on a worker of a model against another one that Keras trains on ``data``."""
    block = files.write([rows], 0, folder).open()
    replica = LocalTrainer(ModelArchive.pack(mine), TaskContext(0)).fit(ModelState.take(mine), block, WHOLE, options)
    replica.state.put(mine)
    theirs.fit(*data, batch_size=4, shuffle=False, verbose=0)
    for one, other in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")
def test_a_model_of_strings_trains_as_in_keras(tmp_path):
    mine, theirs = (model(vectorization(), shape=(1,), dtype="string") for _ in range(2))
    rows = Reader(schema_of(mine)).read_arrays(X, Y, None)
    equals_keras(mine, theirs, rows, FitOptions(4, shuffle=False), tmp_path, X, Y)


def test_layers_in_a_transform_train_as_in_keras(tmp_path):
    vectorize, lookup = vectorization(), keras.layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0)
    names = np.array(["no", "yes"], object)[Y]
    transform = ByValue.dump(lambda x, y: (vectorize(x), lookup(y)), "transform")
    mine, theirs = model(), model()
    rows = Reader(schema_of(mine).before(transform)).read_arrays(X, names, None)
    options = FitOptions(4, transform, shuffle=False)
    equals_keras(mine, theirs, rows, options, tmp_path, np.asarray(vectorize(X)), Y)


def test_an_adapted_feature_space_travels_in_a_transform():
    import tensorflow

    space = keras.utils.FeatureSpace({"kind": "string_categorical", "size": "float_normalized"}, output_mode="concat")
    rows = {"kind": np.array(["a", "b", "a"]), "size": np.array([1.0, 2.0, 3.0])}
    space.adapt(tensorflow.data.Dataset.from_tensor_slices(rows))
    copy = ByValue.dump(lambda x, y: (space(x), y), "transform").fresh()
    np.testing.assert_array_equal(np.asarray(copy(rows, None)[0]), np.asarray(space(rows)))


def test_other_backends_refuse_models_of_strings(monkeypatch):
    def no_strings(*_, **__):
        raise TypeError("data type 'string' not understood")

    from sparkkeras.modeling import schema

    schema.has_strings.cache_clear()
    made = keras.Model(entry := keras.Input((1,), dtype="string", name="text"), keras.layers.Hashing(3)(entry))
    monkeypatch.setattr(keras.ops, "convert_to_tensor", no_strings)
    with pytest.raises(ModelError, match="'text' takes strings.*transform="):
        schema_of(made)
    schema.has_strings.cache_clear()
