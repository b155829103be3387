"""scaler.collapse: the scale of mixed precision falls and does not come back, which means that nearly every step is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import RankStream, View

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where the scale has fallen by `fall` within the newest 64 batches without having grown, or is below `lowest`.

    A scaler that begins at 65536 looks for its level by a few halvings: these are no sign.
    """

    fall: float = 1024.0
    lowest: float = 1.0


ABOUT = About(
    name="scaler_collapse",
    kind="scaler.collapse",
    watches="the GradScaler's scale",
    says="rank 0, step 310: the scale of the GradScaler fell from 65536 to 32 within 40 batches (limit: to 64)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    fallen = [(stream, fall) for stream in view.ranks.values() if (fall := _fall(stream, settings)) is not None]
    if not fallen:
        return
    stream, (high, low, batches, limit) = min(fallen, key=lambda one: one[0].rank)  # gradients are shared: so is their scale
    yield Sign(
        rank=stream.rank if len(fallen) == 1 < len(view.ranks) else None,
        step=stream.step,
        affected=tuple(one.rank for one, _ in fallen if one is not stream),
        said=f"{'all ranks' if len(fallen) > 1 else f'rank {stream.rank}'}, step {stream.step}: the scale of the GradScaler fell from {high:g} to "
        f"{low:g} within {batches} batches (limit: {limit:g})",
        cause="gradients overflow half precision whatever the scale: the steps are skipped, and nothing is learned from them",
        fix="look for NaN or Inf in the loss and in inputs, lower the learning rate, clip gradients, or train in bfloat16",
    )


def _fall(stream: RankStream, settings: Settings) -> tuple[float, float, int, float] | None:
    if stream.scales.count < 2:
        return None
    values = stream.scales.values()
    low = values[-1]
    start = len(values) - 1
    while start > 0 and values[start - 1] >= values[start]:
        start -= 1
    high, limit = values[start], max(values[start] / settings.fall, settings.lowest)
    collapsed = low < high and (low <= high / settings.fall or low < settings.lowest)
    return (high, low, len(values) - start, limit) if collapsed else None


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
