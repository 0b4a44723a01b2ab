"""`ImageFeaturizer`: image features from any layer of a model, used by Spark ML's classifiers."""

import io

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession

from sparkkeras import ConfigurationError, DataError, ModelError
from sparkkeras.ml import ImageFeaturizer
from tests.ml import parts

pytest.importorskip("PIL")
pytestmark = pytest.mark.usefixtures("sc")


def png(pixels):
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def pixels():
    """Noise images; every second one has a bright upper half. Shape (24, 16, 16, 3)."""
    drawn = np.random.default_rng(0).integers(0, 120, (24, 16, 16, 3)).astype(np.uint8)
    drawn[::2, :8] += 100
    return drawn


@pytest.fixture
def frame(sc, pixels):
    rows = [(number, bytearray(png(each)), float(number % 2)) for number, each in enumerate(pixels)]
    return SparkSession(sc).createDataFrame(rows, "id int, image binary, label double").repartition(2)


@pytest.fixture
def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3), name="photo"),
            keras.layers.Conv2D(4, 3, strides=2, activation="relu", name="conv"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(5, "relu", name="hidden"),
            keras.layers.Dense(1, "sigmoid", name="end"),
        ],
        name="looker",
    )


def found(transformed, name="features"):
    return np.array([row[0].toArray() for row in transformed.orderBy("id").select(name).collect()])


@pytest.mark.parametrize(("layer", "taken"), [(None, "hidden"), ("conv", "conv"), (-1, "end")])
def test_features_are_the_output_of_the_layer(frame, pixels, network, layer, taken):
    featurizer = ImageFeaturizer(model=network, layer=layer, preprocessing=1 / 255)
    transformed = featurizer.transform(frame)
    nearest = pixels[:, 1::2, 1::2] / np.float32(255)
    model = keras.Model(network.inputs, network.get_layer(taken).output)
    expected = model.predict(nearest, verbose=0).reshape(len(pixels), -1)
    np.testing.assert_allclose(found(transformed), expected, rtol=1e-4, atol=1e-5)
    assert transformed.schema == featurizer.transformSchema(frame.schema)
    assert transformed.schema["features"].metadata == {"ml_attr": {"num_attrs": expected.shape[1]}}


def test_a_pipeline_with_logistic_regression_is_saved_and_loaded(frame, network, tmp_path):
    featurizer = ImageFeaturizer(model=network, layer="flat", preprocessing=parts.darker, interpolation="box")
    model = Pipeline(stages=[featurizer, LogisticRegression(maxIter=20)]).fit(frame)
    scored = model.transform(frame)
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) == 1.0
    model.save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert loaded.stages[0].getPreprocessing() is parts.darker
    assert loaded.stages[0].getInterpolation() == "box"
    np.testing.assert_allclose(
        found(loaded.transform(frame), "probability"), found(scored, "probability"), rtol=0, atol=1e-6
    )


def test_rows_without_a_readable_image(sc, pixels, network):
    def nan_if_black(batch):
        return np.where(batch.max(axis=(1, 2, 3), keepdims=True) == 0, np.nan, batch)

    black = bytearray(png(np.zeros((8, 8, 3), np.uint8)))
    rows = [(0, bytearray(png(pixels[0]))), (1, bytearray(b"no image")), (2, None), (3, black)]
    frame = SparkSession(sc).createDataFrame(rows, "id int, image binary").coalesce(1)
    featurizer = ImageFeaturizer(model=network, on_error="null", preprocessing=nan_if_black)
    assert [row.id for row in featurizer.transform(frame).collect() if row.features is None] == [1, 2, 3]
    assert [row.id for row in featurizer.setOnError("drop").transform(frame).collect()] == [0]
    featurizer.setOnError("error")
    with pytest.raises(Exception, match=r"column 'image', row 1 of partition 0: the image cannot be loaded"):
        featurizer.transform(frame).collect()
    with pytest.raises(Exception, match=r"column 'image' holds NaN or an infinite value in row 0 of partition 0"):
        featurizer.transform(frame.where("id = 3")).collect()


def test_a_model_of_keras_applications_by_name(frame, tmp_path):
    keras.utils.set_random_seed(0)
    weights = str(tmp_path / "mobile.weights.h5")
    keras.applications.MobileNet(weights=None).save_weights(weights)
    featurizer = ImageFeaturizer(model="MobileNet", weights=weights, layer=3, size=(16, 16))
    assert featurizer._pixel_function() is keras.applications.mobilenet.preprocess_input
    with pytest.raises(ModelError, match="layer='avg_poll'.*has no layer of this name"):
        featurizer.copy({featurizer.layer: "avg_poll"}).transformSchema(frame.schema)
    featurizer.save(str(tmp_path / "featurizer"))
    loaded = ImageFeaturizer.load(str(tmp_path / "featurizer"))
    assert (loaded.getModel(), loaded.getWeights()) == ("MobileNet", weights)


def test_errors_are_raised_before_a_job(frame, network):
    with pytest.raises(ModelError, match="this ImageFeaturizer has no model"):
        ImageFeaturizer().transform(frame)
    with pytest.raises(DataError, match="expected images"):
        ImageFeaturizer(model=network, inputCol="label").transform(frame)
    with pytest.raises(ConfigurationError, match=r"'label' already exists: choose another name \(outputCol\)"):
        ImageFeaturizer(model=network, outputCol="label").transform(frame)
    with pytest.raises(ModelError, match="layer=9: the model 'looker' has 4 layers"):
        ImageFeaturizer(model=network, layer=9).transform(frame)
    flat = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ModelError, match="does not take images"):
        ImageFeaturizer(model=flat).transform(frame)
    free = keras.Sequential([keras.Input((None, None, 3)), keras.layers.Conv2D(2, 3)])
    with pytest.raises(ConfigurationError, match=r"takes images of any size: set size=\(height, width\)"):
        ImageFeaturizer(model=free).transform(frame)
