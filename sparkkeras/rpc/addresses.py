"""Network addresses as text, and sockets at them. Imports only the standard library, for the doctor."""

from __future__ import annotations

import socket

CONNECT_SECONDS = 5.0
"""How long the doctor, and a driver whose tasks do not end, try to connect to an address."""


def host_and_port(host: str, port: int) -> str:
    """An address as ``host:port``; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The inverse of `host_and_port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def connect_error(host: str, port: int) -> str:
    """Why this process cannot connect to a port; empty if it can."""
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # the latter: of a name that cannot be one of a host
        return getattr(error, "strerror", None) or str(error)
    return ""


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket.

    Args:
        host: The host name or IP address to listen on.
        port: The port; 0: any free one.

    Raises:
        OSError: The address is not one of this machine's, or the port is in use.
    """
    return open_socket(host, port, listens=True)


def open_socket(host: str | None, port: int, *options: int, listens: bool = False) -> socket.socket:
    """A socket that is bound to an address.

    Args:
        host: The host name or IP address; ``None``: all addresses of this machine.
        port: The port; 0: any free one.
        options: Options of sockets to set besides ``SO_REUSEADDR``.
        listens: Whether the socket listens.

    Raises:
        OSError: The address is not one of this machine's, or the port is in use.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    opened = socket.socket(family, kind, protocol)
    try:
        for option in (socket.SO_REUSEADDR, *options):  # a port that was closed a moment ago is free
            opened.setsockopt(socket.SOL_SOCKET, option, 1)
        opened.bind(address)
        if listens:
            opened.listen(256)
    except BaseException:
        opened.close()
        raise
    return opened
