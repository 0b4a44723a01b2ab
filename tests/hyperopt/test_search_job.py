"""A whole search without Spark: tasks over a local dataset, an in-process transport, trials in this process."""

import signal
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from hyperopt import hp
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalDataset, LocalRunning, LocalShared
from sparkkeras.errors import ClusterError, ConfigurationError, DriverConnectionError, WorkerError
from sparkkeras.hyperopt import report, search_job, service
from sparkkeras.hyperopt.journal import Journal, JournalBackend
from sparkkeras.hyperopt.ledger import CONTINUE, STOP, Limits, TrialLedger, Worker
from sparkkeras.hyperopt.objective import CallObjective
from sparkkeras.hyperopt.saving import TrialSaver
from sparkkeras.hyperopt.search_job import SearchTask, TrialSettings, supervise
from sparkkeras.hyperopt.service import PIECE_BYTES, LeaseLostError, Outcome, SearchClient, SearchService
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import SearchStudy
from sparkkeras.hyperopt.trials import FAILED, OK, STOPPED
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc import service as calls
from sparkkeras.rpc.transport import Endpoint, RefusedError, make_transport
from sparkkeras.rpc.wire import Secret
from sparkkeras.spark import filesystem

SPACE = Space({"x": hp.uniform("x", -10, 10), "f": hp.choice("f", [abs, np.square])})
ENDPOINT = Endpoint("127.0.0.1", "127.0.0.1")


def ledger_of(saver, storage=None, **limits):
    """The ledger of a search with random suggestions."""
    study = SearchStudy(SPACE, {"loss": 1.0}, RandomSampler(1), storage=storage)
    return TrialLedger(study, Limits(**{"max_evals": 6, **limits}), time.monotonic, save=saver.save)


def saved_trials(journal):
    """The states of the trials in the folder of a search."""
    study = optuna.load_study(study_name="sparkkeras", storage=JournalStorage(JournalBackend(journal.folder)))
    return [trial.state.name for trial in study.trials]


def run_search(
    objective,
    *,
    workers=2,
    read=None,
    data=None,
    start=LocalRunning,
    tick=lambda: None,
    journal=None,
    transport="inprocess",
    timeout_of_calls=30.0,
    **limits,
):
    journal = journal or Journal(None, None, 1.0)
    saver = TrialSaver(journal)
    with ExitStack() as stack:
        storage = stack.enter_context(journal.opened())
        ledger = ledger_of(saver, storage, **limits)
        stack.enter_context(saver.running(ledger))
        work = TrialSettings(
            CallObjective(ByValue.dump(objective, "objective"), True),
            ByValue.dump(SPACE.objects, "space"),
            {"loss": 1.0},
            0,
            read,
            False,
        )
        handler = SearchService(ledger, journal, SPACE.encode)
        with make_transport(transport).serve(handler, ENDPOINT, Secret.fresh()) as address:
            task = SearchTask(LocalShared(work), LocalShared(data), replace(address, timeout=timeout_of_calls))
            supervise(LocalDataset((None,) * workers).run, task, ledger, start, tick)
    return ledger


def test_trials_receive_params_and_data():
    ledger = run_search(lambda params, data: float(params["f"](params["x"])) + data, data=100)
    assert [trial.number for trial in ledger.finished] == list(range(6))
    assert all(trial.value == trial.params["f"](trial.params["x"]) + 100 for trial in ledger.finished)
    assert ledger.is_over


