"""Mutation testing: checks that the test suite detects realistic bugs in the product code.

    python -m tests.mutants.run                      all listed mutants
    python -m tests.mutants.run --random 200         that many of all small changes, drawn with --seed
    python -m tests.mutants.run NAME ...             some of them, by name or by a pattern such as 'ledger-*'
    python -m tests.mutants.run --resume FILE        append each result to FILE, and skip mutants with a result there

``mutants.toml`` lists the mutants: each is a function, an operator of ``operators.py`` and what that changes, and the tests
that should fail. The repository is copied to a temporary folder and mutated there, so the working tree does not change. All
tests run in forks of this process, which has imported Keras and other slow libraries, but not ``sparkkeras`` and ``tests``.

A mutant is *killed* if pytest reports a failed test (exit code 1), or *killed (timeout)* if the tests exceed the time limit.
It has *survived* if they pass. Any other outcome, such as a failed collection, is an *error* of the mutant, its tests or
this tool. The exit code is 0 if all listed mutants were killed; random ones may survive, and their share is printed.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import fnmatch
import json
import os
import py_compile
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutants.operators import changes, functions

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
        function: The function, by as much of its dotted name as is unique.
        operator: The name of one of `OPERATORS`.
        at: The first line of what it changes, as `ast.unparse` writes it; of several places in the function, the first one.
        tests: Arguments for pytest: the files or tests that should fail.
    """

    name: str
    function: str
    operator: str
    at: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        """Identifies the mutant; differs from that of an edited mutant of the same name."""
        return f"{self.name}:{zlib.crc32(repr((self.function, self.operator, self.at, self.tests)).encode()):08x}"

    def apply(self, code: Code) -> tuple[str, str]:
        """Return the file and its text with the bug.

        Raises:
            ValueError: There is not one such function, or no such place in it.
        """
        files = [file for name, file in code.functions.items() if f".{name}".endswith(f".{self.function}")]
        if len(files) != 1:
            raise ValueError(f"{self.name}: {len(files)} functions are called {self.function}; expected one")
        tree = ast.parse(code.texts[files[0]])
        (function,) = (each for name, each in code.named(files[0], tree) if f".{name}".endswith(f".{self.function}"))
        for operator, at, put in changes(function):
            if (operator, at) == (self.operator, self.at):
                put()
                return files[0], ast.unparse(ast.fix_missing_locations(tree))
        raise ValueError(f"{self.name}: {self.operator!r} has nothing to change at {self.at!r} in {self.function}")


class Code:
    """The source code of the package, in a tree.

    Attributes:
        texts: The text of each file.
        functions: The file of each function, by its dotted name.
    """

    def __init__(self, tree: Path) -> None:
        paths = sorted((tree / "sparkkeras").rglob("*.py"))
        self.texts = {path.relative_to(tree).as_posix(): path.read_text() for path in paths}
        named = {file: self.named(file, ast.parse(text)) for file, text in self.texts.items()}
        self.functions = {name: file for file, found in named.items() for name, _ in found}

    def named(self, file: str, tree: ast.Module) -> list[tuple[str, ast.AST]]:
        """The functions of a file, with their dotted names."""
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return [(f"{module}.{name}", function) for name, function in functions(tree)]

    def drawn(self, count: int, seed: int) -> list[Mutant]:
        """Random mutants of the modules that have tests; see `_tests_of`."""
        known = {
            (name, operator, at): tests
            for file, text in self.texts.items()
            if (tests := _tests_of(file))
            for name, function in self.named(file, ast.parse(text))
            for operator, at, _ in changes(function)
        }
        found = random.Random(seed).sample(sorted(known), count)
        return [Mutant(f"random-{number}", *change, known[change]) for number, change in enumerate(found, 1)]


def _tests_of(file: str) -> tuple[str, ...]:
    """The tests of a module, and those of its package, as far as they exist."""
    package, _, module = file.removeprefix("sparkkeras/").removesuffix(".py").rpartition("/")
    own, all_of_package = Path("tests", package, f"test_{module}.py"), Path("tests", package.partition("/")[0])
    return tuple(each.as_posix() for each in (own, *([all_of_package] if package else [])) if (ROOT / each).exists())


