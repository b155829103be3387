"""Who keeps whom waiting, where ranks stand still: from how many collectives each has called on each process group, and which were the newest.

A rank that has called fewer on a group than another is behind there: the other waits for it, or for one that it waits for itself. Where all have called
the same number, they may be in different collectives of that number. Pure; knows no clock, and not how a rank ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_watchdog.job.phases import phase_in
from torch_watchdog_proto.rescue_words import Failed, GroupCalls, Looked, is_unusual

__all__ = ["AWAY", "STOPPED", "Place", "Split", "elsewhere", "silence", "split"]

STOPPED = "its process is stopped (SIGSTOP)"
AWAY = "away"  # in the place of the kernel's word for a process whose node cannot be reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank stands. `between`: it has not begun the step, or is done with its loop; `where`: the user's line; `handles` as in Looked."""

    rank: int
    step: int
    between: bool
    where: str
    calls: tuple[GroupCalls, ...]
    handles: str = ""

    @classmethod
    def of(cls, said: Looked | Failed) -> Place:
        handles = said.handles if isinstance(said, Looked) else ""
        return cls(rank=said.rank, step=said.step, between=said.between, where=said.where, calls=said.calls, handles=handles)

    @property
    def main(self) -> GroupCalls | None:
        """On the group that it has called most of."""
        return max(self.calls, key=lambda one: one.made, default=None)

    @property
    def is_stray(self) -> bool:
        """Whether it is in a collective that Python called, and that this rank had never called before, in a loop that calls others."""
        return self.main is not None and bool(self.main.newest) and self.main.times == 0 and self.main.made > 1

    @property
    def words(self) -> str:
        """`rank 1: all_reduce of (7,) float32 at train.py:31, in step 9`."""
        return f"rank {self.rank}: {'a collective' if self.main is None else _call(self.main)}{_at(self)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The ranks that are not where the others are; several where nothing tells them apart. `why`: in words."""

    ranks: tuple[int, ...]
    why: str


def split(places: Sequence[Place]) -> Split | None:
    """None where all are in the same collectives, as far as is known: then a line or a device keeps them waiting, not one of them."""
    by_rank = {place.rank: place for place in places}
    groups: dict[str, dict[int, GroupCalls]] = {}
    for place in places:
        for calls in place.calls:
            groups.setdefault(calls.group, {})[place.rank] = calls
    groups = {name: calls for name, calls in groups.items() if len(calls) > 1}
    return _behind(groups, by_rank) or _in_another(groups, by_rank)


def elsewhere(looked: Looked) -> str:
    """What a rank does that is in no collective."""
    lines = [line.strip() for line in looked.stack.splitlines() if line.strip().startswith("File ")]
    place, phase = lines[-1] if lines else "unknown code", phase_in(looked.stack)
    does = f"it is not in a collective, but in {place}" if phase is None else f"it is not in a collective: it {phase}, in {place}"
    return does + _while_it_handles(looked.handles)


def silence(state: str, stack: str) -> str:
    """Of a rank that does not answer. `state`: the kernel's word for its process, or AWAY; `stack`: as it was read from outside, innermost first, or ""."""
    if state == "T":
        return STOPPED
    if state == AWAY:
        return "its node cannot be reached, or does not answer: the network between, or the machine, is gone"
    return "it does not answer: native code holds the interpreter's lock" + (
        f", in {stack.strip().splitlines()[0]}" if stack.strip() else ""
    )


def _behind(groups: Mapping[str, Mapping[int, GroupCalls]], places: Mapping[int, Place]) -> Split | None:
    behind: dict[int, str] = {}
    ahead: set[int] = set()
    for name, calls in groups.items():
        most = max(one.made for one in calls.values())
        few = [rank for rank, one in calls.items() if one.made < most]
        ahead |= calls.keys() - set(few) if few else set()
        behind.update((rank, name) for rank in few)
    # Who is behind on one group and ahead on another waits there itself. Where all do, they wait for each other, in a circle.
    first = sorted(behind.keys() - ahead) or sorted(behind)
    if not first:
        return None
    calls = groups[behind[first[0]]]
    farthest = max(calls, key=lambda rank: (calls[rank].made, -rank))
    in_circle = not behind.keys() - ahead
    how = "the ranks wait for each other: they use two process groups in different order" if in_circle else "it is behind the others"
    mine, theirs = calls[first[0]].made, calls[farthest].made
    counts = f"of process group {behind[first[0]]} rank {first[0]} has called {mine} collectives, rank {farthest} {theirs}"
    return Split(ranks=tuple(first), why=f"{how}: {counts}; {_both(places[first[0]], places[farthest], calls)}")


def _in_another(groups: Mapping[str, Mapping[int, GroupCalls]], places: Mapping[int, Place]) -> Split | None:
    for name, calls in groups.items():
        kinds = Counter(one.alike for one in calls.values())
        if len(kinds) < 2:
            continue
        few = min(kinds.values())
        odd = sorted(rank for rank, one in calls.items() if kinds[one.alike] == few)
        done = [rank for rank in odd if places[rank].between]
        if 0 < len(done) < len(odd) and len(odd) == len(calls):
            odd = done  # as many here as there: those that are done with their loop are not where the others still train
        elif len(odd) == len(calls):
            odd = _strangers(calls) or odd
        other = next(rank for rank, one in calls.items() if one.alike != calls[odd[0]].alike)
        what = f"the ranks are in different collectives: collective {calls[odd[0]].made} of process group {name} is not the same on all"
        return Split(ranks=tuple(odd), why=f"{what}; {_both(places[odd[0]], places[other], calls)}")
    return None


def _strangers(calls: Mapping[int, GroupCalls]) -> list[int]:
    """The ranks that are in a call that they have hardly ever made, where the others are in one that they make again and again."""
    times: dict[int, int] = {}  # by kind of call
    for one in calls.values():
        times[one.alike] = max(one.times, times.get(one.alike, 0))
    most = max(times.values())
    return sorted(rank for rank, one in calls.items() if is_unusual(times[one.alike], most))


def _both(one: Place, other: Place, calls: Mapping[int, GroupCalls]) -> str:
    return "; ".join(f"rank {place.rank}: {_call(calls[place.rank])}{_at(place)}" for place in (one, other))


def _call(calls: GroupCalls) -> str:
    return calls.newest or "a collective that Python did not call (as that of the gradients in backward)"


def _at(place: Place) -> str:
    step = f", not in a step (the next were {place.step})" if place.between else f", in step {place.step}"
    return (f" at {place.where}" if place.where else "") + step + _while_it_handles(place.handles)


def _while_it_handles(error: str) -> str:
    return f", in what its script does after {error}" if error else ""
