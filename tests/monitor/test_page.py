"""The monitor's page in a browser: what it shows of messages, from a server and in saved files."""

import json
import math
import re
import time

import pytest

from sparkkeras.events import RunStarted
from sparkkeras.monitor.messages import Messages, RunReporter
from tests.monitor import samples
from tests.monitor.pages import find_browser, page, serve, start_browser

pytestmark = pytest.mark.browser

DESKTOP = {"width": 1280, "height": 900}
SHORT, TALL = {"width": 1280, "height": 500}, {"width": 1280, "height": 1600}
PHONE = {"width": 360, "height": 740}
VIEWS = {
    "asynchronous": samples.asynchronous,
    "failed": samples.failed,
    "search": samples.search,
    "ensemble": samples.ensemble,
    "function": samples.function,
    "comparison": samples.comparison,
}

HELPERS = """
const wait = setTimeout;
globalThis.setTimeout = (call, time) => wait(call, time < 1000 ? time : time / 5);  // a live page asks five times a second
const find = (selector, head, text) =>
    [...document.querySelectorAll(selector)].find((part) => part.querySelector(head)?.textContent === text);
globalThis.chartOf = (title) => {
    const card = find('.chart', 'h3', title);
    return card && echarts.getInstanceByDom(card.querySelector('.canvas'));
};
globalThis.seriesOf = (title) => (chartOf(title)?.getOption()?.series ?? []).map(({ data }) => data);
globalThis.columnOf = (panel, key) => {
    const section = find('.panel', 'h2', panel);
    const index = [...section.querySelectorAll('thead tr > *')].findIndex((head) => head.dataset.column === key);
    return [...section.querySelectorAll('tbody tr:not(.details)')].map((row) => row.children[index].textContent);
};
globalThis.isPrinted = (chart) => {
    const canvas = chart.querySelector('.frame > canvas');
    const { width, height } = canvas ?? { width: 0 };
    return width > 0 && canvas.getContext('2d').getImageData(0, 0, width, height).data.some((value) => value > 0);
};
globalThis.factsOf = () => Object.fromEntries(
    [...document.querySelectorAll('.facts > div')].map((fact) => [...fact.children].map((part) => part.textContent)));
"""


def wait_until(tab, expression, argument=None, timeout=15.0):
    """Wait until an expression is true. Playwright's own function evaluates it in the page, which forbids that."""
    deadline = time.monotonic() + timeout
    while not tab.evaluate(expression, argument):
        assert time.monotonic() < deadline, expression
        tab.wait_for_timeout(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not find_browser():
        pytest.skip("needs Chromium or Chrome: on PATH, or its path in the variable CHROME")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, start_browser(playwright, tmp_path_factory.mktemp("browser")) as started:
        yield started


class Tabs:
    """Opens pages, and records what they request and what fails in them."""

    def __init__(self, browser, folder):
        self.browser = browser
        self.folder = folder
        self.errors = []
        self.requests = []
        self.contexts = []

    def open(self, url, viewport=DESKTOP, **settings):
        context = self.browser.new_context(viewport=viewport, reduced_motion="reduce", **settings)
        context.set_default_timeout(15_000)
        context.add_init_script(HELPERS)
        self.contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        tab.on("pageerror", lambda error: self.errors.append(error.stack))
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.goto(url)
        return tab

    def save(self, messages, name="run.html", **data):
        path = self.folder / name
        path.write_text(page(messages, **data), encoding="utf-8")
        return path

    def open_saved(self, messages, **settings):
        tab = self.open(self.save(messages).as_uri(), **settings)
        settle(tab)
        return tab


@pytest.fixture
def tabs(browser, tmp_path):
    """Opens pages; a violation of the policy, an error or a warning in one fails the test."""
    opened = Tabs(browser, tmp_path)
    yield opened
    for context in opened.contexts:
        context.close()
    # A page may make a request after the server of a test has ended.
    assert [error for error in opened.errors if "net::ERR_" not in error] == []


def settle(tab):
    """Wait until the page has drawn what is on the screen."""
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))")


def wait_for_points(tab, title, count):
    wait_until(tab, "([title, count]) => seriesOf(title)[0]?.length === count", [title, count])


def message(type_, **fields):
    return {"type": type_, "run": "1", "time": 101.0, **fields}


def run(kind="fit", name="model", **fields):
    return message("run", time=100.0, kind=kind, name=name, **{**samples.BLANK, **fields})


def epoch(number, **logs):
    return message("epoch", epoch=number, logs=logs, rows=10, seconds=1.0, startup_seconds=0.0)


def trial(number, **fields):
    blank = {"status": "ok", "value": None, "best_epoch": None, "values": [], "seconds": 1.0, "worker": 0, "attempts": 1}
    return message("trial", trial=number, **{"params": {}, "error": "", **blank, **fields})


