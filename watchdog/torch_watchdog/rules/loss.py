"""loss.not_finite: the first rank whose own loss is NaN or infinite, before the all-reduce has spread it.

Pure: losses as ranks reported them in, a finding with its reason out. Knows nothing of orders or incidents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_watchdog_proto.messages import StepBlock

__all__ = ["NotFinite", "first_of", "not_finite", "reason_of"]

PATIENCE_S = 2.0  # for the reports of the other ranks, which may tell of an earlier step


@dataclass(frozen=True, slots=True, order=True)
class NotFinite:
    """One loss that is no number, sorted by where it came in the training."""

    step: int
    micro_step: int
    rank: int
    loss: float


def not_finite(blocks: Iterable[StepBlock]) -> tuple[NotFinite, ...]:
    """Every training loss in the blocks that is NaN or infinite; losses of an evaluation train nothing and are left out."""
    return tuple(found for block in blocks for found in _of_block(block))


def _of_block(block: StepBlock) -> Iterable[NotFinite]:
    for row, (loss, known) in enumerate(zip(block.loss, block.loss_known, strict=False)):
        evaluation = bool(block.evaluation) and block.evaluation[row]
        if known and not evaluation and not math.isfinite(loss):
            yield NotFinite(block.micro_of_step[row], block.micro_step[row], block.rank, loss)


def first_of(found: Sequence[NotFinite], *, seen_steps: Iterable[int | None], waited_s: float) -> NotFinite | None:
    """The first of all ranks, once every rank has reported that step (or has had its time to): a later report may tell of an earlier step."""
    if not found:
        return None
    first = min(found)
    all_seen = all(step is not None and step >= first.step for step in seen_steps)
    return first if all_seen or waited_s >= PATIENCE_S else None


def reason_of(first: NotFinite) -> str:
    return f"rank {first.rank}, step {first.step}: the loss is {first.loss}"
