"""A whole search without Spark: tasks over a local dataset, calls within the process, trials in this process."""

import time

import numpy as np
import pytest
from hyperopt import hp, rand

from sparkkeras.custom_code import ByValue
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local import LocalDataset, LocalRunning, LocalShared
from sparkkeras.errors import ConfigurationError, WorkerError
from sparkkeras.hyperopt import running
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import Limits, Suggested, TrialLedger, Worker
from sparkkeras.hyperopt.objective import Call
from sparkkeras.hyperopt.running import SearchTask, Work, supervise
from sparkkeras.hyperopt.service import PIECE_BYTES, LeaseLostError, Outcome, SearchClient, SearchService
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import OK
from sparkkeras.parameter.transport import Endpoint, RefusedError, make_transport
from sparkkeras.parameter.wire import Secret

SPACE = Space({"x": hp.uniform("x", -10, 10), "f": hp.choice("f", [abs, np.square])})
ENDPOINT = Endpoint("127.0.0.1", "127.0.0.1")


def ledger_of(journal=None, **limits):
    def suggest(number, trials):
        chosen = SPACE.suggest(rand.suggest, number, trials, number, 1.0)
        return Suggested(chosen, SPACE.params(chosen))

    return TrialLedger(
        suggest, Limits(**{"max_evals": 6, **limits}), time.monotonic, (), journal.write if journal else print
    )


def searched(objective, *, workers=2, read=None, data=None, start=LocalRunning, **limits):
    journal = Journal(None, None, 1.0)
    with journal.opened({}, SPACE.params):
        ledger = ledger_of(journal, **limits)
        work = Work(
            Call(ByValue.dump(objective, "objective"), True), ByValue.dump(SPACE.objects, "space"), 1.0, 0, read, False
        )
        service = SearchService(ledger, journal, SPACE.encode)
        with make_transport("inprocess").serve(service, ENDPOINT, Secret.fresh()) as address:
            task = SearchTask(LocalShared(work), LocalShared(data), address)
            supervise(LocalDataset((None,) * workers), task, ledger, start, lambda: None)
    return ledger


def test_trials_get_their_params_and_data():
    ledger = searched(lambda params, data: float(params["f"](params["x"])) + data, data=100)
    assert [trial.number for trial in ledger.finished] == list(range(6))
    assert all(trial.value == trial.params["f"](trial.params["x"]) + 100 for trial in ledger.finished)
    assert ledger.over


