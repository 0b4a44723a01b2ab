"""A WSGI server for large bodies and untrusted clients: cheroot with custom connections.

By default, cheroot assigns a thread to each connection until its request has arrived, so a few silent clients block it. It
takes responses as ``bytes`` only, and it reads the rest of a rejected body into memory. Here

- a connection gets a thread once the header of its request has arrived, which has to happen within `HEADER_SECONDS`;
- ``wsgi.input`` has a ``readinto``, and a response may consist of memoryviews;
- a connection whose body was not read is closed.

``benchmarks/wsgi.py`` compares it with other servers. It uses internals of cheroot, so cheroot's version is bounded.
"""

from __future__ import annotations

import logging
import math
import resource
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cheroot import wsgi
from cheroot.server import HTTPConnection, KnownLengthRFile

MAX_HEADER_BYTES = 128 * 1024
"""The largest header of an HTTP request."""

HEADER_SECONDS = 5.0
"""The header of a request has to arrive within this time, from the start of the connection or from its first byte."""

NEXT_SECONDS = 0.003
"""How long a thread waits for the next request on a connection: a push follows its pull within less."""

SEND_BYTES = 1024 * 1024
"""Responses are sent in pieces of this size; the timeout holds for each piece."""

MAX_CONNECTIONS = 4096
"""The largest number of connections; at most half of the files that this process may open."""

STOP_SECONDS = 2
"""How long stopping waits for requests in progress."""

_log = logging.getLogger(__name__)


@contextmanager
def serving(application: Any, host: str, port: int, threads: int, timeout: float) -> Iterator[int]:
    """Serve a WSGI application until the context ends; yields the port.

    Args:
        application: The application.
        host: The host name or IP address to listen on.
        port: The port; 0 lets the system choose.
        threads: The number of requests that are handled at the same time.
        timeout: Seconds to wait for the rest of a body, and for a client to read more of a response.

    Raises:
        OSError: The server cannot listen on the address.
    """
    server = _Server((host, port), application, threads, timeout)
    ready = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:  # threads started in a daemon thread are daemons too
        try:
            server.prepare()
        except BaseException as error:
            failed.append(error)
            return
        finally:
            ready.set()
        server.serve()

    thread = threading.Thread(target=run, name="sparkkeras-http", daemon=True)
    thread.start()
    ready.wait()
    if failed:
        thread.join()
        raise failed[0]
    try:
        yield int(server.bind_addr[1])
    finally:
        # cheroot waits without a timeout for a request whose handler never returns.
        stopping = threading.Thread(target=server.stop, name="sparkkeras-http-stop", daemon=True)
        stopping.start()
        stopping.join(STOP_SECONDS + 3)
        if stopping.is_alive():
            _log.warning("the server on the driver has stopped while a call is still being handled")
        thread.join(1)


class _Server(wsgi.Server):  # type: ignore[misc]
    keep_alive_conn_limit: Any = None
    max_request_header_size = MAX_HEADER_BYTES
    expiration_interval = 0.1

    def __init__(self, address: tuple[str, int], application: Any, threads: int, timeout: Any) -> None:
        super().__init__(
            address, application, numthreads=threads, request_queue_size=1024, timeout=timeout, shutdown_timeout=STOP_SECONDS
        )
        self.server_name = "sparkkeras"  # do not disclose the server software
        self.ConnectionClass = _Connection
        self.gateway = _Gateway

    def prepare(self) -> None:
        """As cheroot's, but a connection that fails or exceeds the limit does not end the loop that accepts them."""
        super().prepare()
        connections: Any = self._connections  # type: ignore[attr-defined]
        accept = connections._from_server_socket

        def accepted(listening: Any) -> Any:
            try:
                connection = accept(listening)
            except OSError as error:
                _log.warning("the server on the driver could not accept a connection: %s", error)
                time.sleep(0.02)  # the process is out of file descriptors, perhaps for a moment
                return None
            if connection is not None and connections._num_connections > _max_connections():
                connection.close()
                return None
            return connection

        connections._from_server_socket = accepted

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        _log.debug("%s", msg, exc_info=traceback)

    def process_conn(self, conn: _Connection) -> None:
        """Called in the selector's thread when a connection has data to read."""
        if not conn.rfile.has_data() and not conn.rfile.hold():
            conn.close()
        elif conn.rfile.has_data():
            super().process_conn(conn)
        else:
            conn.waiting_since = conn.waiting_since or time.time()
            self._connections.put(conn)  # type: ignore[attr-defined]
            conn.last_used = conn.waiting_since + HEADER_SECONDS - self.timeout  # so that it expires after `HEADER_SECONDS`

    def put_conn(self, conn: _Connection) -> None:
        """Called after a request. The next one may come at any time, but its header has to arrive within the limit."""
        conn.waiting_since = None
        super().put_conn(conn)
        conn.last_used = math.inf