def test_workers_can_read_the_data():
    assert run_search(lambda params, data: data, read=ByValue.dump(lambda: 5, "data")).finished[0].value == 5
    with pytest.raises(ConfigurationError, match="reads the data failed: ZeroDivisionError"):
        run_search(lambda params, data: data, read=ByValue.dump(lambda: 1 // 0, "data"))


def test_the_trials_of_a_lost_job_run_in_a_new_job():
    jobs = []

    class Failing(LocalRunning):
        def __init__(self, call):
            jobs.append(call)
            super().__init__(call if len(jobs) > 1 else self.fail)

        def fail(self):
            raise WorkerError("a worker went away")

    assert len(run_search(lambda params, data: 1.0, start=Failing).finished) == 6
    assert len(jobs) == 2


def test_the_search_fails_after_too_many_lost_jobs():
    def start(call):
        def fail():
            raise WorkerError("a worker went away")

        return LocalRunning(fail)

    with pytest.raises(WorkerError, match="went away"):
        run_search(lambda params, data: 1.0, start=start)


def test_a_job_whose_code_raises_is_not_retried():
    jobs = []

    def start(call):
        def fail():
            jobs.append(call)
            raise WorkerError("it raised", "Traceback ...")

        return LocalRunning(fail)

    with pytest.raises(WorkerError, match="it raised"):
        run_search(lambda params, data: 1.0, start=start)
    assert len(jobs) == 1


def test_an_interrupted_search_ends_its_job(monkeypatch):
    monkeypatch.setattr(search_job, "SHUTDOWN_SECONDS", 0.5)

    def objective(params, data):
        time.sleep(0.05)
        return 1.0

    calls, cancelled = [], []

    class Watched(LocalRunning):
        def cancel(self):
            cancelled.append(self)

    def tick():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    journal = Journal(None, None, 1.0)
    saver = TrialSaver(journal)
    ledger = ledger_of(saver, max_evals=10_000)
    work = TrialSettings(
        CallObjective(ByValue.dump(objective, "objective"), True),
        ByValue.dump(SPACE.objects, "space"),
        {"loss": 1.0},
        0,
        None,
        False,
    )
    handler = SearchService(ledger, journal, SPACE.encode)
    with (
        journal.opened(),
        saver.running(ledger),
        make_transport("inprocess").serve(handler, ENDPOINT, Secret.fresh()) as address,
    ):
        task = SearchTask(LocalShared(work), LocalShared(None), address)
        with pytest.raises(KeyboardInterrupt):
            supervise(LocalDataset((None,)).run, task, ledger, Watched, tick)
    assert cancelled
    assert ledger.running == []
    assert "interrupted" in ledger.reason


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

    ledger = run_search(lambda params, data: 1.0, start=Slow)
    assert cancelled.is_set()
    assert len(ledger.finished) == 6


def test_the_search_replaces_pysparks_interrupt_handler():
    """PySpark's handler would cancel all jobs before it raises."""
    seen = []

    def pyspark_handler(number, frame):
        raise AssertionError("the jobs are cancelled")

    def record_handler():
        seen.append(signal.getsignal(signal.SIGINT))

    pyspark_handler.__module__ = "pyspark.core.context"
    before = signal.signal(signal.SIGINT, pyspark_handler)
    try:
        run_search(lambda params, data: 1.0, tick=record_handler)
        assert set(seen) == {signal.default_int_handler}
        assert signal.getsignal(signal.SIGINT) is pyspark_handler
        signal.signal(signal.SIGINT, record_handler)  # another handler is left in place
        del seen[:]
        run_search(lambda params, data: 1.0, tick=record_handler)
        assert set(seen) == {record_handler}
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_job_is_not_cancelled_during_an_upload(monkeypatch):
    monkeypatch.setattr(search_job, "SHUTDOWN_SECONDS", 0.3)
    monkeypatch.setattr(search_job, "TICK_SECONDS", 0.05)
    ledger = ledger_of(TrialSaver(Journal(None, None, 1.0)))
    lease = ledger.ask(Worker("here/0")).lease
    ledger.extend_for_upload(lease)
    ledger.stop("enough")
    ticks, cancelled = [], []

    class UploadingJob:
        done = False

        def cancel(self):
            self.done = True
            cancelled.append(len(ticks))

        def result(self):
            pass

    def tick():
        ticks.append(1)
        if len(ticks) == 20:
            ledger.renew(lease)

    search_job._watch(UploadingJob(), ledger, tick)
    assert cancelled[0] >= 25


@pytest.fixture
def served(tmp_path):
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


def finish(client, ledger, lease, outcome):
    """Finish a trial, and wait until it is saved."""
    client.finish(lease, outcome)
    deadline = time.monotonic() + 10
    while ledger.is_saving:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_models_are_uploaded_in_pieces_and_the_best_are_kept(served):
    ledger, journal, address = served
    model = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 5)
    with SearchClient(address, Worker("here/0")) as client:
        for value in (3.0, 1.0, 2.0, 5.0):
            assignment = client.ask()
            finish(client, ledger, assignment.lease, Outcome(OK, value, model=model, suffix="npz"))
        assert [journal.has_model(number) for number in range(4)] == [False, True, True, False]
        assert journal.model_file(1) == ("00001.npz", model)
        invalid = client.ask()
        with pytest.raises(Exception, match="has the suffix '../../evil'; expected one of"):
            client.finish(invalid.lease, Outcome(OK, 0.5, model=b"...", suffix="../../evil"))
    assert [trial.value for trial in ledger.finished] == [3.0, 1.0, 2.0, 5.0]


def test_a_repeated_piece_of_a_model_leaves_later_pieces_unchanged(served):
    """The driver may handle the first call, to which the worker got no reply, after the repeated one."""
    ledger, journal, address = served
    with SearchClient(address, Worker("here/0")) as client:
        lease = client.ask().lease
        for start, piece in ((0, b"one,"), (4, b"two"), (0, b"one,")):
            client._call("model", {"lease": lease, "start": start}, (piece,))
        finish(client, ledger, lease, Outcome(OK, 3.0, suffix="npz"))
    assert journal.model_file(0) == ("00000.npz", b"one,two")


def test_too_large_results_are_left_out(served, monkeypatch):
    monkeypatch.setattr(service, "OUTCOME_BYTES", 1000)
    ledger, _, address = served
    with SearchClient(address, Worker("here/0")) as client:
        outcome = Outcome(OK, 3.0, 1, {"loss": [0.25] * 1000}, error="diverged", extra={"a": 1})
        finish(client, ledger, client.ask().lease, outcome)
    (trial,) = ledger.finished
    assert (trial.value, trial.best_epoch, trial.history, trial.extra) == (3.0, 1, {}, {})
    assert trial.error.startswith("diverged; its history and its extra results are too large to be kept (6,")


def test_workers_do_not_wait_for_slow_storage(tmp_path, monkeypatch):
    """Storage takes longer than a call may: no worker fails, no trial is repeated, and all are saved in the end."""
    append, writes = JournalFileBackend.append_logs, []

    def slow_append(self, logs):
        writes.append(logs)
        time.sleep(0.8 if len(writes) == 2 else 0.0)
        append(self, logs)

    def objective(params, data):
        report(1.0)
        return 1.0

    journal, jobs = Journal(str(tmp_path / "search"), None, 1.0), []
    monkeypatch.setattr(JournalFileBackend, "append_logs", slow_append)
    ledger = run_search(
        objective,
        journal=journal,
        start=lambda call: jobs.append(call) or LocalRunning(call),
        transport="socket",
        timeout_of_calls=0.4,
        max_evals=4,
        lease_seconds=0.2,
    )
    assert len(jobs) == 1
    assert [(trial.number, trial.attempts, trial.status) for trial in ledger.finished] == [(n, 1, OK) for n in range(4)]
    assert saved_trials(journal) == ["COMPLETE"] * 4


def test_a_call_waits_for_no_write(served, monkeypatch):
    """Neither of its own model nor of any other trial."""
    ledger, journal, address = served
    can_write = threading.Event()
    put_file, append = filesystem.put_file, JournalFileBackend.append_logs
    monkeypatch.setattr(filesystem, "put_file", lambda *given: can_write.wait(10) and put_file(*given))
    monkeypatch.setattr(JournalFileBackend, "append_logs", lambda *given: can_write.wait(10) and append(*given))
    address = replace(address, timeout=2.0)
    with SearchClient(address, Worker("a/0")) as one, SearchClient(address, Worker("b/1", 1)) as other:
        first, second = one.ask(), other.ask()
        one.finish(first.lease, Outcome(OK, 0.5, model=b"one", suffix="npz"))
        assert (other.report(second.lease, 1, 0.5), other.renew(second.lease)) == (CONTINUE, CONTINUE)
        other.finish(second.lease, Outcome(OK, 0.25, model=b"two", suffix="npz"))
        one.finish(first.lease, Outcome(OK, 0.5))  # the repeated call of a client that got no reply
        assert ledger.finished == []
        can_write.set()
        assert (one.ask().number, other.ask().number) == (2, 3)
    assert [trial.value for trial in ledger.finished] == [0.5, 0.25]
    assert journal.model_file(0) == ("00000.npz", b"one")


def test_finish_may_be_repeated(served):
    ledger, _, address = served
    with SearchClient(address, Worker("here/0")) as client:
        assignment = client.ask()
        finish(client, ledger, assignment.lease, Outcome(OK, 3.0))
        finish(client, ledger, assignment.lease, Outcome(OK, 4.0))
    assert [trial.value for trial in ledger.finished] == [3.0]


def test_reports_of_an_epoch_are_recorded_once(served):
    ledger, _, address = served
    with SearchClient(address, Worker("here/0")) as client:
        lease = client.ask().lease
        assert [client.report(lease, epoch, loss) for epoch, loss in ((1, 0.5), (1, 0.5), (3, 0.25))] == [CONTINUE] * 3
        assert [trial.intermediate_values for trial in ledger.running] == [(0.5, 0.5, 0.25)]
        ledger.stop("enough")
        assert client.report(lease, 4, 0.1) == STOP


def replace_sleep(monkeypatch, sleep):
    """Have the clients call ``sleep``; other threads of the process, such as those of py4j, keep theirs."""
    monkeypatch.setattr(calls, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


def test_a_copy_of_a_worker_waits_until_the_worker_has_no_trial(served, monkeypatch):
    ledger, _, address = served
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            for assignment in assignments:
                finish(first, ledger, assignment.lease, Outcome(OK, 1.0))

    replace_sleep(monkeypatch, wait)
    with (
        SearchClient(address, Worker("a/0", task=0, attempt=0)) as first,
        SearchClient(address, Worker("b/0", task=0, attempt=1)) as copy,
        SearchClient(address, Worker("c/1", task=1)) as other,
    ):
        assignments = [first.ask() for _ in range(6)]
        assert other.ask() is None
        assert waits == []
        assert copy.ask() is None
        assert len(waits) == 2
    assert len(ledger.finished) == 6


def test_a_copy_of_a_worker_gets_the_lost_trial_of_that_worker(served, monkeypatch):
    ledger, _, address = served
    replace_sleep(monkeypatch, lambda seconds: first.release(assignments[3].lease, "it was killed"))
    with SearchClient(address, Worker("a/0")) as first, SearchClient(address, Worker("b/0", attempt=1)) as copy:
        assignments = [first.ask() for _ in range(6)]
        assert copy.ask().number == 3
    assert len(ledger.running) == 6


def test_a_definition_error_ends_the_search_if_no_trial_has_a_value_yet(served):
    ledger, _, address = served
    with SearchClient(address, Worker("here/0")) as client:
        client.finish(client.ask().lease, Outcome(FAILED, error="it raised"))
        assert ledger.reason == ""
        client.finish(client.ask().lease, Outcome(FAILED, error="no such metric", traceback="Tr", is_definition_error=True))
        assert client.ask() is None
    assert isinstance(ledger.failure, ConfigurationError)
    assert str(ledger.failure) == "no such metric\n\nTr"


def test_a_definition_error_after_successful_trials_only_fails_its_trial(served):
    ledger, _, address = served
    with SearchClient(address, Worker("here/0")) as client:
        finish(client, ledger, client.ask().lease, Outcome(OK, 0.5))
        finish(client, ledger, client.ask().lease, Outcome(FAILED, error="no such metric", is_definition_error=True))
        assert client.ask().number == 2
    assert ledger.failure is None
    assert [trial.status for trial in ledger.finished] == [OK, FAILED]


def test_drafts_are_removed_when_their_trial_has_ended(served):
    ledger, journal, address = served
    with SearchClient(address, Worker("here/0")) as client:
        for outcome in (
            Outcome(OK, 0.5, model=b"kept", suffix="npz"),
            Outcome(OK, 0.25, model=b"odd", suffix="exe"),
            Outcome(OK, 0.75, model=b"kept", suffix="keras"),
        ):
            lease = client.ask().lease
            with suppress(DriverConnectionError):
                finish(client, ledger, lease, outcome)
            assert not journal.draft(lease).exists()


def test_a_trial_that_is_stopped_while_the_search_continues_leaves_no_model(served):
    """It runs again, and may get another value then."""
    ledger, journal, address = served
    with SearchClient(address, Worker("here/0")) as client:
        for value in (0.5, 0.4):
            finish(client, ledger, client.ask().lease, Outcome(OK, value, model=b"good", suffix="npz"))
        lost = client.ask()
        client.finish(lost.lease, Outcome(STOPPED, 0.1, model=b"half", suffix="npz"))
        assert [journal.has_model(number) for number in range(3)] == [True, True, False]
        again = client.ask()
        assert again.number == lost.number
        assert not journal.draft(lost.lease).exists()
        finish(client, ledger, again.lease, Outcome(OK, 0.9, model=b"bad", suffix="npz"))
        assert [journal.has_model(number) for number in range(3)] == [True, True, False]
    assert [trial.value for trial in ledger.finished] == [0.5, 0.4, 0.9]


def test_a_trial_that_is_stopped_with_the_search_removes_no_other_model(served):
    """It is not written, so a resumed search has the others."""
    ledger, journal, address = served
    with SearchClient(address, Worker("here/0")) as client:
        for value in (0.5, 0.4):
            finish(client, ledger, client.ask().lease, Outcome(OK, value, model=b"good", suffix="npz"))
        lease = client.ask().lease
        ledger.stop("enough")
        finish(client, ledger, lease, Outcome(STOPPED, 0.1, model=b"half", suffix="npz"))
    assert journal.model_file(2) == ("00002.npz", b"half")
    assert saved_trials(journal)[:2] == ["COMPLETE", "COMPLETE"]
    assert "COMPLETE" not in saved_trials(journal)[2:]
    assert [journal.has_model(number) for number in range(2)] == [True, True]


def test_a_worker_that_disconnects_loses_its_trial_to_the_next_that_asks(served):
    ledger, _, address = served
    first = SearchClient(address, Worker("here/0"))
    lost = first.ask()
    first._caller.close()
    deadline = time.monotonic() + 10
    with SearchClient(address, Worker("here/1")) as second:
        while ledger._leases.is_held(lost.number) and time.monotonic() < deadline:
            time.sleep(0.01)
        again = second.ask()
        assert again.number == lost.number
        with pytest.raises(LeaseLostError):
            first.renew(lost.lease)
        with pytest.raises(LeaseLostError):
            first.finish(lost.lease, Outcome(OK, 1.0))
        finish(second, ledger, again.lease, Outcome(OK, 2.0))
    first._caller.close()
    assert [(trial.value, trial.attempts, trial.worker) for trial in ledger.finished] == [(2.0, 2, "here/1")]


def test_malformed_and_unknown_calls_are_rejected(served):
    *_, address = served
    with SearchClient(address, Worker("here/0")) as client:
        for name, fields in [
            ("report", {"lease": 1}),
            ("report", {"lease": 1, "value": 1}),
            ("report", {"lease": "x", "epoch": 1, "value": 1}),
            ("ask", {}),
            ("ask", {"worker": "here/0"}),
            ("nothing", {}),
        ]:
            with pytest.raises(RefusedError):
                client._caller.call(name, fields)


def test_the_task_consumes_all_its_rows(served):
    """Spark ends a Python worker that leaves rows unread."""
    ledger, _, address = served
    ledger.stop("enough")
    work = TrialSettings(
        CallObjective(ByValue.dump(abs, "objective"), False), ByValue.dump([], "space"), {"loss": 1.0}, 0, None, False
    )
    rows = iter([1, 2])
    assert list(SearchTask(LocalShared(work), LocalShared(None), address)(TaskContext(0), rows)) == []
    assert list(rows) == []
