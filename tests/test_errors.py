"""The exception classes, parts of messages, and warnings; errors of Spark are in spark/test_job_errors.py."""

import contextlib
import inspect
import pickle
from functools import partial

import pytest

from sparkkeras import errors
from sparkkeras.errors import SparkKerasError, counted, known_names, warn

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, SparkKerasError)}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_has_a_standard_parent_and_a_docstring_and_can_be_pickled(name):
    kind = CLASSES[name]
    standard = {base for base in kind.__mro__ if base.__module__ == "builtins"}
    assert standard - {Exception, BaseException, object} or kind is SparkKerasError
    assert kind.__doc__.strip().endswith(".") or "Attributes:" in kind.__doc__
    error = pickle.loads(pickle.dumps(kind("expected x, received y")))
    assert (type(error), str(error)) == (kind, "expected x, received y")


def test_a_worker_error_has_the_workers_traceback():
    error = errors.WorkerError("a task failed", "Traceback ...")
    assert error.worker_traceback == "Traceback ..."
    assert pickle.loads(pickle.dumps(error)).worker_traceback == "Traceback ..."
    assert errors.WorkerError("a task failed").worker_traceback == ""


def test_counts_have_the_singular_or_the_plural():
    assert [counted(1, "row"), counted(0, "row"), counted(2, "batch")] == ["1 row", "0 rows", "2 batches"]
    assert [counted(1, "class"), counted(3, "class")] == ["1 class", "3 classes"]


def test_known_names_are_sorted_and_the_closest_is_suggested():
    assert known_names("slowmoo", ["slowmo", "average"]) == "Known: 'average', 'slowmo'. Did you mean 'slowmo'?"
    assert known_names("xyz", ["slowmo", "average"]) == "Known: 'average', 'slowmo'."
    assert "Did you mean 'asynchronous'?" in known_names("Asynchronous", ["synchronous", "asynchronous"])
    assert known_names("1", ("auto", 0, 1, None)) == "Known: 0, 1, None, 'auto'. Did you mean 1?"
    assert known_names("mom", ["alpha", "momentum"]) == "Known: 'alpha', 'momentum'. Did you mean 'momentum'?"
    assert known_names("val", ["val_loss", "val_accuracy", "vale"]).endswith("Did you mean 'vale'?")


def test_warnings_point_to_the_line_that_calls_the_package_or_pyspark():
    def calls(module, function):
        names = {"__name__": module, "function": function, "contextmanager": contextlib.contextmanager}
        exec("@contextmanager\ndef context(): yield function()\ndef call():\n  with context(): pass", names)
        return names["call"]

    with pytest.warns(UserWarning, match="beware") as warned:
        calls("pyspark.ml.base", calls("sparkkeras.ml", lambda: calls("sparkkeras", lambda: warn("beware"))()))()
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="beware") as warned:
        calls("pyspark.ml.base", calls("sparkkeras.ml", partial(warn, "beware")))()
    assert warned[0].filename == __file__
