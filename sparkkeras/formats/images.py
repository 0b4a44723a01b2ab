"""`image_loader`: decodes columns of images (encoded bytes, Spark's image struct or URIs) to arrays, with Pillow."""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import unquote

import numpy as np

from sparkkeras.arguments import integer, known_arguments, one_of
from sparkkeras.data.columns import IMAGE_STRUCT, PlacedLoader
from sparkkeras.data.schema import RowShape
from sparkkeras.errors import (
    ClusterError,
    ConfigurationError,
    DataError,
    SparkKerasError,
    StorageError,
    counted,
    known_names,
)
from sparkkeras.formats.tfrecord_files import SCHEMES
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.spark.filesystem import has_scheme
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa

Mode = Literal["RGB", "L", "RGBA"]
OnError = Literal["error", "null", "drop"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "hamming", "box", "lanczos"]

_CHANNELS = {"RGB": 3, "L": 1, "RGBA": 4}
INTERPOLATIONS = get_args(Interpolation)
_DTYPES = ("float32", "float64", "uint8")

_OPENCV = {0: ("L", "L", 1), 16: ("RGB", "BGR", 3), 24: ("RGBA", "BGRA", 4)}
"""For OpenCV's type codes Pillow's mode, the stored order of the channels, and the number of channels."""

_READERS, _AHEAD = 16, 32


@known_arguments
def image_loader(
    size: Sequence[int] | None,
    mode: Mode = "RGB",
    preprocessing: Callable[[Array], Any] | float | None = None,
    *,
    on_error: OnError = "error",
    interpolation: Interpolation = "nearest",
    dtype: Literal["float32", "float64", "uint8"] = "float32",
    draft: bool = False,
) -> ImageLoader:
    """Create a loader that decodes a column of images into a model input, for ``loader=`` of `SparkModel.fit` and others.

    The column holds one of

    - encoded images (binary): any format that Pillow reads (JPEG, PNG, BMP, the first frame of a GIF and others), except
      EPS, which is a program. An example is the column ``content`` of Spark's ``binaryFile`` source;
    - Spark's image struct, from its ``image`` source;
    - URIs or absolute paths (string), which the workers read: ``file:`` URIs and paths from local disks; ``s3:`` or
      ``s3a:``, ``gs:``, ``hdfs:`` and ``abfs:`` through pyarrow.fs, which finds its credentials on the workers and does not
      use Spark's. If a path does not exist, it is tried again with its ``%`` escapes decoded.

    The result has the shape (rows, height, width, channels), channels last regardless of Keras's ``image_data_format``, and
    values from 0 to 255. They equal those of ``keras.utils.load_img(target_size=size, interpolation=interpolation)`` and
    ``img_to_array`` bit for bit, with the same defaults: EXIF orientation is ignored, transparency is discarded and not
    blended, and ``mode="L"`` keeps the range of greyscale images with 16 or 32 bits.

    ``on_error`` applies to nulls, missing files, damaged images, and images that Pillow rejects as decompression bombs. An
    unreachable store or an unsupported scheme always raises.

    Args:
        size: (height, width) in pixels; images are resized to it without keeping their aspect ratio. ``None``: no resizing;
            then all images must have the same size, and ``on_error`` must be ``"error"``.
        mode: ``"RGB"``, ``"L"`` (greyscale, one channel) or ``"RGBA"``; images of other modes are converted.
        preprocessing: A function on a batch of loaded images, shape (rows, height, width, channels), that returns an array
            with one row for each; it may modify its argument. Or a factor, such as ``1 / 255``. The function is sent to the
            workers by value. If ``size`` is set, it is called immediately with two test images, to check it.
        on_error: What to do with rows that cannot be loaded: ``"error"`` raises, ``"null"`` predicts null and does not train
            on them, ``"drop"`` drops them.
        interpolation: The resizing filter: ``"nearest"``, ``"bilinear"``, ``"bicubic"``, ``"hamming"``, ``"box"`` or
            ``"lanczos"``. The default is that of ``keras.utils.load_img``, which skips pixels; the others average over
            them. Use the filter that the model was trained with.
        dtype: The dtype of the result; ``"uint8"`` for models that rescale pixels themselves.
        draft: Whether to decode JPEGs that are more than twice as large as ``size`` at 1/2, 1/4 or 1/8 of their size. This
            is several times faster, but values differ from Keras's: slightly, or more with ``interpolation="nearest"``.

    Raises:
        ConfigurationError: An argument is out of range, or the function fails on the test images.
        CustomObjectError: The function cannot be pickled.
        ClusterError: Pillow is missing.

    Example::

        loader = image_loader((224, 224), preprocessing=keras.applications.resnet.preprocess_input)
        photos = spark.read.format("binaryFile").load("/photos/*.jpg")
        SparkModel(model).predict(photos, features="content", loader=loader)
    """
    if size is not None:
        if not isinstance(size, (tuple, list)) or len(size) != 2:
            raise ConfigurationError(f"size={size!r}: expected (height, width) in pixels, or None to keep the images' size.")
        size = (integer("size[0]", size[0]), integer("size[1]", size[1]))
    one_of("mode", mode, tuple(_CHANNELS))
    one_of("on_error", on_error, get_args(OnError))
    one_of("interpolation", interpolation, INTERPOLATIONS)
    one_of("dtype", dtype, _DTYPES)
    if size is None and on_error != "error":
        raise ConfigurationError(
            f"on_error={on_error!r} requires size=(height, width): without it, rows that cannot be loaded have no shape."
        )
    _pillow()
    function: ByValue[Callable[[Array], Any]] | float | None
    if preprocessing is None or callable(preprocessing):
        function = None if preprocessing is None else ByValue.dump(preprocessing, "preprocessing")
    else:
        function = _factor(preprocessing, dtype)
    shape = (*(size or (None, None)), _CHANNELS[mode])
    loader = ImageLoader(size, mode, function, on_error, interpolation, dtype, bool(draft), shape)
    if size is None or not callable(preprocessing):
        return loader
    patterns = np.resize(np.arange(256, dtype=dtype), (2, *size, _CHANNELS[mode]))
    return replace(loader, shape=loader.prepared(patterns).shape[1:])


