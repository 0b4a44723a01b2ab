"""The notebook runs from top to bottom in a kernel of its own."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.processes import clean_environment

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.programs
def test_the_notebook_trains(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    kernel = tmp_path / "kernels" / "python3"  # this Python, whichever kernels are registered on this machine
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    environment = clean_environment() | {"JUPYTER_PATH": str(tmp_path), "JUPYTER_PREFER_ENV_PATH": "0"}
    environment["JUPYTER_DATA_DIR"] = environment["JUPYTER_RUNTIME_DIR"] = str(tmp_path)
    environment["IPYTHONDIR"] = str(tmp_path / "ipython")
    del environment["PYSPARK_PYTHON"]  # the notebook sets it
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    notebook = nbformat.read(ROOT / "recipes" / "notebook" / "train.ipynb", as_version=4)
    nbformat.validate(notebook)
    client.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    accuracies = cells[2].outputs[-1]["data"]["text/plain"]
    assert float(accuracies.strip("[]").split(",")[-1]) > 0.9, accuracies
    assert "|label|scores" in cells[3].outputs[-1]["text"]
