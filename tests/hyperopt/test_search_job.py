"""A whole search without Spark, over a local dataset and with trials in this process; its calls, and what it saves."""

import signal
import threading
import time
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from hyperopt import hp
from optuna.samplers import RandomSampler

from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalDataset, LocalRunning, LocalShared
from sparkkeras.errors import ClusterError, ConfigurationError, DriverConnectionError, StorageError, WorkerError
from sparkkeras.hyperopt import search_job, service
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import CONTINUE, Limits, TrialLedger, Worker
from sparkkeras.hyperopt.objective import CallObjective
from sparkkeras.hyperopt.saving import TrialSaver, UploadedModel
from sparkkeras.hyperopt.search_job import MAX_FAILED_JOBS, SearchTask, TrialSettings, supervise
from sparkkeras.hyperopt.service import PIECE_BYTES, LeaseLostError, Outcome, SearchClient, SearchService
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import SearchStudy
from sparkkeras.hyperopt.trials import FAILED, OK, RUNNING, STOPPED, Trial
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc import service as calls
from sparkkeras.rpc.transport import Endpoint, make_transport
from sparkkeras.rpc.wire import Secret

SPACE = Space({"x": hp.uniform("x", -10, 10), "f": hp.choice("f", [abs, np.square])})
ENDPOINT = Endpoint("127.0.0.1", "127.0.0.1")


def ledger_of(saver, storage=None):
    """The ledger of a search with random suggestions."""
    study = SearchStudy(SPACE, {"loss": 1.0}, RandomSampler(1), storage=storage)
    return TrialLedger(study, Limits(max_evals=6), time.monotonic, save=saver.save)


def settings_of(objective):
    call = CallObjective(ByValue.dump(objective, "objective"), True)
    return TrialSettings(call, ByValue.dump(SPACE.objects, "space"), {"loss": 1.0}, 0, in_child_processes=False)


def run_search(objective, *, data=None, start=LocalRunning, tick=lambda: None):
    journal = Journal(None, None, 1.0)
    saver = TrialSaver(journal)
    with ExitStack() as stack:
        ledger = ledger_of(saver, stack.enter_context(journal.opened()))
        stack.enter_context(saver.running(ledger))
        handler = SearchService(ledger, journal, SPACE.encode)
        address = stack.enter_context(make_transport("inprocess").serve(handler, ENDPOINT, Secret.fresh()))
        task = SearchTask(LocalShared(settings_of(objective)), LocalShared(data), address)
        supervise(LocalDataset((None, None)).run, task, ledger, start, tick)
    return ledger


@pytest.mark.parametrize(
    ("error", "fails", "count"),
    [
        (WorkerError("it went away"), 1, 2),
        (WorkerError("it went away"), 99, MAX_FAILED_JOBS + 1),
        (WorkerError("it raised", "Traceback"), 1, 1),
    ],
    ids=["lost once", "lost again and again", "raised"],
)
def test_the_trials_of_a_lost_job_run_in_a_new_job(error, fails, count):
    jobs = []

    def start(call):
        def run():
            jobs.append(call)
            if len(jobs) <= fails:
                raise error
            return call()

        return LocalRunning(run)

    with nullcontext() if fails < count else pytest.raises(WorkerError, match="it"):
        assert len(run_search(lambda params, data: 1.0, start=start).finished) == 6
    assert len(jobs) == count


def test_a_worker_that_still_starts_when_all_trials_have_ended_is_cancelled(monkeypatch):
    """As one that replaces a lost worker, and reads the data of the search."""
    monkeypatch.setattr(search_job, "SHUTDOWN_SECONDS", 0.2)
    cancelled = threading.Event()

    class Slow(LocalRunning):
        def __init__(self, call):
            def slow():
                call()
                assert cancelled.wait(20)
                raise ClusterError("the Spark job was cancelled")

            super().__init__(slow)

        def cancel(self):
            cancelled.set()

    assert len(run_search(lambda params, data: 1.0, start=Slow).finished) == 6
    assert cancelled.is_set()


