"""Mutation testing: checks that the test suite detects realistic bugs in the product code.

    python -m tests.mutants.run                      all mutants; about an hour
    python -m tests.mutants.run --spark none         those whose tests do not start Spark; --spark only: the others
    python -m tests.mutants.run --list               list them
    python -m tests.mutants.run NAME ...             some of them, by name or by a pattern such as 'ledger-*'
    python -m tests.mutants.run --resume FILE        append each result to FILE, and skip mutants with a result there

``mutants.toml`` lists the mutants: each replaces one piece of text in one file, and names the tests that should fail. The
repository is copied to a temporary folder and mutated there, so the working tree does not change. All tests run in forks of
this process, which has imported Keras and other slow libraries, but not ``sparkkeras`` and ``tests``.

A mutant is *killed* if pytest reports a failed test (exit code 1), or *killed (timeout)* if the tests exceed the time limit.
It has *survived* if they pass. Any other outcome, such as a failed collection, is an *error* of the mutant, its tests or
this tool. The exit code is 0 if all mutants recorded as killed were killed, and there was no error.
"""

from __future__ import annotations

import argparse
import compileall
import fnmatch
import json
import os
import py_compile
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv", "artifacts", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "dist", "build")
PYTEST = (
    "-x", "-q", "-rfE", "--no-header", "--tb=short", "--hypothesis-seed=0", "-p", "no:cacheprovider",
    "-m", "not programs", "-o", "addopts=--import-mode=importlib",
)  # fmt: skip
KILLED, TIMEOUT, SURVIVED, MISFIT, ERROR = "killed", "killed (timeout)", "survived", "does not apply", "error"


@dataclass(frozen=True)
class Mutant:
    """A bug that a maintainer could introduce.

    Attributes:
        name: A unique name, in kebab-case.
        file: The file, relative to the repository.
        old: The text to replace, which occurs exactly once in the file.
        new: The replacement.
        tests: Arguments for pytest: the files or tests that should fail.
        killed: Whether they fail, as recorded.
        spark: Whether these tests start Spark.
        limit: The time limit of the tests in seconds; 0: three times the time without the mutant, plus 90 s.
        reason: The reason why the mutant survives; empty if it is killed.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    killed: bool
    spark: bool = False
    limit: float = 0.0
    reason: str = ""

    @property
    def key(self) -> str:
        """Identifies the mutant; differs from that of an edited mutant of the same name."""
        return f"{self.name}:{zlib.crc32(repr((self.file, self.old, self.new, self.tests)).encode()):08x}"

    def apply(self, text: str) -> str:
        """Return the file's text with the bug.

        Raises:
            ValueError: The old text does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.file}; expected once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """The outcome of running the tests: with a mutant, or without any (a baseline)."""

    key: str
    outcome: str
    seconds: float = 0.0
    by: str = ""


def load() -> list[Mutant]:
    """Read all mutants from ``mutants.toml``."""
    listed = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]
    return [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in listed]


class Runner:
    """Runs tests on mutants, in a copy of the repository.

    Args:
        tree: The copy.
        resume: The file to read earlier results from, and to append new ones to.
    """

    def __init__(self, tree: Path, resume: Path | None) -> None:
        self._tree, self._resume = tree, resume
        lines = resume.read_text().splitlines() if resume is not None and resume.exists() else []
        known = (Result(**json.loads(line)) for line in lines)
        self._known = {each.key: each for each in known if each.outcome not in (MISFIT, ERROR)}

    def run(self, mutant: Mutant) -> Result:
        """Run a mutant's tests without it (unless there is a result of that) and with it."""
        if mutant.key in self._known:
            return self._known[mutant.key]
        path = self._tree / mutant.file
        text = path.read_text()
        try:
            mutated = mutant.apply(text)
        except ValueError as error:
            return Result(mutant.key, MISFIT, by=str(error))
        key = f"baseline:{' '.join(mutant.tests)}"
        baseline = self._known.get(key) or self._tested(key, mutant.tests, 900)
        if baseline.outcome != SURVIVED:
            return Result(mutant.key, ERROR, by=f"without the mutant: {baseline.outcome} {baseline.by}")
        try:
            path.write_text(mutated)
            return self._tested(mutant.key, mutant.tests, mutant.limit or 3 * baseline.seconds + 90)
        finally:
            path.write_text(text)

    def _tested(self, key: str, tests: Sequence[str], limit: float) -> Result:
        """Run tests on the current state of the copy, for at most ``limit`` seconds."""
        log, started = self._tree.with_suffix(".log"), time.monotonic()
        child, status = _forked(self._tree, tests, log), None
        try:
            while status is None and time.monotonic() < started + limit:
                time.sleep(0.05)
                ended, code = os.waitpid(child, os.WNOHANG)
                status = code if ended else None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # including processes that the tests have started
            if status is None:
                os.waitpid(child, 0)
        exit_code = None if status is None else os.waitstatus_to_exitcode(status)
        outcome = {0: SURVIVED, 1: KILLED, None: TIMEOUT}.get(exit_code, ERROR)
        output = log.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
        if outcome == ERROR:
            sys.stdout.write(f"{key}: exit code {exit_code}\n{output[-3000:]}\n")
        result = Result(key, outcome, round(time.monotonic() - started, 1), failed[1] if failed else "")
        self._known[key] = result
        if self._resume is not None:
            with self._resume.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        return result


