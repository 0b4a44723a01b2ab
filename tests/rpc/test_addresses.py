"""Connecting to addresses, and why that fails."""

import socket

import pytest

from sparkkeras.rpc.addresses import connect_error


@pytest.mark.parametrize(("host", "reason"), [("127.0.0.1", "Connection refused"), ("h" * 64, "label")])
def test_why_a_connection_fails(host, reason):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connect_error("127.0.0.1", port) == ""
    assert reason in connect_error(host, port)
