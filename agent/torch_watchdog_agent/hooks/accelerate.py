"""accelerate: the loader that the user's loop iterates is theirs, torch's inside it is one batch ahead.

A dispatcher's batches are parts of what rank 0 has put together: they are looked at when they are handed over, and their samples are not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.passes import outer_iteration

__all__ = ["patch"]


_patched = False


def patch(module: ModuleType) -> None:
    """Patches accelerate's loaders once."""
    global _patched
    if _patched:
        return
    _patched = True
    for name, inside in (("DataLoaderShard", True), ("SkipDataLoader", True), ("DataLoaderDispatcher", False)):
        loader = getattr(module, name)
        loader.__iter__ = _outermost(loader.__iter__, inside=inside)


def _outermost(theirs: Callable[[Any], Iterator[Any]], *, inside: bool) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(theirs)
    def iterate(self: Any) -> Iterator[Any]:
        yield from outer_iteration(self, lambda: theirs(self), inside=inside, skip=getattr(self, "skip_batches", 0))

    return iterate
