"""The exception classes, parts of messages, warnings, and errors of Spark, which are translated."""

import contextlib
import inspect
import pickle
from functools import partial

import pytest

from sparkkeras import errors
from sparkkeras.errors import SparkKerasError, WorkerError, counted, known_names, warn
from sparkkeras.spark import job_errors
from sparkkeras.spark.job_errors import translated

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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("[CAST] The value 'a' of \"STRING\"\n== DataFrame =="), "[CAST] The value 'a' of \"STRING\""),
        (
            RuntimeError("An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: Job aborted.\n"),
            "org.apache.spark.SparkException: Job aborted.",
        ),
    ],
)
def test_an_error_without_a_traceback_is_reported_by_its_first_line(error, words):
    assert str(translated(error)) == f"Spark could not finish the job: {words}"


KILLED = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 53.0 failed {attempts} times, most \
recent failure: Lost task 1.0 in stage 53.0 (TID 259) (localhost executor driver): org.apache.spark.SparkException: \
Python worker exited unexpectedly (crashed). Consider setting 'spark.python.worker.faulthandler.enabled' to true.
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator$$anonfun$1.applyOrElse(PythonRunner.scala:1136)
Caused by: java.io.EOFException"""

LOST = """An error occurred while calling o12.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 3.0 (TID 9) (10.0.0.7 executor 4): ExecutorLostFailure (executor 4 exited caused by one of \
the running tasks) Reason: Container killed by YARN for exceeding memory limits. 9.1 GB of 9 GB physical memory used."""


class Context:
    def __init__(self, master):
        self.master = master
        self._jsc = self

    def sc(self):
        return self

    def isStopped(self):
        return False


@pytest.mark.parametrize("ran_out", [True, None])
def test_the_death_of_a_worker_process_is_reported_with_remedies(monkeypatch, ran_out):
    monkeypatch.setattr(job_errors, "ran_out", lambda: ran_out)
    for master, attempts, words, absent in (
        ("local[2]", 1, ["attempts at the task: 1", "'local[2]' has, such as local[1].", "local[N,4]"], "memoryOverhead"),
        ("local[8,2]", 2, ["such as local[4]."], "local[N,4]"),
        ("local", 1, ["local[N,4]"], "fewer slots"),
        ("local[2,4]", 4, ["attempts at the task: 4", "fewer slots"], "local[N,4]"),
        ("yarn", 4, ["spark.executor.memoryOverhead", "spark.task.cpus"], "local["),
    ):
        error = translated(RuntimeError(KILLED.format(attempts=attempts)), master and Context(master))
        assert isinstance(error, WorkerError)
        message = str(error)
        assert message.startswith("a worker process died")
        assert "collectAndServe" not in message
        assert "\n" not in message
        for word in ["memory", "batch_size=", "Python worker exited unexpectedly", *words]:
            assert word in message, (master, word)
        assert absent not in message, master
    lost = str(translated(RuntimeError(LOST), Context("yarn")))
    for word in ("used more memory", "Container killed by YARN", "spark.executor.memoryOverhead"):
        assert word in lost


def test_memory_is_not_blamed_where_it_did_not_run_out(monkeypatch):
    monkeypatch.setattr(job_errors, "ran_out", lambda: False)
    monkeypatch.setattr(job_errors, "describe_memory", lambda: "20.0 of 24.0 GB of memory are available now")
    message = str(translated(RuntimeError(KILLED.format(attempts=1)), Context("local[2]")))
    assert "20.0 of 24.0 GB of memory" in message
    assert "spark.python.worker.faulthandler.enabled=true" in message
    assert "batch_size" not in message


@pytest.mark.parametrize(
    ("reason", "known", "blames_memory"),
    [
        ("Command exited with code 137", "the exit code 137 (SIGKILL).", True),
        ("\nThe executor with id 4 exited with exit code 137(SIGKILL, possible container OOM).", "137 (SIGKILL).", True),
        ("Container marked as failed: c_1. Exit status: 143.", "143 (SIGTERM: the cluster manager", False),
        ("Command exited with code 139", "the exit code 139 (SIGSEGV: native code crashed).", False),
        ("Remote RPC client disassociated.", "Spark does not know its exit code.", True),
    ],
)
def test_the_exit_code_of_a_lost_executor_is_reported(reason, known, blames_memory):
    message = str(translated(RuntimeError(LOST.partition("Container killed")[0] + reason), Context("yarn")))
    assert known in message
    assert ("memoryOverhead" in message) == blames_memory


def test_a_workers_traceback_takes_precedence_over_its_death():
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "ValueError: Python worker exited unexpectedly",
    ]
    assert "ValueError" in str(translated(RuntimeError("\n".join(lines)), Context("local[2]")))


@pytest.mark.parametrize("lead", ["", "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: "])
def test_an_error_of_sparkkeras_without_a_traceback_keeps_its_type(lead):
    found = translated(
        RuntimeError(f"An exception was thrown:\n{lead}sparkkeras.errors.DataError: x is null.\n SQLSTATE: 38000")
    )
    assert (type(found), str(found)) == (errors.DataError, "x is null.")
