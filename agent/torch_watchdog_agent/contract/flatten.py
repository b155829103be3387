"""A batch as paths and tensors, and back. Owns the naming (`input_ids`, `0.targets`, `1`); knows nothing of bounds. Never mutates a batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["arrays_of", "leaves_of", "replaced", "taken_apart"]

MAX_DEPTH = 8
MAX_LEAVES = 4096
WHOLE = "batch"  # the path of a batch that is one tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WHOLE_NUMBERS = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_FLOATS = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
_COMPLEX = ("complex32", "complex64", "complex128")
# The others are no numbers.
_DTYPES = frozenset(getattr(torch, name) for name in (*_WHOLE_NUMBERS, *_FLOATS, *_COMPLEX) if hasattr(torch, name))
_ATOMS = (str, bytes, int, float, bool, type(None))


def leaves_of(batch: object) -> dict[str, torch.Tensor]:
    """The plain dense tensors of a batch by dotted path, in the batch's own order. Sparse, nested, quantized and subclassed tensors are left out."""
    return taken_apart(batch)[0]


def taken_apart(batch: object) -> tuple[dict[str, torch.Tensor], list[tuple[str, Any]]]:
    """The tensors of a batch by path, and its numbers, words and flags by path: the user's code may branch on these."""
    leaves: dict[str, torch.Tensor] = {}
    scalars: list[tuple[str, Any]] = []
    _walk(batch, "", MAX_DEPTH, leaves, scalars)
    return leaves, scalars


def arrays_of(batch: object, path: str = "", depth: int = MAX_DEPTH) -> dict[str, np.ndarray[Any, Any]]:
    """The NumPy arrays of a batch by dotted path."""
    if isinstance(batch, np.ndarray):
        return {path or WHOLE: batch}
    if isinstance(batch, (torch.Tensor, *_ATOMS)) or not depth:
        return {}
    parts = [arrays_of(child, f"{path}.{name}" if path else name, depth - 1) for name, child in _children(batch)]
    return {key: array for part in parts for key, array in part.items()}


def _walk(item: Any, path: str, depth: int, leaves: dict[str, torch.Tensor], scalars: list[tuple[str, Any]]) -> None:
    if isinstance(item, torch.Tensor):
        if _is_plain(item) and len(leaves) < MAX_LEAVES:
            leaves[path or WHOLE] = item
    elif isinstance(item, _ATOMS):
        scalars.append((path, item))
    elif depth:
        for name, child in _children(item):
            _walk(child, f"{path}.{name}" if path else name, depth - 1, leaves, scalars)


def _is_plain(item: torch.Tensor) -> bool:
    return type(item) in _PLAIN and item.layout is torch.strided and not item.is_nested and item.dtype in _DTYPES


def _children(item: Any) -> Iterable[tuple[str, Any]]:
    if type(item) is dict:
        return [(key if type(key) is str else str(key), child) for key, child in item.items()]
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return zip(item._fields, item, strict=True)
    if isinstance(item, (list, tuple)):
        return [(str(place), child) for place, child in enumerate(item)]
    if isinstance(item, Mapping) or (hasattr(item, "keys") and hasattr(item, "__getitem__") and callable(item.keys)):
        return [(str(key), item[key]) for key in list(item.keys())]
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item) if hasattr(item, field.name)]
    return ()


def replaced(batch: Any, tensors: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """A copy of the batch, same container types, with the tensors at these paths in place of its own."""
    if type(batch) is dict and not path and tensors.keys() <= batch.keys():
        return {**batch, **tensors}
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
