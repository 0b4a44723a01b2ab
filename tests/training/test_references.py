"""Values encoded as JSON and decoded again, without pickle."""

import functools
import json
import os
import re

import keras
import numpy as np
import pytest

from sparkkeras import CustomObjectError, DiLoCo
from sparkkeras.formats.images import image_loader
from sparkkeras.training.references import decode, encode, find, find_code, reference, reference_to_code
from tests.ml import parts


@pytest.mark.parametrize(
    "value",
    [
        None, 3, 2.5, "text", [1, [2]], (1, (2, "x")), {0: 0.5, 1: 2.0}, {"a": (1, 2)},
        DiLoCo(momentum=0.5), parts.halved, parts.Shifted(2.0, (3,)), {"left": parts.Shifted()},
    ],
)  # fmt: skip
def test_values_survive_a_round_trip_through_json(value):
    assert decode(json.loads(json.dumps(encode(value, "it")))) == value
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
        (parts.Stateful(), "cannot be saved"),
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
    with pytest.raises(CustomObjectError, match="__main__.*register_keras_serializable"):
        reference(made, "custom_objects['Own']")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"import": "not_there:halved"}, "module not_there"),
        ({"import": f"{parts.__name__}:quartered"}, "refers to quartered"),
        ({"import": "builtins:eval"}, "standard"),
        ({"import": "posix:system"}, "standard"),
        ({"import": f"{parts.__name__}:Scale"}, "expected a function"),
        ({"class": "subprocess:Popen", "fields": {"args": "true"}}, "not a dataclass"),
        ({"class": "sparkkeras.modeling.custom_code:ByValue", "fields": {}}, "may not create"),
        ({"class": "sparkkeras.sources.tasks:Sweep", "fields": {}}, "may not create"),
        ({"class": "_pytest.config:Config.InvocationParams", "fields": {}}, "may not create"),
    ],
    ids=str,
)
def test_a_file_creates_only_dataclasses_and_functions_of_the_user(saved, message):
    with pytest.raises(CustomObjectError, match=message):
        decode(saved)


@pytest.mark.parametrize("location", [f"{parts.__name__}:np.load", "shutil:os.system"])
def test_only_objects_that_a_module_defines_itself_are_found(location):
    with pytest.raises(CustomObjectError, match="is not defined there"):
        find(location)


def test_saving_a_function_that_could_not_be_loaded_is_reported():
    with pytest.raises(CustomObjectError, match="transform .* os:getenv is"):
        encode(os.getenv, "transform")
    with pytest.raises(CustomObjectError, match="code .* re:compile is"):
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
