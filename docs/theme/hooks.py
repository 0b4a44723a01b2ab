"""Pages for files outside of docs/ that pages link to, so that links which work in the repository work in the site too.

A Markdown file becomes a page, a script or another source file a page that shows it, a folder a list of its files, and
anything else (images, JSON) is copied. All are in ``repository/``, where mkdocs.yml can name them in its navigation; but
links to examples lead to their pages in ``examples/``, which notebooks.py makes. The footer has the version and the date.
"""

import datetime
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALWAYS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
ALWAYS += [ROOT / name / "README.md" for name in ("benchmarks", "examples")]
EXAMPLES = {path for path in (ROOT / "examples").glob("*.py") if "def main(" in path.read_text()}

LANGUAGES = {".py": "python", ".sh": "bash", "": "bash", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml"}
LANGUAGES |= {".conf": "properties", ".properties": "properties"}
"""The files that are shown in a page, by suffix; those without one are scripts."""

LINK = re.compile(r"(?P<open>\]\()(?P<target>[^)#\s]+)(?P<rest>[^)]*\))")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write the version, and the date of the build, into the footer."""
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "sparkkeras" / "__init__.py").read_text(), re.MULTILINE)
    config.copyright = f"sparkkeras {version}, built on {datetime.date.today()}. {config.copyright}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a file for everything outside of docs/ that pages link to, and that those pages link to."""
    to_read = [*DOCS.rglob("*.md"), *ALWAYS]
    added = set(ALWAYS)
    for path in to_read:
        for target in sorted(set(_linked(path)) - added):
            added.add(target)
            if target.suffix == ".md" or target.is_dir():
                to_read.append(target)
    for path in sorted(added - EXAMPLES):
        files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links point to the pages made of the files that they name."""
    path = _PATHS.get(page.file.src_uri, DOCS / page.file.src_uri)
    folder = path if path.is_dir() else path.parent

    def rewritten(link: re.Match[str]) -> str:
        target = _existing(folder, link["target"])
        if target is None or (DOCS in path.parents and DOCS in target.parents):
            return link[0]
        return link["open"] + os.path.relpath(_uri(target), Path(page.file.src_uri).parent) + link["rest"]

    end, parts = 0, []
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(rewritten, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewritten, markdown[end:])])


_PATHS: dict[str, Path] = {}
"""The file in the repository that each added page is made of."""


def _file(path: Path, config: MkDocsConfig) -> File:
    uri = _uri(path)
    _PATHS[uri] = path
    if path.suffix == ".md" or not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(path))
    return File.generated(config, uri, content=_source_page(path))


def _source_page(path: Path) -> str:
    """The page of a source file, or of a folder; the search leaves it out."""
    name = path.relative_to(ROOT)
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        return head + _listing(path)
    return f"{head}````{LANGUAGES[path.suffix]}\n{path.read_text()}````\n"


def _listing(folder: Path) -> str:
    return "\n".join(f"- [{path.name}]({path.name})" for path in sorted(folder.iterdir()) if path.is_file())


def _linked(page: Path) -> Iterator[Path]:
    """The files outside of docs/ that a page, or the list of a folder, links to."""
    text = _listing(page) if page.is_dir() else FENCE.sub("", page.read_text())
    for link in LINK.finditer(text):
        target = _existing(page if page.is_dir() else page.parent, link["target"])
        if target is not None and DOCS not in target.parents:
            yield target


def _existing(folder: Path, target: str) -> Path | None:
    """The file or folder that a relative link names, a folder's README if it has one; ``None`` for other links."""
    path = Path(os.path.normpath(folder / target))
    if (path / "README.md").exists():
        path /= "README.md"
    return path if ROOT in path.parents and path.exists() else None


def _uri(path: Path) -> str:
    """The place of a file of the repository in the site."""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    if path in EXAMPLES:
        return f"examples/{path.stem}.md"
    if path == ROOT / "examples" / "README.md":
        return "examples/index.md"
    inside = Path("repository") / path.relative_to(ROOT)
    if path.is_dir():
        return f"{inside.as_posix()}/index.md"
    if path.name == "README.md":  # MkDocs would make it the index of its folder, and of its section in the navigation
        return f"{inside.parent.as_posix()}.md"
    return inside.as_posix() + (".md" if path.suffix in LANGUAGES else "")
