"""The doctor behind Spark Connect."""

import socket

import pytest

from sparkkeras import diagnose
from sparkkeras.spark.settings import WORKER_PORTS
from tests.models import classifier


def test_a_good_set_up(spark):
    diagnosis = diagnose(spark, classifier())
    assert not diagnosis.errors, str(diagnosis)
    messages = [finding.message for finding in diagnosis.findings]
    assert "workers reach the driver" in messages
    assert "2 slots of 1 core on 1 executor" in messages


@pytest.mark.soak  # the checks themselves are those of a classic session
def test_a_port_that_workers_do_not_reach(spark):
    [error] = diagnose(spark, host="192.0.2.1", bind="0.0.0.0").errors
    assert "the driver at 192.0.2.1:" in error.message


@pytest.mark.soak
def test_the_ports_of_workers(spark, settings):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for value, words in ((f"{port}-{port}", "Address already in use"), ("36000", f"{WORKER_PORTS}='36000'")):
            settings(WORKER_PORTS, value)
            [error] = diagnose(spark).errors
            assert words in error.message
