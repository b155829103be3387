"""Stands in for the loader hook: counts batches, remembers the generators at `iter(loader)`, brings a loader back to a position."""

from __future__ import annotations

import sys
from types import ModuleType

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState

_now = {"epoch": 0, "batches": 0, "rng_at_iter": None}
_pending: list[LoaderPosition] = []


def position() -> LoaderPosition:
    return LoaderPosition(**_now, rng=RngState.capture())


def tracked(loader, epoch):
    """Iterate one epoch; the first one after `resume_at` begins where the position says."""
    start = _pending.pop() if _pending else None
    if start is not None and start.rng_at_iter is None:
        start = None  # no iterator had been made: there is nothing to redo
    if start is not None:
        start.rng_at_iter.restore()
    _now.update(epoch=epoch, batches=0, rng_at_iter=RngState.capture())
    batches = iter(loader)
    if start is not None:
        for _ in range(start.batches):
            next(batches)
        _now["batches"] = start.batches
        start.rng.restore()
    for batch in batches:
        _now["batches"] += 1
        yield batch


def resume_at(loader, where: LoaderPosition) -> None:
    _pending.append(where)


_module = ModuleType("torch_watchdog_agent.hooks.loader")
_module.resume_at = resume_at
sys.modules["torch_watchdog_agent.hooks.loader"] = _module
