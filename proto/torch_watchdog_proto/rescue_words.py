"""The words of a rescue: a rank has failed, the others are freed, one whole copy of the state is saved, the launcher is told last.

Owns the dataclasses and what their numbers mean; `messages.py` takes them into its unions, `stop/rescue.py` is the protocol. Moments are nanoseconds
since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Failed", "Free", "Freed", "GroupCalls", "Holds", "Look", "Looked", "Release", "Rescue", "is_unusual"]

Holds: TypeAlias = Literal["all", "part", "nothing"]  # of the training state, whole and untouched by a half step

# Rank -> daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """How many collectives a rank has called on a process group. `newest`: the last of them in words, "" where C++ made it (the gradients' of a backward);
    `alike` is the same number wherever another rank's call would fit it, 0 where nothing is known of it; `times`: how often this rank had made such a
    call on the group before."""

    group: str
    made: int
    newest: str = ""
    alike: int = 0
    times: int = 0


def is_unusual(times: int, others: int) -> bool:
    """Of two calls in one place that do not fit: whether the one that its rank had made `times` before is the stranger to the loop, and not the other."""
    return 2 * times < others


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception leaves the training of this rank. `text` is the one that was raised first of its chain, `chain` all of them in that order.

    `step`: the one it was in, or `between` two steps the next. `calls`: one a process group. `bundle`: the batch that it failed on, in the run directory;
    `fetching`: the batch, in words, that was being made instead. `by_itself`: it was raised outside of torch, by no error of torch's but that
    of a store which is none of the job's, so that words as "connection reset by peer" need be of no other rank. The rank waits for a word before it
    ends: `Free` where it may have something to save, `Leave` where not.
    """

    rank: int
    step: int
    updates_applied: int
    time_ns: int
    text: str
    chain: tuple[str, ...] = ()
    where: str = ""  # file:line of the user's code that the first one came through
    between: bool = False
    calls: tuple[GroupCalls, ...] = ()
    bundle: str = ""
    fetching: str = ""
    by_itself: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """No update is applied on this rank from here on. `why` it does not hold all; `newest`: the newest good checkpoint that it knows.

    `parts`: where it holds a part, into how many the whole is split, of which it holds number `part`; 0 where its part fits no other's.
    """

    rank: int
    generation: int
    updates_applied: int
    holds: Holds
    why: str = ""
    newest: str = ""
    part: int = 0
    parts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Where the training thread of this rank is. `waits`: in a collective, or for the device that runs one; `timeout_s`: after which its groups give up;
    `where`: file:line of the user's code; `step` and `between` as in Failed; `handles`: the exception, in words, that it is in an `except` or a `finally` of.
    """

    rank: int
    generation: int
    waits: bool
    stack: str
    timeout_s: float
    calls: tuple[GroupCalls, ...] = ()
    step: int = 0
    between: bool = False
    where: str = ""
    handles: str = ""


# Daemon -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The job has come to a standstill: say where you are. The node adds the state of the process, which may be unable to answer, and what the workers of
    its loaders do. `generation` 0: only the node is asked, for these; the rank hears nothing."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Another rank has failed: apply no update any more, come back from whatever is waited for, say what you hold, and wait for a word."""

    generation: int
    reason: str = ""
    exit_code: int = 1
    grace_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """To the rank that saves for all, or each of those that do together: write now what you hold."""

    generation: int
    path: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The rank may end, and its node lets its keeper tell the launcher. `kill`: it does not end by itself."""

    generation: int
    kill: bool = False
