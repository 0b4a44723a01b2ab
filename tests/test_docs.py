"""The snippets in README and docs run as they stand, each page as a script."""

import re

import pytest

from tests.processes import clean_environment
from tests.scripts import ROOT, SECONDS, Script, run_scripts

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    """What went wrong on each page that was asked for. Those without Connect share a process, and its Spark."""
    pages = [item.callspec.params["page"] for item in request.session.items if item.originalname == "test_snippets_run"]
    alone = {"SPARK_TESTING": "1"}  # a server of Connect on any free port
    shared = {"PYSPARK_SUBMIT_ARGS": "--conf spark.python.daemon.module=sparkkeras.spark.daemon pyspark-shell"}
    found = {}
    for is_connect, settings in (False, shared), (True, alone):
        scripts = {}
        for page in pages:
            if (page.name == "connect.md") == is_connect:
                folder = tmp_path_factory.mktemp(page.stem)
                scripts[page] = Script(folder / "page.py", folder)
                scripts[page].path.write_text("\n".join(snippets(page)))
        if scripts:
            ran = run_scripts(list(scripts.values()), clean_environment() | settings)
            found |= {
                page: done.failure and f"{done.failure}\n{done.stderr[-3000:]}"
                for page, done in zip(scripts, ran, strict=True)
            }
    return found


@pytest.mark.programs
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run(page, failures):
    assert failures[page] == ""


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_package_has_a_place_in_the_design():
    design = (ROOT / "docs" / "design.md").read_text()
    for path in sorted((ROOT / "sparkkeras").iterdir()):
        if (path / "__init__.py").exists():
            assert f"`{path.name}/`" in design, path
