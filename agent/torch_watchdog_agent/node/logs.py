"""Telling lines of the ranks' logs: device-side assertions, ends of native code, memory that ran out.

Owns the reading of `logs/rank-R.log` from where the last look ended, within a bound; what a line means is the daemon's business. A rank is known by its
number only: the log goes on over attempts, and what is read belongs to the rank's process of that moment.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from torch_watchdog_agent.attempt_mark import newest_attempt

__all__ = ["RankLogs"]

_TELLING = re.compile(
    rb"Assertion `.*` failed\.|terminate called|what\(\):|CUDA error|out of memory|OutOfMemoryError|Fatal Python error|Segmentation fault|"
    rb"Bus error|unspecified launch failure|illegal memory access|oom-kill"
)
_MAX_AT_ONCE = 4 << 20
_MAX_LINE = 1000
_MAX_LINES = 200  # of one rank: an assertion prints up to 192


class RankLogs:
    """The logs of one run directory. `look` is called when a rank has ended or speaks of a failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, int] = {}  # rank -> bytes

    def begin(self, rank: int) -> None:
        """A process of this rank starts: what an earlier attempt has printed is not its own."""
        with suppress(OSError):
            self._read[rank] = self._path(rank).stat().st_size if rank in self._read else 0

    def look(self, rank: int) -> list[str]:
        """The telling lines that are new."""
        try:
            with self._path(rank).open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._read.get(rank, 0), end - _MAX_AT_ONCE))
                data = file.read(_MAX_AT_ONCE)
        except OSError:
            return []
        self._read[rank] = end
        telling = [line for line in newest_attempt(data).splitlines() if _TELLING.search(line)]
        return [line[:_MAX_LINE].decode("utf-8", "replace") for line in telling[:_MAX_LINES]]

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"
