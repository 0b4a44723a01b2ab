"""The snippets in README and docs run, as the build of the site runs them; tests/test_notebooks.py runs the tutorials."""

import contextlib
import importlib
import inspect
import re
import runpy
import sys
import tomllib
from types import SimpleNamespace

import pytest
import yaml

from tests.scripts import ROOT, SECONDS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
notebooks = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "theme" / "notebooks.py")))
OTHER_PAGES = [*(ROOT / "recipes").rglob("README.md"), *(ROOT / f"{name}/README.md" for name in ("benchmarks", "examples"))]
OTHER_PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]


@pytest.fixture(scope="module")
def executed(request, tmp_path_factory):
    """The notebooks of the selected pages, which share a kernel."""
    pages = [item.callspec.params["page"] for item in request.session.items if item.originalname == "test_snippets_run"]
    return notebooks.execute(pages, tmp_path_factory.mktemp("pages"), PYSPARK_PYTHON=sys.executable)


@pytest.mark.programs
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("page", ["README", *notebooks.guides()])
def test_snippets_run(page, executed):
    assert notebooks.failure(executed[page]) == ""


def test_relative_links_point_to_existing_files():
    for page in (*PAGES, *OTHER_PAGES):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page, target)


def test_pages_are_short():
    sections = {
        name: pages for each in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] for name, pages in each.items()
    }
    guides = [page for group in sections["How-to"] for pages in group.values() for each in pages for page in each.values()]
    prose = {page: notebooks.CODE.sub("", (ROOT / "docs" / page).read_text()) for page in guides}
    words = {page: len(text.split()) for page, text in prose.items()}
    assert [page for page, count in words.items() if count > 900] == ["troubleshooting.md"]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_design_mentions_every_package_and_only_files_that_exist():
    design = (ROOT / "docs" / "contributing" / "design.md").read_text()
    for path in sorted((ROOT / "sparkkeras").iterdir()):
        if (path / "__init__.py").exists():
            assert f"`{path.name}/`" in design, path
    for name in re.findall(r"`([\w/]+\.py)`", design):
        assert (ROOT / "sparkkeras" / name).exists() or (ROOT / name).exists(), name
    assert len(design.split()) <= 3000


