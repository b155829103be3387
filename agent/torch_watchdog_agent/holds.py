"""Holding a bad batch: the rank waits until every rank has promised to leave out the step that uses it, and goes on with a legal stand-in.

Owns what becomes of a batch of which something was found, and which steps are left out: in a loop that is ahead of its steps a stand-in that was handed
over now is used later. Knows the protocol through the gate, and nothing of what a violation is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_watchdog_agent.errors import BadBatchError, of_a_signal
from torch_watchdog_agent.turned_off import why_unknown
from torch_watchdog_proto.messages import Hold, Refused, Violation
from torch_watchdog_proto.sentences import and_then
from torch_watchdog_proto.stop.participant import GivenUp

if TYPE_CHECKING:
    from torch_watchdog_agent.contract.guard import Checked
    from torch_watchdog_agent.rank import Rank

__all__ = ["Holds"]

_MAX_OBSERVED = 64  # tensors of which a finding is said


class Holds:
    """Runs on the training thread. Every way out other than a return raises BadBatchError with the whole diagnosis, or SystemExit where another rank has
    failed meanwhile: this one has saved then, or has been let go.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._observed: set[tuple[str, str]] = set()  # kind and tensor of what was said
        self.stood_in_at: int | None = (
            None  # the newest step whose batch is, or will be, a stand-in: what is odd about that is not the user's
        )
        self.in_hand: list[tuple[Violation, int]] = []  # stand-ins that the loop has fetched ahead, and the last window that may use each

    def met(self, batch: object, checked: Checked) -> object:
        """The loop is about to use a batch of which something was found. Returns what it gets instead, or the same."""
        for warning in checked.warnings:
            self._rank.notice(warning)
        if checked.violation is None:
            return batch
        violation = self._told(checked.violation)
        return batch if self._is_only_observed(violation) else self._hold(batch, checked, violation)

    def refused(self, violation: Violation) -> bool:
        """The guard refuses an op inside the forward: the rank will raise. False where the job is only observed: then nothing is changed."""
        return self._refuse(self._told(violation), why="it was found inside its step, which cannot be left out any more")

    def _told(self, violation: Violation) -> Violation:
        """Of an evaluation's batch it is said that it is one: its sample 33 is not the training's."""
        if self._rank.gate.phase != "eval":
            return violation
        return replace(violation, cause=f"{violation.cause} It is a batch of an evaluation, of {self._rank.dataset}.")

    def _hold(self, batch: object, checked: Checked, violation: Violation) -> object:
        """Returns the stand-in, once every rank has promised to veto the step at hand; or, where only a later step can use it, at once."""
        violation = self._kept(batch, violation)
        clean = self._rank.guard.repaired(batch, checked) if self._is_gated() else None
        if clean is None:
            why = self._why_not()
            self._refuse(violation, why=why)
            raise _unanswered(violation, why)
        self._promise(violation)
        return clean

    def hold_late(self, violation: Violation) -> None:
        """The same for a batch that was handed over unread, its stand-in with it. Of the step at hand no backward has been launched since."""
        violation = self._told(violation)
        if self._is_gated() and self._rank.config.policy != "observe":
            self._promise(violation)
        elif self._refuse(violation, why=(why := self._why_not())):
            raise _unanswered(violation, why)

    def _kept(self, batch: object, violation: Violation) -> Violation:
        """With the batch on disk, for the report, for `watchdog replay` and for whoever mends the sample."""
        rank = self._rank
        if not rank.config.bundles:
            return violation
        from torch_watchdog_agent.rescue import bundle

        attempt, number = rank.identity.attempt, rank.identity.rank
        folder, name = Path(rank.config.run_dir) / bundle.FOLDER, bundle.held_name(attempt=attempt, rank=number, step=rank.loop.step)
        try:
            if not bundle.write(folder / name, batch, max_bytes=bundle.MAX_HELD_BYTES, from_device=True):
                return violation
            bundle.keep_newest(folder, attempt=attempt, rank=number)
        except Exception as error:  # a full disk, a dtype that the format does not know: the hold goes on
            if of_a_signal(error):
                raise
            rank.say(f"the bad batch could not be kept ({type(error).__name__}: {error})")
            return violation
        return replace(violation, bundle=f"{bundle.FOLDER}/{name}")

    def _promise(self, violation: Violation) -> None:
        """Only a later step can use the batch where each takes one and the loop is ahead by one at least. Collectives of the step at hand may have run by
        then, so that the others may be past its gate: it is not vetoed.
        """
        rank = self._rank
        ahead, step = rank.guard.ahead, rank.loop.step
        windows = rank.loop.windows_ahead(ahead)
        later = bool(ahead and windows and rank.loop.batches_a_window(ahead) == 1)
        self.stood_in_at = step + windows
        if not later:
            self._agree(violation, step, rank.loop.micro_step)
        if windows:
            self.in_hand.append((violation, step + windows))
        self.leave_out(violation, step + later)

    def window_closed(self, number: int) -> None:
        """The next step may use a stand-in that is in hand: veto it, too. Nothing of that step has been launched yet."""
        self.in_hand = [(violation, last) for violation, last in self.in_hand if last > number]
        if self.in_hand:
            self._agree(self.in_hand[0][0], number + 1, 0)

    def _agree(self, violation: Violation, step: int, micro_step: int) -> None:
        """Waits until every rank has promised to veto the step."""
        from torch_watchdog_agent.hooks.distributed import hold_timeout_s

        rank = self._rank
        timeout_s = min(rank.config.hold_timeout_s, hold_timeout_s())
        rank.history.note(f"step {step}: held: {violation.summary}", level=2)
        hold = Hold(rank=rank.identity.rank, step=step, micro_step=micro_step, violation=violation, timeout_s=timeout_s)
        if not rank.tell(hold):
            raise _unanswered(violation, "the node process cannot be reached")
        decision = rank.gate.hold(step, timeout_s)
        if isinstance(decision, GivenUp):
            self._refuse(violation, why=decision.reason)
            rank.rescuer.at_nothing()  # its state is clean: nothing of the batch has been used
            raise _unanswered(violation, decision.reason)
        if rank.config.policy == "skip" and not decision.leaves:  # it does where too many steps were left out already
            rank.say(f"step {step}: {violation.summary}: left out on every rank")

    def _refuse(self, violation: Violation, *, why: str) -> bool:
        """`why`: what keeps its step from being left out."""
        rank = self._rank
        if self._is_only_observed(violation):
            return False
        if rank.config.policy == "skip":
            violation = replace(violation, cause=and_then(violation.cause, f"it could not be skipped: {why}"))
        rank.history.note(f"step {rank.loop.step}: refused: {violation.summary}", level=2)
        rank.tell(Refused(rank=rank.identity.rank, step=rank.loop.step, micro_step=rank.loop.micro_step, violation=violation))
        rank.write_contract()
        if rank.scan is not None:
            rank.scan.refused(violation)
        self.leave_out(violation, rank.loop.step)
        return True

    def _is_only_observed(self, violation: Violation) -> bool:
        """Then nothing is changed. Said of each tensor once: whoever reads the output of a run of days must not learn of it at its end only."""
        rank = self._rank
        if rank.config.policy != "observe":
            return False
        if rank.config.replay is not None:
            from torch_watchdog_agent.rescue.bundle import as_told_before  # here, because it needs torch

            violation = as_told_before(Path(rank.config.replay), violation)
        rank.notice(violation)
        named = violation.kind, violation.batch.key
        if named not in self._observed and len(self._observed) < _MAX_OBSERVED:
            self._observed.add(named)
            rank.say(
                f"step {rank.loop.step}: {violation.summary}: policy observe, so the training goes on unchanged; the next ones are recorded, not said"
            )
        return True

    def _is_gated(self) -> bool:
        """Whether a veto would be heeded: not in the first window, nor in a loop that updates by hand, nor where a hook that counts has turned itself off."""
        return self._rank.gate.passed >= 0 and not why_unknown()

    def _why_not(self) -> str:
        if self._is_gated():
            return "no legal value can stand in for it"
        return why_unknown() or "no update of this loop has come to a gate yet that could leave it out"

    def leave_out_what_is_in_flight(self) -> None:
        """The job stops with bad batches on their way from a prefetching thread: nobody will meet them here, and the next run is not to stop for them."""
        from torch_watchdog_agent.hooks.elsewhere import bad_in_flight

        if self._rank.config.policy != "observe":
            for violation, dataset in bad_in_flight():
                self.leave_out(violation, self._rank.loop.step + 1, dataset=dataset)

    def leave_out(self, violation: Violation, step: int, *, dataset: str | None = None) -> None:
        """The sample must not come back: not in the next epoch, nor in the run that resumes."""
        rank = self._rank
        try:
            rank.quarantine.add(violation, dataset=dataset or rank.dataset, rank=rank.identity.rank, step=step)
        except OSError as error:
            rank.say(f"a bad sample could not be quarantined ({error}): it may be met again")


def _unanswered(violation: Violation, reason: str) -> BadBatchError:
    """The end of a hold that found no agreement: the whole diagnosis, and why the job could not stop cleanly."""
    error = BadBatchError(violation)
    error.add_note(f"the job could not stop at one clean step for it: {reason}")
    return error
