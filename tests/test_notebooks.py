"""The tutorials run as notebooks, as the build of the site runs them, and reach what their text says."""

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.scripts import ROOT, SECONDS

tutorials = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "theme" / "tutorials.py")))

PRINTED = {
    "1-tabular": r"plain Keras: AUC 0\.[67].*sparkkeras:  AUC 0\.[67].*risk of an unknown flight: \d+%",
    "2-images": r"on pixels: [1-4]\d\.\d%.*on features: [5-9]\d\.\d%",
    "3-text": r"last layer only: 520 of.*LoRA: 66,376 of [\d,]+ parameters trained\naccuracy [5-9]\d\.\d%",
    "4-time-series": r"as now +6\.\d+ °F.*network +[345]\.\d+ °F",
    "5-search": r"20 trials trained \d+ epochs of 360.*greedy ensemble +9\d\.\d%.*bagged best +9\d\.\d%",
    "6-scoring": r"1[34]\d of 143 new tumours.*differ by \d\.\de-0[6-9] at most.*curve of the saved pipeline: 0\.9",
    "7-killed-and-resumed": r"Epoch 5/12\nkilled\n.*complete.*Epoch 12/12.*All weights have the same bits\.",
}
"""For each tutorial: a pattern of what it prints."""

LEFT_OUT = "ANN,D,PTH,T20"
"""The rules of ruff that code in a page need not follow, as in examples."""


def test_all_tutorials_are_run():
    assert tutorials.names() == list(PRINTED)


@pytest.mark.programs
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", PRINTED)
def test_a_tutorial_runs(name, tmp_path):
    executed = tutorials.execute(name, tmp_path)
    printed = tutorials.printed(executed)
    assert re.search(PRINTED[name], printed, re.DOTALL), printed
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.skipif(not find_spec("ruff"), reason="ruff is not installed")
def test_the_code_of_a_tutorial_follows_the_rules_of_the_repository(name, tmp_path):
    path = tmp_path / f"{name}.ipynb"
    path.write_text(json.dumps(tutorials.notebook((tutorials.PAGES / f"{name}.md").read_text())))
    settings = ["--config", str(tutorials.PAGES / "ruff.toml")]
    command = [sys.executable, "-m", "ruff", "check", "--ignore", f"E402,{LEFT_OUT}", *settings, path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_shows_the_outputs_of_its_notebook_only_while_its_code_is_the_same(tmp_path):
    module = runpy.run_path(str(ROOT / "docs" / "theme" / "tutorials.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/sum.md"))
    text = "# Sum\n\nA [link](../x.md).\n\n```python\nprint(1 + 1, '<b>')\n```\n"
    shown = module["on_page_markdown"]
    shown.__globals__.update(PAGES=tmp_path, EXECUTED=tmp_path)
    (tmp_path / "sum.md").write_text(text)
    assert "outputs are missing" in shown(text, page, None, None)

    executed = module["notebook"](text)
    executed["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "2 <b>\n"}]
    executed["metadata"]["sparkkeras"] = {"seconds": 3, "cores": 2}
    (tmp_path / "sum.ipynb").write_text(json.dumps(executed))
    assert executed["cells"][0]["source"] == "# Sum\n\nA link."
    assert "<pre><code>2 &lt;b&gt;</code></pre>" in shown(text, page, None, None)

    (tmp_path / "sum.md").write_text(text.replace("1 + 1", "1 + 2"))
    assert "outputs are missing" in shown(text, page, None, None)
