"""Network addresses as text."""

from __future__ import annotations


def host_and_port(host: str, port: int) -> str:
    """An address as ``host:port``; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The inverse of `host_and_port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
