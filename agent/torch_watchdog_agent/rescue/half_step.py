"""Why what a rank holds is not called whole: a half step may have touched it. Asked by the rescue, which has stopped the training thread's updates.

No function here waits, takes a lock or touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch_watchdog_agent.turned_off import why_unknown

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank
    from torch_watchdog_agent.rescue.ahead import Ahead
    from torch_watchdog_agent.rescue.whole import WholeWindow

__all__ = ["Phase", "Place"]

# Before the first update; between two windows; from a window's first batch to its gate; in the update; from there to the next fetch.
Phase: TypeAlias = Literal["start", "boundary", "window", "update", "after"]


@dataclass(frozen=True)
class Place:
    """Where the training thread was when it was asked. `standing`: it waits for the rescue's end, at the next place that it came to."""

    rank: Rank
    steps: WholeWindow
    phase: Phase
    standing: bool

    def why_not(self, state: Any) -> str:
        """Nothing where the state is that of the newest update's end. For one that lies on no device."""
        rank = self.rank
        if why := self._why_never():
            return why
        if self.phase == "update":
            return "its update was under way, and a half step is never saved"
        if rank.saver.busy and not self.standing:
            return "it was still writing a checkpoint of all ranks"
        if not state.optimizers and rank.window.changed_in_step():
            return "its script had let go of its model and optimizer before it was asked for them"
        if missing := self._missing(state):
            return f"{missing}, and a half step is never saved"
        if not rank.loop.updates_applied:
            return "no update had been applied yet"
        if not state.optimizers and rank.loop.is_as_resumed:
            return "no update had been applied since the checkpoint that it resumed"
        return ""

    def why_not_on_device(self, state: Any, ahead: Ahead) -> str:
        """The same for a state on a device, which has come as far as `ahead` says."""
        if why := self._why_never():
            return why
        if self.phase == "update" and not self.standing:
            return "its update was being launched, and a half step is never saved"
        if self.steps.most_steps > 1:
            return "its loop has several optimizers, whose updates on a device are not told apart"
        if missing := self._why_touched(ahead.windows_back) if ahead.windows_back else self._missing(state):
            return f"{missing}, and a half step is never saved"
        return ahead.why_not(state, self.rank.window)

    def _why_never(self) -> str:
        return "a scan trains nothing that is to be kept" if self.rank.config.scan else why_unknown()

    def _missing(self, state: Any) -> str:
        """What of its newest update may be still to come, or was changed since."""
        window = self.rank.window
        if self.phase == "after":
            return self.steps.missing(state.optimizers) or window.why_unusual()
        return self._why_touched() if self.phase == "window" else window.why_moved_on()

    def _why_touched(self, windows_back: int = 1) -> str:
        """By the script itself. Once the update of the window at hand was launched, what has been written is no sign any more."""
        if self.phase == "window" and windows_back == 1 and (changed := self.rank.window.changed_in_step()):
            return f"its script itself has changed {changed} in the step at hand"
        return self.rank.window.why_odd(windows_back)
