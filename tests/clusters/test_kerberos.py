"""HDFS and YARN with Kerberos: a keytab for the driver, and delegation tokens for executors, which end during the run."""

import re

import pytest

from tests.clusters.conftest import ROOT, Submit, running

pytestmark = [pytest.mark.programs, pytest.mark.soak]

TOKEN_SECONDS = 40
"""How long a token of HDFS lives; see `tests.clusters.hadoop`."""


@pytest.fixture(scope="module")
def secured(request, tmp_path_factory):
    """A cluster with a KDC, and the folder of a user."""
    with running(request, tmp_path_factory.mktemp("secured"), secured=True) as cluster:
        cluster.fs("-mkdir", "-p", "/user/me")
        cluster.fs("-chown", "me", "/user/me")
        yield cluster


def test_a_tour_that_outlives_its_delegation_tokens(secured, tmp_path):
    submit = Submit(secured, tmp_path)
    settings = {"spark_kerberos_principal": "me", "spark_kerberos_keytab": secured.keytab}
    parts = ["synchronous", "checkpoints", "tfrecords", "pipeline"]
    program = ROOT / "tests" / "clusters" / "tour.py"
    try:
        output = submit.program(program, "hdfs:///user/me/tour", *parts, **settings).succeed()
    finally:
        submit.stop()
    worked = re.findall(r"^worked: (\w+): .* \((\d+) s\)", output, re.MULTILINE)
    assert {part for part, _ in worked} == set(parts)
    assert sum(int(seconds) for _, seconds in worked) > TOKEN_SECONDS
