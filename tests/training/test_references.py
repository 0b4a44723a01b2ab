"""Values encoded as JSON and decoded again, without pickle."""

import functools
import json
import os
import re

import keras
import numpy as np
import pytest

from sparkkeras import CustomObjectError, DiLoCo, ParameterServerOptions
from sparkkeras.formats.images import image_loader
from sparkkeras.training.references import decode, encode, find, find_code, reference, reference_to_code
from tests.ml import parts


@pytest.mark.parametrize(
    "value",
    [
        None, 3, 2.5, "text", True, [1, [2]], (1, (2, "x")), {0: 0.5, 1: 2.0}, {"a": (1, 2)},
        DiLoCo(momentum=0.5), ParameterServerOptions(timeout=3.0),
        parts.halved, parts.Shifted(2.0, (3,)), {"left": parts.Shifted()},
    ],
)  # fmt: skip
def test_values_survive_a_round_trip_through_json(value):
    assert decode(json.loads(json.dumps(encode(value, "it")))) == value


def test_numpy_scalars_become_python_numbers():
    assert encode([np.float32(0.5), np.int64(3)], "it") == [0.5, 3]


def test_a_loader_keeps_its_function_without_a_pickle():
    loader = image_loader((8, 8), "RGB", parts.darker)
    written = json.dumps(encode(loader, "loader"))
    assert "parts:darker" in written
    assert decode(json.loads(written)).preprocessing.load()(np.float32(510)) == 1
    loader = image_loader((8, 8), "RGB", keras.applications.vgg16.preprocess_input)
    assert decode(encode(loader, "loader")).preprocessing.load() is keras.applications.vgg16.preprocess_input


def local():
    def inner(x, y):
        return x, y

    return inner


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x, y: (x, y), "a lambda"),
        (local(), "defined inside a function"),
        (parts.Stateful(), "cannot be saved: only functions, classes and dataclasses"),
        (functools.partial(parts.halved, y=1), "cannot be saved"),
        (image_loader((8, 8), "RGB", lambda x: x), "a lambda"),
        ([{"deep": lambda: 0}], r"transform\[0\]\['deep'\] is"),
    ],
    ids=["lambda", "closure", "object", "partial", "loader", "deep"],
)
def test_values_that_another_process_could_not_import_are_reported(value, message):
    with pytest.raises(CustomObjectError, match=message):
        encode(value, "transform")


def test_a_class_of_a_script_is_reported():
    made = type("Own", (), {"__module__": "__main__"})
    with pytest.raises(CustomObjectError, match=r"defined in __main__.*top level of a module.*register_keras_serializable"):
        reference(made, "custom_objects['Own']")


def test_references_to_missing_modules_and_names_are_reported():
    with pytest.raises(CustomObjectError, match="refers to halved of the module not_there"):
        decode({"import": "not_there:halved"})
    with pytest.raises(CustomObjectError, match="refers to quartered"):
        decode({"import": f"{parts.__name__}:quartered"})


def test_only_dataclasses_are_created_from_a_file():
    with pytest.raises(CustomObjectError, match="is not a dataclass now"):
        decode({"class": "subprocess:Popen", "fields": {"args": "true"}})


@pytest.mark.parametrize(
    "location",
    [
        "sparkkeras.modeling.custom_code:ByValue",
        "sparkkeras.sources.tasks:Sweep",
        "_pytest.config:Config.InvocationParams",
    ],
)
def test_dataclasses_of_installed_packages_and_pickles_are_not_created_from_a_file(location):
    with pytest.raises(CustomObjectError, match="A saved file may not create it"):
        decode({"class": location, "fields": {}})


@pytest.mark.parametrize(
    "location", [f"{parts.__name__}:np.load", "shutil:os.system", f"{parts.__name__}:keras.layers.Dense"]
)
def test_only_objects_that_a_module_defines_itself_are_found(location):
    with pytest.raises(CustomObjectError, match="is not defined there"):
        find(location)


@pytest.mark.parametrize("location", ["pydoc:pipepager", "posix:system", "builtins:eval", f"{parts.__name__}:Scale"])
def test_params_refer_to_functions_outside_the_standard_library(location):
    with pytest.raises(
        CustomObjectError, match="expected a function defined with def in a module outside of Python's standard"
    ):
        decode({"import": location})


def test_saving_a_function_that_could_not_be_loaded_is_reported():
    with pytest.raises(CustomObjectError, match="transform could not be loaded again: os:getenv is"):
        encode(os.getenv, "transform")
    with pytest.raises(CustomObjectError, match="code could not be loaded again: re:Match|re:compile is"):
        reference_to_code(re.compile, "code")


def test_keras_subclasses_and_user_functions_are_accepted_as_custom_code():
    for value in (parts.Scale, parts.squared):
        assert find_code(reference_to_code(value, "it")) is value


@pytest.mark.parametrize(
    "location",
    [
        "pydoc:pipepager", "posix:system", "builtins:exec", "subprocess:Popen", "numpy:load", f"{parts.__name__}:Stateful",
        "_pytest.outcomes:importorskip", "keras.src.layers.core.lambda_layer:Lambda",
        "sparkkeras.spark.filesystem:write_bytes",
    ],
)  # fmt: skip
def test_other_objects_are_rejected_as_custom_code(location):
    with pytest.raises(CustomObjectError, match=r"may only name .*custom_object_scope"):
        find_code(location)
