"""Compare WSGI servers in a thread of a Python process: throughput of large bodies, and robustness against hostile clients.

Throughput, for each server and each method to read or write a body: MB/s of a POST into a preallocated bytearray, and of a
GET from a NumPy array's memory, over a persistent connection from another process, with one client and with four.
Robustness: the time of a valid POST during 500 idle and 100 slow connections, the cost of an unauthenticated body, and
whether stopping the server leaves threads or an open port.

    pip install flask numpy waitress cheroot gevent
    python benchmarks/wsgi.py                                    # everything, takes some minutes
    python benchmarks/wsgi.py --servers waitress cheroot+ --megabytes 10 --parts speed robustness
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from flask import Flask, Response, request

MB = 1 << 20
IDLE, SLOW, SLOW_SECONDS = 500, 100, 0.2
Stop = Callable[[], None]


def application(largest: int) -> Flask:
    """Receives bodies at POST /body/<way>, sends them at GET /body/<way>/<size>, rejects them unread at POST /refuse."""
    app = Flask("benchmark")
    source = memoryview(np.random.default_rng(0).integers(0, 256, largest * MB, np.uint8)).cast("B")
    buffers: list[bytearray] = []  # free buffers; the last one used is reused first, since its pages are in memory

    @app.get("/empty")
    def empty() -> Response:
        return Response(b"")

    @app.post("/refuse")
    def refuse() -> Response:
        return Response(b"no", 401)

    @app.post("/body/<way>")
    def take(way: str) -> Response:
        size = request.content_length or 0
        buffer = buffers.pop() if buffers else bytearray(largest * MB)
        try:
            TAKE[way](memoryview(buffer)[:size])
        finally:
            buffers.append(buffer)
        return Response(b"")

    @app.get("/body/<way>/<int:size>")
    def give(way: str, size: int) -> Response:
        headers = {"Content-Length": str(size)}
        return Response(GIVE[way](source[:size]), headers=headers, direct_passthrough=True)

    return app


def _fill(target: memoryview, read: Callable[[int], bytes], size: int) -> None:
    at = 0
    while at < len(target):
        piece = read(min(size, len(target) - at))
        if not piece:
            raise EOFError
        target[at : at + len(piece)] = piece
        at += len(piece)


def _readinto(target: memoryview, readinto: Callable[[memoryview], int | None]) -> None:
    at = 0
    while at < len(target):
        read = readinto(target[at : at + 4 * MB])
        if not read:
            raise EOFError
        at += read


def _buffered(target: memoryview) -> None:
    """Read directly from the server's buffered reader, bypassing its wrapper."""
    body = request.environ["wsgi.input"]
    _readinto(target, body.rfile.readinto)
    if hasattr(body, "remaining"):
        body.remaining = 0  # cheroot
    else:
        body.position = len(target)  # gevent


def _pieces(source: memoryview, size: int, kind: type) -> Iterator[Any]:
    return (kind(source[at : at + size]) for at in range(0, len(source), size))


