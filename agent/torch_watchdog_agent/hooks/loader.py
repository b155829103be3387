"""torch's own DataLoader, and torchdata's StatefulDataLoader, which is one: each of its iterators makes batches for the loop, or for a loader around it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.hooks import indices
from torch_watchdog_agent.hooks.passes import begin, catch_up, deafly, fetch, here_now, outlives_its_passes, to_its_beginning
from torch_watchdog_agent.hooks.tracks import track_of

__all__ = ["patch", "patch_stateful", "resume_at"]

_MARK = "_torch_watchdog_pass"
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_patched = _stateful_patched = False


def patch(module: ModuleType) -> None:
    """Patches torch's DataLoader once."""
    global _patched
    if _patched:
        return
    _patched = True
    module.DataLoader.__iter__ = _beginning(module.DataLoader.__iter__)
    module._BaseDataLoaderIter.__next__ = _fetching(module._BaseDataLoaderIter.__next__)
    indices.patch(module._BaseDataLoaderIter)
    indices.hear_workers(module._MultiProcessingDataLoaderIter)


def patch_stateful(module: ModuleType) -> None:
    """torchdata's iterators are torch's but for how they begin and how they hear from their workers. Once."""
    global _stateful_patched
    if _stateful_patched:
        return
    _stateful_patched = True
    module.StatefulDataLoader.__iter__ = _beginning(module.StatefulDataLoader.__iter__)
    indices.hear_workers(module._StatefulMultiProcessingDataLoaderIter)


def resume_at(
    loader: Any, position: LoaderPosition, *, again: Callable[[], None] | None = None, missed: Callable[[], None] | None = None,
    of_another: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """The next iteration over `loader` continues at `position`. Works without a wrapped launch, too. `again`: called once it stands there. `missed`: where
    the training takes its batches from an iteration that had begun before. `of_another`: where that is another rank's place, and this one's own order is lost.
    """
    import torch.utils.data.dataloader

    patch(torch.utils.data.dataloader)
    if _STATEFUL in sys.modules:
        patch_stateful(sys.modules[_STATEFUL])
    if "accelerate.data_loader" in sys.modules:
        from torch_watchdog_agent.hooks import accelerate

        accelerate.patch(sys.modules["accelerate.data_loader"])
    track = track_of(loader)
    track.resume, track.epoch = position, position.epoch
    track.again, track.missed, track.of_another = again, missed, of_another
    _forget_own_place(loader)


def _forget_own_place(loader: Any) -> None:
    """One that keeps its own state (torchdata's, in accelerate's too) may have loaded it already, and would pass over the same batches once more."""
    stateful = getattr(loader, "base_dataloader", loader)
    if getattr(stateful, "next_iter_state", None) is not None:
        stateful.next_iter_state = None


def _beginning(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(theirs)
    def iterate(self: Any) -> Any:
        if here_now.deaf:
            return theirs(self)
        outer = here_now.receiver
        one = begin(self) if outer is None else outer
        if outlives_its_passes(self, one):
            with deafly():
                theirs(self)
            to_its_beginning(self, one)
        if outer is not None:
            return theirs(self)
        with deafly():
            iterator = theirs(self)
            catch_up(one, iterator)
        iterator.__dict__[_MARK] = one
        return iterator

    return iterate


def _fetching(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(theirs)
    def next_batch(self: Any) -> Any:
        if here_now.deaf:
            return _unseen(self, theirs)
        return fetch(self.__dict__.get(_MARK), theirs, self)

    return next_batch


def _unseen(iterator: Any, theirs: Callable[[Any], Any]) -> Any:
    """The order of the indices is kept for the batches that will be seen."""
    try:
        return theirs(iterator)
    finally:
        indices.source_of(iterator)
