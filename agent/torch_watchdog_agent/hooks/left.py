"""A loop that leaves its loader before the end (`break`) lets go of the loader's iterator: from then on its updates have no batch.

Owns which iterators that is said of. It must come at the same place of the program on every rank, or ranks would number their updates differently: so it is not
said of what only the garbage collector finds, whenever it looks.
"""

from __future__ import annotations

import gc

from torch_watchdog_agent.hooks import tracks
from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.tracks import Stand, is_followed

__all__ = ["left", "watch_collections"]

_collecting = False


def watch_collections() -> None:
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def _collected(phase: str, _: object) -> None:
    global _collecting
    _collecting = phase == "start"


def left(stand: Stand) -> None:
    """The iterator of this pass is gone, after its end or before it."""
    is_newest = stand.number == stand.track.begun and is_followed(stand)
    tracks.left(stand)
    if is_newest and not _collecting:
        _tell(stand)


@guarded("loader's end")
def _tell(stand: Stand) -> None:
    import torch

    here = rank()
    if here is not None and torch.is_grad_enabled():
        here.loop.pass_left(batches=stand.batches)
        if stand.batches > 1 and not (stand.ending.is_whole or here.loop.is_begun) and tracks.is_current(stand):
            here.window.pass_left(updates=here.loop.updates_applied, place=here.place())
