"""Whether what a loop does in an evaluation inside a pass over its data, or behind it, belongs to what its next step begins with.

A rate that follows the loss which was found, random numbers that were drawn: a run that goes on from the middle of such an evaluation does not do it
again, and lacks them. Owns what is known of that: by the schedulers' kind, and by what the evaluations so far have moved. Reads, and never writes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects

__all__ = ["Evaluations"]


class Evaluations:
    """`begun`: one was begun in the window at hand. Of one behind the data nothing is asked: a run that goes on from there does it again."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._has_moved: Callable[[], bool] | None = None
        self._rng: RngState | None = None
        self.begun = self._is_known = self._moves_rates = self._draws = False

    def asks(self, has_moved: Callable[[], bool]) -> None:
        """The first batch of an evaluation is asked for. `has_moved`: whether rates, or what sets them, have since now."""
        self.begun, self._has_moved, self._rng = True, has_moved, RngState.capture()

    def over(self) -> None:
        """The training's next window begins, or its data have ended."""
        if self._has_moved is None or self._rng is None:
            return
        self.begun, self._is_known = False, True
        self._moves_rates |= self._has_moved()
        self._draws |= not self._rng.is_same(RngState.capture())
        self._has_moved = self._rng = None

    def may_be_left(self) -> bool:
        """Whether nothing is lost where the job stops in the one at hand, if any: known once one was seen to its end."""
        return not self.begun or (self._is_known and not self._draws and not self._set_rates())

    def why(self) -> str:
        """Why a state in, or just behind, an evaluation need not be what the next step begins with, or nothing."""
        return (
            "its loop sets its rates behind an evaluation, and whether it had done so cannot be told"
            if self.begun and self._set_rates()
            else ""
        )

    def _set_rates(self) -> bool:
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        return self._moves_rates or any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._subjects.schedulers())
