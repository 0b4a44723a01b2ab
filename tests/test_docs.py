"""The snippets in README and docs run unmodified, each page as one script."""

import re

import pytest

from tests.processes import clean_environment
from tests.scripts import ROOT, SECONDS, Script, run_scripts

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = ["CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    """The failure of each selected page, empty if its snippets ran. Pages without Connect share a process and its Spark."""
    pages = [item.callspec.params["page"] for item in request.session.items if item.originalname == "test_snippets_run"]
    connect_settings = {"SPARK_TESTING": "1"}  # starts the Connect server on any free port
    shared_settings = {"PYSPARK_SUBMIT_ARGS": "--conf spark.python.daemon.module=sparkkeras.spark.daemon pyspark-shell"}
    found = {}
    for is_connect, settings in (False, shared_settings), (True, connect_settings):
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


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / name for name in OTHER_PAGES)], ids=lambda p: p.name)
def test_relative_links_point_to_existing_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_design_mentions_every_package():
    design = (ROOT / "docs" / "design.md").read_text()
    for path in sorted((ROOT / "sparkkeras").iterdir()):
        if (path / "__init__.py").exists():
            assert f"`{path.name}/`" in design, path


def test_tests_named_in_the_page_on_faults_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert named
    for path, name in named:
        assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
