"""DistributedDataParallel: which module is the model; how long its forward waits for other ranks; and how long a rank may be held without a
collective of another one giving up."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks import groups
from torch_watchdog_agent.hooks.active import collective_failed, guarded, rank
from torch_watchdog_agent.rescue.replica import wrapped

__all__ = ["group_timeout_s", "hold_timeout_s", "patch"]


def patch(module: ModuleType) -> None:
    theirs = module.DistributedDataParallel.__init__

    @functools.wraps(theirs)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        _seen(self)

    module.DistributedDataParallel.__init__ = initialise
    _time_waits(module.DistributedDataParallel)


def _time_waits(wrapper: Any) -> None:
    """Buffers, as those of BatchNorm, are sent from one rank to the others before each forward: who is early waits there, and not in backward."""
    theirs: Callable[..., Any] | None = getattr(wrapper, "_sync_buffers", None)
    if theirs is None:
        return

    @functools.wraps(theirs)
    def sync(self: Any) -> Any:
        begun_ns = time.monotonic_ns()
        try:
            return theirs(self)
        except RuntimeError as error:
            collective_failed(error)
            raise
        finally:
            _waited(time.monotonic_ns() - begun_ns)

    wrapper._sync_buffers = sync


@guarded("waits")
def _waited(spent_ns: int) -> None:
    here = rank()
    if here is not None:
        here.history.waited(spent_ns)


@guarded("model")
def _seen(wrapper: Any) -> None:
    here, model = rank(), wrapper.module
    wrapped(wrapper, _updates)
    if here is not None:
        here.subjects.model_seen(model)
        here.guard.model_seen(model)


def _updates() -> int:
    here = rank()
    return 0 if here is None else here.loop.updates_applied


def hold_timeout_s() -> float:
    """A quarter of the smallest process group's timeout: the others wait in a collective meanwhile."""
    return group_timeout_s() / 4


def group_timeout_s() -> float:
    """After which the first of this process's groups gives a collective up."""
    found = groups.living()
    timeouts_s = [group._get_backend(device).options._timeout.total_seconds() for group in found for device in group._device_types]
    return min(timeouts_s, default=float("inf"))