def ended(**fields):
    return message("end", **{"time": 110.0, "status": "failed", "error": "", "traceback": "", "seconds": 10.0, **fields})


# --- messages from a server


def test_curves_grow_as_messages_arrive_and_a_saved_file_shows_the_same_without_any_request(tabs):
    messages = samples.synchronous()
    ends = [index for index, message in enumerate(messages) if message["type"] == "epoch"]
    with serve() as server:
        tab = tabs.open(server.url)
        tab.get_by_text("Waiting for a run").wait_for()
        server.add(messages[: ends[0]])
        tab.get_by_text("Curves appear here at the end of the first epoch").wait_for()
        server.add(messages[ends[0] : ends[1] + 1])
        wait_for_points(tab, "loss", 2)
        assert tab.locator(".head .badge").inner_text() == "running"
        assert tab.get_by_role("progressbar", name="Epoch 2").get_attribute("aria-valuenow") == "100"
        server.add(messages[ends[1] + 1 :])
        tab.locator(".head .badge-finished").wait_for()
        wait_for_points(tab, "loss", 30)
        shown, curves = tab.locator("main").inner_text(), tab.evaluate("seriesOf('loss')")
    epochs = [message for message in messages if message["type"] == "epoch"]
    assert curves[0] == [[message["epoch"] + 1, message["logs"]["loss"]] for message in epochs]
    rate = 30 * 54_000 / sum(message["seconds"] for message in epochs)
    assert tab.evaluate("factsOf()")["Rows per second (average)"] == f"{rate:,.0f}"
    assert tab.locator("#announcer").inner_text() == "digits: finished"
    tab.get_by_text("The server has ended. This page shows what it had reported.").wait_for()
    assert "trying again" not in tab.locator("#connection").inner_text()

    tab.close()
    tabs.requests.clear()
    saved = tabs.open_saved(messages)
    wait_for_points(saved, "loss", 30)
    saved.wait_for_timeout(400)  # longer than between two requests of a live page
    assert saved.locator("main").inner_text() == shown
    assert saved.evaluate("seriesOf('loss')") == curves
    assert [url for url in tabs.requests if not url.startswith("data:")] == [saved.url]
    assert saved.locator("#connection").is_hidden()


def test_the_page_says_that_the_connection_is_lost_and_reloads_for_another_server(tabs):
    with serve([run(name="before")]) as server:
        tab = tabs.open(server.url)
        tab.get_by_role("heading", name="before").wait_for()
        address = server.address
    tab.get_by_text("Connection lost since").wait_for()
    with serve([run(name="after")], **address) as server:
        tab.get_by_role("heading", name="after").wait_for()
        assert tab.locator("#connection").is_hidden()


def test_a_reload_keeps_the_view(tabs):
    with serve(samples.search() + samples.comparison()) as server:
        tab = tabs.open(server.url)
        tab.get_by_label("Show only this run: digits #1").click()
        tab.get_by_role("button", name="val_loss", exact=True).click()
        tab.get_by_role("searchbox", name="Filter").fill("dropout<0.3")
        tab.get_by_role("checkbox", name="Log scale").check()
        shown = tab.evaluate("columnOf('Trials', 'trial')")
        tab.mouse.wheel(0, 500)
        wait_until(tab, "scrollY === 500")
        tab.reload()
        tab.locator("th[aria-sort=ascending]").wait_for()
        assert tab.evaluate("columnOf('Trials', 'trial')") == shown
        assert 0 < len(shown) < 40
        assert tab.get_by_role("checkbox", name="Log scale").is_checked()
        wait_until(tab, "scrollY === 500")


def test_focus_scroll_and_expanded_rows_stay_as_trials_arrive(tabs):
    messages = samples.search()
    with serve(messages[:-1]) as server:
        tab = tabs.open(server.url)
        tab.get_by_label("Details of trial 9").click()
        tab.get_by_role("region", name="Traceback of trial 9").wait_for()
        scroller = tab.get_by_role("region", name="Trials")
        scroller.evaluate("(element) => { element.scrollTop = 200; }")
        server.add(messages[-1:])
        tab.get_by_text("40 trials").wait_for()
        settle(tab)
        assert scroller.evaluate("(element) => element.scrollTop") == 200
        assert tab.get_by_role("region", name="Traceback of trial 9").is_visible()
        assert tab.evaluate("document.activeElement.ariaLabel") == "Details of trial 9"


SECONDS = """(fact) => {
    const [, minutes, seconds] = factsOf()[fact].match(/(?:(\\d+) min)? ?(?:(\\d+) s)?/);
    return 60 * (minutes ?? 0) + Number(seconds ?? 0);
}"""


