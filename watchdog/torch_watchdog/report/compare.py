"""Two jobs, or two attempts of one, side by side: what differs, and the step from which on they do.

Pure: histories in, figures out. Losses are the mean over the ranks that tell theirs. A job that goes on from another's checkpoint begins with step 0 again:
they are laid beside each other by the updates that the model had before the step, where both jobs recorded them, else by step.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, median
from typing import Any

from torch_watchdog.report.counting import counted
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.steps import json_number

__all__ = ["comparison", "mean_loss"]

Figures = dict[str, Any]
_SAME = 1e-6  # relative: sums in another order differ by less


def comparison(first: JobHistory, second: JobHistory) -> dict[str, Any]:
    """`figures` holds [first, second] by name, times in seconds; `loss` tells where the curves part. Fit for JSON."""
    pairs = zip(_figures(first).items(), _figures(second).values(), strict=True)
    return {"jobs": [first.name, second.name], "figures": {name: [one, two] for (name, one), two in pairs}, "loss": _parting(first, second)}


def mean_loss(history: JobHistory, *, by_updates: bool = False) -> dict[int, float]:
    """By step, or by the updates before it, over the ranks. With several attempts the newest that came so far counts.

    By updates a step without one is left out: the step after it began with the same model. So is a step of which a rank has no loss (it died in it): a mean
    over the others is no other ranks' mean.
    """
    found: dict[int, dict[int, list[float]]] = {}
    with_losses = Counter(track.attempt for track in history.tracks if track.loss)
    for track in history.tracks:
        before = track.updates_before
        for step, loss in track.loss.items():
            if by_updates and (step in track.vetoed or step not in before):
                continue
            found.setdefault(before[step] if by_updates else step, {}).setdefault(track.attempt, []).append(loss)
    newest = ((place, max(attempts), attempts[max(attempts)]) for place, attempts in sorted(found.items()))
    return {place: fmean(losses) for place, attempt, losses in newest if len(losses) == with_losses[attempt]}


def _counts_updates(history: JobHistory) -> bool:
    return all(track.updates.keys() >= track.time_ns.keys() for track in history.tracks)


def _figures(history: JobHistory) -> Figures:
    losses = mean_loss(history)
    times = [track.median_step_s for track in history.tracks if track.median_step_s]
    counts = counted(history.tracks)
    slowest = max(history.tracks, key=lambda track: track.median_step_s or 0, default=None)
    return {
        "ranks": len(history.ranks),
        "attempts": len(history.attempts),
        "steps": counts.steps,
        "began at update": counts.began,
        "updates": counts.updates,
        "median step": median(times) if times else None,
        "slowest rank": None if slowest is None or not slowest.median_step_s else slowest.rank,
        "waiting for data": _share_of_loader(history),
        "first loss": json_number(losses[min(losses)]) if losses else None,
        "last loss": json_number(losses[max(losses)]) if losses else None,
        "peak memory": max((size for track in history.tracks for size in track.peak_bytes.values()), default=None),
        "skipped updates": len({step for track in history.tracks for step in track.vetoed}),
        "incidents": len(history.incidents),
        "exit code": history.record.get("exit_code"),
    }


def _share_of_loader(history: JobHistory) -> float | None:
    whole = sum(sum(track.duration_ns.values()) for track in history.tracks)
    return sum(sum(track.loader_ns().values()) for track in history.tracks) / whole if whole else None


def _parting(first: JobHistory, second: JobHistory) -> dict[str, Any]:
    """The first common place at which the mean losses are not the same number, and how far apart the last common ones are.

    `aligned_by` says what the numbers of places count: steps, or the updates before them.
    """
    by_updates = _counts_updates(first) and _counts_updates(second)
    one, two = (mean_loss(history, by_updates=by_updates) for history in (first, second))
    common = sorted(one.keys() & two.keys())
    parted = next((place for place in common if not _is_same(one[place], two[place])), None)
    last = common[-1] if common else None
    return {
        "aligned_by": "updates" if by_updates else "step",
        "spans": [[min(found), max(found)] if found else None for found in (one, two)],
        "common_steps": len(common),
        "first_difference_at_step": parted,
        "last_common_step": last,
        "last_common_losses": None if last is None else [json_number(one[last]), json_number(two[last])],
    }


def _is_same(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=_SAME) or (math.isnan(one) and math.isnan(two))