def test_data_that_is_read_there():
    assert searched(lambda params, data: data, read=ByValue.dump(lambda: 5, "data")).finished[0].value == 5
    with pytest.raises(ConfigurationError, match="reads the data failed: ZeroDivisionError"):
        searched(lambda params, data: data, read=ByValue.dump(lambda: 1 // 0, "data"))


def test_a_job_that_is_lost_is_begun_again_with_its_trials():
    jobs = []

    class Failing(LocalRunning):
        def __init__(self, call):
            jobs.append(call)
            super().__init__(call if len(jobs) > 1 else self.fail)

        def fail(self):
            raise WorkerError("a worker went away")

    assert len(searched(lambda params, data: 1.0, start=Failing).finished) == 6
    assert len(jobs) == 2


def test_jobs_that_are_lost_without_end():
    def start(call):
        def fail():
            raise WorkerError("a worker went away")

        return LocalRunning(fail)

    with pytest.raises(WorkerError, match="went away"):
        searched(lambda params, data: 1.0, start=start)


def test_a_worker_whose_code_fails_is_not_tried_again():
    jobs = []

    def start(call):
        def fail():
            jobs.append(call)
            raise WorkerError("it raised", "Traceback ...")

        return LocalRunning(fail)

    with pytest.raises(WorkerError, match="it raised"):
        searched(lambda params, data: 1.0, start=start)
    assert len(jobs) == 1


def test_an_interrupted_search_ends_its_job(monkeypatch):
    monkeypatch.setattr(running, "LEAVE_SECONDS", 0.5)

    def objective(params, data):
        time.sleep(0.05)
        return 1.0

    calls = []

    def tick():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    ledger = ledger_of(max_evals=10_000)
    work = Work(Call(ByValue.dump(objective, "objective"), True), ByValue.dump(SPACE.objects, "space"), 1.0, 0, None, False)
    service = SearchService(ledger, Journal(None, None, 1.0), SPACE.encode)
    with make_transport("inprocess").serve(service, ENDPOINT, Secret.fresh()) as address:
        task = SearchTask(LocalShared(work), LocalShared(None), address)
        with pytest.raises(KeyboardInterrupt):
            supervise(LocalDataset((None,)), task, ledger, LocalRunning, tick)
    assert ledger.running == []
    assert "interrupted" in ledger.reason


@pytest.fixture
def served(tmp_path):
    journal = Journal(str(tmp_path / "search"), 2, 1.0)
    with journal.opened({}, SPACE.params):
        ledger = ledger_of(journal)
        with make_transport("socket").serve(
            SearchService(ledger, journal, SPACE.encode), ENDPOINT, Secret.fresh()
        ) as address:
            yield ledger, journal, address


def test_models_travel_in_pieces_and_the_best_are_kept(served):
    ledger, journal, address = served
    model = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 5)
    with SearchClient(address, Worker("here/0")) as client:
        for value in (3.0, 1.0, 2.0, 5.0):
            assignment = client.ask()
            client.finish(assignment.lease, Outcome(OK, value, model=model, suffix="npz"))
        assert [journal.has_model(number) for number in range(4)] == [False, True, True, False]
        assert journal.model_file(1) == ("00001.npz", model)
        odd = client.ask()
        with pytest.raises(Exception, match="not understood"):
            client.finish(odd.lease, Outcome(OK, 0.5, model=b"...", suffix="../../evil"))
    assert [trial.value for trial in ledger.finished] == [3.0, 1.0, 2.0, 5.0]


def test_a_last_word_may_come_twice(served):
    ledger, _, address = served
    with SearchClient(address, Worker("here/0")) as client:
        assignment = client.ask()
        client.finish(assignment.lease, Outcome(OK, 3.0))
        client.finish(assignment.lease, Outcome(OK, 4.0))
    assert [trial.value for trial in ledger.finished] == [3.0]


def test_who_hangs_up_loses_the_trial_to_the_next_that_asks(served):
    ledger, _, address = served
    first = SearchClient(address, Worker("here/0"))
    lost = first.ask()
    first._caller.close()
    deadline = time.monotonic() + 10
    with SearchClient(address, Worker("here/1")) as second:
        while not any(held.doubted for held in ledger._state.leases.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        again = second.ask()
        assert again.number == lost.number
        with pytest.raises(LeaseLostError):
            first.renew(lost.lease)
        with pytest.raises(LeaseLostError):
            first.finish(lost.lease, Outcome(OK, 1.0))
        second.finish(again.lease, Outcome(OK, 2.0))
    first._caller.close()
    assert [(trial.value, trial.attempts, trial.worker) for trial in ledger.finished] == [(2.0, 2, "here/1")]


def test_calls_that_are_none(served):
    *_, address = served
    with SearchClient(address, Worker("here/0")) as client:
        for name, fields in [("report", {"lease": 1}), ("report", {"lease": "x", "epoch": 1, "loss": 1}), ("ask", {}), ("nothing", {})]:
            with pytest.raises(RefusedError):
                client._caller.call(name, fields)


def test_the_task_reads_its_rows_to_the_end(served):
    """Spark ends a worker process that leaves rows unread."""
    ledger, _, address = served
    ledger.stop("enough")
    work = Work(Call(ByValue.dump(abs, "objective"), False), ByValue.dump([], "space"), 1.0, 0, None, False)
    rows = iter([1, 2])
    assert list(SearchTask(LocalShared(work), LocalShared(None), address)(TaskContext(0), rows)) == []
    assert list(rows) == []
