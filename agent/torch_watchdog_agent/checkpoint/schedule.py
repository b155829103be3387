"""Whether a loop fetches its next batch behind its update and does what belongs to that update only then: a scheduler's step, a rate set by hand.

Owns what the source tells of it, line against line in one function, and the first window, in which there was no update that anything could belong to. A
window opens with its fetch: the start of such a loop's window lacks what comes then, and is taken anew as its backward begins. Reads, and never writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from torch_watchdog_agent.checkpoint.subjects import Subjects

__all__ = ["Schedule"]

_LEARNING_WINDOWS = 4


class Schedule:
    """`looks`: it is to be told of what happens, in the first windows or where it may be late. `learns`: of updates, too, in the first ones. `may_be_late`: a
    fetch may come before all of its update is done. `is_late`: and what is moved then is not of the step that follows. `by_hand`: a rate is set between an
    update and the next window, by no scheduler."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects, self._windows = subjects, 0
        self._gates: dict[CodeType, int] = {}  # the functions that an update was called through, and the line in each
        self._counted = self._counted_behind = 0
        self._is_behind = self._was_behind = self._is_own = self._looked = False
        self._has_moved: Callable[[], bool] | None = None  # since the newest update
        self.may_be_late = self.is_late = self.by_hand = False
        self.looks = self.learns = True

    def fetching(self) -> None:
        """The loop asks for a batch to train on."""
        here = next((frame for frame in _users_frames() if frame.f_code in self._gates), None)
        if here is not None:
            self._is_behind = here.f_lineno > self._gates[here.f_code]
            self._judge()

    def opened(self) -> None:
        """A window begins: its first batch is about to be handed over."""
        self._windows, self._looked = self._windows + 1, False
        if self._has_moved is not None:
            self.by_hand |= self._has_moved() and self._subjects.scheduled() == self._counted_behind
        self._has_moved, self._counted = None, self._subjects.scheduled()
        self._judge()

    def _judge(self) -> None:
        self.is_late = self._is_behind and not self._is_own
        self.may_be_late = self._is_behind or self._windows == 1
        self.learns = self._windows <= _LEARNING_WINDOWS
        self._was_behind |= self._is_behind  # an epoch's first fetch stands elsewhere
        self.looks = self._was_behind or self.learns

    def begun(self) -> bool:
        """A backward begins, or the gate is there. True, once a window, where its start is to be taken from here: by now all is done that belongs to the
        update before."""
        if self._looked:
            return False
        self._looked = True
        if self._windows == 1:
            self._is_own = self._subjects.scheduled() != self._counted
        return self.is_late and self._windows > 1

    def at_gate(self) -> None:
        """The update is about to be applied."""
        if self.learns:
            self._gates = {frame.f_code: frame.f_lineno for frame in _users_frames()}

    def updated(self, has_moved: Callable[[], bool]) -> None:
        """An update has been applied. `has_moved`: since now."""
        self._has_moved, self._counted_behind = has_moved, self._subjects.scheduled()


def _users_frames() -> Iterator[FrameType]:
    """Innermost first."""
    from torch_watchdog_agent.contract.frames import is_users

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back
