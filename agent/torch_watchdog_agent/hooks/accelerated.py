"""accelerate's optimizers: a step that was left out by a veto is called skipped, as one that a loss scaler left out is.

What accelerate and transformers' Trainer ask then is this word: their schedulers stand still for such a step.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded
from torch_watchdog_agent.hooks.optimizer import left_out

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    theirs = module.AcceleratedOptimizer.step

    @functools.wraps(theirs)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = theirs(self, *args, **kwargs)
        _mark(self)
        return result

    module.AcceleratedOptimizer.step = step


@guarded("accelerate's skipped step")
def _mark(accelerated: Any) -> None:
    """Where there is a scaler accelerate itself takes the word back, with the next step that is applied."""
    if accelerated.optimizer in left_out:
        accelerated._is_overflow = True
    elif accelerated.scaler is None:
        accelerated._is_overflow = False
