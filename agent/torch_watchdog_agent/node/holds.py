"""The keepers of this node that hold their launcher back, and the files that let them go.

Owns those files. Lets every keeper go where the daemon, who decides, has been away for a moment: a launcher must never wait for nobody.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torch_watchdog_agent.holdback import released_file

__all__ = ["LOST_PATIENCE_S", "Holds"]

LOST_PATIENCE_S = 3.0


class Holds:
    """Which ranks of this node have ended badly, and are not released yet."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._held: set[tuple[int, int]] = set()  # (attempt, rank)

    def ended(self, attempt: int, rank: int) -> None:
        """A rank has ended; its keeper may be waiting."""
        self._held.add((attempt, rank))

    def release(self, attempt: int, rank: int) -> None:
        """The keeper of this rank may tell the launcher, now or as soon as the rank ends."""
        self._held.discard((attempt, rank))
        with suppress(OSError):
            released_file(self._runtime_dir, attempt=attempt, rank=rank).touch(mode=0o600)

    def without_a_daemon(self, lost_s: float) -> None:
        """`lost_s`: for how long nobody has been there who could release anyone."""
        if lost_s >= LOST_PATIENCE_S:
            for attempt, rank in tuple(self._held):
                self.release(attempt, rank)
