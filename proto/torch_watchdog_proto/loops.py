"""gRPC's noise on a user's terminal: its own log, and what it lets escape where event loops share a process.

Owns one variable for as long as gRPC is loaded, and one exception handler for asyncio loops; standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["quiet_grpc", "quiet_grpc_noise"]

_VERBOSITY = "GRPC_VERBOSITY"


@contextlib.contextmanager
def quiet_grpc() -> Iterator[None]:
    """Import gRPC in here: it would tell every handshake that fails. Programs that are started later find their environment as it was."""
    given = os.environ.get(_VERBOSITY)
    os.environ.setdefault(_VERBOSITY, "NONE")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_VERBOSITY]


def quiet_grpc_noise(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`. Where two loops of one process use grpc.aio, both wake for one event and the second finds nothing to read:
    gRPC lets that BlockingIOError escape, and asyncio would print it on the user's terminal. Everything else is handled as ever.
    """
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
