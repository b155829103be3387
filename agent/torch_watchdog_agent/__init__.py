"""torch-watchdog, the part that runs in your training process. Nothing here needs to be imported: `watchdog torchrun ... train.py` is enough.

The public API, for loops that want more:

    resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    torch_watchdog_agent.on_checkpoint(my_save)    # my_save(path) is called on every rank instead of our own save
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint import on_checkpoint, restore
    from torch_watchdog_agent.errors import BadBatchError

__all__ = ["BadBatchError", "on_checkpoint", "restore"]

_HOMES = {"BadBatchError": "errors", "on_checkpoint": "checkpoint", "restore": "checkpoint"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
