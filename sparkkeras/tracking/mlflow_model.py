"""Models in MLflow: logging them with a signature and an input example, and loading them for MLflow's ``pyfunc``.

A model is logged with MLflow's flavor ``keras``: ``mlflow.keras.load_model`` loads it, and ``mlflow.pyfunc`` scores it with
MLflow's own code, where that can. It loads no custom code, returns one output and takes no text, so other models, and those
without known inputs, are scored by `_load_pyfunc` of this module. They need sparkkeras where they are scored.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from sparkkeras.data.block import Structure, describe, in_column_name, in_field, items_by_path, name_of
from sparkkeras.errors import ConfigurationError
from sparkkeras.modeling.archive import custom_objects_of, load_bytes, save_bytes
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.schema import input_structure, input_tensors, pack_inputs, schema_of
from sparkkeras.weights import Array

_FOLDER, _CUSTOM = "data", "custom_objects.pkl"
"""The folder in which MLflow keeps the file of a model, and the file with its custom code."""

_DTYPES = {
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "double",
    "bool": "boolean",
    "int64": "long",
    "uint32": "long",
    "uint64": "long",
}
"""MLflow's types of outputs by Keras's dtypes; other integers are ``integer``."""


def log_model(
    model: keras.Model,
    run_id: str,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    input_example: Any = None,
    registered_model_name: str | None = None,
    step: int = 0,
) -> str:
    """Log a model to a run of the current tracking store.

    Args:
        model: The model.
        run_id: The id of the run.
        custom_objects: Custom classes and functions by name, for those that are not found in the model.
        input_example: Rows as ``predict`` takes them: an array, or the arrays of several inputs. ``None``: a row of zeros.
        registered_model_name: The name under which to register the model; ``None``: it is not registered.
        step: The step whose metrics belong to the model.

    Returns:
        The URI of the logged model.

    Raises:
        CustomObjectError: Custom code cannot be pickled.
        ModelError: Keras cannot save the model.
    """
    from mlflow.models import Model

    signature = signature_of(model, input_example)
    example = example_of(model) if input_example is None else input_example
    if _is_nested(model):
        example = _named(example, input_structure(model))
    logged = Model.log(
        artifact_path=None,
        name="model",
        flavor=SimpleNamespace(__name__="mlflow.keras", save_model=_save),
        run_id=run_id,
        step=step,
        registered_model_name=registered_model_name,
        model=model,
        signature=signature,
        input_example=example,
        custom_objects=custom_objects_of(model, custom_objects),
        validate_serving_input=False,  # it would load the model again and predict
    )
    return str(logged.model_uri)


def signature_of(model: keras.Model, input_example: Any = None) -> Any:
    """The signature of a model: a tensor for each input, and a value or (nested) array of a row for each output.

    With these types of outputs, ``spark_udf`` needs no ``result_type``. Tensors as outputs have the wrong number of axes
    there, since their first one is the batch.

    Args:
        model: The model.
        input_example: Rows, from which the signature is inferred if the model has no known inputs.

    Returns:
        A ``mlflow.models.ModelSignature``, or ``None`` if inputs and outputs are unknown.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    inputs, outputs = _inputs(model), _outputs(model)
    if not inputs or not outputs:
        if input_example is None:
            return None
        inputs, outputs = _specs(_named(input_example)), _specs(_named(model.predict(input_example, verbose=0)))
    return ModelSignature(
        Schema(
            [
                TensorSpec(_array_type(dtype), (-1, *(-1 if size is None else size for size in shape)), _only(name, inputs))
                for name, (dtype, shape) in inputs.items()
            ]
        ),
        Schema([ColSpec(_column_type(*spec), _only(name, outputs)) for name, spec in outputs.items()]),
    )


def example_of(model: keras.Model) -> Any:
    """One row of zeros (empty strings for text), as `MLflowScorer` takes it; ``None`` if the inputs are unknown."""
    arrays = {
        name: np.full((1, *(size or 1 for size in shape)), "" if dtype == "string" else 0, _array_type(dtype))
        for name, (dtype, shape) in _inputs(model).items()
    }
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays or None


