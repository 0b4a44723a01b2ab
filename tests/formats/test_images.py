"""`image_loader`, compared with Keras's image loading bit for bit, and with damaged images."""

import http.server
import io
import itertools
import pickle
import sys
import threading
import time
from contextlib import contextmanager

import keras
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from sparkkeras import ClusterError, ConfigurationError, CustomObjectError, DataError, StorageError
from sparkkeras.data.block import Form, Structure
from sparkkeras.data.columns import Leaf
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.formats.images import image_loader
from sparkkeras.sources.frame import Selection

STRUCT = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
FIELDS = pa.struct(
    [
        ("origin", pa.string()), ("height", pa.int32()), ("width", pa.int32()), ("nChannels", pa.int32()),
        ("mode", pa.int32()), ("data", pa.binary()),
    ]
)  # fmt: skip


KERAS_MODES = {"RGB": "rgb", "L": "grayscale", "RGBA": "rgba"}


def picture(height=30, width=41, mode="RGB", seed=0):
    """Smooth colors, which both JPEG and resizing change."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, len(mode)), np.uint8)
    return Image.fromarray(coarse.squeeze()).resize((width, height))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def by_keras(data, size, mode="RGB", **given):
    image = keras.utils.load_img(io.BytesIO(data), KERAS_MODES[mode], size, **given)
    return keras.utils.img_to_array(image, data_format="channels_last")


def struct(image, origin="here"):
    """An image as Spark's image struct."""
    pixels = np.atleast_3d(np.asarray(image))
    channels = pixels.shape[2]
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels]
    return {
        "origin": origin, "height": pixels.shape[0], "width": pixels.shape[1], "nChannels": channels,
        "mode": {1: 0, 3: 16, 4: 24}[channels], "data": np.ascontiguousarray(pixels[..., order]).tobytes(),
    }  # fmt: skip


def binary(*rows):
    return pa.array(rows, pa.binary())


PNG = encoded(picture())


# Equality with Keras


def check_against_keras(data, size, mode="RGB", draft=False, **options):
    images, good = image_loader(size, mode, draft=draft, **options)(binary(data), "image")
    assert images.dtype == np.float32
    assert good.all()
    np.testing.assert_array_equal(images[0], by_keras(data, size, mode, **options))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "WEBP"])
def test_pixels_equal_those_of_keras(kind):
    check_against_keras(encoded(picture(), kind), (20, 24))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "hamming", "box", "lanczos"])
def test_every_interpolation_equals_that_of_keras(interpolation):
    check_against_keras(PNG, (12, 50), interpolation=interpolation)


@pytest.mark.parametrize("source", ["L", "RGB", "RGBA", "P", "1", "CMYK", "LA", "I;16"])
def test_images_of_every_mode_are_converted_as_keras_does(source):
    if source == "I;16":
        image = Image.fromarray((np.arange(30 * 41).reshape(30, 41) * 50).astype(np.uint16))
    else:
        image = picture(mode="RGBA" if source in ("RGBA", "LA") else "RGB").convert(source)
    data = encoded(image, "TIFF" if source == "CMYK" else "PNG")
    for mode in KERAS_MODES:
        check_against_keras(data, (10, 10), mode)


def test_the_first_frame_of_an_animation_is_loaded():
    first, second = picture(seed=1).convert("P"), picture(seed=2).convert("P")
    data = encoded(first, "GIF", save_all=True, append_images=[second])
    check_against_keras(data, None)


def test_exif_orientation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    check_against_keras(encoded(picture(), "JPEG", exif=exif), None)


# Sizes, dtypes, preprocessing


def test_without_a_size_images_are_not_resized():
    loader = image_loader(None, "L")
    assert loader.shape == (None, None, 1)
    images, _ = loader(binary(PNG, PNG), "image")
    assert images.shape == (2, 30, 41, 1)
    assert loader(binary(), "image")[0].shape == (0, 0, 0, 1)
    with pytest.raises(DataError, match="column 'x', row 1 .*8 x 9.*30 x 41.*size="):
        loader(binary(PNG, encoded(picture(8, 9))), "x")


