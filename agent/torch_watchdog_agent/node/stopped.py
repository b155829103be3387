"""Processes of ranks, or of their keepers, that are stopped (SIGSTOP): they answer nothing, and nothing but the kernel says so.

Owns how often the kernel is asked, and what it said last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch_watchdog_agent.node.processes import state_of

__all__ = ["Stopped"]

_EVERY_S = 1.0
_STOPPED = "T"  # not `t`: a debugger stops a process for moments, and knows it


class Stopped:
    """Those that have begun and not ended. Costs one small file of /proc a process and second."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_stopped: dict[int, bool] = {}
        self._next_s = 0.0

    def begun(self, pid: int) -> None:
        self._is_stopped[pid] = False

    def ended(self, pid: int) -> None:
        self._is_stopped.pop(pid, None)

    def changes(self) -> Iterator[tuple[int, str]]:
        """The processes that were stopped, or continued, since this was asked last, with the kernel's letter for what they are now."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        for pid, before in list(self._is_stopped.items()):
            state = state_of(pid)
            if state is None:
                self.ended(pid)
            elif (state == _STOPPED) != before:
                self._is_stopped[pid] = not before
                yield pid, state
