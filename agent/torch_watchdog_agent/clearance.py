"""How far each rank of this node has handed over its batches: one word a rank, in shared memory.

On a GPU backward returns before its collectives have run, so a rank's Python would pass the gate of a step that another rank is still
holding. The gate therefore waits until every neighbour has been handed the same batch. That costs a healthy step nothing: the update that
is launched behind the gate cannot run on the GPU before those neighbours have done their part of the step's collectives. Knows no torch:
whether the device has finished the step is asked through a callable.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

from torch_watchdog_agent.neighbours import mapped

__all__ = ["Clearance"]

_WORD = struct.Struct("<Q")
_MICRO_BITS = 24
_POLL_S = 0.00005
_LONE_WINDOWS = 3  # so often may the device finish without a neighbour before that neighbour is taken for one of another loop


class Clearance:
    """The page of one attempt. Raises OSError where it cannot be made."""

    def __init__(self, directory: Path, *, attempt: int, local_rank: int, local_world_size: int) -> None:
        size = mmap.PAGESIZE * (1 + local_world_size * _WORD.size // mmap.PAGESIZE)
        self._page = mapped(directory / f"{attempt}.clearance", size)
        self._mine = local_rank * _WORD.size
        self._others = [rank * _WORD.size for rank in range(local_world_size) if rank != local_rank]
        self._lone: dict[int, int] = {}

    def handed_over(self, step: int, micro_step: int) -> None:
        """This rank goes on with batch `micro_step` of window `step`: it is clean, or was replaced by a clean copy."""
        _WORD.pack_into(self._page, self._mine, _packed(step, micro_step))

    def wait(
        self, step: int, micro_step: int, *, finished: Callable[[], bool], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Returns once every neighbour has been handed the same batch; or once the device has `finished` the step without them, or at the timeout."""
        wanted = _packed(step, micro_step)
        if not self._behind(wanted):
            return
        deadline = clock() + timeout_s
        while behind := self._behind(wanted):
            if finished():
                self._not_coupled(behind)
                return
            if clock() >= deadline:
                return
            time.sleep(_POLL_S)

    def _behind(self, wanted: int) -> list[int]:
        return [place for place in self._others if _WORD.unpack_from(self._page, place)[0] < wanted]

    def _not_coupled(self, places: list[int]) -> None:
        """The step's collectives did without these neighbours: they run a loop of their own, and are not waited for any more."""
        for place in places:
            self._lone[place] = self._lone.get(place, 0) + 1
            if self._lone[place] >= _LONE_WINDOWS:
                self._others.remove(place)


def _packed(step: int, micro_step: int) -> int:
    """-1: no batch of the window yet, or none at all."""
    return (step + 1) << _MICRO_BITS | min(micro_step + 1, (1 << _MICRO_BITS) - 1)
