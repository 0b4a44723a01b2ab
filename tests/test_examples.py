"""The examples run as they stand, with small settings, and say and draw what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import clean_environment

ROOT = Path(__file__).parent.parent

CASES = {
    "quickstart.py": (["--epochs", "2"], r"Accuracy +\d+\.\d% of 450 digits", ["digits.png", "digits.keras"]),
    "asynchronous.py": (
        ["--epochs", "2", "--modes", "asynchronous"],
        r"updates +\d+ taken up",
        ["asynchronous.png"],
    ),
    "tabular_pipeline.py": (
        ["--epochs", "3", "--rates", "0.01"],
        r"Test +\d+ of \d+ unseen tumours told rightly, area under the curve 0\.9",
        ["tumours.png", "tumours/metadata"],
    ),
    "image_pipeline.py": (
        ["--epochs", "2", "--labelled", "40"],
        r"Accuracy +[4-9]\d\.\d% of \d+ images of 5 to 9, learned from 40",
        ["images.png"],
    ),
    "sql_scoring.py": (
        [
            "--epochs",
            "2",
            "--query",
            "SELECT size(classify(alcohol, flavanoids, proline, color_intensity)) AS n FROM wines LIMIT 1",
        ],
        r"Your query\n\+---\+\n\|n  \|\n\+---\+\n\|3  \|",
        [],
    ),
    "streaming.py": (
        ["--batches", "2", "--epochs", "2"],
        r"batch 2 +898 digits[^\n]*\n\nThe last batch once more",
        ["streaming.png"],
    ),
    "search.py": (
        ["--trials", "4", "--epochs", "3", "--members", "2"],
        r"4/4 trials .*Model +\d+\.\d% of 397 unseen digits\nEnsemble +\d+\.\d%",
        ["search.png", "ensemble.zip", "search/search.json"],
    ),
    "search_regression.py": (["--trials", "3"], r"3/3 trials .*Test +mean squared error 0\.", ["search_regression.png"]),
    "connect.py": (["--epochs", "2"], r"through pyspark\.sql\.connect.*Accuracy +\d+\.\d% of 450 digits", []),
}
"""For each example: what it is called with, what it says, and what it leaves in its output folder."""


def run(name, arguments, folder):
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    del environment["PYSPARK_PYTHON"]  # an example finds its Python itself
    if name == "connect.py":
        environment["SPARK_TESTING"] = "1"  # its server takes any port that is free
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("name", CASES)
def test_an_example_runs(name, tmp_path):
    arguments, said, files = CASES[name]
    done = run(name, arguments, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(said, done.stdout, re.DOTALL), done.stdout
    assert done.stderr == ""
    for file in files:
        path = tmp_path / "artifacts" / file
        assert path.exists(), file
        assert path.suffix != ".png" or path.read_bytes().startswith(b"\x89PNG"), file


def test_all_examples_are_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*CASES, "surroundings.py"}


@pytest.mark.parametrize("name", CASES)
def test_docstrings_name_all_options(name):
    source = (ROOT / "examples" / name).read_text()
    usage = source.split("::\n\n", 1)[1].split("\n\n")[0]
    assert set(re.findall(r"--[a-z-]+", usage)) == set(re.findall(r'"(--[a-z-]+)"', source))
