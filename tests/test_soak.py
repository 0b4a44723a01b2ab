"""A resumed soak run skips the tests that have passed, unless the sources have changed."""

from types import SimpleNamespace

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


def test_a_change_of_sources_or_backend_starts_a_new_run(tmp_path, monkeypatch):
    for each in FILES:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("before")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    before = soak.sources(tmp_path)
    assert soak.sources(tmp_path) == before
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert soak.sources(tmp_path) != before
    found = {before}
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    for number, name in enumerate(FILES, 2):
        (tmp_path / name).write_text("after")
        found.add(soak.sources(tmp_path))
        assert len(found) == number
