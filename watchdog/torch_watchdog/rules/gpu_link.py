"""gpu.throttle, by its links: PCIe or NVLink repeats what it sends, so that copies and collectives are slow, and may soon fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.gpus import sign_of
from torch_watchdog.rules.settings import Timing, at_least
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import View

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """So many `pcie_replays`, or `nvlink_errors` (replays and recoveries of all links), within the samples of a minute. A few are normal."""

    hold_s: float = 10.0
    pcie_replays: int = at_least(1, 100)
    nvlink_errors: int = at_least(1, 100)


ABOUT = About(
    name="gpu_link",
    kind="gpu.throttle",
    watches="NVML's counts of PCIe replays and of NVLink errors",
    says="GPU 2 of node-1 (rank 2): 340 PCIe replays within 60 samples (limit 100)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for gpu, ranks in view.used_gpus():
        if not gpu.samples:
            continue
        first, newest = gpu.samples[0], gpu.newest
        counts = (
            ("PCIe replays", first.pcie_replays, newest.pcie_replays, settings.pcie_replays),
            ("NVLink errors", first.nvlink_errors, newest.nvlink_errors, settings.nvlink_errors),
        )
        for what, before, after, limit in counts:
            if before is not None and after is not None and after - before >= limit:
                yield sign_of(
                    gpu, ranks, f"{after - before} {what} within {len(gpu.samples)} samples (limit {limit})", what=what,
                    cause="data arrive damaged and are sent again", fix="check seating, cables and switch of this GPU; leave the node if it stays",
                )  # fmt: skip


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
