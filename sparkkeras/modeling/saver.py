"""Saves a model again and again with other values of its variables, which costs little more than writing these values.

The HDF5 file of weights that Keras writes has the same bytes each time, except for the values. So a file of Keras with
values that tell the variables apart gives a template, which is filled with the values of each checkpoint. Where that does
not hold, as with layers that save something else than their variables, Keras writes each file.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import keras
import numpy as np

from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.state import ModelState, layout, optimizer_variables, weight_variables
from sparkkeras.weights import Array, Layout, is_floating

Span = tuple[int, int]
"""The first byte of a part of a file, and the one after its last byte."""

_WEIGHTS = "model.weights.h5"
"""The file of an archive with the values of weights and of optimizer variables."""

_COPIED_BYTES = 1024 * 1024
"""The size of pieces in which a file is copied: with small ones, `zipfile` takes longer than writing them."""


class ModelSaver:
    """Saves ``.keras`` files of an archived model with other weights and optimizer variables, in any thread.

    Args:
        archive: The archive.
        model: The model whose states are to be saved. Optimizers of its ``train_step`` may have been built since.
    """

    def __init__(self, archive: ModelArchive, model: keras.Model) -> None:
        layouts = _Layouts(layout(weight_variables(model)), layout(optimizer_variables(model)))
        copy = archive.unpack()
        if layout(optimizer_variables(copy)) != layouts.optimizer:
            archive = ModelArchive.pack(model, archive.custom.load())
            copy = archive.unpack()
        self._archive, self._model = archive, model
        self._weights: _ByKeras | _Template = _ByKeras(copy, layouts)
        self._looked_for_template = False

    def save(self, state: ModelState, file: BinaryIO | io.RawIOBase) -> dict[int, list[Span]]:
        """Write a ``.keras`` file with this state, from its beginning to its end.

        Returns:
            The parts of the file that are the vectors of the state, by ``id(vector)``, as far as they are known.
        """
        inside = state.inside(self._model)
        if isinstance(self._weights, _ByKeras) and not self._looked_for_template:
            self._weights = _Template.of(self._weights) or self._weights
            self._looked_for_template = True
        with zipfile.ZipFile(io.BytesIO(self._archive.data)) as archive, zipfile.ZipFile(file, "w") as target:
            for name in archive.namelist():
                if not name.startswith(_WEIGHTS):
                    target.writestr(name, archive.read(name))
            with target.open(_WEIGHTS, "w", force_zip64=True) as entry:
                start = file.tell()
                for piece in self._weights.pieces(inside):
                    entry.write(piece)
        return {key: [(start + first, start + end) for first, end in spans] for key, spans in self._weights.spans(inside)}


@dataclass(frozen=True)
class _Layouts:
    """The layouts of a model's weights and of its optimizer variables."""

    weights: Layout
    optimizer: Layout

    @property
    def dtypes(self) -> list[str]:
        """The dtype of each variable."""
        return [*self.weights.dtypes, *self.optimizer.dtypes]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each variable."""
        return [*self.weights.shapes, *self.optimizer.shapes]

    def values(self, state: ModelState) -> list[Array]:
        """The value of each variable."""
        return [*self.weights.unpack(state.weights), *self.optimizer.unpack(state.optimizer)]

    def state(self, values: Sequence[Array]) -> ModelState:
        """The inverse of `values`."""
        count = len(self.weights.shapes)
        return ModelState(self.weights.pack(values[:count]), self.optimizer.pack(values[count:]))


@dataclass(frozen=True)
class _ByKeras:
    """The file of weights as Keras writes it, from a copy of the model, so that training can go on meanwhile."""

    model: keras.Model
    layouts: _Layouts

    @contextmanager
    def file(self, state: ModelState) -> Iterator[BinaryIO]:
        """The file with a state."""
        state.put(self.model)
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
            path = Path(folder) / _WEIGHTS
            self.model.save_weights(path)
            with path.open("rb") as file:
                yield file

    def pieces(self, state: ModelState) -> Iterator[bytes]:
        """The file with a state, in pieces."""
        with self.file(state) as file:
            yield from iter(lambda: file.read(_COPIED_BYTES), b"")

    def spans(self, state: ModelState) -> Iterator[tuple[int, list[Span]]]:
        """Nothing is known."""
        return iter(())


@dataclass(frozen=True)
class _Template:
    """The file of weights with the values of variables in known places.

    Attributes:
        layouts: The layouts of the variables.
        parts: The bytes before the first of the values, between two of them, and after the last, in the order of places.
        order: The numbers of the variables in the order of their places; Keras saves some of them twice.
        places: The last place of each variable.
    """

    layouts: _Layouts
    parts: tuple[bytes, ...]
    order: tuple[int, ...]
    places: tuple[Span, ...]

    @classmethod
    def of(cls, by_keras: _ByKeras) -> _Template | None:
        """Make a template; ``None`` if filling it does not give the files of Keras.

        Raises:
            OSError: A file cannot be written.
        """
        marks = _marks(by_keras.layouts)
        if marks is None:
            return None
        try:
            with by_keras.file(by_keras.layouts.state(marks)) as file:
                template = cls._found(by_keras.layouts, marks, file)
            return template if template is not None and template._fits(by_keras) else None
        except OSError:
            raise
        except Exception:  # a layer may reject these values
            return None

    @classmethod
    def _found(cls, layouts: _Layouts, marks: Sequence[Array], file: BinaryIO) -> _Template | None:
        """The template that gives this file with these values; ``None`` if one of them is not in it."""
        numbers = {(mark.nbytes, mark.flat[:1].tobytes()): number for number, mark in enumerate(marks)}
        found: list[tuple[Span, int]] = []
        for (first, end), itemsize in _datasets(file):
            file.seek(first)
            number = numbers.get((end - first, file.read(itemsize)))
            if number is not None:
                found.append(((first, end), number))
        found.sort()
        places = {number: span for span, number in found}
        if len(places) < len(marks):
            return None
        edges = [0, *(edge for span, _ in found for edge in span), file.seek(0, io.SEEK_END)]
        parts = []
        for first, end in list(pairwise(edges))[::2]:
            file.seek(first)
            parts.append(file.read(end - first))
        order = tuple(number for _, number in found)
        return cls(layouts, tuple(parts), order, tuple(places[number] for number in range(len(marks))))

    def _fits(self, by_keras: _ByKeras) -> bool:
        """Whether it gives the file of Keras for values that all differ, also in one variable."""
        generator = np.random.default_rng(0)
        state = self.layouts.state([_random(generator, shape, dtype) for shape, dtype in _shapes_and_dtypes(self.layouts)])
        with by_keras.file(state) as file:
            return all(file.read(len(piece)) == piece for piece in self.pieces(state)) and not file.read(1)

    def pieces(self, state: ModelState) -> Iterator[memoryview]:
        """The file with a state, in pieces."""
        values = self.layouts.values(state)
        for part, number in zip(self.parts, self.order, strict=False):  # one part follows
            yield memoryview(part)
            yield np.ascontiguousarray(values[number]).reshape(-1).view(np.uint8).data
        yield memoryview(self.parts[-1])

    def spans(self, state: ModelState) -> Iterator[tuple[int, list[Span]]]:
        """The places of the vectors whose values all have the dtype of the vector in the file, by ``id(vector)``."""
        count = len(self.layouts.weights.shapes)
        for each, flat, places in (
            (self.layouts.weights, state.weights, self.places[:count]),
            (self.layouts.optimizer, state.optimizer, self.places[count:]),
        ):
            floating = [(dtype, place) for dtype, place in zip(each.dtypes, places, strict=True) if is_floating(dtype)]
            if all(dtype == flat.vector.dtype.name for dtype, _ in floating):
                yield id(flat.vector), [place for _, place in floating]


def _datasets(file: BinaryIO) -> list[tuple[Span, int]]:
    """The places of the datasets of an HDF5 file that are in one piece, and the sizes of their items."""
    found: list[tuple[Span, int]] = []

    def look(name: str, item: Any) -> None:
        first = item.id.get_offset() if isinstance(item, h5py.Dataset) else None
        if first is not None:
            found.append(((first, first + item.id.get_storage_size()), item.dtype.itemsize))

    with h5py.File(file, "r") as opened:
        opened.visititems(look)
    return found


def _shapes_and_dtypes(layouts: _Layouts) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
    return zip(layouts.shapes, map(np.dtype, layouts.dtypes), strict=True)


def _random(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Values that differ as far as the dtype allows, half of the floating-point ones negative."""
    values = generator.normal(0, 50, shape) if is_floating(dtype) else generator.integers(0, 128, shape)
    return np.asarray(values).astype(dtype)


def _marks(layouts: _Layouts) -> list[Array] | None:
    """For each variable a value whose numbers are its own; ``None`` if a dtype has too few numbers, or one is empty."""
    marks = []
    for number, (shape, dtype) in enumerate(_shapes_and_dtypes(layouts), 1):
        with np.errstate(invalid="ignore"):
            mark = np.float64(number).astype(dtype)
        if float(mark) != number or 0 in shape:
            return None
        marks.append(np.broadcast_to(mark, shape))
    return marks
