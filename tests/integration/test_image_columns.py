"""Images in DataFrames: Spark's image and binaryFile sources and URIs, loaded on the workers."""

import pickle
import re
from urllib.parse import unquote

import keras
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkkeras import DataError
from sparkkeras.formats.images import image_loader
from sparkkeras.spark.job_errors import translated

SIZE = (12, 16)


@pytest.fixture
def spark(sc):
    return SparkSession(sc)


@pytest.fixture
def photos(tmp_path):
    """A folder of PNGs with spaces in their names, as ``{path: class}``."""
    rng = np.random.default_rng(0)
    found = {}
    for number in range(12):
        pixels = rng.integers(0, 100, (20 + number, 24, 3), np.uint8)
        pixels[..., number % 3] += 150
        path = tmp_path / f"photo {number}.png"
        Image.fromarray(pixels).save(path)
        found[str(path)] = number % 3
    return found


def loaded(frame, name, loader):
    """The image of each row by id, or None, loaded on the workers."""
    loader.check(name, frame.schema[name].dataType.simpleString())

    def load(batches):
        for batch in batches:
            images, good = loader(batch.column(1), name)
            rows = [pickle.dumps(image if ok else None) for image, ok in zip(images, good, strict=True)]
            yield pa.record_batch([batch.column(0), pa.array(rows, pa.binary())], ["id", "image"])

    frame = frame.select("id", name)
    rows = frame.mapInArrow(load, f"id {frame.schema['id'].dataType.simpleString()}, image binary").collect()
    return {row.id: pickle.loads(row.image) for row in rows}


def expected(path):
    image = keras.utils.load_img(path, target_size=SIZE)
    return keras.utils.img_to_array(image, data_format="channels_last") * np.float32(0.5)


def test_all_kinds_of_columns_give_the_same_images(spark, photos, tmp_path):
    half = 0.5
    loader = image_loader(SIZE, preprocessing=lambda images: images * half)
    files = spark.read.format("binaryFile").load(str(tmp_path))
    images = spark.read.format("image").load(str(tmp_path))
    structs = images.select(F.col("image.origin").alias("id"), "image")
    frames = {
        "content": files.withColumnRenamed("path", "id"),
        "image": structs,
        "uri": files.select(F.col("path").alias("id"), F.col("path").alias("uri")),
        "file": files.select(F.col("path").alias("id"), F.col("_metadata.file_path").alias("file")),
    }
    for name, frame in frames.items():
        found = {re.sub("^file:(//)?", "", origin): image for origin, image in loaded(frame, name, loader).items()}
        assert {unquote(origin) for origin in found} == photos.keys(), name
        for path, image in found.items():
            np.testing.assert_array_equal(image, expected(unquote(path)), err_msg=name)


def test_damaged_rows(spark, photos, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    paths = [*photos, str(tmp_path / "bad.png"), str(tmp_path / "gone.png"), None]
    frame = spark.createDataFrame(list(enumerate(paths)), "id int, uri string")
    found = loaded(frame, "uri", image_loader(SIZE, on_error="null"))
    assert [image is not None for _, image in sorted(found.items())] == [True] * 12 + [False] * 3
    with pytest.raises(PythonException) as error:
        loaded(frame, "uri", image_loader(SIZE))
    failure = translated(error.value)
    assert isinstance(failure, DataError)
    assert "bad.png): the image cannot be loaded: Pillow finds no image in its 7 bytes" in str(failure)


def test_a_whole_row_of_the_binary_file_source_is_reported(spark, photos, tmp_path):
    files = spark.read.format("binaryFile").load(str(tmp_path)).select(F.struct("*").alias("row"))
    with pytest.raises(DataError, match=r"Select its field row\.content"):
        image_loader(SIZE).check("row", files.schema["row"].dataType.simpleString())
