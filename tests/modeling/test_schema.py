"""The inputs and outputs of models."""

import re

import keras
import pytest

from sparkkeras import ModelError
from sparkkeras.modeling.schema import schema_of


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_two_inputs_or_outputs_of_one_name_are_an_error():
    a, b = keras.Input((1,)), keras.Input((1,))
    one, other = keras.layers.Add()([a, b]), keras.layers.Subtract()([a, b])
    with pytest.raises(ModelError, match=re.escape("inputs x['a/b'] and x['a']['b'] have the same name 'a/b': rename one")):
        schema_of(keras.Model({"a/b": a, "a": {"b": b}}, one))
    with pytest.raises(ModelError, match=re.escape("outputs y['u'][0] and y['u/0'] have the same name 'u/0': rename one")):
        schema_of(keras.Model([a, b], {"u/0": one, "u": [other]}))
    nested = schema_of(keras.Model({"a_b": a, "a": {"b": b}}, {"u_0": one, "u": [other]}))
    assert [spec.name for spec in nested.inputs] == ["a_b", "a/b"]
    assert [spec.name for spec in nested.outputs] == ["u/0", "u_0"]
