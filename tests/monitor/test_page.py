"""The monitor's page in a browser: what it shows of messages, from a server and in saved files."""

import re

import pytest

from tests.monitor import samples
from tests.monitor.browser import find_browser, start_browser
from tests.monitor.pages import PAGE, SCRIPTS, page, read
from tests.monitor.server import serve

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not find_browser():
        pytest.skip("needs Chromium or Chrome: on PATH, or its path in the variable CHROME")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright, start_browser(playwright, tmp_path_factory.mktemp("browser")) as started:
        yield started


class Tabs:
    """Opens pages, and collects what must not happen in them."""

    def __init__(self, browser, folder):
        self.browser = browser
        self.folder = folder
        self.errors = []
        self.requests = []
        self.contexts = []

    def open(self, url, viewport=DESKTOP, **settings):
        context = self.browser.new_context(viewport=viewport, reduced_motion="reduce", **settings)
        context.set_default_timeout(5000)
        self.contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.goto(url)
        return tab

    def saved(self, messages, name="run.html"):
        path = self.folder / name
        path.write_text(page(messages), encoding="utf-8")
        return path

    def open_saved(self, messages, **settings):
        return self.open(self.saved(messages).as_uri(), **settings)


@pytest.fixture
def tabs(browser, tmp_path):
    opened = Tabs(browser, tmp_path)
    yield opened
    for context in opened.contexts:
        context.close()
    assert opened.errors == []


def facts(tab):
    """The numbers in the head of a run, by name."""
    return dict(
        tab.evaluate(
            "[...document.querySelectorAll('.facts > div')].map((fact) => [...fact.children].map((part) => part.textContent))"
        )
    )


def drawn(tab, title):
    """The points of the series that a chart has drawn."""
    return tab.evaluate(
        """(title) => {
            const card = [...document.querySelectorAll('.chart')].find((chart) => chart.querySelector('h3').textContent === title);
            const chart = card && echarts.getInstanceByDom(card.querySelector('.canvas'));
            return chart ? chart.getOption().series.map((series) => series.data) : [];
        }""",
        title,
    )


def wait_for_points(tab, title, count):
    tab.wait_for_function(
        """([title, count]) => {
            const card = [...document.querySelectorAll('.chart')].find((chart) => chart.querySelector('h3').textContent === title);
            const chart = card && echarts.getInstanceByDom(card.querySelector('.canvas'));
            return chart?.getOption()?.series?.[0]?.data.length === count;
        }""",
        arg=[title, count],
    )


def column(tab, panel, key):
    """The texts of a column of the table in a panel, without hidden rows."""
    return tab.evaluate(
        """([panel, key]) => {
            const section = [...document.querySelectorAll('.panel')].find((part) => part.querySelector('h2').textContent === panel);
            const heads = [...section.querySelectorAll('thead tr > *')];
            const index = heads.findIndex((head) => head.dataset.column === key);
            return [...section.querySelectorAll('tbody tr:not(.details)')].map((row) => row.children[index].textContent);
        }""",
        [panel, key],
    )


@pytest.mark.browser
def test_curves_grow_as_messages_arrive(tabs):
    messages = samples.synchronous()
    ends = [index for index, message in enumerate(messages) if message["type"] == "epoch"]
    with serve() as server:
        tab = tabs.open(server.url)
        tab.get_by_text("Waiting for a run").wait_for()
        server.messages += messages[:3]
        tab.get_by_text("Storing rows on the workers").wait_for()
        server.messages += messages[3 : ends[1] + 1]
        wait_for_points(tab, "loss", 2)
        server.messages += messages[ends[1] + 1 : ends[2] + 2]
        wait_for_points(tab, "loss", 3)
        assert tab.locator(".badge-running").inner_text() == "running"
        server.messages += messages[ends[2] + 2 :]
        tab.locator(".head .badge-finished").wait_for()
        wait_for_points(tab, "loss", 30)
        assert facts(tab)["Epoch"] == "30 of 30"
        losses = [[message["epoch"] + 1, message["logs"]["loss"]] for message in messages if message["type"] == "epoch"]
        assert drawn(tab, "loss")[0] == losses


@pytest.mark.browser
def test_a_saved_file_shows_the_same_without_any_request(tabs):
    messages = samples.synchronous()
    with serve(messages) as server:
        live = tabs.open(server.url)
        live.locator(".head .badge-finished").wait_for()
        wait_for_points(live, "loss", 30)
        live.wait_for_timeout(100)
        shown = live.locator("main").inner_text()
        curves = drawn(live, "loss")
        live.close()
    del tabs.requests[:]
    saved = tabs.open_saved(messages)
    wait_for_points(saved, "loss", 30)
    saved.wait_for_timeout(1500)
    assert saved.locator("main").inner_text() == shown
    assert drawn(saved, "loss") == curves
    assert [url for url in tabs.requests if not url.startswith("data:")] == [saved.url]
    assert saved.locator("#connection").is_hidden()


def test_the_page_is_one_document_that_loads_nothing():
    html = page([{"type": "phase", "run": "</script><script>", "time": 0, "text": ""}])
    assert not re.search(
        r"<(?:link|script|img|iframe)[^>]+(?:src|href)=(?![\"']data:)", html.replace(read("echarts.min.js"), "")
    )
    assert html.count("</script>") == 3
    assert "\\u003c/script>" in html


def test_scripts_make_no_markup_of_text():
    for name in SCRIPTS:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", read(name)), (
            name
        )
    assert not re.search(r"\son\w+=", read("page.html"))


def test_the_chart_library_has_its_license():
    assert "Apache License" in (PAGE / "echarts.LICENSE").read_text()
    assert "Apache ECharts" in (PAGE / "echarts.NOTICE").read_text()
