"""Which collectives the ranks of this node have called, in shared memory: two ranks in different ones are told before either can hang.

Owns the page of one attempt and the comparison. A collective is known by its group and its number there, and by what must be equal on all of
the group's ranks. Each rank writes down its call before it makes it, and looks at two neighbours: the later of two that differ finds out. The
earlier one may be dead by then (gloo ends a process over a wrong size). Knows no torch; ranks of other nodes are not compared.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_watchdog_agent.neighbours import mapped
from torch_watchdog_proto.messages import BatchFact, Violation
from torch_watchdog_proto.rescue_words import is_unusual

if TYPE_CHECKING:
    from torch_watchdog_agent.identity import Identity

__all__ = ["Collective", "Lockstep", "Mismatch", "violation_of"]

_KEY = struct.Struct("<Q")  # group and number; 0: being written
_BODY = struct.Struct("<IB")  # what must be equal, and how long the words are
_ENTRY_BYTES = 128
_TIMES_BYTES = 4
_BODY_AT = _KEY.size + _TIMES_BYTES
_WORDS_AT = _BODY_AT + _BODY.size
_NUM_ENTRIES = 256  # a neighbour that is further ahead than that is not compared
_BYTES_PER_RANK = _NUM_ENTRIES * _ENTRY_BYTES


class Collective:
    """A kind of call. `equal` is what every rank must have alike, `words` how a person would say it: `all_gather of (4, 7) int64`."""

    __slots__ = ("alike", "body", "words")

    def __init__(self, equal: str, words: str) -> None:
        self.words = words.encode("ascii", "replace")[: _ENTRY_BYTES - _WORDS_AT].decode()
        self.alike = zlib.crc32(equal.encode()) or 1
        self.body = _BODY.pack(self.alike, len(self.words)) + self.words.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """This rank is about to make a call, and the rank that is `local_rank` on this node has `theirs` in its place. `times`: how often this one had made
    such a call before, `their_times` that one. `number` counts from 0."""

    group: str
    number: int
    mine: str
    local_rank: int
    theirs: str
    times: int = 0
    their_times: int = 0


class Lockstep:
    """The page of one attempt. Raises OSError where it cannot be made."""

    def __init__(self, directory: Path, *, attempt: int, local_rank: int, local_world_size: int) -> None:
        size = local_world_size * _BYTES_PER_RANK
        self._page = memoryview(mapped(directory / f"{attempt}.collectives", size))
        self._keys = self._page.cast("Q")  # one store: a neighbour sees the old key or the new one
        self._local_rank = local_rank
        self._groups: dict[str, tuple[int, tuple[int, ...]]] = {}

    def knows(self, group: str) -> bool:
        return group in self._groups

    def join(self, group: str, peers: Sequence[int]) -> None:
        """`peers`: the group's ranks of this node by local rank, in one order everywhere."""
        self._groups[group] = zlib.crc32(group.encode()), _neighbours(peers, self._local_rank)

    def about_to(self, call: Collective, group: str, number: int, times: int = 0) -> Mismatch | None:
        """Writes the call down, the `number`-th of a joined group, and compares it with the neighbours' there. `times`: as in Mismatch."""
        place, neighbours = self._groups[group]
        key = place << 32 | (number + 1) & 0xFFFF_FFFF
        entry = (place + number) % _NUM_ENTRIES * _ENTRY_BYTES
        self._write(self._local_rank * _BYTES_PER_RANK + entry, key, times.to_bytes(_TIMES_BYTES, "little"), call.body)
        for peer in neighbours:
            differing = self._differing(peer * _BYTES_PER_RANK + entry, key, call.body)
            if differing is not None:
                theirs, their_times = differing
                return Mismatch(
                    group=group, number=number, mine=call.words, local_rank=peer, theirs=theirs, times=times, their_times=their_times
                )  # fmt: skip
        return None

    def _write(self, at: int, key: int, times: bytes, body: bytes) -> None:
        self._keys[at // _KEY.size] = 0
        self._page[at + _KEY.size : at + _BODY_AT + len(body)] = times + body
        self._keys[at // _KEY.size] = key

    def _differing(self, at: int, key: int, body: bytes) -> tuple[str, int] | None:
        """A neighbour's words for the same collective, where it is not the same, and how often it had called such a one."""
        if self._keys[at // _KEY.size] != key:
            return None
        times, there = bytes(self._page[at + _KEY.size : at + _BODY_AT]), bytes(self._page[at + _BODY_AT : at + _ENTRY_BYTES])
        if there[:4] == body[:4] or self._keys[at // _KEY.size] != key:  # equal, or overwritten while it was read
            return None
        _, length = _BODY.unpack_from(there)
        return there[_BODY.size : _BODY.size + length].decode("ascii", "replace"), int.from_bytes(times, "little")


def _neighbours(peers: Sequence[int], own: int) -> tuple[int, ...]:
    """The ranks beside this one in the circle of `peers`: where any two of it differ, two that stand side by side do."""
    if len(peers) < 2 or own not in peers:
        return ()
    at = peers.index(own)
    return tuple(dict.fromkeys((peers[at - 1], peers[(at + 1) % len(peers)])))


def violation_of(mismatch: Mismatch, who: Identity, *, source: str) -> Violation:
    """The mismatch as the daemon is told it by rank `who`, whose doing it need not be. `source`: the line that calls now."""
    rank, other = who.rank, who.rank - who.local_rank + mismatch.local_rank
    mine, theirs = mismatch.mine, mismatch.theirs
    one = f"collective {mismatch.number + 1} of process group {mismatch.group}"  # from 1 on, as torch's flight recorder and job/standstill.py count
    cause = f"{one} is {mine} on rank {rank} ({source}) and {theirs} on rank {other}"
    if mine.partition(" ")[0] == theirs.partition(" ")[0]:
        what, fix = (
            "the shapes differ across the ranks",
            "Pad to one length across the ranks first (accelerate: pad_across_processes), or gather objects.",
        )
    else:
        what = "the ranks are in different collectives"
        fix = (
            "Let every rank call the same collectives in the same order: look for a branch, or an early way out, that only some ranks take."
        )
    is_theirs = is_unusual(mismatch.their_times, mismatch.times)
    both = f"{theirs} here, {mine} on rank {rank}" if is_theirs else f"{mine} here, {theirs} on rank {other}"
    return Violation(
        kind="rank.desync", summary=f"{what}: {both}", cause=f"{cause}: {what}.", fix=fix, batch=BatchFact(key=""), repairable=False,
        culprit=other if is_theirs else None,
    )  # fmt: skip
