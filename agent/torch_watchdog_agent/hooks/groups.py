"""Process groups: which connections belong to them, and when one is torn down while an exception is in flight."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import failing_rank, guarded, joined_others
from torch_watchdog_agent.rescue import sockets

__all__ = ["living", "patch"]


def patch(module: ModuleType) -> None:
    module._new_process_group_helper = _listed(module._new_process_group_helper)  # type: ignore[attr-defined]
    module.destroy_process_group = _noticed(module.destroy_process_group)  # type: ignore[attr-defined]
    module.init_process_group = _joined(module.init_process_group)  # type: ignore[attr-defined]


def living() -> list[Any]:
    """The process groups of this process; none where torch.distributed was never imported."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    return list(distributed._world.pg_map) if distributed is not None else []


def _listed(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def make(*args: Any, **kwargs: Any) -> Any:
        with sockets.made_here():
            return theirs(*args, **kwargs)

    return make


def _joined(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def join(*args: Any, **kwargs: Any) -> Any:
        made = theirs(*args, **kwargs)
        joined_others()
        return made

    return join


def _noticed(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`finally: destroy_process_group()` runs before anybody hears of the exception, and takes its time."""

    @functools.wraps(theirs)
    def destroy(*args: Any, **kwargs: Any) -> Any:
        _in_flight()
        return theirs(*args, **kwargs)

    return destroy


@guarded("groups")
def _in_flight() -> None:
    error = sys.exception()
    here = None if error is None else failing_rank(error)
    if error is not None and here is not None:
        here.rescuer.noticed(error)
