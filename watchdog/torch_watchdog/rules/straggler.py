"""rank.straggler: one rank needs more time of its own for a step than the others, so that all wait for it.

Time of its own leaves out where ranks wait for each other. Steps that take long because their batch is large are no sign: a rank must be slow by the step, by
the element, and by the element squared, as attention over long sequences costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, at_least, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import View
from torch_watchdog.rules.windows import Floats, medians, of_others, quartiles

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where three quarters of a rank's steps take more than `ratio` times the median rank's, and this is at least `share` of a step.

    And at least `least_s`: below that nobody waits.
    """

    hold_s: float = 20.0
    ratio: float = at_least(1, 1.5)
    share: float = share_of(0.2)
    least_s: float = 0.005


ABOUT = About(
    name="straggler",
    kind="rank.straggler",
    watches="each rank's own time per step, without waiting for others, per element of its batches",
    says="rank 5, step 900: 310 ms a step of its own, the median rank 190 ms (1.6 times, limit 1.5), with batches no larger; "
    "each step of the 8 ranks waits about 120 ms",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    rows = view.own_s.full()
    if len(rows) < 2:
        return
    own, sizes = view.own_s.unordered(rows), view.sizes.unordered(rows)
    by = (np.ones(1), _inverse(sizes), _inverse(sizes) ** 2)  # by the step, by the element, by the element squared
    usual = [of_others(medians(own * inverse)) for inverse in by]
    slow: Floats = np.ones(len(rows), bool)
    for inverse, others in zip(by, usual, strict=True):
        slow &= quartiles(own * inverse) > settings.ratio * others  # what most of its steps pass
    for at in np.flatnonzero(slow):
        yield from _told(view, int(rows[at]), float(np.median(own[at])), float(usual[0][at]), settings)


def _inverse(sizes: Floats) -> Floats:
    return 1 / np.where(sizes > 0, sizes, 1.0)


def _told(view: View, row: int, own_s: float, typical_s: float, settings: Settings) -> Iterable[Sign]:
    only = np.array([row])
    step_s, loader_s = float(np.median(view.step_s.ordered(only))), float(np.median(view.loader_s.ordered(only)))
    cost_s = own_s - typical_s
    if cost_s < max(settings.least_s, settings.share * step_s) or loader_s > cost_s / 2:  # a slow loader: slow_loader tells
        return
    times = own_s / typical_s if typical_s else float("inf")
    rank, step = view.ranks[row], int(view.step[row])
    yield Sign(
        rank=rank,
        step=step,
        said=f"rank {rank}, step {step}: {1e3 * own_s:.0f} ms a step of its own, the median rank {1e3 * typical_s:.0f} ms "
        f"({times:.1f} times, limit {settings.ratio:g}), with batches no larger; each step of the {len(view.ranks)} ranks waits about "
        f"{1e3 * cost_s:.0f} ms",
        cause="this rank computes more slowly than the others on the same amount of data",
        fix="look at its machine: clocks and throttling of its GPU, other processes on its cores, and code that only this rank runs (logging, saving)",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
