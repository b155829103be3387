"""A rank that failed has no part in the checkpoint: it goes on from the place of one that saved, and draws its epoch's order as that one did.

That is right where all ranks share one order. Where each shuffles by itself, with a seed of its own, they would train on the same batches: its own order is
kept where it is sure to be the epoch's, and else it is said. Knows no passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.hooks.tracks import Track

__all__ = ["begin_as", "whose_it_takes"]


def whose_it_takes(saver: int, epoch: int) -> str:
    """What is said of it."""
    return (
        f"it shuffles its data by another seed than rank {saver}, which saved, and its own order is lost: for the rest of epoch {epoch} it takes that rank's "
        "order, so that both train on the same batches where each shuffles all the data by itself"
    )


def begin_as(resume: LoaderPosition, saved: RngState, loader: Any, track: Track) -> RngState:
    """Puts the generators to what this pass begins with, and returns that. `saved`: what it began with there."""
    if track.of_another is not None and any(map(_shuffles_by_itself, _loaders(loader))):
        mine = RngState.capture(track.generators)
        both = list(zip(mine.own or (mine.torch_cpu,), saved.own or (saved.torch_cpu,), strict=False))
        if any(_seed_of(own) != _seed_of(its) for own, its in both):
            if resume.epoch and all(_is_new(own) and _is_new(its) for own, its in both):
                return mine  # its script seeds at the head of each epoch
            track.of_another()
            track.resume = replace(resume, rng=resume.rng._replace(own=mine.own))  # from the next epoch on it is its own again
    saved.restore(track.generators)
    return saved


def _loaders(loader: Any) -> Sequence[Any]:
    """Those that a fetcher of Lightning's holds, else the one."""
    combined = getattr(loader, "_combined_loader", None)
    return (loader,) if combined is None else combined.flattened


def _shuffles_by_itself(loader: Any) -> bool:
    """Whether its order comes of a generator and nothing else: torch's own samplers, which know no ranks, and no framework around them."""
    from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

    if type(loader).__module__.startswith("accelerate."):
        return False
    own = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return type(getattr(loader, "sampler", None)) in own and type(getattr(loader, "batch_sampler", None)) in (BatchSampler, type(None))


def _seed_of(state: Any) -> int:
    import torch

    generator = torch.Generator()
    generator.set_state(state)
    return int(generator.initial_seed())


def _is_new(state: Any) -> bool:
    """Whether nothing has been drawn since it was seeded."""
    import torch

    return bool(torch.Generator().manual_seed(_seed_of(state)).get_state().equal(state))
