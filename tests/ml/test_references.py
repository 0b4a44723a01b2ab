"""Values as JSON and back, without a pickle."""

import functools
import json
import os
import re

import keras
import numpy as np
import pytest

from sparkkeras import CustomObjectError, DiLoCo, ParameterServerOptions
from sparkkeras.formats.images import image_loader
from sparkkeras.ml.references import decode, encode, find, find_code, reference, reference_to_code
from tests.ml import parts


@pytest.mark.parametrize(
    "value",
    [
        None, 3, 2.5, "text", True, [1, [2]], (1, (2, "x")), {0: 0.5, 1: 2.0}, {"a": (1, 2)},
        DiLoCo(momentum=0.5), ParameterServerOptions(timeout=3.0),
        parts.halved, parts.Shifted(2.0, (3,)), {"left": parts.Shifted()},
    ],
)  # fmt: skip
def test_a_round_trip_through_json(value):
    assert decode(json.loads(json.dumps(encode(value, "it")))) == value


def test_numpys_numbers():
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
    ("value", "told"),
    [
        (lambda x, y: (x, y), "a lambda"),
        (local(), "made inside a function"),
        (parts.Stateful(), "cannot be saved: only functions, classes and dataclasses"),
        (functools.partial(parts.halved, y=1), "cannot be saved"),
        (image_loader((8, 8), "RGB", lambda x: x), "a lambda"),
        ([{"deep": lambda: 0}], r"transform\[0\]\['deep'\] is"),
    ],
    ids=["lambda", "closure", "object", "partial", "loader", "deep"],
)
def test_what_no_other_process_could_import_is_refused(value, told):
    with pytest.raises(CustomObjectError, match=told):
        encode(value, "transform")


def test_what_belongs_to_a_script_is_refused():
    made = type("Own", (), {"__module__": "__main__"})
    with pytest.raises(CustomObjectError, match=r"of __main__.*top of a module.*register_keras_serializable"):
        reference(made, "custom_objects['Own']")


def test_references_that_lead_nowhere():
    with pytest.raises(CustomObjectError, match="refers to halved of the module not_there"):
        decode({"import": "not_there:halved"})
    with pytest.raises(CustomObjectError, match="refers to quartered"):
        decode({"import": f"{parts.__name__}:quartered"})


def test_only_dataclasses_are_made_from_a_file():
    with pytest.raises(CustomObjectError, match="is none any more"):
        decode({"class": "subprocess:Popen", "fields": {"args": "true"}})


@pytest.mark.parametrize(
    "place",
    ["sparkkeras.modeling.custom_code:ByValue", "sparkkeras.sources.rdd:Sweep", "_pytest.config:Config.InvocationParams"],
)
def test_dataclasses_of_installed_packages_and_pickles_are_not_made_from_a_file(place):
    with pytest.raises(CustomObjectError, match="a file may not have it made"):
        decode({"class": place, "fields": {}})


@pytest.mark.parametrize("place", [f"{parts.__name__}:np.load", "shutil:os.system", f"{parts.__name__}:keras.layers.Dense"])
def test_only_what_a_module_defines_itself_is_found(place):
    with pytest.raises(CustomObjectError, match="is not defined there"):
        find(place)


@pytest.mark.parametrize("place", ["pydoc:pipepager", "posix:system", "builtins:eval", f"{parts.__name__}:Scale"])
def test_params_name_functions_outside_pythons_library(place):
    with pytest.raises(CustomObjectError, match="expected a function that a module outside of Python's own library"):
        decode({"import": place})


def test_what_may_not_be_loaded_is_not_saved():
    with pytest.raises(CustomObjectError, match="transform could not be loaded again: os:getenv is"):
        encode(os.getenv, "transform")
    with pytest.raises(CustomObjectError, match="code could not be loaded again: re:Match|re:compile is"):
        reference_to_code(re.compile, "code")


def test_custom_code_is_a_class_of_keras_kinds_or_a_function_of_ones_own():
    for value in (parts.Scale, parts.squared):
        assert find_code(reference_to_code(value, "it")) is value


@pytest.mark.parametrize(
    "place",
    [
        "pydoc:pipepager", "posix:system", "builtins:exec", "subprocess:Popen", "numpy:load", f"{parts.__name__}:Stateful",
        "_pytest.outcomes:importorskip", "keras.src.layers.core.lambda_layer:Lambda", "sparkkeras.spark.storage:write_bytes",
    ],
)  # fmt: skip
def test_custom_code_is_nothing_else(place):
    with pytest.raises(CustomObjectError, match=r"may only name .*custom_object_scope"):
        find_code(place)
