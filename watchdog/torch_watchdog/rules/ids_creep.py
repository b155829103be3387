"""batch.index_out_of_range, before it comes: the highest id of each batch rises steadily towards the end of its table.

Off by default: a data set that is sorted by id, with a table of exactly the rows it needs, looks the same, and nothing in the batches tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import STEPS, KeyStream, RankStream, View, median

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where nearly `steady` of 64 highs are above the one 8 steps before, and the bound is met within `within` steps at this rate."""

    enabled: bool = False
    steady: float = 0.95
    within: int = 128


ABOUT = About(
    name="ids_creep",
    kind="batch.index_out_of_range",
    watches="the highest value of each index tensor whose bound is known",
    says="rank 1, step 200: the highest value of user rises by 2.1 a step and is 874 of at most 999: past it in about 60 steps",
    severity="info",
)

_APART = 8  # steps: neighbours may fall by chance


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for stream in view.ranks.values():
        for key, seen in stream.keys.items():
            if seen.bound_high is not None and seen.highs.is_full:
                yield from _creeping(stream, key, seen, seen.bound_high, settings)


def _creeping(stream: RankStream, key: str, seen: KeyStream, bound: float, settings: Settings) -> Iterable[Sign]:
    highs = seen.highs.values()
    rises = sum(after > before for before, after in zip(highs, highs[_APART:], strict=False))
    if rises < settings.steady * (STEPS - _APART):
        return
    half = STEPS // 2
    rate = median((after - before) / half for before, after in zip(highs, highs[half:], strict=False))
    left = bound - max(highs)
    if rate <= 0 or left < 0 or left / rate > settings.within:
        return
    yield Sign(
        rank=stream.rank,
        step=seen.step,
        subject=key,
        said=f"rank {stream.rank}, step {seen.step}: the highest value of {key} rises by {rate:.2g} a batch and is {max(highs):g} of at most "
        f"{bound:g}: past it in about {left / rate:.0f} batches",
        cause="ids grow with the data: the table was made for fewer of them, or the data are sorted and end here",
        fix="compare the table's rows with the highest id of the whole data set (watchdog scan does)",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
