"""loss.spike: the loss of a rank, or of most or all, has left the range in which it was, and stays outside for several steps.

The range is median and median absolute deviation of the rank's own newest losses. One bad step tells nobody: small batches have heavy tails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from torch_watchdog.rules.named import out_of
from torch_watchdog.rules.settings import Timing, at_least, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import STEPS, View
from torch_watchdog.rules.windows import medians

__all__ = ["RULE", "Settings"]

_ASKED = 256  # ranks: as good as all where only the share counts
_TO_SIGMA = 1.4826  # of a median absolute deviation, where values are normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """`sigmas` of the loss's own spread, and `rise` times its median, and `of_first` times the loss that the run began with: all must be passed.

    By `steps` losses in a row; and no more than the share `seldom` of those before was as high.
    """

    keep_s: float = 10.0
    sigmas: float = 8.0
    rise: float = 0.5
    of_first: float = 0.25
    steps: int = at_least(1, 6, most=STEPS // 2)  # against at least as many
    seldom: float = share_of(0.15)


ABOUT = About(
    name="loss_spike",
    kind="loss.spike",
    watches="the newest 64 losses of each rank",
    says="rank 3, step 412: the last 6 losses are 5.1 or more, those before them have median 2.3 (limit 3.45)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    found = _risen(view, settings, range(len(view.losses.count)))
    if not found:
        return
    early = [one for one in found if one.is_new and _others_may_follow(view, one)]
    if 2 * len(found) > len(view.ranks) > 1:
        if 2 * len(early) <= len(found) or len(found) == len(view.ranks):
            yield _of_most(view, found, len(found), settings)
        return
    lately = _share_that_rose_lately(view, settings)
    if len(view.ranks) > 1 and lately > 0.5:  # this one is late, or comes again: it is not alone
        yield _of_most(view, found, round(lately * len(view.ranks)), settings)
        return
    for one in found:
        if one not in early:
            rank = view.ranks[one.row]
            yield _sign(
                rank, f"rank {rank}", one, settings, "only this rank's loss rose: look at what its part of the data holds at these steps"
            )


def _of_most(view: View, found: Sequence[_Risen], risen: int, settings: Settings) -> Sign:
    """One finding, for what most ranks have in common is no single one's fault; of hundreds of ranks chance keeps one or the other below its limit."""
    ranks = len(view.ranks)
    every = "every rank" if risen == ranks else "most ranks"
    cause = f"the loss of {every} rose at once: the update, the learning rate or the data as a whole"
    sign = _sign(None, out_of(risen, ranks), min(found, key=lambda one: one.lowest), settings, cause)
    return sign if risen == ranks else replace(sign, affected=tuple(sorted(view.ranks[one.row] for one in found)))


def _share_that_rose_lately(view: View, settings: Settings) -> float:
    """Of ranks from all over the job; within half a window, which is as long as a loss that stays up is above what was before it."""
    ranks = len(view.losses.count)
    asked = range(0, ranks, max(1, ranks // _ASKED))
    return len(_risen(view, settings, asked, back=STEPS // 2)) / len(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Risen:
    """The first step of a rank whose loss, as those just before it, is above its range. `is_new`: since the last look."""

    row: int
    step: int
    lowest: float
    usual: float
    limit: float
    is_new: bool


def _risen(view: View, settings: Settings, asked: range, *, back: int = 0) -> list[_Risen]:
    """Each loss that has come since the look before the last, and `back` steps before that, against the window before it. `asked`: rows."""
    of = slice(asked.start, asked.stop, asked.step)
    fresh, new = (counts[of] for counts in view.fresh_losses())
    fresh = fresh + back
    width = min(int(fresh.max(initial=0)), view.losses.size - STEPS)
    if width <= 0:
        return []
    runs = sliding_window_view(view.losses.ordered(of)[:, 1 - STEPS - width :], STEPS, axis=1)
    before, lowest = runs[:, :, : -settings.steps], runs[:, :, -settings.steps :].min(axis=2)
    age = np.arange(width, 0, -1)
    margin = settings.of_first * abs(view.first_loss[: asked.stop][of])
    # The median of those before is far below: so are half of them, which costs less to see.
    below = np.count_nonzero(before < (lowest - margin[:, None])[:, :, None], axis=2)
    rows, places = np.nonzero((below >= STEPS // 4) & (age <= fresh[:, None]) & ~np.isnan(before[:, :, -(STEPS // 2)]))
    usual = medians(before[rows, places])
    spread = medians(abs(before[rows, places] - usual[:, None])) * _TO_SIGMA
    limit = usual + np.maximum(np.maximum(settings.sigmas * spread, settings.rise * abs(usual)), margin[rows])
    as_high = np.count_nonzero(before[rows, places] >= lowest[rows, places][:, None], axis=1)
    known = np.count_nonzero(~np.isnan(before[rows, places]), axis=1)
    above = np.flatnonzero((lowest[rows, places] > limit) & (as_high <= settings.seldom * known))
    _, firsts = np.unique(rows[above], return_index=True)
    steps = view.loss_steps.ordered(of)[:, -width:]
    return [
        _Risen(
            row=asked[rows[at]], step=int(steps[rows[at], places[at]]), lowest=float(lowest[rows[at], places[at]]), usual=float(usual[at]),
            limit=float(limit[at]), is_new=bool(age[places[at]] <= new[rows[at]]),
        )
        for at in above[firsts]
    ]  # fmt: skip


def _others_may_follow(view: View, one: _Risen) -> bool:
    """Whether a rank has not told of this step yet."""
    return bool((view.loss_steps.newest() < one.step).any())


def _sign(rank: int | None, who: str, one: _Risen, settings: Settings, cause: str) -> Sign:
    return Sign(
        rank=rank,
        step=one.step,
        said=f"{who}, step {one.step}: the last {settings.steps} losses are {one.lowest:.4g} or more, those before them have median {one.usual:.4g} "
        f"(limit {one.limit:.4g})",
        cause=cause,
        fix="compare the learning rate and the gradient norm around this step; if it does not come back, resume from a checkpoint before it",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
