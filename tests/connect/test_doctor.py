"""The doctor behind Spark Connect."""

import socket

from sparkkeras import diagnose
from sparkkeras.spark.settings import WORKER_PORTS
from tests.models import classifier


def test_a_good_set_up(spark):
    diagnosis = diagnose(spark, classifier())
    assert not diagnosis.errors, str(diagnosis)
    messages = [finding.message for finding in diagnosis.findings]
    assert "workers reach the driver" in messages
    assert "2 slots of 1 core on 1 executor" in messages


def test_a_port_that_workers_do_not_reach(spark):
    [error] = diagnose(spark, host="192.0.2.1", bind="0.0.0.0").errors
    assert "the driver at 192.0.2.1:" in error.message
    assert error.message.endswith("The doctor chose this port at random.")


def test_the_ports_of_workers(spark):
    try:
        with socket.create_server(("", 0)) as other:
            port = other.getsockname()[1]
            spark.conf.set(WORKER_PORTS, f"{port}-{port}")
            [taken] = diagnose(spark).errors
        spark.conf.set(WORKER_PORTS, "36000")
        [invalid] = diagnose(spark).errors
    finally:
        spark.conf.unset(WORKER_PORTS)
    assert "Address already in use" in taken.message
    assert invalid.message.startswith(f"{WORKER_PORTS}='36000': expected")
