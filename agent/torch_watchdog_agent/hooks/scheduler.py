"""Learning rate schedulers: part of the state that a checkpoint needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, rank

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    """Every class that sets itself up: SequentialLR, ChainedScheduler and ReduceLROnPlateau do so without their base."""
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "__init__" in vars(kind) and hasattr(kind, "load_state_dict"):
            kind.__init__ = _telling(vars(kind)["__init__"])  # type: ignore[misc]


def _telling(theirs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(theirs)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        _seen(self)

    return initialise


@guarded("scheduler")
def _seen(scheduler: Any) -> None:
    here = rank()
    if here is not None:
        here.subjects.scheduler_seen(scheduler)