def _factor(value: Any, dtype: str) -> float:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or dtype == "uint8":
        problem = (
            'dtype="uint8" cannot hold scaled values: use dtype="float32"' if number else "expected a function or a number"
        )
        raise ConfigurationError(f"preprocessing={value!r}: {problem}.")
    return float(value)


@dataclass(frozen=True)
class ImageLoader(PlacedLoader):
    """Decodes a column of images. Created by `image_loader`, which documents the other fields.

    Attributes:
        shape: The shape of one row after preprocessing; ``None`` for axes that depend on the images.
    """

    size: tuple[int, int] | None
    mode: Mode
    preprocessing: ByValue[Callable[[Array], Any]] | float | None
    on_error: OnError
    interpolation: Interpolation
    dtype: str
    draft: bool
    shape: RowShape

    def __repr__(self) -> str:
        """The call of `image_loader`, without arguments that have their defaults."""
        given = {
            name: (getattr(self, name), each.default) for name, each in inspect.signature(image_loader).parameters.items()
        }
        changed = {name: value for name, (value, default) in given.items() if value != default}
        texts = [f"{name}={'<function>' if isinstance(each, ByValue) else repr(each)}" for name, each in changed.items()]
        return f"image_loader({', '.join(texts)})"

    def check(self, name: str, kind: str) -> None:
        """Check that the type of a column can hold images.

        Args:
            name: The name of the column.
            kind: Its Spark type, as a simple string.

        Raises:
            DataError: The type is not binary, string or Spark's image struct.
        """
        if kind in ("binary", IMAGE_STRUCT) or re.fullmatch(r"string( collate \w+)?|(var)?char\(\d+\)", kind):
            return
        if "content:binary" in kind:
            advice = f"Select its field {name}.content."
        elif kind.startswith("struct"):
            advice = "Select the field that holds the image."
        else:
            advice = "Arrays of pixels do not need a loader: leave loader out."
        raise DataError(
            f"column {name!r} has the type {kind}; expected images: binary (encoded, such as the column content of the "
            f"binaryFile source), string (URIs), or the struct of Spark's image source, {IMAGE_STRUCT}. {advice}"
        )

    def load(self, column: pa.Array, name: str, where: str, first: int) -> tuple[Array, Array]:
        """Decode a column of images.

        Args:
            column: Encoded images, structs or URIs.
            name: The name of the column, for error messages.
            where: The location of the rows, such as a partition, for error messages.
            first: The index of the first row in this location, for error messages.

        Returns:
            The images, shape (rows, *shape), and a mask of the rows that could be loaded, shape (rows,). The values of the
            other rows are zeros.

        Raises:
            DataError: A row cannot be loaded and ``on_error`` is ``"error"``; images differ in size and ``size`` is
                ``None``; or a URI has an unsupported scheme.
            ConfigurationError: The preprocessing function fails.
            StorageError: A store cannot be reached.
            ClusterError: Pillow is missing on this worker.
        """
        _pillow()
        good = np.zeros(len(column), bool)
        images, filled = None if self.size is None else self._empty(len(column), self.size), 0
        with closing(_values(column, name)) as values:
            for row, value in enumerate(values):
                try:
                    pixels = self._pixels(value())
                except SparkKerasError:
                    raise
                except Exception as error:
                    if self.on_error == "error":
                        place = f"column {name!r}, row {first + row} of {where}{_origin(column[row])}"
                        raise DataError(f"{place}: {_row_error(error)}") from error
                    continue
                if images is None:
                    images = self._empty(len(column), pixels.shape[:2])
                if pixels.shape != images.shape[1:]:
                    place = f"column {name!r}, row {first + row} of {where}{_origin(column[row])}"
                    raise DataError(
                        f"{place}: the image has {_describe_size(pixels)}, but the images before it have "
                        f"{_describe_size(images[0])}. Set size=(height, width) in image_loader to resize them."
                    )
                images[filled] = pixels
                filled += 1
                good[row] = True
        return self._spread(images, filled, good), good

    def prepared(self, images: Array) -> Array:
        """Preprocess images of shape (rows, height, width, channels); may modify its argument.

        Raises:
            ConfigurationError: The function fails, or does not return one row for each image.
        """
        if self.preprocessing is None:
            return images
        if isinstance(self.preprocessing, float):
            images *= self.preprocessing
            return images
        try:
            found = np.asarray(self.preprocessing.load()(images))
        except Exception as error:
            raise ConfigurationError(
                f"preprocessing failed on {self.dtype} images of shape {images.shape}: {type(error).__name__}: {error}"
            ) from error
        if found.ndim == 0 or len(found) != len(images) or not np.can_cast(found.dtype, self.dtype, "same_kind"):
            raise ConfigurationError(
                f"preprocessing returned {found.dtype} of shape {found.shape} for {self.dtype} images of shape "
                f"{images.shape}; expected one row for each image, with values that dtype={self.dtype!r} can hold."
            )
        return found.astype(self.dtype, copy=False)

    def _empty(self, rows: int, size: Sequence[int]) -> Array:
        return np.empty((rows, *size, _CHANNELS[self.mode]), self.dtype)

    def _spread(self, images: Array | None, filled: int, good: Array) -> Array:
        """Preprocess the loaded images and put each into its row; other rows are zeros."""
        if images is None or not filled:
            return np.zeros((len(good), *(size or 0 for size in self.shape)), self.dtype)
        found = self.prepared(images[:filled])
        if filled == len(good):
            return found
        rows = np.zeros((len(good), *found.shape[1:]), self.dtype)
        rows[good] = found
        return rows

    def _pixels(self, value: Any) -> Array:
        """Decode one image to shape (height, width, channels); converts first and then resizes, as Keras does."""
        from PIL import Image

        if value is None:
            raise _UnreadableImageError("the value is null")
        image: Any = _from_struct(value) if isinstance(value, dict) else _opened(value)
        height, width = self.size or (image.height, image.width)
        whole = image.draft(None, (2 * width, 2 * height)) if self.draft and not isinstance(value, dict) else None
        if image.mode != self.mode and not (self.mode == "L" and image.mode in ("I", "I;16")):
            image = image.convert(self.mode)
        if image.size != (width, height):
            # In a draft of an odd size the last pixel covers only a part of a full one, so the box excludes the rest.
            box = None if whole is None else whole[1]
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()], box)
        pixels = np.asarray(image)
        if self.dtype == "uint8" and pixels.dtype != np.uint8:
            raise _UnreadableImageError(f'the image has {pixels.dtype} values, which dtype="uint8" cannot hold')
        return pixels.reshape(height, width, _CHANNELS[self.mode])


