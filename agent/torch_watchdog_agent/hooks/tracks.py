"""Where each loader stands: epoch, batches handed over, and the random state that its pass began with, for checkpoints and for resuming.

Owns one track for each loader, weakly, and which of them the training follows. Knows nothing of how batches are made.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch_watchdog_agent.checkpoint.position import START, LoaderPosition, Place

__all__ = ["Track", "follow", "is_followed", "is_known", "track_of", "training_place", "training_position"]


@dataclass(slots=True)
class Track:
    """Where one loader stands. `epoch` counts its passes from 0. `dataset`: its data set's name in a quarantine file."""

    dataset: str = "?"
    epoch: int = -1
    batches: int = 0
    rng_at_iter: Any = None
    resume: LoaderPosition | None = None
    looked_for_tokenizer: bool = False


_tracks: weakref.WeakKeyDictionary[Any, Track] = weakref.WeakKeyDictionary()
_training: Track | None = None  # of the loader that the last training batch came from


def track_of(loader: Any) -> Track:
    try:
        return _tracks.setdefault(loader, Track())
    except TypeError:  # a loader that cannot be a key has no position to come back to
        return Track()


def is_known(loader: Any) -> bool:
    return loader in _tracks


def follow(track: Track) -> None:
    """A training batch has come from this loader."""
    global _training
    _training = track


def is_followed(track: Track) -> bool:
    return track is _training


def training_place(*, again: int = 0) -> Place:
    """Where the training's loader stands, where no loader was seen: at the very start. `again`: so many of its last batches are to come again."""
    track = _training
    return START if track is None else Place(track.epoch, max(0, track.batches - again), track.rng_at_iter)


def training_position() -> LoaderPosition:
    """The same with the random state of this moment."""
    from torch_watchdog_agent.checkpoint.rng import RngState

    return training_place().with_generators(RngState.capture())