def test_small_and_wide_dtypes():
    for dtype in ("uint8", "float64"):
        images, _ = image_loader((8, 8), dtype=dtype)(binary(PNG), "image")
        assert images.dtype == dtype
        np.testing.assert_array_equal(images[0], by_keras(PNG, (8, 8)))
    deep = binary(encoded(Image.fromarray(np.full((4, 4), 40_000, np.uint16))))
    assert image_loader((4, 4), "L")(deep, "image")[0].max() == 40_000
    with pytest.raises(DataError, match="uint16 values"):
        image_loader((4, 4), "L", dtype="uint8")(deep, "image")


def test_preprocessing_is_a_factor_or_a_function_that_may_work_in_place():
    preprocess, factor = keras.applications.resnet.preprocess_input, np.float32(1 / 255)
    for preprocessing, expected in (
        (1 / 255, by_keras(PNG, (8, 8)) * factor),
        (preprocess, preprocess(by_keras(PNG, (8, 8)))),
    ):
        images, _ = image_loader((8, 8), preprocessing=preprocessing)(binary(PNG), "image")
        assert images.dtype == np.float32
        np.testing.assert_array_equal(images[0], expected)


def test_a_lambda_is_pickled_by_value():
    loader = pickle.loads(pickle.dumps(image_loader((8, 8), preprocessing=lambda x: x * 0.5)))
    np.testing.assert_array_equal(loader(binary(PNG), "image")[0][0], by_keras(PNG, (8, 8)) * 0.5)
    lock = threading.Lock()
    with pytest.raises(CustomObjectError, match="preprocessing"):
        image_loader((8, 8), preprocessing=lambda x: x + lock.locked())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.mean(), r"shape \(\) for .*\(2, 8, 8, 3\)"),
        (lambda x: x.reshape(3, 3), "ValueError: cannot reshape"),
        (lambda x: x.astype(complex), "complex128"),
    ],
)
def test_preprocessing_that_fails_is_reported_immediately(function, message):
    with pytest.raises(ConfigurationError, match=message):
        image_loader((8, 8), preprocessing=function)
    with pytest.raises(ConfigurationError, match="one row for each"):
        image_loader(None, preprocessing=lambda x: x[:1])(binary(PNG, PNG), "image")


def test_drafts_are_close_and_much_faster():
    data = encoded(picture(1501, 2003), "JPEG", quality=90)
    found, seconds = {}, {}
    for draft in (False, True):
        loader = image_loader((100, 120), draft=draft, interpolation="bilinear")
        began = time.process_time()
        found[draft], _ = loader(binary(data, data), "image")
        seconds[draft] = time.process_time() - began
    difference = np.abs(found[True] - found[False])
    assert 0 < difference.mean() < 1
    assert difference.max() < 16
    assert seconds[True] < seconds[False]
    check_against_keras(encoded(picture(100, 120), "JPEG"), (64, 64), draft=True)


# Spark's image struct


@pytest.mark.parametrize("source", ["L", "RGB", "RGBA"])
def test_structs_give_the_same_images_as_files(source):
    image = picture(mode=source)
    column = pa.array([struct(picture()), struct(image)], FIELDS)[1:]
    for mode in KERAS_MODES:
        images, good = image_loader((20, 20), mode)(column, "image")
        assert good.all()
        np.testing.assert_array_equal(images[0], by_keras(encoded(image), (20, 20), mode))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nChannels": 4}, "mode 16 and nChannels 4"),
        ({"data": b"\0" * 9}, "9 bytes for 30"),
        ({"data": None}, "0 bytes for 30"),
    ],
)
def test_damaged_structs_are_reported(change, message):
    column = pa.array([struct(picture()), struct(picture(), "file:/b.png") | change], FIELDS)
    with pytest.raises(DataError, match=rf"row 1 of .*\(file:/b.png\).*{message}"):
        image_loader((8, 8))(column, "image")
    _, good = image_loader((8, 8), on_error="null")(column, "image")
    assert good.tolist() == [True, False]


# Damaged rows


