"""Describes a Python process and its machine: versions, backend, memory, disk, and which addresses it reaches.

Imports only the standard library and `sparkkeras.rpc.addresses`, because workers may lack everything else; both are pickled
by value.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sparkkeras.rpc.addresses import CONNECT_SECONDS, connect_error, host_and_port, open_listener, split_address

BACKENDS = {"tensorflow": 840 << 20, "jax": 500 << 20, "torch": 615 << 20}
"""Keras's backends, and the bytes of memory that a process needs for Python, Keras, the backend and training a small model:
measured with TensorFlow 2.21, JAX 0.10 and PyTorch 2.13."""

PACKAGES = ("keras", *BACKENDS, "numpy", "pyarrow", "pandas", "pyspark", "sparkkeras")
"""The packages whose versions are of interest."""

LOAD_SECONDS = 180.0
"""How long loading the backend may take."""

_POLL_SECONDS = 0.05
_CONNECTIONS = 32

_LOAD = """
import json, os, sys, time
started = time.perf_counter()
import keras
backend = keras.backend.backend()
if backend == "tensorflow":
    import tensorflow
    devices = [device.name for device in tensorflow.config.list_physical_devices("GPU")]
elif backend == "jax":
    import jax
    devices = [str(device) for device in jax.devices() if device.platform != "cpu"]
else:
    import torch
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
loaded = time.perf_counter()
total = float(keras.ops.sum(keras.ops.ones(3)))
found = {"backend": backend, "gpus": devices, "seconds": loaded - started, "works": total == 3.0}
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""
"""Loads the backend in a process of its own, which may crash, and prints what it has found as the last line."""


@dataclass(frozen=True)
class TokenServer:
    """A server on the driver that sends its token to each client.

    Attributes:
        host: The address that workers connect to.
        port: The port.
        token: What it sends.
    """

    host: str
    port: int
    token: str


