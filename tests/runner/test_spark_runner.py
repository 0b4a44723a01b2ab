"""`SparkRunner` on the driver's machine, without Spark. test_on_spark.py has the same on executors."""

# ruff: noqa: T201 - ranks print

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from unittest.mock import Mock

import keras  # noqa: F401 - ranks find it loaded
import numpy as np
import psutil
import pytest

from sparkkeras import (
    Checkpoint,
    ConfigurationError,
    CustomObjectError,
    DataError,
    SparkModel,
    SparkRunner,
    StorageError,
    UnknownArgumentError,
    WorkerError,
)
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.runner import context, groups, hosts, launchers, service
from sparkkeras.runner.data import stored_on_workers
from sparkkeras.runner.rank import Script, environment
from sparkkeras.runner.rank_context import RankContext
from sparkkeras.training.saved_run import FIT
from sparkkeras.worker import processes
from tests.processes import clean_environment, interrupted_when, lines_of_ranks
from tests.rpc.test_transports import eventually
from tests.runner.test_on_spark import is_alive

# Most ranks here are forks, which start at once; none uses the backend, whose threads do not exist in forks.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def forks(monkeypatch):
    monkeypatch.setattr(launchers, "spawn", processes.fork)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    """No run leaves a process, a thread, an open file or a temporary file behind."""
    me = psutil.Process()
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))  # for new processes
    files, children, threads = me.num_fds(), set(me.children(recursive=True)), threading.active_count()
    yield
    assert me.num_fds() <= files
    assert set(me.children(recursive=True)) <= children
    assert eventually(lambda: threading.active_count() <= threads)
    assert list(folder.iterdir()) == []


def local(ranks=2, **options):
    return SparkRunner(ranks, local_mode=True, **options)


# Functions and files


def test_results_are_in_the_order_of_the_ranks(capsys):
    def train(number, factor=1):
        ranks = context()
        print(f"rank {ranks.rank}")
        place = ranks.rank, ranks.world_size, ranks.local_rank
        return os.getpid(), *place, number * factor, ranks.addresses, dict(os.environ)

    found = local().run(train, 3, factor=2)
    pids, ranks, sizes, local_ranks, numbers, addresses, variables = zip(*found, strict=True)
    assert len({os.getpid(), *pids}) == 3
    assert (ranks, sizes, local_ranks, numbers) == ((0, 1), (2, 2), (0, 1), (6, 6))
    assert addresses[0] == addresses[1]
    assert variables[1]["MASTER_PORT"] == addresses[0][0].partition(":")[2]
    assert variables[1]["RANK"] == "1"
    assert variables[0]["CUDA_VISIBLE_DEVICES"] == ""
    assert sorted(lines_of_ranks(capsys)) == ["[0] rank 0", "[1] rank 1"]


