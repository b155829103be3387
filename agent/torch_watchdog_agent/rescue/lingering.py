"""A rank of a job that has failed, whose script has ended and whose process does not: Python waits for a thread that is no daemon, a tracker's, for ever.

Owns when such a process is ended, with the status that its script had. Nobody else could tell: from outside it looks as one that still saves something of its
own, which is left alone. Nothing of this exists in a training in which no rank fails.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["LINGERS_S", "Lingering"]

LINGERS_S = 30.0  # for a tracker that still sends what it has: as long as launchers wait between SIGTERM and SIGKILL
POLL_S = 0.25
FLUSH_S = 1.0  # for what was printed: the thread may hold the lock of it


class Lingering:
    """Of one rank. `is_over`: it has failed or was freed, and nothing more is asked of it; `status`: what its script asked to end with, if anything."""

    def __init__(
        self, rank: Rank, *, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep, end: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        self._rank, self._is_over = rank, is_over
        self._clock, self._pause, self._end = clock, pause, end
        self._within_s = min(LINGERS_S, rank.config.grace_s)
        self._is_watched = False
        self._has_raised = False
        self.status: Callable[[], int] = int

    def failed(self) -> None:
        """An exception has ended the script, and is told."""
        self._has_raised = True
        self.watch()

    def watch(self) -> None:
        """A rank has failed. From any thread; once. A process that trains alone may have other work than its training, and lets nobody wait."""
        if self._is_watched or self._rank.identity.world_size == 1:
            return
        self._is_watched = True
        with suppress(RuntimeError):  # the machine gives no thread any more
            threading.Thread(target=self.wait, name="torch-watchdog-end", daemon=True).start()

    def wait(self) -> None:
        """Ends the process once its script has been over, and the rescue with it, for as long as a thread may take; a process that ends by itself ends this."""
        since: float | None = None
        while since is None or self._clock() - since < self._within_s:
            self._pause(POLL_S)
            if not (self._is_over() and waits_for_threads() and self._rank.guarding):
                since = None
            elif since is None:
                since = self._clock()
        self._rank.say(
            f"the script of this rank has ended, but {_kept_by()} keeps its process; nothing more is to be saved here, and after {self._within_s:g} s "
            "it is ended"
        )
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        self._end(1 if self._has_raised else self.status())


def waits_for_threads() -> bool:
    """Whether the main thread has run the script to its end, and waits for others: nothing but that wait is on its stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code is getattr(threading._shutdown, "__code__", None)  # type: ignore[attr-defined]


def _kept_by() -> str:
    names = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    return f"a thread that it had started ({', '.join(names[:3])})" if names else "a thread that it had started"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script's own, or closed
            stream.flush()
