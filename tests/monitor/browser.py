"""Chromium for the tests and screenshots of the monitor's page."""

import os
import shutil
from contextlib import contextmanager

ARGUMENTS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


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
