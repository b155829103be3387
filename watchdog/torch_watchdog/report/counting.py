"""Steps and updates in words: steps count from 0 in each launch, updates go on from the checkpoint that it resumed, and a step may make none.

Pure: tracks in, numbers and words out. Every view asks here, so that all say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_watchdog.phrases import steps_told
from torch_watchdog.report.steps import RankTrack

__all__ = ["Counted", "counted", "told", "updates_at", "updates_beside"]


class Counted(NamedTuple):
    """Of one attempt: as many steps as its furthest rank has; `began` and `updates` are None where nobody recorded them."""

    steps: int
    began: int | None
    updates: int | None


def counted(tracks: Sequence[RankTrack]) -> Counted:
    """Of the newest attempt among them."""
    newest = max((track.attempt for track in tracks), default=0)
    mine = [track for track in tracks if track.attempt == newest]
    return Counted(
        steps=max((max(track.time_ns) + 1 for track in mine if track.time_ns), default=0),
        began=next((track.began_at_update for track in mine if track.began_at_update is not None), None),
        updates=max((max(track.updates.values()) for track in mine if track.updates), default=None),
    )


def told(tracks: Sequence[RankTrack]) -> str:
    """`24 steps (23 updates)`, `36 steps (updates 24 to 59)`."""
    found = counted(tracks)
    several = len({track.attempt for track in tracks})
    words = steps_told(found.steps, began=found.began, updates=found.updates)
    return f"{words} in the newest of {several} attempts" if several > 1 else words


def updates_at(tracks: Sequence[RankTrack], step: int) -> int | None:
    """How many updates the model had when that step of the newest attempt began; of a step that never ended, too."""
    for track in reversed(tracks):
        before = track.updates_before
        if step in before:
            return before[step]
        if before and step > max(before):
            return track.updates[max(before)] + step - max(before) - 1
    return None


def updates_beside(tracks: Sequence[RankTrack], first: int, last: int) -> tuple[int, int] | None:
    """What an axis from step `first` to `last` says beside it: the updates before each, where those are known and other numbers."""
    ends = updates_at(tracks, first), updates_at(tracks, last)
    return None if ends[0] is None or ends[1] is None or ends == (first, last) else (ends[0], ends[1])
