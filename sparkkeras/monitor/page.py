"""The page of the monitor: one HTML document with its style, its scripts and the chart library."""

from __future__ import annotations

from functools import cache
from importlib import resources

SCRIPTS = (
    "state.js", "format.js", "derive.js", "dom.js", "tables.js", "charts.js", "panels.js", "search.js", "runs.js", "main.js",
)  # fmt: skip
"""The scripts of the page, in the order in which it runs them."""


def live_page(nonce: str) -> bytes:
    """The page of a server, which requests the messages.

    Args:
        nonce: The nonce of its scripts in the Content-Security-Policy.
    """
    return f'nonce="{nonce}"'.encode().join(_parts_of_live_page())


def saved_page(messages: str, selects_all: bool = False) -> str:
    """A page that needs no server.

    Args:
        messages: All messages, as a JSON array.
        selects_all: Whether all runs are selected when it is opened, instead of the last one.
    """
    select = '"select":"all",' if selects_all else ""
    return _with_data("{" + select + '"messages":' + messages.replace("<", "\\u003c") + "}")


@cache
def _parts_of_live_page() -> list[bytes]:
    return _with_data("null").encode().split(b'nonce="NONCE"')


def _with_data(data: str) -> str:
    return _document().replace("<!--data-->null", data, 1)


@cache
def _document() -> str:
    folder = resources.files(__package__) / "page"
    parts = {
        "/*style*/": ["page.css"],
        "/*charts*/": ["echarts.min.js"],
        "/*script*/": SCRIPTS,
    }
    document = (folder / "page.html").read_text("utf-8")
    for marker, names in parts.items():
        document = document.replace(marker, "\n".join((folder / name).read_text("utf-8") for name in names), 1)
    return document
