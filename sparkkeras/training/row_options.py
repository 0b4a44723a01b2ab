"""How `fit` reads its rows: `evaluate` and `predict` do it in the same way, unless their arguments say otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import keras

from sparkkeras.arguments import AsInFit
from sparkkeras.data.block import by_name
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import CustomObjectError, DataError, warn
from sparkkeras.modeling.schema import schema_of
from sparkkeras.sources.column_names import ColumnFinder
from sparkkeras.sources.frame import ColumnMapping, Columns, Loaders, Selection, is_frame
from sparkkeras.sources.source import FrameSource, is_batch_function, is_rdd, takes_rows
from sparkkeras.training.references import decode, encode
from sparkkeras.worker.batches import Transform

if TYPE_CHECKING:
    from sparkkeras.training.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class RowOptions:
    """How a call of `fit` read its rows.

    Attributes:
        kind: The kind of data. The columns, loaders and ``on_invalid`` apply to data of this kind only.
        features: The columns of each input, found by their default names or not; ``None`` for data without columns.
        label: The columns of each output.
        loader: The loader, or a loader for each input.
        on_invalid: How rows with nulls, NaN or infinite values were handled.
        transform: The name of the transform; ``None``: there was none.
    """

    kind: str = ""
    features: Columns | None = None
    label: Columns | None = None
    loader: Loaders | None = None
    on_invalid: OnInvalid = "error"
    transform: str | None = None

    @classmethod
    def of_fit(cls, data: Any, run: Run) -> RowOptions:
        """Those of a run with this data."""
        source, loader, transform = run.source, run.given["loader"], run.given["transform"]
        features, label = _columns(source.selection) if isinstance(source, FrameSource) else (None, None)
        kept = loader if is_frame(data) or takes_rows(loader) else None  # others are for a DataFrame to validate on
        name = None if transform is None else getattr(transform, "__name__", type(transform).__name__)
        return cls(_kind(data), features, label, kept, run.given["on_invalid"], name)

    @classmethod
    def from_json(cls, model: keras.Model, saved: Mapping[str, Any] | None) -> RowOptions:
        """Those that `as_json` returned; ``None``: the file is of Keras or Elephas. Warns of a loader that is missing."""
        if not saved:
            return cls()
        now = dict(zip(saved["inputs"], _input_names(model), strict=False))
        features = _renamed(saved["features"], now)
        options = cls(saved["kind"], features, saved["label"], None, saved["on_invalid"], saved["transform"])
        try:
            return dataclasses.replace(options, loader=_renamed(decode(saved["loader"], imports=False), now))
        except CustomObjectError as error:
            warn(f"the loader of the last fit is not known any more: {error} Or pass loader= to evaluate and predict.")
            return options

    def as_json(self, model: keras.Model) -> dict[str, Any]:
        """The options as values for JSON: a loader as the names to import it by. Warns of one that has no such names."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["inputs"] = _input_names(model)  # Keras loads inputs that have no name of the user under other names
        try:
            return {**values, "loader": encode(self.loader, "loader")}
        except CustomObjectError as error:
            warn(f"the saved model does not know its loader: pass loader= to evaluate and predict later. {error}")
            return {**values, "loader": None}

    def columns(
        self,
        data: Any,
        features: Columns | AsInFit | None,
        label: Columns | AsInFit | None,
        loader: Loaders | AsInFit | None,
        fits: bool,
    ) -> ColumnMapping:
        """The columns and loaders for data to evaluate or predict; `AsInFit` is replaced by what `fit` used.

        Raises:
            DataError: The DataFrame lacks a column that `fit` used.
        """
        used = self._for(data)
        for name, given in (("features", features), ("label", label)):
            if isinstance(given, AsInFit):
                used._check_columns(data, name)
        features = used.features if isinstance(features, AsInFit) else features
        return ColumnMapping(
            features,
            used.label if isinstance(label, AsInFit) else label,
            loader=used.loader if isinstance(loader, AsInFit) else loader,
            fits=fits,
        )

    def without_transform(self, method: str, transform: Transform | AsInFit | None) -> Transform | None:
        """The transform of a call of ``method``. Warns if there is none, but there was one in `fit`."""
        if not isinstance(transform, AsInFit):
            return transform
        if self.transform is not None:
            again = "the same transform=" if "<" in self.transform else f"transform={self.transform}"
            warn(
                f"fit had transform={self.transform}, which {method} does not apply by itself: it may be augmentation. "
                f"Pass {again}, or transform=None if these rows need none."
            )
        return None

    def policy(self, data: Any, on_invalid: OnInvalid | AsInFit | None) -> OnInvalid:
        """The ``on_invalid`` for data to evaluate; ``None`` means ``"error"``."""
        return self._for(data).on_invalid if isinstance(on_invalid, AsInFit) else on_invalid or "error"

    def policy_to_predict(self, data: Any, on_invalid: OnInvalidToPredict | AsInFit | None) -> OnInvalidToPredict:
        """The ``on_invalid`` for data to predict; ``None``, and ``"drop"`` in `fit`, mean ``"error"``."""
        if isinstance(on_invalid, AsInFit):
            return "allow" if self._for(data).on_invalid == "allow" else "error"
        return on_invalid or "error"

    def warn_of_columns(self, selection: Selection) -> None:
        """Warn if the columns of a DataFrame are others than those of `fit`, or in another order."""
        for name, now in zip(("features", "label"), _columns(selection), strict=True):
            before = getattr(self, name)
            if now is not None and before is not None and _listed(now) != _listed(before):
                warn(f"{name}={now!r} differs from the columns that the model was trained on: fit had {name}={before!r}.")

    def _for(self, data: Any) -> RowOptions:
        """The options that apply to some data: none if it is of another kind."""
        return self if self.kind == _kind(data) else RowOptions()

    def _check_columns(self, data: Any, argument: str) -> None:
        """Check that a DataFrame has the columns that `fit` used for an argument."""
        given = getattr(self, argument)
        if given is None:
            return
        finder = ColumnFinder(data)
        try:
            for columns in _listed(given).values():
                for name in columns:
                    finder.type_of(name)
        except DataError as error:
            raise DataError(
                f"{error} The columns are those of fit, {argument}={given!r}: pass {argument}= if they have other names "
                "here."
            ) from None


def _kind(data: Any) -> str:
    if is_frame(data):
        return "DataFrame"
    return "RDD" if is_rdd(data) else "function" if is_batch_function(data) else "arrays"


def _columns(selection: Selection) -> tuple[Columns | None, Columns | None]:
    """The columns of features and labels, as arguments of `fit`."""
    schema = selection.reader.schema
    return selection.mapped("x", schema.inputs), selection.mapped("y", schema.outputs)


def _input_names(model: keras.Model) -> list[str]:
    return [spec.name for spec in schema_of(model).inputs]


def _renamed(given: T, names: Mapping[str, str]) -> T:
    """Columns or loaders, by the new names of inputs."""
    if not isinstance(given, Mapping):
        return given
    return cast("T", {names.get(name, name): each for name, each in given.items()})


def _listed(columns: Columns) -> dict[str, list[str]]:
    """The columns of each input or output by its name; under an empty name for the only one."""
    named = by_name(columns) if isinstance(columns, Mapping) else {"": columns}
    return {name: [each] if isinstance(each, str) else list(each) for name, each in named.items()}
