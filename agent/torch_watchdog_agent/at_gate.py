"""A decision at a gate: an update is left out, or a save sees the window as it began. And how a window ends there.

Owns what a vetoed window has changed besides the parameters, until that is put back. On the training thread. It must not know who decided, or why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.hooks.tracks import used
from torch_watchdog_proto.messages import Commit, Vetoed
from torch_watchdog_proto.stop.participant import Skip

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["AtGate"]


class AtGate:
    """One rank's. `undo`: what the vetoed window has moved is put back before the next fetch; `is_put_back`: that has succeeded."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.undo, self.is_put_back = False, True
        self._drawn: RngState | None = None  # behind the newest update of a loop that feeds itself: its next step begins with that

    def opened(self) -> None:
        """No hand-over was heard: what an older window began with must not come back."""
        rank, self.undo = self._rank, False
        again = rank.loop.batches_a_window(0) if rank.loop.drains else 0  # what it is about to use was handed over before
        rank.window.opened(updates=rank.loop.updates_applied, place=rank.place(again=again))
        if rank.loop.is_new_at_gate:
            rank.rescuer.at_hand_over(opens=True)

    def begins_itself(self) -> None:
        """A loop that feeds itself is in its next step."""
        if self.has_begun_itself():
            self._rank.rescuer.at_hand_over(opens=True)

    def has_begun_itself(self) -> bool:
        """True where its window is new with that: what its batch has drawn and its forward changed by then is of that window. From any thread."""
        rank = self._rank
        is_new = rank.loop.begins_itself()
        if is_new:
            drawn, self._drawn, self.undo = self._drawn, None, False
            rank.window.opened(updates=rank.loop.updates_applied, place=rank.place(), rng=drawn)
        return is_new

    def before_fetch(self) -> None:
        """Of the vetoed window only the loader has moved on."""
        self.undo = False
        self._put_back()

    def skip(self, decision: Skip, number: int) -> None:
        """The update of this window is not applied."""
        rank = self._rank
        self._put_back()  # for a save that comes before the next fetch
        self._what_stays()
        self.undo = True
        rank.tell(Vetoed(rank=rank.identity.rank, generation=decision.generation, step=number))
        self.go_on(number, applied=False, vetoed=True)

    def act(self, commit: Commit, number: int) -> None:
        """A veto ends its window here. Any other order comes to a gate only where no loader gave a boundary: the save sees the window's start."""
        rank = self._rank
        if commit.veto == number:
            self._close_window(number, applied=False, vetoed=True)
            self._put_back(settled=commit.leave)
            self.is_put_back &= not self._what_stays()
            rank.saver.act(commit, step=number)
            return
        self.is_put_back &= not self._what_stays()
        with rank.window.rewound():
            rank.saver.act(commit, step=number, position=rank.window.position_at(1))

    def at_boundary(self, commit: Commit) -> None:
        """Before a fetch. What a loop does behind its data (an evaluation, an epoch's schedule) it does once more when it goes on: the save sees their end."""
        rank, step = self._rank, self._rank.gate.passed + 1
        if not rank.window.is_behind_the_end(rank.loop.updates_applied, rank.place()):
            rank.saver.act(commit, step=step)
            return
        with rank.window.rewound(0, buffers=False):
            rank.saver.act(commit, step=step, position=rank.window.position_at(0))

    def go_on(self, number: int, *, applied: bool, vetoed: bool = False) -> bool:
        """The window is over. True the first time that this is said of it."""
        first = self._close_window(number, applied=applied, vetoed=vetoed)
        if self._rank.preemption is not None:
            self._rank.loop_end.stepped()
        if first and self._rank.holds.in_hand:
            self._rank.holds.window_closed(number)
        if self._rank.loop.feeds_itself and (not applied or self._rank.rescuer.steps.may_be_all):
            self._drawn = RngState.capture()
            self._rank.window.keep_buffers(updates=self._rank.loop.updates_applied)
        return first

    def _close_window(self, number: int, *, applied: bool, vetoed: bool) -> bool:
        rank = self._rank
        first = rank.loop.gate_done(applied=applied, vetoed=vetoed)
        if first:
            used()
            rank.history.step_done(number, vetoed=vetoed)
            rank.resume.missed()
            if rank.guard.has_learned():
                rank.write_contract()
        return first

    def _put_back(self, *, settled: bool = False) -> None:
        """What a vetoed window has changed. Whatever is in the way of that must not let its update through, and what is saved then is not called good."""
        drawn = RngState.capture() if self._rank.loop.feeds_itself else None  # with these it would draw the same batch again
        try:
            self._rank.window.restore(settled=settled)
            if drawn is not None:
                drawn.restore()
            self.is_put_back = True
        except Exception as error:  # noqa: BLE001  a buffer of a kind that we do not know, say
            self.is_put_back = False
            self._rank.say(
                f"what the vetoed step has changed besides the parameters could not be put back ({type(error).__name__}: {error})"
            )

    def _what_stays(self) -> str:
        """What the loop itself has written to parameters by now, which cannot be taken back."""
        changed = self._rank.window.hands.at_gate or self._rank.window.changed_in_step()
        if changed:
            self._rank.say(
                f"the loop changes {changed} before its optimizer does: that much of this step stays, and it is not saved as good"
            )
        return changed
