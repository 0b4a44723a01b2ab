"""The examples run unmodified with small settings, print the expected output and write the expected files."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import long
from tests.processes import clean_environment
from tests.scripts import ROOT, SECONDS, Script, run_scripts

EXAMPLES = ROOT / "examples"

CASES = {
    "quickstart.py": (
        ["--epochs", "2", "--checkpoint", "kept"],
        r"Accuracy +\d+\.\d% of 450 test digits",
        ["digits.png", "digits.keras"],
    ),
    "asynchronous.py": (
        ["--epochs", "2", "--modes", "asynchronous"],
        r"updates +\d+ applied",
        ["asynchronous.png"],
    ),
    "text_classification.py": (
        ["--epochs", "4", "--reviews", "600"],
        r"Accuracy +(\d\d|100)\.\d% of \d+ unseen reviews.*% +a clever plot, never dull .*% +Tedious",
        ["reviews.keras"],
    ),
    "streaming.py": (
        ["--batches", "2", "--epochs", "2"],
        r"batch 2 +898 digits[^\n]*\n\nThe last batch once more",
        ["streaming.png"],
    ),
    "search_regression.py": (["--trials", "3"], r"3/3 trials .*Test +mean squared error 0\.", ["search_regression.png"]),
    "gan.py": (["--epochs", "2"], r"Steps +discriminator 64, generator 64\n", ["gan.png", "gan.keras"]),
    **dict.fromkeys(
        ("torch_distributed.py", "mirrored_strategy.py", "jax_distributed.py", "keras_data_parallel.py"),
        (
            ["--epochs", "4"],
            r"\[0\] epoch 4  loss: [01]\.\d.*Accuracy +[89]\d\.\d% of 450 test digits, trained by 2 ranks",
            [],
        ),
    ),
    "keras_model_parallel.py": (
        ["--epochs", "4"],
        r"epoch 4  loss: [01]\.\d.*Weights +38,410, of which a rank had 19,210.*Accuracy +[89]\d\.\d% of 450 test digits",
        [],
    ),
    "connect.py": (["--epochs", "2"], r"through pyspark\.sql\.connect.*Accuracy +\d+\.\d% of 450 test digits", []),
}
"""For each example: its arguments, a pattern of its output, and files in its output folder."""

KERAS_ON_JAX = ("keras_data_parallel.py", "keras_model_parallel.py")
ALONE = ("connect.py", *KERAS_ON_JAX)
"""Examples that need a process of their own, for their kind of session or their backend."""

SHARED = {"surroundings.py", "digits.py"}


def _torch_works():
    """Whether PyTorch can be used: on some machines Triton, which its builds with CUDA have, crashes after TensorFlow."""
    if not find_spec("torch"):
        return False
    code = "import tensorflow" + (", triton" if find_spec("triton") else "")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """The results of the selected examples, which share a process where they can."""
    names = [item.callspec.params["name"] for item in request.session.items if item.originalname == "test_an_example_runs"]
    names = [name for name in names if name != "torch_distributed.py" or _torch_works()]
    scripts = {
        name: Script(EXAMPLES / name, tmp_path_factory.mktemp(Path(name).stem), tuple(CASES[name][0])) for name in names
    }
    environment = clean_environment()
    del environment["PYSPARK_PYTHON"]  # examples set it themselves
    found = {}
    for together in ([name for name in names if name not in ALONE], *([name] for name in names if name in ALONE)):
        if together:
            # The setting starts the Connect server on any free port.
            settings = {"SPARK_TESTING": "1"} if together == ["connect.py"] else {}
            done = run_scripts([scripts[name] for name in together], environment | settings)
            found |= zip(together, done, strict=True)
    return {name: (scripts[name].folder, done) for name, done in found.items()}


@pytest.mark.programs
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("name", [long(name) if name in ("jax_distributed.py", *KERAS_ON_JAX) else name for name in CASES])
def test_an_example_runs(name, ran):
    if name not in ran:
        pytest.skip("needs PyTorch")
    _, pattern, files = CASES[name]
    folder, done = ran[name]
    assert done.failure == "", done.stderr[-3000:]
    assert re.search(pattern, done.stdout, re.DOTALL), done.stdout
    assert done.stderr == ""
    for file in files:
        path = folder / "artifacts" / file
        assert path.exists(), file
        assert path.suffix != ".png" or path.read_bytes().startswith(b"\x89PNG"), file


def test_all_examples_are_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*CASES, *SHARED}


@pytest.mark.parametrize("name", CASES)
def test_docstrings_list_all_options(name):
    source = (EXAMPLES / name).read_text()
    usage = source.split("::\n\n", 1)[1].split("\n\n")[0]
    if "from digits import" in source:
        source += (EXAMPLES / "digits.py").read_text()
    assert set(re.findall(r"--[a-z-]+", usage)) == set(re.findall(r'"(--[a-z-]+)"', source))
