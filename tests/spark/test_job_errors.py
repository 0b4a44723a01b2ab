"""Errors of Spark, which are translated: the first line names the user's exception, or why a process has died."""

import logging
from types import SimpleNamespace

import pytest

from sparkkeras.errors import ClusterError, DataError, StorageError, WorkerError
from sparkkeras.spark import activity, job_errors
from sparkkeras.spark.activity import ExecutorState
from sparkkeras.spark.job_errors import interruptible, translated

FAILED = """An error occurred while calling o1.collect: PythonException: Traceback (most recent call last):
  File "/lib/pyspark/worker.py", line 1, in main
    process()
  File "/venv/sparkkeras/worker/trainer.py", line 2, in fit
    model.fit(
    ^^^^^^^^^^
  File "/home/me/job.py", line 3, in read
    raise ValueError("bad record")
ValueError: bad record 17
in file a.bin
Raised by the reader of worker 1, in batch 3.

	at org.apache.spark.api.python.BasePythonRunner
"""


def test_the_first_line_names_the_exception_and_the_batch():
    error = translated(RuntimeError(FAILED))
    first, _, others = str(error).partition("\n")
    assert first == (
        "a task failed on a worker: ValueError: bad record 17. Raised by the reader of worker 1, in batch 3. The traceback:"
    )
    assert "in file a.bin" in others
    assert "/home/me/job.py" in others
    assert "trainer.py" not in others
    assert "trainer.py" in error.worker_traceback


def test_frames_of_the_package_remain_if_there_are_no_others():
    inside = FAILED.replace("/home/me/job.py", "/venv/sparkkeras/data/block.py")
    assert "trainer.py" in str(translated(RuntimeError(inside)))


LOST = (
    "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n: org.apache.spark."
    "SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task "
    "0.3 in stage 0.0 (TID 6) (worker2 executor 1): "
)


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1\n'
NO_DAEMON = "No module named 'sparkkeras'"
TOKEN = "org.apache.hadoop.security.token.SecretManager$InvalidToken): Token has expired, current time: 01:59:48"
SILENT = "ExecutorLostFailure (executor 1 exited unrelated to the running tasks) Reason: "


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        (
            'java.io.IOException: Cannot run program "/nosuch/python3": error=2, No such file or directory\n'
            "\tat org.apache.spark.api.python.PythonWorkerFactory.startDaemon(PythonWorkerFactory.scala:371)",
            ClusterError,
            ["workers on worker2 cannot start Python: Cannot run program", "PYSPARK_PYTHON"],
        ),
        (
            f"org.apache.spark.SparkException: \nError from python worker:\n  {NO_DAEMON}\nPYTHONPATH was:\n  /opt\n"
            "org.apache.spark.SparkException: EOFException occurred while reading the port number.\n\tat org.apache",
            ClusterError,
            [f"workers on worker2 cannot start Python: {NO_DAEMON}. ", "spark.python.daemon.module="],
        ),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has", ClusterError, ["workers on worker2 run another Python"]),
        (f"{TRACEBACK}ModuleNotFoundError: No module named 'keras.src'", WorkerError, ["on worker2 lack", "'keras.src'"]),
        (f"{TRACEBACK}ImportError: cannot import name 'x'", WorkerError, ["failed on worker2: ImportError: cannot import"]),
        (
            "org.apache.spark.api.python.PythonException: ValueError: bad record 17\n\n\tat org.apache",
            WorkerError,
            ["failed on worker2: ValueError: bad record 17"],
        ),
        ("java.io.IOException: No space left on device\n\tat java", StorageError, ["worker2 executor 1", "spark.local.dir"]),
        (
            f"org.apache.hadoop.ipc.RemoteException({TOKEN}\n\tat ",
            StorageError,
            ["on worker2", "01:59:48. The application's delegation token has", "spark.kerberos.keytab"],
        ),
        (
            f"{SILENT}worker lost: Not receiving heartbeat for 60 seconds",
            WorkerError,
            ["on worker2 was lost", "received no heartbeats", "for 60 seconds"],
        ),
        (
            f"{SILENT}Executor heartbeat timed out after 126000 ms",
            WorkerError,
            ["on worker2 was lost", "received no heartbeats", "126000 ms"],
        ),
    ],
)
def test_errors_name_the_host_of_the_worker_and_the_cause(cause, kind, words):
    error = translated(RuntimeError(LOST + cause))
    assert type(error) is kind
    assert all(each in str(error) for each in words)
    assert "memory" not in str(error)
    local = LOST.replace("worker2 executor 1", "me executor driver")
    assert " on me" not in str(translated(RuntimeError(local + cause)))


