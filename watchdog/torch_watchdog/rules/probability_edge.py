"""probability.out_of_range, before it comes: what binary_cross_entropy is given comes nearer to 0 or 1 from step to step, and nothing keeps it inside.

Ranks tell of probabilities only that no sigmoid, softmax or clamp has made: those may reach the edge, and never pass it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, at_least, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import REACHES, View
from torch_watchdog.rules.windows import medians

__all__ = ["RULE", "Settings"]

_APART = 4  # steps: neighbours may come nearer by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where the share `steady` of 24 distances to the edge are smaller than 4 steps before, the newest are below `near`, and the edge is met within
    `within` steps at this rate."""

    steady: float = share_of(0.9)
    near: float = share_of(0.1)
    within: int = at_least(1, 64)


ABOUT = About(
    name="probability_edge",
    kind="probability.out_of_range",
    watches="how near to 0 and 1 the probabilities come that binary_cross_entropy is given and that no sigmoid has made",
    says="rank 1, step 200: probabilities given to binary_cross_entropy are 0.011 from the edge of 0..1, 0.0008 nearer each step: past it in about 14 steps",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    rows = view.reach.full()
    apart = (1 - view.reach.ordered(rows)) / 2
    nearer = np.count_nonzero(apart[:, _APART:] < apart[:, :-_APART], axis=1)
    half = REACHES // 2
    rate = medians((apart[:, :half] - apart[:, half:]) / half)
    left = apart[:, -_APART:].min(axis=1, initial=1)
    comes = (nearer >= settings.steady * (REACHES - _APART)) & (rate > 0) & (left <= settings.near) & (left <= settings.within * rate)
    for at in np.flatnonzero(comes):
        yield _sign(view.ranks[rows[at]], int(view.step[rows[at]]), float(left[at]), float(rate[at]))


def _sign(rank: int, step: int, left: float, rate: float) -> Sign:
    return Sign(
        rank=rank,
        step=step,
        said=f"rank {rank}, step {step}: probabilities given to binary_cross_entropy are {left:.2g} from the edge of 0..1, {rate:.2g} nearer each step: "
        f"past it in about {max(0.0, left) / rate:.0f} steps",
        cause="nothing keeps these values within 0..1 (no sigmoid, softmax or clamp has made them): one step past the edge is an error, on a GPU an assertion",
        fix="use binary_cross_entropy_with_logits on the values before, or put a sigmoid there",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_stretch=True, each_rank=True)
