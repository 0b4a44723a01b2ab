"""Run the soak tests (the long versions of the tests) in shards of at most an hour; `scripts/soak` calls this module.

    bash scripts/soak                 # all shards, one after the other
    bash scripts/soak faults search   # some of them
    bash scripts/soak --list          # list the shards, and whether they have passed

An interrupted run can be resumed: tests that have passed are recorded in ``artifacts/soak``, and skipped as long as the
sources, pyproject.toml and the backend do not change. ``--again`` runs all tests again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DONE = ROOT / "artifacts" / "soak"

NOT_IN_TRAINING = ["search", "ensembles", "connect", "recovery"]

SHARDS = {
    "parameter": ["tests/parameter", "tests/rpc"],
    "light": [
        "tests",
        "--ignore=tests/parameter",
        "--ignore=tests/rpc",
        "--ignore=tests/integration",
        "--ignore=tests/hyperopt",
        "--ignore=tests/faults",
        "--ignore=tests/recipes",
        "--ignore=tests/clusters",
    ],
    "search": ["tests/hyperopt", "tests/integration/test_search.py", "tests/integration/test_ensembles.py"],
    "training": ["tests/integration", *(f"--ignore=tests/integration/test_{name}.py" for name in NOT_IN_TRAINING)],
    "faults": ["tests/integration/test_recovery.py"],
    "matrix": ["tests/faults"],
    "connect": ["tests/integration/test_connect.py"],
    "recipes": ["tests/recipes"],
    "hosts": ["tests/clusters/test_hosts.py"],
    "hadoop": [
        f"tests/clusters/test_{name}.py" for name in ("kerberos", "yarn", "yarn_faults", "hdfs")
    ],  # one cluster at a time
    "s3": ["tests/clusters/test_s3.py"],
}
"""The pytest arguments of each shard; only tests marked ``soak`` run."""

LOWEST = ["-m", "not programs and not cluster and not connect", "-n", "2", "--dist", "loadfile", "-W", "default"]
"""The pytest arguments of the shard with the lowest versions: the default suite. Old libraries warn beside newer ones."""

MUTANTS = {"mutants": (), "random_mutants": ("--random", "200")}
"""The arguments of the shards that check whether the default suite detects bugs."""

NOT_SOAK = {"lowest", *MUTANTS}
"""The shards that run the default suite, without the soak tests."""


def sources(root: Path = ROOT) -> str:
    """A digest of everything that test results depend on: package, recipes, tests, their settings and the backend."""
    digest = hashlib.sha256(os.environ.get("KERAS_BACKEND", "").encode())
    settings = [root / "pyproject.toml", root / "tests" / "mutants" / "mutants.toml"]
    files = [path for folder in ("sparkkeras", "tests") for path in sorted((root / folder).rglob("*.py"))]
    recipes = sorted((root / "recipes").rglob("*"))
    files += [path for path in recipes if path.is_file() and path.suffix not in {".pyc", ".md"}]
    for path in [*settings, *files]:
        digest.update(b"\0" + path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def command(shard: str, finished: Path) -> list[str]:
    """The Python arguments that run a shard; ``finished`` is the file that records passed tests."""
    if shard in MUTANTS:
        return ["-m", "tests.mutants.run", "--resume", str(finished), *MUTANTS[shard]]
    if shard == "lowest":
        return ["-m", "pytest", "--finished", str(finished), *LOWEST]
    return ["-m", "pytest", "-m", "soak", "-s", "--timeout=1800", "--finished", str(finished), *SHARDS[shard]]


def lowest_environment(folder: Path) -> str:
    """The Python of a new environment with the lowest versions of the dependencies that pyproject.toml allows.

    The dependencies of these are the latest ones: they are not ours to bound.
    """
    uv, python = [sys.executable, "-m", "uv", "--quiet"], folder / "bin" / "python"
    subprocess.run([*uv, "venv", "--clear", "--python", sys.executable, folder], check=True)
    install = [*uv, "pip", "install", "--python", python, "--resolution", "lowest-direct"]
    subprocess.run([*install, "--editable", f"{ROOT}[test]"], check=True)
    return str(python)


def run(shard: str, folder: Path, extra: list[str]) -> bool:
    """Run the remaining tests of a shard, print the outcome, and return whether they passed."""
    started = time.monotonic()
    python = lowest_environment(DONE / "environment") if shard == "lowest" else sys.executable
    environment = os.environ | ({} if shard in NOT_SOAK else {"SPARKKERAS_SOAK": "1"}) | {"PYSPARK_PYTHON": python}
    if shard == "hadoop":  # which packs the backend for the nodes: JAX has a fifth of the size of TensorFlow
        environment.setdefault("KERAS_BACKEND", "jax")
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:  # pytest keeps those of its last three runs only
        files = [] if shard in MUTANTS else [f"--basetemp={temporary}/{shard}"]
        arguments = [*command(shard, folder / shard), *files, *extra]
        code = subprocess.run([python, *arguments], cwd=ROOT, env=environment).returncode
    passed = code in (0, NO_TESTS_COLLECTED)
    outcome = "passed" if passed else f"failed (exit status {code})"
    sys.stderr.write(f"\nsoak: {shard} {outcome} after {(time.monotonic() - started) / 60:.1f} minutes\n\n")
    if passed:
        (folder / f"{shard}.passed").touch()
    return passed


NO_TESTS_COLLECTED = 5
"""The exit code of pytest if there is no test to run, because all have passed before."""


def main() -> int:
    names = [*SHARDS, *sorted(NOT_SOAK)]
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Run the soak tests in shards.")
    parser.add_argument("shards", nargs="*", metavar="shard", help=f"shards to run (default: all): {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="list the shards and whether they have passed")
    parser.add_argument("--again", action="store_true", help="also run tests that have passed before")
    given, extra = parser.parse_known_args()
    unknown = sorted(set(given.shards) - set(names))
    if unknown:
        parser.error(f"unknown shard {unknown[0]!r}: choose from {', '.join(names)}")
    folder = DONE / sources()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = given.shards or names
    if given.list:
        for shard in chosen:
            sys.stdout.write(f"{shard:12} {'passed' if (folder / f'{shard}.passed').exists() else 'not passed'}\n")
        return 0
    failed = []
    for shard in chosen:
        if given.again:
            (folder / shard).unlink(missing_ok=True)
            (folder / f"{shard}.passed").unlink(missing_ok=True)
        if not (folder / f"{shard}.passed").exists() and not run(shard, folder, extra):
            failed.append(shard)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
