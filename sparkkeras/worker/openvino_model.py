"""Predictions with OpenVINO: the model as OpenVINO's own, in float32, with as many threads as the task has cores.

Keras's backend leaves both to OpenVINO, which takes all cores, and on some processors computes in bfloat16. A model is
exported for the shapes of a batch: Keras cannot export layers such as LSTM and Flatten for an unknown number of rows. What
cannot be exported at all, it predicts itself.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import keras

from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.schema import input_structure, input_tensors, output_structure, pack_inputs

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_log = logging.getLogger(__name__)

_MOST = 4
_exported: dict[tuple[int, int, int], OpenVinoModel] = {}
"""The last models, by the identity of Keras's model, a checksum of its weights, and the number of threads."""


class OpenVinoModel:
    """A model that predicts with OpenVINO.

    Args:
        model: A model.
        cores: The number of threads.
    """

    def __init__(self, model: keras.Model, cores: int) -> None:
        self._model, self._cores = model, cores  # the model also so that no other one gets its identity
        self._inputs, self._outputs = input_structure(model), output_structure(model)
        self._compiled: dict[tuple[Any, ...], Any] = {}  # by the shapes of the inputs

    def predict_on_batch(self, x: Any) -> Any:
        """The predictions for a batch; see `keras.Model.predict_on_batch`."""
        inputs = keras.tree.flatten(x) if self._inputs is None else self._inputs.flatten(x)
        shapes = tuple(each.shape for each in inputs)
        compiled = _cached(self._compiled, shapes, lambda: _compiled(self._model, shapes, self._cores))
        if compiled is None:
            return self._model.predict_on_batch(x)
        found = list(compiled(inputs).to_tuple())
        if self._outputs is not None:
            return self._outputs.build(found)
        return found[0] if len(found) == 1 else found


def to_predict(model: keras.Model, cores: int) -> Any:
    """A model that predicts the same with OpenVINO; the model itself if its layers are stateful, or its inputs unknown."""
    if not getattr(model, "inputs", None) or fixed_batch_size(model) is not None:
        return model
    key = id(model), model_state.take_weights(model).checksum, cores
    return _cached(_exported, key, lambda: OpenVinoModel(model, cores))


def _cached(cache: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """The value of a key, which is made if the cache lacks it. The cache holds those that were used last."""
    value = cache.pop(key) if key in cache else make()
    while len(cache) >= _MOST:
        del cache[next(iter(cache))]
    cache[key] = value
    return value


def _compiled(model: keras.Model, shapes: tuple[Any, ...], cores: int) -> Any:
    """The model, compiled for inputs of these shapes; ``None`` if Keras cannot export it."""
    import openvino

    # Keras exports several inputs only from a dict, and calls a model without saying that it does not train.
    inputs, signature = {}, {}
    for number, (tensor, shape) in enumerate(zip(input_tensors(model), shapes, strict=True)):
        name = f"{number:04}"
        inputs[name] = keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=name)
        signature[name] = keras.InputSpec(shape=shape, dtype=tensor.dtype)
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": cores,
        "ENABLE_CPU_PINNING": False,  # else the workers of a machine would all use its first cores
        "ENABLE_MMAP": False,
    }
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        path = str(Path(folder) / "model.xml")
        try:
            exported = keras.Model(inputs, model(pack_inputs(model, list(inputs.values())), training=False))
            exported.export(path, format="openvino", verbose=False, input_signature=[signature])
            return openvino.Core().compile_model(path, "CPU", settings)
        except (MemoryError, OSError):
            raise
        except Exception as error:  # of many kinds
            _log.warning("Keras predicts for %r itself, since OpenVINO cannot read what it exports: %s", model.name, error)
            return None
