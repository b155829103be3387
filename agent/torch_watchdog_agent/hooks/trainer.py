"""transformers' Trainer: from where it counts its steps, what it has saved itself, and where it goes on from a checkpoint.

Trainer takes the vetoed batch again; the samples that were left out stay out of it. A script that names no checkpoint goes on from that of --resume, where it
is a Trainer's.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_watchdog_agent.checkpoint.by_trainer import STATE_FILE, has_saved
from torch_watchdog_agent.hooks.active import guarded, rank

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    theirs = module.Trainer._load_optimizer_and_scheduler

    @functools.wraps(theirs)
    def load(self: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        result = theirs(self, checkpoint, *args, **kwargs)
        if checkpoint is not None:
            _resumed(Path(checkpoint))
        return result

    module.Trainer._load_optimizer_and_scheduler = load
    their_train = module.Trainer.train

    @functools.wraps(their_train)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return their_train(self, resume_from_checkpoint or _asked() or resume_from_checkpoint, *args, **kwargs)

    module.Trainer.train = train
    _hear_of_saves(module.Trainer)
    _tell_of_begin(module.CallbackHandler)


@guarded("trainer")
def _asked() -> str | None:
    here = rank()
    path = None if here is None else here.resume.holding(STATE_FILE)
    return None if path is None else str(path)


def _hear_of_saves(trainer: Any) -> None:
    theirs = trainer._save_checkpoint

    @functools.wraps(theirs)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = theirs(self, *args, **kwargs)
        _saved(self)
        return result

    trainer._save_checkpoint = save


@guarded("trainer's saves")
def _saved(trainer: Any) -> None:
    has_saved(trainer)


def _tell_of_begin(handler: Any) -> None:
    """Where it begins anew with smaller batches, too."""
    theirs = handler.on_train_begin

    @functools.wraps(theirs)
    def on_train_begin(self: Any, args: Any, state: Any, *more: Any, **named: Any) -> Any:
        _begins(state)
        return theirs(self, args, state, *more, **named)

    handler.on_train_begin = on_train_begin


@guarded("trainer")
def _begins(state: Any) -> None:
    here = rank()
    if here is not None:
        here.loop.steps_begin_at(state.global_step)


@guarded("trainer")
def _resumed(checkpoint: Path) -> None:
    here = rank()
    if here is not None and (checkpoint / STATE_FILE).exists():
        here.resumed(checkpoint, updates_applied=json.loads((checkpoint / STATE_FILE).read_text())["global_step"])