@dataclass(frozen=True)
class Result:
    """The outcome of running the tests: with a mutant, or without any (a baseline)."""

    key: str
    outcome: str
    seconds: float = 0.0
    by: str = ""


def load() -> list[Mutant]:
    """Read all mutants from ``mutants.toml``."""
    listed = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return [Mutant(name, *each["change"], tuple(each["tests"])) for name, each in listed.items()]


class Runner:
    """Runs tests on mutants, in a copy of the repository.

    Args:
        tree: The copy.
        resume: The file to read earlier results from, and to append new ones to.
    """

    def __init__(self, tree: Path, resume: Path | None) -> None:
        self._tree, self._resume, self._code = tree, resume, Code(tree)
        lines = resume.read_text().splitlines() if resume is not None and resume.exists() else []
        known = (Result(**json.loads(line)) for line in lines)
        self._known = {each.key: each for each in known if each.outcome not in (MISFIT, ERROR)}

    def run(self, mutant: Mutant) -> Result:
        """Run a mutant's tests without it (unless there is a result of that) and with it."""
        if mutant.key in self._known:
            return self._known[mutant.key]
        try:
            file, mutated = mutant.apply(self._code)
        except ValueError as error:
            return Result(mutant.key, MISFIT, by=str(error))
        key = f"baseline:{' '.join(mutant.tests)}"
        baseline = self._known.get(key) or self._tested(key, mutant.tests, 900)
        if baseline.outcome != SURVIVED:
            return Result(mutant.key, ERROR, by=f"without the mutant: {baseline.outcome} {baseline.by}")
        path = self._tree / file
        try:
            path.write_text(mutated)
            return self._tested(mutant.key, mutant.tests, 3 * baseline.seconds + 30)
        finally:
            path.write_text(self._code.texts[file])

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants and print the results; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description="Check that the tests detect bugs.")
    parser.add_argument("names", nargs="*", default=["*"], help="names of mutants, or patterns (default: all)")
    parser.add_argument("--random", type=int, metavar="COUNT", help="draw that many of all small changes")
    parser.add_argument("--seed", type=int, default=1, help="the seed of --random (default: 1)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="append results to FILE, and skip mutants it contains")
    given = parser.parse_args(arguments)
    listed = load() if given.random is None else Code(ROOT).drawn(given.random, given.seed)
    for name in given.names:
        if not any(fnmatch.fnmatch(each.name, name) for each in listed):
            parser.error(f"unknown mutant {name!r}: mutants.toml lists them")
    chosen = [each for each in listed if any(fnmatch.fnmatch(each.name, name) for name in given.names)]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # to clean up forks and the copy
    resume, started, outcomes = given.resume and given.resume.resolve(), time.monotonic(), Counter[str]()
    warm_up()
    with copied() as tree:
        runner = Runner(tree, resume)
        for number, mutant in enumerate(chosen, 1):
            stages = [mutant] if given.random is None else [replace(mutant, tests=(each,)) for each in mutant.tests]
            for stage in stages:  # the tests of its module, then those of its package
                result = runner.run(stage)
                if result.outcome != SURVIVED:
                    break
            outcomes[result.outcome] += 1
            change = "" if result.outcome in (KILLED, TIMEOUT) else f"{mutant.function}: {mutant.operator} {mutant.at}"
            sys.stdout.write(
                f"[{number}/{len(chosen)}] {mutant.name}: {result.outcome} ({result.seconds} s) {result.by}{change}\n"
            )
            sys.stdout.flush()
    killed = outcomes[KILLED] + outcomes[TIMEOUT]
    sys.stdout.write(f"\n{killed} of {len(chosen)} mutants killed in {time.monotonic() - started:.0f} s: {dict(outcomes)}\n")
    return 0 if killed == len(chosen) or (given.random and killed + outcomes[SURVIVED] == len(chosen)) else 1


if __name__ == "__main__":
    sys.exit(main())
