"""torch-watchdog, the part that runs in your training process. Nothing here needs to be imported: `watchdog torchrun ... train.py` is enough.

The public API, for loops that want more; without a wrapped launch each call does nothing, or what it says:

    resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    torch_watchdog_agent.on_checkpoint(my_save)    # my_save(path) is called on every rank instead of our own save
    for batch in torch_watchdog_agent.watch(batches): ...    # any iterable of batches
    if torch_watchdog_agent.step(): ...    # right before parameters change, where no torch optimizer does it
    torch_watchdog_agent.attach(model=model)    # a model that no hook has seen
    torch_watchdog_agent.declare_bound("labels", low=0, high=9, ignored=-100)    # a bound to add
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint import on_checkpoint, restore
    from torch_watchdog_agent.contract.declared import declare_bound
    from torch_watchdog_agent.errors import BadBatchError
    from torch_watchdog_agent.hooks.byhand import attach, step, watch

__all__ = ["BadBatchError", "attach", "declare_bound", "on_checkpoint", "restore", "step", "watch"]

_HOMES = {
    "BadBatchError": "errors",
    "attach": "hooks.byhand",
    "declare_bound": "contract.declared",
    "on_checkpoint": "checkpoint",
    "restore": "checkpoint",
    "step": "hooks.byhand",
    "watch": "hooks.byhand",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
