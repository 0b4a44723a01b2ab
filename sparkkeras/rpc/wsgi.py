"""A WSGI server for large bodies and unfriendly peers: cheroot, with other ends to its connections.

As it comes, cheroot gives each connection a thread until its request has arrived, so a few silent ones stop it; it takes
responses as ``bytes`` only, and it reads what is left of a refused body into memory. Here

- a connection gets a thread when the head of its request is there, and has to send that within `HEAD_SECONDS`;
- ``wsgi.input`` has a ``readinto``, and a response may be made of memoryviews;
- a connection whose body was not read is closed.

``benchmarks/wsgi.py`` compares it with others. Touches some internals of cheroot, so its version is bounded.
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

HEAD_BYTES = 128 * 1024
"""The head of a request has this many bytes at most."""

HEAD_SECONDS = 5.0
"""The head of a request has to come within this time, counted from the connection or from its first byte."""

NEXT_SECONDS = 0.003
"""So long a thread waits for the next request on a connection: a push follows its pull in less."""

SEND_BYTES = 1024 * 1024
"""Responses are sent in pieces of this size, each within the time-out."""

MOST_CONNECTIONS = 4096
"""More are not taken, nor more than half of the files that this process may open."""

STOP_SECONDS = 2
"""How long stopping waits for requests that are being answered."""

_log = logging.getLogger(__name__)


@contextmanager
def serving(application: Any, host: str, port: int, threads: int, timeout: float) -> Iterator[int]:
    """Serve a WSGI application until the context ends; gives the port.

    Args:
        application: The application.
        host: What to listen on.
        port: The port; 0 lets the system choose.
        threads: How many requests are answered at the same time.
        timeout: Seconds to wait for the rest of a body, and for a peer to take more of a response.

    Raises:
        OSError: The address cannot be listened on.
    """
    server = _Server((host, port), application, threads, timeout)
    ready = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:  # threads that are made in here are daemons, as this one is
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
        # cheroot waits without end for a request that is never answered.
        stopping = threading.Thread(target=server.stop, name="sparkkeras-http-stop", daemon=True)
        stopping.start()
        stopping.join(STOP_SECONDS + 3)
        if stopping.is_alive():
            _log.warning("the parameter server leaves a call behind that does not come to an end")
        thread.join(1)


class _Server(wsgi.Server):  # type: ignore[misc]
    keep_alive_conn_limit: Any = None
    max_request_header_size = HEAD_BYTES
    expiration_interval = 0.1

    def __init__(self, address: tuple[str, int], application: Any, threads: int, timeout: Any) -> None:
        super().__init__(
            address, application, numthreads=threads, request_queue_size=1024, timeout=timeout, shutdown_timeout=STOP_SECONDS
        )
        self.server_name = "sparkkeras"  # which server this is, is nobody's business
        self.ConnectionClass = _Connection
        self.gateway = _Gateway

    def prepare(self) -> None:
        """As cheroot's. A connection that cannot be taken, or is one too many, must not end the loop that takes them."""
        super().prepare()
        connections: Any = self._connections  # type: ignore[attr-defined]
        accept = connections._from_server_socket

        def accepted(listening: Any) -> Any:
            try:
                connection = accept(listening)
            except OSError as error:
                _log.warning("the parameter server could not take a connection: %s", error)
                time.sleep(0.02)  # out of file descriptors, perhaps for a moment
                return None
            if connection is not None and connections._num_connections > _most_connections():
                connection.close()
                return None
            return connection

        connections._from_server_socket = accepted

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        _log.debug("%s", msg, exc_info=traceback)

    def process_conn(self, conn: _Connection) -> None:
        """A connection has something to read. In the thread of the selector."""
        if not conn.rfile.has_data() and not conn.rfile.hold():
            conn.close()
        elif conn.rfile.has_data():
            super().process_conn(conn)
        else:
            conn.waiting_since = conn.waiting_since or time.time()
            self._connections.put(conn)  # type: ignore[attr-defined]
            conn.last_used = conn.waiting_since + HEAD_SECONDS - self.timeout  # so that it expires in time

    def put_conn(self, conn: _Connection) -> None:
        """A request was answered; the next one may come when it likes, but has to come swiftly then."""
        conn.waiting_since = None
        super().put_conn(conn)
        conn.last_used = math.inf


def _most_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, files // 2)


class _Connection(HTTPConnection):  # type: ignore[misc]
    def __init__(self, server: _Server, sock: Any, makefile: Any = None) -> None:
        super().__init__(server, sock, lambda sock, mode, size: _Reader(sock) if "r" in mode else _Writer(sock))
        self.waiting_since: float | None = time.time()

    def communicate(self) -> bool:
        """Answer a request and those right behind it: the way over the selector to another thread takes longer."""
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
    """A connection's incoming side, which knows whether the head of a request is there."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._held = bytearray()
        self.closed = False
        self.bytes_read = 0

    @property
    def held(self) -> int:
        """The bytes that came and were not read yet."""
        return len(self._held)

    def has_data(self) -> bool:
        """Whether the head of a request is there."""
        return b"\r\n\r\n" in self._held

    def wait(self, seconds: float) -> bool:
        """Whether something comes within so many seconds."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def hold(self) -> bool:
        """Take what has come without waiting; whether the connection is still good."""
        timeout = self._sock.gettimeout()
        self._sock.setblocking(False)
        try:
            arrived = self._sock.recv(HEAD_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self._sock.settimeout(timeout)
        self._held += arrived
        return bool(arrived) and (len(self._held) <= HEAD_BYTES or self.has_data())

    def readline(self, size: int = HEAD_BYTES) -> bytes:
        while (end := self._held.find(b"\n", 0, size) + 1) == 0 and len(self._held) < size:
            if not (arrived := self._sock.recv(HEAD_BYTES)):
                break
            self._held += arrived
        return self._take(end or size)

    def read(self, size: int) -> bytes:
        body = bytearray(size)
        return bytes(body[: self.readinto(memoryview(body))])

    def readinto(self, target: memoryview) -> int:
        """Fill ``target``, or read up to the end of the connection."""
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
    """A connection's outgoing side: no buffer between."""

    bytes_written = 0

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), SEND_BYTES):  # a time-out of sendall covers the whole call
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
            self.req.close_connection = True  # a stranger's; and of an unread body cheroot would read the rest into memory
        write: Callable[[bytes], None] = super().start_response(status, headers, exc_info)
        return write

    def respond(self) -> None:
        """As cheroot's, with memoryviews allowed."""
        response = self.req.server.wsgi_app(self.env, self.start_response)
        try:
            for piece in filter(len, response):
                self.write(piece)
        finally:
            self.req.ensure_headers_sent()
            if hasattr(response, "close"):
                response.close()
