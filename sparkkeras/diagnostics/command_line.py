"""``python -m sparkkeras doctor``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from sparkkeras.diagnostics.doctor import examine_driver, examine_java, examine_spark
from sparkkeras.diagnostics.findings import ERROR, Diagnosis, Finding
from sparkkeras.diagnostics.spark_facts import BACKGROUND, START_SECONDS, Request, start_spark
from sparkkeras.errors import ConfigurationError

DESCRIPTION = """Check whether this machine and a Spark cluster can train with sparkkeras, and find what would be slow or
break. The exit code is 1 if there is an error, with --strict also if there is a warning."""


def run() -> NoReturn:
    """Run the command of this process, and exit."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130  # as a shell reports a command that was interrupted
    if any(thread.name == BACKGROUND for thread in threading.enumerate()):
        os._exit(code)  # what did not end in time has threads that Python would wait for
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sparkkeras", description="Tools of sparkkeras.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor")
    doctor = commands.add_parser("doctor", help="check this machine and a Spark cluster", description=DESCRIPTION)
    where = doctor.add_mutually_exclusive_group()
    where.add_argument("--master", metavar="URL", help="Spark's master (default: of Spark's configuration, else local[*])")
    where.add_argument("--remote", metavar="URL", help="a Spark Connect server, such as sc://host:15002")
    doctor.add_argument(
        "--conf", metavar="NAME=VALUE", action="append", default=[], type=_setting, help="a setting of Spark; repeatable"
    )
    doctor.add_argument("--host", help="the address at which workers reach this machine (default: of Spark's settings)")
    doctor.add_argument("--bind", help="the address that this machine listens on (default: of Spark's settings)")
    doctor.add_argument("--port", type=int, default=0, help="the port that workers have to reach (default: any free one)")
    doctor.add_argument(
        "--start-seconds",
        type=float,
        default=START_SECONDS,
        metavar="S",
        help="how long Spark, and the executors, may take to start (%(default)g)",
    )
    doctor.add_argument("--json", action="store_true", help="print a JSON object")
    doctor.add_argument("--strict", action="store_true", help="warnings count as errors")
    given = parser.parse_args(arguments)
    try:
        request = Request(given.host, given.bind, given.port, given.start_seconds)
    except ConfigurationError as error:
        doctor.error(str(error))
    findings: list[Finding] = []
    for finding in _findings(given, request):
        findings.append(finding)
        if not given.json:
            _print(str(finding))
    diagnosis = Diagnosis(tuple(findings))
    _print(diagnosis.to_json(given.strict) if given.json else f"\n{diagnosis.summary()}")
    return 0 if diagnosis.is_ok(given.strict) else 1


def _findings(given: argparse.Namespace, request: Request) -> Iterator[Finding]:
    """The findings, in the order of the checks; stops at what makes further checks impossible."""
    driver, findings = examine_driver()
    yield from findings
    if "pyspark" not in driver["packages"]:
        yield Finding(ERROR, "Spark", "pyspark is not installed.", "pip install pyspark")
        return
    if given.remote is None:
        java = examine_java(os.environ)
        yield java
        if java.status == ERROR:
            return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = start_spark(given.master, given.remote, dict(given.conf), request.start_seconds)
    if isinstance(session, Finding):
        yield session
        return
    try:
        if given.remote is None:
            session.sparkContext.setLogLevel("OFF")  # its errors become findings
        yield from examine_spark(session, driver, request=request)
    finally:
        session.stop()


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, such as spark.executor.memory=4g")
    return name, value
