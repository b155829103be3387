"""How often a loop writes to its parameters from one step's start to the next: by its update, and by itself before and after it.

Owns what has been seen between the starts of two steps, and so whether the parameters of a moment between two steps may be taken for those of the
others: during an evaluation on averaged weights they may not, nor before a teacher's update that belongs to every step. Where the number differs from
step to step (layers that are left out at random) nothing is odd. Pure, and one call a step.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Habit", "Written"]

_MOST = 8  # so many different numbers are no habit any more


# How many parameters the optimizers have, how many their models have besides, and how often all of them together were written to.
Written: TypeAlias = tuple[int, int, int]


class Habit:
    """Of the parameters of one set of models and optimizers."""

    def __init__(self) -> None:
        self._opened: Written | None = None
        self._seen: dict[int, int] = {}  # how often so many writes were seen from one step's start to the next
        self._is_one = False

    def opened(self, written: Written) -> bool:
        """A step begins. True where what has happened since the last one began was not seen before."""
        before, self._opened = self._opened, written
        if before is None or before[:2] != written[:2]:  # parameters were added: what their counts are is another habit's
            self._seen, self._is_one = {}, False
            return False
        since = written[2] - before[2]
        times = self._seen.get(since, 0)
        if len(self._seen) <= _MOST:
            self._seen[since] = times + 1
        is_odd = self._is_one and not times and since != 0
        self._is_one = (self._is_one or times > 0) and len(self._seen) <= _MOST
        return is_odd

    def is_odd(self, written: Written) -> bool:
        """Whether no step has ended as this one would now, which is so of the first one. An update that was left out writes nothing."""
        since = 0 if self._opened is None else written[2] - self._opened[2]
        return len(self._seen) <= _MOST and since != 0 and since not in self._seen

    def is_certain(self, written: Written) -> bool:
        """Whether what steps write differs by nothing but evaluations on other weights, which write to each parameter twice. Else a moment that has as many
        writes as some step is not one that has all of its own: a target network may be copied in each fifth. An update that was left out lacks nothing."""
        sums = [since for since in self._seen if since]
        if self._opened is None or len(sums) < 2 or written == self._opened:
            return True
        trained, besides, _ = self._opened
        return any(all((since - min(sums)) % (2 * num) == 0 for since in sums) for num in (trained, trained + besides) if num)

    def is_as_opened(self, written: Written) -> bool:
        """Whether nothing was written to since the step began."""
        return self._opened in (None, written)
