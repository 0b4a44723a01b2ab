"""The exception tree: what the module's words promise is what the classes are."""

import builtins
import inspect
import pickle
import re

import pytest

from sparkkeras import errors
from sparkkeras.errors import SparkKerasError, WorkerError, known_names

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, SparkKerasError)}


def drawn_tree():
    """The tree in the docstring, as {name: (parent, standard parent or None)}."""
    tree = {}
    above = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^(    )(?P<lead>[│├└─ ]*)(?P<name>\w+Error)(?: \((?P<standard>\w+)\))?", line)
        if found is None:
            continue
        depth = len(found["lead"]) // 4
        above[depth:] = [found["name"]]
        tree[found["name"]] = (above[depth - 1] if depth else None, found["standard"])
    return tree


def test_every_class_is_drawn_and_every_drawn_one_is_there():
    assert set(drawn_tree()) == set(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_drawn_parents_are_the_parents(name):
    parent, standard = drawn_tree()[name]
    kind = CLASSES[name]
    if parent is None:
        assert kind is SparkKerasError
        return
    assert CLASSES[parent] in kind.__bases__
    if standard is not None:
        assert issubclass(kind, getattr(builtins, standard))


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"SparkKerasError"}))
def test_every_error_has_a_standard_parent(name):
    standard = [base for base in CLASSES[name].__mro__ if base.__module__ == "builtins"]
    assert set(standard) - {Exception, BaseException, object}
    assert issubclass(CLASSES[name], SparkKerasError)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_says_what_it_is_for(name):
    assert CLASSES[name].__doc__.strip().endswith(".") or "Attributes:" in CLASSES[name].__doc__


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_errors_can_travel(name):
    error = pickle.loads(pickle.dumps(CLASSES[name]("what came, what was expected")))
    assert type(error) is CLASSES[name]
    assert str(error) == "what came, what was expected"


def test_a_worker_error_carries_the_workers_traceback():
    error = errors.WorkerError("a task failed", "Traceback ...")
    assert error.worker_traceback == "Traceback ..."
    assert pickle.loads(pickle.dumps(error)).worker_traceback == "Traceback ..."
    assert errors.WorkerError("a task failed").worker_traceback == ""


def test_known_names_are_sorted_and_the_nearest_is_offered():
    assert known_names("slowmoo", ["slowmo", "average"]) == "Known: 'average', 'slowmo'. Did you mean 'slowmo'?"
    assert known_names("xyz", ["slowmo", "average"]) == "Known: 'average', 'slowmo'."
    assert known_names(3, ["a"]) == "Known: 'a'."


def test_a_module_that_workers_lack_is_named():
    from sparkkeras.cluster import translated

    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "ModuleNotFoundError: No module named 'cryptography'",
    ]
    error = translated(RuntimeError("\n".join(["An exception was thrown:", *lines])))
    assert isinstance(error, WorkerError)
    assert "Spark's workers lack the Python module 'cryptography': install it where they run" in str(error)
    assert error.worker_traceback.startswith("Traceback")