@dataclass(frozen=True)
class Inspection:
    """Describes the process in which it is called.

    Attributes:
        backend: Keras's backend.
        driver: The server on the driver; ``None``: the workers connect to none.
        is_barrier: Whether the tasks run at the same time, so that they can connect to each other.
        ports: The ports on which workers listen for each other; ``None``: any free one.
        executors: Host and port of Spark's own server on each executor.
    """

    backend: str
    driver: TokenServer | None = None
    is_barrier: bool = False
    ports: range | None = None
    executors: tuple[tuple[str, int], ...] = ()

    def here(self, gpus: Sequence[str] = ()) -> dict[str, Any]:
        """Describe this process and its machine; ``gpus`` are the addresses of the GPUs that it may use."""
        return self._described(gpus) | {"loaded": load_backend(self.backend, gpus)}

    def _described(self, gpus: Sequence[str]) -> dict[str, Any]:
        return {
            "host": platform.node(),
            "executor": executor_process(),
            "python": sys.executable,
            "version": platform.python_version(),
            "java": java_of(executor_process()),
            "packages": versions(),
            "granted_gpus": list(gpus),
            "cores": cores(),
            "memory": available_memory(),
            "memory_limit": address_space(),
            "disk": free_disk(local_folder()),
            "reaches_driver": None if self.driver is None else unreached(self.driver),
            "unreached_workers": [],
            "unreached_executors": [],
            "loaded": None,
        }

    def on_partition(self, partition: int, rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Describe a worker, in a task. The backend is loaded once for each executor, without barriers in each task."""
        from pyspark import BarrierTaskContext, TaskContext

        for _ in rows:
            pass
        context: Any = BarrierTaskContext.get() if self.is_barrier else TaskContext.get()
        gpu = context.resources().get("gpu")
        gpus = [] if gpu is None else list(gpu.addresses)
        found = self._described(gpus)
        if not self.is_barrier:
            yield found | {"loaded": load_backend(self.backend, gpus)}
            return
        token = f"{found['executor']}@{found['host']}"
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        with serving(everywhere, self.ports or (0,), token) as port:
            address, _ = split_address(context.getTaskInfos()[partition].address)
            mine = TokenServer(address, port, token)
            workers = [
                TokenServer(*json.loads(each)) for each in context.allGather(json.dumps([mine.host, mine.port, token]))
            ]
            firsts = {worker.token: worker for worker in reversed(workers)}  # of each executor
            others = [worker for worker in firsts.values() if worker.token != token]
            if firsts[token] == mine:
                with ThreadPoolExecutor(_CONNECTIONS) as pool:  # each may take until its timeout
                    found["unreached_workers"] = [reason for reason in pool.map(unreached, others) if reason]
                    found["unreached_executors"] = unreached_executors(self.executors, pool)
            context.barrier()  # all have connected
        if firsts[token] == mine:
            found["loaded"] = load_backend(self.backend, gpus)
        yield found

    def on_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Describe a worker, in ``mapInArrow``: yields an Arrow batch with a JSON text."""
        import pyarrow as pa
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        for found in self.on_partition(context.partitionId(), batches):
            yield pa.record_batch([pa.array([json.dumps(found)], pa.string())], ["result"])


@contextmanager
def serving(host: str, ports: Sequence[int], token: str) -> Iterator[int]:
    """Send a token to each client that connects; yields the port.

    Args:
        host: The address to listen on.
        ports: The ports, of which it takes the first free one; 0: any free one.
        token: What is sent.

    Raises:
        OSError: It cannot listen on this address.
    """

    class Sender(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(token.encode() + b"\n")

    listening = _first_listener(host, ports)
    with socketserver.ThreadingTCPServer(listening.getsockname()[:2], Sender, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listening  # of IPv4 or IPv6
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


def _first_listener(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports[:-1]:
        with suppress(OSError):
            return open_listener(host, port)
    try:
        return open_listener(host, ports[-1])
    except OSError as error:
        if isinstance(ports, range):
            raise OSError(
                f"no port from {ports[0]} to {ports[-1]} of {socket.gethostname()} is free ({error.strerror}): "
                "spark.sparkkeras.worker.ports has to name one for each worker that runs on a machine"
            ) from error
        raise


def unreached_executors(executors: Sequence[tuple[str, int]], pool: ThreadPoolExecutor) -> list[str]:
    """The executors to which this machine cannot connect, and why."""
    reasons = pool.map(lambda address: connect_error(*address), executors)
    pairs = zip(executors, reasons, strict=True)
    return [f"{host_and_port(*address)} ({reason})" for address, reason in pairs if reason]


def unreached(server: TokenServer) -> str:
    """Why a server cannot be reached from here; empty if it can."""
    where = host_and_port(server.host, server.port)
    try:
        with socket.create_connection((server.host, server.port), CONNECT_SECONDS) as connection:
            received = connection.makefile("rb").readline().decode(errors="replace").strip()
    except OSError as error:
        return f"{where} ({error.strerror or error})"
    return "" if received == server.token else f"{where} (another server answers there)"


def versions() -> dict[str, str]:
    """The versions of those of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "tensorflow" not in found:  # of another distribution, such as tensorflow-cpu
        for name in importlib.metadata.packages_distributions().get("tensorflow", [])[:1]:
            found["tensorflow"] = importlib.metadata.version(name)
    return found


def load_backend(backend: str, gpus: Sequence[str] = ()) -> dict[str, Any]:
    """Load Keras and its backend in a new process.

    Args:
        backend: The backend.
        gpus: The addresses of the GPUs that it may use; empty: those that it finds.

    Returns:
        The ``backend``, the ``gpus`` that it sees, and the ``seconds`` that loading took; or an ``error``.
    """
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading it takes more than {LOAD_SECONDS:.0f} s"}
    except OSError as error:
        return {"error": f"{sys.executable} cannot be run: {error.strerror or error}"}
    if done.returncode < 0:
        return {"error": f"the process that loads it was ended by {signal.Signals(-done.returncode).name}"}
    lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
    if done.returncode:
        return {"error": lines[-1].strip() if lines else f"the process that loads it exits with {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found if found.pop("works") else {"error": "it computes 1 + 1 + 1 incorrectly"}


def configured_backend() -> str:
    """The backend in Keras's file of settings, else the default."""
    path = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
    with suppress(OSError, ValueError, AttributeError):
        return str(json.loads(path.read_text()).get("backend", "tensorflow"))
    return "tensorflow"


def local_folder() -> str:
    """The folder for rows on this machine: that of `sparkkeras.data.files.home`, which workers may lack."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()


def free_disk(folder: str) -> dict[str, Any]:
    """The free bytes on the disk of a folder, and an error if a file cannot be written to it."""
    found: dict[str, Any] = {"folder": folder, "free": None, "error": ""}
    try:
        found["free"] = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def cores() -> int:
    """The number of CPU cores that the machine or container of this process may use, rounded up."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups(""):
        quota, _, period = _read(f"{folder}/cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            known = min(known, -(-int(quota) // int(period)))
    return known


def available_memory() -> int | None:
    """The bytes of memory that all processes of this machine or container can still use; ``None`` if unknown."""
    return min([*_available_on_machine(), *_available_in_groups()], default=None)


def _available_on_machine() -> Iterator[int]:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _available_in_groups() -> Iterator[int]:
    """What the control groups (containers) of this process still allow; their cache of files counts as available."""
    for controller, limit, used, cache in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _groups(controller):
            values = [_read(f"{folder}/{name}").strip() for name in (limit, used)]
            if all(value.isdigit() for value in values):
                statistics = dict(line.split(maxsplit=1) for line in _read(f"{folder}/memory.stat").splitlines())
                yield max(0, int(values[0]) - int(values[1]) + int(statistics.get(cache, 0)))


def _groups(controller: str) -> Iterator[str]:
    """The folders of the control group of this process and of those around it.

    Args:
        controller: A controller of version 1, such as ``"memory"``; empty: version 2, which has one hierarchy.
    """
    root = PurePosixPath("/sys/fs/cgroup", controller)
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = root / path.strip("/")
            yield from (str(folder) for folder in (group, *group.parents) if folder.is_relative_to(root))


def address_space() -> int | None:
    """The limit on this process alone, in bytes (a worker's part of ``spark.executor.pyspark.memory``); ``None``: none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def executor_process() -> int:
    """The process ID of the Java process that this one belongs to; 0 if unknown."""
    process = os.getpid()
    while process > 1:
        name, _, rest = _read(f"/proc/{process}/stat").rpartition(")")
        if name.partition("(")[2] == "java":
            return process
        process = int(rest.split()[1]) if rest else 0
    return 0


def java_of(process: int) -> str:
    """The version of Java that runs a process, from the file ``release`` of its folder; empty if unknown."""
    with suppress(OSError, RuntimeError):
        home = Path(f"/proc/{process}/exe").resolve(strict=True).parent.parent
        for line in _read(str(home / "release")).splitlines():
            if line.startswith("JAVA_VERSION="):
                return line.partition("=")[2].strip('"')
    return ""


def run_java(environment: Mapping[str, str]) -> tuple[str, str]:
    """The version of the Java that Spark starts with these environment variables, and the error if it does not run."""
    home = environment.get("JAVA_HOME", "")
    java = str(Path(home) / "bin" / "java") if home else "java"
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{java} cannot be run: {getattr(error, 'strerror', None) or error}"
    if done.returncode:
        return "", f"{java} exits with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    version = re.search(r'version "([^"]+)"', done.stderr)
    return version[1] if version else "", ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