def check_example(model: keras.Model, example: Any) -> None:
    """Check that a model takes an input example, as far as its inputs are known.

    Raises:
        ConfigurationError: It does not.
    """
    inputs = _inputs(model)
    if not inputs:
        return
    try:
        arrays = _named(example, input_structure(model))
    except ValueError:  # a part of it is no array
        arrays = {}
    if not isinstance(example, Mapping):
        arrays = dict(zip(inputs, arrays.values(), strict=False)) if len(arrays) == len(inputs) else arrays
    wanted = ", ".join(f"{name!r}: {dtype} {_shape(shape)}" for name, (dtype, shape) in inputs.items())
    found = ", ".join(f"{name!r}: {array.dtype.name} {array.shape}" for name, array in arrays.items())
    received = f"arrays {{{found}}}" if found else describe(example)
    fits = arrays.keys() >= inputs.keys() and all(_fits(arrays[name], *spec) for name, spec in inputs.items())
    if not fits:
        raise ConfigurationError(
            f"input_example does not fit the model {model.name!r}: received {received}, expected {{{wanted}}}. "
            "Pass rows as predict takes them, such as x[:1]."
        )


def _fits(array: Array, dtype: str, of_row: tuple[int | None, ...]) -> bool:
    """Whether ``predict`` takes an array as an input of a dtype, by the shape of a row; Keras adds an axis to numbers."""
    row = array.shape[1:] or (1,)
    return (
        array.ndim > 0
        and len(array) > 0
        and (array.dtype.kind in "OSUT") == (dtype == "string")
        and len(row) == len(of_row)
        and all(size in (None, given) for given, size in zip(row, of_row, strict=True))
    )


def _shape(of_row: Sequence[int | None]) -> str:
    return f"({', '.join(['rows', *('any' if size is None else str(size) for size in of_row)])})"


_Spec = tuple[str, tuple[int | None, ...]]
"""The dtype, and the shape of a row."""


def _inputs(model: keras.Model) -> dict[str, _Spec]:
    """The inputs by name, in their order; those in others have the names of fields, ``b.c``."""
    names = [in_field(spec.name) for spec in schema_of(model).inputs]
    return _specs(dict(zip(names, input_tensors(model), strict=True)))


def _outputs(model: keras.Model) -> dict[str, _Spec]:
    """The outputs by name, in their order; those in others have the names of columns, ``b_c``."""
    names = [in_column_name(spec.name) for spec in schema_of(model).outputs]
    return _specs(dict(zip(names, getattr(model, "outputs", None) or (), strict=True)))


def _specs(values: Mapping[str, Any]) -> dict[str, _Spec]:
    """The dtypes and shapes of arrays or tensors by name."""
    return {name: (_dtype(value), tuple(value.shape[1:])) for name, value in values.items()}


def _dtype(value: Any) -> str:
    return str(keras.backend.standardize_dtype(value.dtype)) if value.dtype != object else "string"


def _array_type(dtype: str) -> np.dtype[Any]:
    """The NumPy type of an input; half-precision numbers arrive as float32, and strings as objects."""
    return np.dtype({"bfloat16": "float32", "float16": "float32", "string": "O"}.get(dtype, dtype))


def _column_type(dtype: str, shape: tuple[int | None, ...]) -> Any:
    from mlflow.types.schema import Array as ArrayType
    from mlflow.types.schema import DataType

    found: Any = DataType[_DTYPES.get(dtype, "string" if dtype == "string" else "integer")]
    for _ in () if shape == (1,) else shape:
        found = ArrayType(found)
    return found


def _only(name: str, values: Mapping[str, Any]) -> str | None:
    """A name that tells several values apart; one value has none, so that it need not be passed in a dict."""
    return name if len(values) > 1 else None


def _is_nested(model: keras.Model) -> bool:
    structure = input_structure(model)
    return structure is not None and structure.is_nested