def bomb():
    """A PNG whose header declares more pixels than Pillow accepts."""
    import struct
    import zlib

    body = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return PNG[:12] + body + struct.pack(">I", zlib.crc32(body)) + PNG[33:]


DAMAGED = {
    "null": (None, "the value is null"),
    "text": (b"<!DOCTYPE html>", "15 bytes, .* b'<!DOCTYPE ht'"),
    "truncated PNG": (PNG[: len(PNG) // 2], "truncated"),
    "flipped bytes": (PNG[:60] + b"\xff" * 40 + PNG[100:], "broken"),
    "bomb": (bomb(), "DecompressionBombError"),
    "EPS": (encoded(picture(), "EPS"), "EPS"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_row_is_reported_with_its_location_and_reason(data, message):
    with pytest.raises(DataError, match=f"^column 'photo', row 1 of .*{message}.*on_error="):
        image_loader((8, 8))(binary(PNG, data), "photo")


def test_damaged_rows_are_masked_and_zero_and_others_keep_their_place():
    rows = []
    for seed, (data, _) in enumerate(DAMAGED.values()):
        rows += [encoded(picture(seed=seed)), data]
    images, good = image_loader((8, 8), preprocessing=lambda x: x + 1, on_error="null")(binary(*rows), "image")
    assert good.tolist() == [True, False] * len(DAMAGED)
    assert not images[~good].any()
    np.testing.assert_array_equal(images[good], np.stack([by_keras(row, (8, 8)) + 1 for row in rows[::2]]))


def test_preprocessing_may_change_the_shape_also_of_batches_without_good_rows():
    loader = image_loader((8, 8), preprocessing=lambda x: x.mean(axis=(1, 2)).astype("float64"), on_error="null")
    assert loader.shape == (3,)
    assert [array.shape for array in loader(binary(PNG), "image")] == [(1, 3), (1,)]
    images, good = loader(binary(None, b"no"), "image")
    assert images.dtype == np.float32
    np.testing.assert_array_equal(images, np.zeros((2, 3)))
    assert not good.any()
    assert loader(binary(), "image")[0].shape == (0, 3)


def test_a_damaged_row_of_a_partition_is_reported_with_its_index():
    spec = InputSpec("x", (8, 8, 3), floating=True)
    leaf = Leaf(("photo",), input=spec, loader=image_loader((8, 8)))
    read = Selection(Reader(Schema((spec,)), labelled=False), Form(Structure()), (leaf,))
    batches = [pa.record_batch([column], ["photo"]) for column in (binary(*[PNG] * 5), binary(PNG, b"no", PNG))]
    with pytest.raises(DataError, match="row 6 of partition 3"):
        list(read(3, batches))


# URIs


@pytest.fixture
def files(tmp_path):
    names = ["plain.png", "with space.png", "100%.png", "really%20so.png", "größe.png"]
    for seed, name in enumerate(names):
        (tmp_path / name).write_bytes(encoded(picture(seed=seed)))
    return {name: str(tmp_path / name) for name in names}


def test_local_files_by_path_and_by_uri_with_and_without_escapes(files, tmp_path):
    given = {
        files["plain.png"]: 0,
        f"file://{files['plain.png']}": 0,
        f"FILE://localhost{files['plain.png']}": 0,
        files["with space.png"]: 1,
        f"file://{files['with space.png'].replace(' ', '%20')}": 1,
        f"file:{files['with space.png']}": 1,
        f"file:{files['100%.png']}": 2,
        f"file:{files['100%.png'].replace('%', '%25')}": 2,
        f"file:{files['really%20so.png']}": 3,
        (tmp_path / "größe.png").as_uri(): 4,
    }
    expected = [by_keras(encoded(picture(seed=seed)), (8, 8)) for seed in given.values()]
    images, good = image_loader((8, 8))(pa.array(list(given), pa.large_string()), "uri")
    assert good.all()
    np.testing.assert_array_equal(images, np.stack(expected))


def test_files_that_cannot_be_read_are_damaged_rows(files, tmp_path):
    column = pa.array([files["plain.png"], "/nowhere/x.png", None, str(tmp_path), "", "/a\0b"])
    _, good = image_loader((8, 8), on_error="drop")(column, "uri")
    assert good.tolist() == [True] + [False] * 5
    with pytest.raises(DataError, match=r"row 1 of .*\(/nowhere/x.png\).*No such file"):
        image_loader((8, 8))(column, "uri")
    with pytest.raises(DataError, match="row 0 of .*UnicodeDecodeError"):
        image_loader((8, 8))(pa.array([b"/\xff.png"]).view(pa.string()), "uri")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sparkkeras-images")]


def test_other_schemes_are_reported_regardless_of_on_error():
    for uri, message in (("https://example.org/x.png", "web.*'s3'.*binary"), ("ftp://me:secret@host/x.png", "'ftp'")):
        with pytest.raises(DataError, match=f"(?s)^(?!.*secret).*{message}"):
            image_loader((8, 8), on_error="drop")(pa.array([uri]), "uri")


@contextmanager
def store(objects, together=1, status=404):
    """A local S3 store for reading. With ``together``, it answers only when this many reads are pending at once."""
    asked, enough = itertools.count(1), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            if next(asked) >= together:
                enough.set()
            self.answer(body=True, joined=enough.wait(20))

        def answer(self, body, joined=True):
            data = objects.get(self.path) if joined else None
            self.send_response(status if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            if body and data:
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"?scheme=http&region=here&endpoint_override=127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_files_of_an_object_store_are_read_concurrently():
    objects = {f"/bucket/in%20here/{number}.png": encoded(picture(seed=number)) for number in range(40)}
    with store(objects, together=8) as options:
        uris = [f"s3a://me:secret@bucket/in here/{number}.png{options}" for number in range(40)]
        images, good = image_loader((8, 8), on_error="null")(pa.array([*uris, uris[0].replace("0.png", "no.png")]), "uri")
    assert good.tolist() == [True] * 40 + [False]
    np.testing.assert_array_equal(images[:40], np.stack([by_keras(data, (8, 8)) for data in objects.values()]))


def test_a_store_that_denies_access_is_an_error():
    with store({}, status=403) as options:
        with pytest.raises(StorageError, match="(?s)^(?!.*secret).*'x.png' of s3://bucket/.*binaryFile"):
            image_loader((8, 8), on_error="drop")(pa.array([f"s3://me:secret@bucket/x.png{options}"]), "uri")


# Columns and arguments


@pytest.mark.parametrize("kind", ["binary", "string collate UNICODE_CI", "varchar(200)", "char(9)", STRUCT])
def test_columns_that_can_hold_images(kind):
    image_loader((8, 8)).check("image", kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("int", "'image' has the type int.*binary"),
        ("array<float>", "do not need a loader"),
        ("struct<path:string,modificationTime:timestamp,length:bigint,content:binary>", r"field image\.content"),
        ("struct<a:int,b:string>", "Select the field"),
    ],
)
def test_columns_that_cannot_hold_images_are_reported(kind, message):
    with pytest.raises(DataError, match=message):
        image_loader((8, 8)).check("image", kind)
    with pytest.raises(DataError, match="the type int64"):
        image_loader((8, 8), on_error="null")(pa.array([1]), "image")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 224}, r"size=224: .*\(height, width\)"),
        ({"mode": "BGR"}, "mode='BGR' .*'RGBA'"),
        ({"preprocessing": "caffe"}, "preprocessing='caffe'"),
        ({"preprocessing": float("nan")}, "preprocessing=nan"),
        ({"preprocessing": 0.5, "dtype": "uint8"}, "cannot hold scaled values"),
        ({"preprocessing": lambda x: x / 255, "dtype": "uint8"}, "dtype='uint8' can hold"),
        ({"size": None, "on_error": "drop"}, "requires size="),
    ],
)
def test_invalid_arguments_are_reported(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        image_loader(**{"size": (8, 8), **arguments})


def test_a_missing_pillow_is_reported(monkeypatch):
    loader = image_loader((8, 8), on_error="drop")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for call in (lambda: image_loader((8, 8)), lambda: loader(binary(PNG), "image")):
        with pytest.raises(ClusterError, match="pip install pillow"):
            call()
