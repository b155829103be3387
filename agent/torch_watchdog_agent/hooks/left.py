"""A loop that leaves its loader before the end (`break`) lets go of the loader's iterator: from then on its updates have no batch.

Owns which iterators that is said of. It must come at the same place of the program on every rank, or ranks would number their updates differently: so it is not
said of what only the garbage collector finds, whenever it looks.
"""

from __future__ import annotations

import gc
import sys

from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.tracks import Track, is_followed

__all__ = ["left", "watch_collections"]

_collecting = False


def watch_collections() -> None:
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def _collected(phase: str, _: object) -> None:
    global _collecting
    _collecting = phase == "start"


def left(track: Track, epoch: int) -> None:
    """The iterator that began `epoch` of this loader is gone, after its end or before it."""
    if not _collecting and epoch == track.epoch and is_followed(track) and not sys.is_finalizing():
        _tell(track)


@guarded("loader's end")
def _tell(track: Track) -> None:
    import torch

    here = rank()
    if here is not None and torch.is_grad_enabled():
        here.loop.pass_left(batches=track.batches)
