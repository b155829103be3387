"""Where in its steps a loop moves what its optimizers go by: schedulers' steps, and rates that it sets by hand.

Owns what the first windows have shown. Behind the update and before the next fetch is usual. A loop that fetches first does it inside the next window,
whose start then lacks it: unless it did so in the first window of all, too, where there was no update that it could belong to. Reads, and never writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_watchdog_agent.checkpoint.subjects import Subjects

__all__ = ["Schedule"]

_LEARNING_WINDOWS = 4


class Schedule:
    """`looks`: it is to be told of what happens, in the first windows or where it is late. `may_be_late`: it is moved only behind the fetch of the next batch,
    as far as is known. `by_hand`: between an update and the next window, by no scheduler."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects, self._windows = subjects, 0
        self._counted = self._counted_behind = 0
        self._is_own = self._looked = False
        self._has_moved: Callable[[], bool] | None = None  # since the newest update
        self.is_late = self.may_be_late = self.by_hand = False
        self.looks = True

    def opened(self) -> None:
        """A window begins: its first batch is about to be handed over."""
        self._windows, self._looked = self._windows + 1, False
        self.looks = self.is_late or self._windows <= _LEARNING_WINDOWS
        self.may_be_late = self.is_late or self._windows == 1
        if self._has_moved is not None:
            self.by_hand |= self._has_moved() and self._subjects.scheduled() == self._counted_behind
        self._has_moved, self._counted = None, self._subjects.scheduled()

    def begun(self, has_moved: Callable[[], bool]) -> bool:
        """A backward begins. True where the window's start is to be taken from here: by now all is done that belongs to the update before.

        `has_moved`: since the window opened.
        """
        if self._looked:
            return False
        self._looked = True
        if self._windows == 1:
            self._is_own = self._subjects.scheduled() != self._counted
            return False
        self.is_late |= not self._is_own and has_moved()
        self.may_be_late = self.is_late
        return self.is_late

    def at_gate(self, optimizer: Any) -> None:
        """In the first window only its gate shows the optimizer, and whether the loop has set a rate for this very step."""
        if self._windows == 1 and not self._subjects.schedulers():
            usual = getattr(optimizer, "defaults", {}).get("lr")
            self._is_own |= any(group.get("lr") != usual for group in getattr(optimizer, "param_groups", ()))

    def updated(self, has_moved: Callable[[], bool]) -> None:
        """An update has been applied. `has_moved`: since now."""
        self._has_moved, self._counted_behind = has_moved, self._subjects.scheduled()
