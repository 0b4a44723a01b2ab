"""The web server of the monitor: a page and the messages for it, for those who know a random token.

It answers GET requests only, so nothing can be changed through it. It limits the connections and the requests a second, so a
flood of them takes little time from training; the rest waits, or is closed. A viewer who reads too slowly is disconnected.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from sparkkeras.errors import ConfigurationError
from sparkkeras.monitor.messages import Messages
from sparkkeras.monitor.page import live_page

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""The number of connections at the same time."""

TIMEOUT = 10.0
"""How long a client may take to send a request, or to read the next `PIECE_BYTES` of a response, in seconds."""

PIECE_BYTES = 64 * 1024

REQUESTS_PER_SECOND = 30.0
"""The largest rate of requests with the token; a page makes one a second."""

REJECTED_PER_SECOND = 5.0
"""The largest rate of requests without it."""

CONNECTIONS_PER_SECOND = 100.0
"""The largest rate of new connections."""

MAX_MESSAGES = 2000
"""The number of messages in a response."""

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


class PageServer:
    """Serves the page in threads that do not keep the process running.

    Args:
        messages: The messages.
        host: The address to listen on.
        port: The port; 0: any free port.

    Attributes:
        url: The address of the page, with the token.

    Raises:
        ConfigurationError: The address cannot be used.
    """

    def __init__(self, messages: Messages, host: str, port: int) -> None:
        self.token = secrets.token_urlsafe(16)
        self._server = _listening(host, port)
        self._server.messages, self._server.token = messages, self.token
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{shown}:{self._server.server_address[1]}/{self.token}/"
        thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="sparkkeras-monitor", daemon=True)
        thread.start()
        self._thread: threading.Thread | None = thread

    def close(self) -> None:
        """Stop serving. A second call does nothing."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server.close_connections()
            self._thread = None


def _listening(host: str, port: int) -> _Server:
    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        return Server((host, port), _Handler)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"Monitor(host={host!r}, port={port}) cannot listen there: {error}. Use port=0 for any free port, and an "
            'address of this machine as host: "127.0.0.1" for this machine only, "0.0.0.0" for all that can reach it.'
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32
    messages: Messages
    token: str

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.id = secrets.token_hex(8)
        self.requests, self.rejected = RateLimit(REQUESTS_PER_SECOND), RateLimit(REJECTED_PER_SECOND)
        self._connections = RateLimit(CONNECTIONS_PER_SECOND)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread of its own, or close it if there are too many."""
        self._connections.wait()
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection."""
        with self._lock:
            self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.discard(request)
            self._free.release()

    def close_connections(self) -> None:
        """Close the connections that clients keep open."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, such as a connection that the client has closed."""
        _log.debug("a request to the monitor failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sparkkeras", ""
    timeout = TIMEOUT

    def do_GET(self) -> None:
        """Answer a request."""
        server = cast(_Server, self.server)
        target = urlsplit(self.path)
        token, slash, name = target.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), server.token.encode()) or self._is_cross_site():
            server.rejected.wait()
            self.close_connection = True
            self._reply(403, "text/plain", b"This page needs the address that Monitor.url returns, with its token.\n")
            return
        server.requests.wait()
        if not slash:
            self._reply(307, "text/plain", b"", Location=f"/{token}/")
        elif not name:
            self._page()
        elif name == "messages":
            self._messages(parse_qs(target.query).get("after", ["0"])[-1])
        else:
            self._reply(404, "text/plain", b"Not found.\n")

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
        page = live_page(nonce).encode()
        self._reply(200, "text/html; charset=utf-8", page, **{"Content-Security-Policy": policy})

    def _messages(self, after: str) -> None:
        server = cast(_Server, self.server)
        number = int(after) if after.isdecimal() and len(after) < 10 else 0
        following, messages = server.messages.after(number, MAX_MESSAGES)
        more = json.dumps(following < len(server.messages))
        body = f'{{"next":{following},"server":"{server.id}","more":{more},"messages":{messages}}}'
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
