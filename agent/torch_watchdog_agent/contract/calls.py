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

__all__ = ["Call", "call_under_way", "outermost_module"]

_MODULE = torch.nn.Module._call_impl.__code__
_COPIES = ("_to_copy", "clone", "detach", "alias")
MAX_COPIES = 4  # of copies, before a tensor is taken for something else
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
    autocast: tuple[str, torch.dtype] | None  # the kind of device and what it computes in

    def filled(self, leaves: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """The arguments for this batch; KeyError where it lacks a tensor."""
        return _filled(self.args, leaves), _filled(self.kwargs, leaves)


def call_under_way(tape: Tape) -> tuple[bool, Call | None]:
    """Whether a model is being called, and its outermost call; None where that takes more than the batch's own tensors."""
    found = _outermost_call()
    if found is None:
        return False, None
    local = found.f_locals
    try:
        args, kwargs = _named(local["args"], tape), _named(local["kwargs"], tape)
    except _NotOfTheBatch:
        return True, None
    kind = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    autocast = None if kind is None else (kind, torch.get_autocast_dtype(kind))
    return True, Call(model=weakref.ref(local["self"]), args=args, kwargs=kwargs, autocast=autocast)


def outermost_module() -> torch.nn.Module | None:
    """Of the modules that are being called just now."""
    found = _outermost_call()
    return None if found is None else found.f_locals["self"]


def _outermost_call() -> FrameType | None:
    found: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _MODULE and not _is_wrapper(frame.f_locals["self"]):
            found = frame
        frame = frame.f_back
    return found


def _is_wrapper(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or "_orig_mod" in module._modules


def _named(item: Any, tape: Tape) -> Any:
    if isinstance(item, torch.Tensor):
        value = tape.value_of(item)
        return _Leaf(_key_of(value.number if value is not None else -1, tape))
    if type(item) in (list, tuple):
        return type(item)(_named(child, tape) for child in item)
    if type(item) is dict:
        return {key: _named(child, tape) for key, child in item.items()}
    if isinstance(item, _PLAIN):
        return item
    raise _NotOfTheBatch


def _key_of(number: int, tape: Tape) -> str:
    """The tensor of the batch that a value is, or is a copy of on another device."""
    for _ in range(MAX_COPIES):
        if number in tape.leaves:
            return tape.leaves[number][1]
        node = next((node for node in reversed(tape.nodes) if number in node.outputs), None)
        if node is None or node.name not in _COPIES or tape.shapes[number] != tape.shapes[node.inputs[0]]:
            break
        number = node.inputs[0]
    raise _NotOfTheBatch


def _filled(item: Any, leaves: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(item, _Leaf):
        return leaves[item.key]
    if type(item) in (list, tuple):
        return type(item)(_filled(child, leaves) for child in item)
    return {key: _filled(child, leaves) for key, child in item.items()} if type(item) is dict else item
