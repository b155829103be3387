"""A batch as paths and tensors, and back. Owns the naming (`input_ids`, `0.targets`, `1`); knows nothing of bounds. Never mutates a batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["leaves_of", "replaced", "scalars_of"]

MAX_DEPTH = 8
MAX_LEAVES = 4096
WHOLE = "batch"  # the path of a batch that is one tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ATOMS = (str, bytes, int, float, bool, type(None))


def leaves_of(batch: object) -> dict[str, torch.Tensor]:
    """The plain dense tensors of a batch by dotted path, in the batch's own order. Sparse, nested and subclassed tensors are left out."""
    found: dict[str, torch.Tensor] = {}
    for path, item in _walk(batch, "", MAX_DEPTH):
        if type(item) in _PLAIN and item.layout is torch.strided and not item.is_nested:
            found[path or WHOLE] = item
            if len(found) >= MAX_LEAVES:
                break
    return found


def scalars_of(batch: object) -> tuple[tuple[str, Any], ...]:
    """The numbers, words and flags of a batch by path: the user's code may branch on them."""
    return tuple((path, item) for path, item in _walk(batch, "", MAX_DEPTH) if isinstance(item, _ATOMS))


def _walk(item: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(item, (torch.Tensor, *_ATOMS)) or depth == 0:
        yield path, item
        return
    for name, child in _children(item):
        yield from _walk(child, f"{path}.{name}" if path else name, depth - 1)


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping) or (hasattr(item, "keys") and hasattr(item, "__getitem__") and callable(item.keys)):
        yield from ((str(key), item[key]) for key in list(item.keys()))
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        yield from zip(item._fields, item, strict=True)
    elif isinstance(item, (list, tuple)):
        yield from ((str(place), child) for place, child in enumerate(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from ((field.name, getattr(item, field.name)) for field in dataclasses.fields(item) if hasattr(item, field.name))


def replaced(batch: Any, tensors: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """A copy of the batch, same container types, with the tensors at these paths in place of its own."""
    if (path or WHOLE) in tensors and isinstance(batch, torch.Tensor):
        return tensors[path or WHOLE]
    if isinstance(batch, (torch.Tensor, *_ATOMS)):
        return batch
    children = {name: replaced(child, tensors, f"{path}.{name}" if path else name) for name, child in _children(batch)}
    return _rebuilt(batch, children)


def _rebuilt(batch: Any, children: dict[str, Any]) -> Any:
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*children.values())
    if isinstance(batch, (list, tuple)):
        return type(batch)(children.values())
    copied = copy.copy(batch)
    if hasattr(copied, "__setitem__") and hasattr(copied, "keys"):
        if isinstance(getattr(batch, "data", None), dict):  # UserDict and its kind share their dict with a shallow copy
            copied.data = dict(batch.data)
        for key in list(batch.keys()):
            copied[key] = children[str(key)]
    elif dataclasses.is_dataclass(batch):
        for name, child in children.items():
            object.__setattr__(copied, name, child)
    return copied
