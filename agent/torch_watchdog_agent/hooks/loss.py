"""The local loss of a micro-step: what backward starts from, before any all-reduce can spread a NaN."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.scaler import unscaled

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    theirs = module.backward

    @functools.wraps(theirs)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        _seen(tensors)
        return theirs(tensors, *args, **kwargs)

    module.backward = backward  # type: ignore[attr-defined]


@guarded("loss")
def _seen(tensors: Any) -> None:
    here = rank()
    if here is None:
        return
    loss = tensors if not isinstance(tensors, (list, tuple)) else tensors[0] if len(tensors) == 1 else None
    if loss is not None:
        here.history.loss_seen(unscaled(loss))
