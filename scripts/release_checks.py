"""The checks of `scripts/release` and `scripts/wheel`, each of which says what to do about what it finds.

    python scripts/release_checks.py state          do version, changelog, citation, README and git fit a release?
    python scripts/release_checks.py distributions  the files of the wheel in dist/, and README.md as PyPI shows it

The exit status is 1 if there are problems, which are listed on standard error.
"""

from __future__ import annotations

import datetime
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import yaml
from packaging.version import VERSION_PATTERN, InvalidVersion, Version
from readme_renderer import markdown

ROOT = Path(__file__).resolve().parents[1]

VERSION = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)
SECTION = re.compile(r"^## \[([^\]]+)\](.*)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
"""A section of the changelog: its version, the rest of its heading, its text."""

PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?://)([^)\s]+)\)")
"""A picture of README.md: its path in the repository."""


def state(root: Path = ROOT) -> list[str]:
    """What keeps the working tree from being released as its version, one text for each problem."""
    version = re.search(r'^__version__ = "(.*)"$', (root / "sparkkeras" / "__init__.py").read_text(), re.MULTILINE)[1]
    repository = _project(root).get("urls", {}).get("Repository")
    return [
        *_of_version(version, root),
        *_of_changelog(version, (root / "CHANGELOG.md").read_text()),
        *_of_citation(version, repository, root),
        *_of_readme(repository, root),
        *_of_working_tree(root),
    ]


def distributions(root: Path = ROOT) -> list[str]:
    """What is wrong with the wheel in dist/."""
    wheels = sorted((root / "dist").glob("*.whl"))
    if len(wheels) != 1:
        return [f"dist/ holds {len(wheels)} wheels instead of one: build them with `bash scripts/wheel`."]
    with zipfile.ZipFile(wheels[0]) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    repository = _project(root).get("urls", {}).get("Repository")
    description = metadata.get_payload(decode=True).decode()
    version = metadata["Version"]
    return [
        *_of_files(names, root),
        *_of_description(description, repository, version, root),
        *_of_pictures(description, repository, version, root),
    ]


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def _of_version(version: str, root: Path) -> list[str]:
    where = f'__version__ = "{version}" in sparkkeras/__init__.py'
    try:
        parsed = Version(version)
    except InvalidVersion:
        return [f"{where} is no version: write one such as 0.2.0, or 0.2.0rc1."]
    if parsed.is_devrelease or parsed.local or str(parsed) != version or len(parsed.release) != 3:
        return [f"{where} is no version for a release: write three numbers such as 0.2.0, or 0.2.0rc1."]
    if f"v{version}" in _git(root, "tag", "--points-at", "HEAD").split():
        return []
    tags = [tag[1:] for tag in _git(root, "tag", "--list", "v[0-9]*").split()]
    latest = max((Version(tag) for tag in tags if VERSION.fullmatch(tag)), default=None)
    if latest is not None and parsed <= latest:
        return [f"{where} must be later than {latest}, for which there is a tag: raise it as docs/policy.md describes."]
    return []


def _of_changelog(version: str, text: str) -> list[str]:
    sections = {found[1]: (found[2], found[3].strip()) for found in SECTION.finditer(text)}
    problems = []
    if sections.get("Unreleased", ("", ""))[1]:
        problems.append(
            f"CHANGELOG.md has entries under [Unreleased]: move them to a section `## [{version}] - YYYY-MM-DD` below it."
        )
    if version not in sections:
        return [*problems, f"CHANGELOG.md has no section for {version}: add `## [{version}] - YYYY-MM-DD` with its changes."]
    if not sections[version][1]:
        problems.append(f"The section for {version} in CHANGELOG.md is empty: list what changes for users.")
    day = _day(version, text)
    if day is None:
        problems.append(
            f"The section for {version} in CHANGELOG.md has no date: its heading must be `## [{version}] - YYYY-MM-DD`."
        )
    elif day > datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1):  # already begun elsewhere
        problems.append(f"CHANGELOG.md dates {version} {day}, in the future: write the day of the release.")
    return problems


def _day(version: str, changelog: str) -> datetime.date | None:
    """The date of a version in the changelog; ``None`` if there is none that is valid."""
    headings = {found[1]: found[2] for found in SECTION.finditer(changelog)}
    try:
        return datetime.date.fromisoformat(headings.get(version, "").removeprefix(" - ").strip())
    except ValueError:
        return None


def _of_citation(version: str, repository: str | None, root: Path) -> list[str]:
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    expected = {"version": version, "date-released": _day(version, (root / "CHANGELOG.md").read_text())}
    sources = {"version": "sparkkeras/__init__.py", "date-released": "CHANGELOG.md"}
    if repository is not None:
        expected["repository-code"], sources["repository-code"] = repository, "pyproject.toml"
    return [
        f"CITATION.cff has {name}: {citation.get(name)}; write `{name}: {value}`, as in {sources[name]}."
        for name, value in expected.items()
        if value is not None and str(citation.get(name)) != str(value)
    ]


