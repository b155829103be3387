"""The steps of each rank, put together from StepBlocks.

Pure: blocks in, one track per (attempt, rank) out. It must not know files, terminals or colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from torch_watchdog_proto.messages import StepBlock

__all__ = ["Batch", "RankTrack", "as_json", "in_seconds", "json_number", "tracks"]


class Batch(NamedTuple):
    """One micro-step: when it was handed over, how long the loop had waited for it, and how long its forward took (0: not known)."""

    time_ns: int
    loader_ns: int
    forward_ns: int
    evaluation: bool


@dataclass(slots=True, kw_only=True)
class RankTrack:
    """One rank in one attempt, by step: when it ended, how long it took, its mean loss, what was special about it. Of a step that has not ended a loss is a
    part of its batch's: it is there where it is no number, or where no step ever ends.

    Steps count from 0 in each launch; `updates` are those that the model had after the step, the launches that this one goes on from included.
    """

    attempt: int
    rank: int
    time_ns: dict[int, int] = field(default_factory=dict)
    duration_ns: dict[int, int] = field(default_factory=dict)
    loss: dict[int, float] = field(default_factory=dict)
    allocated_bytes: dict[int, int] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    grad_norm: dict[int, float] = field(default_factory=dict)
    backward_ns: dict[int, int] = field(default_factory=dict)
    update_ns: dict[int, int] = field(default_factory=dict)  # the last part of it
    batches: dict[tuple[int, int], Batch] = field(default_factory=dict)  # by step and micro-step
    updates: dict[int, int] = field(default_factory=dict)
    gpu: str = ""  # UUID
    vetoed: set[int] = field(default_factory=set)
    evaluated: set[int] = field(default_factory=set)
    lost_records: int = 0

    @property
    def steps(self) -> list[int]:
        return sorted(self.time_ns)

    @property
    def updates_before(self) -> dict[int, int]:
        """How many updates the model had when each step began, where that is recorded."""
        return {step: after - (step not in self.vetoed) for step, after in self.updates.items()}

    @property
    def began_at_update(self) -> int | None:
        """What the checkpoint held that the launch went on from; None where the first step is not recorded."""
        return self.updates_before.get(0)

    @property
    def median_step_s(self) -> float | None:
        known = [value for value in self.duration_ns.values() if value > 0]
        return median(known) / 1e9 if known else None

    def loader_ns(self) -> dict[int, int]:
        """How long each step waited for its batches."""
        return self._summed(lambda batch: batch.loader_ns)

    def forward_ns(self) -> dict[int, int]:
        """How long the forwards of each step took, where that is known."""
        return {step: value for step, value in self._summed(lambda batch: batch.forward_ns).items() if value}

    def _summed(self, of: Callable[[Batch], int]) -> dict[int, int]:
        sums: dict[int, int] = {}
        for (step, _), batch in self.batches.items():
            if not batch.evaluation:
                sums[step] = sums.get(step, 0) + of(batch)
        return sums


def tracks(blocks: Iterable[StepBlock]) -> list[RankTrack]:
    """By attempt, then rank. A block that comes twice changes nothing; one whose columns are not of one length counts as far as the shortest goes."""
    found: dict[tuple[int, int], RankTrack] = {}
    losses: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    for block in blocks:
        key = (block.attempt, block.rank)
        track = found.setdefault(key, RankTrack(attempt=block.attempt, rank=block.rank))
        track.lost_records += block.lost_records
        _add_steps(track, block)
        _add_micro_steps(track, losses.setdefault(key, {}), block)
    for key, track in found.items():
        means = _mean_by_step(losses[key])
        track.loss = {step: loss for step, loss in means.items() if step in track.time_ns or not track.time_ns or not math.isfinite(loss)}
    return [found[key] for key in sorted(found)]


def _add_steps(track: RankTrack, block: StepBlock) -> None:
    track.time_ns.update(zip(block.step, block.step_time_ns, strict=False))
    track.duration_ns.update(zip(block.step, block.step_ns, strict=False))
    track.allocated_bytes.update((step, size) for step, size in zip(block.step, block.allocated_bytes, strict=False) if size)
    track.peak_bytes.update((step, size) for step, size in zip(block.step, block.peak_bytes, strict=False) if size)
    track.backward_ns.update((step, value) for step, value in zip(block.step, block.backward_ns, strict=False) if value)
    track.update_ns.update((step, value) for step, value in zip(block.step, block.update_ns, strict=False) if value)
    track.updates.update(zip(block.step, block.updates_applied, strict=False))
    track.grad_norm.update((step, norm) for step, norm in zip(block.step, block.grad_norm, strict=False) if norm >= 0)
    track.gpu = block.gpu or track.gpu
    track.vetoed.update(step for step, vetoed in zip(block.step, block.vetoed, strict=False) if vetoed)


def _add_micro_steps(track: RankTrack, losses: dict[tuple[int, int], float], block: StepBlock) -> None:
    evaluation = block.evaluation or (False,) * len(block.micro_step)
    forward = block.forward_ns or (0,) * len(block.micro_step)  # older versions did not record it
    times = map(Batch, block.micro_time_ns, block.loader_ns, forward, evaluation)
    track.batches.update(zip(zip(block.micro_of_step, block.micro_step, strict=False), times, strict=False))
    rows = zip(block.micro_of_step, block.micro_step, block.loss, block.loss_known, evaluation, strict=False)
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
    loader, forward, before = track.loader_ns(), track.forward_ns(), track.updates_before
    return {
        "rank": track.rank,
        "attempt": track.attempt,
        "lost_records": track.lost_records,
        "median_step_s": track.median_step_s,
        "began_at_update": track.began_at_update,
        "step": steps,
        "updates_before": [before.get(step) for step in steps],
        "time_s": [track.time_ns[step] / 1e9 for step in steps],
        "step_s": [track.duration_ns[step] / 1e9 for step in steps],
        "loader_s": [in_seconds(loader.get(step)) for step in steps],
        "forward_s": [in_seconds(forward.get(step)) for step in steps],
        "update_s": [in_seconds(track.update_ns.get(step)) for step in steps],
        "peak_bytes": [track.peak_bytes.get(step) for step in steps],
        "grad_norm": [json_number(track.grad_norm.get(step)) for step in steps],
        "loss": [json_number(track.loss.get(step)) for step in steps],
        "vetoed": [step in track.vetoed for step in steps],
        "evaluation_before": [step in track.evaluated for step in steps],
    }


def in_seconds(value_ns: int | None) -> float | None:
    return None if value_ns is None else value_ns / 1e9


def json_number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: these are strings."""
    return value if value is None or math.isfinite(value) else str(value)
