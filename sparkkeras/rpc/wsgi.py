"""A WSGI server for large bodies and unauthenticated clients, on `http.server` and `wsgiref` of Python's library.

A connection gets a thread when the header of its first request has arrived, and is closed after a response with an error
status, so silent and rejected clients occupy no thread, and the body of a rejected request is not read. Bodies are not
copied: ``wsgi.input`` has a ``readinto``, and a response may consist of memoryviews.
"""

from __future__ import annotations

import io
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler

from sparkkeras.rpc.acceptor import Capacity, accepting

_log = logging.getLogger(__name__)


def serving(application: Any, listener: socket.socket, timeout: float, capacity: Capacity) -> AbstractContextManager[None]:
    """Serve the POST requests to a WSGI application until the context ends.

    Args:
        application: The application.
        listener: The listening socket; it is closed when the context ends.
        timeout: Seconds to wait for the rest of a request, and for a client to read more of a response.
        capacity: Bounds how many requests are handled at the same time, without the first one of each connection: its
            client may be unauthenticated, and must neither wait for others nor let them wait.
    """
    server = _WSGIServer(application, listener, timeout, capacity)
    return accepting(listener, _header_length, server.handle)


def _header_length(data: bytearray, before: int) -> int | None:
    end = data.find(b"\r\n\r\n", max(0, before - 3))
    return None if end < 0 else end + 4


class _WSGIServer:
    """What `WSGIRequestHandler` needs of its server."""

    def __init__(self, application: Any, listener: socket.socket, timeout: float, capacity: Capacity) -> None:
        self.application, self.timeout, self.capacity = application, timeout, capacity
        host, port = listener.getsockname()[:2]
        self.base_environ = {
            "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.errors": sys.stderr, "wsgi.run_once": False,
            "wsgi.multithread": True, "wsgi.multiprocess": False,
            "SERVER_NAME": host, "SERVER_PORT": str(port), "SCRIPT_NAME": "",
        }  # fmt: skip

    def handle(self, connection: socket.socket, address: Any, header: bytes) -> None:
        """Handle the requests of a connection, of which the first header has been received already."""
        _RequestHandler(connection, address, self, header)


class _RequestHandler(WSGIRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sparkkeras", ""  # do not disclose the server software
    disable_nagle_algorithm = True

    def __init__(self, connection: socket.socket, address: Any, server: Any, header: bytes) -> None:
        self._header = header
        super().__init__(connection, address, server)

    def handle(self) -> None:
        """Handle requests until the connection ends. Called when an instance is created."""
        self.connection.settimeout(self.server.timeout)
        self._stream = cast(io.BufferedReader, self.rfile)
        self.rfile = io.BytesIO(self._header)
        self.handle_one_request()
        self.rfile = self._stream
        while not self.close_connection:
            self.connection.settimeout(None)  # an authenticated client may be silent for as long as an epoch takes
            self._stream.peek()
            self.connection.settimeout(self.server.timeout)
            with self.server.capacity.call():
                self.handle_one_request()

    def do_POST(self) -> None:  # noqa: N802
        """Respond with the application. Called by `handle_one_request`."""
        environ = self.get_environ() | {"wsgi.input": self._stream}
        with closing(self.server.application(environ, self._start_response)) as response:
            self.end_headers()  # here, so that the response is closed if this fails
            self.wfile.writelines(response)

    def _start_response(self, status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], Any]:
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            self.send_header(name, value)
        if not code.startswith("2"):  # rejected, with its body unread
            self.send_header("Connection", "close")
        return self.wfile.write

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