def _max_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


class _Connection(HTTPConnection):  # type: ignore[misc]
    def __init__(self, server: _Server, sock: Any, makefile: Any = None) -> None:
        super().__init__(server, sock, lambda sock, mode, size: _Reader(sock) if "r" in mode else _Writer(sock))
        self.waiting_since: float | None = time.time()

    def communicate(self) -> bool:
        """Handle a request and those that follow at once: going through the selector to another thread takes longer."""
        while super().communicate():  # type: ignore[no-untyped-call]
            if not self.rfile.has_data():
                if not self.rfile.wait(NEXT_SECONDS):
                    return True
                if not self.rfile.hold():
                    return False
                if not self.rfile.has_data():
                    return True
        return False


class _Reader:
    """The incoming side of a connection, which knows whether the header of a request has arrived."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._held = bytearray()
        self.closed = False
        self.bytes_read = 0

    @property
    def held(self) -> int:
        """The number of bytes that have arrived and have not been read."""
        return len(self._held)

    def has_data(self) -> bool:
        """Whether the header of a request has arrived."""
        return b"\r\n\r\n" in self._held

    def wait(self, seconds: float) -> bool:
        """Wait for data; whether any arrived within ``seconds``."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def hold(self) -> bool:
        """Buffer the data that has arrived, without waiting; whether the connection is still usable."""
        timeout = self._sock.gettimeout()
        self._sock.setblocking(False)
        try:
            arrived = self._sock.recv(MAX_HEADER_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self._sock.settimeout(timeout)
        self._held += arrived
        return bool(arrived) and (len(self._held) <= MAX_HEADER_BYTES or self.has_data())

    def readline(self, size: int = MAX_HEADER_BYTES) -> bytes:
        while (end := self._held.find(b"\n", 0, size) + 1) == 0 and len(self._held) < size:
            if not (arrived := self._sock.recv(MAX_HEADER_BYTES)):
                break
            self._held += arrived
        return self._take(end or size)

    def read(self, size: int) -> bytes:
        body = bytearray(size)
        return bytes(body[: self.readinto(memoryview(body))])

    def readinto(self, target: memoryview) -> int:
        """Fill ``target``, or read to the end of the connection; the number of bytes read."""
        start = 0
        if self._held:
            taken = self._take(len(target))
            start = len(taken)
            target[:start] = taken
        while start < len(target) and (count := self._sock.recv_into(target[start:])):
            start += count
        return start

    def close(self) -> None:
        self.closed = True

    def _take(self, size: int) -> bytes:
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken


class _Writer:
    """The outgoing side of a connection, unbuffered."""

    bytes_written = 0

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), SEND_BYTES):  # the timeout of sendall covers a whole call
            self._sock.sendall(view[start : start + SEND_BYTES])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Body(KnownLengthRFile):  # type: ignore[misc]
    def readinto(self, target: memoryview) -> int:
        count = int(self.rfile.readinto(memoryview(target)[: self.remaining]))
        self.remaining -= count
        return count


class _Gateway(wsgi.Gateway_10):  # type: ignore[misc]
    def get_environ(self) -> Any:
        if isinstance(self.req.rfile, KnownLengthRFile):
            self.req.rfile = _Body(self.req.rfile.rfile, self.req.rfile.remaining)
        return super().get_environ()  # type: ignore[no-untyped-call]

    def start_response(self, status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], None]:
        if not status.startswith("2") or self.req.chunked_read or self.req.rfile.remaining > self.req.conn.rfile.held:
            self.req.close_connection = True  # unauthenticated; or cheroot would read the unread body into memory
        write: Callable[[bytes], None] = super().start_response(status, headers, exc_info)
        return write

    def respond(self) -> None:
        """As cheroot's, but the response may consist of memoryviews."""
        response = self.req.server.wsgi_app(self.env, self.start_response)
        try:
            for piece in filter(len, response):
                self.write(piece)
        finally:
            self.req.ensure_headers_sent()
            if hasattr(response, "close"):
                response.close()
