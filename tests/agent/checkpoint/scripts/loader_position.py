"""Where a loop stands in its data, counted by the loop itself: what the loader hook does in a wrapped launch, without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState

_now: dict[str, Any] = {"epoch": 0, "batches": 0, "rng_at_iter": None}


def position() -> LoaderPosition:
    return LoaderPosition(**_now, rng=RngState.capture())


def counted(loader: Any, epoch: int) -> Iterator[Any]:
    """Iterate one epoch."""
    _now.update(epoch=epoch, batches=0, rng_at_iter=RngState.capture())
    for batch in loader:
        _now["batches"] += 1
        yield batch