class _UnreadableImageError(Exception):
    """An image cannot be loaded. The message is the reason."""


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ClusterError(
            "images are decoded by Pillow, which cannot be imported: pip install pillow (or sparkkeras[images]) on the "
            f"driver and on all workers. {type(error).__name__}: {error}"
        ) from error


def _opened(data: bytes) -> Any:
    """Open an encoded image; Pillow decodes the pixels lazily."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(BytesIO(data))
    except UnidentifiedImageError:
        raise _UnreadableImageError(
            f"Pillow finds no image in its {len(data)} bytes, which begin with {data[:12]!r}"
        ) from None
    if image.format == "EPS":  # Pillow would run it with Ghostscript
        raise _UnreadableImageError("EPS images are programs and are not run")
    return image


def _from_struct(row: dict[str, Any]) -> Any:
    """Convert Spark's image struct to a Pillow image."""
    from PIL import Image

    kind = _OPENCV.get(row["mode"])
    if kind is None or row["nChannels"] != kind[2]:
        raise _UnreadableImageError(
            f"the struct has mode {row['mode']} and nChannels {row['nChannels']}; expected 0 (CV_8UC1) with 1, 16 (CV_8UC3) "
            "with 3, or 24 (CV_8UC4) with 4"
        )
    mode, order, channels = kind
    height, width, data = row["height"] or 0, row["width"] or 0, row["data"] or b""
    if height < 1 or width < 1 or len(data) != height * width * channels:
        raise _UnreadableImageError(
            f"the struct has {len(data)} bytes for {height} x {width} pixels of {counted(channels, 'channel')}"
        )
    return Image.frombuffer(mode, (width, height), data, "raw", order, 0, 1)


