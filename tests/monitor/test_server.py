"""The server of the monitor: who may read what, floods, slow viewers; and the files of its page."""

import hashlib
import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from sparkkeras import ConfigurationError
from sparkkeras.monitor import server
from sparkkeras.monitor.messages import Messages
from sparkkeras.monitor.server import SCRIPTS, PageServer, RateLimit
from tests.monitor.pages import PAGE, page, read


@pytest.fixture
def messages():
    return Messages()


@pytest.fixture
def served(messages):
    with closing(PageServer(messages, "127.0.0.1", 0)) as page_server:
        yield page_server


def get(url, method="GET", **headers):
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_the_page(served):
    status, headers, body = get(served.url)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<!doctype html>" in body.lower()[:100]
    nonce = headers["Content-Security-Policy"].partition("'nonce-")[2].partition("'")[0]
    assert f'nonce="{nonce}"'.encode() in body
    assert b'nonce="NONCE"' not in body
    status, headers, body = get(served.url, "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


def test_messages_arrive_in_pieces_and_nonsense_numbers_begin_anew(served, messages, monkeypatch):
    monkeypatch.setattr(server, "RESPONSE_BYTES", 15)
    for number in range(5):
        messages.add({"number": number})
    pieces = {0: [0, 1], 2: [2, 3], 4: [4], 5: [], "-1": [0, 1], "x": [0, 1], "9999999999999": [0, 1]}
    for after, numbers in pieces.items():
        answer = json.loads(get(served.url + f"messages?after={after}")[2])
        assert [message["number"] for message in answer["messages"]] == numbers
        assert (answer["next"], answer["more"]) == ((numbers[-1] + 1, numbers[-1] < 4) if numbers else (5, False))


def test_without_the_token_everything_is_forbidden(served, messages):
    messages.add({"secret": 1})
    token = served.token
    for path in ("/", "/messages?after=0", f"/{'A' * len(token)}/", f"/{token[:-1]}/", f"/{token}x/"):
        status, headers, body = get(served.url.removesuffix(f"/{token}/") + path)
        assert status == 403, path
        assert b"secret" not in body
        assert token not in str(headers) + body.decode()


def test_pages_of_other_origins_can_read_nothing(served):
    for site in ("cross-site", "same-site"):
        assert get(served.url + "messages", **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "cors"})[0] == 403
    assert get(served.url, **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200  # a link
    headers = get(served.url)[1]
    assert "Access-Control-Allow-Origin" not in headers
    assert (headers["X-Frame-Options"], headers["Referrer-Policy"]) == ("DENY", "no-referrer")
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_other_paths_and_methods(served):
    assert get(served.url, "POST")[0] == 501
    assert get(served.url + "../etc/passwd")[0] in (403, 404)
    assert get(served.url + "page.js")[0] == 404


def test_a_rate_limit_lets_bursts_pass_and_then_makes_callers_wait():
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds):
        clock.now += seconds

    limit = RateLimit(10.0, lambda: clock.now, sleep)
    for _ in range(10):
        limit.wait()
    assert clock.now == 100.0
    for _ in range(20):
        limit.wait()
    assert clock.now == pytest.approx(102.0)


def test_a_flood_without_the_token_does_not_lock_out_who_has_it(served):
    url, ends = served.url.replace(served.token, "guess"), threading.Event()

    def flood():
        while not ends.is_set():
            with suppress(OSError):
                get(url)

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(40)]
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)) as viewer:
        viewer.request("GET", f"/{served.token}/messages")
        viewer.getresponse().read()
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                viewer.request("GET", f"/{served.token}/messages")
                response = viewer.getresponse()
                assert (response.status, bool(response.read())) == (200, True)
        finally:
            ends.set()
    for thread in threads:
        thread.join(30)


