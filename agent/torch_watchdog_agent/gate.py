"""Where the training thread meets the stop protocol: it asks this rank's half of it, and waits only while an order asks for it.

Owns the lock that makes "what have you passed, and promise not to pass the next" atomic between training and control thread. Knows the protocol only
through `Participant`, and neither torch nor the socket's bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any, TypeAlias

from torch_watchdog_proto.messages import Commit, Leave, Order, Phase, RankMessage, WriteCommitted
from torch_watchdog_proto.stop.participant import Act, GivenUp, Participant, Pass, Propose, Released, Skip, Wait

__all__ = ["Gate"]

Decide: TypeAlias = Callable[[int, Commit | None], tuple[Commit | None, bool]]  # what stands in the register, and whether that is known


class Gate:
    """One rank's gate. `decide` puts a decision into the register, and may take seconds; `phase` is set by the training thread."""

    def __init__(self, rank: int, decide: Decide, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._participant, self._decide = Participant(rank), decide
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._clock = clock
        self._gone = False
        self.phase: Phase = "start"

    # Control thread

    def on_order(self, order: Order) -> tuple[RankMessage, ...]:
        while True:
            with self._changed:
                answers = self._participant.handle(order, phase=self.phase, now=self._clock())
                self._changed.notify_all()
            proposals = [answer for answer in answers if isinstance(answer, Propose)]
            if not proposals:
                return tuple(answer for answer in answers if not isinstance(answer, Propose))
            for proposal in proposals:
                self._propose(proposal)

    def on_lost(self) -> None:
        """Nobody will decide any more: every wait ends as if its deadline had come."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _propose(self, propose: Propose) -> None:
        """Asks the register without holding the lock: it may take seconds, and the control thread must answer meanwhile."""
        commit, is_known = self._decide(propose.generation, propose.commit)
        with self._changed:
            self._participant.decided(propose.generation, commit, is_known=is_known)
            self._changed.notify_all()

    # Training thread

    @property
    def passed(self) -> int:
        return self._participant.passed

    def judge(self, step: int) -> Pass | Skip | Act:
        """What to do with the update of `step`. Waits for a decision where one is under way, never past its deadline."""
        with self._lock:  # the usual case, with as little code as it takes
            decision = self._participant.at_gate(step, now=inf if self._gone else self._clock())
        if not isinstance(decision, (Wait, Propose)):
            return decision
        later: Pass | Skip | Act = self._until_decided(lambda: self._participant.at_gate(step, now=self._now()))
        return later

    def boundary(self) -> Act | None:
        """The order to act on before the next batch is fetched. Waits where the others may stop at this very boundary."""
        with self._lock:
            decision = self._participant.at_boundary(now=inf if self._gone else self._clock())
        if not isinstance(decision, (Wait, Propose)):
            return decision
        later: Act | None = self._until_decided(lambda: self._participant.at_boundary(now=self._now()))
        return later

    def hold(self, step: int, timeout_s: float) -> Released | GivenUp:
        """Waits for all ranks' promise to veto `step`."""
        deadline = self._clock() + timeout_s
        decision: Released | GivenUp = self._until_decided(lambda: self._participant.at_hold(step, deadline=deadline, now=self._now()))
        return decision

    def _until_decided(self, ask: Callable[[], Any]) -> Any:
        """Asks the protocol until it knows what this thread must do."""
        while True:
            with self._changed:
                decision = ask()
                if isinstance(decision, Wait):
                    self._changed.wait(self._until(decision.until))
                    continue
            if not isinstance(decision, Propose):
                return decision
            self._propose(decision)

    def answer(self, generation: int, *, deadline: float, beyond: type[Order] | None = None) -> WriteCommitted | Leave | None:
        """What the coordinator says after this rank has saved. None: the line is lost, or nothing came by the deadline.

        `beyond`: WriteCommitted once that has been done, so that it is not taken for news.
        """
        with self._changed:
            while True:
                answer = self._participant.answer(generation)
                if answer is not None and not (beyond is not None and isinstance(answer, beyond)):
                    return answer
                if self._now() >= deadline:
                    return None
                self._changed.wait(self._until(deadline))

    @property
    def has_order(self) -> bool:
        """Whether an order is decided that this rank has not acted on, or is acting on."""
        return self._participant.has_order

    def done(self, generation: int) -> None:
        with self._changed:
            self._participant.done(generation)

    def clock(self) -> float:
        return self._clock()

    def _now(self) -> float:
        return inf if self._gone else self._clock()

    def _until(self, deadline: float) -> float:
        return max(0.0, min(deadline - self._clock(), 1.0))
