"""Saved pages of the monitor with the messages of a test."""

import json
from pathlib import Path

from sparkkeras.monitor import server as module

PAGE = Path(module.__file__).parent / "page"


def page(messages, selects_all=False):
    """The saved page of these messages."""
    return module.saved_page(json.dumps(messages, allow_nan=False), selects_all)


def read(name):
    return (PAGE / name).read_text(encoding="utf-8")
