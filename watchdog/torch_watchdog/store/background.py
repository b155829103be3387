"""The store's one thread: a disk that is slow, full or hung must never delay an order to a rank.

Owns a bounded queue of writes and what happens when one fails: it is dropped and counted, said once, and the next is tried. Knows nothing of
what is written.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["BackgroundWriter"]

_QUIET_S = 60.0
_WELL_S = 10.0  # without a loss: a disk that is nearly full takes some writes and not others
Work = Callable[[], None]
Done = Callable[[], None]


class BackgroundWriter:
    """Runs works in the order in which they were given. `say` gets a line when writes begin to be lost and when they no longer are, once a minute at most."""

    def __init__(self, *, max_pending: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        # Not a Queue, whose locks are in Python: thousands of writes come in a second.
        self._queue: queue.SimpleQueue[tuple[Work, Done | None] | None] = queue.SimpleQueue()
        self._max_pending = max_pending
        self._say, self._clock = say, clock
        self._said_s = self._lost_s = -math.inf
        self._told = False
        self.num_dropped = 0
        self.is_dropping = False
        # A daemon thread, joined with a limit: a hung network disk must not keep the launcher from exiting.
        self._thread = threading.Thread(target=self._run, name="torch-watchdog-store", daemon=True)
        self._thread.start()

    def submit(self, work: Work, done: Done | None = None) -> None:
        """Queues one write. `done` is called from this thread's side once it was tried, whether or not it was lost; at once where the queue is full."""
        if self._queue.qsize() < self._max_pending:
            self._queue.put((work, done))
            return
        self._lost(f"the disk is too slow: {self._max_pending} writes are waiting")
        if done is not None:
            done()

    def close(self, timeout_s: float) -> bool:
        """Lets what is queued be written, for at most so long. False where something is left."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, done = item
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever one write meets, the next must be tried and every `done` be called
                self._lost(str(error))
            else:
                self._written()
            if done is not None:
                done()

    def _lost(self, reason: str) -> None:
        self.num_dropped += 1
        self.is_dropping, self._lost_s = True, self._clock()
        if not self._told and self._clock() - self._said_s >= _QUIET_S:
            self._told, self._said_s = True, self._clock()
            self._say(f"the run directory cannot be written ({reason}): records are being dropped; the training goes on")

    def _written(self) -> None:
        if self.is_dropping and self._clock() - self._lost_s >= _WELL_S and self._queue.qsize() < self._max_pending // 2:
            self.is_dropping = False
            if self._told:
                self._told = False
                self._say(f"the run directory can be written again: {self.num_dropped} writes were lost so far")
