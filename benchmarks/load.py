"""Load on a parameter server: the server in one process, simulated workers in two others, and the limits of the machine.

The server, its transports and the calls are those of asynchronous training; the workers do not train. They call the server
without a pause, so that it is saturated.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sparkkeras.parameter.exchange import ExchangePoint, PartitionPlan
from sparkkeras.parameter.ledger import Ledger
from sparkkeras.parameter.rules import Downpour
from sparkkeras.parameter.service import ParameterClient, ParameterService, PayloadFormat
from sparkkeras.parameter.store import Store
from sparkkeras.rpc.transport import Address, Endpoint, make_transport, read_exactly
from sparkkeras.rpc.wire import CHUNK_BYTES, Secret, WireError
from sparkkeras.weights import Flat

CLIENT_PROCESSES = 2
REQUEST_BYTES = 256
"""The size of a call or a reply without a body, for the plain sockets that the server is compared with."""

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Load:
    """The work of a server for its simulated workers.

    Attributes:
        seconds: How long the workers called the server.
        cpu_seconds: The CPU time of the server's process.
        pulls: The seconds of each pull.
        pushes: The seconds of each push.
        connect_seconds: The time until all workers had connected and had their leases.
        num_failed: The number of workers that could not connect, or of which a call failed.
        idle_bytes: The growth of the server's memory until all workers had connected.
        busy_bytes: Its growth until the end, at most.
    """

    seconds: float
    cpu_seconds: float
    pulls: list[float]
    pushes: list[float]
    connect_seconds: float
    num_failed: int
    idle_bytes: int
    busy_bytes: int


def load(transport: str, nbytes: int, workers: int, seconds: float) -> Load:
    """Have ``workers`` workers pull and push ``nbytes`` bytes of weights for ``seconds`` seconds."""
    with ExitStack() as stack:
        server = stack.enter_context(_process(_serve, transport, nbytes, workers))
        address, payload_format = server.recv()
        before = _usage(server)
        processes = min(CLIENT_PROCESSES, workers)
        shares = [range(part, workers, processes) for part in range(processes)]
        clients = [stack.enter_context(_process(_work, address, payload_format, share)) for share in shares]
        began, connected = zip(*(client.recv() for client in clients), strict=True)
        idle = _usage(server)
        for client in clients:
            client.send(seconds)
        started = time.perf_counter()
        found = [client.recv() for client in clients]
        busy, stopped = _usage(server), time.perf_counter()
    pulls, pushes = ([value for turns in found for value in turns[name]] for name in ("pull", "push"))
    return Load(
        seconds=stopped - started,
        cpu_seconds=busy.cpu_seconds - idle.cpu_seconds,
        pulls=pulls,
        pushes=pushes,
        connect_seconds=max(connected) - min(began),
        num_failed=sum(turns["failed"] for turns in found),
        idle_bytes=idle.bytes - before.bytes,
        busy_bytes=busy.peak_bytes - before.bytes,
    )


@dataclass(frozen=True)
class Usage:
    """The CPU time of a process, its resident memory, and the largest that this has been."""

    cpu_seconds: float
    bytes: int
    peak_bytes: int

    @classmethod
    def of_this_process(cls) -> Usage:
        """Of this process. Linux only."""
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        sizes = {line[0]: 1024 * int(line[1]) for line in lines if line[0] in ("VmRSS:", "VmHWM:")}
        return cls(time.process_time(), sizes["VmRSS:"], sizes["VmHWM:"])


def _usage(process: Connection) -> Usage:
    process.send("usage")
    usage: Usage = process.recv()
    return usage


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run ``target(connection, *arguments)`` in a new process; yields the other end of the connection."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


# --- The server ------------------------------------------------------------------------------------------------------


def make_service(nbytes: int, workers: int) -> tuple[ParameterService, PayloadFormat]:
    """A parameter server's service for ``nbytes`` bytes of weights, as in asynchronous training."""
    weights = Flat(np.zeros(nbytes // 4, np.float32))
    store = Store(weights, weights.vector.size, Downpour(), {}, workers)
    ledger = Ledger(
        store,
        {worker: PartitionPlan(batches=10**9) for worker in range(workers)},
        range(1),
        num_concurrent=workers,
        validates=lambda epoch: False,
        max_staleness=None,
        lease_seconds=60,
        warmup_timeout=60,
        on_epoch=lambda epoch: None,
        clock=time.monotonic,
    )
    payload_format = PayloadFormat.of(weights, ())
    return ParameterService(ledger, payload_format), payload_format


def _serve(connection: Connection, transport: str, nbytes: int, workers: int) -> None:
    service, payload_format = make_service(nbytes, workers)
    endpoint = Endpoint("127.0.0.1", "127.0.0.1", expected_sessions=4 + 2 * workers)
    with make_transport(transport).serve(service, endpoint, Secret.fresh()) as address:
        connection.send((address, payload_format))
        _report_usage(connection)


def _report_usage(connection: Connection) -> None:
    while True:
        connection.recv()
        connection.send(Usage.of_this_process())


# --- The workers -----------------------------------------------------------------------------------------------------


class _Discard:
    """A buffer for a received body that keeps no more than a chunk of it, so that 1,000 workers fit into memory."""

    def __init__(self, size: int) -> None:
        self._size, self._chunk = size, memoryview(bytearray(min(size, CHUNK_BYTES)))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        return self._chunk[: min(part.stop, self._size) - part.start]


class _Worker(ParameterClient):
    """A worker that discards the weights that it pulls."""

    def pull_version(self, buffer: Any) -> int:
        """Pull the weights, also if they have not changed; return their version."""
        return int(self._call("parameters", {"newer_than": None}, (), buffer)[0]["version"])


def _work(connection: Connection, address: Address, payload_format: PayloadFormat, workers: Sequence[int]) -> None:
    """Connect the workers; then, for the seconds that the connection says, exchange weights."""
    turns: dict[str, Any] = {"pull": [], "push": [], "failed": 0}
    delta = np.zeros(payload_format.size, np.float32)
    ready, start = threading.Semaphore(0), threading.Event()
    stop_at = [0.0]

    def work(worker: int) -> None:
        try:
            with _Worker(address, payload_format, worker, worker) as client:
                client.lease()
                ready.release()
                buffer, version = _Discard(payload_format.weights_bytes), 0
                start.wait()
                for turn in range(worker % 2, 10**9):  # half of the workers begin with a push
                    began = time.perf_counter()
                    if turn % 2:
                        client.push((delta,), (), version, ExchangePoint(0, turn, 1, 1, 0.1, 0.0))
                    else:
                        version = client.pull_version(buffer)
                    ended = time.perf_counter()
                    if ended > stop_at[0]:
                        return
                    turns["push" if turn % 2 else "pull"].append(ended - began)
        except Exception as error:
            if not turns["failed"]:
                print(f"worker {worker}: {type(error).__name__}: {error}", flush=True)
            turns["failed"] += 1
            ready.release()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.acquire()
    connection.send((began, time.perf_counter()))
    seconds = connection.recv()
    stop_at[0] = time.perf_counter() + seconds
    start.set()
    time.sleep(seconds)
    connection.send(turns)
    connection.recv()  # until this process is ended


# --- The limits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The least that an exchange of some weights can take on this machine, in seconds.

    Attributes:
        add: Adding one vector to another one, on one core.
        authenticate: Authenticating the bytes of a pull and of a push, on one core.
        loopback: An exchange over plain sockets in Python: a request and the weights, the weights and an acknowledgement.
        loopback_cpu: The CPU time that such an exchange takes in the server.
    """

    add: float
    authenticate: float
    loopback: float
    loopback_cpu: float


def limits(nbytes: int, seconds: float) -> Limits:
    """Measure the limits for ``nbytes`` bytes of weights, each for ``seconds`` seconds."""
    body = memoryview(bytearray(nbytes))
    cipher = Cipher(algorithms.AES(bytes(32)), modes.GCM(bytes(12)))

    def authenticate() -> None:
        encryptor = cipher.encryptor()
        for start in range(0, nbytes, CHUNK_BYTES):
            encryptor.authenticate_additional_data(body[start : start + CHUNK_BYTES])

    with ExitStack() as stack:
        server = stack.enter_context(_process(_serve_plainly, nbytes))
        port = server.recv()
        clients = [stack.enter_context(_process(_exchange_plainly, port, nbytes)) for _ in range(CLIENT_PROCESSES)]
        for client in clients:
            client.recv()
        before = _usage(server)
        for client in clients:
            client.send(seconds)
        started = time.perf_counter()
        count = sum(client.recv() for client in clients)
        elapsed, after = time.perf_counter() - started, _usage(server)
    return Limits(
        add=add_seconds(nbytes, seconds),
        authenticate=2 * _seconds_each(authenticate, seconds),
        loopback=elapsed / count,
        loopback_cpu=(after.cpu_seconds - before.cpu_seconds) / count,
    )


def add_seconds(nbytes: int, seconds: float) -> float:
    """The seconds of adding a vector of ``nbytes`` bytes to another one, on one core; measured for ``seconds`` seconds."""
    vector, other = np.zeros(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    return _seconds_each(lambda: np.add(vector, other, out=vector), seconds)


def _seconds_each(call: Callable[[], object], seconds: float) -> float:
    """The mean seconds of a call."""
    call()
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        call()
        count += 1
    return elapsed / count


def _serve_plainly(connection: Connection, nbytes: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    connection.send(listener.getsockname()[1])
    threading.Thread(target=_report_usage, args=(connection,), daemon=True).start()
    weights = memoryview(bytearray(nbytes))

    def serve(client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = memoryview(bytearray(REQUEST_BYTES))
        update = memoryview(bytearray(nbytes))
        with suppress(WireError):  # at the end
            while True:
                read_exactly(client.recv_into, request)
                client.sendall(weights)
                read_exactly(client.recv_into, update)
                client.sendall(request)

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def _exchange_plainly(connection: Connection, port: int, nbytes: int) -> None:
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, weights = memoryview(bytearray(REQUEST_BYTES)), memoryview(bytearray(nbytes))
    connection.send("ready")
    stop_at, count = time.perf_counter() + connection.recv(), 0
    while time.perf_counter() < stop_at:
        client.sendall(request)
        read_exactly(client.recv_into, weights)
        client.sendall(weights)
        read_exactly(client.recv_into, request)
        count += 1
    connection.send(count)
    connection.recv()  # until this process is ended
