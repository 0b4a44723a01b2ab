"""The checks of scripts/release say what keeps a working tree from being released, and which links are dead on PyPI."""

import re
import runpy
import subprocess
import tomllib

import pytest

from tests.scripts import ROOT

CHECKS = runpy.run_path(str(ROOT / "scripts" / "release_checks.py"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = "https://github.com/example/sparkkeras"
PROJECT = f'[project]\n[project.urls]\nRepository = "{REPOSITORY}"\n'
CHANGELOG = """# Changes

## [Unreleased]

## [0.2.0] - 2026-01-31

### Added

- A name.

## [0.1.0] - 2025-12-31

- All.
"""
CITATION = f"cff-version: 1.2.0\nversion: 0.2.0\ndate-released: 2026-01-31\nrepository-code: {REPOSITORY}\n"


def git(folder, *arguments):
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path):
    """A working tree that can be released as 0.2.0."""
    (tmp_path / "sparkkeras").mkdir()
    (tmp_path / "sparkkeras" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "README.md").write_text("pip install sparkkeras\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text(CITATION)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "Release 0.1.0")
    git(tmp_path, "tag", "v0.1.0")
    commit(tmp_path)
    return tmp_path


def commit(tree):
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "Change")


def change(tree, name, old, new):
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new, 1))
    commit(tree)


def test_a_tree_in_which_all_fits_together_can_be_released(tree):
    assert CHECKS["state"](tree) == []
    git(tree, "tag", "v0.2.0")
    assert CHECKS["state"](tree) == []


VERSION = ("sparkkeras/__init__.py", "0.2.0")


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- More.\n", r"under \[Unreleased\]"),
        ("CHANGELOG.md", "## [0.2.0] - 2026-01-31", "## [0.3.0] - 2026-01-31", "no section for 0.2.0"),
        ("CHANGELOG.md", " - 2026-01-31", "", "has no date"),
        ("CHANGELOG.md", "### Added\n\n- A name.\n", "", "is empty"),
        ("CHANGELOG.md", "2026-01-31", "2999-01-31", "in the future"),
        ("CITATION.cff", "version: 0.2.0", "version: 0.1.0", "write `version: 0.2.0`"),
        ("CITATION.cff", "2026-01-31", "2026-01-30", "write `date-released: 2026-01-31`"),
        ("pyproject.toml", "[project.urls]\nRepository", "X", r"add `\[project\.urls\]`"),
        ("README.md", "install sparkkeras", "install .", "write `pip install sparkkeras`"),
        (*VERSION, "0.1.0", "must be later than"),
        (*VERSION, "0.2.0.dev1", "no version for a release"),
        (*VERSION, "next", "is no version"),
    ],
)
def test_a_problem_says_what_to_do(tree, name, old, new, expected):
    change(tree, name, old, new)
    assert any(re.search(expected, problem) for problem in CHECKS["state"](tree))


def test_changes_that_are_not_committed_are_named(tree):
    (tree / "notes.txt").write_text("")
    (tree / "README.md").write_text("pip install sparkkeras now\n")
    (problem,) = CHECKS["state"](tree)
    assert "(README.md, notes.txt): commit them" in problem


def described(links=None, pictures=None):
    """README.md as pyproject.toml changes it for PyPI, with these replacements of links and of pictures."""
    text = (ROOT / "README.md").read_text()
    substitutions = SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    for substitution, replacement in zip(substitutions, (pictures, links), strict=True):
        text = re.sub(substitution["pattern"], replacement or substitution["replacement"], text)
    return text.replace("$HFPR_VERSION", "0.2.0")


def check(description, repository=REPOSITORY):
    return CHECKS["_of_description"](description, repository, "0.2.0", ROOT)


def test_pypi_shows_the_readme_as_it_is_built_now():
    assert check(described(), SETTINGS["project"].get("urls", {}).get("Repository")) == []


def test_pypi_shows_the_pictures_of_the_readme_where_there_is_a_repository():
    def check_pictures(description, repository=REPOSITORY):
        return CHECKS["_of_pictures"](description, repository, "0.2.0", ROOT)

    assert check_pictures(described(), repository=None) == []
    (problem,) = check_pictures(described())
    assert "docs/images/benchmarks.svg" in problem
    replacement = re.search(r"write `replacement = '(.*)'`", problem)[1]
    described_with_pictures = described(rf"[\1]({REPOSITORY}/blob/v$HFPR_VERSION/\2)", replacement)
    assert check_pictures(described_with_pictures) == check(described_with_pictures) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/policy.md)", "PyPI cannot resolve 'docs/policy.md'"),
        ("[a](#nowhere)", "PyPI cannot resolve '#"),
        (f"[a]({REPOSITORY}/blob/v0.2.0/docs/gone.md)", "links to docs/gone.md, which does not exist"),
        (f"[a]({REPOSITORY}/blob/v0.2.0/docs/policy.md#gone)", "a heading that does not exist"),
        (f"![a]({REPOSITORY}/blob/v0.2.0/docs/images/overview.svg)", "/raw/ instead of /blob/"),
        (f"[a]({REPOSITORY}/blob/main/docs/policy.md)", r"write `replacement = '[\1]("),
    ],
)
def test_links_that_lead_nowhere_on_pypi_are_found(text, expected):
    good = "" if "/blob/main/" in text else f"[good]({REPOSITORY}/blob/v0.2.0/docs/policy.md#version-numbers) [top](#top)"
    problems = check(f"# Top\n\n{good}\n\n{text}\n")
    assert len(problems) == 1
    assert expected in problems[0]
