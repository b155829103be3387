"""Threads for one use, so that what hangs there holds up nothing else: asyncio's own are few, and shared by all.

Owns these threads. They are daemon threads, and no executor's: Python waits for an executor's at its exit, and one that a disk holds never ends.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

__all__ = ["Threads"]

_T = TypeVar("_T")
_Work: TypeAlias = tuple["Future[Any]", Callable[[], Any]]


class Threads:
    """At most so many; they begin with the first works."""

    def __init__(self, use: str, most: int = 1) -> None:
        self._use, self._most = use, most
        self._waiting: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    @property
    def num_waiting(self) -> int:
        return self._waiting.qsize()

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns, or raises."""
        future: Future[_T] = Future()
        self._waiting.put((future, work))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            self._threads.append(threading.Thread(target=self._run, name=f"torch-watchdog-{self._use}", daemon=True))
            self._threads[-1].start()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Waits for nothing."""
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it is the asker's
                    future.set_exception(error)
            self._idle.release()