def test_the_time_of_a_run_does_not_depend_on_clocks(tabs):
    """The messages of the samples are from another year than the clocks of the server and the browser."""
    with serve([run(epochs=9), message("progress", time=160.0, epoch=0, done=0.5, seconds_left=500.0)]) as server:
        tab = tabs.open(server.url)
        wait_until(tab, "factsOf()['Elapsed']?.startsWith('1 min')")
        wait_until(tab, f"({SECONDS})('Elapsed') >= 62")
        assert tab.evaluate(f"({SECONDS})('Elapsed') + ({SECONDS})('Left')") == pytest.approx(560, abs=2)


# --- saved files


def test_chosen_and_dropped_files_are_compared_and_others_are_rejected(tabs):
    tab = tabs.open_saved(samples.synchronous())
    second = samples.synchronous(epochs=12, run="fit-1", name="digits, small learning rate", learning_rate=0.0005)
    tab.locator("#files").set_input_files(tabs.save(second, "second.html"))
    tab.get_by_role("heading", name="2 runs compared").wait_for()
    settle(tab)
    assert tab.evaluate("seriesOf('loss').map((data) => data.length)") == [30, 30, 12, 12]
    assert tab.evaluate("columnOf('Results', 'run')") == ["digits", "digits, small learning rate"]
    assert tab.evaluate("columnOf('Results', 'epochs')") == ["30", "12"]
    assert tab.evaluate("columnOf('Settings that differ', 'setting')") == ["learning_rate"]
    tab.evaluate(DROP, ["other.html", "<p id=data>no page of ours"])
    tab.get_by_text("No saved page of sparkkeras: other.html").first.wait_for()
    tab.evaluate(DROP, ["third.html", page(samples.failed())])
    tab.get_by_role("heading", name="3 runs compared").wait_for()


DROP = """([name, text]) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([text], name, { type: 'text/html' }));
    window.dispatchEvent(new DragEvent('drop', { dataTransfer: transfer, cancelable: true }));
}"""


def history(epochs):
    """The messages of a saved History."""
    messages, logs = Messages(), {"loss": [0.5] * epochs, "val_loss": [0.6] * epochs}
    RunReporter(messages, RunStarted("fit", "from a History", epochs=epochs)).add_history(range(epochs), logs)
    return json.loads(messages.after(0)[1])


def test_histories_of_one_name_are_numbered_and_have_no_times(tabs):
    tab = tabs.open_saved(history(epochs=2))
    assert set(tab.evaluate("factsOf()")) == {"Epoch", "Loss", "Best val_loss"}
    second = history(epochs=3)
    tab.locator("#files").set_input_files(tabs.save(second, "second.html"))
    names = ["from a History #1", "from a History #2"]
    tab.get_by_role("heading", name="2 runs compared").wait_for()
    settle(tab)
    assert tab.locator(".runs b").all_inner_texts() == names
    assert tab.evaluate("columnOf('Results', 'run')") == names
    assert tab.locator(".runs .muted").all_inner_texts() == ["Training", "Training · second.html"]
    assert "Time" not in tab.get_by_role("region", name="Results").inner_text()


def test_a_file_may_select_all_of_its_runs(tabs):
    path = tabs.save(samples.comparison(), selects_all=True)
    tab = tabs.open(path.as_uri())
    tab.get_by_role("heading", name="3 runs compared").wait_for()
    tab.get_by_label("Show only this run: digits, wide").click()
    tab.reload()
    tab.get_by_role("heading", name="digits, wide", exact=True).wait_for()


# --- a fit


def test_the_header_tells_how_far_a_run_is(tabs):
    tab = tabs.open_saved(samples.asynchronous())
    assert tab.evaluate("factsOf()")["Rows per second (now)"] == "29,870"
    show_all(tab, tabs.save([run(epochs=3), message("progress", epoch=0, done=None, rows=1200)]))
    assert tab.locator(".progress").inner_text() == "Epoch 1: 1,200 rows"
    assert tab.locator(".bar").is_hidden()
    for status, shown in {"finished": "4 of 30 (stopped early)", "failed": "4 of 30"}.items():
        show_all(tab, tabs.save([run(epochs=30), epoch(3, loss=1.0), ended(status=status)]))
        assert tab.evaluate("factsOf()")["Epoch"] == shown


def test_each_epoch_of_each_worker_is_a_cell(tabs):
    tab = tabs.open_saved(samples.synchronous(workers=16))
    assert tab.locator(".warnings").inner_text() == "Worker 3 takes 2.1 times as long as the others."
    tab.get_by_text("Seconds per epoch of each worker").scroll_into_view_if_needed()
    settle(tab)
    assert tab.evaluate("seriesOf('Seconds per epoch of each worker')[0].length") == 16 * 30


