"""memory.pressure: the GPU's memory is about to be full: it grows step by step, or the allocator has to empty its cache to go on.

Only what is allocated when a step ends counts for the trend: what a step needs in between follows its batch. The step at which the limit is met is told as a
range, from the spread of the growth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import MEMORY, RankStream, View, median

__all__ = ["RULE", "Settings"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Growth: nearly `steady` of 48 readings above the one before, `grown` of the GPU in all, and full within `within` times the steps that the readings span.

    Retries: `retries` within the readings.
    """

    hold_s: float = 5.0
    steady: float = 0.9
    grown: float = 0.02
    within: float = 20.0
    retries: int = 3


ABOUT = About(
    name="memory_pressure",
    kind="memory.pressure",
    watches="the allocator's figures of each rank, and its GPU's memory by NVML",
    says="rank 1, step 4200: 61.2 of 79.6 GiB are allocated when a step ends, 11.4 MiB more each step: full in step 5750..5990 at this rate",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for stream in view.ranks.values():
        if stream.allocated.count < 2:
            continue
        yield from _retrying(stream, settings)
        gpu = view.gpus.get(stream.gpu)
        if gpu is not None and stream.allocated.is_full:
            yield from _growing(stream, gpu.newest.memory_used_bytes, gpu.newest.memory_total_bytes, settings)


def _retrying(stream: RankStream, settings: Settings) -> Iterable[Sign]:
    retries = stream.retries.values()
    count = int(retries[-1] - retries[0])
    if count < settings.retries:
        return
    steps = int(stream.memory_steps.newest - stream.memory_steps.values()[0])
    reserved, allocated = stream.reserved.newest, stream.allocated.newest
    yield Sign(
        rank=stream.rank,
        step=stream.step,
        subject="retries",
        said=f"rank {stream.rank}, step {stream.step}: the allocator had to empty its cache and try again {count} times within {steps} steps "
        f"(limit {settings.retries}); {_gib(reserved)} GiB are reserved, of which {_gib(reserved - allocated)} hold nothing between steps",
        cause="the GPU's memory is full: each retry waits for the device, and the next may be an out-of-memory error",
        fix="smaller batches or shorter sequences; where much is reserved and empty, memory is fragmented: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _growing(stream: RankStream, used: int, total: int, settings: Settings) -> Iterable[Sign]:
    steps, values = stream.memory_steps.values(), stream.allocated.values()
    span, grown = steps[-1] - steps[0], values[-1] - values[0]
    rises = sum(after > before for before, after in itertools.pairwise(values))
    if span <= 0 or grown < settings.grown * total or rises < settings.steady * (len(values) - 1):
        return
    rates = _rates(steps, values)
    slow, fast = rates[len(rates) // 4], rates[3 * len(rates) // 4]
    # What is reserved and empty is used first; the rest of the card is what others leave.
    free = max(0, total - used) + max(0.0, stream.reserved.newest - values[-1])
    if slow <= 0 or free / median(rates) > settings.within * span:
        return
    now = int(steps[-1])
    yield Sign(
        rank=stream.rank,
        step=stream.step,
        subject="growth",
        said=f"rank {stream.rank}, step {now}: {_gib(values[-1])} GiB are allocated when a step ends, {median(rates) / 2**20:.1f} MiB more each step: "
        f"{_gib(total)} GiB are full in step {now + int(free / fast)}..{now + int(free / slow)} at this rate",
        cause="something is kept from step to step: losses with their graphs in a list, outputs of an evaluation, a growing cache",
        fix="keep numbers, not tensors (.item(), .detach()), and look at what is appended to in the loop",
    )


def _rates(steps: list[float], values: list[float]) -> list[float]:
    """Bytes a step, by every pair half a window apart: the median of these is hard to mislead."""
    half = MEMORY // 2
    pairs = zip(steps, values, steps[half:], values[half:], strict=False)
    return sorted((later - before) / (end - begin) for begin, before, end, later in pairs if end > begin)


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f}"


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
