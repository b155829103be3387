"""The norm of the gradients, where the loop computes it: clip_grad_norm_."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, rank

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    theirs = module.clip_grad_norm_

    @functools.wraps(theirs)
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        norm = theirs(*args, **kwargs)
        _clipped(norm)
        return norm

    module.clip_grad_norm_ = clip_grad_norm_  # type: ignore[attr-defined]


@guarded("clipping")
def _clipped(norm: Any) -> None:
    here = rank()
    if here is not None:
        here.history.norm_seen(norm)