def test_a_worker_is_slow_after_some_epochs_only(tabs):
    tab = tabs.open("about:blank")
    for seconds, warning in [
        ([[9, 1, 1, 1], [1, 2.1, 2.1, 2.1]], "Worker 1 takes 2.1 times as long as worker 0."),
        ([[1, 1, 1], [1, 2.1, 2.1]], ""),  # too few epochs
        ([[1, 1, 1, 1], [9, 1, 1, 1]], ""),  # the first epoch includes the start
        ([[1, 0.05, 0.05, 0.05], [1, 0.14, 0.14, 0.14]], ""),  # too short to measure
    ]:
        epochs = [
            message("workers", epoch=number, worker=[*range(len(seconds))], seconds=values)
            for number, values in enumerate(map(list, zip(*seconds, strict=True)))
        ]
        show_all(tab, tabs.save([run(), *epochs]))
        assert tab.locator(".warnings").text_content() == warning


def test_the_pointer_shows_the_values_of_an_epoch_and_selects_epochs_of_all_charts(tabs):
    messages = samples.synchronous()
    tab = tabs.open_saved(messages)
    box = tab.locator(".canvas").first.bounding_box()

    def move(x, y):
        tab.mouse.move(box["x"] + box["width"] * x, box["y"] + y, steps=4)

    move(0.5, 80)
    tab.locator(".tooltip").first.wait_for()
    number, *values = re.findall(r"[\d.]+", tab.locator(".tooltip").first.inner_text())
    (logs,) = (each["logs"] for each in messages if each["type"] == "epoch" and each["epoch"] == int(number) - 1)
    assert values == [f"{logs[name]:.4g}" for name in ("loss", "val_loss")]

    move(0.4, 80)
    tab.mouse.down()
    move(0.7, 90)
    tab.mouse.up()
    tab.get_by_role("button", name="All epochs").wait_for()
    fields = [tab.get_by_role("spinbutton", name=f"{end} epoch shown") for end in ("First", "Last")]
    first, last = (int(field.input_value()) for field in fields)
    assert 5 < first < last < 25
    settle(tab)
    windows = "['loss', 'accuracy'].map((title) => chartOf(title).getOption().dataZoom[0])"
    windows += ".map(({ startValue, endValue }) => [startValue, endValue])"
    assert tab.evaluate(windows) == [[first, last]] * 2
    for given, reason, shown in [
        (("20", "10"), "The first epoch is after the last: all are shown", [1, 30]),
        (("40", "50"), "There are the epochs 1 to 30: all are shown", [1, 30]),
        (("20", "50"), "", [20, 30]),
    ]:
        for field, value in zip(fields, given, strict=True):
            field.fill(value)
        tab.keyboard.press("Enter")
        settle(tab)
        assert tab.locator(".toolbar .note").first.text_content() == reason
        assert tab.evaluate(windows) == [shown] * 2
    tab.get_by_role("button", name="All epochs").click()
    settle(tab)
    assert tab.evaluate(windows) == [[1, 30]] * 2


def test_charts_are_drawn_before_the_browser_prints(tabs):
    tab = tabs.open_saved(samples.asynchronous(), viewport=SHORT)
    tab.evaluate(
        "addEventListener('beforeprint', () => { printed = [...document.querySelectorAll('.chart')].map(isPrinted); })"
    )
    assert tab.pdf(format="A4").startswith(b"%PDF")
    assert tab.evaluate("printed") == [True] * 7


# --- a search, an ensemble, a function


def test_trials_are_sorted_and_filtered(tabs):
    messages = samples.search()
    trials = [message for message in messages if message["type"] == "trial"]
    tab = tabs.open_saved(messages)
    head = tab.get_by_role("button", name="val_loss", exact=True)
    valued = sorted((one["value"], str(one["trial"])) for one in trials if one["value"] is not None)
    ascending = [number for _, number in valued]
    for wanted in (ascending, ascending[::-1]):
        head.click()
        assert tab.evaluate("columnOf('Trials', 'trial')")[: len(wanted)] == wanted
    tab.get_by_role("button", name="units", exact=True).click()
    units = [int(text) for text in tab.evaluate("columnOf('Trials', 'param/units')")]
    assert units == sorted(units)

    tab.get_by_role("combobox", name="Status").select_option("failed")
    tab.get_by_text("2 of 40 trials").wait_for()
    assert sorted(tab.evaluate("columnOf('Trials', 'trial')")) == ["27", "9"]


