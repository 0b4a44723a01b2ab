"""Ports that no other process gets."""

import socket

import pytest

from sparkkeras.errors import ClusterError
from sparkkeras.worker.collectives import hold_port, holding_port
from tests.processes import free_port


def test_a_held_port_is_free_for_those_who_know_it_and_for_no_one_else():
    with hold_port() as held:
        port = held.getsockname()[1]
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # of PyTorch, of gRPC
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, option, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
                with socket.create_connection(("127.0.0.1", port)):
                    pass
        with hold_port("127.0.0.1", port) as again:  # of the process that joins the group
            assert again.getsockname() == ("127.0.0.1", port)
        with socket.socket() as other:
            other.bind(("", 0))
            assert other.getsockname()[1] != port


def test_processes_share_a_range_of_ports():
    first = free_port()
    ports = range(first, first + 2)
    with holding_port(ports) as one, socket.create_server(("", first + 1)):
        assert one == first
        with (
            pytest.raises(ClusterError, match=rf"the ports {first} to {first + 1} of .* are all taken"),
            holding_port(ports),
        ):
            pass
    with holding_port(ports) as one, holding_port(ports) as other:
        assert (one, other) == tuple(ports)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_an_error(host):
    with pytest.raises(ClusterError, match=rf"cannot listen on {host} \(.+\).* set SPARK_LOCAL_IP"):
        hold_port(host)
