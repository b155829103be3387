"""Where the training thread meets the stop protocol: it reads one local flag, and waits only while an order asks for it.

Owns the lock that makes "what have you passed, and promise not to pass the next" atomic between training and control thread. Knows the protocol only
through `Participant`, and neither torch nor the socket's bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch_watchdog_proto.messages import Leave, Order, Phase, RankMessage, WriteCommitted
from torch_watchdog_proto.stop.participant import Act, GivenUp, Participant, Pass, Released, Skip, Wait

__all__ = ["Gate"]


class Gate:
    """One rank's gate. `orders_pending` may be read without the lock: False is the usual case and costs nothing."""

    def __init__(self, rank: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._participant = Participant(rank)
        self._changed = threading.Condition()
        self._clock = clock
        self._gone = False
        self.phase: Phase = "start"

    # Control thread

    def on_order(self, order: Order) -> tuple[RankMessage, ...]:
        with self._changed:
            answers = self._participant.handle(order, phase=self.phase, now=self._clock())
            self._changed.notify_all()
            return answers

    def on_lost(self) -> None:
        """Nobody will decide any more: every wait ends as if its deadline had come."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    # Training thread

    @property
    def passed(self) -> int:
        return self._participant.passed

    def judge(self, step: int) -> Pass | Skip | Act:
        """What to do with the update of `step`. Waits for a decision where one is under way, never past its deadline."""
        with self._changed:
            while True:
                decision = self._participant.at_gate(step, now=self._now())
                if not isinstance(decision, Wait):
                    return decision
                self._changed.wait(self._until(decision.until))

    def boundary(self) -> Act | None:
        """The order to act on before the next batch is fetched."""
        with self._changed:
            return self._participant.at_boundary()

    def hold(self, step: int, timeout_s: float) -> Released | GivenUp:
        """Waits for all ranks' promise to veto `step`."""
        with self._changed:
            deadline = self._clock() + timeout_s
            while True:
                decision = self._participant.at_hold(step, deadline=deadline, now=self._now())
                if not isinstance(decision, Wait):
                    return decision
                self._changed.wait(self._until(decision.until))

    def answer(self, generation: int, *, deadline: float, beyond: type[Order] | None = None) -> WriteCommitted | Leave:
        """What the coordinator says after this rank has saved. A lost line or the deadline ends the order without a checkpoint.

        `beyond`: WriteCommitted once that has been done, so that it is not taken for news.
        """
        with self._changed:
            while True:
                answer = self._participant.answer(generation)
                if answer is not None and not (beyond is not None and isinstance(answer, beyond)):
                    return answer
                if self._now() >= deadline:
                    return Leave(generation=generation)
                self._changed.wait(self._until(deadline))

    def done(self, generation: int) -> None:
        with self._changed:
            self._participant.done(generation)

    def clock(self) -> float:
        return self._clock()

    def _now(self) -> float:
        return float("inf") if self._gone else self._clock()

    def _until(self, deadline: float) -> float:
        return max(0.0, min(deadline - self._clock(), 1.0))