def test_filters_name_columns_and_say_what_is_wrong_with_them(tabs):
    trials = [
        trial(0, value=0.5, values=[0.7, 0.5], seconds=20.0, params={"model/units": "32", "shape": "(8, 8)", "rate": 1.0}),
        trial(1, value=1.5, values=[1.5], seconds=90.0, params={"model/units": "64", "shape": "(9, 9)", "rate": 0.001}),
    ]
    tab = tabs.open_saved([run("search", metric="val_loss"), *trials])
    field = tab.get_by_role("searchbox", name="Filter")
    note = tab.locator(".toolbar", has=field).locator(".note")
    for text, wanted in {
        "val_loss<1": ["0"],
        "value >= 1": ["1"],
        "units == 32": ["0"],
        "units != 64": ["0"],
        "units : 33 .. 64": ["1"],
        "units:..40": ["0"],
        "epochs=2": ["0"],
        "time > 60": ["1"],
        'shape="(9, 9)"': ["1"],
        "trial=1 rate:1e-4..1e-2 units>=64": ["1"],
        "trial=1 units=32": [],
    }.items():
        field.fill(text)
        settle(tab)
        assert tab.evaluate("columnOf('Trials', 'trial')") == wanted, text
        assert note.is_hidden(), text
    for text, problem in {
        "foo<1": "No column foo",
        "val_loss<": "Incomplete: val_loss<",
        "units:3": "Incomplete: units:3",
        "time < long": "Not a number: long",
    }.items():
        field.fill(text)
        settle(tab)
        assert note.inner_text() == problem
        assert tab.evaluate("columnOf('Trials', 'trial')") == ["0", "1"], text


def axes_of(tab):
    axes = tab.evaluate("chartOf('Hyper-parameters and value').getOption().parallelAxis")
    return [(axis["name"], axis["type"], sorted(axis.get("data") or [])) for axis in axes]


def test_the_charts_of_a_search_have_its_trials(tabs):
    messages = samples.search()
    tab = tabs.open_saved(messages, viewport=TALL)
    complete = [message for message in messages if message["type"] == "trial" and message["status"] == "ok"]
    best = [math.inf]
    for message in complete:
        best.append(min(best[-1], message["value"]))
    steps, values = tab.evaluate("seriesOf('Best val_loss so far').slice(0, 2)")
    assert values == [[message["trial"], message["value"]] for message in complete]
    assert steps[-1][1] == best[-1] == pytest.approx(float(tab.evaluate("factsOf()")["Best val_loss"]), rel=1e-3)
    axes = axes_of(tab)
    assert axes == [
        ("learning_rate", "log", []),
        ("dropout", "value", []),
        ("units", "category", ["128", "256", "32", "64"]),
        ("optimizer", "category", ["adam", "rmsprop", "sgd"]),
        ("val_loss", "value", []),
    ]
    assert set(tab.evaluate("columnOf('Trials', 'param/optimizer')")) == {"adam", "rmsprop", "sgd"}
    lines = tab.evaluate("seriesOf('Hyper-parameters and value')[0].map(({ value }) => value)")
    worst_first = sorted(complete, key=lambda message: -message["value"])
    assert lines == [[*message["params"].values(), message["value"]] for message in worst_first]

    box = tab.locator(".wide .canvas").bounding_box()  # whose first axis selects what the table shows
    tab.mouse.move(box["x"] + 60, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 60, box["y"] + 150, steps=4)
    tab.mouse.up()
    clear = tab.get_by_role("button", name="Clear selection")
    clear.wait_for()
    shown = tab.evaluate("columnOf('Trials', 'param/learning_rate')")
    assert 0 < len(shown) < 23
    assert min(map(float, shown)) > 1e-4
    clear.click()
    tab.get_by_text("40 trials", exact=True).wait_for()

    messages[0]["parameters"] = []  # trials define them
    assert axes_of(tabs.open_saved(messages, viewport=TALL)) == axes


def test_members_of_an_ensemble_have_curves(tabs):
    tab = tabs.open_saved(samples.ensemble())
    assert tab.evaluate("seriesOf('loss').map((data) => data.length)") == [
        count for count in (15, 14, 13, 12, 11) for _ in range(2)
    ]
    histories = [message["history"] for message in samples.ensemble() if message["type"] == "member"]
    column = "(key) => columnOf('Members', key).map(Number)"
    for metric, best in {"val_loss": min, "accuracy": max}.items():
        lasts = [history[metric][-1] for history in histories]
        assert tab.evaluate(column, f"{metric}/last") == pytest.approx(lasts, rel=1e-3)
        assert tab.evaluate(column, f"{metric}/best") == pytest.approx([best(it[metric]) for it in histories], rel=1e-3)


