"""Arguments are validated before a job starts, and the message says what was expected."""

import inspect
import re
from types import SimpleNamespace
from typing import get_args

import ml_dtypes
import numpy as np
import pytest

import sparkkeras
from sparkkeras import EnsembleModel, SparkMLlibModel, SparkModel, keras_udf, register_keras_udf
from sparkkeras.arguments import (
    class_weight,
    flag,
    fraction,
    frequency,
    gradient_dtype,
    integer,
    known_arguments,
    on_invalid_to_predict,
    optional_integer,
    port,
)
from sparkkeras.data import reader, schema
from sparkkeras.errors import ConfigurationError, UnknownArgumentError
from sparkkeras.parameter.rules import RULES


class Trainer:
    @known_arguments
    def __init__(self, model, num_workers=None, *, batch_size=32, mode="synchronous", rule=None, server_options=None):
        self.given = (model, num_workers, batch_size)

    @known_arguments
    def fit(self, data, y=None, *, epochs=1):
        """Fit."""
        return data, epochs

    @known_arguments
    def predict(self, data):
        """Predicts."""

    @known_arguments
    def save(self, path):
        """Saves."""


def test_known_arguments_are_passed():
    assert Trainer("m", 3, batch_size=8).given == ("m", 3, 8)
    assert [Trainer("m").fit("d", epochs=2), Trainer("m").fit(data="d")] == [("d", 2), ("d", 1)]
    assert (Trainer.fit.__name__, Trainer.fit.__doc__) == ("fit", "Fit.")
    with pytest.raises(TypeError, match="model"):  # Python's own error
        Trainer()


def test_a_message_has_the_function_the_argument_the_known_ones_and_a_suggestion():
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer("m").fit("d", epoch=3)
    assert str(caught.value) == "Trainer.fit takes no argument 'epoch'. Known: 'data', 'epochs', 'y'. Did you mean 'epochs'?"


FUNCTIONS = {name for name in sparkkeras.__all__ if inspect.isfunction(getattr(sparkkeras, name))}


def test_public_functions_and_rules_reject_unknown_arguments():
    for name in sorted(FUNCTIONS | {kind.__name__ for kind in RULES.values()}):
        with pytest.raises(UnknownArgumentError, match=f"^{name} takes no argument 'surplus'"):
            getattr(sparkkeras, name)(surplus=1)


NAN = float("nan")


@pytest.mark.parametrize(
    ("check", "accepted", "refused", "expected"),
    [
        (integer, [1, 10**9], [0, 1.0, "3", True, None, NAN], "expected a positive"),
        (fraction, [0, 0.999], [1, -0.1, "0.1", True, None], "expected a number in [0, 1)"),
        (port, [0, 65535], [-1, 65536, 1.0, "80", True], "expected "),
        (frequency, ["epoch", "batch", 25], ["epochs", 0, 1.5, True], "expected "),
        (flag, [True, 0], ["batch", None, 2, 1.0], "expected True or False"),
    ],
)
def test_other_values_are_refused_with_what_was_expected(check, accepted, refused, expected):
    for value in accepted:
        check("name", value)
    for value in refused:
        with pytest.raises(ConfigurationError, match=re.escape(f"name={value!r}: {expected}")):
            check("name", value)


def test_values_are_converted():
    assert [frequency("frequency", value) for value in ("epoch", "batch", 25)] == ["epoch", 1, 25]
    assert flag("shuffle", 0) is False


