"""A resumed soak run skips the tests that have passed, unless the sources have changed."""

import sys
from types import SimpleNamespace

import pytest

from tests import soak
from tests.conftest import Finished


def report(nodeid, when, outcome="passed"):
    return SimpleNamespace(nodeid=nodeid, when=when, outcome=outcome)


def test_only_tests_with_a_passed_teardown_are_recorded_as_finished(tmp_path):
    finished = Finished(tmp_path / "finished")
    outcomes = {
        "passes": {"setup": "passed", "call": "passed", "teardown": "passed"},
        "is expected to fail": {"setup": "passed", "call": "skipped", "teardown": "passed"},
        "fails in teardown": {"setup": "passed", "call": "passed", "teardown": "failed"},
        "fails": {"setup": "passed", "call": "failed", "teardown": "passed"},
        "fails in setup": {"setup": "failed", "teardown": "passed"},
        "is skipped": {"setup": "skipped", "teardown": "passed"},
        "is interrupted": {"setup": "passed", "call": "passed"},
    }
    for when in ("setup", "call", "teardown"):  # reports of several processes are interleaved
        for nodeid, phases in outcomes.items():
            if when in phases:
                finished.pytest_runtest_logreport(report(nodeid, when, phases[when]))
    assert (tmp_path / "finished").read_text().splitlines() == ["passes", "is expected to fail"]


FILES = [
    "pyproject.toml",
    "tests/mutants/mutants.toml",
    "sparkkeras/modeling/archive.py",
    "tests/conftest.py",
    "recipes/standalone/submit.sh",
]


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_sources_or_backend_starts_a_new_run(tmp_path, monkeypatch, name):
    for each in FILES:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("before")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    before = soak.sources(tmp_path)
    assert soak.sources(tmp_path) == before
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert soak.sources(tmp_path) != before
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    (tmp_path / name).write_text("after")
    assert soak.sources(tmp_path) != before


@pytest.mark.parametrize("shard", ["lowest", "light"])
def test_only_one_shard_runs_the_default_suite_in_its_own_environment(tmp_path, monkeypatch, shard):
    calls = []

    def called(arguments, env=None, **_):
        calls.append(([str(argument) for argument in arguments], env))
        return SimpleNamespace(returncode=0)

    monkeypatch.delenv("SPARKKERAS_SOAK", raising=False)
    monkeypatch.setattr(soak.subprocess, "run", called)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python")
    assert soak.run(shard, tmp_path, [])
    *setup, (tests, environment) = calls
    assert any("lowest-direct" in arguments for arguments, _ in setup) == (shard == "lowest")
    assert (tests[0] == sys.executable) == (shard == "light")
    assert environment.get("SPARKKERAS_SOAK") == (None if shard == "lowest" else "1")
