"""Tutorials run as notebooks, as the build of the site runs them, and reach what their text says. Examples become notebooks.

tests/test_examples.py runs the examples as programs.
"""

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import nbformat
import pytest

from tests.scripts import ROOT, SECONDS

notebooks = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "theme" / "notebooks.py")))

PRINTED = {
    "1-tabular": r"plain Keras: AUC 0\.[67].*sparkkeras:  AUC 0\.[67].*risk of an unknown flight: \d+%",
    "2-images": r"on pixels: [1-4]\d\.\d%.*on features: [5-9]\d\.\d%",
    "3-text": r"last layer only: 520 of.*LoRA: 66,376 of [\d,]+ parameters trained\naccuracy [5-9]\d\.\d%",
    "4-time-series": r"as now +6\.\d+ °F.*network +[345]\.\d+ °F",
    "5-search": r"20 trials trained \d+ epochs of 360.*greedy ensemble +9\d\.\d%.*bagged best +9\d\.\d%",
    "6-scoring": r"1[34]\d of 143 new tumours.*differ by \d\.\de-0[6-9] at most.*curve of the saved pipeline: 0\.9",
    "7-killed-and-resumed": r"Epoch 5/12\nkilled\n.*complete.*Epoch 12/12.*All weights have the same bits\.",
    "8-recommender": r"popular +hit rate@10 4\d\.\d%.*airline +hit rate@10 93\.\d%.*embeddings +hit rate@10 9[5-8]\.\d%",
}
"""For each tutorial: a pattern of what it prints."""

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in ("digits", "surroundings"))

LEFT_OUT = "E402,ANN,D,PTH,T20"
"""The rules of ruff that code in a page need not follow, as in examples."""

JOINED = "E402,F404,F811,I,D,T20"
"""Those that a program need not follow when the modules that it shares with others are part of it."""


def test_all_tutorials_are_run_and_all_examples_are_pages():
    assert notebooks.names() == [*(f"tutorials/{name}" for name in PRINTED), *(f"examples/{name}" for name in EXAMPLES)]


