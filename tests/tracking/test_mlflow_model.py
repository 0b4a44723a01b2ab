"""Models that MLflow loads and scores: signatures, input examples, custom code, several inputs and outputs."""

import keras
import mlflow
import numpy as np
import pytest
from mlflow.models import Model

from sparkkeras import ConfigurationError, MLflowCallback
from sparkkeras.tracking.mlflow_model import check_example, example_of, log_model, signature_of
from tests.models import regression

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


def logged(model, **options):
    with mlflow.start_run() as run:
        return log_model(model, run.info.run_id, **options)


def two_inputs():
    a, b = keras.Input((3,), name="a"), keras.Input((1,), dtype="int32", name="b")
    joint = keras.layers.Concatenate()([a, keras.layers.Flatten()(keras.layers.Embedding(5, 2)(b))])
    return keras.Model(
        {"a": a, "b": b}, [keras.layers.Dense(1, name="one")(joint), keras.layers.Dense(2, name="two")(joint)]
    )


def half():
    x = keras.Input((None, 2), dtype="float16")
    return keras.Model(x, keras.layers.Dense(2, dtype="bfloat16")(x))


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "example"),
    [
        (regression(), ["Tensor('float32', (-1, 3))"], ["float (required)"], (1, 3)),
        (
            two_inputs(),
            ["'a': Tensor('float32', (-1, 3))", "'b': Tensor('int32', (-1, 1))"],
            ["'one': float (required)", "'two': Array(float) (required)"],
            {"a": (1, 3), "b": (1, 1)},
        ),
        (half(), ["Tensor('float32', (-1, -1, 2))"], ["Array(Array(float)) (required)"], (1, 1, 2)),
    ],
    ids=["one input and output have no names", "several have", "half precision, sizes that are not known"],
)
def test_signatures_and_examples(model, inputs, outputs, example):
    signature = signature_of(model)
    assert [str(each) for each in signature.inputs.inputs] == inputs
    assert [str(each) for each in signature.outputs.inputs] == outputs
    assert keras.tree.map_structure(np.shape, example_of(model)) == example


class Doubles(keras.Model):
    def call(self, x):
        return 2 * x


class Halves(keras.layers.Layer):
    def call(self, x):
        return x / 2


class TestLogging:
    def test_mlflow_scores_a_plain_model_without_sparkkeras(self, store):
        model = regression()
        uri = logged(model)
        described = Model.load(uri)
        assert described.flavors["python_function"]["loader_module"] == "mlflow.keras"
        assert described.signature == signature_of(model)
        np.testing.assert_array_equal(described.load_input_example(uri), np.zeros((1, 3)))
        expected = model.predict(X, verbose=0)
        np.testing.assert_allclose(mlflow.pyfunc.load_model(uri).predict(X), expected, rtol=1e-6)
        loaded = mlflow.keras.load_model(uri)
        np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, rtol=1e-6)
        assert type(loaded.optimizer) is keras.optimizers.SGD
        with open(mlflow.pyfunc.get_model_dependencies(uri)) as file:
            requirements = file.read()
        assert f"keras=={keras.__version__}" in requirements
        assert f"{keras.backend.backend()}==" in requirements
        assert "sparkkeras" not in requirements

    def test_custom_code_is_stored_with_the_model(self, store):
        uri = logged(keras.Sequential([keras.Input((3,)), Halves()]))
        assert Model.load(uri).flavors["python_function"]["loader_module"] == "sparkkeras.tracking.mlflow_model"
        np.testing.assert_allclose(mlflow.pyfunc.load_model(uri).predict(X), X / 2)
        loaded = mlflow.keras.load_model(uri, custom_objects={"Halves": Halves})
        np.testing.assert_allclose(loaded.predict(X, verbose=0), X / 2)

    def test_a_subclassed_model_with_an_example(self, store):
        model = Doubles()
        model(X)
        uri = logged(model, input_example=X)
        np.testing.assert_allclose(mlflow.pyfunc.load_model(uri).predict(X), 2 * X)
        np.testing.assert_allclose(Model.load(uri).load_input_example(uri), X)

    def test_nested_inputs_and_outputs(self, store):
        a, c, d = (keras.Input((size,), name=name) for name, size in (("a", 3), ("c", 1), ("d", 2)))
        dense = keras.layers.Dense
        outputs = {"u": dense(1)(c), "v": (dense(2)(a), dense(2)(d))}
        model = keras.Model({"a": a, "b": {"d": d, "c": c}}, outputs)
        rows = {"a": X, "b": {"c": X[:, :1], "d": X[:, 1:]}}
        uri = logged(model, input_example=rows)
        signature = Model.load(uri).signature
        assert signature.inputs.input_names() == ["a", "b.d", "b.c"]  # fields of structs in Spark
        assert [each.name for each in signature.outputs] == ["u", "v_0", "v_1"]
        predicted = mlflow.pyfunc.load_model(uri).predict({"a": X, "b.c": X[:, :1], "b.d": X[:, 1:]})
        expected = model.predict(rows, verbose=0)
        for name, values in {"u": expected["u"][:, 0], "v_0": expected["v"][0], "v_1": expected["v"][1]}.items():
            np.testing.assert_allclose(predicted[name], values, rtol=1e-6)

    def test_text(self, store):
        if keras.backend.backend() != "tensorflow":
            pytest.skip("only TensorFlow has strings")
        text = keras.Input((1,), dtype="string")
        vectorizer = keras.layers.TextVectorization(vocabulary=["good", "bad"], output_mode="count")
        model = keras.Model(text, keras.layers.Dense(2)(vectorizer(text)))
        rows = np.array([["good good"], ["bad"]], dtype=object)
        expected = model.predict(keras.ops.convert_to_tensor(rows.tolist(), "string"), verbose=0)
        np.testing.assert_allclose(mlflow.pyfunc.load_model(logged(model)).predict(rows), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (two_inputs(), [X, np.zeros((4, 1))]),
        (two_inputs(), {"a": X, "b": np.zeros(4), "unused": X}),
        (keras.Sequential([keras.Input((None, 3)), keras.layers.GlobalMaxPooling1D()]), np.zeros((2, 7, 3))),
        (keras.Sequential([keras.layers.Dense(1)]), np.zeros((2, 7))),  # its inputs are unknown before training
    ],
)
def test_examples_that_fit(model, example):
    check_example(model, example)


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (regression(), X[:, :2], r"\(4, 2\)}, expected {'\w+': float32 \(rows, 3\)"),
        (regression(), X[:0], r"\(0, 3\)"),
        (regression(), X.astype(str), r"str\w+ \(4, 3\)"),
        (regression(), [X, X], "{'0': float32"),
        (two_inputs(), {"a": X}, r"'b': int32 \(rows, 1\)"),
        (keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(1)]), np.zeros((2, 7, 4)), r"\(rows, any, 3\)"),
    ],
)
def test_examples_that_do_not_fit_are_an_error_before_training(model, example, message):
    callback = MLflowCallback(input_example=example)
    with pytest.raises(ConfigurationError, match=message):
        callback.set_model(model)
    MLflowCallback(log_model=False, input_example=example).set_model(model)