def test_the_output_of_a_rank_can_be_chosen_and_that_of_a_failed_one_comes_first(tabs):
    messages = samples.function()
    tab = tabs.open_saved(messages)
    output = tab.get_by_role("region", name="Output")
    assert output.inner_text().startswith("[rank 0] epoch 1 ")
    tab.get_by_label("Rank 2").check()
    tab.get_by_role("heading", name="Output of rank 2").wait_for()
    assert output.inner_text().splitlines()[-1].startswith("[rank 2] epoch 6 ")

    later = {"run": messages[0]["run"], "time": messages[-1]["time"]}
    for rank in (3, 2):
        messages.append(message("output", rank=rank, text="ValueError: no images\n", **later))
        messages.append(message("rank", rank=rank, state="failed", host="one", **later))
    messages.append(message("rank", rank=0, state="started", host="another", **later))
    tab = tabs.open_saved(messages)
    assert tab.locator(".ranks .badge").all_inner_texts() == ["running", "running", "failed", "failed"]
    assert tab.locator(".ranks label").first.inner_text().split() == ["Rank", "0", "running", "another"]
    assert tab.get_by_label("Rank 2").is_checked()
    assert "ValueError: no images" in tab.get_by_role("region", name="Output").inner_text()


def test_metrics_that_ranks_report_are_shown_like_those_of_a_fit(tabs):
    messages = samples.function()
    reports = [message for message in messages if message["type"] == "report"]
    with serve(messages[:-16]) as server:  # without the last two epochs
        tab = tabs.open(server.url)
        wait_for_points(tab, "loss", 4)
        assert tab.get_by_role("progressbar", name="Epochs").get_attribute("aria-valuenow") == "40"
        server.add(messages[-16:])
        wait_for_points(tab, "loss", 6)
        facts = tab.evaluate("factsOf()")
        assert facts["Epoch"] == "6 of 10"
        assert facts["Left"].startswith("1 min")  # 120 seconds at the report, and others 22 seconds later
    assert tab.evaluate("seriesOf('loss')") == [
        [[each["epoch"] + 1, each["logs"][name]] for each in reports if each["rank"] == 0] for name in ("loss", "val_loss")
    ]
    losses = [f"{each['logs']['loss']:.4g}" for each in reports[-4:]]
    assert tab.evaluate("columnOf('Ranks', 'log/loss')") == losses


