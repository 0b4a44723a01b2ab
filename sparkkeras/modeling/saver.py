"""Saves a model again and again with other values of its variables, which costs little more than writing these values.

Keras writes the first file. Its HDF5 file of weights has the same bytes each time except for the values, so later files are
made of it. Where that does not hold, as for layers with an own format, Keras writes each file.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
"""The size of pieces in which weights are copied: `zipfile` itself takes 8 KiB, which costs more than writing them."""


class ModelSaver:
    """Saves ``.keras`` files of an archived model with other weights and optimizer variables, in any thread.

    It has its own copy of the model, so that training can go on meanwhile.

    Args:
        archive: The archive.
        model: The model whose states are to be saved. Optimizers of its ``train_step`` may have been built since.
    """

    def __init__(self, archive: ModelArchive, model: keras.Model) -> None:
        self._archive, self._model = archive, archive.unpack()
        self._layouts = layout(weight_variables(model)), layout(optimizer_variables(model))
        if layout(optimizer_variables(self._model)) != self._layouts[1]:
            self._archive = ModelArchive.pack(model, archive.custom.load())
            self._model = self._archive.unpack()
        self._template: _Template | None = None
        self._looked_for_template = False

    def save(self, state: ModelState, file: BinaryIO | io.RawIOBase) -> dict[int, list[Span]]:
        """Write a ``.keras`` file with this state, from its beginning to its end.

        Returns:
            The parts of the file that are the vectors of the state, by ``id(vector)``, as far as they are known.
        """
        if not self._looked_for_template:
            self._template, self._looked_for_template = self._find_template(state), True
            if self._template is not None:
                self._model = None  # frees its memory
        with (
            zipfile.ZipFile(io.BytesIO(self._archive.data)) as archive,
            zipfile.ZipFile(file, "w") as target,
        ):
            for name in archive.namelist():
                if not name.startswith(_WEIGHTS):
                    target.writestr(name, archive.read(name))
            with target.open(_WEIGHTS, "w", force_zip64=True) as entry:
                if self._template is None:
                    with self._saved_by_keras(state) as source:
                        shutil.copyfileobj(source, entry, _COPIED_BYTES)
                    return {}
                start = file.tell()
                for piece in self._template.filled(self._values(state)):
                    entry.write(piece)
        return self._spans(state, start)

    def _values(self, state: ModelState) -> list[Array]:
        """The value of each variable."""
        weights, optimizer = self._layouts
        return [*weights.unpack(state.weights), *optimizer.unpack(state.optimizer)]

    def _saved_by_keras(self, state: ModelState) -> BinaryIO:
        """The file of weights as Keras writes it."""
        state.put(self._model)
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
            path = Path(folder) / _WEIGHTS
            self._model.save_weights(path)
            return path.open("rb")  # which remains readable when it is deleted

    def _find_template(self, state: ModelState) -> _Template | None:
        """The template of the file of weights; ``None`` if filling it does not give the same file as Keras."""
        marks = _marks(self._values(state))
        if marks is None:
            return None
        template = None
        with suppress(Exception), self._saved_by_keras(_state_of(marks, self._layouts)) as file:  # a layer may reject them
            template = _Template.of(file, marks)
        if template is None:
            return None
        with self._saved_by_keras(state) as file:
            same = all(file.read(len(piece)) == piece for piece in template.filled(self._values(state))) and not file.read(1)
        return template if same else None

    def _spans(self, state: ModelState, start: int) -> dict[int, list[Span]]:
        """Where the vectors are, if all of their values have their dtype in the file."""
        assert self._template is not None
        spans = iter([(start + first, start + end) for first, end in self._template.spans])
        found: dict[int, list[Span]] = {}
        for each, flat in zip(self._layouts, (state.weights, state.optimizer), strict=True):
            floating = [(dtype, span) for dtype in each.dtypes if (span := next(spans)) and is_floating(dtype)]
            if all(dtype == flat.vector.dtype.name for dtype, _ in floating):
                found[id(flat.vector)] = [span for _, span in floating]
        return found


@dataclass(frozen=True)
class _Template:
    """A file with the values of variables in known places.

    Attributes:
        parts: The bytes before the first of the values, between two of them, and after the last, in the order of places.
        order: The numbers of the values in the order of their places.
        spans: The place of each value.
    """

    parts: tuple[bytes, ...]
    order: tuple[int, ...]
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, file: BinaryIO, marks: Sequence[Array]) -> _Template | None:
        """The template that gives this file with these `_marks`; ``None`` if one of them is not in it exactly once."""
        numbers = {(mark.nbytes, mark.flat[:1].tobytes()): number for number, mark in enumerate(marks)}
        found: dict[int, Span] = {}
        for (first, end), itemsize in _datasets(file):
            file.seek(first)
            number = numbers.get((end - first, file.read(itemsize)))
            if number in found:
                return None
            if number is not None:
                found[number] = first, end
        if len(found) < len(marks):
            return None
        order = sorted(found, key=found.__getitem__)
        edges = [0, *(edge for number in order for edge in found[number]), file.seek(0, io.SEEK_END)]
        parts = []
        for first, end in list(pairwise(edges))[::2]:
            file.seek(first)
            parts.append(file.read(end - first))
        return cls(tuple(parts), tuple(order), tuple(found[number] for number in range(len(marks))))

    def filled(self, values: Sequence[Array]) -> Iterator[memoryview]:
        """The file with other values, in pieces."""
        for part, number in zip(self.parts, self.order, strict=False):
            yield memoryview(part)
            yield _bytes(values[number]).data
        yield memoryview(self.parts[-1])


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


def _marks(values: Sequence[Array]) -> list[Array] | None:
    """For each value one of its shape and dtype that no other one has; ``None`` if a dtype has too few numbers."""
    marks = [np.broadcast_to(np.asarray(number, value.dtype), value.shape) for number, value in enumerate(values, 1)]
    fit = all(mark.size and mark.flat[0] == number for number, mark in enumerate(marks, 1))
    return marks if fit else None


def _state_of(values: Sequence[Array], layouts: tuple[Layout, Layout]) -> ModelState:
    weights, optimizer = layouts
    count = len(weights.shapes)
    return ModelState(weights.pack(values[:count]), optimizer.pack(values[count:]))


def _bytes(value: Array) -> Array:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
