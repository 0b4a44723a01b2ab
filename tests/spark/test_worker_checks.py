"""Checks of the workers."""

import threading

import pytest

from sparkkeras import ClusterError
from sparkkeras.spark import probe
from sparkkeras.spark.worker_checks import check_workers, equip


class Owner:
    """A SparkContext or session."""


def test_a_probe_blocks_only_other_probes_of_its_context():
    first, second, entered, free, probes = Owner(), Owner(), threading.Event(), threading.Event(), []

    def find():
        probes.append(1)
        entered.set()
        free.wait(10)
        return []

    threads = [threading.Thread(target=equip, args=(first, find, list, "jax")) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    equip(second, list, list, "jax")
    assert all(thread.is_alive() for thread in threads), "the second one waits for the first probe"
    free.set()
    for thread in threads:
        thread.join(10)
    assert probes == [1]


def test_a_folder_that_an_uninstalled_backend_has_left_does_not_count(monkeypatch, tmp_path):
    (tmp_path / "removed_backend" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = probe.probe(backend="removed_backend")
    assert found["missing"][-1] == "removed_backend"


def test_a_backend_that_a_worker_lacks_is_named_with_its_host():
    found = [{**next(probe.probe()), "host": "node7", "missing": ["torch", "openvino"]}]
    check_workers(found, "jax")
    with pytest.raises(ClusterError, match="openvino.*node7.*pip install openvino"):
        check_workers(found, "openvino")
