"""Calls of other libraries: those that work unchanged, and the error messages for the others."""

import ast
import enum
import inspect
import re
from contextlib import suppress
from pathlib import Path

import pytest

import sparkkeras
from sparkkeras import ConfigurationError, ModelError, SparkMLlibModel, SparkModel, hyperopt, load_spark_model, ml
from sparkkeras.errors import UnknownArgumentError
from sparkkeras.hyperopt import HyperParamModel
from sparkkeras.ml import KerasEstimator, KerasTransformer
from sparkkeras.sources.source import _check_no_labels
from tests.models import regression

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def model():
    return regression()


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("AsynchronousSparkModel", r'use SparkModel\(model, mode="asynchronous"\)'),
        ("HyperParamModel", "use sparkkeras.hyperopt.HyperParamModel"),
        ("df_to_simple_rdd", "features=..., label=..."),
    ],
)
def test_an_import_of_a_name_of_elephas_suggests_the_replacement(name, replacement):
    with pytest.raises(ImportError, match=f"^sparkkeras has no {name}: .*{replacement}"):
        exec(f"from sparkkeras import {name}")
    assert name not in dir(sparkkeras)
    with pytest.raises(AttributeError, match=f"^sparkkeras has no {name}: .*{replacement}"):
        getattr(sparkkeras, name)


def test_positional_arguments_of_elephas(model):
    given = SparkModel(model, "asynchronous", "batch", 4)
    assert (given.mode, given.frequency, given.num_workers) == ("asynchronous", 1, 4)
    with pytest.raises(ConfigurationError, match=r"mode=4: expected .*the number of workers, use num_workers=4\."):
        SparkModel(model, 4)
    with pytest.raises(ConfigurationError, match="num_workers='http': expected"):
        SparkModel(model, "asynchronous", "epoch", "http")
    with pytest.raises(
        UnknownArgumentError, match=r"4 arguments by position \(model, mode, frequency, num_workers\), received 5"
    ):
        SparkModel(model, "asynchronous", "epoch", "http", 4)
    with pytest.raises(ModelError, match="expected a keras.Model, received str '"):
        SparkModel("a SparkContext", model)
    with pytest.raises(UnknownArgumentError, match=r"fit takes 1 argument by position \(lp_rdd\), received 3"):
        SparkMLlibModel(model).fit(None, 10, 32)


def test_modes_may_be_string_enumerations(model):
    class Mode(enum.StrEnum):
        HOGWILD = enum.auto()

    spark_model = SparkModel(model, mode=Mode.HOGWILD)
    assert type(spark_model.mode) is str
    assert spark_model.mode == "hogwild"


def test_the_config_makes_the_same_spark_model(model):
    spark_model = SparkModel(model, mode="asynchronous", frequency=7, rule="dynsgd", port=4000, batch_size=8, seed=3)
    config = spark_model.get_config()
    assert config["batch_size"] == 8
    assert SparkModel(model, **config).get_config() == config


def test_epochs_by_position_are_recognized():
    with pytest.raises(ConfigurationError, match=r"rows of an RDD contain them: .* use epochs=10\."):
        _check_no_labels(10, None)


def test_to_hadoop_is_replaced_by_a_uri(model, tmp_path):
    with pytest.raises(UnknownArgumentError, match=r"SparkModel.save takes no argument 'to_hadoop'. Pass a URI as the path"):
        SparkModel(model).save(str(tmp_path / "model.keras"), to_hadoop=True)
    with pytest.raises(
        UnknownArgumentError, match=r"load_spark_model takes no argument 'from_hadoop'. Pass a URI as the path"
    ):
        load_spark_model("model.keras", from_hadoop=True)


METHODS_OF = {
    "spark_model": SparkModel,
    "trainer": SparkModel,
    "mllib_model": SparkMLlibModel,
    "estimator": KerasEstimator,
    "transformer": KerasTransformer,
    "search": HyperParamModel,
}


def calls(page):
    """The Python calls in the sparkkeras column of a page's tables."""
    column = 0
    for line in page.read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if not line.startswith("|"):
            column = 0
        elif not column:
            column = next(number for number, title in enumerate(cells) if "sparkkeras" in title and number)
        elif len(cells) > column:
            for code in re.findall(r"`([^`]+)`", cells[column]):
                with suppress(SyntaxError):  # an incomplete call, or SQL
                    yield from (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))


def public(name):
    return next((getattr(module, name) for module in (sparkkeras, ml, hyperopt) if name in module.__all__), None)


def function_of(call):
    """The function of sparkkeras that is called, and its positional arguments; ``None`` for functions of other libraries."""
    match call.func:
        case ast.Name(name):
            return public(name), call.args
        case ast.Attribute(ast.Name(name), method) if name in METHODS_OF:
            return getattr(METHODS_OF[name], method), [None, *call.args]
        case ast.Attribute(ast.Call(ast.Name(name)), method) if public(name):
            return getattr(public(name), method), [None, *call.args]
        case ast.Attribute(ast.Name(name), method) if public(name):
            return getattr(public(name), method), call.args
    return None, []


@pytest.mark.parametrize("page", sorted(DOCS.glob("migration*.md")), ids=lambda page: page.name)
def test_calls_in_the_docs_match_the_signatures(page):
    bound = 0
    for call in calls(page):
        function, args = function_of(call)
        if function is not None:
            try:
                inspect.signature(function).bind(*args, **{each.arg: each.value for each in call.keywords})
            except TypeError as error:
                pytest.fail(f"{ast.unparse(call)}: {error}")
            bound += 1
    assert bound > 30