def test_an_error_is_shown_with_its_traceback_without_the_colours_of_a_terminal(tabs):
    coloured, plain = (f"Traceback:\n  {name}: bad\n" for name in ("\x1b[1;31mValueError\x1b[0m", "ValueError"))
    failed = [trial(0, status="failed", traceback=coloured), ended(error="\x1b[31mbad\x1b[0m", traceback=coloured)]
    tab = tabs.open_saved([run("search"), *failed], permissions=["clipboard-read", "clipboard-write"])
    assert tab.locator(".head .badge").inner_text() == "failed"
    assert tab.locator(".failure .error").inner_text() == "bad"
    assert tab.get_by_role("region", name="Traceback").inner_text() == plain
    tab.get_by_role("button", name="Copy").click()
    tab.get_by_role("button", name="Copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == plain
    tab.get_by_label("Details of trial 0").click()
    assert tab.get_by_role("region", name="Traceback of trial 0").inner_text() == plain


# --- odd data


def test_text_of_users_is_never_markup(tabs):
    attack = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    tab = tabs.open_saved(
        [
            run(
                "search",
                attack,
                settings={attack: attack},
                metric=attack,
                parameters=[{"name": attack, "options": [attack, "b"]}],
            ),
            epoch(0, **{attack: 1.0, f"val_{attack}": 2.0}),
            epoch(1, **{attack: 1.5, f"val_{attack}": 2.5}),
            trial(0, params={attack: attack}, value=1.0, values=[2.0, 1.0], error=attack, traceback=attack),
            trial(1, params={attack: "b"}, value=2.0, values=[2.0, 3.0]),
            message("incident", kind=attack, text=attack),
            message("output", rank=0, text=attack),
            ended(status=attack, error=attack, traceback=attack),
        ]
    )
    tab.get_by_label("Details of trial 0").click()
    for canvas in tab.locator(".canvas").all():
        canvas.hover()
        settle(tab)
    assert tab.get_by_role("heading", level=1).inner_text() == attack
    assert tab.locator("main script, main img, .tooltip img").count() == 0
    assert tab.evaluate("window.hacked") is None


def test_values_that_cannot_be_drawn_are_gaps_and_named_and_smoothing_is_without_bias(tabs):
    losses = [4.0, 2.0, "NaN", "Infinity", 3.0, 0.0, -2.0]
    tab = tabs.open_saved([run(), *(epoch(number, loss=value) for number, value in enumerate(losses))])
    drawn = [[1, 4.0], [2, 2.0], [3, None], [4, None], [5, 3.0], [6, 0.0], [7, -2.0]]
    assert tab.evaluate("seriesOf('loss')[0]") == drawn
    assert "training is NaN at 3, 4." in tab.locator(".chart .notes").first.inner_text()
    tab.get_by_role("checkbox", name="Log scale").check()
    tab.get_by_text("The log scale cannot show 2 values of zero or below.").wait_for()
    assert tab.evaluate("seriesOf('loss')[0]") == [*drawn[:5], [6, None], [7, None]]
    tab.get_by_role("checkbox", name="Log scale").uncheck()
    tab.get_by_role("slider", name="Smoothing").fill("0.5")
    wait_until(tab, "seriesOf('loss').length === 2")
    wait_until(tab, "seriesOf('loss')[0][5][1] === 0")
    raw, smoothed = tab.evaluate("seriesOf('loss')")
    assert raw == drawn
    # (1 - w) * (v1 * w + v2) / (1 - w ** 2), and so on
    assert [value for _, value in smoothed[:5]] == pytest.approx([4.0, 2 / 0.75, None, None, 2.5 / 0.875], abs=1e-9)
    tab.get_by_role("button", name="Show as table: loss").click()
    tab.locator(".chart table").wait_for()
    rows = ["1\t4", "2\t2", "3\tNaN", "4\t∞", "5\t3", "6\t0", "7\t-2"]
    assert tab.locator(".chart tbody tr").all_inner_texts() == rows


def test_a_resumed_run_has_its_earlier_epochs_and_a_repeated_epoch_replaces_the_earlier_one(tabs):
    earlier = message("resumed", text="From epoch 3 of /models", epochs=[0, 1], history={"loss": [3, 2]})
    epochs = [epoch(2, loss=5.0), epoch(3, loss=9.0), epoch(2, loss=1.5), epoch(3, loss=1.0)]
    tab = tabs.open_saved([run(epochs=5, initial_epoch=2, settings={"rule": "mean"}), earlier, *epochs])
    assert tab.evaluate("seriesOf('loss')[0]") == [[1, 3], [2, 2], [3, 1.5], [4, 1.0]]
    assert tab.get_by_text("From epoch 3 of /models").is_visible()


def test_odd_messages_do_not_break_the_page(tabs):
    long = "a_very_long_name" * 40
    tab = tabs.open_saved(
        [
            {"type": "later", "run": "9", "time": 1.0},
            {"type": "constructor", "run": "9", "time": 1.0},
            {"run": "9"},
            None,
            run(name=long, settings={long: long, "none": None, "flag": True}),
            epoch(0, f1=[0.25, 0.5], val_f1=[0.2, "NaN"], confusion=[[1, 2], [3, 4]], text="no number", **{long: 1.0}),
            message("workers", epoch=0, worker=[0], rows=[5], seconds=["NaN"]),
            message("updates", epoch=0, count=0, per_second="NaN", staleness={}),
            message("progress", epoch=1),
            {"type": "epoch", "run": "without a start", "time": 103.0},
        ],
        viewport={"width": 360, "height": 4000},
    )
    assert tab.locator(".runs li").count() == 2
    tab.get_by_label(f"Show only this run: {long}").click()
    settle(tab)
    assert tab.evaluate("seriesOf('f1')") == [[[1, 0.25]], [[1, 0.5]], [[1, 0.2]], [[1, None]]]
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_large_runs_stay_fast(tabs):
    with serve(samples.synchronous(epochs=1000, workers=64)) as server:
        tab = tabs.open(server.url, viewport=TALL)
        wait_for_points(tab, "loss", 1000)
        assert tab.evaluate(TIMED) < 3000
        tab.close()
    tab = tabs.open_saved(samples.search(trials=1000), viewport=TALL)
    tab.get_by_role("button", name="Show all 1,000 rows").click()
    assert tab.evaluate(TIMED) < 3000
    tab.get_by_role("searchbox", name="Filter").fill("adam")
    tab.get_by_text("of 1,000 trials").wait_for()


TIMED = """async () => {
    const log = document.querySelector('.toolbar input[type=checkbox]');
    const start = performance.now();
    log.click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - start;
}"""


# --- for everyone


def show_all(tab, path):
    """Open a saved file with all of its runs selected."""
    tab.goto(path.as_uri())
    for box in tab.locator(".runs input").all():
        box.check()
    settle(tab)


def test_text_and_lines_have_enough_contrast_on_a_screen_on_a_phone_and_printed(tabs):
    """In both themes. A printed page has all charts and is light, and nothing is wider than a phone."""
    tab = tabs.open("about:blank", color_scheme="dark", viewport=SHORT)
    for name, messages in VIEWS.items():
        show_all(tab, tabs.save(messages(), f"{name}.html"))
        check_print(tab)
        for button in tab.get_by_label(re.compile("Show as table: loss|Details of trial 9")).all():
            button.click()
        for scheme in ("dark", "light"):
            tab.emulate_media(color_scheme=scheme)
            settle(tab)
            assert tab.evaluate("document.documentElement.dataset.theme") == scheme
            assert tab.evaluate(CONTRAST) == [], (name, scheme)
        tab.set_viewport_size(PHONE)
        settle(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") == 360, name
        tab.set_viewport_size(SHORT)
        tab.emulate_media(color_scheme="dark")


def check_print(tab):
    tab.emulate_media(media="print")
    settle(tab)
    assert tab.evaluate("[...document.querySelectorAll('.chart')].every(isPrinted)")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.locator("button:visible").count() == tab.locator("th button:visible").count()
    tab.emulate_media(media="screen")
    settle(tab)
    assert tab.locator(".frame > canvas").count() == 0


CONTRAST = """() => {
    const parse = (colour) => {
        const hex = colour.match(/^#(..)(..)(..)$/)?.slice(1).map((part) => parseInt(part, 16));
        const [red, green, blue, alpha = 1] = hex ?? colour.match(/[\\d.]+/g).map(Number);
        return [red, green, blue, alpha];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((part, index) => part * a + below[index] * (1 - a));
    const background = (element) => {
        const layers = [];
        for (let part = element; part; part = part.parentElement) layers.push(parse(getComputedStyle(part).backgroundColor));
        return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
    };
    const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const luminance = (colour) => {
        const [r, g, b] = colour.map((part) => part / 255).map(linear);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (one, other) => {
        const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const failures = [];
    const check = (name, colour, below, least) => {
        const ratio = contrast(over(parse(colour), below), below);
        if (ratio < least) failures.push(`${name}: ${ratio.toFixed(2)} < ${least}`);
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest('script, .hidden')) continue;
        const style = getComputedStyle(element);
        const isLarge = parseFloat(style.fontSize) >= (style.fontWeight >= 700 ? 18.66 : 24);
        check(walker.currentNode.data, style.color, background(element), isLarge ? 3 : 4.5);
    }
    for (const input of document.querySelectorAll('input[placeholder], button, select')) {
        if (!input.checkVisibility()) continue;
        const below = background(input.parentElement);
        if (input.placeholder) check('placeholder', getComputedStyle(input, '::placeholder').color, background(input), 4.5);
        const { borderTopWidth, borderTopColor } = getComputedStyle(input);
        if (parseFloat(borderTopWidth)) check('border', borderTopColor, below, 3);
    }
    for (const icon of document.querySelectorAll('.icon')) check('icon', getComputedStyle(icon).fill, background(icon), 3);
    const root = getComputedStyle(document.documentElement);
    const surface = over(parse(root.getPropertyValue('--surface')), [0, 0, 0]);
    const numbered = (name, count) => Array.from({ length: count }, (_, index) => `${name}-${index + 1}`);
    const lines = ['axis', 'bad', ...numbered('series', 8), ...numbered('scale', 5)];
    for (const name of lines) check(name, root.getPropertyValue(`--${name}`), surface, 3);
    for (const name of ['text', 'muted']) check(name, root.getPropertyValue(`--${name}`), surface, 4.5);
    return failures;
}"""


def test_everything_works_with_the_keyboard(tabs):
    tab = tabs.open_saved(samples.search())
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the run"

    def tab_to(test):
        for _ in range(60):
            tab.keyboard.press("Tab")
            if tab.evaluate(f"(() => {{ const it = document.activeElement; return {test}; }})()"):
                return
        raise AssertionError(f"the keyboard does not reach {test}")

    tab_to("it.type === 'checkbox'")
    tab.keyboard.press("Space")
    settle(tab)
    assert tab.evaluate("chartOf('Best val_loss so far').getOption().yAxis[0].type") == "log"
    tab_to("it.textContent === 'val_loss'")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Enter")
    assert tab.locator("th[data-column=value]").get_attribute("aria-sort") == "ascending"
    tab_to("it.ariaExpanded === 'false'")
    tab.keyboard.press("Enter")
    assert tab.locator("tr.details:visible").count() == 1


def test_the_theme_is_the_one_of_the_system_until_it_is_chosen_and_the_page_works_without_storage(tabs):
    path = tabs.save(samples.search()).as_uri()
    tab = tabs.open(path, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(background)
    tab.get_by_role("button", name="Light mode").click()
    tab.reload()
    assert tab.evaluate(background) != dark
    tab.get_by_role("button", name="Dark mode").click()
    assert tab.evaluate(background) == dark

    forbid = "{ get() { throw new DOMException('forbidden', 'SecurityError'); } }"
    tab.add_init_script(
        f"for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, {forbid});"
    )
    tab.reload()
    tab.get_by_role("button", name="Light mode").click()
    assert tab.evaluate(background) != dark
    tab.get_by_role("button", name="val_loss", exact=True).click()
    assert tab.locator("th[data-column=value]").get_attribute("aria-sort") == "ascending"
