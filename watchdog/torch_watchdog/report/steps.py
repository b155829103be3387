"""The steps of each rank, put together from StepBlocks.

Pure: blocks in, one track per (attempt, rank) out. It must not know files, terminals or colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch_watchdog_proto.messages import StepBlock

__all__ = ["RankTrack", "as_json", "tracks"]


@dataclass(slots=True, kw_only=True)
class RankTrack:
    """One rank in one attempt, by step: when it ended, how long it took, its mean loss, what was special about it."""

    attempt: int
    rank: int
    time_ns: dict[int, int] = field(default_factory=dict)
    duration_ns: dict[int, int] = field(default_factory=dict)
    loss: dict[int, float] = field(default_factory=dict)
    vetoed: set[int] = field(default_factory=set)
    evaluated: set[int] = field(default_factory=set)
    lost_records: int = 0

    @property
    def steps(self) -> list[int]:
        return sorted(self.time_ns)

    @property
    def median_step_s(self) -> float | None:
        known = [value for value in self.duration_ns.values() if value > 0]
        return median(known) / 1e9 if known else None


def tracks(blocks: Iterable[StepBlock]) -> list[RankTrack]:
    """By attempt, then rank. A block that comes twice changes nothing."""
    found: dict[tuple[int, int], RankTrack] = {}
    losses: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    for block in blocks:
        key = (block.attempt, block.rank)
        track = found.setdefault(key, RankTrack(attempt=block.attempt, rank=block.rank))
        track.lost_records += block.lost_records
        _add_steps(track, block)
        _add_micro_steps(track, losses.setdefault(key, {}), block)
    for key, track in found.items():
        track.loss = _mean_by_step(losses[key])
    return [found[key] for key in sorted(found)]


def _add_steps(track: RankTrack, block: StepBlock) -> None:
    track.time_ns.update(zip(block.step, block.step_time_ns, strict=True))
    track.duration_ns.update(zip(block.step, block.step_ns, strict=True))
    track.vetoed.update(step for step, vetoed in zip(block.step, block.vetoed, strict=True) if vetoed)


def _add_micro_steps(track: RankTrack, losses: dict[tuple[int, int], float], block: StepBlock) -> None:
    evaluation = block.evaluation or (False,) * len(block.micro_step)
    rows = zip(block.micro_of_step, block.micro_step, block.loss, block.loss_known, evaluation, strict=True)
    for step, micro_step, loss, known, evaluated in rows:
        if evaluated:
            track.evaluated.add(step)
        elif known:
            losses[step, micro_step] = loss


def _mean_by_step(losses: dict[tuple[int, int], float]) -> dict[int, float]:
    by_step: dict[int, list[float]] = {}
    for (step, _), loss in losses.items():
        by_step.setdefault(step, []).append(loss)
    return {step: math.fsum(values) / len(values) if all(map(math.isfinite, values)) else values[-1] for step, values in by_step.items()}


def as_json(track: RankTrack) -> dict[str, Any]:
    """Columns over `step`; times in seconds since the epoch; a loss that is no JSON number is a string."""
    steps = track.steps
    return {
        "rank": track.rank,
        "attempt": track.attempt,
        "lost_records": track.lost_records,
        "median_step_s": track.median_step_s,
        "step": steps,
        "time_s": [track.time_ns[step] / 1e9 for step in steps],
        "step_s": [track.duration_ns[step] / 1e9 for step in steps],
        "loss": [_json_number(track.loss.get(step)) for step in steps],
        "vetoed": [step in track.vetoed for step in steps],
        "evaluation_before": [step in track.evaluated for step in steps],
    }


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