def _row_error(error: Exception) -> str:
    reason = str(error) if isinstance(error, _UnreadableImageError) else f"{type(error).__name__}: {error}"
    return (
        f'the image cannot be loaded: {reason}. Fix it, or set on_error="drop" or on_error="null" in image_loader to '
        "continue without such rows."
    )


def _origin(value: Any) -> str:
    """The origin of an image in parentheses, if the column has it."""
    found = None
    with suppress(UnicodeDecodeError):
        found = value.as_py()
    if isinstance(found, dict):
        found = found["origin"]
    return f" ({_public(found)})" if isinstance(found, str) else ""


def _public(uri: str) -> str:
    """A URI without user name and password."""
    return re.sub("//[^/@]*:[^/@]*@", "//", uri)


def _describe_size(pixels: Array) -> str:
    return f"{pixels.shape[0]} x {pixels.shape[1]} pixels"


# Reading values of a column


def _values(column: pa.Array, name: str) -> Generator[Callable[[], Any], None, None]:
    """For each row a function that returns None, encoded bytes, or a struct as a dict."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield from _read_ahead(column)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind):
        for value in column:
            yield value.as_py
    else:
        raise DataError(
            f"column {name!r} has the type {kind}; expected images: encoded bytes, URIs, or the struct of Spark's image "
            "source."
        )


def _read_ahead(column: pa.Array) -> Generator[Callable[[], bytes | None], None, None]:
    """Read files ahead in threads while others are decoded, since remote stores have a high latency."""
    pool, rows = ThreadPoolExecutor(_READERS, "sparkkeras-images"), iter(column)
    try:
        pending = deque(pool.submit(_read, row) for row in islice(rows, _AHEAD))
        while pending:
            yield pending.popleft().result
            pending.extend(pool.submit(_read, row) for row in islice(rows, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _read(value: Any) -> bytes | None:
    uri = value.as_py()
    if uri is None:
        return None
    scheme = uri.partition(":")[0].lower() if has_scheme(uri) else "file"
    if scheme not in SCHEMES:
        problem = "Images cannot be read from the web" if scheme in ("http", "https") else f"{scheme!r} is not known"
        raise DataError(
            f"the image {_public(uri)!r} cannot be read. {problem}. {known_names(scheme, SCHEMES)} Copy the images "
            "to one of these, or pass their bytes in a binary column."
        )
    store = ""
    if scheme == "file":
        path = re.sub("^file:(//[^/]*)?", "", uri, flags=re.IGNORECASE)
    else:
        place, _, path = uri.partition(":")[2].removeprefix("//").partition("/")
        path, mark, options = path.partition("?")
        store = f"{scheme.replace('s3a', 's3')}://{place}/{mark}{options}"
    try:
        return _read_from(store, path)
    except FileNotFoundError:
        # Spark writes paths unescaped in some places and %-escaped in others.
        if unquote(path) == path:
            raise
        return _read_from(store, unquote(path))


def _read_from(store: str, path: str) -> bytes:
    """Read a file of a store, or without one from a local disk."""
    if not store:
        return Path(path).read_bytes()
    try:
        with _connecting:  # creating a second S3 client in Arrow would wait for all reads of the first
            files, root = _store(store)
        with files.open_input_file(f"{root.rstrip('/')}/{path}") as file:
            data: bytes = file.readall()
            return data
    except FileNotFoundError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise StorageError(
            f"cannot read the image {path!r} of {_public(store)} through pyarrow: {reason}. "
            'If Spark can read it, use spark.read.format("binaryFile") and its column content.'
        ) from error


_connecting = threading.Lock()


@functools.lru_cache(maxsize=64)
def _store(uri: str) -> tuple[Any, str]:
    """The file system of a bucket or cluster and the path of its root; cached, since connecting is slow."""
    from pyarrow import fs

    found: tuple[Any, str] = fs.FileSystem.from_uri(uri)
    return found