@pytest.mark.programs
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", PRINTED)
def test_a_tutorial_runs(name, tmp_path):
    (executed,) = notebooks.execute([f"tutorials/{name}"], tmp_path).values()
    assert notebooks.failure(executed) == ""
    printed = notebooks.printed(executed)
    assert re.search(PRINTED[name], printed, re.DOTALL), printed
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize(
    ("kind", "settings", "ignored"),
    [("tutorials", "docs/tutorials/ruff.toml", LEFT_OUT), ("examples", "pyproject.toml", JOINED)],
)
def test_notebooks_are_valid_and_their_code_follows_the_rules_of_the_repository(kind, settings, ignored, tmp_path):
    for name in notebooks.names():
        if name.startswith(kind):
            made = notebooks.notebook(notebooks.page_text(name))
            nbformat.validate(made)
            (tmp_path / f"{name.partition('/')[2]}.ipynb").write_text(json.dumps(made))
    if not find_spec("ruff"):
        pytest.skip("ruff is not installed")
    command = [sys.executable, "-m", "ruff", "check", "--ignore", ignored, "--config", str(ROOT / settings), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_of_an_example_has_its_code_and_is_listed(name):
    made = notebooks.notebook(notebooks.page_text(f"examples/{name}"))
    cells = [cell["source"] for cell in made["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        compile(cell, name, "exec")
    code = "\n".join(cells)
    assert not re.search(r"(from|import) (surroundings|digits)\b", code)
    program = (ROOT / "examples" / f"{name}.py").read_text()
    for definition in re.findall(r"^(?:def|class) \w+", program, re.MULTILINE):
        assert sum(bool(re.search(rf"^{definition}\b", cell, re.MULTILINE)) for cell in cells) == 1, definition
    assert "\nmain([])" in code
    assert ("Image(" in code) == (".png" in program)
    used = set(re.findall(r'import (jax|tensorflow|torch)\b|"KERAS_BACKEND"\] = "(\w+)"', program))
    named = {module for package, module in notebooks.NEEDED.items() if f"Needs {package}" in program}
    assert named == {one or other for one, other in used}
    assert f"examples/{name}.md\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"[`{name}.py`]({name}.py)" in (ROOT / "examples" / "README.md").read_text()


@pytest.fixture
def module(tmp_path):
    """The module with pages and executed notebooks in a folder of the test, which has one tutorial."""
    found = runpy.run_path(str(ROOT / "docs" / "theme" / "notebooks.py"))
    found["names"].__globals__.update(DOCS=tmp_path, EXAMPLES=tmp_path, EXECUTED=tmp_path / "executed")
    (tmp_path / "executed" / "tutorials").mkdir(parents=True)
    (tmp_path / "tutorials").mkdir()
    return SimpleNamespace(**found)


def shown(module, name, text):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=f"{name}.md"), meta={})
    return module.on_page_markdown(text, page, None, None)


def test_a_page_shows_the_outputs_of_its_notebook_only_while_its_code_is_the_same(tmp_path, module):
    text = "# Sum\n\nA [link](../x.md).\n\n```python\nprint(1 + 1, '<b>')\n```\n"
    (tmp_path / "tutorials" / "sum.md").write_text(text)
    assert "outputs are missing" in shown(module, "tutorials/sum", text)

    executed = module.notebook(text)
    executed["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "2 <b>\n"}]
    executed["metadata"]["sparkkeras"] = {"seconds": 3, "cores": 2}
    (tmp_path / "executed" / "tutorials" / "sum.ipynb").write_text(json.dumps(executed))
    assert executed["cells"][0]["source"] == "# Sum\n\nA link."
    assert "<pre><code>2 &lt;b&gt;</code></pre>" in shown(module, "tutorials/sum", text)

    (tmp_path / "tutorials" / "sum.md").write_text(text.replace("1 + 1", "1 + 2"))
    assert "outputs are missing" in shown(module, "tutorials/sum", text)


def test_logs_are_left_out(module):
    text = "Start\n[0] [Gloo] Rank 0\n[1] I0000 00:00 port.cc:153] oneDNN\n[0] epoch 1  loss: 0.2\n[1] WARNING: mine\n"
    outputs = [{"output_type": "stream", "name": name, "text": text.splitlines(True)} for name in ("stdout", "stderr")]
    executed = {"cells": [{"outputs": list(module._without_logs(outputs))}]}
    assert module.printed(executed) == "Start\n[0] epoch 1  loss: 0.2\n[1] WARNING: mine\n"


PROGRAM = '''"""Add numbers: two of them. Needs PyTorch.

::

    python examples/add.py [--more N]
                           [--less N]

It uses ``sum``.
"""

from __future__ import annotations

import sys

from surroundings import hushed

FIRST = 1


@hushed()
def main(arguments: list[str] | None = None) -> None:
    sys.stdout.write(f"{sum([FIRST, 1])}\\n")


if __name__ == "__main__":
    main()
'''


def test_the_page_of_a_program(tmp_path, module, monkeypatch):
    (tmp_path / "add.py").write_text(PROGRAM)
    (tmp_path / "surroundings.py").write_text('"""Shared."""\n\ndef hushed():\n    return lambda function: function\n')
    assert module.names() == ["examples/add"]
    text = module.page_text("examples/add")
    assert text.startswith("# Add numbers\n\nTwo of them. Needs PyTorch.\n\nIt uses `sum`.\n\n")
    assert '??? quote "Shared"\n\n    ```python\n    def hushed():\n        return' in text
    cells = [cell["source"] for cell in module.notebook(text)["cells"]]
    assert cells[1:4] == [
        "def hushed():\n    return lambda function: function",
        "from __future__ import annotations\n\nimport sys\n\nFIRST = 1",
        '@hushed()\ndef main(arguments: list[str] | None = None) -> None:\n    sys.stdout.write(f"{sum([FIRST, 1])}\\n")',
    ]
    assert cells[-1] == "main([])"

    monkeypatch.setitem(module.execute.__globals__, "find_spec", lambda name: None)
    made = module.execute(["examples/add"], tmp_path)["examples/add"]
    (tmp_path / "executed" / "examples").mkdir()
    (tmp_path / "executed" / "examples" / "add.ipynb").write_text(json.dumps(made))
    assert "built without PyTorch, so outputs are missing" in shown(module, "examples/add", text)


def test_pages_that_share_a_kernel_have_variables_and_folders_of_their_own(tmp_path, module):
    (tmp_path / "a.md").write_text("```python\nx = 1\nopen('file', 'w').close()\nobject()\n```\n\n```python\nx + 1\n```\n")
    (tmp_path / "b.md").write_text("```python\nimport os\n\nprint(os.listdir())\nx\n```\n\n```python\nprint('after')\n```\n")
    assert module.guides() == ["a", "b"]
    ran = module.execute(module.guides(), tmp_path / "executed")
    assert [[output["data"] for output in cell["outputs"]] for cell in ran["a"]["cells"]] == [[], [{"text/plain": ["2"]}]]
    assert module.failure(ran["a"]) == ""
    assert "NameError: name 'x' is not defined" in module.failure(ran["b"])
    assert module.printed(ran["b"]) == "[]\nafter\n"