def _named(values: Any, structure: Structure | None = None) -> dict[str, Array]:
    """Arrays by name: of a dict, a list, or one array. With a nested structure, arrays in it have the names of fields."""
    if isinstance(values, Mapping) or (structure is not None and structure.is_nested):
        items = items_by_path(values, structure or Structure())
        return {in_field(name_of(path)): np.asarray(value) for path, value in items}
    several = values if isinstance(values, (list, tuple)) else [values]
    return {str(index): np.asarray(value) for index, value in enumerate(several)}


def _requirements(needs_sparkkeras: bool) -> list[str]:
    """What pip has to install where the model is scored. MLflow would find out by loading the model in a new process."""
    names = ["keras", "numpy", keras.backend.backend(), *(["sparkkeras"] if needs_sparkkeras else [])]
    return [f"{name}=={metadata.version(name)}" for name in names]


def _save(
    path: str,
    mlflow_model: Any,
    *,
    model: keras.Model,
    signature: Any,
    input_example: Any,
    custom_objects: dict[str, Any],
    **_: Any,
) -> None:
    """Write a model to a folder, as ``Model.log`` asks a flavor to."""
    import mlflow.keras

    has_text = any(dtype == "string" for dtype, _ in _inputs(model).values())
    is_ours = bool(custom_objects) or has_text or len(_outputs(model)) != 1 or _is_nested(model)
    Path(path).mkdir(parents=True, exist_ok=True)  # MLflow writes the input example before it creates the folder
    mlflow.keras.save_model(
        SimpleNamespace(save=lambda file: Path(file).write_bytes(save_bytes(model))),
        path,
        mlflow_model=mlflow_model,
        signature=signature,
        input_example=input_example,
        pip_requirements=_requirements(is_ours),
    )
    if is_ours:
        payload = ByValue.dump(custom_objects, "the model's custom code").payload
        Path(path, _FOLDER, _CUSTOM).write_bytes(payload)
        mlflow_model.flavors["python_function"]["loader_module"] = __name__
        mlflow_model.save(str(Path(path, "MLmodel")))


class MLflowScorer:
    """What MLflow's ``pyfunc`` calls to predict.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def get_raw_model(self) -> keras.Model:
        """The Keras model."""
        return self._model

    def predict(self, data: Any, **_: Any) -> Any:
        """Predict rows: an array, a dict of arrays by input, or, without a signature, a DataFrame of pandas.

        Nested inputs are in a dict by path, ``{"a": ..., "b.c": ..., "b.d": ...}``, as in the signature.

        Returns:
            An array, or for several outputs a dict of arrays by output.
        """
        if hasattr(data, "columns"):
            data = {str(name): np.stack(data[name].to_numpy()) for name in data.columns}
            data = next(iter(data.values())) if len(data) == 1 else data
        structure = input_structure(self._model)
        if structure is not None and structure.is_nested:
            named = _named(data, structure)
            data = pack_inputs(self._model, [named[name] for name in _inputs(self._model)])
        predicted = self._model.predict(keras.tree.map_structure(_as_input, data), verbose=0)
        if not isinstance(predicted, (dict, list, tuple)):
            return np.asarray(predicted)
        outputs = _outputs(self._model)
        arrays = dict(zip(outputs, keras.tree.flatten(predicted), strict=True)) if outputs else _named(predicted)
        return {name: _per_row(np.asarray(values)) for name, values in arrays.items()}


def _as_input(values: Any) -> Any:
    """An array as an input of ``predict``, which takes text only as a tensor."""
    is_text = values.dtype == object or values.dtype.kind == "U"
    return keras.ops.convert_to_tensor(values.tolist(), "string") if is_text else values


def _per_row(values: Array) -> Array:
    """An output of shape (batch, 1) as one number for each row, as its type in the signature is."""
    return values[:, 0] if values.shape[1:] == (1,) else values


def _load_pyfunc(path: str) -> MLflowScorer:
    """Load a model for MLflow, which calls this function by its name."""
    folder = Path(path) / _FOLDER
    objects = pickle.loads((folder / _CUSTOM).read_bytes())
    return MLflowScorer(load_bytes((folder / "model.keras").read_bytes(), objects, safe_mode=False))
