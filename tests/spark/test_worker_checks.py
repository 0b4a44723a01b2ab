"""Checks of the workers."""

import queue
import threading

import keras
import pytest

from sparkkeras.spark import probe
from sparkkeras.spark.worker_checks import equip


class Owner:
    """A SparkContext or session."""


def test_a_probe_blocks_only_other_probes_of_its_context():
    first, second, entered, free, probes = Owner(), Owner(), threading.Event(), threading.Event(), []

    def find():
        probes.append(1)
        entered.set()
        free.wait(10)
        return []

    threads = [threading.Thread(target=equip, args=(first, find, list)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    equip(second, list, list)
    assert all(thread.is_alive() for thread in threads), "the second one waits for the first probe"
    free.set()
    for thread in threads:
        thread.join(10)
    assert probes == [1]


@pytest.mark.parametrize(("environment", "loads"), [({"SPARKKERAS_WORKER": "1"}, True), ({"SPARKKERAS_FORKS": "1"}, False)])
def test_probed_workers_load_keras_unless_they_fork(monkeypatch, environment, loads):
    imported = queue.SimpleQueue()
    monkeypatch.setattr(probe.importlib, "import_module", imported.put)
    for name, value in ({"SPARKKERAS_WORKER": "1"} | environment).items():
        monkeypatch.setenv(name, value)
    threads = set(threading.enumerate())
    (found,) = probe.probe(backend=keras.backend.backend())
    assert found["missing"] == []
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
    assert imported.empty() is not loads
    if loads:
        assert imported.get() == "keras"


def test_a_folder_that_an_uninstalled_backend_has_left_does_not_count(monkeypatch, tmp_path):
    (tmp_path / "removed_backend" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = probe.probe(backend="removed_backend")
    assert found["missing"] == ["removed_backend"]
