"""Which tensors of a traced step the program has made of the batch's NumPy arrays and lists: `torch.as_tensor(batch["ids"])`.

Owns the proof. A tensor over an array's memory is that array, or a part of it. Of one that holds the same numbers elsewhere the line that makes it must
name the array or list itself: any other expression may have mended them on the way, which nobody saw. Nothing of torch is replaced for this.
"""

from __future__ import annotations

import ast
import dataclasses
import linecache
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

import torch

from torch_watchdog_agent.contract.flatten import ALL_LISTS, taken_apart
from torch_watchdog_agent.contract.forms import form_of
from torch_watchdog_agent.contract.frames import is_users

__all__ = ["Conversions", "Source", "sources_of"]

MAX_COMPARED = 1 << 22
_COPIES = ("astype", "copy", "tolist")  # methods of an array
_SAME_NUMBERS = ("array", "asarray", "ascontiguousarray", "stack")  # functions of numpy
_NUMPY = ("np", "numpy")
Step: TypeAlias = tuple[Any, tuple[int, ...]]  # an operator, and what it takes behind the tensor


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An array or list of a batch, and the tensor that stands for it. `key`: its path. `is_leaf`: it counts as a tensor of the batch already."""

    key: str
    item: object
    tensor: torch.Tensor
    is_leaf: bool


def sources_of(batch: object, lists: Container[str]) -> tuple[dict[str, torch.Tensor], list[Source]]:
    """The tensors of a batch, those of its arrays and of `lists` among them; and all of its arrays and lists."""
    own, whole = taken_apart(batch, lists), taken_apart(batch, ALL_LISTS)
    sources = [Source(key, item, own.leaves[key], is_leaf=True) for key, item in own.made_of.items()]
    others = [(key, item) for key, item in whole.made_of.items() if key not in own.made_of and form_of(item) == "list"]
    return own.leaves, sources + [Source(key, item, whole.leaves[key], is_leaf=False) for key, item in others]


@dataclass(slots=True)
class Conversions:
    """Of one traced step. `unheeded`: lists that the program makes tensors of and that do not count as such yet."""

    sources: list[Source] = field(default_factory=list)
    unheeded: set[str] = field(default_factory=set)

    def over_memory(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Step]] | None:
        """The array's tensor whose memory this one lies over, and what makes the one of the other."""
        if not self.sources or not _is_readable(tensor):
            return None
        for source in self.sources:
            steps = _part_of(source.tensor, tensor) if source.is_leaf else None
            if steps is not None:
                return source.tensor, steps
        return None

    def of_numbers(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
        """The leaf whose numbers this new tensor holds, and whether the line that makes it names that leaf."""
        if not self.sources or not _is_readable(tensor):
            return None
        alike = [source for source in self.sources if _holds_the_same(source.tensor, tensor)]
        self.unheeded.update(source.key for source in alike if not source.is_leaf)
        alike = [source for source in alike if source.is_leaf]
        given = _given() if alike else None
        named = [source for source in alike if source.item is given]
        if named:
            return named[0].tensor, True
        return (alike[0].tensor, False) if len(alike) == 1 else None


def _is_readable(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() > 0


def _holds_the_same(source: torch.Tensor, tensor: torch.Tensor) -> bool:
    return source.shape == tensor.shape and tensor.numel() <= MAX_COMPARED and bool(torch.equal(source.to(tensor.dtype), tensor))


def _part_of(source: torch.Tensor, tensor: torch.Tensor) -> list[Step] | None:
    """The steps from an array to a view of it: `array[3]`, `array[:, :512]`."""
    if source.dtype != tensor.dtype or not source.numel():
        return None
    begin = (tensor.data_ptr() - source.data_ptr()) // source.element_size()
    if begin == 0 and source.shape == tensor.shape and source.stride() == tensor.stride():
        return []
    if not source.is_contiguous() or not 0 <= begin < source.numel():
        return None
    steps: list[Step] = []
    dim = 0  # of the view
    for length, stride in zip(source.shape, source.stride(), strict=True):
        start, begin = divmod(begin, stride)
        if dim == tensor.dim() or tensor.stride(dim) != stride:
            steps.append((torch.ops.aten.select.int, (dim, start)))
            continue
        end = start + tensor.shape[dim]
        if end > length:
            return None
        if tensor.shape[dim] != length:
            steps.append((torch.ops.aten.slice.Tensor, (dim, start, end)))
        dim += 1
    return steps if dim == tensor.dim() else None


# The line that makes a tensor


def _given() -> object:
    """What the innermost call outside of torch is given first, where that is a name, a part of one, or a copy; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    try:
        call = _call_under_way(frame)
        return _meant(call.args[0], frame) if isinstance(call, ast.Call) and call.args else None
    except (SyntaxError, ValueError, LookupError, TypeError, AttributeError):  # no source, or another kind of expression
        return None


def _call_under_way(frame: FrameType) -> ast.expr:
    first, last, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    lines = [line.encode() for line in linecache.getlines(frame.f_code.co_filename, frame.f_globals)[(first or 0) - 1 : last]]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body


def _meant(node: ast.expr, frame: FrameType) -> object:
    """The object that an expression means, without running anything of the program's; a copy of one counts as that one."""
    if isinstance(node, ast.Name):
        return frame.f_locals[node.id] if node.id in frame.f_locals else frame.f_globals[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Subscript):
        return _item(_meant(node.value, frame), _meant(node.slice, frame))
    if isinstance(node, ast.Attribute):
        return _field(_meant(node.value, frame), node.attr)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id in _NUMPY and node.func.attr in _SAME_NUMBERS:
            return _meant(node.args[0], frame)
        if node.func.attr in _COPIES:
            return _meant(owner, frame)
    raise TypeError(ast.dump(node))


def _item(owner: object, key: object) -> object:
    if isinstance(owner, (list, tuple, Mapping)):
        return owner[key]  # type: ignore[call-overload]
    raise TypeError(type(owner))


def _field(owner: object, name: str) -> object:
    if isinstance(owner, tuple) or dataclasses.is_dataclass(owner):
        return getattr(owner, name)
    return _item(owner, name)
