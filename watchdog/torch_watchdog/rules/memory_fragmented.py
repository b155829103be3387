"""memory.pressure, by memory in pieces: the allocator holds much that no step has ever needed, and the GPU is nearly full.

A cache as large as the largest step is how the allocator works; what is beyond that is gaps between blocks, too small for what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import View

__all__ = ["RULE", "Settings"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where `pieces` of the GPU's memory are reserved beyond the most that was ever allocated, and less than `free` of it is left."""

    hold_s: float = 10.0
    pieces: float = share_of(0.2)
    free: float = share_of(0.1)


ABOUT = About(
    name="memory_fragmented",
    kind="memory.pressure",
    watches="what the allocator of each rank holds, against the most that a step has needed, and the GPU's memory by NVML",
    says="rank 1, step 4200: 74.0 GiB are reserved, of which no step has needed more than 50.0: 24.0 GiB lie in pieces (30 % of the GPU, limit 20 %)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    if not len(view.reserved.count):
        return  # no rank is on a GPU
    peaks = np.fmax.reduce(view.peaks.unordered(), axis=1)  # a loop may set its peak back
    beyond = view.reserved.newest() - peaks
    for row in np.flatnonzero((peaks > 0) & (beyond > 0)):
        gpu = view.gpus.get(view.gpu_of[row])
        if gpu is None or not gpu.newest.memory_total_bytes:
            continue
        total, used = gpu.newest.memory_total_bytes, gpu.newest.memory_used_bytes
        if beyond[row] >= settings.pieces * total and total - used <= settings.free * total:
            yield _sign(view, int(row), float(peaks[row]), float(beyond[row]), total, settings)


def _sign(view: View, row: int, peak: float, beyond: float, total: int, settings: Settings) -> Sign:
    rank, step = view.ranks[row], int(view.step[row])
    return Sign(
        rank=rank,
        step=step,
        said=f"rank {rank}, step {step}: {(peak + beyond) / _GIB:.1f} GiB are reserved, of which no step has needed more than {peak / _GIB:.1f}: "
        f"{beyond / _GIB:.1f} GiB lie in pieces ({100 * beyond / total:.0f} % of the GPU, limit {100 * settings.pieces:.0f} %)",
        cause="memory is fragmented: batches of many sizes leave gaps in which the next larger one finds no place, so that it fails although enough is free",
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; pad to a few sizes in place of each batch's own; begin with the largest batch",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_rank=True)
