"""rank.hang: a job at a standstill, who is late in it and who only waits.

Owns the progress of one attempt's ranks and what they answered when they were asked. Learns from the job's own steps how long a standstill is unusual; says
"hung" only on agreeing evidence: others wait in a collective, and this rank is stopped, or its node is away and everybody else waits, or it still does
something else shortly before their collective gives up; or all wait, and not in the same collectives. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch_watchdog.job.first_failure import ASKED_FOR_S
from torch_watchdog.job.standstill import AWAY, Place, Split, elsewhere, silence, split
from torch_watchdog.rules.limits import HangLimits, limits_of
from torch_watchdog.rules.named import named
from torch_watchdog_proto.messages import RankEvent
from torch_watchdog_proto.rescue_words import Looked
from torch_watchdog_proto.sentences import spoken_time

__all__ = ["ITSELF", "HangWatch", "Hung"]

NUM_KEPT = 64
MIN_GAPS = 3  # the first step compiles and opens what it needs: nothing is learned before
ANSWER_S = 3.0
ITSELF = "; the watchdog itself "  # behind the words of a standstill, before what is done about it without a person


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """The rank that others wait for; several where nothing tells them apart. `sure`: it cannot go on by itself, or not in time: the others may be
    freed. `desync`: it waits, too, in another collective."""

    ranks: tuple[int, ...]
    why: str
    waiting: tuple[int, ...]
    sure: bool
    stacks: str
    desync: bool = False

    @property
    def words(self) -> str:
        waits = "wait" if len(self.waiting) > 1 else "waits"
        return f"{named(self.waiting)} {waits} for {named(self.ranks)}: {self.why}" if self.waiting else f"{named(self.ranks)}: {self.why}"


class HangWatch:
    """One attempt. The caller asks the ranks when `should_ask` says so, and gives the answers back. `rules`: thresholds that the launch changes."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self._limits = limits_of(HangLimits, rules)
        self._gaps_s: deque[float] = deque(maxlen=NUM_KEPT)
        self._last: float | None = None
        self._generation = 0
        self._asked_at: float | None = None
        self._asked: frozenset[int] = frozenset()
        self._answers: dict[int, Looked] = {}
        self._states: dict[int, str] = {}
        self._outside: dict[int, str] = {}
        self._workers: dict[int, str] = {}
        self._stopped_before: frozenset[int] = frozenset()
        self._split_before: Split | None = None
        self._told = False
        self.standstill = ""  # in words, as of the newest look since the last step
        self.late: tuple[int, ...] = ()  # the ranks that it is laid to
        self._why_late = self._next = ""
        self._wrote_out: set[int] = set()  # the batch that they had in hand, since then
        self._network_failed = False  # since the last step
        self._ask_again_at = 0.0

    def progressed(self, now: float, steps_s: Iterable[float] = (), *, batch_of: int | None = None) -> None:
        """Some rank reports steps, which took so long; or batches, as in an evaluation. `batch_of`: the rank, where no step has ended. The batch that it had in
        hand as all stood still is told as its loop goes on, and as an interrupt ends it: the standstill is not over by that one."""
        if self._last is not None:
            self._gaps_s.extend(steps_s)
            if now > self._last:  # several ranks report in one moment
                self._gaps_s.append(now - self._last)
        self._last, self._asked_at, self._told, self._network_failed = now, None, False, False
        self._stopped_before, self._split_before = frozenset(), None
        if batch_of is None or batch_of in self._wrote_out:
            self.standstill = ""
        else:
            self._wrote_out.add(batch_of)

    def why_late(self, rank: int) -> str:
        """Where that rank is instead of where others wait for it; empty where nobody is known to wait for it."""
        return self._why_late if self.standstill and rank in self.late else ""

    def told(self, *, observed: bool, ending: bool) -> str:
        """The standstill, and whether and when something is done about it: nothing where the job is only `observed`; not said once it is done."""
        if not self.standstill or ending:
            return self.standstill
        return f"{self.standstill}{ITSELF}{'does nothing about it (policy observe)' if observed else self._next}"

    @property
    def deadline(self) -> float | None:
        """When to ask, or to judge."""
        if self._asked_at is not None:
            return self._asked_at + ANSWER_S
        if self._last is None or len(self._gaps_s) < MIN_GAPS:
            return None
        return max(self._last + self._unusual_s(), self._ask_again_at)

    def _unusual_s(self) -> float:
        limits = self._limits
        return max(limits.shortest_s, limits.steps * median(self._gaps_s), limits.longest * max(self._gaps_s))

    def should_ask(self, now: float) -> bool:
        return self._asked_at is None and self.deadline is not None and now >= self.deadline

    def asked(self, ranks: frozenset[int], generation: int, now: float) -> None:
        self._asked, self._generation, self._asked_at = ranks, generation, now
        self._answers, self._states, self._outside, self._workers = {}, {}, {}, {}

    def answered(self, looked: Looked) -> None:
        if looked.generation == self._generation:
            self._answers[looked.rank] = looked

    def hear(self, event: RankEvent, now: float) -> None:
        """What its node has seen of a rank."""
        if event.kind == "asked":  # to end, with its launch: whoever stands still then is on the way out
            self._asked_at, self._ask_again_at = None, now + ASKED_FOR_S
        if event.kind == "state":
            self.state(event.rank, event.text)
        if event.kind == "stack":
            self._outside[event.rank] = event.text
        if event.kind == "workers":  # what it and the workers of its loaders do, seen from outside
            self._workers[event.rank] = event.text

    def state(self, rank: int, text: str) -> None:
        """The kernel's word for the state of the process, or AWAY: its node is known to be."""
        self._states[rank] = text
        self._network_failed |= text == AWAY

    def node_back(self, ranks: Collection[int], now: float) -> None:
        """Of a node whose line had broken: what was asked may have been lost with it, so its ranks' silence says nothing. They are asked anew."""
        self._network_failed |= bool(ranks)
        for rank in ranks:
            self._states.pop(rank, None)
        self._stopped_before -= frozenset(ranks)
        if self._asked_at is not None:
            self._asked_at, self._ask_again_at = None, now

    def verdict(self, now: float) -> Hung | None:
        """Once the ranks have had their time to answer; then they are asked again after a while."""
        if self._asked_at is None or now < self._asked_at + ANSWER_S or self._last is None:
            return None
        stood_s = now - self._last
        self._asked_at, asked_before = None, self._stopped_before
        self._stopped_before = frozenset(rank for rank in self._asked if self._state(rank) in ("T", AWAY))
        self._ask_again_at = now + self._unusual_s() / 2
        sure_at = self._last + self._in_time_s()
        if sure_at > now:  # not a look that comes to its verdict after the collectives have given up
            self._ask_again_at = min(self._ask_again_at, max(now, sure_at - ANSWER_S))
        waiting = tuple(sorted(rank for rank, answer in self._answers.items() if answer.waits))
        late = sorted(self._asked - set(waiting))
        if not waiting and not self._is_held_up(late):
            self.standstill = ""  # whoever was late has come meanwhile
            return None
        if not late:
            return self._judge_split(split([Place.of(answer) for answer in self._answers.values()]), stood_s)
        stopped, away = (tuple(one for one in late if self._state(one) == state) for state in ("T", AWAY))
        # A node that is away may only be unwatched: where a rank that can be seen is late, the others may wait for that one.
        rank = next(iter((*stopped, *(one for one in late if one not in away), *away)))
        # Silence is not enough: the daemon must have seen its line break.
        sure = rank in self._stopped_before and rank in asked_before and self._states.get(rank) in ("T", AWAY)
        ranks = away if rank in away else (rank,)
        return self._told_once(Hung(ranks=ranks, why=self._why(rank, stood_s), waiting=waiting, sure=sure, stacks=self._stacks()), stood_s)

    def _is_held_up(self, ranks: Collection[int]) -> bool:
        """Whether some of them are stopped, and the others sleep in native code without a word, so that they cannot say whom they wait for. A job that is
        stopped as a whole is suspended, and no hang."""
        others = [rank for rank in ranks if self._state(rank) != "T"]
        return 0 < len(others) < len(ranks) and all(self._state(rank) in ("S", "D") and rank not in self._answers for rank in others)

    def _judge_split(self, found: Split | None, stood_s: float) -> Hung | None:
        """All wait. What was so at two looks, and computes nothing meanwhile, will not come right by itself, unless the network has just come back: then
        what one rank has sent may still be on its way to another."""
        before, self._split_before = self._split_before, found
        if found is None:
            self.standstill = ""
            return None
        sure = found == before and not self._network_failed and all(self._states.get(rank, "S") != "R" for rank in found.ranks)
        waiting = tuple(sorted(self._asked - set(found.ranks)))
        why = f"{found.why}; {self._since(stood_s)}"
        return self._told_once(Hung(ranks=found.ranks, why=why, waiting=waiting, sure=sure, stacks=self._stacks(), desync=True), stood_s)

    def _told_once(self, hung: Hung, stood_s: float) -> Hung | None:
        """Again only where it has become sure: at the latest before the collectives give up."""
        hung = replace(hung, sure=hung.sure or stood_s >= self._in_time_s())
        if not self.standstill:
            self._wrote_out.clear()
        self.standstill, self.late, self._why_late, self._next = hung.words, hung.ranks, hung.why, self._what_follows(hung)
        if self._told and not hung.sure:
            return None
        self._told = True
        return hung

    def _what_follows(self, hung: Hung) -> str:
        ends = f"ends {named(hung.ranks)} and frees the others"
        if hung.desync or self._state(hung.ranks[0]) in ("T", AWAY):
            return f"{ends} if its next looks find the same"
        if self._in_time_s() == float("inf"):
            return "does not end it: for how long a collective may wait is not known"
        timeout = spoken_time(self._in_time_s() / self._limits.of_timeout)
        return f"{ends} once no step has come for {spoken_time(self._in_time_s())} (a collective gives up after {timeout})"

    def _in_time_s(self) -> float:
        """After the process groups' own timeout, as the ranks have answered it, the job dies anyway, without a word of ours."""
        timeout_s = min((answer.timeout_s for answer in self._answers.values() if answer.timeout_s > 0), default=float("inf"))
        return self._limits.of_timeout * timeout_s

    def _since(self, stood_s: float) -> str:
        return f"no step for {stood_s:.0f} s, where one is usual every {median(self._gaps_s):.2g} s"

    def _why(self, rank: int, stood_s: float) -> str:
        since = self._since(stood_s)
        answer = self._answers.get(rank)
        if answer is None or self._state(rank) in ("T", AWAY):
            return f"{silence(self._state(rank), self._outside.get(rank, ''))}; {since}"
        return f"{elsewhere(answer)}; {since}"

    def _state(self, rank: int) -> str:
        """A node answers for all its ranks: where neither a rank nor its node says a word, the node is away."""
        return self._states.get(rank) or ("?" if rank in self._answers else AWAY)

    def _stacks(self) -> str:
        parts = []
        for rank in sorted(self._asked):
            answer, state = self._answers.get(rank), self._state(rank)
            word = "no answer" if answer is None else "waits in a collective" if answer.waits else "not in a collective"
            stack = self._outside.get(rank, "") if answer is None else answer.stack
            parts.append(f"rank {rank}: {word}, process state {state}\n{stack}")
            parts += [self._workers[rank]] if "\nworker, " in self._workers.get(rank, "") else []
        return "\n".join(parts)
