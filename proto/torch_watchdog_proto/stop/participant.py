"""The rank's half of the stop protocol: what it has promised, and what a gate or a boundary must do now.

Owns the promises of one rank in one attempt; knows no socket, thread, clock or torch. The control thread calls `handle`, the training thread
`at_gate`, `at_boundary` and `at_hold`, both under one lock of the caller, so that "what have you passed, and promise not to pass the next" is
atomic. A repeated, late or unknown order changes nothing.

Nobody acts on a Commit before it stands in the job's decision register: one write-once word per generation. `Propose` asks the caller to put a
Commit, or (where the time is up) `None` for abandoned, into it, and to call `decided` with what stands there then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch_watchdog_proto.messages import Abandon, Ack, Commit, Leave, Order, Phase, Prepare, RankMessage, WriteCommitted

__all__ = ["Act", "GivenUp", "Participant", "Pass", "Propose", "Released", "Skip", "Wait"]


@dataclass(frozen=True, slots=True)
class Pass:
    """Apply the update, go on."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Do not apply the update of this step; go on."""

    generation: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again when an order has come, or at `until`."""

    until: float


@dataclass(frozen=True, slots=True)
class Act:
    """The boundary of a committed order: save and leave as it says. The update of the step at hand is not applied."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Propose:
    """Put this into the decision register (None: abandoned) unless something stands there; then call `decided` with what does."""

    generation: int
    commit: Commit | None


@dataclass(frozen=True, slots=True)
class Released:
    """Go on with a sanitised copy of the held batch: every rank has promised to veto the step. `leaves`: and the job stops there."""

    leaves: bool = False


@dataclass(frozen=True, slots=True)
class GivenUp:
    """No agreement about the held batch: raise, with the whole diagnosis."""

    reason: str


AtGate: TypeAlias = Pass | Skip | Wait | Act | Propose
AtBoundary: TypeAlias = Act | Wait | Propose | None
AtHold: TypeAlias = Released | Wait | GivenUp | Propose


