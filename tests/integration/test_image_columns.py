"""Images in DataFrames: Spark's image and binaryFile sources and URIs, loaded on the workers."""

import re
from urllib.parse import unquote

import keras
import numpy as np
import pytest
from PIL import Image
from pyspark.errors import PythonException
from pyspark.sql import functions as F

from sparkkeras import DataError, SparkModel
from sparkkeras.formats.images import image_loader

SIZE = (12, 16)
MODEL = keras.Sequential([keras.Input((*SIZE, 3), name="image"), keras.layers.Flatten(name="pixels")], name="pixels")


@pytest.fixture
def photos(tmp_path):
    """The paths of PNGs with spaces in their names."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"photo {number}.png" for number in range(12)]
    for number, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (20 + number, 24, 3), np.uint8)).save(path)
    return {str(path) for path in paths}


def predicted(frame, name, loader):
    """The pixels of each row by id, or None."""
    scored = SparkModel(MODEL).predict(frame.select("id", name), features=name, loader=loader, output_col="p")
    return {row.id: row.p for row in scored.select("id", "p").collect()}


def expected(path):
    image = keras.utils.load_img(path, target_size=SIZE)
    return (keras.utils.img_to_array(image, data_format="channels_last") * np.float32(0.5)).ravel()


def test_all_kinds_of_columns_give_the_same_images(spark, photos, tmp_path):
    half = 0.5
    loader = image_loader(SIZE, preprocessing=lambda images: images * half)
    files = spark.read.format("binaryFile").load(str(tmp_path))
    images = spark.read.format("image").load(str(tmp_path))
    frames = {
        "content": files.withColumnRenamed("path", "id"),
        "image": images.select(F.col("image.origin").alias("id"), "image"),
        "uri": files.select(F.col("path").alias("id"), F.col("path").alias("uri")),
        "file": files.select(F.col("path").alias("id"), F.col("_metadata.file_path").alias("file")),
    }
    for name, frame in frames.items():
        found = {unquote(re.sub("^file:(//)?", "", uri)): pixels for uri, pixels in predicted(frame, name, loader).items()}
        assert found.keys() == photos, name
        for path, pixels in found.items():
            np.testing.assert_array_equal(pixels, expected(path), err_msg=name)


def test_damaged_rows(spark, photos, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    paths = [*photos, str(tmp_path / "bad.png"), str(tmp_path / "gone.png"), None]
    frame = spark.createDataFrame(list(enumerate(paths)), "id int, uri string")
    found = predicted(frame, "uri", image_loader(SIZE, on_error="null"))
    assert [pixels is not None for _, pixels in sorted(found.items())] == [True] * 12 + [False] * 3
    with pytest.raises(PythonException, match=r"DataError: .*bad.png\): the image cannot be loaded: Pillow finds no image"):
        predicted(frame, "uri", image_loader(SIZE))


def test_a_whole_row_of_the_binary_file_source_is_reported(spark, photos, tmp_path):
    files = spark.read.format("binaryFile").load(str(tmp_path)).select(F.struct("*").alias("row"))
    with pytest.raises(DataError, match=r"Select its field row\.content"):
        SparkModel(MODEL).predict(files, features="row", loader=image_loader(SIZE))
