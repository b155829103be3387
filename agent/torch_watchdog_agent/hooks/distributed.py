"""DistributedDataParallel: which module is the model; and how long a rank may be held without a collective of another one giving up."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.rescue.replica import wrapped

__all__ = ["group_timeout_s", "hold_timeout_s", "patch"]


def patch(module: ModuleType) -> None:
    theirs = module.DistributedDataParallel.__init__

    @functools.wraps(theirs)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        _seen(self)

    module.DistributedDataParallel.__init__ = initialise


@guarded("model")
def _seen(wrapper: Any) -> None:
    here, model = rank(), wrapper.module
    wrapped(wrapper)
    if here is not None:
        here.subjects.model_seen(model)
        here.guard.model_seen(model)


def hold_timeout_s() -> float:
    """A quarter of the smallest process group's timeout: the others wait in a collective meanwhile."""
    return group_timeout_s() / 4


def group_timeout_s() -> float:
    """After which the first of this process's groups gives a collective up."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    groups = list(distributed._world.pg_map) if distributed is not None else []
    timeouts_s = [group._get_backend(device).options._timeout.total_seconds() for group in groups for device in group._device_types]
    return min(timeouts_s, default=float("inf"))