def _of_readme(repository: str | None, root: Path) -> list[str]:
    problems = []
    if repository is None:
        problems.append(
            "pyproject.toml names no repository for PyPI and the links of README.md to lead to: add `[project.urls]` with "
            '`Repository = "https://github.com/OWNER/NAME"`.'
        )
    if "pip install sparkkeras" not in (root / "README.md").read_text():
        problems.append("README.md, which PyPI shows, installs a clone only: write `pip install sparkkeras` there.")
    return problems


def _of_working_tree(root: Path) -> list[str]:
    changed = _git(root, "status", "--porcelain").splitlines()
    if not changed:
        return []
    names = ", ".join(line[3:] for line in changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    return [f"The working tree has changes that are not committed ({names}): commit them, or remove them (git stash -u)."]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def _of_files(names: list[str], root: Path) -> list[str]:
    packed = {name for name in names if ".dist-info/" not in name}
    sources = {
        path.relative_to(root).as_posix()
        for path in (root / "sparkkeras").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    problems = []
    if packed != sources or "sparkkeras/py.typed" not in packed:
        problems.append(f"The wheel has other files than sparkkeras/: {sorted(packed ^ sources)}.")
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        problems.append("The wheel has no LICENSE: see license-files in pyproject.toml.")
    return problems


class Links(HTMLParser):
    """The targets of the links and images of a page, and the ids of its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.images: set[str] = set()
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the target and the id of an element."""
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id",) if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.add(given["href"] or "")
        if tag in {"img", "source"}:
            self.images |= {given[name] or "" for name in ("src", "srcset") if name in given}


def _of_description(description: str, repository: str | None, version: str, root: Path) -> list[str]:
    """What is wrong with the description of a distribution, which is README.md, as PyPI would show it."""
    html = markdown.render(description)
    if html is None:
        return ["PyPI cannot render README.md: see `python -m readme_renderer README.md`."]
    page = Links(html)
    problems = [
        f"PyPI cannot resolve {target!r} in README.md: write `[text](target)`, which pyproject.toml makes absolute "
        "(fancy-pypi-readme), or a complete URL."
        for target in sorted(page.links | page.images)
        if not re.match(r"https?://|mailto:|#", target) or (target[0] == "#" and target[1:] not in page.ids)
    ]
    if repository is None:
        return problems
    blob = f"{repository}/blob/v{version}/"
    if not any(target.startswith(blob) for target in page.links):
        problems.append(
            f"No link of README.md leads to {blob} on PyPI: in pyproject.toml, under "
            r"[[tool.hatch.metadata.hooks.fancy-pypi-readme.substitutions]], write "
            rf"`replacement = '[\1]({repository}/blob/v$HFPR_VERSION/\2)'`."
        )
    problems += [
        f"{target} is a page and no image: write its complete URL in README.md, with /raw/ instead of /blob/."
        for target in sorted(page.images)
        if target.startswith(blob)
    ]
    for target in sorted(page.links | page.images):
        inside = re.fullmatch(rf"{re.escape(repository)}/(?:blob|raw)/v{re.escape(version)}/([^#]*)#?(.*)", target)
        if inside and not (root / inside[1]).exists():
            problems.append(f"README.md links to {inside[1]}, which does not exist: correct the link.")
        elif inside and inside[2] and f"user-content-{inside[2]}" not in _ids(root / inside[1]):
            problems.append(f"README.md links to {inside[1]}#{inside[2]}, a heading that does not exist: correct the link.")
    return problems


def _of_pictures(description: str, repository: str | None, version: str, root: Path) -> list[str]:
    """What is wrong with the pictures of README.md in the description of a distribution, once there is a repository."""
    if repository is None:
        return []
    raw = f"{repository}/raw/v{version}/"
    shown = Links(markdown.render(description) or "").images
    hidden = [path for path in PICTURE.findall((root / "README.md").read_text()) if raw + path not in shown]
    return [
        f"PyPI does not show {', '.join(hidden)}: in pyproject.toml, in the first of "
        r"[[tool.hatch.metadata.hooks.fancy-pypi-readme.substitutions]], write "
        rf"`replacement = '![\1]({repository}/raw/v$HFPR_VERSION/\2)'`."
    ][: len(hidden)]


@cache
def _ids(path: Path) -> set[str]:
    return Links(markdown.render(path.read_text()) or "").ids


CHECKS: dict[str, Callable[[], list[str]]] = {"state": state, "distributions": distributions}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in CHECKS:
        sys.exit(f"usage: python scripts/release_checks.py {'|'.join(CHECKS)}")
    sys.exit("\n".join(f"- {problem}" for problem in CHECKS[sys.argv[1]]()) or None)
