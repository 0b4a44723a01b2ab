"""Arguments are checked before anything starts, and the message says what was expected."""

import inspect
import re
from typing import get_args

import pytest

from sparkkeras import EnsembleModel, SparkEnsemble, SparkMLlibModel, SparkModel, keras_udf, register_keras_udf
from sparkkeras.arguments import (
    flag,
    fraction,
    frequency,
    instance,
    known_arguments,
    on_invalid_to_predict,
    one_of,
    optional_number,
    port,
    whole_number,
)
from sparkkeras.data import schema
from sparkkeras.errors import ConfigurationError, UnknownArgumentError, known_names


class Face:
    @known_arguments
    def __init__(self, model, num_workers=None, *, batch_size=32):
        self.given = (model, num_workers, batch_size)

    @known_arguments
    def fit(self, data, *, epochs=1):
        """Fit."""
        return data, epochs


def test_known_arguments_pass():
    assert Face("m", 3, batch_size=8).given == ("m", 3, 8)
    assert Face("m").fit("d", epochs=2) == ("d", 2)
    assert Face("m").fit(data="d") == ("d", 1)
    assert Face.fit.__name__ == "fit"
    assert Face.fit.__doc__ == "Fit."


@pytest.mark.parametrize("parent", [UnknownArgumentError, TypeError, ValueError, ConfigurationError])
def test_an_unknown_argument_is_refused(parent):
    with pytest.raises(parent):
        Face("m", num_worker=3)


def test_the_message_names_the_function_the_argument_the_known_ones_and_a_guess():
    with pytest.raises(UnknownArgumentError) as caught:
        Face("m").fit("d", epoch=3)
    assert str(caught.value) == "Face.fit takes no argument 'epoch'. Known: 'data', 'epochs'. Did you mean 'epochs'?"
    with pytest.raises(UnknownArgumentError, match=r"^Face takes no argument 'num_worker'.*Did you mean 'num_workers'\?"):
        Face("m", num_worker=3)


def test_a_missing_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match="model"):
        Face()


@pytest.mark.parametrize("value", [1, 2, 10**9])
def test_whole_numbers(value):
    whole_number("epochs", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, 1.5, "3", True, None, [1], float("nan")])
def test_what_is_no_positive_whole_number(value):
    with pytest.raises(ConfigurationError) as caught:
        whole_number("epochs", value)
    assert str(caught.value) == f"epochs={value!r}: expected a positive whole number."


def test_a_lower_bound_and_none():
    whole_number("seed", 0, low=0)
    assert optional_number("seed", None) is None
    with pytest.raises(ConfigurationError, match=r"^seed=-1: expected a whole number of at least 0 or None\.$"):
        optional_number("seed", -1, low=0)
    with pytest.raises(ConfigurationError, match="at least 2"):
        whole_number("seed", 1, low=2)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 0.999])
def test_fractions(value):
    fraction("validation_split", value)


@pytest.mark.parametrize("value", [1, 1.0, -0.1, "0.1", None, True, False, float("nan"), float("inf")])
def test_what_is_no_fraction(value):
    with pytest.raises(ConfigurationError) as caught:
        fraction("validation_split", value)
    assert str(caught.value) == f"validation_split={value!r}: expected a number in [0, 1)."


def test_one_of_lists_what_is_known():
    one_of("verbose", "auto", ("auto", 0, 1))
    one_of("verbose", 0, ("auto", 0, 1))
    with pytest.raises(ConfigurationError, match=r"^mode='synchronos' is not known. Known: .*Did you mean 'synchronous'\?$"):
        one_of("mode", "synchronos", ("synchronous", "asynchronous"))


@pytest.mark.parametrize(("value", "expected"), [("epoch", "epoch"), ("batch", 1), (1, 1), (25, 25)])
def test_frequencies(value, expected):
    assert frequency(value) == expected


@pytest.mark.parametrize("value", ["epochs", 0, -1, 1.5, None, True, "10"])
def test_what_is_no_frequency(value):
    with pytest.raises(ConfigurationError) as caught:
        frequency(value)
    assert str(caught.value).startswith(f"frequency={value!r}: expected")
    assert '"epoch", "batch"' in str(caught.value)


@pytest.mark.parametrize("value", [0, 1, 65535])
def test_ports(value):
    assert port(value) == value


@pytest.mark.parametrize("value", [-1, 65536, 1.0, "80", None, True])
def test_what_is_no_port(value):
    with pytest.raises(ConfigurationError) as caught:
        port(value)
    assert str(caught.value).startswith(f"port={value!r}: expected ")


def test_an_instance_or_none():
    face = Face("m")
    assert instance("face", face, Face) is face
    assert instance("face", None, Face) is None
    with pytest.raises(ConfigurationError) as caught:
        instance("face", "m", Face)
    assert str(caught.value) == "face='m': expected sparkkeras.Face(...) or None."


