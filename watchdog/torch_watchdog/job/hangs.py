"""rank.hang: a job at a standstill, who is late in it and who only waits.

Owns the progress of one attempt's ranks and what they answered when they were asked. Learns from the job's own steps how long a standstill is unusual; says
"hung" only on agreeing evidence: others wait in a collective, and this rank is stopped, or still does something else shortly before their collective
gives up. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from torch_watchdog_proto.rescue_words import Looked

__all__ = ["HangWatch", "Hung"]

SHORTEST_S = 10.0  # no standstill is shorter, however fast the steps
STEPS = 10  # so many usual steps long
NUM_KEPT = 64
MIN_GAPS = 3  # the first step compiles and opens what it needs: nothing is learned before
ANSWER_S = 3.0
PART_OF_TIMEOUT = 0.8  # of the process groups' own: after it the job dies anyway, without a word of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """One rank that others wait for. `sure`: it cannot go on by itself, or not in time: the others may be freed."""

    rank: int
    why: str
    waiting: tuple[int, ...]
    sure: bool
    stacks: str


class HangWatch:
    """One attempt. The caller asks the ranks when `should_ask` says so, and gives the answers back."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=NUM_KEPT)
        self._last: float | None = None
        self._generation = 0
        self._asked_at: float | None = None
        self._asked: frozenset[int] = frozenset()
        self._answers: dict[int, Looked] = {}
        self._states: dict[int, str] = {}
        self._stopped_before: frozenset[int] = frozenset()
        self._told = False
        self._ask_again_at = 0.0

    def progressed(self, now: float, steps_s: Iterable[float] = ()) -> None:
        """Some rank reports steps, which took so long; or batches, as in an evaluation."""
        if self._last is not None:
            self._gaps_s.extend((*steps_s, now - self._last))
        self._last, self._asked_at, self._told = now, None, False
        self._stopped_before = frozenset()

    @property
    def deadline(self) -> float | None:
        """When to ask, or to judge."""
        if self._asked_at is not None:
            return self._asked_at + ANSWER_S
        if self._last is None or len(self._gaps_s) < MIN_GAPS:
            return None
        return max(self._last + self._unusual_s(), self._ask_again_at)

    def _unusual_s(self) -> float:
        return max(SHORTEST_S, STEPS * median(self._gaps_s), 2 * max(self._gaps_s))

    def should_ask(self, now: float) -> bool:
        return self._asked_at is None and self.deadline is not None and now >= self.deadline

    def asked(self, ranks: frozenset[int], generation: int, now: float) -> None:
        self._asked, self._generation, self._asked_at = ranks, generation, now
        self._answers, self._states = {}, {}

    def answered(self, looked: Looked) -> None:
        if looked.generation == self._generation:
            self._answers[looked.rank] = looked

    def state(self, rank: int, text: str) -> None:
        """The kernel's word for the state of the process."""
        self._states[rank] = text

    def verdict(self, now: float) -> Hung | None:
        """Once the ranks have had their time to answer; then they are asked again after a while."""
        if self._asked_at is None or now < self._asked_at + ANSWER_S or self._last is None:
            return None
        stood_s = now - self._last
        self._asked_at, asked_before = None, self._stopped_before
        self._stopped_before = frozenset(rank for rank in self._asked if self._states.get(rank) == "T")
        self._ask_again_at = now + self._unusual_s() / 2
        waiting = tuple(sorted(rank for rank, answer in self._answers.items() if answer.waits))
        late = sorted(self._asked - set(waiting))
        if not waiting or not late:
            return None
        return self._judge(late[0] if not self._stopped_before else min(self._stopped_before), waiting, stood_s, asked_before)

    def _judge(self, rank: int, waiting: tuple[int, ...], stood_s: float, asked_before: frozenset[int]) -> Hung | None:
        timeout_s = min((answer.timeout_s for answer in self._answers.values() if answer.timeout_s > 0), default=float("inf"))
        stopped = rank in self._stopped_before
        sure = (stopped and rank in asked_before) or stood_s >= PART_OF_TIMEOUT * timeout_s
        if self._told and not sure:
            return None
        self._told = True
        return Hung(rank=rank, why=self._why(rank, stood_s), waiting=waiting, sure=sure, stacks=self._stacks())

    def _why(self, rank: int, stood_s: float) -> str:
        usual = median(self._gaps_s)
        since = f"no step for {stood_s:.0f} s, where one is usual every {usual:.2g} s"
        if self._states.get(rank) == "T":
            return f"its process is stopped (SIGSTOP); {since}"
        answer = self._answers.get(rank)
        if answer is None:
            return f"it does not answer: native code holds the interpreter's lock; {since}"
        lines = [line.strip() for line in answer.stack.splitlines() if line.strip().startswith("File ")]
        return f"it is not in a collective, but in {lines[-1] if lines else 'unknown code'}; {since}"

    def _stacks(self) -> str:
        parts = []
        for rank in sorted(self._asked):
            answer, state = self._answers.get(rank), self._states.get(rank, "?")
            word = "no answer" if answer is None else "waits in a collective" if answer.waits else "not in a collective"
            parts.append(f"rank {rank}: {word}, process state {state}\n{'' if answer is None else answer.stack}")
        return "\n".join(parts)