def test_the_search_replaces_pysparks_interrupt_handler_and_no_other():
    """PySpark's handler would cancel all jobs before it raises."""

    def pysparks(number, frame):
        raise AssertionError("the jobs are cancelled")

    def own(number, frame):
        pass

    pysparks.__module__ = "pyspark.core.context"
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler, during in ((pysparks, signal.default_int_handler), (own, own)):
            seen = set()
            signal.signal(signal.SIGINT, handler)
            run_search(lambda params, data: 1.0, tick=lambda seen=seen: seen.add(signal.getsignal(signal.SIGINT)))
            assert seen == {during}
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_job_is_not_cancelled_during_an_upload(monkeypatch):
    monkeypatch.setattr(search_job, "SHUTDOWN_SECONDS", 0.06)
    monkeypatch.setattr(search_job, "TICK_SECONDS", 0.01)
    ledger = ledger_of(TrialSaver(Journal(None, None, 1.0)))
    lease = ledger.ask(Worker("here/0")).lease
    ledger.extend_for_upload(lease)
    ledger.stop("enough")
    ticks, cancelled = [], []

    def tick():
        ticks.append(1)
        if len(ticks) == 20:
            ledger.renew(lease)

    def cancel():
        job.done = True
        cancelled.append(len(ticks))

    job = SimpleNamespace(done=False, cancel=cancel, result=lambda: None)
    supervise(lambda task: SimpleNamespace(collect=None), None, ledger, lambda call: job, tick)
    assert cancelled[0] >= 25


@pytest.fixture
def served(tmp_path):
    """The ledger, the journal and the address of a search."""
    journal = Journal(str(tmp_path / "search"), 2, 1.0)
    saver = TrialSaver(journal)
    with journal.opened() as storage:
        ledger = ledger_of(saver, storage)
        handler = SearchService(ledger, journal, SPACE.encode)
        with (
            saver.running(ledger),
            make_transport("socket").serve(handler, ENDPOINT, Secret.fresh()) as address,
        ):
            yield ledger, journal, address


@pytest.fixture
def client(served):
    with SearchClient(served[2], Worker("here/0")) as client:
        yield client


def run_trial(client, ledger, *given, **fields):
    """Run a trial with this outcome, and wait until it is saved; returns its lease."""
    lease = client.ask().lease
    client.finish(lease, Outcome(*given, **fields))
    deadline = time.monotonic() + 10
    while ledger.is_saving:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return lease


def test_models_are_uploaded_in_pieces_and_the_best_are_kept(served, client):
    ledger, journal, _ = served
    model = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 5)
    for value in (3.0, 1.0, 2.0, 5.0):
        lease = run_trial(client, ledger, OK, value, model=model, suffix="npz")
        assert not journal.draft(lease).exists()
    assert [journal.has_model(number) for number in range(4)] == [False, True, True, False]
    assert journal.model_file(1) == ("00001.npz", model)
    assert [trial.value for trial in ledger.finished] == [3.0, 1.0, 2.0, 5.0]


def test_a_repeated_piece_of_a_model_leaves_later_pieces_unchanged(served, client):
    """The driver may handle the first call, to which the worker got no reply, after the repeated one."""
    ledger, journal, _ = served
    lease = client.ask().lease
    for start, piece in ((0, b"one,"), (4, b"two"), (0, b"one,")):
        client._call("model", {"lease": lease, "start": start}, (piece,))
    client.finish(lease, Outcome(OK, 3.0, suffix="npz"))
    run_trial(client, ledger, OK, 4.0)
    assert journal.model_file(0) == ("00000.npz", b"one,two")


