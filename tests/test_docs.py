"""The snippets in README and docs run as they stand, each page as a script."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import clean_environment

ROOT = Path(__file__).parent.parent
SECONDS = 900
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


RUN_PAGES = """
import json, runpy, sys, traceback
for page in sys.argv[2:]:
    try:
        runpy.run_path(page, run_name="__main__")
        failure = ""
    except BaseException:
        failure = traceback.format_exc()
    with open(sys.argv[1], "a") as told:
        told.write(json.dumps([page, failure]) + "\\n")
"""


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    """What went wrong on each page that was asked for. Those without Connect share a process, and its Spark."""
    pages = [item.callspec.params["page"] for item in request.session.items if item.originalname == "test_snippets_run"]
    connect = [page for page in pages if page.name == "connect.md"]
    found = {}
    for together in (connect, [page for page in pages if page not in connect]):
        if together:
            found |= run_pages(together, tmp_path_factory.mktemp("pages"), is_connect=together is connect)
    return found


def run_pages(pages, folder, is_connect):
    scripts = {str(folder / f"{page.stem}.py"): page for page in pages}
    for script, page in scripts.items():
        Path(script).write_text("\n".join(snippets(page)))
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    if is_connect:
        environment["SPARK_TESTING"] = "1"  # a server on any free port
    else:
        environment["PYSPARK_SUBMIT_ARGS"] = "--conf spark.python.daemon.module=sparkkeras.daemon pyspark-shell"
    command = [sys.executable, "-c", RUN_PAGES, str(folder / "told"), *scripts]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    return {scripts[script]: failure and f"{failure}\n{done.stderr[-3000:]}" for script, failure in told}


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run(page, failures):
    assert failures[page] == ""


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