def context(master):
    """What a SparkContext that runs says of itself."""
    return SimpleNamespace(master=master, _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False)))


@pytest.mark.parametrize(
    ("cause", "blamed"),
    [
        ("Python worker exited unexpectedly (crashed)", False),
        ("FetchFailed(null, shuffleId=0)", True),
        ("ExecutorLostFailure (executor 1 exited) Reason: killed for exceeding memory limits. 1.1 GB of 1 GB", True),
    ],
)
def test_memory_is_blamed_only_for_an_executor_of_this_failure(monkeypatch, cause, blamed):
    lost = "Container killed by YARN for exceeding physical memory limits. 1.1 GB of 1 GB physical memory used."
    states = {"1": ExecutorState("worker2:1", 1, ""), "2": ExecutorState("worker1:1", 0, lost)}
    monkeypatch.setattr(activity, "executor_states", lambda context: states)
    message = str(translated(RuntimeError(LOST + cause), context("yarn")))
    assert ("1.1 GB of 1 GB" in message) == blamed


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

OVER_LIMIT = """An error occurred while calling o12.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 3.0 (TID 9) (10.0.0.7 executor 4): ExecutorLostFailure (executor 4 exited caused by one of \
the running tasks) Reason: Container killed by YARN for exceeding memory limits. 9.1 GB of 9 GB physical memory used."""


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
        error = translated(RuntimeError(KILLED.format(attempts=attempts)), context(master))
        assert isinstance(error, WorkerError)
        message = str(error)
        assert message.startswith("a worker process died")
        assert "collectAndServe" not in message
        assert "\n" not in message
        for word in ["memory", "batch_size=", "Python worker exited unexpectedly", *words]:
            assert word in message, (master, word)
        assert absent not in message, master
    lost = str(translated(RuntimeError(OVER_LIMIT), context("yarn")))
    for word in ("used more memory", "Container killed by YARN", "spark.executor.memoryOverhead"):
        assert word in lost


def test_memory_is_not_blamed_where_it_did_not_run_out(monkeypatch):
    monkeypatch.setattr(job_errors, "ran_out", lambda: False)
    monkeypatch.setattr(job_errors, "describe_memory", lambda: "20.0 of 24.0 GB of memory are available now")
    message = str(translated(RuntimeError(KILLED.format(attempts=1)), context("local[2]")))
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
    message = str(translated(RuntimeError(OVER_LIMIT.partition("Container killed")[0] + reason), context("yarn")))
    assert known in message
    assert ("memoryOverhead" in message) == blames_memory


def test_a_workers_traceback_takes_precedence_over_its_death():
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "ValueError: Python worker exited unexpectedly",
    ]
    assert "ValueError" in str(translated(RuntimeError("\n".join(lines)), context("local[2]")))


@pytest.mark.parametrize("lead", ["", "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: "])
def test_an_error_of_sparkkeras_without_a_traceback_keeps_its_type(lead):
    found = translated(
        RuntimeError(f"An exception was thrown:\n{lead}sparkkeras.errors.DataError: x is null.\n SQLSTATE: 38000")
    )
    assert (type(found), str(found)) == (DataError, "x is null.")


def log(error, path):
    record = logging.LogRecord("root", logging.ERROR, path, 1, "it failed", (), (type(error), error, None))
    logging.getLogger().handle(record)


def test_py4j_does_not_log_an_interrupt_that_is_raised(caplog):
    py4j = "/site-packages/py4j/java_gateway.py"
    with interruptible():
        with interruptible():
            pass
        log(KeyboardInterrupt(), py4j)
        assert caplog.records == []
        log(OSError(), py4j)
        log(KeyboardInterrupt(), "/home/me/job.py")
    log(KeyboardInterrupt(), py4j)
    assert len(caplog.records) == 3
