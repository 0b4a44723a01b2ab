"""The snippets in README and docs run as they stand, page by page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(snippets(page)))
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    if page.name == "connect.md":
        environment["SPARK_TESTING"] = "1"  # a Connect server on any free port
    else:
        environment["PYSPARK_SUBMIT_ARGS"] = "--conf spark.python.daemon.module=sparkkeras.daemon pyspark-shell"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_file_has_a_place_in_the_design():
    design = (ROOT / "docs" / "design.md").read_text()
    for path in (ROOT / "sparkkeras").rglob("*.py"):
        if path.name != "__init__.py":
            assert path.relative_to(ROOT / "sparkkeras").as_posix() in design, path
