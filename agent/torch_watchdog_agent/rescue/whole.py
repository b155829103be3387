"""Whether all that an update consists of has been done: between the first optimizer's step and the next fetch nobody says so.

Owns the comparison of the window at hand with those before it. In doubt it is not whole. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["WholeWindow"]


class WholeWindow:
    """`schedule` counts what all schedulers have stepped so far."""

    def __init__(self, schedule: Callable[[], int]) -> None:
        self._schedule = schedule
        self._stepped: set[int] = set()
        self._scheduled_before = self._most_scheduled = 0
        self.num_steps = self.most_steps = 0

    def over(self) -> None:
        """What comes now belongs to no update yet: the next window's batch is about to be used, or the data are at their end. A window that updated
        nothing counts for nothing."""
        if not self.num_steps:
            self._scheduled_before = self._schedule()
            return
        scheduled = self._schedule()
        self.most_steps = max(self.most_steps, self.num_steps)
        self._most_scheduled = max(self._most_scheduled, scheduled - self._scheduled_before)
        self._scheduled_before, self.num_steps = scheduled, 0
        self._stepped.clear()

    def stepped(self, optimizer: Any) -> None:
        self.num_steps += 1
        self._stepped.add(id(optimizer))

    @property
    def may_be_all(self) -> bool:
        return self.num_steps >= self.most_steps

    def has_all_steps(self, optimizers: Sequence[Any]) -> bool:
        """Whether as many optimizers have stepped in this window as in the others, and each has."""
        return self.num_steps >= self.most_steps > 0 and all(id(one) in self._stepped for one in optimizers)

    def missing(self, optimizers: Sequence[Any]) -> str:
        """What this window may lack; empty where it is whole."""
        if not self.most_steps:
            return "its first update was under way, of which nobody knows yet what belongs to it"
        if self.num_steps < self.most_steps or (len(optimizers) > 1 and any(id(one) not in self._stepped for one in optimizers)):
            return "not all optimizers of its step had stepped, as far as can be told"
        if self.num_steps > self.most_steps:
            return "it has updated more often than usual since its last batch, and whether another update had begun cannot be told"
        if self._schedule() - self._scheduled_before < self._most_scheduled:
            return "its scheduler had not stepped yet"
        return ""
