"""Run scripts like a user, but one after the other in one process, so that Keras and Java are loaded only once."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 900


@dataclass(frozen=True)
class Script:
    """A script, the working folder to run it in, and its command-line arguments."""

    path: Path
    folder: Path
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ran:
    """The output of a script, and the traceback of its exception; empty if it raised none."""

    stdout: str
    stderr: str
    failure: str


RUN = """
import json, os, runpy, sys, traceback
here = sys.path[0]
for script, folder, *arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        output = os.open(f"{folder}/.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, descriptor)
        os.close(output)
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
        failure = ""
    except BaseException:
        failure = traceback.format_exc()
    sys.stdout.flush()
    with open(f"{folder}/.failure", "w") as file:
        file.write(failure)
"""


def run_scripts(scripts: list[Script], environment: dict[str, str]) -> list[Ran]:
    """Run scripts in one new process, each in its folder."""
    calls = [[str(script.path), str(script.folder), *script.arguments] for script in scripts]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(calls)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        Ran(*((script.folder / f".{name}").read_text() for name in ("stdout", "stderr", "failure"))) for script in scripts
    ]
