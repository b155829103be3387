"""Ports for servers that tests start.

Owns that two tests that run side by side get different ones, and none that the kernel gives meanwhile to somebody who asks for any: they lie below those.
The node process of a launch takes the port ten thousand below the launcher's: those are kept free, too.
"""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port", "ports_of"]

_PORTS = range(22_000, 32_000)
_next = itertools.count(os.getpid() * 61)


def ports_of(worker: int, workers: int) -> range:
    """Those of one of pytest's workers, counted from 0: no other's, however many there are."""
    parts = max(4, workers)
    part, each = worker % parts, len(_PORTS) // parts  # who comes in place of one that crashed has a number past all
    return _PORTS[part * each : (part + 1) * each]


def free_port() -> int:
    """One that nobody listens at; the same again only after hundreds."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    ours = ports_of(int(worker.removeprefix("gw")), int(workers))
    while True:
        port = ours[next(_next) % len(ours)]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
