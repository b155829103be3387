"""gpu.throttle: a GPU runs below its clocks because its board says that it must: heat, power supply, a brake from outside.

A power cap that software set is how most GPUs run under load, and is no sign.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.gpus import sign_of
from torch_watchdog.rules.settings import Timing, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import GpuStream, View

__all__ = ["RULE", "Settings"]

_REASONS = {  # NVML's bits
    0x08: "hardware slowdown",
    0x20: "heat (by the driver)",
    0x40: "heat (by the board)",
    0x80: "power brake from outside the board",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """The reason must be there in `of_samples` of the last minute's samples, and the clock below `clock` of its highest."""

    hold_s: float = 30.0
    of_samples: float = share_of(0.5, least=0.02)
    clock: float = share_of(0.9)


ABOUT = About(
    name="gpu_throttle",
    kind="gpu.throttle",
    watches="NVML's reasons for lower clocks, and the clock itself",
    says="GPU 5 of node-1 (rank 5): slowed down by heat (by the board): 1110 of 1980 MHz (limit 90 %) at 91 C, in 42 of 60 samples (limit 50 %)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for gpu, ranks in view.used_gpus():
        for bit, reason in _REASONS.items():
            count = sum(bool((sample.throttle_reasons or 0) & bit) for sample in gpu.samples)
            if len(gpu.samples) >= 5 and count >= settings.of_samples * len(gpu.samples) and _is_slow(gpu, settings):
                yield _sign(gpu, ranks, reason, count, settings)
                break


def _is_slow(gpu: GpuStream, settings: Settings) -> bool:
    clock, highest = gpu.newest.sm_clock_mhz, gpu.newest.max_sm_clock_mhz
    return clock is None or not highest or clock < settings.clock * highest


def _sign(gpu: GpuStream, ranks: tuple[int, ...], reason: str, count: int, settings: Settings) -> Sign:
    newest = gpu.newest
    known = newest.sm_clock_mhz is not None and newest.max_sm_clock_mhz
    clock = f": {newest.sm_clock_mhz} of {newest.max_sm_clock_mhz} MHz (limit {100 * settings.clock:g} %)" if known else ""
    heat = "" if newest.temperature_c is None else f" at {newest.temperature_c} C"
    return sign_of(
        gpu, ranks, f"slowed down by {reason}{clock}{heat}, in {count} of {len(gpu.samples)} samples (limit {100 * settings.of_samples:g} %)",
        cause=f"the GPU lowers its clocks: {reason}; every rank waits for this one",
        fix="look at the node's cooling and power supply; leave the node if it stays",
    )  # fmt: skip


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