def test_too_large_results_are_left_out(served, client, monkeypatch):
    monkeypatch.setattr(service, "OUTCOME_BYTES", 1000)
    run_trial(client, served[0], OK, 3.0, 1, {"loss": [0.25] * 1000}, error="diverged", extra={"a": 1})
    (trial,) = served[0].finished
    assert (trial.value, trial.best_epoch, trial.history, trial.extra) == (3.0, 1, {}, {})
    assert trial.error.startswith("diverged; its history")


def test_a_repeated_result_of_a_trial_counts_once(served, client):
    ledger, _, _ = served
    lease = client.ask().lease
    client.finish(lease, Outcome(OK, 0.5))
    client.finish(lease, Outcome(OK, 0.75))  # of a client that got no reply
    run_trial(client, ledger, OK, 0.25)
    assert [trial.value for trial in ledger.finished] == [0.5, 0.25]


def test_a_copy_of_a_worker_gets_the_lost_trial_of_that_worker(served, client, monkeypatch):
    ledger, _, address = served

    def lose(seconds):
        client.release(assignments[3].lease, "it was killed")

    monkeypatch.setattr(calls, "time", SimpleNamespace(sleep=lose, monotonic=time.monotonic))  # other threads keep theirs
    with SearchClient(address, Worker("b/0", attempt=1)) as copy:
        assignments = [client.ask() for _ in range(6)]
        assert copy.ask().number == 3
    assert len(ledger.running) == 6
    with pytest.raises(LeaseLostError):
        client.renew(assignments[3].lease)


def test_a_definition_error_ends_the_search_if_no_trial_has_a_value_yet(served, client):
    ledger, _, _ = served
    run_trial(client, ledger, FAILED, error="it raised")
    assert ledger.reason == ""
    run_trial(client, ledger, FAILED, error="no such metric", traceback="Tr", is_definition_error=True)
    assert client.ask() is None
    assert isinstance(ledger.failure, ConfigurationError)
    assert str(ledger.failure) == "no such metric\n\nTr"


def test_a_definition_error_after_successful_trials_only_fails_its_trial(served, client):
    ledger, _, _ = served
    run_trial(client, ledger, OK, 0.5)
    run_trial(client, ledger, FAILED, error="no such metric", is_definition_error=True)
    assert client.ask().number == 2
    assert ledger.failure is None
    assert [trial.status for trial in ledger.finished] == [OK, FAILED]


def test_a_model_with_another_suffix_is_refused_and_its_draft_removed(served, client):
    ledger, journal, _ = served
    lease = client.ask().lease
    with pytest.raises(DriverConnectionError):
        client.finish(lease, Outcome(OK, 0.25, model=b"odd", suffix="../../evil"))
    assert not journal.draft(lease).exists()
    assert ledger.finished == []


def test_a_trial_that_is_stopped_while_the_search_continues_runs_again(served, client):
    """Its machine is probably being shut down. It may get another value then, so it leaves no model."""
    ledger, journal, _ = served
    run_trial(client, ledger, OK, 0.5, model=b"good", suffix="npz")
    lost = client.ask()
    client.report(lost.lease, 1, 0.25)
    client.finish(lost.lease, Outcome(STOPPED, 0.1, model=b"half", suffix="npz"))
    assert [journal.has_model(number) for number in range(2)] == [True, False]
    assert not journal.draft(lost.lease).exists()
    assert client.ask().number == lost.number
    (trial,) = ledger.running
    assert (trial.attempts, trial.intermediate_values, trial.status, trial.value) == (2, (), RUNNING, None)


def test_a_worker_that_disconnects_loses_its_trial_to_the_next_that_asks(served, client):
    ledger, _, address = served
    with SearchClient(address, Worker("here/1")) as first:
        lost = first.ask()
    deadline = time.monotonic() + 10
    while ledger._leases.is_held(lost.number):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert client.ask().number == lost.number


