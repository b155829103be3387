"""Event loops that share a process: a word about gRPC's noise.

Owns one exception handler for asyncio loops; standard library only.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["quiet_grpc_noise"]


def quiet_grpc_noise(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`. Where two loops of one process use grpc.aio, both wake for one event and the second finds nothing to read:
    gRPC lets that BlockingIOError escape, and asyncio would print it on the user's terminal. Everything else is handled as ever.
    """
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