class Participant:
    """The promises of one rank. `passed` is the highest gate it has passed, -1 before the first."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.passed = -1
        self._skipped = -1
        self._generation = 0  # of the newest order seen; older ones are ignored
        self._prepared: Prepare | None = None
        self._commit: Commit | None = None
        self._deadline = 0.0
        self._limit = 0  # with a Prepare that names no veto: the highest gate that may be passed before the decision
        self._vetoes: dict[int, Commit] = {}  # committed ones: they hold whatever other orders come, until their gate
        # Vetoes that were promised and whose decision could not be read: their updates are left out, because being at such a gate means that the holder went
        # on, which it only does with a decision. (Ranks that no collective couples come there without one: only a decision that was read is obeyed by them.)
        self._unsure: set[int] = set()
        self._given_up: dict[int, str] = {}  # step of a hold -> why
        # Step of a hold that a newer order asks for, while the older one is looked up: its holder need not give up.
        self._renewed: int | None = None
        self._answer: WriteCommitted | Leave | None = None
        self._why = ""  # the daemon took the order back

    @property
    def has_order(self) -> bool:
        return self._commit is not None or bool(self._vetoes)

    # The control thread

    def handle(self, order: Order, *, phase: Phase = "train", now: float) -> tuple[RankMessage | Propose, ...]:
        """Takes one order; returns what to answer, or what to propose before it is handled again."""
        if order.generation < self._generation:
            return ()
        match order:
            case Prepare():
                return self._on_prepare(order, phase, now)
            case Commit():
                return self._on_commit(order)
            case Abandon():
                return self._on_abandon(order)
            case WriteCommitted() | Leave():
                self._on_answer(order)
        return ()

    def _on_prepare(self, order: Prepare, phase: Phase, now: float) -> tuple[RankMessage | Propose, ...]:
        if order.generation > self._generation:
            if self._prepared is not None and self._commit is None:
                self._renewed = order.veto
                return (Propose(self._generation, None),)  # others may act on the older order: first what has become of it
            if self._commit is not None and (self._commit.save or self._commit.leave):
                return ()  # so may they on this one, which only its own end takes back
            self._forget()
            self._renewed = None
            self._generation, self._prepared = order.generation, order
            self._deadline, self._limit = now + order.timeout_s, self.passed + 1
        if self._prepared is None:
            return ()  # given up meanwhile: a late repeat must not win a promise back
        return (Ack(rank=self.rank, generation=order.generation, passed=self.passed, phase=phase),)

    def _on_commit(self, order: Commit) -> tuple[Propose, ...]:
        # Only an order that this rank has promised for: a Commit without its Prepare, or after its Abandon, is a stray.
        if self._prepared is not None and order.generation == self._generation and self._commit is None:
            return (Propose(order.generation, order),)
        return ()

    def decided(self, generation: int, commit: Commit | None, *, is_known: bool = True) -> None:
        """What stands in the decision register (None: abandoned). Not `is_known`: it cannot be reached, and this rank goes on."""
        if generation != self._generation or self._prepared is None or self._commit is not None:
            return
        if commit is None:
            if self._prepared.veto is not None and not is_known:
                self._unsure.add(self._prepared.veto)
            self._give_up(self._why or "the order was not decided in time")
            return
        if commit.veto is not None:
            self._vetoes[commit.veto] = commit
        if commit.veto != self._prepared.veto:
            self._give_up("the register holds the decision on another order under this number")
            return
        self._commit = commit

    def _on_abandon(self, order: Abandon) -> tuple[Propose, ...]:
        if order.generation != self._generation or self._prepared is None:
            return ()
        if self._prepared.veto is not None and self._commit is None:
            self._why = order.reason
            # A Commit of it may have been lost on its way here only: others may have gone on with it.
            return (Propose(order.generation, None),)
        self._give_up(order.reason)
        return ()

    def _give_up(self, reason: str) -> None:
        veto = None if self._prepared is None else self._prepared.veto
        if veto is not None and veto != self._renewed:
            self._given_up[veto] = reason
        self._forget()

    def _on_answer(self, order: WriteCommitted | Leave) -> None:
        if order.generation == self._generation and self._commit is not None:
            self._answer = order

    def _forget(self) -> None:
        self._prepared = self._commit = self._answer = None
        self._why = ""

    # The training thread

    def at_gate(self, step: int, *, now: float) -> AtGate:
        """What the gate of `step` must do. Pass moves `passed`: from then on the update counts as applied."""
        if step == self._skipped:
            return Skip(self._generation)  # a second optimizer of the same window
        decision = self._judge_gate(step, now)
        if isinstance(decision, Pass):
            self.passed = max(self.passed, step)
        elif isinstance(decision, Skip):
            self._skipped = step
            self._vetoes.pop(step, None)
            self._unsure.discard(step)
            if self._prepared is not None and self._prepared.veto == step:
                self._forget()
        return decision

    def _judge_gate(self, step: int, now: float) -> AtGate:
        if step in self._vetoes:
            commit = self._vetoes[step]
            return Act(commit) if commit.save or commit.leave else Skip(commit.generation)
        if step in self._unsure:
            return Skip(self._generation)
        if self._prepared is None or step <= self.passed:
            return Pass()
        if self._prepared.veto is None:
            return self._judge_limit(step, now)
        if step != self._prepared.veto:
            return Pass()
        return self._until_decided(now)

    def _judge_limit(self, step: int, now: float) -> AtGate:
        if self._commit is not None:
            stop_after = self._commit.stop_after
            return Act(self._commit) if stop_after is not None and step > stop_after else Pass()
        return Pass() if step <= self._limit else self._until_decided(now)

    def _until_decided(self, now: float) -> Wait | Propose:
        """The daemon may have died between its words: when the time is up, whatever stands in the register is obeyed, and a healthy job goes on."""
        return Wait(self._deadline) if now < self._deadline else Propose(self._generation, None)

    def at_boundary(self, *, now: float) -> AtBoundary:
        """Before a batch is fetched: the order to act on, where its last step has been passed.

        A rank waits here, not at the next gate, for a decision that its promise needs: the others may stop at this boundary.
        """
        if self._prepared is None or self._prepared.veto is not None:
            return None
        if self._commit is None:
            return self._until_decided(now) if self.passed >= self._limit else None
        stop_after = self._commit.stop_after
        return Act(self._commit) if stop_after is not None and self.passed >= stop_after else None

    def at_hold(self, step: int, *, deadline: float, now: float) -> AtHold:
        """What a rank must do that holds a bad batch for `step`."""
        if step in self._vetoes:
            return Released(leaves=self._vetoes[step].leave)
        if step in self._given_up:
            return GivenUp(self._given_up[step] or "the order was given up")
        if now < deadline:
            return Wait(deadline)
        if self._prepared is not None and self._prepared.veto == step:
            return Propose(self._generation, None)
        return GivenUp("no agreement of all ranks came in time")

    def answer(self, generation: int) -> WriteCommitted | Leave | None:
        """What the coordinator said last to a rank that is saving for this order; an order that is no more ends as one without a checkpoint."""
        if generation != self._generation or self._commit is None:
            return Leave(generation=generation)
        return self._answer

    def done(self, generation: int) -> None:
        """The rank has acted on the order and goes on."""
        self._vetoes = {step: commit for step, commit in self._vetoes.items() if commit.generation != generation}
        if generation == self._generation:
            self._forget()
