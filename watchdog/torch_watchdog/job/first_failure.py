"""Who failed first: the first in causal order, which is neither the loudest nor the one that a wall clock of another host names.

Owns the judgement over the ends of one attempt's ranks. A rank that suffers because a peer is gone is a victim, however early it spoke: with a slow
teardown on the culprit every victim speaks before it. Times are compared on one node only. Pure.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from torch_watchdog_proto.lost_peers import PEER_IS_GONE

__all__ = [
    "ASKED_FOR_S",
    "ASKED_TO_END",
    "SAME_FAILURE_NS",
    "FirstFailure",
    "RankEnd",
    "blames_a_peer",
    "died_of_the_asking",
    "first_failure",
    "gave_up",
    "is_of_device",
    "is_no_failure_of_its_own",
    "raised_its_own",
]

Role: TypeAlias = Literal["own", "peer", "asked", "finished", "leaving"]

# Python's own sockets, and whatever a loader's worker does: a server of data that is away. What couples ranks raises errors of torch's.
_OF_NO_PEER = re.compile(
    r"(Connection(Reset|Refused|Aborted)?|BrokenPipe|Timeout|OS)Error\b|.*(DataLoader worker \(pid|\(in \w+ worker process)"
)
# Words that nothing but what couples ranks has: a script that raises these by itself may hand on what it has met before.
_OF_RANKS = re.compile(r"gloo/|\bc10d\b|NCCL|ProcessGroup|TCPStore|Dist\w+Error|Barrier|communicator|collective|all_?reduce", re.IGNORECASE)
# The same of "rank" only where another of the job is meant: a matrix has a rank, and many a script begins its messages with its own.
_ANOTHER_RANK = re.compile(
    r"\b(?:for|from|to|lost|reach|other|another|all)(?: \w+)? ranks?\b(?: (?P<awaited>\d+))?|"
    r"(?<!of )\brank (?P<subject>\d+) (?:did|does|has|is|was|never|died|timed out|failed|left|closed|ended)\b",
    re.IGNORECASE,
)
# What a call of a store raises; where the rank tells that it raised this by itself, the store was none of the job's.
_OF_A_STORE = re.compile(r"Dist(Network|Store)Error\b")
_GAVE_UP = re.compile(r"tim(ed?|ing)[ -]?out", re.IGNORECASE)
_OF_DEVICE = re.compile(r"Assertion `.*` failed\.|CUDA error")
_BY_DEVICE = re.compile(r"CUDA|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|NCCL|Assertion `")
# What native code prints as it takes its threads down with the process, as gloo does now and then where its groups were not destroyed.
_TORN_DOWN = frozenset({"terminate called without an active exception"})
ASKED_TO_END = frozenset({signals.SIGTERM, signals.SIGINT, signals.SIGHUP})
ASKED_FOR_S = 60.0  # an end so soon after the launch was asked for it is of that: launchers wait half of it before they kill
# gloo's end of a process whose collective is not the one that another rank has called.
_OTHER_SIZE = re.compile(r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes")
_SAME_MOMENT_NS = 1_000_000
_SEEN_LATE_NS = 3_000_000_000  # the end of a process that had gone by then: a dump of its memory, a GPU to be let go
_KILL_SEEN_LATE_NS = 500_000_000  # the same on a busy machine, where nobody saw it go
_EXIT_SEEN_LATE_NS = 15_000_000  # of one that ends by itself: over another's error it may do so as soon
# No script answers another's failure by these.
_NO_REACTION = frozenset({signals.SIGKILL, signals.SIGSEGV, signals.SIGBUS, signals.SIGILL, signals.SIGFPE})
SAME_FAILURE_NS = 50_000_000  # an exception is noticed once it has left the training, on a busy machine so much later than it was raised


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """What is known of how one rank ended, or of why it will.

    `text` is the exception that was raised first of its chain, `raised_ns` when its node's clock showed that; `ended_ns` when its process was seen to
    end, `order` in which order of its node's events. `log`: telling lines of what it printed. `step`: the step it was in, or `between` two steps
    the next; `on_device`: the one that its GPU was in as it ended, Python being ahead. `finished`: it ended well; `said_end`: its script was over, by its
    own word. `bundle`, `fetching` and `by_itself`: as in Failed. `hung`: why it is held for one that makes no progress, `desync` where it waits in
    a collective of its own. `late`: why it had not come to where others waited for it, where that was known before a signal ended it. `told`: of
    another's failure, while it was there: before any sign of its own. `behind`: the processes that had gone without a word before its exception was heard of.
    """

    rank: int
    node: str
    pid: int
    order: int = 0
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None
    text: str = ""
    where: str = ""
    log: str = ""
    raised_ns: int = 0
    ended_ns: int = 0
    hung: str = ""
    late: str = ""
    desync: bool = False
    between: bool = False
    finished: bool = False
    said_end: bool = False
    on_device: int | None = None
    bundle: str = ""
    fetching: str = ""
    by_itself: bool = False
    told: bool = False
    behind: frozenset[int] = frozenset()

    @property
    def failed_by_itself(self) -> bool:
        """Whether, by where it was raised, its exception is no word of a lost peer, whatever it says."""
        return self.by_itself and (self.is_of_a_store or not (_OF_RANKS.search(self.text) or _names_another(self.rank, self.text)))

    @property
    def is_of_a_store(self) -> bool:
        """Whether a store that is none of the job's raised, at the other end of which another rank may have been all the same."""
        return self.by_itself and _OF_A_STORE.match(self.text) is not None

    @property
    def may_follow(self) -> bool:
        """Whether what it raised is its own and yet what a script does, or its own store meets, after another rank is gone."""
        return not self.hung and (self.is_of_a_store or self.text.startswith("SystemExit"))

    @property
    def died_without_a_word(self) -> bool:
        """Whether all that is known of it is that its process ended, and when that was seen from outside; not as it was told to."""
        return bool(self.ended_ns) and not (self.raised_ns or self.hung or self.told or self.signal in ASKED_TO_END)

    @property
    def is_victim(self) -> bool:
        """Whether its exception tells only that it lost another rank."""
        return not self.failed_by_itself and blames_a_peer(self.text)

    @property
    def lost_a_peer(self) -> bool:
        """Whether its exception or what native code has printed tells so."""
        return not self.failed_by_itself and blames_a_peer(f"{self.text}\n{self.log}")

    @property
    def gave_up(self) -> bool:
        """Whether it has waited for another rank for as long as it may."""
        return not self.failed_by_itself and gave_up(f"{self.text}\n{self.log}")

    @property
    def waited_for_another(self) -> bool:
        """Whether its exception tells that it waited for another rank, until it gave up or its connection to a peer broke."""
        return self.is_victim or (not self.failed_by_itself and gave_up(self.text))

    @property
    def died_of_its_device(self) -> bool:
        """Whether native code ended the process for what its GPU had met, before Python could tell more than a note of it."""
        return self.on_device is not None and self.signal is not None and not self.raised_ns and bool(_OF_DEVICE.search(self.log))

    @property
    def got_another_size(self) -> bool:
        """Whether gloo ended the process over what another rank had sent, which need not be the one in the wrong call."""
        return self.signal == signals.SIGABRT and not self.text and _OTHER_SIZE.search(self.log) is not None

    @property
    def torn_down(self) -> bool:
        """Whether native code ended the process after its script was over, with no other word of why."""
        by_signal = self.signal is not None and self.signal not in ASKED_TO_END
        return by_signal and self.said_end and not self.text and _TORN_DOWN.issuperset(self.log.splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """`culprits` has two ranks or more only where nothing tells which of them was first. `desync`: it ended well, with steps left to the others;
    `skipped`: it left out a batch on its own, in the step that is named. `besides`: of the victims, those that raised something of their own later.
    `over`: each of those that failed had told its end before.
    `sizes`: gloo ended a process over the size of what it got; the others' calls then, in words. `stray`: the culprits' were their first such."""

    culprits: tuple[RankEnd, ...]
    victims: tuple[int, ...]
    desync: bool = False
    skipped: bool = False
    besides: tuple[RankEnd, ...] = ()
    sizes: str | None = None
    stray: bool = False
    over: bool = False


def blames_a_peer(text: str) -> bool:
    """Whether these are the words of a rank that only lost its connection to another; not to a worker of its own loader, or to a server."""
    return PEER_IS_GONE.search(text) is not None and _OF_NO_PEER.match(text) is None


def _names_another(rank: int, text: str) -> bool:
    numbers = (found["awaited"] or found["subject"] for found in _ANOTHER_RANK.finditer(text))
    return any(number is None or int(number) != rank for number in numbers)


def is_of_device(end: RankEnd) -> bool:
    """Whether the rank ended by what its GPU had met, behind which Python may be by many steps; by what it says, or without a word of its own."""
    return not end.text or _BY_DEVICE.search(f"{end.text}\n{end.log}") is not None


def died_of_the_asking(end: RankEnd) -> bool:
    """Whether it was a signal that asks for the end, or Python's word for it, that ended the rank."""
    return end.signal in ASKED_TO_END or end.text.startswith("KeyboardInterrupt")


def is_no_failure_of_its_own(end: RankEnd) -> bool:
    """Whether a rank may have come to this end because the launch was asked for it: by the signal, or by what that did to its workers and peers."""
    if end.text and not end.text.startswith("KeyboardInterrupt"):
        return PEER_IS_GONE.search(end.text) is not None or "DataLoader worker" in end.text
    return end.signal in (None, signals.SIGKILL, signals.SIGQUIT, *ASKED_TO_END) or blames_a_peer(end.log)


def gave_up(text: str) -> bool:
    """Whether these are the words of a rank that has waited for another for as long as it may."""
    return _GAVE_UP.search(text) is not None


def first_failure(
    ends: Sequence[RankEnd], skipped: Mapping[int, int] = MappingProxyType({}), late: Sequence[RankEnd] = ()
) -> FirstFailure | None:
    """None where no rank has failed. `skipped`: ranks that left a batch out on their own, and the step of it; one of them may not have ended yet.
    `late`: ranks that did not come to where the others waited for them, if nothing else explains that these gave up."""
    roles = {end: _role(end) for end in ends}
    failed = [end for end in ends if roles[end] != "finished"]
    if not failed:
        return None
    own = _without_followers([end for end in failed if roles[end] == "own"])
    behind = None if own else _out_of_step(ends, skipped, {end.rank for end in failed if roles[end] == "peer"})
    if behind is not None:
        return behind
    lost = own or [end for end in failed if roles[end] == "peer"]
    early = _finished_early(roles, lost) if all(end.may_follow for end in own) else []
    own = [] if early else own or [end for end in failed if roles[end] == "leaving"]
    if own:
        culprits = _earliest(own)
    elif early or late:
        culprits = early or list(late)
    else:
        asked = [end for end in failed if roles[end] == "asked"]
        # One that trained on tells more than one that was done, one that raised these words by itself more than those that met them.
        culprits = _earliest([end for end in asked if not end.said_end] or asked or [end for end in failed if end.by_itself] or failed)
    return FirstFailure(
        culprits=tuple(sorted(culprits, key=lambda end: end.rank)),
        victims=tuple(sorted({end.rank for end in failed} - {end.rank for end in culprits})),
        desync=bool(early),
        over=all(end.said_end for end in failed),
        besides=tuple(end for end in sorted(failed, key=lambda end: end.rank) if end not in culprits and _is_beside(end, culprits)),
    )


def _is_beside(end: RankEnd, culprits: Sequence[RankEnd]) -> bool:
    """Whether its error is to be looked at, too: not where the script may have made it of what a culprit's end did to it."""
    follows = any(one.node == end.node and one.died_without_a_word and _had_gone(one, end) for one in culprits)
    return raised_its_own(end) and not (end.may_follow or follows)


def raised_its_own(end: RankEnd) -> bool:
    """Whether the rank raised something that follows from nothing that another did, as far as its words tell."""
    return bool(end.raised_ns and end.text) and not end.hung and not end.is_victim and not end.text.startswith("KeyboardInterrupt")


def _out_of_step(ends: Sequence[RankEnd], skipped: Mapping[int, int], waiting: set[int]) -> FirstFailure | None:
    """All that failed only waited for others, and a rank had skipped a batch: the first that did is why."""
    # Nobody runs the backward of the step that he ends in, well or by a failure, which may be known before the end's own step is.
    left = {end.rank: end.step for end in ends if end.step is not None}
    step, rank = min(((step, rank) for rank, step in skipped.items() if rank not in left or step < left[rank]), default=(0, -1))
    victims = tuple(sorted(waiting - {rank}))
    if rank < 0 or not victims:
        return None
    known = next((end for end in ends if end.rank == rank), RankEnd(rank=rank, node="", pid=0))
    return FirstFailure(culprits=(replace(known, step=step),), victims=victims, skipped=True)


def _role(end: RankEnd) -> Role:
    if end.hung:
        return "own"
    if end.text:
        return "peer" if end.is_victim else "own"
    if end.finished:
        return "finished"
    if end.signal in ASKED_TO_END:
        return "asked"
    if end.torn_down:
        return "leaving"
    # Native code that lost its peer ends the process without an exception of Python: what it printed tells.
    return "peer" if end.signal in (None, signals.SIGABRT) and blames_a_peer(end.log) else "own"


def _finished_early(roles: dict[RankEnd, Role], lost: Sequence[RankEnd]) -> list[RankEnd]:
    """A rank whose script was over while those who lost another still had steps to do: their connections broke of that."""
    done = [end for end in roles if roles[end] in ("finished", "leaving")]
    early = [end for end in done if any(_was_over_before(end, other) for other in lost)]
    return _earliest(early) if early else []


def _was_over_before(one: RankEnd, other: RankEnd) -> bool:
    """Whether one had no step left in the middle of which the other lost it. A script may end well over what another rank's exit did to it."""
    if other.between or one.step is None or other.step is None or one.step > other.step:
        return False
    return not other.may_follow or (one.node == other.node and not one.told and one.ended_ns - other.raised_ns < _EXIT_SEEN_LATE_NS)


def _without_followers(own: list[RankEnd]) -> list[RankEnd]:
    """Of several that failed by themselves, not those that may have done so because another was gone."""
    roots = [end for end in own if not end.may_follow and (end.hung or not end.told)]
    return [end for end in own if not (end.may_follow and any(_may_explain(root, end) for root in roots))]


def _may_explain(root: RankEnd, end: RankEnd) -> bool:
    if root.node == end.node:
        return root.died_without_a_word and _had_gone(root, end)
    if root.step is None or end.step is None:
        return False
    return root.step < end.step or (root.step == end.step and (end.is_of_a_store or root.signal in _NO_REACTION))


def _earliest(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Those before which no other came, as far as anything tells."""
    return [end for end in ends if not any(_is_before(other, end) for other in ends if other is not end)] or list(ends)


def _is_before(one: RankEnd, other: RankEnd) -> bool:
    if one.hung and other.hung:
        return False  # they were found together, and what they raised comes of their being freed
    if one.node != other.node:
        # Clocks of two hosts are not compared. Who was in an earlier step had not done its part of the later one.
        return one.step is not None and other.step is not None and one.step < other.step
    if one.told != other.told and not (one.raised_ns or other.raised_ns):
        return other.told
    if one.died_without_a_word and other.raised_ns:
        return _had_gone(one, other)
    if other.died_without_a_word and one.raised_ns:
        return not _had_gone(other, one)
    if _is_the_same(one, other) and abs(one.raised_ns - other.raised_ns) < SAME_FAILURE_NS:
        return False
    if one.raised_ns and other.raised_ns:
        return (one.raised_ns, one.rank) < (other.raised_ns, other.rank)
    first, second = one.raised_ns or one.ended_ns, other.raised_ns or other.ended_ns
    if first and second:
        return second - first >= _SAME_MOMENT_NS
    return one.order < other.order


def _had_gone(silent: RankEnd, raised: RankEnd) -> bool:
    """Whether a process that died without a word did so before the other's exception: its connections break before its end is seen, and a script may raise
    what it will over that. It may also end without a word over another's error, which is told only once the script has torn down; but by no such signal.
    An exit that a script asks for tells less than that."""
    late_ns, had_gone = silent.ended_ns - raised.raised_ns, silent.pid in raised.behind
    if silent.signal in _NO_REACTION:
        return late_ns < (_SEEN_LATE_NS if had_gone else _KILL_SEEN_LATE_NS)
    return late_ns < (SAME_FAILURE_NS if had_gone and raised.may_follow else _EXIT_SEEN_LATE_NS)


def _is_the_same(one: RankEnd, other: RankEnd) -> bool:
    """One failure on two ranks: the same words, of the same line, in the same step. Nothing tells then which was first, and nobody asks."""
    return bool(one.where) and (one.text, one.where, one.step, one.between) == (other.text, other.where, other.step, other.between)
