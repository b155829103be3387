"""Gathers what is known of each rank's failure until it can be said which failed first.

Owns the evidence of one attempt: exceptions, ends of processes, telling lines of logs, hangs. The judgement is `first_failure.py`, its words are
`rules/death.py`. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch_watchdog.job.first_failure import (
    ASKED_FOR_S,
    FirstFailure,
    RankEnd,
    died_of_the_asking,
    first_failure,
    is_no_failure_of_its_own,
)
from torch_watchdog.job.standstill import AWAY, STOPPED, Place, elsewhere, silence, split
from torch_watchdog.rules.death import PATIENCE_S
from torch_watchdog_proto.messages import RankEvent
from torch_watchdog_proto.rescue_words import Failed, Looked

__all__ = ["FailureWatch"]

SLOW_TEARDOWN_S = 10.0  # for the culprit's own word, while every word so far only blames a peer
HEARD_LATE_S = 2.0  # a rank on a busy machine may die of a signal before its launch, which got the same one, comes to look at it
_MAX_LOG_LINES = 400
_ASSERTED, _PRINTED = "device-side assert", "Assertion `"


class FailureWatch:
    """One attempt's ranks that ended badly. A verdict comes once, and again where more ranks fail after it."""

    def __init__(self) -> None:
        self._ends: dict[int, RankEnd] = {}  # by pid
        self._notes: dict[int, str] = {}
        self._logs: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        self._said_end: set[int] = set()
        self._told: set[int] = set()  # of another's failure
        self._gone: set[int] = set()  # without a word of a failure
        self._command: tuple[int, int | None] | None = None  # how the wrapped command failed
        self._since: float | None = None
        self._judged = 0
        self._asked: frozenset[int] = frozenset()
        self._places: dict[int, Place] = {}  # where ranks were as the first of them was done waiting
        self._elsewhere: dict[int, str] = {}
        self._stacks: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._states: dict[int, str] = {}
        self._outside: dict[int, str] = {}
        self._asked_for_ns: dict[int, int] = {}  # by pid: when its launch was asked to end
        self._asked_at: dict[int, float] = {}  # and when that was heard here

    @property
    def deadline(self) -> float | None:
        return None if self._since is None or self._judged == len(self._failed()) else self._since + self._patience_s()

    def hear(self, event: RankEvent, now: float) -> None:
        """What a node has seen of a rank, but for its end (`see`)."""
        match event.kind:
            case "note" if event.level == "error":
                self._notes[event.pid] = event.text  # it may come after the news of its end
            case "log":
                self._log(event.pid, event.text)
            case "state":
                self.state(event.rank, event.text)
            case "stack":
                self._outside[event.rank] = event.text
            case "asked":
                self._asked_for_ns[event.pid], self._asked_at[event.pid] = event.time_ns, now
            case _:
                pass

    def _log(self, pid: int, text: str) -> None:
        lines = self._logs.setdefault(pid, [])
        if len(lines) < _MAX_LOG_LINES:
            lines.append(text)

    def raised(self, failed: Failed, *, node: str, pid: int, now: float) -> None:
        """An exception leaves the training of a rank."""
        known = self._ends.get(pid) or RankEnd(rank=failed.rank, node=node, pid=pid)
        self._ends[pid] = replace(
            known, text=failed.text, where=failed.where, raised_ns=failed.time_ns, step=failed.step, between=failed.between,
            bundle=failed.bundle, fetching=failed.fetching, by_itself=failed.by_itself, behind=known.behind or frozenset(self._gone),
        )  # fmt: skip
        self._begin(now)
        if self._ends[pid].waited_for_another:
            self._places[failed.rank] = Place.of(failed)

    def said_end(self, pid: int, now: float) -> bool:
        """The script of that process is over, by its own word. It may come after the news of its end. False where its launch had just been asked to end: a
        script that is interrupted, and handles that, says so too, and its training need not be over."""
        is_own = now - self._asked_at.get(pid, float("-inf")) >= ASKED_FOR_S
        if is_own:
            self._said_end.add(pid)
        return is_own

    def gone(self, pid: int) -> None:
        """That process speaks no more."""
        if pid not in self._ends:
            self._gone.add(pid)

    def told_of_another(self, pid: int) -> None:
        """It is told of another's failure, and was there for that: how it ends follows from that one, unless its own word is on its way."""
        if pid not in self._ends:
            self._told.add(pid)

    def hung(self, rank: int, *, node: str, pid: int, step: int | None, why: str, now: float, desync: bool = False) -> None:
        """The rank makes no progress, and others wait for it."""
        known = self._ends.get(pid) or RankEnd(rank=rank, node=node, pid=pid)
        self._ends[pid] = replace(known, hung=why, step=step, desync=desync)
        self._begin(now)

    def asked(self, ranks: frozenset[int]) -> None:
        """One waits for another no longer: these are asked where they are, before they are told anything."""
        self._asked = ranks

    @property
    def has_asked(self) -> bool:
        return bool(self._asked)

    def looked(self, looked: Looked) -> None:
        if looked.rank not in self._asked or looked.rank in self._stacks:
            return
        self._stacks[looked.rank], self._steps[looked.rank] = looked.stack, looked.step
        if looked.waits:
            self._places.setdefault(looked.rank, Place.of(looked))
        else:
            self._elsewhere[looked.rank] = elsewhere(looked)

    @property
    def stacks(self) -> str:
        """Of the ranks that were asked."""
        words = {rank: self._elsewhere.get(rank, "waits in a collective") for rank in self._stacks} | dict.fromkeys(
            self._outside, "no answer"
        )
        found = self._outside | self._stacks
        return "\n".join(f"rank {rank}: {words[rank]}\n{found[rank]}" for rank in sorted(found))

    def state(self, rank: int, text: str) -> None:
        """The kernel's word for the state of the process."""
        self._states[rank] = text

    def see(self, event: RankEvent, node: str, last_step: int | None, now: float, *, on_device: int | None = None, late: str = "") -> None:
        """A rank's process has ended. `on_device`: the step that its GPU was in, while Python may have been ahead of it; `late`: as in RankEnd."""
        self._ended.add(event.pid)
        known = self._ends.get(event.pid)
        next_step = None if last_step is None else last_step + 1
        known = known or RankEnd(rank=event.rank, node=node, pid=event.pid, step=next_step, between=True)
        self._ends[event.pid] = replace(
            known, order=event.order, exit_code=event.exit_code, signal=event.signal, ended_ns=event.time_ns,
            finished=event.exit_code == 0 and not known.text, on_device=on_device, late=late,
        )  # fmt: skip
        if self._failed():
            self._begin(now)

    def command_ended(self, exit_code: int, signal: int | None) -> None:
        """Where it failed and no rank was seen to, it was one of those of whose end nothing is known."""
        if exit_code != 0 or signal is not None:
            self._command = (exit_code, signal)
            self._begin(0.0)

    def may_hold_all(self, pid: int) -> bool:
        """Whether the rank that raised is to be asked for what it holds, as a healthy one: a victim, or one whose script asked for its end once another's
        process had gone without a word."""
        return self.is_victim(pid) or (self._ends[pid].may_follow and bool(self._ends[pid].behind))

    def is_victim(self, pid: int) -> bool:
        """Whether that rank only suffers from a peer's failure, as far as it has said."""
        end = self._with_words(self._ends[pid]) if pid in self._ends else None
        return end is not None and not end.hung and end.is_victim

    def has_waited(self, pid: int) -> bool:
        """Whether that rank has said that it waited for another in vain."""
        return pid in self._ends and self._ends[pid].waited_for_another

    def verdict(self, *, now: float, all_ended: bool, skipped: Mapping[int, int] = MappingProxyType({})) -> FirstFailure | None:
        """Who failed first, once that can be told from those that followed. `skipped`: ranks that left a batch out on their own, and when."""
        failed = self._failed()
        if self._since is None or self._judged == len(failed):
            return None
        if not all_ended and now < self._since + self._patience_s():
            return None
        self._judged = len(failed)
        finished = [replace(end, told=end.pid in self._told) for end in self._ends.values() if end.finished]
        first = first_failure([*failed, *finished], skipped, self._late())
        return None if first is None else self._by_sizes(first)

    def _by_sizes(self, first: FirstFailure) -> FirstFailure:
        """Where gloo ended a process over what another had sent: that one failed first where its call is one that it had never made before. Two calls of
        Python's on one node are compared before they are made; of another node nobody knows which call the dead rank was in."""
        if not all(end.got_another_size for end in first.culprits):
            return first
        others = [self._places[rank] for rank in first.victims if rank in self._places]
        near = {end.rank for end in self._ends.values() if end.node in {dead.node for dead in first.culprits}}
        stray = {place.rank for place in others if place.is_stray and place.rank in near}
        culprits = tuple(self._with_words(end) for end in self._ends.values() if end.rank in stray) or first.culprits
        named = {end.rank for end in culprits}
        victims = tuple(sorted({end.rank for end in first.culprits}.union(first.victims) - named))
        words = "; ".join(place.words for place in others if not stray or place.rank in stray)
        return replace(first, culprits=culprits, victims=victims, sizes=words, stray=bool(stray))

    def _late(self) -> list[RankEnd]:
        """Those that the rank which gave a collective up had waited for, by where they were then. NCCL ends a process that gives one up without a word of
        Python's, and asks nobody: a rank that is stopped then is why."""
        if not any(end.gave_up for end in self._failed()):
            return []
        # Those that have spoken since: neither silent nor elsewhere.
        spoke = {end.rank for end in self._ends.values() if end.text or end.ended_ns} - self._elsewhere.keys()
        whys = {rank: self._elsewhere.get(rank) or self._silence(rank) for rank in sorted(self._asked - self._places.keys() - spoke)}
        found = None if whys else split(list(self._places.values()))
        if found is not None:
            whys = dict.fromkeys(found.ranks, found.why)
        whys |= {rank: STOPPED for rank, state in self._states.items() if state == "T" and rank not in spoke and found is None}
        known = {end.rank: end for end in self._ends.values()}
        ends = (known.get(rank, RankEnd(rank=rank, node="", pid=0, step=self._steps.get(rank))) for rank in whys)
        return [replace(end, hung=whys[end.rank], desync=found is not None, finished=False) for end in ends]

    def _silence(self, rank: int) -> str:
        return silence(self._states.get(rank, AWAY), self._outside.get(rank, ""))

    @property
    def culprit_is_known(self) -> bool:
        """Whether some rank's failure is its own, so that no earlier one need be waited for long; or whom the others waited for."""
        return any(not self.is_victim(end.pid) for end in self._failed()) or (self._asked <= self._stacks.keys() and bool(self._late()))

    @property
    def is_told(self) -> bool:
        """Whether the culprit is known, and nothing is awaited that may tell more of it."""
        return self.culprit_is_known and not self._awaits_log and not self._may_follow()

    @property
    def _awaits_log(self) -> bool:
        """Whether a rank has met an assertion on its GPU, and what that has printed, which its node reads, is still to come."""
        return any(_ASSERTED in end.text and _PRINTED not in end.log and end.pid not in self._ended for end in self._failed())

    def _may_follow(self) -> bool:
        """Whether all that was raised may do so from the end of a process that has gone, which is still to be seen."""
        own = [end for end in self._failed() if not self.is_victim(end.pid) and (end.raised_ns or not end.told)]
        silent = {pid for pid in self._gone - self._ended if pid not in self._ends or not self._ends[pid].raised_ns}
        return bool(own and silent) and all(end.may_follow or silent & end.behind for end in own)

    def _begin(self, now: float) -> None:
        self._since = now if self._since is None else self._since

    def _patience_s(self) -> float:
        return PATIENCE_S if self.culprit_is_known or self._late() else SLOW_TEARDOWN_S

    def _failed(self) -> tuple[RankEnd, ...]:
        told = [self._with_words(end) for end in self._ends.values()]
        failed = [end for end in told if _is_bad(end) and not self._is_asked_for(end)]
        if failed or self._command is None or self._asked_for_ns:
            return tuple(failed)
        code, signal = self._command
        return tuple(replace(end, exit_code=code, signal=signal) for end in told if end.exit_code is None)

    def is_asked_for(self, pid: int) -> bool:
        """Whether that rank has ended, or is about to, because somebody ended the launch."""
        return pid in self._ends and self._is_asked_for(self._with_words(self._ends[pid]))

    def _is_asked_for(self, end: RankEnd) -> bool:
        """What failed before, or by words of its own, is no part of that."""
        if not self._asked_for_ns or end.hung:
            return False
        asked_ns = self._asked_for_ns.get(end.pid)
        if asked_ns is None:  # of another node, whose launch was not asked
            return end.lost_a_peer
        after_s = ((end.raised_ns or end.ended_ns) - asked_ns) / 1e9
        earliest_s = -HEARD_LATE_S if died_of_the_asking(end) else 0.0
        return earliest_s <= after_s <= ASKED_FOR_S and is_no_failure_of_its_own(end)

    def _with_words(self, end: RankEnd) -> RankEnd:
        text, log = end.text or self._notes.get(end.pid, ""), "\n".join(self._logs.get(end.pid, ()))
        told = replace(end, text=text, log=log, said_end=end.pid in self._said_end, told=end.pid in self._told)
        return replace(told, step=told.on_device, between=False) if told.died_of_its_device else told


def _is_bad(end: RankEnd) -> bool:
    return end.signal is not None or bool(end.exit_code) or bool(end.hung) or (end.exit_code is None and bool(end.text))
