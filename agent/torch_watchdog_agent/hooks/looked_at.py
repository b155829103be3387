"""The batches of one pass over a loader that were looked at when they were made, and which of them the loop gets.

Owns that judgement: between a look and a hand-over a loader may drop, reorder, move or copy.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch_watchdog_agent.finalizing import unless_finalizing
from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.indices import Source
from torch_watchdog_agent.hooks.left import left
from torch_watchdog_agent.hooks.tracks import Stand

__all__ = ["Pass", "length_for_scan", "without_modes_of"]

MAX_FETCHED = 256  # batches that a loop may have asked for and not got yet


@guarded("scan")
def length_for_scan(loader: Any) -> int | None:
    """How many batches a pass over it has; None where no scan asks, or nobody knows."""
    here = rank()
    if here is None or here.scan is None:
        return None
    try:
        return len(loader)
    except TypeError:
        return None


@dataclass(slots=True, eq=False)
class Pass:
    """One iterator over a loader. `fetched`: looked at, not handed over yet. `one_by_one`: every hand-over so far had exactly one fetch before it."""

    stand: Stand = field(default_factory=Stand)
    fetched: deque[Any] = field(default_factory=lambda: deque(maxlen=MAX_FETCHED))
    one_by_one: bool = True
    total: int | None = None  # batches, where a scan needs to know

    @unless_finalizing
    def __del__(self) -> None:
        left(self.stand)

    def found(self, batch: Any) -> tuple[Source, Any]:
        """What was seen of this batch when it was made: where it came from, and what was found then, None where it must be looked at anew.

        Batches that a loader dropped in between are forgotten. Samples are told only where the batch is surely the one that was fetched.
        """
        fetched = self.fetched
        for place, (made, source, checked) in enumerate(fetched):
            if made is batch or _is_same(batch, made, checked, moved=place == 0):
                self.one_by_one &= place == 0 and len(fetched) == 1
                for _ in range(place + 1):
                    fetched.popleft()
                return source, checked
        certain = self.one_by_one and len(fetched) == 1
        source = fetched[0][1] if certain else Source()
        self.one_by_one &= certain
        fetched.clear()
        return source, None


def without_modes_of(here: Any) -> AbstractContextManager[object] | None:
    """What loaders do must not land on the tape of a traced step. None where no step is traced: this runs for each batch."""
    return None if here is None or not here.guard.tracing else _no_modes()


@guarded("loader")
def _no_modes() -> AbstractContextManager[object]:
    from torch.utils._python_dispatch import _disable_current_modes

    without: AbstractContextManager[object] = _disable_current_modes()  # only ours is there now
    return without


def _is_same(batch: Any, made: Any, checked: Any, *, moved: bool) -> bool:
    """Whether the batch holds exactly the tensors of the one that was made; `moved`: or what may be their copies."""
    from torch_watchdog_agent.contract.flatten import leaves_of

    leaves = leaves_of(made) if checked is None else checked.leaves
    own = leaves_of(batch, leaves)
    if not leaves or own.keys() != leaves.keys():
        return False
    if any(own[key] is tensor for key, tensor in leaves.items()):
        return True
    with without_modes_of(rank()) or nullcontext():
        return moved and all(_may_be_copy(own[key], tensor) for key, tensor in leaves.items())


def _may_be_copy(own: Any, made: Any) -> bool:
    """On another device its content is not looked at; `to("cpu:0")`, as accelerate asks for, copies what is on the CPU already."""
    if own.shape != made.shape or own.dtype != made.dtype:
        return False
    return own.device != made.device or (own.device.type == "cpu" and bool(own.equal(made)))
