"""Until when a keeper holds the launcher back: a file that the node process makes, the end of that process, or the time.

Owns that question and nothing of the answer's consequences. Standard library only: it runs before torch is imported, in every rank.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what only annotations need is not paid for in every rank
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["HoldBack", "released_file"]

HURRIED_S = 25.0  # after a signal to the launcher itself: it kills its ranks 30 s later


def released_file(runtime_dir: Path, *, attempt: int, rank: int) -> Path:
    """Exists once the keeper of that rank may tell the launcher."""
    return runtime_dir / f"released-{attempt}-{rank}"


def begun_file(runtime_dir: Path, attempt: int) -> Path:
    """Exists once a process of that start of the launcher's is there, which may end before it is heard of as a rank."""
    return runtime_dir / f"begun-{attempt}"


class HoldBack:
    """`path` appears when the keeper may tell; `launcher_pid` is the node process, which makes it; at most `grace_s` pass."""

    __slots__ = ("_clock", "_end_s", "_grace_s", "_is_hurried", "_launcher_fd", "_launcher_pid", "_path")

    def __init__(self, path: Path, *, launcher_pid: int, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._path, self._launcher_pid, self._grace_s = os.fspath(path), launcher_pid, grace_s
        self._launcher_fd: int | None = None
        self._end_s: float | None = None
        self._is_hurried = False

    def begin(self) -> None:
        """In the keeper, while the node process surely lives: its number may be another's later."""
        try:
            self._launcher_fd = os.pidfd_open(self._launcher_pid)
        except OSError:
            self._launcher_fd = None  # another pid namespace, or an old kernel: nobody could release us

    def is_over(self, *, is_hurried: bool) -> bool:
        now = self._clock()
        if self._end_s is None:
            self._end_s = now + self._grace_s
        if is_hurried and not self._is_hurried:
            self._is_hurried, self._end_s = True, min(self._end_s, now + HURRIED_S)
        return now >= self._end_s or os.path.exists(self._path) or self._is_orphaned()  # noqa: PTH110 - pathlib is not loaded for it

    def _is_orphaned(self) -> bool:
        if self._launcher_fd is None:
            return True
        poller = select.poll()
        poller.register(self._launcher_fd, select.POLLIN)
        return bool(poller.poll(0))
