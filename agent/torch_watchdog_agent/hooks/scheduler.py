"""Learning rate schedulers: part of the state that a checkpoint needs."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, rank

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    theirs = module.LRScheduler.__init__

    @functools.wraps(theirs)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        _seen(self)

    module.LRScheduler.__init__ = initialise


@guarded("scheduler")
def _seen(scheduler: Any) -> None:
    here = rank()
    if here is not None:
        here.subjects.scheduler_seen(scheduler)
