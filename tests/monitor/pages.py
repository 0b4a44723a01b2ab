"""Pages of the monitor, assembled from their files and messages."""

import json
from pathlib import Path

PAGE = Path(__file__).parents[2] / "sparkkeras/monitor/page"
SCRIPTS = (
    "state.js",
    "format.js",
    "derive.js",
    "dom.js",
    "tables.js",
    "charts.js",
    "panels.js",
    "search.js",
    "runs.js",
    "main.js",
)
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(messages=None, nonce="saved"):
    """The page with these messages in it, or, without, one that asks a server for them."""
    data = "null" if messages is None else json.dumps({"messages": messages}, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "NONCE": nonce,
        "/*style*/": read("page.css"),
        "/*charts*/": read("echarts.min.js"),
        "/*script*/": "\n".join(read(name) for name in SCRIPTS),
        "<!--data-->null": data,
    }
    html = read("page.html")
    for marker, content in parts.items():
        assert marker in html
        html = html.replace(marker, content)
    return html


def read(name):
    return (PAGE / name).read_text(encoding="utf-8")
