"""The web server of the monitor: a page and the messages for it, for those who know a random token.

It answers GET requests only, so nothing can be changed through it. It limits connections, new connections a second and
requests a second, so that a flood takes little time from training: what exceeds the limits waits, or is closed. A client
that is slow to send a request or to read a response is disconnected. A page asks once a second for the messages after its
last one, instead of reading a stream, which would hold a thread for each viewer.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from sparkkeras.errors import ConfigurationError
from sparkkeras.monitor.messages import Messages

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""The number of connections at the same time."""

TIMEOUT = 10.0
"""How long a client may take to send its first request, or to read the next `PIECE_BYTES` of a response, in seconds."""

IDLE_SECONDS = 60.0
"""How long a client with the token may take to send the next request."""

PIECE_BYTES = 64 * 1024

REQUESTS_PER_SECOND = 30.0
"""The largest rate of requests with the token; a page makes one a second."""

CONNECTIONS_PER_SECOND = 50.0
"""The largest rate of new connections, and so of requests without the token, after each of which the connection is
closed."""

RESPONSE_BYTES = 1 << 20
"""The size of the messages in a response."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class RateLimit:
    """Makes callers wait so that they proceed at most at a rate; short bursts of a second's calls need not wait.

    Args:
        per_second: The rate.
        clock: A monotonic clock in seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval, self._clock, self._sleep = 1 / per_second, clock, sleep
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self) -> None:
        """Wait until this call may proceed."""
        with self._lock:
            now = self._clock()
            self._next = max(self._next, now - 1.0) + self._interval
            seconds = self._next - now
        if seconds > 0:
            self._sleep(seconds)


class PageServer(ThreadingHTTPServer):
    """Serves the page in threads that do not keep the process running.

    Args:
        messages: The messages.
        host: The address to listen on.
        port: The port; 0: any free port.

    Attributes:
        url: The address of the page, with the token.
        is_closed: Whether `close` has been called.

    Raises:
        ConfigurationError: The address cannot be used.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, messages: Messages, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _PageHandler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"Monitor(host={host!r}, port={port}) cannot listen there: {error}. Use port=0 for any free port, and an "
                'address of this machine as host: "127.0.0.1" for this machine only, "0.0.0.0" for all that can reach it.'
            ) from error
        self.messages, self.token, self.id = messages, secrets.token_urlsafe(16), secrets.token_hex(8)
        self.requests = RateLimit(REQUESTS_PER_SECOND)
        self._connections = RateLimit(CONNECTIONS_PER_SECOND)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._deadlines: dict[Any, float] = {}
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{shown}:{self.server_address[1]}/{self.token}/"
        self.is_closed = False
        serve = self.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.1,), name="sparkkeras-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. A second call does nothing."""
        if not self.is_closed:
            self.shutdown()
            self._thread.join()
            self.server_close()
            self.close_connections()
            self.is_closed = True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread of its own, or close it if there are too many."""
        self._connections.wait()
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection."""
        threading.current_thread().name = "sparkkeras-monitor-connection"
        self.extend(request, TIMEOUT)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._deadlines.pop(request, None)
            self._free.release()

    def extend(self, request: Any, seconds: float) -> None:
        """Set how long a connection may last."""
        with self._lock:
            self._deadlines[request] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Close the connections whose time is over; called ten times a second."""
        self.close_connections(time.monotonic())

    def close_connections(self, now: float = math.inf) -> None:
        """Close the connections whose time is over then; by default all."""
        with self._lock:
            for connection, deadline in self._deadlines.items():
                if deadline < now:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, such as a connection that the client has closed."""
        _log.debug("a request to the monitor failed", exc_info=True)


class _PageHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sparkkeras", ""
    timeout = TIMEOUT

    def do_GET(self) -> None:
        """Answer a request."""
        server = cast(PageServer, self.server)
        target = urlsplit(self.path)
        token, slash, name = target.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), server.token.encode()) or self._is_cross_site():
            self.close_connection = True
            self._reply(403, "text/plain", b"This page needs the address that Monitor.url returns, with its token.\n")
            return
        server.requests.wait()
        server.extend(self.connection, math.inf)  # pieces of a response have their own time
        if not slash:
            self._reply(307, "text/plain", b"", Location=f"/{token}/")
        elif not name:
            self._page()
        elif name == "messages":
            self._messages(parse_qs(target.query).get("after", ["0"])[-1])
        else:
            self._reply(404, "text/plain", b"Not found.\n")
        server.extend(self.connection, IDLE_SECONDS)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request."""
        _log.debug(format, *args)

    def _is_cross_site(self) -> bool:
        """Whether a page of another origin makes the request, other than by a link."""
        is_other = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        return is_other and self.headers.get("Sec-Fetch-Mode", "") != "navigate"

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._reply(200, "text/html; charset=utf-8", live_page(nonce), **{"Content-Security-Policy": policy})

    def _messages(self, after: str) -> None:
        server = cast(PageServer, self.server)
        number = int(after) if after.isdecimal() and len(after) < 10 else 0
        following, messages = server.messages.after(number, RESPONSE_BYTES)
        more = json.dumps(following < len(server.messages))
        age = f"{server.messages.age:.3f}"
        body = f'{{"next":{following},"server":"{server.id}","more":{more},"age":{age},"messages":{messages}}}'
        self._reply(200, "application/json", body.encode())

    def _reply(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                for start in range(0, len(body), PIECE_BYTES):
                    self.wfile.write(body[start : start + PIECE_BYTES])
            except (ConnectionError, TimeoutError):
                self.close_connection = True


SCRIPTS = (
    "state.js", "format.js", "derive.js", "dom.js", "tables.js", "charts.js", "panels.js", "search.js", "runs.js", "main.js",
)  # fmt: skip
"""The scripts of the page, in the order in which it runs them."""


def live_page(nonce: str) -> bytes:
    """The page of a server, which requests the messages.

    Args:
        nonce: The nonce of its scripts in the Content-Security-Policy.
    """
    return _with_data("null").replace('nonce="NONCE"', f'nonce="{nonce}"').encode()


def saved_page(messages: str, selects_all: bool = False) -> str:
    """A page that needs no server.

    Args:
        messages: All messages, as a JSON array.
        selects_all: Whether all runs are selected when it is opened, instead of the last one.
    """
    select = '"select":"all",' if selects_all else ""
    return _with_data("{" + select + '"messages":' + messages.replace("<", "\\u003c") + "}")


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
