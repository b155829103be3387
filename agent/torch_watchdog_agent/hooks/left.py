"""A loop that leaves its loader before the end (`break`) lets go of the loader's iterator: from then on its updates have no batch.

Owns which iterators that is said of. It must come at the same place of the program on every rank, or ranks would number their updates differently: so it is not
said of what only the garbage collector finds, whenever it looks.
"""

from __future__ import annotations

import gc
import sys
from opcode import opmap
from types import FrameType

from torch_watchdog_agent.hooks import tracks
from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.tracks import Stand, is_followed

__all__ = ["is_left_here", "left", "watch_collections"]

_NOT_THE_LOOP = (__name__.partition(".")[0], "torch.utils.data")  # what may stand between a loop and its batch
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


@guarded("loader")
def is_left_here(stand: Stand) -> bool:
    """Whether the loop of the run that was saved had left this pass behind the place at which it goes on, by a `break` behind its last step, and a `for` asks
    for more of it here: whatever comes of that is not to be trained on."""
    return tracks.was_left_here(stand) and _asked_by_a_for(sys._getframe())


def _asked_by_a_for(frame: FrameType | None) -> bool:
    """A `next()` of the script's own may be no loop, and know no end."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THE_LOOP):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == opmap["FOR_ITER"]