def test_tests_named_in_the_fault_matrix_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "contributing" / "fault-matrix.md").read_text())
    assert named
    for path, name in named:
        assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_public_name_is_in_the_api_reference():
    shown = {
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    public = {"sparkkeras.events"}
    for name in ("sparkkeras", "sparkkeras.hyperopt", "sparkkeras.ml", "sparkkeras.runner"):
        public |= {f"{name}.{each}" for each in importlib.import_module(name).__all__}
    of_root = {f"sparkkeras.{each}" for each in importlib.import_module("sparkkeras").__all__}
    twice = {name for name in public - of_root if f"sparkkeras.{name.rpartition('.')[2]}" in of_root}
    assert public - twice <= shown, public - twice - shown
    listed = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert [name for name in shown if f"[{name}]" not in listed] == []


def test_the_policy_names_the_lowest_versions_of_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = [f"python{project['requires-python']}", *project["dependencies"], *extras["jax"], *extras["torch"]]
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", bound).groups() for bound in bounds)
    rows = _policy("Supported versions")
    packages = {"Spark": "pyspark", "PyTorch": "torch"}
    for name in ("Python", "Spark", "Keras", "TensorFlow", "JAX", "PyTorch"):
        assert rows[name][0].split(" ")[0] == lowest[packages.get(name, name.lower())], name


def test_the_policy_names_the_formats_of_files():
    formats = {name: columns[-1] for name, columns in _policy("Files").items()}
    modules = {
        "models": "sparkkeras.training.persistence",
        "ensembles": "sparkkeras.training.persistence",
        "checkpoints": "sparkkeras.checkpoints.store",
        "searches": "sparkkeras.hyperopt.study",
    }
    for name, module in modules.items():
        (found,) = [value for row, value in formats.items() if re.match(rf"{name} \((?!.*MLflow)", row)]
        assert found == str(importlib.import_module(module)._FORMAT), name


def _policy(section):
    """The columns of a table of docs/policy.md by the first one."""
    text = (ROOT / "docs" / "policy.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    return {name: columns for name, *columns in rows}


def test_the_matrix_of_support_lists_every_path():
    table = (ROOT / "docs" / "support.md").read_text().partition("## Paths\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([\w.]+\(\w+\))`", table)) - {"fit(data)"}
    stages = {"ImageFeaturizer", "KerasTransformer", "GridValue"}  # "other stages"
    assert {name for name in _paths() if name.partition(".")[0] not in stages} == listed


def _paths():
    """The path arguments of the public API: ``SparkModel.save(path)``."""
    for module in ("sparkkeras", "sparkkeras.hyperopt", "sparkkeras.ml", "sparkkeras.runner"):
        for name in importlib.import_module(module).__all__:
            public = getattr(importlib.import_module(module), name)
            methods = {f"{name}.{each}": getattr(public, each) for each in dir(public) if not each.startswith("_")}
            for called, function in {name: public, **methods}.items():
                with contextlib.suppress(TypeError, ValueError):  # no function, or one without a signature
                    for each in inspect.signature(function).parameters.values():
                        if each.name in ("path", "save_to") or re.search("PathLike|Path", str(each.annotation)):
                            yield f"{called}({each.name})"


def test_signatures_in_the_api_reference_name_no_internal_types():
    griffe = pytest.importorskip("griffe", reason="needs the extra [docs]")
    extension = runpy.run_path(str(ROOT / "docs" / "theme" / "docstrings.py"))["Docstrings"]
    extensions = griffe.load_extensions("dataclasses", extension)
    package = griffe.load("sparkkeras", search_paths=[ROOT], allow_inspection=False, extensions=extensions)
    features = package["spark_model.SparkModel"].members["fit"].parameters["features"]
    assert str(features.annotation) == "str | Sequence[str] | Mapping[str, str | Sequence[str] | Mapping[str, Any]] | None"
    assert str(package["parameter.rules.Average"].members["init"].returns) == "dict[str, NDArray[Any]]"
    assert [str(base) for base in package["ml.transformer.KerasTransformer"].bases] == ["Model"]
    assert "addresses" in (context := package["runner.rank_context.RankContext"].parameters)
    assert not [each.name for each in context if each.name.startswith("_")]


def test_the_check_of_the_site_finds_dead_links_and_resources_of_other_hosts(tmp_path):
    check = runpy.run_path(str(ROOT / "docs" / "theme" / "check_site.py"))["problems"]
    (tmp_path / "good.html").write_text('<h1 id="top"></h1><a href="#top"></a><a href="https://example.org/"></a>')
    assert check(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<a href="gone.html"></a><a href="good.html#end"></a><img src="//cdn.example.org/a.png">'
    )
    (tmp_path / "style.css").write_text("a { src: url(https://example.org/d.png) }")
    assert sorted(check(tmp_path)) == [
        "bad.html links to gone.html: there is no such file",
        "bad.html links to good.html#end: there is no anchor end",
        "bad.html loads //cdn.example.org/a.png",
        "style.css loads https://example.org/d.png",
    ]


def test_the_chart_of_the_first_page_shows_the_stored_results():
    parts = runpy.run_path(str(ROOT / "benchmarks" / "overview.py"))["bars"]()
    drawn = re.findall(r"<text [^>]*>([^<]*)</text>", (ROOT / "docs" / "images" / "benchmarks.svg").read_text())
    bars = [bar for part in parts.values() for bar in part]
    assert [text for text in drawn if text in {bar.label for bar in bars}] == [bar.label for bar in bars]
    assert [text for text in drawn if re.fullmatch(r"\d\.\d\d", text)] == [bar.text for bar in bars]
