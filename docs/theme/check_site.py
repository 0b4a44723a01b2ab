"""Check the site that MkDocs has built: python docs/theme/check_site.py site.

Every link within the site must lead to a page and an anchor that exist, and no page or style sheet may load anything from
another host, so that the site can be read without a network.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"audio", "embed", "iframe", "img", "input", "link", "object", "script", "source", "track", "video"}
"""The elements whose ``src``, ``href``, ``srcset`` or ``data`` a browser loads by itself."""

LINKS_ONLY = {"alternate", "author", "canonical", "license", "next", "prev"}
"""The relations of ``<link>`` that a browser does not load."""


class Document(HTMLParser):
    """What a page links to, loads, and offers as anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the addresses and the anchor of an element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag in LOADING and given.get("rel") not in LINKS_ONLY:
            self.loaded |= {given[name].split(" ")[0] for name in ("src", "href", "srcset", "data") if given.get(name)}


def problems(site: Path) -> list[str]:
    """What is wrong with a site, one line for each problem."""
    pages = {path: Document(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name} loads {url}" for url in page.loaded if _is_elsewhere(url)]
        for url in sorted(page.links | page.loaded):
            if path.name != "404.html" and not urlsplit(url).scheme and not _is_elsewhere(url):
                found += [f"{name} links to {url}: {reason}" for reason in _broken(url, path, pages)]
    for path in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')]+)", path.read_text())
        found += [f"{path.relative_to(site)} loads {url}" for url in urls if _is_elsewhere(url)]
    return found


def _is_elsewhere(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme in {"http", "https"}


def _broken(url: str, path: Path, pages: dict[Path, Document]) -> list[str]:
    parts = urlsplit(url)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return ["there is no such file"]
    anchor = unquote(parts.fragment)
    if anchor and not anchor.startswith("__") and target in pages and anchor not in pages[target].anchors:
        return [f"there is no anchor {anchor}"]
    return []


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]).resolve())) or None)
