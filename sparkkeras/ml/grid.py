"""Values of a param grid that JSON cannot hold, such as models: each is saved in its own folder within the saved search."""

from __future__ import annotations

from typing import Any

import keras
from pyspark.ml import Transformer
from pyspark.sql import DataFrame

from sparkkeras.ml.persistence import Savable, is_json
from sparkkeras.training.references import decode, encode


class GridValue(Transformer, Savable):
    """Wraps a param's value in a grid, so that Spark can save the grid.

    Spark writes the values of a grid as JSON, except stages, which it saves as stages. So ``ParamGridBuilder.build`` wraps
    values that JSON cannot hold in a GridValue, which is a stage. Setting a param to a GridValue sets it to ``value``.

    Args:
        name: The name of the param, for error messages.
        value: The value.
    """

    def __init__(self, name: str = "", value: Any = None) -> None:
        super().__init__()
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"GridValue({self.name!r}, {self.value!r})"

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return dataset

    def _saved_model(self) -> keras.Model | None:
        return self.value if isinstance(self.value, keras.Model) else None

    def _loaded_model(self, model: keras.Model) -> None:
        self.value = model

    def _saved_notes(self) -> dict[str, Any]:
        value = None if self._saved_model() is not None else self.value
        return {"name": self.name, "value": encode(value, f"a value of the param {self.name} in the grid")}

    def _loaded_notes(self, notes: dict[str, Any]) -> None:
        self.name, self.value = notes["name"], decode(notes["value"])


def as_grid_value(name: str, value: Any) -> Any:
    """Wrap a value in a `GridValue` if JSON cannot hold it, so that Spark can save a grid with it."""
    return value if is_json(value) else GridValue(name, value)


def from_grid_value(value: Any) -> Any:
    """Undo `as_grid_value`."""
    return value.value if isinstance(value, GridValue) else value
