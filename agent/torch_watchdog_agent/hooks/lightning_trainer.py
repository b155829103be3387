"""Lightning's Trainer: a script that names no checkpoint goes on from that of --resume, where it is Lightning's."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, launch_config

__all__ = ["patch"]

_ARGUMENT = "ckpt_path"


def patch(module: ModuleType) -> None:
    theirs = module.Trainer.fit
    signature = inspect.signature(theirs)
    if _ARGUMENT not in signature.parameters:
        return

    @functools.wraps(theirs)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = _asked()
        if asked is not None and signature.bind(self, *args, **kwargs).arguments.get(_ARGUMENT) is None:
            bound = signature.bind(self, *args, **kwargs)
            bound.arguments[_ARGUMENT] = asked
            return theirs(*bound.args, **bound.kwargs)
        return theirs(self, *args, **kwargs)

    module.Trainer.fit = fit


@guarded("Lightning's checkpoint")
def _asked() -> str | None:
    from torch_watchdog_agent.checkpoint.by_lightning import FILE

    config = launch_config()  # not the rank: how many there are is known only once Lightning has started the others
    path = None if config is None or config.resume is None else Path(config.resume) / FILE
    return str(path) if path is not None and path.is_file() else None
