"""DataLoaders: every batch is looked at when it leaves torch's loader, and acted on when the user's loop gets it.

Owns where each loader stands (epoch, batches handed over, the random state its iteration began with), for checkpoints and for resuming. The outermost loader
counts: a framework's loader that wraps torch's calls `outer_iteration`, and what happens inside it is only a fetch.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.hooks.active import guarded, rank

__all__ = ["outer_iteration", "patch", "resume_at", "training_position"]

_INDICES = "_torch_watchdog_indices"


@dataclass(slots=True)
class _Track:
    """Where one loader stands. `epoch` counts its iterations from 0."""

    epoch: int = -1
    batches: int = 0
    rng_at_iter: Any = None
    resume: LoaderPosition | None = None
    fetched: deque[Any] = field(default_factory=deque)  # looked at, not handed over yet


class _Inside(threading.local):
    """Depth of outer loaders that are asking for a batch just now; and whether batches are only being skipped."""

    outer: _Track | None = None
    skipping = False


_tracks: weakref.WeakKeyDictionary[Any, _Track] = weakref.WeakKeyDictionary()
_training: _Track | None = None  # the loader that the last training batch came from
_inside = _Inside()
_patched = False


def patch(module: ModuleType) -> None:
    """Patches torch's DataLoader once."""
    global _patched
    if _patched:
        return
    _patched = True
    base = module._BaseDataLoaderIter
    module.DataLoader.__iter__ = _beginning(module.DataLoader.__iter__)
    base.__next__ = _fetching(base.__next__)
    base._next_index = _indexing(base._next_index)
    base._reset = _resetting(base._reset)


def resume_at(loader: Any, position: LoaderPosition) -> None:
    """The next iteration over `loader` continues at `position`. Works without a wrapped launch, too."""
    import torch.utils.data.dataloader

    patch(torch.utils.data.dataloader)
    track = _tracks.setdefault(loader, _Track())
    track.resume, track.epoch = position, position.epoch - 1


def training_position() -> LoaderPosition:
    """Where the training's loader stands, with the random state of this moment. Where no loader was seen: at the very start."""
    from torch_watchdog_agent.checkpoint.rng import RngState

    track = _training or _Track(epoch=0)
    return LoaderPosition(epoch=track.epoch, batches=track.batches, rng_at_iter=track.rng_at_iter, rng=RngState.capture())


# torch's own loader


def _beginning(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(theirs)
    def iterate(self: Any) -> Any:
        if _inside.outer is not None:
            return theirs(self)
        track = _begin(self)
        iterator = theirs(self)
        if track is not None:
            _catch_up(track, iterator)
            iterator.__dict__["_torch_watchdog_track"] = track
        return iterator

    return iterate


def _fetching(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(theirs)
    def fetch(self: Any) -> Any:
        outer = _inside.outer
        if outer is None and not _inside.skipping:
            _before_fetch()
        began_ns = time.monotonic_ns()
        with _untraced():
            batch = theirs(self)
        loader_ns = time.monotonic_ns() - began_ns
        indices = self.__dict__[_INDICES].popleft() if self.__dict__.get(_INDICES) else None
        if _inside.skipping:
            return batch
        track = outer if outer is not None else self.__dict__.get("_torch_watchdog_track")
        _fetched(track, batch, indices)
        return batch if outer is not None else _hand_over(track, batch, loader_ns)

    return fetch


def _indexing(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(theirs)
    def next_index(self: Any) -> Any:
        index = theirs(self)
        self.__dict__.setdefault(_INDICES, deque()).append(index)
        return index

    return next_index


def _resetting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault(_INDICES, deque()).clear()
        return theirs(self, *args, **kwargs)

    return reset


# A loader around torch's


def outer_iteration(loader: Any, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Iterates the loader that the user's loop sees; torch's loader inside only fetches."""
    if _inside.outer is not None:
        yield from iterate()
        return
    track = _begin(loader) or _Track()
    with _asking(track):
        inner = iter(iterate())
    if track.resume is not None:
        with _asking(track):
            _catch_up(track, inner)
    try:
        while True:
            _before_fetch()
            began_ns = time.monotonic_ns()
            try:
                with _asking(track), _untraced():
                    batch = next(inner)
            except StopIteration:
                return
            yield _hand_over(track, batch, time.monotonic_ns() - began_ns)
    finally:
        close = getattr(inner, "close", None)
        if close is not None:
            close()


@contextmanager
def _asking(track: _Track) -> Iterator[None]:
    _inside.outer = track
    try:
        yield
    finally:
        _inside.outer = None


# What both do


def _begin(loader: Any) -> _Track | None:
    """A new iteration over `loader`: remembers the random state it starts from, or brings back the one of a checkpoint."""
    track = _begin_track(loader)
    if track is not None and track.resume is not None and track.resume.rng_at_iter is not None:
        track.resume.rng_at_iter.restore()
        track.rng_at_iter = track.resume.rng_at_iter
    return track


@guarded("loader")
def _begin_track(loader: Any) -> _Track:
    from torch_watchdog_agent.checkpoint.rng import RngState

    track = _tracks.setdefault(loader, _Track())
    track.epoch += 1
    track.batches = 0
    track.fetched.clear()
    track.rng_at_iter = RngState.capture()
    return track


def _catch_up(track: _Track, iterator: Any) -> None:
    """Takes the batches that were consumed before the checkpoint, unseen, then brings back the random state of its boundary."""
    resume, track.resume = track.resume, None
    if resume is None or resume.rng_at_iter is None:  # no iterator had been made: the random state of the boundary is what it starts from
        return
    _inside.skipping = True
    try:
        for _ in range(resume.batches):
            next(iterator)
    except StopIteration:
        pass  # the data set is shorter than it was: the loop ends as an empty epoch
    finally:
        _inside.skipping = False
    track.batches = resume.batches
    resume.rng.restore()


def _untraced() -> AbstractContextManager[object]:
    """Collation must not land on the tape of a traced step."""
    return _without_modes() or nullcontext()


@guarded("loader")
def _without_modes() -> AbstractContextManager[object] | None:
    from torch.utils._python_dispatch import _disable_current_modes

    here = rank()
    return _disable_current_modes() if here is not None and here.guard.tracing else None  # only ours is there then


@guarded("boundary")
def _before_fetch() -> None:
    here = rank()
    if here is not None:
        here.before_fetch()


@guarded("loader")
def _fetched(track: _Track | None, batch: Any, indices: Any) -> None:
    here = rank()
    if here is not None and track is not None:
        listed = indices if isinstance(indices, (list, tuple)) else [indices]
        track.fetched.append(here.fetched(batch, indices=listed if _whole(listed) else None, worker=None))


def _whole(indices: Any) -> bool:
    return all(isinstance(index, int) for index in indices)


def _hand_over(track: _Track | None, batch: Any, loader_ns: int) -> Any:
    replaced = _handed(track, batch, loader_ns)
    return batch if replaced is None else replaced[0]


@guarded("hand-over")
def _handed(track: _Track | None, batch: Any, loader_ns: int) -> tuple[Any] | None:
    global _training
    import torch

    here = rank()
    if here is None or track is None:
        return None
    track.batches += 1
    evaluation = not torch.is_grad_enabled()
    if not evaluation:
        _training = track
    # A loader that gets its batches from another rank has fetched nothing: then the batch is looked at now.
    checked = track.fetched.popleft() if track.fetched else here.fetched(batch, indices=None, worker=None)
    return (here.handed(batch, checked, loader_ns=loader_ns, evaluation=evaluation),)
