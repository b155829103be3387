"""rank.straggler: one rank needs more time of its own for a step than the others, so that all wait for it.

Time of its own leaves out where ranks wait for each other. Steps that take long because their batch is large are no sign: a rank must be slow by the step, by
the element, and by the element squared, as attention over long sequences costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import RankStream, View, median, quartile

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where three quarters of a rank's steps take more than `ratio` times the median rank's, and this is at least `share` of a step.

    And at least `least_s`: below that nobody waits.
    """

    hold_s: float = 20.0
    ratio: float = 1.5
    share: float = 0.2
    least_s: float = 0.005


ABOUT = About(
    name="straggler",
    kind="rank.straggler",
    watches="each rank's own time per step, without waiting for others, per element of its batches",
    says="rank 5, step 900: 310 ms a step of its own, the median rank 190 ms (1.6 times, limit 1.5), with batches no larger",
)


@dataclass(frozen=True, slots=True)
class _Pace:
    """One rank's times of its own: by the step, by the element, by the element squared."""

    stream: RankStream
    own_s: float
    slow: tuple[float, float, float]  # lower quartiles: what most of its steps pass
    usual: tuple[float, float, float]


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    if len(view.ranks) < 2:
        return
    paces = [_pace(stream) for stream in view.ranks.values() if stream.own_s.is_full]
    if len(paces) < 2:
        return
    typical = tuple(median(pace.usual[power] for pace in paces) for power in range(3))
    for pace in paces:
        usual = typical if len(paces) > 2 else next(other.usual for other in paces if other is not pace)
        if all(slow > settings.ratio * typical for slow, typical in zip(pace.slow, usual, strict=True)):
            yield from _told(pace, usual[0], settings, len(paces))


def _pace(stream: RankStream) -> _Pace:
    own, sizes = sorted(stream.own_s.values()), stream.sizes.values()
    size = sizes[0]
    if min(sizes) == max(sizes):  # most jobs: then one order is the order of all three
        low, middle, by = quartile(own), median(own), (1.0, 1 / size, 1 / size**2) if size else (1.0, 1.0, 1.0)
        return _Pace(stream, own_s=middle, slow=(low, low * by[1], low * by[2]), usual=(middle, middle * by[1], middle * by[2]))
    return _pace_of_many_sizes(stream)


def _pace_of_many_sizes(stream: RankStream) -> _Pace:
    own = stream.own_s.values()
    by_size = [
        (s, s / size, s / size**2) if size else (s, s, s)
        for s, size in zip(own, stream.sizes.values(), strict=True)
    ]  # fmt: skip
    columns = tuple(zip(*by_size, strict=True))
    return _Pace(
        stream,
        own_s=median(own),
        slow=(quartile(columns[0]), quartile(columns[1]), quartile(columns[2])),
        usual=(median(columns[0]), median(columns[1]), median(columns[2])),
    )


def _told(pace: _Pace, typical_s: float, settings: Settings, ranks: int) -> Iterable[Sign]:
    stream, step_s = pace.stream, median(pace.stream.step_s.values())
    cost_s = pace.own_s - typical_s
    loader_s = median(stream.loader_s.values())
    if cost_s < max(settings.least_s, settings.share * step_s) or loader_s > cost_s / 2:  # a slow loader: slow_loader tells
        return
    times = pace.own_s / typical_s if typical_s else float("inf")
    yield Sign(
        rank=stream.rank,
        step=stream.step,
        said=f"rank {stream.rank}, step {stream.step}: {1e3 * pace.own_s:.0f} ms a step of its own, the median rank {1e3 * typical_s:.0f} ms "
        f"({times:.1f} times, limit {settings.ratio:g}), with batches no larger; each step of the {ranks} ranks waits about {1e3 * cost_s:.0f} ms",
        cause="this rank computes more slowly than the others on the same amount of data",
        fix="look at its machine: clocks and throttling of its GPU, other processes on its cores, and code that only this rank runs (logging, saving)",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