class Trainer:
    @known_arguments
    def __init__(self, *, mode="synchronous", rule=None, server_options=None):
        """Takes what concerns all trainings."""

    @known_arguments
    def fit(self, data, y=None, *, epochs=1):
        """Trains."""

    @known_arguments
    def predict(self, data):
        """Predicts."""

    @known_arguments
    def save(self, path):
        """Saves."""


class Search:
    @known_arguments
    def __init__(self, *, server_options=None):
        """Has a server without staleness."""


@known_arguments
def column_function(model, batch_size=32):
    """Scores."""


PLACES = {
    "max_staleness": r"It belongs in server_options=ParameterServerOptions\(\.\.\.\) of Trainer\. ",
    "mode": r"It is an argument of Trainer\. ",
    "loss": r"It belongs in model\.compile",
    "to_hadoop": r'Give a URI as the path instead, such as "hdfs:',
    "nb_classes": "The model's loss determines the format of labels",
}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (Trainer().fit, {"max_staleness", "mode", "loss", "nb_classes"}),
        (Trainer().predict, {"max_staleness", "mode"}),
        (Trainer().save, {"max_staleness", "mode", "to_hadoop"}),
        (Trainer, {"loss"}),
        (Search, set()),
        (column_function, set()),
    ],
)
def test_an_argument_of_another_place_is_led_there_where_that_place_exists(function, names):
    for name, words in PLACES.items():
        if function is Trainer and name == "mode":
            continue
        with pytest.raises(UnknownArgumentError) as caught:
            function(**{name: 1})
        assert bool(re.search(words, str(caught.value))) == (name in names), caught.value


def test_settings_of_the_server_are_led_to_the_argument_of_the_same_function():
    of_training, of_search = "ParameterServerOptions", "ServerOptions"
    for function, name, kind in (
        (Trainer, "max_staleness", of_training),
        (Trainer, "host", of_training),
        (Search, "host", of_search),
    ):
        with pytest.raises(UnknownArgumentError, match=rf"'\. It belongs in server_options={kind}\(\.\.\.\)\. "):
            function(**{name: 1})
    with pytest.raises(UnknownArgumentError) as caught:
        Search(max_staleness=1)
    assert "belongs" not in str(caught.value)


def test_a_name_in_other_letters_is_recognized():
    assert "Did you mean 'asynchronous'?" in known_names("Asynchronous", ["synchronous", "asynchronous"])


def test_too_many_arguments_by_position_are_counted_and_named():
    with pytest.raises(UnknownArgumentError) as caught:
        Face("m", 3, 8)
    assert str(caught.value) == (
        "Face takes 2 arguments by position (model, num_workers), received 3: name the others. "
        "Known: 'batch_size', 'model', 'num_workers'."
    )
    with pytest.raises(TypeError, match=r"^Face\.fit takes 1 argument by position \(data\), received 2"):
        Face("m").fit("d", 10)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rdd", r"Did you mean 'data'\?"),
        ("x", r"Did you mean 'data'\?"),
        ("nb_epoch", r"Did you mean 'epochs'\?"),
        ("num_epoch", r"Did you mean 'epochs'\?"),
        ("metrics", r"belongs in model.compile"),
    ],
)
def test_an_argument_of_keras_or_elephas_is_recognized(name, words):
    with pytest.raises(UnknownArgumentError, match=rf"fit takes no argument {name!r}\. .*{words}"):
        Face("m").fit(**{name: 1})


def accepts(value):
    try:
        on_invalid_to_predict(value)
    except ConfigurationError:
        return False
    return True


def test_the_type_of_on_invalid_lists_what_is_accepted():
    to_predict = [value for value in get_args(schema.InvalidPolicy) if accepts(value)]
    functions = {
        ("error", "drop", "allow"): (SparkModel.fit, SparkModel.evaluate, SparkEnsemble.fit, EnsembleModel.evaluate)
        + (SparkMLlibModel.fit, SparkMLlibModel.evaluate),
        tuple(to_predict): (SparkModel.predict, EnsembleModel.predict, EnsembleModel.predict_classes)
        + (SparkMLlibModel.predict, keras_udf, register_keras_udf),
    }
    for accepted, several in functions.items():
        for function in several:
            annotation = inspect.signature(function).parameters["on_invalid"].annotation
            assert get_args(getattr(schema, annotation)) == accepted, function


def test_flags():
    assert [flag("shuffle", value) for value in (True, False, 1, 0)] == [True, False, True, False]
    for value in ("batch", None, 2, 1.0):
        with pytest.raises(ConfigurationError, match=f"^shuffle={value!r}: expected True or False"):
            flag("shuffle", value)