TAKE: dict[str, Callable[[memoryview], None]] = {
    "stream.read 1M": lambda target: _fill(target, request.stream.read, MB),
    "stream.readinto": lambda target: _readinto(target, request.stream.readinto),
    "input.read 64K": lambda target: _fill(target, request.environ["wsgi.input"].read, MB // 16),
    "input.read 256K": lambda target: _fill(target, request.environ["wsgi.input"].read, MB // 4),
    "input.read 1M": lambda target: _fill(target, request.environ["wsgi.input"].read, MB),
    "rfile.readinto": _buffered,
}
GIVE: dict[str, Callable[[memoryview], Iterable[Any]]] = {
    "bytes 64K": lambda source: _pieces(source, MB // 16, bytes),
    "bytes 256K": lambda source: _pieces(source, MB // 4, bytes),
    "bytes 1M": lambda source: _pieces(source, MB, bytes),
    "one bytes": lambda source: [bytes(source)],
    "views 256K": lambda source: _pieces(source, MB // 4, memoryview),
    "one view": lambda source: [source],
}


# The servers: each function starts a server for an application, and returns its port and a function that stops it.


def waitress(app: Flask, **options: Any) -> tuple[int, Stop]:
    from waitress.server import create_server
    from waitress.wasyncore import close_all

    server = create_server(app, host="127.0.0.1", port=0, **options)
    thread = threading.Thread(target=server.run)
    thread.start()

    def stop() -> None:
        server.trigger.pull_trigger(lambda: close_all(server._map))
        thread.join()
        server.task_dispatcher.shutdown()

    return int(server.effective_port), stop


def waitress_tuned(app: Flask) -> tuple[int, Stop]:
    return waitress(
        app, threads=8, recv_bytes=MB, inbuf_overflow=1024 * MB, outbuf_overflow=1024 * MB, outbuf_high_watermark=4 * MB,
        connection_limit=2000, asyncore_use_poll=True, channel_timeout=10, cleanup_interval=5,
    )  # fmt: skip


def gevent(app: Flask, **options: Any) -> tuple[int, Stop]:
    from gevent import get_hub
    from gevent.event import Event
    from gevent.pywsgi import WSGIServer

    started, handles = threading.Event(), {}

    def run() -> None:
        server = WSGIServer(("127.0.0.1", 0), app, log=None, **options)
        server.start()
        stopping = get_hub().loop.async_()
        event = Event()
        stopping.start(event.set)
        handles.update(port=server.server_port, stop=stopping.send)
        started.set()
        event.wait()
        server.stop(timeout=1)
        stopping.stop()
        stopping.close()
        get_hub().destroy(destroy_loop=True)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()

    def stop() -> None:
        handles["stop"]()
        thread.join()

    return handles["port"], stop


def cheroot(app: Flask, server_class: Any = None) -> tuple[int, Stop]:
    from cheroot import wsgi

    server = (server_class or wsgi.Server)(("127.0.0.1", 0), app)
    server.prepare()
    thread = threading.Thread(target=server.serve)
    thread.start()

    def stop() -> None:
        server.stop()
        thread.join()

    return server.bind_addr[1], stop


def cheroot_tuned(app: Flask) -> tuple[int, Stop]:
    from cheroot import wsgi

    def server(*arguments: Any) -> Any:
        made = wsgi.Server(*arguments, numthreads=16, request_queue_size=1024, timeout=10)
        made.keep_alive_conn_limit = None
        return made

    return cheroot(app, server)


def cheroot_in_sparkkeras(app: Flask) -> tuple[int, Stop]:
    """cheroot as sparkkeras runs it."""
    from sparkkeras.rpc.wsgi import serving

    context = serving(app, "127.0.0.1", 0, threads=16, timeout=30)
    return context.__enter__(), lambda: context.__exit__(None, None, None)


SERVERS: dict[str, Callable[[Flask], tuple[int, Stop]]] = {
    "waitress": waitress,
    "waitress+": waitress_tuned,
    "gevent": gevent,
    "gevent+": lambda app: gevent(app, backlog=1024),
    "cheroot": cheroot,
    "cheroot+": cheroot_tuned,
    "sparkkeras": cheroot_in_sparkkeras,
}


def _serve(name: str, largest: int, pipe: Any) -> None:
    before = set(threading.enumerate())
    port, stop = SERVERS[name](application(largest))
    pipe.send(port)
    pipe.recv()
    started = time.perf_counter()
    stop()
    seconds = time.perf_counter() - started
    with socket.socket() as probe:
        listening = probe.connect_ex(("127.0.0.1", port)) == 0
    pipe.send((seconds, [thread.name for thread in set(threading.enumerate()) - before], listening))


class Served:
    """A server in a separate process."""

    def __init__(self, name: str, largest: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(name, largest, theirs), daemon=True)
        self.process.start()
        self.port: int = self._pipe.recv()

    def memory(self, field: str = "VmRSS") -> float:
        """Return the memory in megabytes: current (VmRSS) or peak (VmHWM)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(rf"{field}:\s+(\d+)", status)
        return int(match[1]) / 1024 if match else float("nan")

    def stop(self) -> tuple[float, list[str], bool] | None:
        """Stop; return the seconds, the remaining threads and whether the port is open, or None after 20 seconds."""
        self._pipe.send(None)
        return self._pipe.recv() if self._pipe.poll(20) else None

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def served(name: str, largest: int) -> Iterator[Served]:
    server = Served(name, largest)
    try:
        yield server
    finally:
        server.kill()


def connect(port: int, timeout: float = 60) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def exchange(connection: http.client.HTTPConnection, verb: str, way: str, buffer: bytearray, status: int = 200) -> float:
    """Send one request and read the response; return the seconds."""
    path = f"/body/{way}".replace(" ", "%20")
    started = time.perf_counter()
    if verb == "POST":
        connection.request("POST", path, body=memoryview(buffer), headers={"Content-Length": str(len(buffer))})
        response = connection.getresponse()
        response.read()
    else:
        connection.request("GET", f"{path}/{len(buffer)}")
        response = connection.getresponse()
        view, at = memoryview(buffer), 0
        while at < len(view) and (read := response.readinto(view[at:])):
            at += read
        if at < len(view):
            raise EOFError
        response.read()
    if response.status != status:
        raise OSError(response.status)
    return time.perf_counter() - started


def _client(port: int, verb: str, way: str, size: int, times: int, barrier: Any, results: Any) -> None:
    buffer = bytearray(size * MB)
    connection = connect(port)
    exchange(connection, verb, way, buffer)
    barrier.wait()
    started = time.monotonic()
    for _ in range(times):
        exchange(connection, verb, way, buffer)
    results.put((started, time.monotonic()))


def speed(names: list[str], sizes: list[int]) -> None:
    """Print MB/s with one client, the median of several runs."""
    print(f"\n{'server':10} {'verb':5} {'way':16}" + "".join(f"{size:>8} MB" for size in sizes) + "   (MB/s, one client)")
    for name in names:
        for verb, ways in (("POST", TAKE), ("GET", GIVE)):
            for way in ways:
                row = []
                for size in sizes:
                    with served(name, size) as server:
                        row.append(_one(server, verb, way, size))
                print(f"{name:10} {verb:5} {way:16}" + "".join(f"{rate:>11}" for rate in row), flush=True)
        with served(name, 1) as server:
            connection = connect(server.port)
            seconds = []
            for _ in range(300):
                started = time.perf_counter()
                connection.request("GET", "/empty")
                connection.getresponse().read()
                seconds.append(time.perf_counter() - started)
            print(f"{name:10} empty request: {statistics.median(seconds) * 1e3:.2f} ms", flush=True)


def _one(server: Served, verb: str, way: str, size: int) -> str:
    buffer = bytearray(size * MB)
    try:
        connection = connect(server.port, 20)
        exchange(connection, verb, way, buffer)
        runs = [exchange(connection, verb, way, buffer) for _ in range(5 if size >= 100 else 15)]
    except Exception:  # the server does not support this method
        return "-"
    return f"{size / statistics.median(runs):.0f}"


def together(names: list[str], sizes: list[int], clients: int = 4) -> None:
    """Print the total MB/s of several concurrent clients."""
    context = multiprocessing.get_context("spawn")
    ways = {"waitress": ("input.read 1M", "bytes 256K"), "gevent": ("rfile.readinto", "one view")}
    ways |= {"cheroot": ("input.read 64K", "bytes 64K"), "sparkkeras": ("stream.readinto", "one view")}
    print(f"\n{clients} concurrent clients, MB/s")
    for name in names:
        for verb, way in zip(("POST", "GET"), ways.get(name) or ways[name.rstrip("+")], strict=True):
            for size in sizes:
                with served(name, size) as server:
                    barrier, results = context.Barrier(clients), context.Queue()
                    times = 3 if size >= 100 else 10
                    arguments = (server.port, verb, way, size, times, barrier, results)
                    processes = [context.Process(target=_client, args=arguments, daemon=True) for _ in range(clients)]
                    for process in processes:
                        process.start()
                    try:
                        spans = [results.get(timeout=60) for _ in processes]
                        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
                        rate = f"{clients * times * size / seconds:8.0f}"
                    except Exception as error:
                        rate = repr(error)
                    for process in processes:
                        process.kill()
                    peak = server.memory("VmHWM")
                print(f"{name:10} {verb:5} {way:16} {size:4} MB {rate}   peak RSS {peak:.0f} MB", flush=True)


def _flood(port: int, pipe: Any) -> None:
    """Open idle connections, and slow ones that send a byte at a time, until killed."""
    connections = []
    for _ in range(IDLE + SLOW):
        connection = socket.socket()
        connection.settimeout(2)
        with suppress(OSError):
            connection.connect(("127.0.0.1", port))
            connections.append(connection)
    pipe.send(len(connections))
    head = b"POST /body/x HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000
    for at in range(len(head)):
        for connection in connections[IDLE:]:
            with suppress(OSError):
                connection.send(head[at : at + 1])
        time.sleep(SLOW_SECONDS)


def _send_rejected(port: int, size: int, body: int) -> str:
    """Send an unauthenticated POST that announces ``size`` bytes and sends ``body`` bytes; describe the response."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        block, started, sent = bytes(MB), time.perf_counter(), 0
        try:
            while sent < body:
                sent += sock.send(block)
        except OSError as error:
            return f"cut off with {type(error).__name__} after {sent / MB:.0f} MB"
        try:
            answer = sock.recv(64).split(b"\r\n")[0].decode()
        except OSError as error:
            answer = type(error).__name__
        return f"{answer or 'closed'} after {sent / MB:.0f} MB, {time.perf_counter() - started:.2f} s"


def robustness(names: list[str]) -> None:
    """Print the time of a valid POST during a flood, the cost of rejected bodies, and the result of stopping."""
    context = multiprocessing.get_context("spawn")
    for name in names:
        print(f"\n{name}")
        with served(name, 1) as server:
            post = "stream.readinto" if name == "sparkkeras" else "input.read 256K"
            quiet = exchange(connect(server.port), "POST", post, bytearray(MB))
            before = server.memory()
            ours, theirs = context.Pipe()
            flood = context.Process(target=_flood, args=(server.port, theirs), daemon=True)
            flood.start()
            opened = ours.recv() if ours.poll(30) else 0
            time.sleep(1)
            started = time.perf_counter()
            try:
                connection = connect(server.port, 40)
                exchange(connection, "POST", post, bytearray(MB))
                took = (
                    f"{time.perf_counter() - started:.3f} s, then {exchange(connection, 'POST', post, bytearray(MB)):.3f} s"
                )
            except OSError as error:
                took = f"{type(error).__name__} after {time.perf_counter() - started:.1f} s"
            cpu = _cpu(server.process.pid)
            time.sleep(2)
            cpu = (_cpu(server.process.pid) - cpu) / 2
            grown = server.memory() - before
            print(f"  flood ({opened} connected): POST {took} (quiet {quiet:.3f} s); RSS +{grown:.1f} MB; CPU {cpu:.0%}")
            flood.kill()
            flood.join()
        with served(name, 1) as server:
            print(f"  2 GB announced, none sent: {_send_rejected(server.port, 2048 * MB, 0)}")
            before = server.memory()
            response = _send_rejected(server.port, 300 * MB, 300 * MB)
            print(f"  300 MB, refused: {response}; peak RSS +{server.memory('VmHWM') - before:.0f} MB")
            kept = [connect(server.port) for _ in range(8)]
            for connection in kept:
                with suppress(OSError):
                    exchange(connection, "POST", post, bytearray(MB))
            print(f"  stop (seconds, threads left, still listening): {server.stop()}", flush=True)


def _cpu(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--megabytes", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--parts", nargs="+", choices=["speed", "together", "robustness"])
    arguments = parser.parse_args()
    parts = arguments.parts or ["speed", "together", "robustness"]
    if "speed" in parts:
        speed(arguments.servers, arguments.megabytes)
    if "together" in parts:
        together(arguments.servers, arguments.megabytes)
    if "robustness" in parts:
        robustness(arguments.servers)


if __name__ == "__main__":
    main()
