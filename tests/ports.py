"""Ports for servers that tests start.

Owns that two tests that run side by side get different ones, and none that the kernel gives meanwhile to somebody who asks for any: they lie below those.
The node process of a launch takes the port ten thousand below the launcher's: those are kept free, too.
"""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port"]

_FIRST, _EACH = 22_000, 2_500  # for each of four workers
_next = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """One that nobody listens at; the same again only after thousands."""
    first = _FIRST + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4)
    while True:
        port = first + next(_next) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
