"""loss.not_finite, grad.not_finite: the first rank whose own loss is NaN or infinite, before the all-reduce has spread it; or the first step whose losses
were finite and whose gradients were not, where the loop computes their norm, or we do on request (`watch_gradients`).

Pure: losses as ranks reported them in, a finding with its reason out. Knows nothing of orders or incidents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch_watchdog.rules.named import named
from torch_watchdog_proto.messages import StepBlock

__all__ = ["Divergence", "NotFinite", "first_of", "not_finite", "patience_s", "training_losses"]

_AFTER_ALL_LOSSES = 1 << 31  # the place of a gradient among the micro-steps of its step

_PATIENCE_S = 2.0  # for the reports of the other ranks, which may tell of an earlier step
_MORE_RANKS = 256  # for each so many a second more, four at most: nodes of large jobs report less often


def patience_s(ranks: int) -> float:
    """How long the reports of all ranks are waited for."""
    return _PATIENCE_S + min(4, ranks // _MORE_RANKS)


@dataclass(frozen=True, slots=True, order=True)
class NotFinite:
    """One loss, or norm of gradients, that is no number, sorted by where it came in the training."""

    step: int
    micro_step: int
    rank: int
    loss: float
    is_of_shard: bool = False  # a norm of what this rank holds of gradients that ranks share

    @property
    def is_gradient(self) -> bool:
        return self.micro_step == _AFTER_ALL_LOSSES


def not_finite(block: StepBlock) -> tuple[NotFinite, ...]:
    """Every training loss and gradient norm in it that is NaN or infinite; losses of an evaluation train nothing and are left out."""
    if math.isfinite(sum(block.loss) + sum(block.grad_norm)):
        return ()  # nearly all of them, and a job has thousands a second
    return (*(one for one in training_losses(block) if not math.isfinite(one.loss)), *_norms_of(block))


def training_losses(block: StepBlock) -> Iterable[NotFinite]:
    """All that are known, those that are numbers too."""
    for row, (loss, known) in enumerate(zip(block.loss, block.loss_known, strict=False)):
        evaluation = bool(block.evaluation) and block.evaluation[row]
        if known and not evaluation:
            yield NotFinite(block.micro_of_step[row], block.micro_step[row], block.rank, loss)


def _norms_of(block: StepBlock) -> Iterable[NotFinite]:
    for step, norm, vetoed in zip(block.step, block.grad_norm, block.vetoed, strict=False):
        if not math.isfinite(norm) and not vetoed:
            yield NotFinite(step, _AFTER_ALL_LOSSES, block.rank, norm, block.norms_of_shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step in which a loss is no number, and whose it is there. `everywhere`: on all of several ranks, so that no single one is at fault;
    `alone`: there is one rank only."""

    first: NotFinite
    ranks: tuple[int, ...]
    everywhere: bool
    alone: bool = False

    @property
    def kind(self) -> str:
        return "grad.not_finite" if self.first.is_gradient else "loss.not_finite"

    @property
    def origin(self) -> int | None:
        """Nobody where all met it, and where a rank only holds what the batches of all have made."""
        return None if self.everywhere or self.first.is_of_shard else self.first.rank

    @property
    def summary(self) -> str:
        step, loss = self.first.step, self.first.loss
        if self.first.is_gradient:
            who = f"all {len(self.ranks)} ranks" if self.everywhere else named(self.ranks)
            what = (
                "the gradients"
                if not self.first.is_of_shard
                else "their shards of the gradients"
                if len(self.ranks) > 1
                else "its shard of the gradients"
            )
            return f"{who}, step {step}: the norm of {what} is {loss}, the losses were finite"
        if self.everywhere:
            return f"step {step}: the loss is not finite on any of {len(self.ranks)} ranks ({loss} on rank {self.first.rank})"
        more = f", and not finite on {named(self.ranks[1:])}" if len(self.ranks) > 1 else ""
        return f"rank {self.first.rank}, step {step}: the loss is {loss}{more}"

    @property
    def cause(self) -> str:
        if self.first.is_gradient:
            made = f"backward made a gradient that is not finite at step {self.first.step} out of losses that were"
            spoils = "an update with it spoils every parameter"
            shared = f"it lies in the shard of {named(self.ranks)}, and any rank's batch may have made it, for gradients are summed before they are sharded"
            return f"{made}: {shared if self.first.is_of_shard and not self.everywhere else spoils}"
        if self.everywhere:
            return f"every rank's loss was not finite in the same step {self.first.step}: what the ranks share went wrong before, and no one rank's batch"
        if len(self.ranks) > 1:
            return f"the losses of {named(self.ranks)} were not finite at step {self.first.step}, the others' were: the all-reduce then spreads it"
        if self.alone:
            return f"the loss was {self.first.loss} at step {self.first.step}: an update with it spoils every parameter"
        return f"the loss of rank {self.first.rank} was {self.first.loss} at step {self.first.step}, before any other rank's: the all-reduce then spreads it"

    @property
    def fix(self) -> str:
        if self.first.is_gradient:
            return "look for a square root, logarithm or norm at 0 and for a division by a small number; train that part in float32"
        whose = "it" if self.alone else "that rank"
        return (
            "look at the steps before (learning rate, gradient norm, mixed precision) and at what all ranks take in, such as a shared table or weight"
            if self.everywhere
            else f"look at what {whose} was given in step {self.first.step} and at the step before (learning rate, gradient norm, mixed precision)"
        )


def first_of(found: Sequence[NotFinite], *, seen_steps: Mapping[int, int | None], waited_s: float) -> Divergence | None:
    """The first of all ranks, once every rank has reported that step (or has had its time to): a later report may tell of an earlier step."""
    if not found:
        return None
    first = min(found)
    needed = first.step + first.is_gradient  # a norm is told when its step is done, a little after the batch
    all_seen = all(step is not None and step >= needed for step in seen_steps.values())
    if not all_seen and waited_s < patience_s(len(seen_steps)):
        return None
    ranks = tuple(sorted({one.rank for one in found if one.step == first.step and one.is_gradient == first.is_gradient}))
    return Divergence(first=first, ranks=ranks, everywhere=len(ranks) > 1 and set(ranks) >= set(seen_steps), alone=len(seen_steps) == 1)