def _forked(tree: Path, tests: Sequence[str], log: Path) -> int:
    """Start pytest in a fork of this process, in a new process group; return the process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with log.open("wb") as file, open(os.devnull, "rb") as nothing:
            for source, target in (nothing, 0), (file, 1), (file, 2):
                os.dup2(source.fileno(), target)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # this file's package, which was imported from the working tree
        sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        import pytest

        code = int(pytest.main([*PYTEST, f"--basetemp={tree.with_suffix('.tmp')}", *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def warm_up() -> None:
    """Import the libraries that most tests use, except pytest's plugins. A backend that has run would not work in forks."""
    import google_crc32c  # noqa: F401
    import keras  # noqa: F401
    import numpy  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow  # noqa: F401
    import pyspark.sql  # noqa: F401
    import pytest  # noqa: F401

    assert "sparkkeras" not in sys.modules, "forks could not import the copy"


@contextmanager
def copied() -> Iterator[Path]:
    """Copy the repository to a temporary folder.

    Bytecode is validated by a hash of the source, since a mutant can have the same modification time (in seconds) as the
    original file.
    """
    with tempfile.TemporaryDirectory(prefix="sparkkeras-mutants-") as folder:
        tree = Path(folder).resolve() / "copy"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        compileall.compile_dir(tree / "sparkkeras", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        yield tree


def report(results: Mapping[Mutant, Result]) -> int:
    """Print a table of results; return the number of unexpected ones."""
    unexpected = 0
    sys.stdout.write(f"\n{'mutant':60} {'recorded':10} {'found':17} seconds\n")
    for mutant, result in results.items():
        failed = result.outcome in (MISFIT, ERROR) or (mutant.killed and result.outcome == SURVIVED)
        improved = not mutant.killed and result.outcome in (KILLED, TIMEOUT)
        remark = "  <- unexpected" if failed else "  <- now killed: update mutants.toml" if improved else ""
        recorded = KILLED if mutant.killed else SURVIVED
        sys.stdout.write(f"{mutant.name:60} {recorded:10} {result.outcome:17} {result.seconds:7.1f}{remark}\n")
        unexpected += failed
    return unexpected


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants and print the results; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description="Check that the tests detect bugs.")
    parser.add_argument("names", nargs="*", help="names of mutants, or patterns (default: all)")
    parser.add_argument("--list", action="store_true", help="list the mutants without running them")
    parser.add_argument("--spark", choices=("none", "only"), help="run no mutants, or only those, whose tests start Spark")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="append results to FILE, and skip mutants it contains")
    given = parser.parse_args(arguments)
    chosen = [each for each in load() if given.spark is None or each.spark == (given.spark == "only")]
    for name in given.names:
        if not any(fnmatch.fnmatch(each.name, name) for each in chosen):
            parser.error(f"unknown mutant {name!r}: --list shows all")
    chosen = [each for each in chosen if not given.names or any(fnmatch.fnmatch(each.name, name) for name in given.names)]
    if given.list:
        for each in chosen:
            recorded = KILLED if each.killed else f"{SURVIVED}: {each.reason}"
            sys.stdout.write(f"{each.name}  {each.file}  {' '.join(each.tests)}  ({recorded})\n")
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # to clean up forks and the copy
    resume, started, results = given.resume and given.resume.resolve(), time.monotonic(), dict[Mutant, Result]()
    warm_up()
    with copied() as tree:
        runner = Runner(tree, resume)
        for number, mutant in enumerate(chosen, 1):
            result = results[mutant] = runner.run(mutant)
            progress = f"[{number}/{len(chosen)}] {mutant.name}: {result.outcome} ({result.seconds} s) {result.by}"
            sys.stdout.write(f"{progress}\n")
            sys.stdout.flush()
    unexpected = report(results)
    sys.stdout.write(f"\n{len(results)} mutants in {time.monotonic() - started:.0f} s; {unexpected} unexpected results.\n")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
