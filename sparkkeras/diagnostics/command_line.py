"""``python -m sparkkeras doctor``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from sparkkeras.diagnostics.doctor import START_SECONDS, examine_driver, examine_java, examine_spark
from sparkkeras.diagnostics.findings import ERROR, Diagnosis, Finding
from sparkkeras.diagnostics.spark_facts import BACKGROUND, start_spark

DESCRIPTION = """Check whether this machine and a Spark cluster can train with sparkkeras, and find what would be slow or
break. The exit code is 1 if there is an error, with --strict also if there is a warning."""


def run() -> NoReturn:
    """Run the command of this process, and exit."""
    code = main()
    if any(thread.name == BACKGROUND for thread in threading.enumerate()):
        os._exit(code)  # what did not end in time has threads that Python would wait for
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sparkkeras", description="Tools of sparkkeras.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="check this machine and a Spark cluster", description=DESCRIPTION)
    where = doctor.add_mutually_exclusive_group()
    where.add_argument("--master", metavar="URL", help="Spark's master (default: of Spark's configuration, else local[*])")
    where.add_argument("--remote", metavar="URL", help="a Spark Connect server, such as sc://host:15002")
    doctor.add_argument(
        "--conf", metavar="NAME=VALUE", action="append", default=[], type=_setting, help="a setting of Spark; repeatable"
    )
    doctor.add_argument("--host", help="the address at which workers reach this machine (default: of Spark's settings)")
    doctor.add_argument("--port", type=_port, default=0, help="the port that workers have to reach (default: any free one)")
    doctor.add_argument(
        "--start-seconds",
        type=_seconds,
        default=START_SECONDS,
        metavar="S",
        help="how long Spark may take to start (%(default)g)",
    )
    doctor.add_argument("--json", action="store_true", help="print a JSON object")
    doctor.add_argument("--strict", action="store_true", help="warnings count as errors")
    given = parser.parse_args(arguments)
    findings: list[Finding] = []
    for finding in _findings(given):
        findings.append(finding)
        if not given.json:
            _print(str(finding))
    diagnosis = Diagnosis(tuple(findings))
    _print(diagnosis.to_json() if given.json else f"\n{diagnosis.summary()}")
    return 0 if diagnosis.is_ok(given.strict) else 1


def _findings(given: argparse.Namespace) -> Iterator[Finding]:
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
    session = start_spark(given.master, given.remote, dict(given.conf), given.start_seconds)
    if isinstance(session, Finding):
        yield session
        return
    try:
        if given.remote is None:
            session.sparkContext.setLogLevel("OFF")  # its errors become findings
        yield from examine_spark(session, driver, None, None, given.host, given.port, given.start_seconds)
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


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of seconds")
    return seconds
