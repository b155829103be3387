"""What an address of a daemon says: `unix:PATH`, or a host and a port. Pure text; knows no socket.

What is no unix socket and no loopback address leaves the machine: `tls.py` says what that asks for.
"""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback", "split"]


def split(address: str) -> tuple[str, str]:
    """Host (without brackets) and port of `HOST:PORT`; ("", "") for anything else, as a unix socket is."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), port) if host and port.isdigit() and not address.startswith("unix:") else ("", "")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
