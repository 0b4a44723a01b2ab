"""The arguments of `fit` are declared once: what people see of them, in signatures, in docstrings, and with mypy."""

import inspect
import pydoc
import re
import subprocess
import sys

import pytest

from sparkkeras import SparkEnsemble, SparkMLlibModel, SparkModel
from sparkkeras.arguments import declared
from sparkkeras.ml import ImageFeaturizer, KerasEstimator, KerasTransformer
from sparkkeras.ml.image_featurizer import FeaturizerArguments
from sparkkeras.ml.params import EstimatorArguments, TransformerArguments
from sparkkeras.training.fit_arguments import EnsembleArguments, FitArguments, ModelSettings, PointArguments

CALLS = {
    SparkModel.fit: FitArguments,
    SparkEnsemble.fit: EnsembleArguments,
    SparkMLlibModel.fit: PointArguments,
    KerasEstimator: EstimatorArguments,
    KerasTransformer: TransformerArguments,
    ImageFeaturizer: FeaturizerArguments,
    SparkModel: ModelSettings,
    SparkMLlibModel: ModelSettings,
}


@pytest.mark.parametrize(("function", "kind"), CALLS.items())
def test_help_shows_each_argument_with_its_default_and_description(function, kind):
    shown = " ".join(re.sub(r"^ \|", "", pydoc.plain(pydoc.render_doc(function)), flags=re.MULTILINE).split())
    parameters = inspect.signature(function).parameters
    for name, argument in declared(kind).items():
        assert parameters[name].default == argument.default
        assert f"{name}: {argument.text}" in shown
    assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]


PROGRAM = """
from typing import Any

import keras
from sparkkeras import SparkEnsemble, SparkMLlibModel, SparkModel
from sparkkeras.ml import KerasEstimator

rows: Any = None
model = keras.Model()
SparkModel(model).fit(None, epochs=2, shuffle="global", callbacks=[])
SparkEnsemble([model]).fit(None, epochs=2, monitor=None)
SparkMLlibModel(model).fit(rows, epochs=2, categorical=True)
KerasEstimator(model=model, epochs=2, labelCol="species")
"""
WRONG = {
    'SparkModel(model).fit(None, epochs="2")': 'Argument "epochs" to "fit" of "SparkModel" has incompatible type "str"',
    "SparkModel(model).fit(None, epoch=2)": 'Unexpected keyword argument "epoch" for "fit" of "SparkModel"',
    "SparkEnsemble([model]).fit(None, callbacks=[])": 'Unexpected keyword argument "callbacks" for "fit" of "SparkEnsemble"',
    'SparkEnsemble([model]).fit(None, shuffle="all")': 'Argument "shuffle" to "fit" of "SparkEnsemble"',
    "SparkMLlibModel(model).fit(rows, features=[])": 'Unexpected keyword argument "features" for "fit" of "SparkMLlibModel"',
    'SparkModel(model, port="a")': 'Argument "port" to "SparkModel" has incompatible type "str"',
    'KerasEstimator(epochs="2")': 'Argument "epochs" to "KerasEstimator" has incompatible type "str"',
    "KerasEstimator(label=1)": 'Unexpected keyword argument "label" for "KerasEstimator"',
}


@pytest.mark.programs
def test_mypy_knows_each_argument(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(WRONG))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", program]
    errors = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    found = [line for line in errors if ": error: " in line]
    assert len(found) == len(WRONG), errors
    for line, words in zip(found, WRONG.values(), strict=True):
        assert words in line