def test_the_task_consumes_all_its_rows(served):
    """Spark ends a Python worker that leaves rows unread."""
    ledger, _, address = served
    ledger.stop("enough")
    rows = iter([1, 2])
    assert list(SearchTask(LocalShared(settings_of(abs)), LocalShared(None), address)(TaskContext(0), rows)) == []
    assert list(rows) == []


# Saving


class Storage:
    """A journal that records what the saver writes; a test may let it fail or wait."""

    flush_seconds = 60.0

    def __init__(self):
        self.calls, self.failing, self.is_open = [], "", threading.Event()
        self.is_open.set()

    def __getattr__(self, name):
        def call(*given):
            assert self.is_open.wait(10)
            self.calls.append((name, *(each.number if isinstance(each, Trial) else each for each in given[:1])))
            if name == self.failing:
                raise StorageError("no space left")

        return call


@pytest.fixture
def storage():
    return Storage()


@pytest.fixture
def saver(storage):
    return TrialSaver(storage)


@pytest.fixture
def ledger(saver):
    return ledger_of(saver)


def end(ledger, draft=None):
    """Run a trial; returns whether its model will be saved."""
    assignment = ledger.ask(Worker(f"w{len(ledger.running)}"))
    model = None if draft is None else UploadedModel(draft, "npz")
    return ledger.finish(assignment.lease, Trial(assignment.number, {}, OK, 0.5), model)


def test_a_model_is_saved_before_its_trial_and_surplus_models_are_removed_last(ledger, saver, storage, tmp_path):
    draft = tmp_path / "1.draft"
    draft.touch()
    with saver.running(ledger):
        assert end(ledger, draft)
        end(ledger)
    written = [("flush",), ("count_model", 0), ("drop_surplus",), ("flush",), ("count_model", 1), ("drop_surplus",)]
    written += [("flush",)]  # with the reports since
    assert storage.calls == [("flush",), ("keep_model", 0), *written]  # a folder of models without a journal is not ours
    assert [trial.state.name for trial in ledger.study.trials] == ["COMPLETE", "COMPLETE"]
    assert not draft.exists()


@pytest.mark.parametrize("step", ["flush", "keep_model"])
def test_an_error_of_the_storage_ends_the_search(ledger, saver, storage, step, tmp_path):
    storage.failing = step
    storage.is_open.clear()
    with saver.running(ledger):
        end(ledger, tmp_path / "1.draft")
        end(ledger)
        storage.is_open.set()
    assert storage.calls[-1][0] == step
    assert ("count_model", 1) not in storage.calls
    assert ledger.reason == "StorageError: no space left"
    assert [trial.number for trial in ledger.finished] == [0, 1]
    assert not ledger.is_saving


def test_an_interrupt_of_the_last_wait_cancels_what_is_left(ledger, saver, storage, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    storage.is_open.clear()
    with ExitStack() as stack:
        stack.enter_context(saver.running(ledger))
        (thread,) = (each for each in threading.enumerate() if each.name == "sparkkeras-save-trials")
        end(ledger)
        end(ledger)
        with monkeypatch.context() as patch:
            patch.setattr(thread, "join", interrupt)
            with pytest.raises(KeyboardInterrupt):
                stack.close()
    storage.is_open.set()
    thread.join(10)
    assert not thread.is_alive()
    assert ("count_model", 1) not in storage.calls


def test_reports_of_running_trials_are_written_meanwhile_without_blocking_calls(ledger, saver, storage):
    storage.flush_seconds = 0.01
    lease = ledger.ask(Worker("a")).lease
    with saver.running(ledger):
        while storage.calls.count(("flush",)) < 3:
            time.sleep(0.01)
        storage.is_open.clear()  # a write that takes long
        time.sleep(0.05)
        assert ledger.report(lease, 1, 0.5) == ledger.renew(lease) == CONTINUE
        assert ledger.ask(Worker("b")) is not None
        storage.failing = "flush"
        storage.is_open.set()
        while ledger.failure is None:
            time.sleep(0.01)
    assert ledger.reason == "StorageError: no space left"
