"""How the loop calls its model with a batch, read off the live frames of a traced step, so that the same call can be made again.

Owns the template of a call: its arguments with the batch's tensors as names. No hook is needed, so that nothing of the user's model is touched.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from torch_watchdog_agent.contract.tape import Tape

__all__ = ["Call", "call_under_way"]

_MODULE = torch.nn.Module._call_impl.__code__
_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


class _NotOfTheBatch(Exception):  # noqa: N818
    """An argument that is no tensor of the batch: the call cannot be made again."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`model(*args, **kwargs)` as the loop makes it, inside wrappers that would communicate."""

    model: Any  # weak
    args: Any
    kwargs: Any
    autocast: torch.dtype | None

    def filled(self, leaves: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """The arguments for this batch; KeyError where it lacks a tensor."""
        return _filled(self.args, leaves), _filled(self.kwargs, leaves)


def call_under_way(tape: Tape) -> tuple[bool, Call | None]:
    """Whether a model is being called, and its outermost call; None where that takes more than the batch's own tensors."""
    found: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _MODULE and not _is_wrapper(frame.f_locals["self"]):
            found = frame
        frame = frame.f_back
    if found is None:
        return False, None
    local = found.f_locals
    try:
        args, kwargs = _named(local["args"], tape), _named(local["kwargs"], tape)
    except _NotOfTheBatch:
        return True, None
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return True, Call(model=weakref.ref(local["self"]), args=args, kwargs=kwargs, autocast=autocast)


def _is_wrapper(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or "_orig_mod" in module._modules


def _named(item: Any, tape: Tape) -> Any:
    if isinstance(item, torch.Tensor):
        value = tape.value_of(item)
        leaf = tape.leaves.get(value.number) if value is not None else None
        if leaf is None:
            raise _NotOfTheBatch
        return _Leaf(leaf[1])
    if type(item) in (list, tuple):
        return type(item)(_named(child, tape) for child in item)
    if type(item) is dict:
        return {key: _named(child, tape) for key, child in item.items()}
    if isinstance(item, _PLAIN):
        return item
    raise _NotOfTheBatch


def _filled(item: Any, leaves: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(item, _Leaf):
        return leaves[item.key]
    if type(item) in (list, tuple):
        return type(item)(_filled(child, leaves) for child in item)
    return {key: _filled(child, leaves) for key, child in item.items()} if type(item) is dict else item
