"""The long versions of the tests, in shards of at most an hour: what `scripts/soak` runs.

    bash scripts/soak                 # all shards, one after the other
    bash scripts/soak faults search   # some of them
    bash scripts/soak --list          # which there are, and how much of each is done

A run that is cut off goes on where it stood: tests that have passed are noted in ``artifacts/soak`` and left out as long as
the sources, pyproject.toml and the backend stay as they are. ``--again`` begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DONE = ROOT / "artifacts" / "soak"

OF_OTHER_SHARDS = ["search", "ensembles", "connect", "asynchronous_faults", "recovery"]

SHARDS = {
    "parameter": ["tests/parameter", "tests/rpc"],
    "light": [
        "tests",
        "--ignore=tests/parameter",
        "--ignore=tests/rpc",
        "--ignore=tests/integration",
        "--ignore=tests/hyperopt",
    ],
    "search": ["tests/hyperopt", "tests/integration/test_search.py", "tests/integration/test_ensembles.py"],
    "training": ["tests/integration", *(f"--ignore=tests/integration/test_{name}.py" for name in OF_OTHER_SHARDS)],
    "faults": ["tests/integration/test_asynchronous_faults.py", "tests/integration/test_recovery.py"],
    "connect": ["tests/integration/test_connect.py"],
}
"""Which tests are in a shard: arguments for pytest, of which those marked ``soak`` run."""


def sources(root: Path = ROOT) -> str:
    """A digest of what decides whether tests pass: the package, the tests, their settings and the backend."""
    digest = hashlib.sha256(os.environ.get("KERAS_BACKEND", "").encode())
    settings = [root / "pyproject.toml", root / "tests" / "mutants" / "mutants.toml"]
    for path in [*settings, *(path for folder in ("sparkkeras", "tests") for path in sorted((root / folder).rglob("*.py")))]:
        digest.update(b"\0" + path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def command(shard: str, finished: Path) -> list[str]:
    """What runs a shard."""
    if shard == "mutants":
        return ["-m", "tests.mutants.run", "--resume", str(finished)]
    return ["-m", "pytest", "-m", "soak", "-s", "--timeout=1800", "--finished", str(finished), *SHARDS[shard]]


def run(shard: str, folder: Path, extra: list[str]) -> bool:
    """Run what is left of a shard, and report how it ended."""
    begun = time.monotonic()
    words = [sys.executable, *command(shard, folder / shard), *extra]
    # It is the default suite that has to notice mutants.
    environment = os.environ | ({} if shard == "mutants" else {"SPARKKERAS_SOAK": "1"})
    code = subprocess.run(words, cwd=ROOT, env=environment).returncode
    passed = code in (0, NOTHING_LEFT)
    said = "passed" if passed else f"failed (exit status {code})"
    sys.stderr.write(f"\nsoak: {shard} {said} after {(time.monotonic() - begun) / 60:.1f} minutes\n\n")
    if passed:
        (folder / f"{shard}.passed").touch()
    return passed


NOTHING_LEFT = 5
"""What pytest returns where no test was left to run."""


def main() -> int:
    names = [*SHARDS, "mutants"]
    parser = argparse.ArgumentParser(prog="scripts/soak", description="The long versions of the tests, in shards.")
    parser.add_argument("shards", nargs="*", metavar="shard", help=f"some of {', '.join(names)}; all of them by default")
    parser.add_argument("--list", action="store_true", help="only say which have passed")
    parser.add_argument("--again", action="store_true", help="run also what has passed")
    given, extra = parser.parse_known_args()
    unknown = sorted(set(given.shards) - set(names))
    if unknown:
        parser.error(f"there is no shard {unknown[0]!r}: choose from {', '.join(names)}")
    folder = DONE / sources()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = given.shards or names
    if given.list:
        for shard in chosen:
            sys.stdout.write(f"{shard:12} {'passed' if (folder / f'{shard}.passed').exists() else 'to be run'}\n")
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
