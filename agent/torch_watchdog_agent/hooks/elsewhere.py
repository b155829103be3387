"""Batches that another thread than the training's takes from a loader: a background prefetcher.

There a batch is only looked at and marked; a bad one is handed on as its legal stand-in, so that nothing can break whenever it is used. What needs the training
thread (tracing, holding) happens at the forward that gets the batch, found by its values. While nothing is marked, no forward is hooked.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch_watchdog_agent.hooks.active import guarded, made_rank, rank

if TYPE_CHECKING:
    from torch_watchdog_agent.hooks.indices import Source
    from torch_watchdog_agent.rank import Rank
    from torch_watchdog_proto.messages import Violation

__all__ = ["bad_in_flight", "handed"]

MAX_MARKS = 64
_Batch = TypeVar("_Batch")


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A batch on its way. `leaves`: its tensors as they were handed on."""

    checked: Any
    leaves: Mapping[str, Any]
    dataset: str


_marks: deque[_Mark] = deque(maxlen=MAX_MARKS)
_installing = threading.Lock()
_hook: Any = None
_has_met = False  # a forward has been seen to get a marked batch: bad ones are waited for, else held at once


def handed(batch: _Batch, source: Source) -> _Batch:
    """On the other thread. Never raises."""
    replaced = _marked(batch, source)
    return batch if replaced is None else replaced[0]


def bad_in_flight() -> list[tuple[Violation, str]]:
    """Of the batches on their way, those that the model cannot take, each with the name of its data set."""
    return [(mark.checked.violation, mark.dataset) for mark in tuple(_marks) if mark.checked.violation is not None]


@guarded("prefetching")
def _marked(batch: Any, source: Source) -> tuple[Any] | None:
    from torch_watchdog_agent.contract.flatten import leaves_of

    here = made_rank()
    if here is None:
        return None
    here.loop.fed_elsewhere = True
    checked = here.fetched(batch, indices=source.indices, worker=source.worker)
    if here.scan is not None:
        here.scan.seen_elsewhere(batch, source, checked, here.guard)
    if checked is None or not (checked.needs_trace or checked.violation or checked.warnings):
        return None
    if checked.violation is not None and here.config.policy != "observe":
        batch = here.guard.repaired(batch, checked) or batch
    _marks.append(_Mark(checked, leaves_of(batch), source.dataset or "?"))
    _watch_forwards()
    return (batch,)


def _watch_forwards() -> None:
    global _hook
    from torch.nn.modules.module import register_module_forward_pre_hook

    with _installing:
        if _hook is None:
            _hook = register_module_forward_pre_hook(_before_forward)


def _before_forward(_: Any, args: Any) -> None:
    """Keyword arguments are not told to hooks of all modules: they are read in the caller's frame."""
    _meet(args, sys._getframe(1).f_locals.get("kwargs"))


@guarded("forward")
def _meet(args: Any, kwargs: Any) -> None:
    global _has_met
    here = rank()
    if here is None:
        return  # another thread's forward
    for mark in tuple(_marks):
        used = _used(mark, args, kwargs)
        _has_met |= used is not None
        if used is not None or (mark.checked.violation is not None and not _has_met):
            _forget_up_to(mark)
            _hand_over(here, mark, used or {})
            return


def _used(mark: _Mark, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The forward's own tensors in place of the mark's, where it gets them or copies of them."""
    from torch_watchdog_agent.contract.flatten import leaves_of

    given = list(leaves_of((args, kwargs)).values())
    found = {key: tensor for key, leaf in mark.leaves.items() for tensor in given if tensor is leaf or _is_copy(tensor, leaf)}
    return found or None


def _is_copy(tensor: Any, leaf: Any) -> bool:
    import torch

    if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype or not tensor.numel() or tensor.requires_grad:
        return False
    return bool(torch.equal(tensor.detach().to(leaf.device), leaf))


def _forget_up_to(mark: _Mark) -> None:
    """Batches before it were dropped, or used where no module saw them."""
    global _hook
    while _marks and _marks.popleft() is not mark:
        pass
    with _installing:
        if not _marks and _hook is not None:
            _hook.remove()
            _hook = None


def _hand_over(here: Rank, mark: _Mark, used: Mapping[str, Any]) -> None:
    import torch

    here.dataset = mark.dataset
    batch = {**mark.leaves, **used}
    if here.scan is not None and mark.checked.violation is None:  # its bounds may be known by now
        here.scan.found(batch, here.guard.fresh(mark.checked), here.guard)
    here.handed(batch, mark.checked, loader_ns=0, evaluation=not torch.is_grad_enabled())
