"""Where each loader stands: epoch, batches handed over, and the random state that its pass began with, for checkpoints and for resuming.

Owns one track for each loader, weakly, how far each pass over it has come, and which of the passes the training follows. A pass is an epoch once the training
has made something of its batches: one that looks at a batch, or evaluates on the training's data, counts for nothing. Knows nothing of how batches are made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_watchdog_agent.checkpoint.position import START, Ending, LoaderPosition, Place

__all__ = [
    "Stand",
    "Track",
    "asks_first",
    "begin",
    "ended",
    "follow",
    "is_current",
    "is_followed",
    "is_known",
    "left",
    "over",
    "track_of",
    "training_place",
    "turned_from",
    "turns_to",
    "turns_to_evaluation",
    "used",
    "was_left_here",
]


@dataclass(slots=True)
class Track:
    """One loader. `dataset`: its data set's name in a quarantine file; `generators`: its own.

    `epoch`: how many of its passes the training has used; `begun` numbers all. `resume`: where the next one that it uses goes on, and `again` what is to be
    done there; `missed`, where the training uses one that had begun before and does not go on there. `in_turn`: between batches of one of its passes the
    training trains on those of another.
    """

    dataset: str = "?"
    epoch: int = 0
    begun: int = 0
    resume: LoaderPosition | None = None
    again: Callable[[], None] | None = None
    missed: Callable[[], None] | None = None
    of_another: Callable[[], None] | None = None
    looked_for_tokenizer: bool = False
    in_turn: bool = False
    generators: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class Stand:
    """How far one pass has come: so many `batches`, those before it was resumed included; so many were `taken` with gradients.

    `is_used`: something was trained on them. `outer`: the pass that was followed before this one.
    """

    track: Track = field(default_factory=Track)
    number: int = 0
    epoch: int = 0
    batches: int = 0
    taken: int = 0
    rng_at_iter: Any = None
    count_at_iter: int | None = None
    sampler_epoch: int | None = None
    outer: Stand | None = None
    is_resumed: bool = False
    is_used: bool = False
    is_over: bool = False
    ending: Ending = field(default_factory=Ending)


_tracks: weakref.WeakKeyDictionary[Any, Track] = weakref.WeakKeyDictionary()
followed: Stand | None = None  # of the pass that the last training batch came from
evaluates_first = False


def track_of(loader: Any) -> Track:
    try:
        return _tracks.setdefault(loader, Track())
    except TypeError:  # a loader that cannot be a key has no position to come back to
        return Track()


def begin(track: Track, rng_at_iter: Any, count_at_iter: int | None, sampler_epoch: int | None) -> Stand:
    """A new pass. Its sampler was told `sampler_epoch`: where that is the one behind what it had been told for the pass of the run that was saved, the loop has
    done with that one. Farther behind it counts no epochs: a script may give it its steps."""
    before = None if track.resume is None else track.resume.sampler_epoch
    if before is not None and sampler_epoch == before + 1:
        _is_past(track)
    track.begun += 1
    return Stand(
        track, number=track.begun, epoch=track.epoch, rng_at_iter=rng_at_iter, count_at_iter=count_at_iter, sampler_epoch=sampler_epoch
    )  # fmt: skip


def is_known(loader: Any) -> bool:
    return loader in _tracks


def follow(stand: Stand) -> None:
    """A training batch has come from this pass."""
    global followed
    stand.taken += 1
    before = followed
    if before is stand:
        return
    if before is not None and stand.taken > 1 and before.is_used:
        before.track.in_turn = stand.track.in_turn = True
    elif before is not None and stand.taken == 1 and not before.is_over:
        stand.outer = before
    followed = stand


def asks_first(stand: Stand) -> None:
    """The training asks this pass for its first batch, and its loop had left the one before it early: what stands between them has been done. That may be
    over another loader: Lightning can make a new one for each epoch."""
    global followed
    if followed is not None and followed is not stand and not stand.batches:
        followed = stand


def is_followed(stand: Stand) -> bool:
    """Whether the training follows a pass over the same loader."""
    return followed is not None and followed.track is stand.track


def turned_from(stand: Stand | None) -> bool:
    """Whether this pass is over, and the training has made nothing of it and turned to another: an evaluation that looks like a training."""
    return stand is not None and stand.is_over and not stand.is_used and followed is not stand


def is_current(stand: Stand) -> bool:
    """Whether it follows this very pass."""
    return followed is stand


def used() -> None:
    """A backward or an update: of what was handed over last."""
    if followed is not None:
        followed.ending.used = followed.batches
        if not followed.is_used:
            _uses(followed)


def turns_to(stand: Stand) -> bool:
    """The first batch of this pass is asked for, whatever it is for. The followed one, if it was let go by then, was so by its loop, perhaps with batches that
    it had no use for (behind a limit, or an incomplete one), for an exception that unwinds one comes to no other: a run that goes on does the same. Returns
    whether it ended early."""
    at = followed
    if at is None or at is stand or not (at.is_over and at.is_used):
        return False
    at.ending.over_at = at.batches
    if at.track is stand.track and not at.ending.is_whole and at.ending.used < at.batches:
        stand.ending.usual = at.ending.used, at.batches
    return not at.ending.is_whole


def turns_to_evaluation() -> Literal[True]:
    """A batch of an evaluation is asked for. Where the run that was saved had been done with its pass, just that one's next pass is another epoch: what stands
    between them has come, unless that is an evaluation before all training."""
    global evaluates_first
    evaluates_first |= followed is None
    for track in _tracks.values():
        resume = track.resume
        if resume is not None and resume.over_at == resume.batches and not resume.evaluates_first:
            _is_past(track)
    return True


def was_left_here(stand: Stand) -> bool:
    """Whether the run that was saved had taken no batch of this pass behind the place at which it goes on. Of one batch each: a loop that begins a pass for
    every batch, which must get one."""
    resume = stand.track.resume
    return stand.is_resumed and not stand.taken and resume is not None and 1 < resume.batches == resume.over_at


def _is_past(track: Track) -> None:
    track.epoch, track.resume = track.epoch + 1, None


def _uses(stand: Stand) -> None:
    stand.is_used, stand.outer = True, None
    if stand.track.resume is not None and not stand.is_resumed and stand.track.missed is not None:
        stand.track.missed()
    stand.track.epoch, stand.track.resume = max(stand.track.epoch, stand.epoch + 1), None


def ended(stand: Stand) -> None:
    """The pass has given all its batches; one that was resumed at its end gives none, and is an epoch all the same."""
    stand.ending.is_whole = True
    if stand.is_resumed and not stand.taken:
        _uses(stand)
    left(stand)


def left(stand: Stand) -> None:
    """No batch comes of this pass any more. One that was resumed is an epoch, too, where its loop has done with it just as in the run that was saved: without
    training on what there was."""
    resume, stand.ending.left_at = stand.track.resume, stand.batches
    over_at = None if resume is None else resume.over_at
    if stand.is_resumed and not stand.is_over and over_at is not None and over_at <= stand.batches:
        _uses(stand)
    over(stand)


def over(stand: Stand) -> None:
    """No batch comes of this pass any more. Where nothing was trained on it (an evaluation that looks like a training) the one around it goes on."""
    global followed
    outer, stand.is_over, stand.outer = stand.outer, True, None
    if stand is followed and outer is not None and not outer.is_over:
        followed = outer


def training_place(*, again: int = 0) -> Place:
    """Where the training's loader stands, where no loader was seen: at the very start. `again`: so many of its last batches are to come again."""
    at = followed
    if at is None:
        return START
    batches = max(0, at.batches - again)
    return Place(at.epoch, batches, at.rng_at_iter, at.track.in_turn, at.count_at_iter, at.ending, at.sampler_epoch, evaluates_first)
