"""An S3 server on this machine, and the settings with which Spark uses it.

The server is Moto's, in an environment of its own; requests reach it through a relay that may fail or delay them. Maven gets
Hadoop's client once, with the SDK of AWS that it needs, 600 MB.
"""

import dataclasses
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.clusters.hadoop import MissingError, classpath
from tests.processes import free_port
from tests.rpc.test_transports import LastBytes, Relay

ENVIRONMENT = Path(__file__).parent.parent.parent / "artifacts" / "s3"
MOTO = "moto[server,s3]>=5.2"
CLIENT = "org.apache.hadoop:hadoop-aws:{version}"


def _installed(folder, package, found, *commands):
    """Install a package into a folder, unless what is to be found there is."""
    for command in [] if found.exists() else commands:
        done = subprocess.run([sys.executable, "-m", "uv", "--quiet", *command], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise MissingError(f"{package} cannot be installed: {done.stderr[-500:]}")


def _moto():
    """The program of Moto's server."""
    python = ENVIRONMENT / "bin" / "python"
    program = python.with_name("moto_server")
    commands = ["venv", "--clear", ENVIRONMENT], ["pip", "install", "--python", python, MOTO]
    _installed(ENVIRONMENT, MOTO, program, *commands)
    return program


def s3fs():
    """The folder of s3fs, with which fsspec reads and writes S3, for the import path.

    Raises:
        MissingError: It cannot be installed.
    """
    folder = ENVIRONMENT.with_name("s3fs")
    _installed(folder, "s3fs", folder / "s3fs", ["pip", "install", "--python", sys.executable, "--target", folder, "s3fs"])
    return folder


LOST = LastBytes()
"""An answer that never arrives: the connection is closed in its place."""


def answer(status, code):
    """The bytes of an S3 error, after which the connection is closed."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return LastBytes((head + body).encode())


@dataclasses.dataclass(frozen=True)
class _Server:
    """Where a relay connects to."""

    host: str
    port: int


class S3:
    """An S3 server with the bucket ``data``; a context manager.

    Raises:
        MissingError: Java, Maven or an artifact is missing, or Moto cannot be installed.

    Attributes:
        fault: Called with the number of answers so far; returns the bytes of another answer, or ``None``.
        answers: The number of answers.
    """

    def __init__(self):
        self.fault = lambda number: None
        self.answers = 0
        self._client, self._program = classpath([CLIENT]), _moto()

    def __enter__(self):
        port = free_port()
        self._process = subprocess.Popen(
            [self._program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._relay = Relay(_Server("127.0.0.1", port), self._change)
        self.endpoint = f"http://127.0.0.1:{self._relay.address.port}"
        self._make_bucket(f"http://127.0.0.1:{port}/data")
        return self

    def _make_bucket(self, url, seconds=120):
        deadline = time.monotonic() + seconds
        while True:
            try:
                return urlopen(Request(url, method="PUT"), timeout=10).close()
            except URLError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
            time.sleep(0.1)

    def settings(self):
        """The settings of Spark for ``s3a://data/``."""
        return {
            "spark.driver.extraClassPath": self._client,
            "spark.hadoop.fs.s3a.endpoint": self.endpoint,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
            "spark.hadoop.fs.s3a.access.key": "key",
            "spark.hadoop.fs.s3a.secret.key": "secret",
        }

    def environment(self):
        """The environment variables with which pyarrow reads and writes it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __exit__(self, *_):
        self._relay.__exit__()
        self._process.terminate()
        self._process.wait(30)

    def _change(self, way, before, data):
        if way == "there" or not data.startswith(b"HTTP/1.1 ") or data.startswith(b"HTTP/1.1 100"):
            return data
        self.answers += 1
        other = self.fault(self.answers)
        return data if other is None else other
