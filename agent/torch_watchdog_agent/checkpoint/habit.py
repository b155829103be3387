"""How often a loop writes to its parameters from one step's start to the next: by its update, and by itself before and after it.

Owns what has been seen between the starts of two steps, and so whether the parameters of a moment between two steps may be taken for those of the
others: during an evaluation on averaged weights they may not, nor before a teacher's update that belongs to every step. Where the number differs from
step to step (layers that are left out at random) nothing is odd. Pure, and one call a step.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Habit", "Written"]

Written: TypeAlias = tuple[int, int]  # how many parameters there are, and how often all of them together were written to

_MOST = 8  # so many different numbers are no habit any more


class Habit:
    """Of the parameters of one set of models and optimizers."""

    def __init__(self) -> None:
        self._opened: Written | None = None
        self._seen: dict[int, int] = {}  # how often so many writes were seen from one step's start to the next
        self._is_one = False

    def opened(self, written: Written) -> bool:
        """A step begins. True where what has happened since the last one began was not seen before."""
        before, self._opened = self._opened, written
        if before is None or before[0] != written[0]:  # parameters were added: what their counts are is another habit's
            self._seen, self._is_one = {}, False
            return False
        since = written[1] - before[1]
        times = self._seen.get(since, 0)
        if len(self._seen) <= _MOST:
            self._seen[since] = times + 1
        is_odd = self._is_one and not times and since != 0
        self._is_one = (self._is_one or times > 0) and len(self._seen) <= _MOST
        return is_odd

    def is_odd(self, written: Written) -> bool:
        """Whether no step has ended as this one would now, which is so of the first one. An update that was left out writes nothing."""
        since = 0 if self._opened is None else written[1] - self._opened[1]
        return len(self._seen) <= _MOST and since != 0 and since not in self._seen

    def is_as_opened(self, written: Written) -> bool:
        """Whether nothing was written to since the step began."""
        return self._opened in (None, written)
