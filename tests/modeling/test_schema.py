"""The inputs and outputs of models."""

import keras
import pytest

from sparkkeras import ModelError
from sparkkeras.data.schema import InputSpec
from sparkkeras.modeling.schema import schema_of


def test_the_schema_of_a_model():
    one, two = keras.Input((3,), name="one"), keras.Input((None,), dtype="int32", name="two")
    outputs = {"size": keras.layers.Dense(1)(one), "kind": keras.layers.Embedding(9, 4)(two)}
    schema = schema_of(keras.Model({"one": one, "two": two}, outputs))
    assert schema.inputs == (InputSpec("one", (3,), True), InputSpec("two", (None,), False, indices=9))
    assert {(spec.name, spec.shape) for spec in schema.outputs} == {("size", (1,)), ("kind", (None, 4))}
    assert schema.floatx == "float32"


class Hashing(keras.layers.Embedding):
    def call(self, inputs):
        return super().call(inputs % self.input_dim)


def test_inputs_that_a_layer_changes_first_are_not_indices():
    words = keras.Input((4,), dtype="int32")
    for model in (
        keras.Model(words, keras.layers.Embedding(7, 3)(words % 7)),
        keras.Sequential([keras.Input((4,), dtype="int32"), Hashing(9, 3)]),
    ):
        assert schema_of(model).inputs[0].indices is None


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_two_inputs_or_outputs_of_one_name_are_an_error():
    a, b = keras.Input((1,)), keras.Input((1,))
    one, other = keras.layers.Add()([a, b]), keras.layers.Subtract()([a, b])
    with pytest.raises(ModelError, match="inputs .* same name 'a/b'"):
        schema_of(keras.Model({"a/b": a, "a": {"b": b}}, one))
    with pytest.raises(ModelError, match="outputs .* same name 'u/0'"):
        schema_of(keras.Model([a, b], {"u/0": one, "u": [other]}))
    nested = schema_of(keras.Model({"a_b": a, "a": {"b": b}}, {"u_0": one, "u": [other]}))
    assert [spec.name for spec in nested.inputs] == ["a_b", "a/b"]
    assert [spec.name for spec in nested.outputs] == ["u/0", "u_0"]
