"""accelerate's Accelerator: the loss before it is divided, and a state that a script loads by itself from a checkpoint of ours."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks import loss
from torch_watchdog_agent.hooks.active import guarded, rank

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    _know_the_loss(module.Accelerator)
    _hear_of_loads(module.Accelerator)


def _know_the_loss(accelerator: Any) -> None:
    """`Accelerator.backward(loss)` divides by the accumulation steps: the loop's own loss is the one that is recorded."""
    theirs = accelerator.backward

    @functools.wraps(theirs)
    def backward(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        with loss.known(value):
            return theirs(self, value, *args, **kwargs)

    accelerator.backward = backward


def _hear_of_loads(accelerator: Any) -> None:
    theirs = accelerator.load_state

    @functools.wraps(theirs)
    def load_state(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = theirs(self, input_dir, *args, **kwargs)
        if input_dir is not None:
            _loaded(input_dir)
        return result

    accelerator.load_state = load_state


@guarded("accelerate's load_state")
def _loaded(input_dir: Any) -> None:
    """From a checkpoint of ours, or from a folder in it that the script's own saving function has made."""
    from torch_watchdog_agent.checkpoint.errors import CheckpointError
    from torch_watchdog_agent.checkpoint.manifest import read_manifest
    from torch_watchdog_proto.checkpoint_names import MANIFEST

    here, path = rank(), Path(input_dir).expanduser().absolute()
    folder = next((place for place in (path, *path.parents) if (place / MANIFEST).is_file()), None)
    if here is None or folder is None:
        return
    try:
        here.resumed(folder, updates_applied=read_manifest(folder)["updates_applied"])
    except CheckpointError:  # not a good one: the script has taken it all the same, and how many updates that is cannot be said
        here.resume.taken()
