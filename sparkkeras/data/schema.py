"""The inputs and outputs of a model, and the check of features against them before training starts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sparkkeras.data.block import BlockSpec, Form, Structure
from sparkkeras.data.text import TO_STRINGS
from sparkkeras.errors import DataError, counted

OnInvalid = Literal["error", "drop", "allow"]
"""The values of ``on_invalid=`` for training and evaluation."""


OnInvalidToPredict = Literal["error", "allow", "null"]
"""The values of ``on_invalid=`` for predictions, of which every row has one; ``"null"`` is for columns of predictions."""


RowShape = tuple[int | None, ...]
"""The shape of one row; ``None``: a size that is unknown, or may be any."""


@dataclass(frozen=True)
class InputSpec:
    """One input or output of a model.

    Attributes:
        name: The name.
        shape: The shape without the batch axis; ``None`` as a size: any size. ``None`` as the shape: any shape.
        floating: Whether the dtype is a floating-point one.
        text: Whether the input takes strings.
        optional: Whether Keras also takes ``None``.
        indices: The ``input_dim`` of the ``Embedding`` that takes this input directly; ``None`` if there is none.
    """

    name: str
    shape: RowShape | None
    floating: bool = False
    indices: int | None = None
    text: bool = False
    optional: bool = False

    @property
    def title(self) -> str:
        """The input in messages, without a name that Keras made up (``keras_tensor_87``)."""
        return "input" if re.fullmatch(r"keras_tensor(_\d+)?", self.name) else f"input {self.name!r}"

    def takes(self, shape: RowShape) -> bool:
        """Whether rows of this shape fit, or may fit. As in Keras, a trailing axis of size 1 is optional."""
        if self.shape is None:
            return True
        wanted, given = self.shape, [shape, (*shape, 1), *([shape[:-1]] if shape[-1:] == (1,) else [])]
        return any(
            len(wanted) == len(each) and all(w is None or g is None or w == g for w, g in zip(wanted, each, strict=True))
            for each in given
        )


@dataclass(frozen=True)
class Schema:
    """The inputs and outputs of a model.

    Attributes:
        inputs: The inputs in order; empty if unknown (a subclassed model).
        outputs: The outputs in order; empty if unknown.
        floatx: The dtype that floating-point data is converted to, as Keras does.
        x: The structure of the inputs, if they are a dict or nested.
        y: The structure of the outputs, if they are a dict or nested.
        transformed: Whether a transform is applied to the rows, so that features and labels may be strings.
    """

    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[InputSpec, ...] = ()
    floatx: str = "float32"
    x: Structure | None = None
    y: Structure | None = None
    transformed: bool = False

    @property
    def expected_x(self) -> int | Structure | None:
        """The structure of features, or the number of their arrays; ``None`` if unknown."""
        return self.x or len(self.inputs) or None

    @property
    def expected_y(self) -> int | Structure | None:
        """The structure of labels, or the number of their arrays; ``None`` if unknown."""
        return self.y or len(self.outputs) or None

    def before(self, transform: object | None) -> Schema:
        """The schema of rows before a transform (``None``: without one), which may hold any values."""
        if transform is None:
            return self
        return replace(self, inputs=tuple(replace(spec, indices=None) for spec in self.inputs), transformed=True)

    def specs_of(self, form: Form) -> list[InputSpec | None]:
        """The model input of each feature array; ``None`` if unknown."""
        by_name = {spec.name: spec for spec in self.inputs}
        if form.x.names is not None:
            return [by_name.get(name) for name in form.x.names]
        return list(self.inputs[: form.x.count])

    def check_structure(self, x: Structure) -> None:
        """Reject features that are not in the structure of nested inputs.

        Raises:
            DataError: The features have another structure, and are not a tuple of as many arrays either.
        """
        if self.x is None or not self.x.is_nested or self.transformed:
            return
        if x.count != self.x.count or (x.names is not None and set(x.names) != set(self.x.names or ())):
            raise DataError(
                f"the features are {'one array' if x.bare else x.shown()}, but the model's inputs are {self.x.shown()}: "
                "pass x in this structure." + on_optional(spec for spec in self.inputs if spec.name not in (x.names or ()))
            )

    def check_features(self, received: BlockSpec, has_transform: bool = True) -> None:
        """Reject features that do not fit the model's inputs.

        Args:
            received: The form, shapes and dtypes of the data.
            has_transform: Whether the caller has an argument ``transform=`` that messages can suggest.

        Raises:
            DataError: The features do not fit; the message names the input, the expected and the received shape.
        """
        if not self.inputs:
            return
        form = received.form
        self.check_structure(form.x)
        labels, leaves = form.x.labels("x"), received.leaves[form.span("x")]
        specs = list(self.inputs)
        if form.x.names is not None:
            by_name = {spec.name: spec for spec in self.inputs}
            if set(by_name) != set(form.x.names) and len(specs) > 1:
                raise DataError(
                    f"features have the keys {sorted(form.x.names)}, but the model's inputs are {sorted(by_name)}: "
                    "use the names of the inputs as the keys, with one array for each."
                    + on_optional(spec for spec in specs if spec.name not in form.x.names)
                )
            specs = [by_name.get(name, specs[0]) for name in form.x.names]
        if len(specs) != len(leaves):
            expected = "one array" if len(specs) == 1 else f"a tuple or a dict of {len(specs)} arrays"
            raise DataError(
                f"the model has {counted(len(specs), 'input')} ({', '.join(spec.name for spec in specs)}), but the features "
                f"are {counted(len(leaves), 'array')}: pass x as {expected}.{on_optional(specs)}"
            )
        for label, spec, leaf in zip(labels, specs, leaves, strict=True):
            if spec.text != leaf.is_text:
                raise DataError(
                    f"{label} does not fit the model's {spec.title}: "
                    + (f"it expects strings, received {leaf.dtype}. {TO_STRINGS}" if spec.text else _NO_STRINGS)
                )
            if spec.shape is not None and not spec.takes(leaf.shape):
                raise DataError(
                    f"{label} does not fit the model's {spec.title}: it expects rows of shape {spec.shape}, "
                    f"received rows of shape {leaf.shape}. "
                    + (_SINGLE_SAMPLE if leaf.shape == spec.shape[1:] else "")
                    + ("Reshape the data, or use transform= to reshape it." if has_transform else "Reshape the data.")
                )


def on_optional(specs: Iterable[InputSpec]) -> str:
    """What to do about missing values of inputs that are optional in Keras, for a message; empty if none is."""
    names = [repr(spec.name) for spec in specs if spec.optional]
    if not names:
        return ""
    return (
        f" {', '.join(names)} may be None in Keras (optional=True), but sparkkeras does not support this: pass an array for "
        "each input, such as zeros, or build the model without it."
    )


_NO_STRINGS = (
    "it expects numbers, received strings. Encode them with a keras.layers.TextVectorization or StringLookup in transform=, "
    'or at the beginning of the model, with keras.Input(..., dtype="string").'
)

_SINGLE_SAMPLE = (
    "As an array, a single sample needs a batch axis: x[None]. In an RDD, a row is (x, y) with all features in x; to use "
    "columns by name, pass a DataFrame. "
)
