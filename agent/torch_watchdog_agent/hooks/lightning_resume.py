"""Lightning in the middle of an epoch: a run that resumes from a checkpoint of ours goes on at the batch that comes next, with the generators of that moment.

Lightning itself begins the epoch's data anew, unless the loader keeps its own state. Like the Trainer it meets the vetoed batch again; the samples that were
left out stay out of it. Owns where a fetcher has to be brought; how a batch is fetched is hooks/lightning.py's.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.looked_at import Pass
from torch_watchdog_agent.hooks.order_of_another import whose_it_takes
from torch_watchdog_agent.hooks.passes import asking, here_now
from torch_watchdog_agent.hooks.tracks import track_of

__all__ = ["Resuming", "begun", "catch_up", "patch", "take"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """A training's loop and where its data goes on. `begun`: what the generators were behind the making of the epoch's iterator. `of_another`: says that this
    is another rank's place, and this one's own order is lost.
    """

    loop: Any
    position: LoaderPosition
    of_another: Callable[[], None] | None = None
    begun: RngState | None = None

    @property
    def batches(self) -> int:
        """What Lightning counts as done in this epoch, once its loop has begun."""
        return int(self.loop.epoch_loop.batch_progress.current.ready)


_coming: Resuming | None = None  # for the fetcher that the training's loop makes just now


def patch(module: ModuleType) -> None:
    theirs = module._FitLoop.setup_data

    @functools.wraps(theirs)
    def setup_data(self: Any) -> Any:
        global _coming
        _coming = _resumes(self) if self._combined_loader is None else None
        if self._combined_loader is None:
            _begins(self.trainer)
        try:
            return theirs(self)
        finally:
            _coming = None

    module._FitLoop.setup_data = setup_data
    _hear_of_evaluations(importlib.import_module(f"{module.__name__.rpartition('.')[0]}.evaluation_loop")._EvaluationLoop)


def _hear_of_evaluations(loop: Any) -> None:
    theirs = loop._on_evaluation_end

    @functools.wraps(theirs)
    def on_evaluation_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tells()
        return theirs(self, *args, **kwargs)

    loop._on_evaluation_end = on_evaluation_end


@guarded("Lightning's evaluation")
def _tells() -> None:
    from torch_watchdog_agent.checkpoint import by_lightning

    by_lightning.tells_of_evaluation()


@guarded("Lightning's count")
def _begins(trainer: Any) -> None:
    from torch_watchdog_agent.checkpoint import by_lightning

    by_lightning.fits(trainer)


@guarded("Lightning's data position")
def _resumes(loop: Any) -> Resuming | None:
    from torch_watchdog_agent.checkpoint import by_lightning
    from torch_watchdog_agent.checkpoint.manifest import read_manifest
    from torch_watchdog_agent.checkpoint.rank_file import RankFile, without_random_state
    from torch_watchdog_proto.checkpoint_names import MANIFEST

    here, given = rank(), loop.trainer.ckpt_path
    if here is None or given is None or not (Path(given).parent / MANIFEST).exists():
        return None
    folder = Path(given).parent
    manifest = read_manifest(folder)
    if manifest["format"] != by_lightning.FORMAT:
        return None
    here.resumed(folder, updates_applied=manifest["updates_applied"])
    if loop._combined_loader_states_to_load:
        return None  # the loader brings itself to its place
    if manifest["world_size"] != loop.trainer.world_size:
        here.say(f"{folder} was written by {manifest['world_size']} ranks: the epoch's data begins anew")
        return None
    mine, is_own = RankFile.of(folder, manifest, rank=loop.trainer.global_rank, world_size=loop.trainer.world_size)
    if not is_own:  # the rank had failed: it keeps the generators that it has
        here.say(without_random_state(loop.trainer.global_rank, folder))
        position = replace(mine.position, rng=RngState.capture())
        return Resuming(loop=loop, position=position, of_another=lambda: here.say(whose_it_takes(mine.rank, position.epoch)))
    return Resuming(loop=loop, position=mine.position)


def take(fetcher: Any) -> Resuming | None:
    """What `fetcher` has to go on from, where its iterator is about to be made: then its pass begins with the random state that the epoch began with."""
    if _coming is not None:
        _prepare(_coming, fetcher)
    return _coming


@guarded("Lightning's data position")
def _prepare(coming: Resuming, fetcher: Any) -> None:
    track = track_of(fetcher)
    track.resume, track.epoch, track.of_another = coming.position, coming.position.epoch, coming.of_another
    for loader in coming.loop._combined_loader.flattened:  # Lightning says so after workers have begun to fetch
        for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(coming.loop.epoch_progress.current.processed)


def begun(coming: Resuming) -> Resuming:
    """Its iterator has been made."""
    return replace(coming, begun=RngState.capture())


def catch_up(coming: Resuming, fetcher: Any, one: Pass) -> None:
    """Drops the batches that were done, unseen, and brings back the random state of the boundary. What is fetched ahead stays as far ahead."""
    batches, track = coming.batches, one.stand.track
    begun_as, track.resume = track.resume, None
    ahead: deque[Any] = deque(fetcher.batches, maxlen=len(fetcher.batches))
    here_now.skipping = True
    try:
        with asking(one), suppress(StopIteration):  # the data set is shorter than it was
            for _ in range(batches):
                ahead.append(next(fetcher.iterator))
                if len(one.fetched) > len(fetcher.batches):
                    one.fetched.popleft()
    finally:
        here_now.skipping = False
    fetcher.batches = list(ahead)
    one.stand.batches = batches
    _settle(coming, batches)
    if coming.of_another is not None and begun_as is not None:
        _its_own_again(begun_as.rng, track.generators)


@guarded("Lightning's data position")
def _its_own_again(kept: RngState, generators: tuple[Any, ...]) -> None:
    """A loader's own generators, of a rank that has begun this epoch as another one had: from the next on its order is its own."""
    for generator, state in zip(generators, kept.own, strict=False):
        generator.set_state(state)


@guarded("Lightning's data position")
def _settle(coming: Resuming, batches: int) -> None:
    here = rank()
    if batches not in (coming.position.batches, coming.position.batches - 1):
        return  # between two epochs: nothing of this one's has been used
    # Before an epoch's first batch its order is still to be drawn, and what a checkpoint from within that batch's step has is of behind the draw.
    at = coming.position.rng if batches or coming.begun is None else coming.begun
    at.restore()
    if here is not None and batches and here.identity.rank == 0:
        here.say(f"the data goes on behind batch {batches} of the epoch, whatever Lightning says of its loader")
