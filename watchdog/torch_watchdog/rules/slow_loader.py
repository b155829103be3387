"""loader.stalled: a rank waits for its data far longer than it did, or than the other ranks do.

A run that was bound by its data from the beginning is no sign: that is how it was set up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, at_least, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import View
from torch_watchdog.rules.windows import medians, of_others

__all__ = ["RULE", "Settings"]

_RECENT = 8  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where the newest 8 waits are `times` as long as those of the first 32 steps or as the other ranks', take `share` of a step, and `least_s`."""

    hold_s: float = 10.0
    times: float = at_least(1, 5.0)
    share: float = share_of(0.4)
    least_s: float = 0.05


ABOUT = About(
    name="slow_loader",
    kind="loader.stalled",
    watches="how long each rank's loop waits for its next batch",
    action="an incident, with what the rank and its loaders' workers do just then; the training goes on",
    says="rank 2, step 700: waits 480 ms for a batch, 71 % of a step; the first steps waited 3 ms, the median rank waits 4 ms (limit 5 times)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    rows = view.loader_s.full()
    if not len(rows):
        return
    waits = view.loader_s.ordered(rows)[:, -_RECENT:]
    if waits.max() < settings.least_s:
        return  # nobody waits: most looks end here
    recent, before = medians(waits), view.first_loader_s[rows]
    step_s = medians(view.step_s.ordered(rows)[:, -_RECENT:])
    others = of_others(recent)
    slower = (recent > settings.times * before) | ((recent > settings.times * others) if len(rows) > 1 else False)
    for at in np.flatnonzero((recent >= settings.least_s) & (recent >= settings.share * step_s) & slower):
        than = f", the median rank waits {1e3 * others[at]:.0f} ms" if len(rows) > 1 else ""
        share = recent[at] / max(1e-9, step_s[at])
        yield _sign(view.ranks[rows[at]], int(view.step[rows[at]]), recent[at], share, f"{1e3 * before[at]:.0f} ms{than}", settings)


def _sign(rank: int, step: int, recent: float, share: float, than: str, settings: Settings) -> Sign:
    return Sign(
        rank=rank,
        step=step,
        said=f"rank {rank}, step {step}: waits {1e3 * recent:.0f} ms for a batch, {100 * share:.0f} % of a step; the first steps "
        f"waited {than} (limit {settings.times:g} times)",
        cause="its data loading cannot keep up: storage, decoding, too few workers, or a worker that hangs",
        fix="look at the storage and the loader's workers of that node; more num_workers or prefetch_factor hide uneven samples",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_rank=True)
