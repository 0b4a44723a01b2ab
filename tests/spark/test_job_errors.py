"""A task that failed: the first line of the error names the user's exception."""

import logging
from types import SimpleNamespace

import pytest

from sparkkeras.errors import ClusterError, StorageError, WorkerError
from sparkkeras.spark import activity
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
    stopped = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    message = str(translated(RuntimeError(LOST + cause), SimpleNamespace(_jsc=stopped, master="yarn")))
    assert ("1.1 GB of 1 GB" in message) == blamed


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
