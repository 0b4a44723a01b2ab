"""Pages of the monitor for its tests and screenshots: saved or served with the messages of a test, and Chromium for them."""

import json
import os
import shutil
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from sparkkeras.monitor import server as module
from sparkkeras.monitor.messages import Messages

PAGE = Path(module.__file__).parent / "page"
ARGUMENTS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def page(messages, selects_all=False):
    """The saved page of these messages."""
    return module.saved_page(json.dumps(messages, allow_nan=False), selects_all)


def read(name):
    return (PAGE / name).read_text(encoding="utf-8")


class MonitorServer:
    """Serves the page and the messages that were added."""

    def __init__(self, messages=(), port=0, token=None):
        self._messages = Messages()
        self._server = module.PageServer(self._messages, "127.0.0.1", port)
        if token is not None:
            self._server.url = self._server.url.replace(self._server.token, token)
            self._server.token = token
        self.url, self.close = self._server.url, self._server.close
        self.address = {"port": urlsplit(self.url).port, "token": self._server.token}
        """What a server has that replaces this one at the same address."""
        self.add(messages)

    def add(self, messages):
        for message in messages:
            self._messages.add(message)


@contextmanager
def serve(messages=(), **address):
    with closing(MonitorServer(messages, **address)) as server:
        yield server


def find_browser():
    """The path of a Chromium or Chrome: in the variable CHROME, or on PATH."""
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def start_browser(playwright, scratch):
    """A browser with a profile of its own, which writes its files to a folder of ours."""
    environment = {**os.environ, "TMPDIR": str(scratch), "TZ": "UTC"}
    browser = playwright.chromium.launch(
        executable_path=find_browser(), args=ARGUMENTS, chromium_sandbox=False, headless=True, env=environment
    )
    try:
        yield browser
    finally:
        browser.close()
