"""loss.spike: the loss of a rank, or of all, has left the range in which it was, and stays outside for several steps.

The range is median and median absolute deviation of the rank's own newest losses. One bad step tells nobody: small batches have heavy tails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import STEPS, RankStream, View, median

__all__ = ["RULE", "Settings"]

_TO_SIGMA = 1.4826  # of a median absolute deviation, where values are normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """`sigmas` of the loss's own spread, and `rise` times its median, and `of_first` times the loss that the run began with: all must be passed."""

    keep_s: float = 10.0
    sigmas: float = 8.0
    rise: float = 0.5
    of_first: float = 0.25
    steps: int = 4


ABOUT = About(
    name="loss_spike",
    kind="loss.spike",
    watches="the newest 64 losses of each rank",
    says="rank 3, step 412: the last 4 losses are 5.1 or more, the 60 before them have median 2.3 (limit 3.45)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    found = [(stream, *high) for stream in view.ranks.values() if (high := _too_high(stream, settings)) is not None]
    if len(view.ranks) > 1 and len(found) == len(view.ranks):
        stream, lowest, usual, limit = min(found, key=lambda one: one[1])
        yield _sign(None, f"all {len(found)} ranks", stream, lowest, usual, limit, settings)
        return
    if 2 * len(found) > len(view.ranks) > 1:
        return  # the others are about to follow: then it is all ranks
    for stream, lowest, usual, limit in found:
        yield _sign(stream.rank, f"rank {stream.rank}", stream, lowest, usual, limit, settings)


def _too_high(stream: RankStream, settings: Settings) -> tuple[float, float, float] | None:
    """The lowest of the newest losses, what was usual before them, and the limit; None where all is well."""
    losses, first = stream.losses, stream.first_loss
    if first is None or losses.newest <= first * settings.of_first:
        return None
    values = losses.values()
    before, last = values[: -settings.steps], values[-settings.steps :]
    if len(before) < STEPS // 2 or not last:
        return None
    usual, lowest = median(before), min(last)
    if lowest <= usual:
        return None
    spread = median(abs(value - usual) for value in before) * _TO_SIGMA
    limit = usual + max(settings.sigmas * spread, settings.rise * abs(usual), settings.of_first * abs(first))
    return (lowest, usual, limit) if lowest > limit else None


def _sign(rank: int | None, who: str, stream: RankStream, lowest: float, usual: float, limit: float, settings: Settings) -> Sign:
    step = int(stream.loss_steps.newest)
    return Sign(
        rank=rank,
        step=step,
        said=f"{who}, step {step}: the last {settings.steps} losses are {lowest:.4g} or more, those before them have median {usual:.4g} "
        f"(limit {limit:.4g})",
        cause="the loss of every rank rose at once: the update, the learning rate or the data as a whole"
        if rank is None
        else "only this rank's loss rose: look at what its part of the data holds at these steps",
        fix="compare the learning rate and the gradient norm around this step; if it does not come back, resume from a checkpoint before it",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
