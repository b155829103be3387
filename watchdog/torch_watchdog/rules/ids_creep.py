"""batch.index_out_of_range, before it comes: the highest id of each batch rises steadily towards the end of its table.

Off by default: a data set that is sorted by id, with a table of exactly the rows it needs, looks the same, and nothing in the batches tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, at_least, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import STEPS, View
from torch_watchdog.rules.windows import medians

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where nearly `steady` of 64 highs are above the one 8 steps before, and the bound is met within `within` steps at this rate."""

    enabled: bool = False
    steady: float = share_of(0.95)
    within: int = at_least(1, 128)


ABOUT = About(
    name="ids_creep",
    kind="batch.index_out_of_range",
    watches="the highest value of each index tensor whose bound is known",
    says="rank 1, step 200: the highest value of labels rises by 2.1 a batch and is 874 of at most 999: past it in about 60 batches",
    severity="info",
)

_APART = 8  # steps: neighbours may fall by chance


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for key, seen in view.keys.items():
        if seen.bound_high is None:
            continue
        rows = seen.highs.full()
        highs = seen.highs.ordered(rows)
        rises = np.count_nonzero(highs[:, _APART:] > highs[:, :-_APART], axis=1)
        half = STEPS // 2
        rate = medians((highs[:, half:] - highs[:, :-half]) / half)
        left = seen.bound_high - highs.max(axis=1, initial=0)
        creeps = (rises >= settings.steady * (STEPS - _APART)) & (rate > 0) & (left >= 0) & (left <= settings.within * rate)
        for at in np.flatnonzero(creeps):
            yield _sign(view.ranks[rows[at]], int(seen.steps.newest()[rows[at]]), key, seen.bound_high, float(left[at]), float(rate[at]))


def _sign(rank: int, step: int, key: str, bound: float, left: float, rate: float) -> Sign:
    return Sign(
        rank=rank,
        step=step,
        subject=key,
        said=f"rank {rank}, step {step}: the highest value of {key} rises by {rate:.2g} a batch and is {bound - left:g} of at most "
        f"{bound:g}: past it in about {left / rate:.0f} batches",
        cause="ids grow with the data: the table was made for fewer of them, or the data are sorted and end here",
        fix="compare the table's rows with the highest id of the whole data set (watchdog scan does)",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_stretch=True, each_rank=True)
