"""Predictions with OpenVINO: the model as OpenVINO's own, in float32, with as many threads as the task has cores.

Keras's backend leaves both to OpenVINO, which takes all cores, and on some processors computes in bfloat16. It predicts
where the model cannot be exported: in layers such as LSTM and Flatten, Keras exports the number of rows as a constant.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras

from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.schema import input_structure, input_tensors, output_structure, pack_inputs

_MOST = 4
_exported: dict[tuple[int, int, int], OpenVinoModel] = {}
"""The last models, by the identity of Keras's model, a checksum of its weights, and the number of threads."""


class OpenVinoModel:
    """A model that predicts with OpenVINO.

    Args:
        model: A model whose inputs have a known shape, except for the number of rows.
        cores: The number of threads.
    """

    def __init__(self, model: keras.Model, cores: int) -> None:
        self._model = model  # also so that no other one gets its identity
        self._inputs, self._outputs = input_structure(model), output_structure(model)
        try:
            self._compiled = _compiled(model, cores)
        except Exception:  # of many kinds
            self._compiled = None

    def predict_on_batch(self, x: Any) -> Any:
        """The predictions for a batch; see `keras.Model.predict_on_batch`."""
        inputs = keras.tree.flatten(x) if self._inputs is None else self._inputs.flatten(x)
        if self._compiled is not None:
            try:
                found = list(self._compiled(inputs).to_tuple())
            except RuntimeError:
                found = []
            if found and all(len(each) == len(inputs[0]) for each in found):
                if self._outputs is not None:
                    return self._outputs.build(found)
                return found[0] if len(found) == 1 else found
            self._compiled = None
        return self._model.predict_on_batch(x)


def to_predict(model: keras.Model, cores: int) -> Any:
    """A model that predicts the same with OpenVINO; the model itself if a shape is unknown, or layers are stateful."""
    inputs = getattr(model, "inputs", None) or ()
    if not inputs or any(None in each.shape[1:] for each in inputs) or fixed_batch_size(model) is not None:
        return model
    key = id(model), model_state.take_weights(model).checksum, cores
    if key not in _exported:
        while len(_exported) >= _MOST:
            del _exported[next(iter(_exported))]
        _exported[key] = OpenVinoModel(model, cores)
    return _exported[key]


def _compiled(model: keras.Model, cores: int) -> Any:
    """The compiled model; ``None`` if the export has made the number of rows that it tried a part of the model."""
    import openvino

    # Keras exports several inputs only from a dict, and calls a model without saying that it does not train.
    inputs = {
        f"{number:04}": keras.Input(batch_shape=each.shape, dtype=each.dtype, name=f"{number:04}")
        for number, each in enumerate(input_tensors(model))
    }
    exported = keras.Model(inputs, model(pack_inputs(model, list(inputs.values())), training=False))
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        path = str(Path(folder) / "model.xml")
        exported.export(path, format="openvino", verbose=False)
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": cores,
            "ENABLE_CPU_PINNING": False,  # else the workers of a machine would all use its first cores
            "ENABLE_MMAP": False,
        }
        compiled: Any = openvino.Core().compile_model(path, "CPU", settings)
    return None if any(each.partial_shape[0].is_static for each in compiled.outputs) else compiled
