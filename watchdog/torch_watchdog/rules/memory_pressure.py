"""memory.pressure: the GPU's memory is about to be full: it grows step by step, or the allocator has to empty its cache to go on.

Only what is allocated when a step ends counts for the trend: what a step needs in between follows its batch. The step at which the limit is met is told as a
range that nine of ten such growths keep: from how unevenly it has grown so far, which is not known better by then, and goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, at_least, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import MEMORY, GpuStream, View
from torch_watchdog.rules.windows import Floats

__all__ = ["RULE", "Settings"]

_GIB = 1 << 30
_APART = 4  # readings: neighbours differ by what a reading catches, too, and one may say again what the one before said
_READ_AGAIN_S = 0.25  # so old may the newest reading be (agent/arriving.py)
_NINE_OF_TEN = 1.645  # standard deviations to each side
_MOST_TIMES = 4.0  # as many steps as at the rate so far: more than that is no forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Growth: nearly `steady` of 48 readings above the one 4 before, `grown` of the GPU in all, and full within `within` times the steps of the readings.

    Retries: `retries` within the readings.
    """

    hold_s: float = 5.0
    steady: float = share_of(0.9)
    grown: float = share_of(0.02)
    within: float = 20.0
    retries: int = at_least(1, 3)


ABOUT = About(
    name="memory_pressure",
    kind="memory.pressure",
    watches="the allocator's figures of each rank, and its GPU's memory by NVML",
    says="rank 1, step 4200: 61.2 GiB are allocated when a step ends, 11.4 MiB more each step: 79.6 GiB are full in step 5750..5990 at this rate",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    if not len(view.allocated.count):
        return  # no rank is on a GPU
    retries = view.retries.unordered()
    many = np.fmax.reduce(retries, axis=1) - np.fmin.reduce(retries, axis=1) >= settings.retries  # they only ever grow
    for row in np.flatnonzero(many):
        yield _retrying(view, int(row), settings)
    rows = view.allocated.full()
    values = view.allocated.ordered(rows)
    rises = np.count_nonzero(values[:, _APART:] > values[:, :-_APART], axis=1)
    for row in rows[(rises >= settings.steady * (MEMORY - _APART)) & (values[:, -1] > values[:, 0])]:
        gpu = view.gpus.get(view.gpu_of[row])
        if gpu is not None:
            yield from _growing(view, int(row), gpu, settings)


def _retrying(view: View, row: int, settings: Settings) -> Sign:
    only = np.array([row])
    steps, retries = _known(view.memory_steps.ordered(only)), _known(view.retries.ordered(only))
    reserved, allocated = _known(view.reserved.ordered(only))[-1], _known(view.allocated.ordered(only))[-1]
    rank, step = view.ranks[row], int(view.step[row])
    return Sign(
        rank=rank,
        step=step,
        subject="retries",
        said=f"rank {rank}, step {step}: the allocator had to empty its cache and try again {int(retries[-1] - retries[0])} times within "
        f"{int(steps[-1] - steps[0])} steps (limit {settings.retries}); {_gib(reserved)} GiB are reserved, of which {_gib(reserved - allocated)} hold "
        "nothing between steps",
        cause="the GPU's memory is full: each retry waits for the device, and the next may be an out-of-memory error",
        fix="smaller batches or shorter sequences; where much is reserved and empty, memory is fragmented: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _known(lines: Floats) -> Floats:
    return lines[~np.isnan(lines)]


def _growing(view: View, row: int, gpu: GpuStream, settings: Settings) -> Iterable[Sign]:
    only, total = np.array([row]), gpu.newest.memory_total_bytes
    steps, values = view.memory_steps.ordered(only)[0], view.allocated.ordered(only)[0]
    span, grown = steps[-1] - steps[0], values[-1] - values[0]
    if span <= 0 or grown < settings.grown * total:
        return
    rate = _rate(steps, values)
    times = view.memory_ns.ordered(only)[0]
    free = max(0.0, total - _others(gpu, times, view.reserved.ordered(only)[0]) - values[-1])  # what is reserved and empty is used first
    if rate <= 0 or free / rate > settings.within * span:
        return
    rank, now = view.ranks[row], int(steps[-1])
    early, late = _steps_left(free, rate, steps, values)
    early = max(0.0, early - _READ_AGAIN_S * 1e9 * span / max(1.0, times[-1] - times[0]))
    yield Sign(
        rank=rank,
        step=int(view.step[row]),
        subject="growth",
        said=f"rank {rank}, step {now}: {_gib(values[-1])} GiB are allocated when a step ends, {rate / 2**20:.1f} MiB more each step: "
        f"{_gib(total)} GiB are full in step {now + int(early)}..{now + math.ceil(late)} at this rate",
        cause="something is kept from step to step: losses with their graphs in a list, outputs of an evaluation, a growing cache",
        fix="keep numbers, not tensors (.item(), .detach()), and look at what is appended to in the loop",
    )


def _others(gpu: GpuStream, times: Floats, reserved: Floats) -> float:
    """Bytes that are not this rank's allocator's: the CUDA context, other processes. By a sample of NVML no newer than the readings, for both grow."""
    sample = next((one for one in reversed(gpu.samples) if one.time_ns <= times[-1]), gpu.newest)
    return float(sample.memory_used_bytes - np.interp(sample.time_ns, times, reserved))


def _rate(steps: Floats, values: Floats) -> float:
    """Bytes a step, by every pair half a window apart: the median of these is hard to mislead."""
    half = MEMORY // 2
    took = steps[half:] - steps[:-half]
    return float(np.median((values[half:] - values[:-half])[took > 0] / took[took > 0]))


def _steps_left(free: float, rate: float, steps: Floats, values: Floats) -> tuple[float, float]:
    """At least and at most, where each step's growth differs by chance from the next: the rate is known from few steps, and those to come will vary, too."""
    took = steps[_APART:] - steps[:-_APART]
    off = (values[_APART:] - values[:-_APART] - rate * took)[took > 0] / np.sqrt(took[took > 0])
    spread = _NINE_OF_TEN * float(np.sqrt(np.mean(off**2)))  # of one step
    known, to_come = spread / math.sqrt(steps[-1] - steps[0]), spread * math.sqrt(free / rate) / rate
    slowest = max(rate - known, rate / _MOST_TIMES)
    return max(0.0, free / (rate + known) - to_come), free / slowest + to_come


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f}"


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_rank=True)
