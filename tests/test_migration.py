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
        ("AsynchronousSparkModel", 'mode="asynchronous"'),
        ("HyperParamModel", "sparkkeras.hyperopt.HyperParamModel"),
        ("df_to_simple_rdd", "features="),
    ],
)
def test_an_import_of_a_name_of_elephas_suggests_the_replacement(name, replacement):
    with pytest.raises(ImportError, match=f"no {name}: .*{replacement}"):
        exec(f"from sparkkeras import {name}")
    assert name not in dir(sparkkeras)
    with pytest.raises(AttributeError, match=f"no {name}: .*{replacement}"):
        getattr(sparkkeras, name)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda model: SparkModel(model, 4), ConfigurationError, "mode=4: .*num_workers=4"),
        (lambda model: SparkModel(model, "asynchronous", "epoch", "http"), ConfigurationError, "num_workers='http'"),
        (lambda model: SparkModel(model, "asynchronous", "epoch", "http", 4), UnknownArgumentError, "received 5"),
        (lambda model: SparkModel("a SparkContext", model), ModelError, "received str"),
        (lambda model: SparkMLlibModel(model).fit(None, 10, 32), UnknownArgumentError, "lp_rdd.*received 3"),
        (lambda model: _check_no_labels(10, None), ConfigurationError, "use epochs=10"),  # as fit(rdd, 10)
        (lambda model: SparkModel(model).save("m.keras", to_hadoop=True), UnknownArgumentError, "a URI as the path"),
        (lambda model: load_spark_model("m.keras", from_hadoop=True), UnknownArgumentError, "a URI as the path"),
    ],
)
def test_other_calls_of_elephas_have_errors_with_advice(model, call, error, words):
    with pytest.raises(error, match=words):
        call(model)


def test_modes_may_be_string_enumerations(model):
    class Mode(enum.StrEnum):
        HOGWILD = enum.auto()

    spark_model = SparkModel(model, mode=Mode.HOGWILD)
    assert type(spark_model.mode) is str
    assert spark_model.mode == "hogwild"


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
