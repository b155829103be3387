"""scaler.collapse: the scale of mixed precision falls and does not come back, which means that nearly every step is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.named import out_of
from torch_watchdog.rules.settings import Timing, at_least
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import STEPS, View

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where the scale has fallen by `fall` within the newest 64 batches without having grown, or is below `lowest`.

    A scaler that begins at 65536 looks for its level by a few halvings: these are no sign.
    """

    fall: float = at_least(2, 1024.0)
    lowest: float = 1.0


ABOUT = About(
    name="scaler_collapse",
    kind="scaler.collapse",
    watches="the GradScaler's scale",
    says="all 8 ranks, step 310: the scale of the GradScaler fell from 65536 to 32 within 40 batches (limit 64)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    fallen = _fallen(view, settings)
    if not fallen:
        return
    first = min(fallen, key=lambda one: view.ranks[one.row])  # gradients are shared: so is their scale
    rank = view.ranks[first.row]
    yield Sign(
        rank=rank if len(fallen) == 1 else None,
        step=int(view.step[first.row]),
        affected=tuple(view.ranks[one.row] for one in fallen if one is not first),
        said=f"{_who(len(fallen), rank, len(view.ranks))}, step {view.step[first.row]}: the scale of the GradScaler fell from {first.high:.9g} to "
        f"{first.low:.9g} within {first.batches} batches (limit {first.limit:.9g})",
        cause="gradients overflow half precision whatever the scale: the steps are skipped, and nothing is learned from them",
        fix="look for NaN or Inf in the loss and in inputs, lower the learning rate, clip gradients, or train in bfloat16",
    )


def _who(fallen: int, rank: int, ranks: int) -> str:
    return f"rank {rank}" if fallen == 1 else out_of(fallen, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fall:
    row: int
    high: float
    low: float
    batches: int
    limit: float


def _fallen(view: View, settings: Settings) -> list[_Fall]:
    """The ranks whose scale is far below where its last fall began."""
    values = view.scales.ordered()
    low = values[:, -1]
    rows = np.flatnonzero((low <= np.fmax.reduce(values, axis=1, initial=0.0) / settings.fall) | (low < settings.lowest))
    found = []
    for row in rows.tolist():
        rises = np.flatnonzero(~(values[row, :-1] >= values[row, 1:]))  # where there is none yet, too
        start = int(rises[-1]) + 1 if len(rises) else 0
        high, batches = float(values[row, start]), STEPS - start
        limit = max(high / settings.fall, settings.lowest)
        if low[row] < high and (low[row] <= high / settings.fall or low[row] < settings.lowest):
            found.append(_Fall(row=row, high=high, low=float(low[row]), batches=batches, limit=limit))
    return found


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_stretch=True)