def test_whole_numbers_have_a_lower_bound_and_may_be_optional():
    integer("seed", 0, low=0)
    assert optional_integer("seed", None) is None
    for call, words in (
        (lambda: optional_integer("seed", -1, low=0), "seed=-1: .* at least 0 or None"),
        (lambda: integer("seed", 1, low=2), "at least 2"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            call()


@pytest.mark.parametrize("given", [{0.0: 1, 1.0: 3}, {np.float32(0): 1, np.int64(1): np.float64(3)}], ids=str)
def test_class_indices_are_whole_numbers_of_any_type(given):
    """Labels of a DataFrame are floats, so ``groupBy("label").count()`` gives floats."""
    checked = class_weight("class_weight", given)
    assert checked == {0: 1.0, 1: 3.0}
    assert all(type(key) is int for key in checked)


@pytest.mark.parametrize("key", [0.5, -1.0, NAN, True, "1", "one"])
def test_other_class_indices_are_refused(key):
    with pytest.raises(ConfigurationError, match="class_weight") as raised:
        class_weight("class_weight", {0: 1.0, key: 3.0})
    assert ("Convert the keys with int()" in str(raised.value)) == (key == "1")


class Search:
    @known_arguments
    def __init__(self, *, server_options=None):
        """Takes options of a server without staleness."""


TRAINER = Trainer("m")


@known_arguments
def column_function(model, batch_size=32):
    """Scores."""


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: Trainer("m", epochs=3), "argument of Trainer.fit"),
        (lambda: TRAINER.fit(rdd=1), "Did you mean 'data'"),
        (lambda: Trainer("m", 3, 8), "2 arguments by position (model, num_workers), received 3"),
        (lambda: TRAINER.predict("d", 10), "1 argument by position (data), received 2"),
        (lambda: sparkkeras.Average(share=1), "no argument 'share'. Known: none"),
        (lambda: sparkkeras.Average(1), "no arguments by position, received 1"),
        (lambda: Trainer("m", max_staleness=1), "server_options=ParameterServerOptions"),
        (lambda: Search(host=1), "server_options=ServerOptions"),
        (lambda: TRAINER.fit(max_staleness=1), "server_options=ParameterServerOptions(...) of Trainer"),
        (lambda: TRAINER.fit(mode=1), "argument of Trainer"),
        (lambda: TRAINER.fit(loss=1), "belongs in model.compile"),
        (lambda: TRAINER.fit(nb_classes=1), "The model's loss determines"),
        (lambda: TRAINER.save(to_hadoop=1), "Pass a URI as the path"),
        (lambda: Trainer("m", loss=1), "belongs in model.compile"),
        (lambda: TRAINER.predict(loss=1), ""),
        (lambda: TRAINER.predict(nb_classes=1), ""),
        (lambda: Trainer("m", to_hadoop=1), ""),
        (lambda: Search(max_staleness=1), ""),
        (lambda: column_function(mode=1), ""),
    ],
)
def test_arguments_that_a_function_does_not_take_and_where_they_belong(call, hint):
    with pytest.raises(UnknownArgumentError) as caught:
        call()
    assert (hint or "'. Known: ") in str(caught.value)


def predict_accepts(value):
    try:
        on_invalid_to_predict("on_invalid", value)
    except ConfigurationError:
        return False
    return True


def test_the_type_of_on_invalid_lists_the_accepted_values():
    to_predict = [value for value in get_args(reader.InvalidPolicy) if predict_accepts(value)]
    functions = {
        ("error", "drop", "allow"): (SparkModel.evaluate, EnsembleModel.evaluate, SparkMLlibModel.evaluate),
        tuple(to_predict): (SparkModel.predict, EnsembleModel.predict, EnsembleModel.predict_classes)
        + (SparkMLlibModel.predict, keras_udf, register_keras_udf),
    }
    for accepted, several in functions.items():
        for function in several:
            annotation = inspect.signature(function).parameters["on_invalid"].annotation.partition(" | ")[0]
            assert get_args(getattr(schema, annotation)) == accepted, function


class OfTorch:
    def __str__(self):
        return "torch.bfloat16"


DTYPES = [
    (None, None),
    ("float16", "float16"),
    (np.float16, "float16"),
    (ml_dtypes.bfloat16, "bfloat16"),
    (SimpleNamespace(name="bfloat16"), "bfloat16"),  # as of TensorFlow
    (OfTorch(), "bfloat16"),
]


@pytest.mark.parametrize(("value", "expected"), DTYPES)
def test_dtypes_of_gradients_have_their_name(value, expected):
    assert gradient_dtype("gradient_dtype", value, ("float16", "bfloat16")) == expected


@pytest.mark.parametrize(("value", "message"), [(np.float32, "'float32': leave it out"), (np.float64, "'float64' is not")])
def test_other_dtypes_of_gradients_are_refused(value, message):
    with pytest.raises(ConfigurationError, match=f"gradient_dtype={message}"):
        gradient_dtype("gradient_dtype", value, ("float16", "bfloat16"))
