"""Values in a param grid that JSON cannot hold, such as models: each is saved in a folder of its own, beside the search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
from pyspark.ml import Transformer

from sparkkeras.ml.persistence import Savable, is_json
from sparkkeras.ml.references import decode, encode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class GridValue(Transformer, Savable):
    """A value of a param in a grid.

    Spark writes the values of a grid as JSON, except those that are stages, which it saves as such. So
    ``ParamGridBuilder.build`` puts what JSON cannot hold into one of these; a param that is set to one takes its ``value``.

    Args:
        name: The param, for messages.
        value: Its value.
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
    """The value as Spark can save it in a grid."""
    return value if is_json(value) else GridValue(name, value)


def from_grid_value(value: Any) -> Any:
    """What `as_grid_value` was given."""
    return value.value if isinstance(value, GridValue) else value