def test_a_file_runs_as_a_program(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import beside
            from sparkkeras.runner import context

            if __name__ == "__main__":
                print(context().all_reduce(context().rank + 1), beside.NAME, sys.argv[1:], sys.stdin.read() == "")
                sys.exit()
            """
        )
    )
    assert local().run(script, "--epochs", 3) == [None, None]
    assert sorted(lines_of_ranks(capsys)) == [f"[{rank}] 3 beside ['--epochs', '3'] True" for rank in (0, 1)]
    script.write_text("import sys\nprint('before')\nsys.exit(3)")
    with pytest.raises(WorkerError, match=r"the code 3\.(.|\n)*1 line:\n\nbefore"):
        local(1).run(str(script))


def test_a_file_travels_where_it_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    path = tmp_path / "train.py"
    path.write_text("raise ValueError('here')")
    script = Script(str(path), None, ()).with_source()
    path.unlink()
    with contextlib.ExitStack() as stack:
        with pytest.raises(ValueError, match="here"):
            script.on_host(stack)(Mock(), Mock())


def test_libraries_find_the_group():
    addresses = ["[::1]:1", "b:2", "[::1]:3"]
    variables = environment(2, 3, tuple(addresses))
    assert json.loads(variables.pop("TF_CONFIG")) == {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": 2},
    }
    assert variables == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "1",
        "TF_GRPC_REUSE_PORT": "1",
        "JAX_COORDINATOR_ADDRESS": "[::1]:1",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "[::1]:1,b:2,[::1]:3",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        "KERAS_DISTRIBUTION_PROCESS_ID": "2",
    }


# Failures


def test_a_failed_rank_ends_the_others_and_its_traceback_is_the_error(forks):
    def train():
        print("before the error")
        if context().rank == 1:
            raise KeyError("missing")
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 .*KeyError: 'missing'") as raised:
        local().run(train)
    assert time.monotonic() - started < 4
    assert 'raise KeyError("missing")' in raised.value.worker_traceback
    assert "/sparkkeras/" not in raised.value.worker_traceback
    assert str(raised.value).endswith("output of rank 1, 1 line:\n\nbefore the error")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (lambda: os._exit(0), "the exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), "stopped by a signal"),
        (lambda: {"lock": threading.Lock()}, "rank 0 .*pickling lock"),
        (lambda: np.zeros(1000), "rank 0 has .*file system"),
        (lambda: context().all_reduce(np.zeros(1000)), r"value of all_reduce\(\) has"),
        (lambda: context().save(0, {}), r"pass checkpoint=Checkpoint\(path\)"),
    ],
)
def test_why_a_rank_has_failed(forks, monkeypatch, train, words):
    monkeypatch.setattr(processes, "STOPPED_SECONDS", 0.3)
    monkeypatch.setattr(service, "VALUE_BYTES", 1000)
    with pytest.raises(WorkerError, match=words):
        local(1).run(train)


def test_the_timeout_ends_the_ranks(forks):
    with pytest.raises(TimeoutError, match=r"rank 1 .*timeout=0\.3") as raised:
        local().run(lambda: time.sleep(60 * context().rank), timeout=0.3)
    assert isinstance(raised.value, WorkerError)


def test_an_interrupt_ends_the_ranks_within_three_seconds(forks):
    def train():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # has to be killed
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)

    def have_started():
        return len([each for each in psutil.Process().children(recursive=True) if each.name() == "sleep"]) == 2

    with interrupted_when(have_started):
        local().run(train)


def test_processes_that_a_rank_leaves_running_are_ended(forks):
    (pid,) = local(1).run(lambda: subprocess.Popen(["sleep", "60"]).pid)
    assert eventually(lambda: not is_alive(pid))


@pytest.mark.soak
def test_ranks_end_with_the_driver():
    code = "import time\nfrom sparkkeras import SparkRunner\nSparkRunner(2, local_mode=True).run(lambda: time.sleep(60))"
    driver = subprocess.Popen([sys.executable, "-c", code], env=clean_environment())
    assert eventually(lambda: len(psutil.Process(driver.pid).children()) == 2)
    ranks = psutil.Process(driver.pid).children()
    driver.kill()
    driver.wait()
    assert eventually(lambda: not any(is_alive(rank.pid) for rank in ranks))


# Results


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    with pytest.raises(CustomObjectError, match=r"args\[1\] \(<unlocked"):
        local().run(print, 1, lock)
    with pytest.raises(CustomObjectError, match="function <lambda> cannot"):
        local().run(lambda: lock)


def test_large_results_arrive_whole(forks, monkeypatch):
    monkeypatch.setattr(service, "PIECE_BYTES", 1 << 20)

    def make():
        return {"a": np.arange(700_000.0), "b": Answer([np.ones(3), "text"]), "rank": context().rank}

    for rank, found in enumerate(local().run(make)):
        assert np.array_equal(found["a"], np.arange(700_000.0))
        assert found["a"].flags.writeable
        assert isinstance(found["b"], Answer)
        assert (found["b"].value[0].tolist(), found["b"].value[1], found["rank"]) == ([1, 1, 1], "text", rank)


class Answer:
    def __init__(self, value):
        self.value = value


# Rows


def rows_of_rank():
    ranks = context()
    data = ranks.dataset(4)
    return list(ranks.batches(4)), ranks.steps(4), [data[index] for index in range(len(data))]


def test_each_row_goes_to_one_rank_once(forks):
    x, y = np.arange(22.0, dtype=np.float32).reshape(11, 2), np.arange(11)
    found = local(2).run(rows_of_rank, data=(x, y))
    batches = [batch for own, _, _ in found for batch in own]
    assert [len(batch[0]) for batch in batches] == [4, 1, 4, 2]
    assert np.array_equal(np.concatenate([batch[0] for batch in batches]), x)
    assert np.concatenate([batch[1] for batch in batches]).tolist() == list(range(11))
    assert [steps for _, steps, _ in found] == [2, 2]
    for own, _, data in found:
        for (x1, y1), (x2, y2) in zip(own, data, strict=True):
            assert np.array_equal(x1, x2)
            assert np.array_equal(y1, y2)


def test_a_rank_may_have_no_rows_and_rows_no_labels(forks):
    found = local(3).run(rows_of_rank, data={"a": np.arange(2), "b": np.array(["u", "v"])})
    assert [[{name: list(part) for name, part in batch.items()} for batch in own] for own, _, _ in found] == [
        [],
        [{"a": [0], "b": ["u"]}],
        [{"a": [1], "b": ["v"]}],
    ]
    assert [steps for _, steps, _ in found] == [1, 1, 1]


def test_rows_may_be_changed(forks):
    def train():
        for batch in context().batches(2):
            batch += 1
        return [batch.sum() for batch in context().batches(2)]

    assert local(1).run(train, data=np.zeros((3, 1))) == [[0, 0]]


def test_rows_of_different_shapes_on_two_workers_are_refused():
    blocks = tuple(from_arrays(np.zeros((2, width), np.float32), None, None) for width in (3, 4))
    source = Mock(dataset=lambda ranks: contextlib.nullcontext(LocalDataset(blocks)))
    message = r"\(3,\), float32 in partition 0, .*\(4,\), float32 in partition 1"
    with pytest.raises(DataError, match=message), stored_on_workers(source, 2, everywhere=False):
        pass


# The other ranks


def test_ranks_exchange_values(forks):
    def train():
        ranks = context()
        ranks.barrier()
        total = ranks.all_reduce(np.full((2, 1), ranks.rank + 1, np.int16))
        return total.dtype.name, total.tolist(), ranks.broadcast(("from", ranks.rank)), float(ranks.all_reduce(0.5))

    assert local(3).run(train) == [("int16", [[6], [6]], ("from", 0), 1.5)] * 3


@pytest.mark.core
@pytest.mark.skipif(os.environ.get("KERAS_BACKEND") != "torch", reason="loads PyTorch")
def test_tensors_of_pytorch_are_summed(forks):
    torch = pytest.importorskip("torch")

    def train():
        ranks = context()
        ones = torch.ones(2, requires_grad=True)
        return ranks.all_reduce(ones).tolist(), ranks.all_reduce(ones.to(torch.bfloat16)).dtype.name

    assert local(2).run(train) == [([2, 2], "bfloat16")] * 2


def test_ranks_out_of_step_are_an_error_and_not_a_hang(forks):
    def train():
        ranks = context()
        if ranks.rank == 0:
            ranks.barrier()

    with pytest.raises(WorkerError, match=r"barrier\(\) .*rank 1 has ended") as caught:
        local().run(train)
    assert str(caught.value).count("Traceback (most recent call last)") == 1


def test_reports_appear_on_the_driver(forks, capsys):
    def train():
        return [context().report(epoch, {"loss": np.float32(0.5) / (epoch + 1)}) for epoch in (0, 1)]

    assert local(1).run(train) == [[False, False]]
    assert lines_of_ranks(capsys) == ["[0] epoch 1  loss: 0.5", "[0] epoch 2  loss: 0.25"]


def test_what_a_rank_cannot_send_is_named():
    driver = Mock()
    ranks = RankContext(0, 1, 0, 1, (), ("127.0.0.1:1",), driver)
    for call, message in (
        (lambda: ranks.report(1, [1]), "a list of 1 value as logs"),
        (lambda: ranks.report(1, {"loss": "high"}), r"logs\['loss'\].*received str 'high'"),
        (lambda: ranks.report(1, {"loss": [1, 2]}), r"logs\['loss'\].*a list of 2 values"),
        (lambda: ranks.all_reduce(True), r"all_reduce .*Pass int\(value\)"),
        (lambda: ranks.save(-1, {}), "epoch=-1"),
        (lambda: ranks.save(0, [1]), "a list of 1 value as state"),
        (lambda: ranks.save(0, {"model": {1, 2}}), r"state\['model'\] cannot be stored"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            call()
    assert driver.mock_calls == []


def test_a_run_continues_from_what_rank_0_has_saved(forks, tmp_path):
    def train(epochs, fails_at):
        ranks = context()
        found = ranks.restored()
        first, weights = (0, np.zeros(3, np.float32)) if found is None else (found.epoch + 1, found.state["weights"])
        for epoch in range(first, epochs):
            if epoch == fails_at:
                raise RuntimeError("on purpose")
            weights = weights + epoch + 1
            ranks.save(epoch, {"weights": weights + 100 * ranks.rank, "seen": {"losses": [0.5] * epoch}})
            ranks.barrier()
        return first, weights.tolist(), None if found is None else found.state["seen"]

    path = tmp_path / "run"
    arguments = {"checkpoint": Checkpoint(path, keep=9), "resume": True}
    with pytest.raises(WorkerError, match="on purpose"):
        local(2).run(train, 5, 2, **arguments)
    assert local(2).run(train, 4, None, **arguments) == [(2, [10.0] * 3, {"losses": [0.5]})] * 2
    assert local(1).run(train, 4, None, **arguments) == [(4, [10.0] * 3, {"losses": [0.5] * 3})]
    with pytest.raises(ConfigurationError, match="pass resume=True"):
        local(1).run(train, 4, None, checkpoint=Checkpoint(path))
    with pytest.raises(ConfigurationError, match="this is SparkModel.fit"):
        SparkModel.from_checkpoint(path)
    CheckpointStore(str(tmp_path / "fit")).write(FIT, None)
    with pytest.raises(ConfigurationError, match="this is SparkRunner.run"):
        local(1).run(train, 4, None, checkpoint=Checkpoint(tmp_path / "fit"), resume=True)


def test_a_checkpoint_that_cannot_be_written_is_a_warning(forks, tmp_path, monkeypatch):
    def write(store, kind, saved):
        raise StorageError("the disk is full.")

    def train():
        context().save(0, {"x": 1})
        return 3

    monkeypatch.setattr(CheckpointStore, "write", write)
    with pytest.warns(UserWarning, match="disk is full"):
        assert local(1).run(train, checkpoint=Checkpoint(tmp_path)) == [3]


def test_independent_ranks_know_no_others(forks):
    def train():
        ranks = context()
        with pytest.raises(ConfigurationError, match="at the same time"):
            ranks.barrier()
        return ranks.addresses, ranks.rank, "MASTER_ADDR" in os.environ

    assert local(2, barrier=False).run(train) == [((), 0, False), ((), 1, False)]


def test_a_context_belongs_to_the_process_of_its_rank(forks, capsys):
    from sparkkeras import ClusterError

    with pytest.raises(ClusterError, match="outside of SparkRunner.run"):
        context()

    def train():
        with contextlib.suppress(ChildProcessError):
            if os.fork() == 0:
                try:
                    context()
                except ClusterError as error:
                    print(error, flush=True)
                os._exit(0)
            os.wait()

    local(1).run(train)
    assert "in a process that a rank has started" in capsys.readouterr().out


# Arguments


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: SparkRunner(0), ConfigurationError, "num_workers=0"),
        (lambda: SparkRunner(num_proc=2), UnknownArgumentError, "mean 'num_workers'"),
        (lambda: SparkRunner(2, gpus_per_worker=1), ConfigurationError, "requires use_gpu=True"),
        (lambda: local().run(3), ConfigurationError, "function, or the path"),
        (lambda: local().run(len, [], 2), ConfigurationError, "function len takes: too many"),
        (
            lambda: local().run(lambda rate: rate, args=(1,), kwargs={"rate": 2}),
            ConfigurationError,
            r"args= and kwargs=.* run\(function, 1",
        ),
        (lambda: local().run(lambda rate: rate, rates=2), ConfigurationError, "missing .*'rate'.* mean 'rate'"),
        (
            lambda: local().run(lambda data: data, data=np.ones(3)),
            ConfigurationError,
            r"functools\.partial\(function, data=",
        ),
        (lambda: local().run("none.py"), OSError, "no file 'none.py'"),
        (lambda: local().run("/"), StorageError, "'/' is a folder"),
        (lambda: local().run(__file__, epochs=3), ConfigurationError, "epochs= is an argument by name"),
        (lambda: local().run(__file__, [3]), ConfigurationError, r"\[3\] is no command-line"),
        (lambda: local().run(print, features="a"), ConfigurationError, "features= .* is missing"),
        (lambda: local().run(print, data=np.ones(3), label="a"), ConfigurationError, "label= requires a Spark"),
        (
            lambda: local().run(print, data=({"a": np.ones(3)}, np.ones(3), np.ones(3))),
            DataError,
            r"tuple of 3 values .*\(x, \(y, sample_weight\)\)",
        ),
        (lambda: local(barrier=False).run(len, [], checkpoint=Checkpoint("a")), ConfigurationError, "the same time"),
        (lambda: local().run(len, [], checkpoint=Checkpoint("a", every=2)), ConfigurationError, r"\(every=2\): in a run"),
        (lambda: local().run(len, [], checkpoint="a"), ConfigurationError, "checkpoint='a': expected"),
        (lambda: local().run(len, [], resume=True), ConfigurationError, "resume=True: pass checkpoint="),
    ],
)
def test_mistakes_are_errors_before_a_process_starts(call, kind, message, monkeypatch):
    monkeypatch.setattr(groups, "serving", None)
    with pytest.raises(kind, match=message):
        call()


def test_gpus_are_distributed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,7")
    assert launchers.gpus_of_ranks(2, None) == (("0", "2"), ("5", "7"))
    assert launchers.gpus_of_ranks(2, 1) == (("0",), ("2",))
    with pytest.raises(ConfigurationError, match="need 6, .* has 4"):
        launchers.gpus_of_ranks(3, 2)


def test_rows_that_a_worker_does_not_find_are_sent_to_all(forks, monkeypatch):
    """On a cluster, Spark may run the task of a rank where its rows are not."""
    sent = []
    run = SparkRunner._run

    def first_without_files(self, work, source, timeout, checkpoints, events, progress, moves_rows=False):
        sent.append(moves_rows)
        with monkeypatch.context() as patch:
            patch.setattr(hosts, "_exists", lambda handle: moves_rows or handle.partition == 0)
            return run(self, work, source, timeout, checkpoints, events, progress, moves_rows)

    monkeypatch.setattr(SparkRunner, "_run", first_without_files)
    assert local().run(lambda: context().steps(1), data=np.zeros(5)) == [3, 3]
    assert sent == [False, True]


def test_a_process_that_does_not_exit_is_ended_when_all_results_are_there(monkeypatch):
    monkeypatch.setattr(groups, "EXIT_SECONDS", 0.1)
    assert local(1).run(lambda: threading.Thread(target=time.sleep, args=(60,)).start()) == [None]
