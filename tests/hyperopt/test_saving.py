"""Trials and models that are saved in the background; tests/hyperopt/test_search_job.py saves those of whole searches."""

import threading
import time
from contextlib import ExitStack

import pytest
from optuna.samplers import RandomSampler

from sparkkeras.errors import StorageError
from sparkkeras.hyperopt.distributions import uniform
from sparkkeras.hyperopt.ledger import CONTINUE, Limits, TrialLedger, Worker
from sparkkeras.hyperopt.saving import TrialSaver, UploadedModel
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import SearchStudy
from sparkkeras.hyperopt.trials import OK, Trial


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
    study = SearchStudy(Space({"x": uniform(0, 1)}), {"loss": 1.0}, RandomSampler(1))
    return TrialLedger(study, Limits(), lambda: 0.0, save=saver.save)


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


@pytest.mark.parametrize("step", ["flush", "keep_model", "count_model", "drop_surplus"])
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
