"""Screenshots of the monitor's page for the documentation: python -m tests.monitor.screenshots FOLDER."""

import io
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.monitor import samples
from tests.monitor.pages import page, start_browser

TALLEST = 1900  # pixels of a page; charts outside of the screen are not drawn
SHOTS = {
    "fit": (samples.synchronous, {}),
    "asynchronous": (samples.asynchronous, {}),
    "search": (samples.search, {}),
    "comparison": (samples.comparison, {}),
    "dark": (samples.asynchronous, {"color_scheme": "dark"}),
    "phone": (
        samples.synchronous,
        {"viewport": {"width": 360, "height": 780}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True},
    ),
}


def main(folder):
    with (
        sync_playwright() as playwright,
        tempfile.TemporaryDirectory() as scratch,
        start_browser(playwright, scratch) as browser,
    ):
        for name, (messages, settings) in SHOTS.items():
            path = Path(scratch, f"{name}.html")
            path.write_text(page(messages()), encoding="utf-8")
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
            tab = context.new_page()
            tab.goto(path.as_uri())
            for box in tab.locator(".runs input").all() if name == "comparison" else ():
                box.check()
            height = tab.evaluate("document.documentElement.scrollHeight")
            tab.set_viewport_size({"width": tab.viewport_size["width"], "height": min(height, TALLEST)})
            tab.wait_for_timeout(500)
            save(tab.screenshot(), Path(folder, f"monitor-{name}.png"))
            context.close()


def save(png, path):
    """Save a screenshot in 256 colours, which takes a third of the space: frequent ones, and those unlike the others."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    pixels = np.asarray(image).reshape(-1, 3)
    colours, indices, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    nearest, distance = np.zeros(len(colours), np.uint8), np.full(len(colours), np.inf)
    palette = [colours[counts.argmax()]]
    for index in range(256):
        to_latest = np.square(colours - palette[index].astype(int)).sum(axis=1)
        nearest[to_latest < distance] = index
        distance = np.minimum(distance, to_latest)
        palette.append(colours[(distance * np.sqrt(counts)).argmax()])
    reduced = Image.fromarray(nearest[indices].reshape(image.height, image.width), "P")
    reduced.putpalette(np.array(palette[:256]).tobytes())
    reduced.save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
