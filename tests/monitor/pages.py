"""Saved pages of the monitor with the messages of a test."""

import json
from pathlib import Path

from sparkkeras.monitor import page as module

PAGE = Path(module.__file__).parent / "page"


def page(messages, select=None):
    """The saved page of these messages."""
    html = module.saved_page(json.dumps(messages, allow_nan=False))
    return html.replace('{"messages":', f'{{"select":{json.dumps(select)},"messages":', 1) if select else html


def read(name):
    return (PAGE / name).read_text(encoding="utf-8")
