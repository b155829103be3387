"""Where each loader stands: epoch, batches handed over, and the random state that its pass began with, for checkpoints and for resuming.

Owns one track for each loader, weakly, and which of them the training follows. Knows nothing of how batches are made.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch_watchdog_agent.checkpoint.position import LoaderPosition

__all__ = ["Track", "follow", "is_followed", "is_known", "track_of", "training_position"]


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


def training_position() -> LoaderPosition:
    """Where the training's loader stands, with the random state of this moment. Where no loader was seen: at the very start."""
    from torch_watchdog_agent.checkpoint.rng import RngState

    track = _training or Track(epoch=0)
    return LoaderPosition(epoch=track.epoch, batches=track.batches, rng_at_iter=track.rng_at_iter, rng=RngState.capture())
