"""The keepers of this node that hold their launcher back, the files that let them go, and the ranks that were freed and wait for a word.

Owns those files. Lets all of them go where the daemon, who decides, has been away for a moment: nobody must wait for nobody.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torch_watchdog_agent.holdback import begun_file, released_file
from torch_watchdog_proto.envelopes import TellRank
from torch_watchdog_proto.messages import Leave

__all__ = ["Keepers"]

LOST_PATIENCE_S = 3.0


def newest_attempt(runtime_dir: Path) -> int:
    """The newest start of the launcher's of which a process was seen on this node, whether or not it was heard of as a rank; 0 where none was."""
    numbers = (path.name.rpartition("-")[2] for path in runtime_dir.glob(begun_file(runtime_dir, 0).name.replace("0", "*")))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


class Keepers:
    """Those that wait to be released, and the ranks that wait for what the rescue asks of them."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._held: set[tuple[int, int]] = set()  # (attempt, rank)
        self._freed: dict[tuple[int, int], int] = {}  # the same -> number of the rescue

    def ended(self, attempt: int, rank: int) -> None:
        """A rank has ended; its keeper may be waiting."""
        self._held.add((attempt, rank))

    def release(self, attempt: int, rank: int) -> None:
        """The keeper of this rank may tell the launcher, now or as soon as the rank ends."""
        self._held.discard((attempt, rank))
        with suppress(OSError):
            released_file(self._runtime_dir, attempt=attempt, rank=rank).touch(mode=0o600)

    def freed(self, attempt: int, rank: int, generation: int) -> None:
        """A rank was told to come free: it waits for its next word, for as long as a save may take."""
        self._freed[attempt, rank] = generation

    def without_a_daemon(self, lost_s: float) -> tuple[TellRank, ...]:
        """`lost_s`: for how long nobody has been there who could release anyone. What to tell the ranks."""
        if lost_s < LOST_PATIENCE_S:
            return ()
        for attempt, rank in tuple(self._held):
            self.release(attempt, rank)
        freed, self._freed = self._freed, {}
        return tuple(TellRank(attempt=attempt, rank=rank, order=Leave(generation=number)) for (attempt, rank), number in freed.items())
