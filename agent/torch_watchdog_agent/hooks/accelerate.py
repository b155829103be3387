"""accelerate's prepared loaders: the loader that the user's loop iterates is theirs; torch's inside it is one batch ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.loader import outer_iteration

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    for loader in (module.DataLoaderShard, module.DataLoaderDispatcher):
        loader.__iter__ = _outermost(loader.__iter__)


def _outermost(theirs: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(theirs)
    def iterate(self: Any) -> Iterator[Any]:
        yield from outer_iteration(self, lambda: theirs(self))

    return iterate
