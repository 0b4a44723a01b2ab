"""Scoring with another Keras backend than the one of this process, and the check that it predicts the same."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, get_args

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.data.block import Block, Form, Structure
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.data.schema import Schema
from sparkkeras.data.values import DelayedValue
from sparkkeras.errors import ClusterError, ModelError, WorkerError, warn
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.modeling.state import ModelWeights
from sparkkeras.worker.batches import BatchOptions
from sparkkeras.worker.device import Environment, worker_environment
from sparkkeras.worker.other_backend import OtherBackend
from sparkkeras.worker.predictor import PredictTask

Backend = Literal["tensorflow", "jax", "torch", "openvino"]
"""The backends that can score."""

SAME = 1e-5
"""Predictions of two backends that differ by at most this are the same, relative to the largest one of an output."""

ALIKE = 1e-3
"""Those that differ by more are an error; between the two, a warning says by how much."""

ROWS = 16
"""The number of rows to compare."""

UNKNOWN_SIZE = 8
"""The size of an axis of inputs that the model leaves open, in rows that are made to compare."""


def known_backend(name: str, value: Any) -> str | None:
    """Check an argument ``backend``.

    Raises:
        ConfigurationError: It is neither the name of a backend nor ``None``.
    """
    found: str | None = arguments.one_of(name, value, (None, *get_args(Backend)))
    return found


def other_backend(value: Any) -> str | None:
    """An argument ``backend``; ``None``: that of this process.

    Raises:
        ConfigurationError: It is neither the name of a backend nor ``None``.
    """
    found = known_backend("backend", value)
    return None if found == keras.backend.backend() else found


def environment_of(other: str | None) -> Environment:
    """Returns the environment variables of workers that score with a backend."""
    return worker_environment if other is None else partial(worker_environment, backend=other)


def check_backend(
    model: keras.Model, archive: ModelArchive, state: ModelWeights, other: str | None, block: Block | None = None
) -> None:
    """Check once for each model that another backend predicts the same as this one, in a process on this machine.

    Args:
        model: The model.
        archive: The packed model.
        state: Its weights.
        other: The backend; ``None``: that of this process, which needs no check.
        block: Rows after the transform; ``None``: random numbers.

    Raises:
        ClusterError: This machine lacks the backend.
        ModelError: The backend cannot load the model or predict with it, or predicts something else.
    """
    if other is None or (archive.digest, other) in _checked:
        return
    if find_spec(other) is None:
        raise ClusterError(f"backend={other!r} needs {other} on this machine and on Spark's workers: pip install {other}.")
    schema = schema_of(model)
    if other != "tensorflow" and any(spec.text for spec in schema.inputs):
        raise ModelError(
            f"the model {model.name!r} takes strings, which the backend {other!r} does not have: leave backend out, or look "
            "the strings up before the model."
        )
    count = fixed_batch_size(model) or ROWS
    rows = _random(schema, count) if block is None or not block.rows else block[:count]
    if rows is not None:
        expected, found = _both(model, archive, state, other, schema, rows)
        _compare(model, other, expected, found)
    _checked.add((archive.digest, other))


_checked: set[tuple[str, str]] = set()
"""The digests of models, and the backends that predict the same with them."""


def _random(schema: Schema, count: int) -> Block | None:
    """Rows for the inputs of a model; ``None`` if their shapes are unknown."""
    random = np.random.default_rng(0)
    arrays = []
    for spec in schema.inputs:
        if spec.shape is None or spec.text:
            return None
        values = random.random((count, *(size or UNKNOWN_SIZE for size in spec.shape)))
        arrays.append(
            values.astype(schema.floatx) if spec.floating and spec.indices is None else (values * 2).astype("int32")
        )
    if not arrays:
        return None
    return Block(Form(Structure() if len(arrays) == 1 else Structure.several(len(arrays))), tuple(arrays))


def _both(
    model: keras.Model, archive: ModelArchive, state: ModelWeights, other: str, schema: Schema, rows: Block
) -> tuple[list[Any], list[Any]]:
    """The predictions of both backends, as arrays of each output."""
    options = BatchOptions(fixed_batch_size(model) or rows.rows, input_structure=input_structure(model), to_predict=True)
    task = PredictTask(LocalShared(archive), LocalShared(state), LocalShared(options), schema)
    expected = list(task(TaskContext(0), iter([rows])))
    there = OtherBackend(worker_environment(1, other))
    try:
        found = list(there.run(DelayedValue(task), TaskContext(0), iter([rows])))
    except WorkerError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        reason = re.sub(r"\x1b\[\d*m", "", str(error)).strip().partition("\n")[0]
        raise ModelError(
            f"the model {model.name!r} cannot be scored with backend={other!r}, which may lack an operation of it, or its "
            f"custom code is not written with keras.ops. Leave backend out, or choose another one. {kind}{reason}"
        ) from error
    finally:
        there.close()
    return keras.tree.flatten(expected[0]), keras.tree.flatten(found[0])


def _compare(model: keras.Model, other: str, expected: list[Any], found: list[Any]) -> None:
    """Compare predictions for the same rows.

    Raises:
        ModelError: They differ.
    """
    here = keras.backend.backend()
    most = 0.0
    for one, another in zip(expected, found, strict=True):
        there, wanted = np.asarray(another, "float64"), np.asarray(one, "float64")
        scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=np.finfo("float32").tiny))
        if there.shape != wanted.shape:
            most = np.inf
        elif not np.allclose(there, wanted, rtol=0, atol=SAME * scale, equal_nan=True):
            most = float(np.maximum(most, np.abs(there - wanted).max() / scale))  # NaN, if only one of them has NaN
    if most == 0:
        return
    text = (
        f"for the rows that were compared, the predictions of the model {model.name!r} with backend={other!r} differ from "
        f"those with {here!r} by up to {most:.1g} of the largest one"
    )
    if not most <= ALIKE:
        raise ModelError(f"{text}: leave backend out, or choose another one.")
    warn(f"{text}.")
