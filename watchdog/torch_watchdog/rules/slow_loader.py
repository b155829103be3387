"""loader.stalled: a rank waits for its data far longer than it did, or than the other ranks do.

A run that was bound by its data from the beginning is no sign: that is how it was set up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import RankStream, View, median

__all__ = ["RULE", "Settings"]

_RECENT = 8  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where the newest 8 waits are `times` as long as those of the first 32 steps or as the other ranks', take `share` of a step, and `least_s`."""

    hold_s: float = 10.0
    times: float = 5.0
    share: float = 0.4
    least_s: float = 0.05


ABOUT = About(
    name="slow_loader",
    kind="loader.stalled",
    watches="how long each rank's loop waits for its next batch",
    says="rank 2, step 700: waits 480 ms for a batch, 71 % of a step; the first steps waited 3 ms, the other ranks 4 ms (limit 5 times)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    if all(stream.loader_s.highest() < settings.least_s for stream in view.ranks.values()):
        return  # nobody waits: most looks end here
    waits = {stream.rank: _waits(stream) for stream in view.ranks.values() if stream.loader_s.is_full}
    if not waits:
        return
    others = median(recent for recent, _ in waits.values())
    for rank, (recent, before) in waits.items():
        stream = view.ranks[rank]
        if recent < settings.least_s or recent < settings.share * median(stream.step_s.values()[-_RECENT:]):
            continue
        if len(waits) == 2:
            others = next(wait for other, (wait, _) in waits.items() if other != rank)
        slower_than_others = len(waits) > 1 and recent > settings.times * others
        if recent > settings.times * before or slower_than_others:
            yield _sign(stream, recent, before, others if len(waits) > 1 else None, settings)


def _waits(stream: RankStream) -> tuple[float, float]:
    return median(stream.loader_s.values()[-_RECENT:]), stream.first_loader_s or 0.0


def _sign(stream: RankStream, recent: float, before: float, others: float | None, settings: Settings) -> Sign:
    share = recent / max(1e-9, median(stream.step_s.values()[-_RECENT:]))
    than = "" if others is None else f", the median rank waits {1e3 * others:.0f} ms"
    return Sign(
        rank=stream.rank,
        step=stream.step,
        said=f"rank {stream.rank}, step {stream.step}: waits {1e3 * recent:.0f} ms for a batch, {100 * share:.0f} % of a step; the first steps "
        f"waited {1e3 * before:.0f} ms{than} (limit {settings.times:g} times)",
        cause="its data loading cannot keep up: storage, decoding, too few workers, or a worker that hangs",
        fix="look at the storage and the loader's workers of that node; more num_workers or prefetch_factor hide uneven samples",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