def test_a_client_that_sends_a_request_slowly_is_disconnected(served, monkeypatch):
    monkeypatch.setattr(server, "TIMEOUT", 0.2)
    sent = 0
    with closing(connect(served)) as slow, suppress(ConnectionError):
        for sent in range(100):  # noqa: B007
            slow.sendall(b"G")
            time.sleep(0.05)
    assert sent < 50


def connect(page_server):
    target = urlsplit(page_server.url)
    return socket.create_connection((target.hostname, target.port), timeout=10)


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_answered(page_server):
    """Whether a new connection gets an answer, and is not closed at once."""
    with closing(connect(page_server)) as connection, suppress(ConnectionError):
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return connection.recv(1) != b""
    return False


def test_too_many_connections_are_closed(served):
    with ExitStack() as stack:
        for _ in range(server.MAX_CONNECTIONS):
            stack.enter_context(closing(connect(served)))
        wait_until(lambda: not is_answered(served))
    wait_until(lambda: is_answered(served))


def test_a_slow_viewer_is_disconnected(served, messages, monkeypatch):
    monkeypatch.setattr(server._PageHandler, "timeout", 0.3)
    messages.add({"large": "x" * 30_000_000})
    with closing(connect(served)) as slow:
        slow.sendall(f"GET /{served.token}/messages?after=0 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        received = len(slow.recv(1000))
        wait_until(lambda: "sparkkeras-monitor-connection" not in [each.name for each in threading.enumerate()])
        with suppress(ConnectionResetError):
            while piece := slow.recv(1 << 20):
                received += len(piece)
        assert 0 < received < 30_000_000  # what the system has buffered


def test_a_silent_client_is_disconnected(served, monkeypatch):
    monkeypatch.setattr(server._PageHandler, "timeout", 0.3)
    with closing(connect(served)) as silent:
        assert silent.recv(1) == b""


def test_addresses(messages):
    with closing(PageServer(messages, "0.0.0.0", 0)) as everywhere:
        assert urlsplit(everywhere.url).hostname == socket.gethostname().lower()
        port = urlsplit(everywhere.url).port
        with pytest.raises(ConfigurationError, match=f"port={port}.*cannot listen"):
            PageServer(messages, "127.0.0.1", port)
    with pytest.raises(ConfigurationError, match="cannot listen"):
        PageServer(messages, "no.such.host.invalid", 0)
    everywhere.close()
    with pytest.raises(OSError):
        get(everywhere.url)


def test_a_closed_server_answers_no_more_on_open_connections(messages):
    page_server = PageServer(messages, "127.0.0.1", 0)
    with closing(http.client.HTTPConnection(urlsplit(page_server.url).netloc, timeout=10)) as viewer:
        viewer.request("GET", f"/{page_server.token}/messages")
        response = viewer.getresponse()
        assert (response.status, bool(response.read())) == (200, True)
        connection = viewer.sock
        page_server.close()
        with suppress(ConnectionError):
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert connection.recv(1) == b""


# --- the files


def test_the_page_is_one_document_that_loads_nothing():
    html = page([{"type": "phase", "run": "1", "time": 0, "text": "</script><script>"}])
    assert html.count("</script>") == 3
    assert "\\u003c/script>" in html
    ours = html.replace(read("echarts.min.js"), "")
    assert not re.search(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=(?![\"']data:)", ours)


def test_scripts_never_make_markup_of_text():
    for name in SCRIPTS:
        assert not re.search(r"(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|new Function", read(name)), (
            name
        )
    assert not re.search(r"\son\w+=", read("page.html"))


def test_all_scripts_are_in_the_page():
    assert {path.name for path in PAGE.glob("*.js")} == {*SCRIPTS, "echarts.min.js"}


def test_the_chart_library_is_the_released_one_with_its_license():
    digest = hashlib.sha256((PAGE / "echarts.min.js").read_bytes()).hexdigest()
    assert (
        digest == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    )  # of echarts@6.1.0 in the npm registry
    assert "Apache License" in read("echarts.LICENSE")
