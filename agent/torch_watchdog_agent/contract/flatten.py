"""A batch as paths and tensors, and back. Owns the naming (`input_ids`, `0.targets`, `1`); knows nothing of bounds. Never mutates a batch.

A NumPy array counts as the tensor over its memory. A list of numbers does where the caller says so: most are nobody's input, and reading one costs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_watchdog_agent.contract.forms import Form, as_numbers, as_shared, form_of, in_form

__all__ = ["ALL_LISTS", "Apart", "arrays_of", "leaves_of", "renumbered", "replaced", "taken_apart"]

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
_NO_FORMS: Mapping[str, Form] = {}
_ATOMS = (str, bytes, int, float, bool, type(None))


class _All:
    def __contains__(self, path: object) -> bool:
        return True


ALL_LISTS: Container[str] = _All()


class Apart(NamedTuple):
    """A batch by path: its tensors; its numbers, words and flags, on which the user's code may branch; and which tensors are something else in it."""

    leaves: dict[str, torch.Tensor]
    scalars: list[tuple[str, Any]]
    made_of: dict[str, Any]  # the arrays and lists that tensors were made of

    @property
    def forms(self) -> Mapping[str, Form]:
        return {path: form_of(item) for path, item in self.made_of.items()} if self.made_of else _NO_FORMS

    @property
    def holds_numbers(self) -> bool:
        """Whether the program can make anything of it that a model takes."""
        return bool(self.leaves) or any(type(value) in (int, float) for _, value in self.scalars)


def leaves_of(batch: object, lists: Container[str] = ()) -> dict[str, torch.Tensor]:
    """The plain dense tensors of a batch by dotted path, in the batch's own order. Sparse, nested, quantized and subclassed tensors are left out.

    `lists`: the paths of lists that count as tensors.
    """
    return taken_apart(batch, lists).leaves


def taken_apart(batch: object, lists: Container[str] = ()) -> Apart:
    """All of a batch at once."""
    apart = Apart({}, [], {})
    _walk(batch, "", MAX_DEPTH, apart, lists)
    return apart


def arrays_of(batch: object, path: str = "", depth: int = MAX_DEPTH) -> dict[str, np.ndarray[Any, Any]]:
    """The NumPy arrays of a batch by dotted path."""
    if isinstance(batch, np.ndarray):
        return {path or WHOLE: batch}
    if isinstance(batch, (torch.Tensor, *_ATOMS)) or not depth:
        return {}
    parts = [arrays_of(child, f"{path}.{name}" if path else name, depth - 1) for name, child in _children(batch)]
    return {key: array for part in parts for key, array in part.items()}


def _walk(item: Any, path: str, depth: int, apart: Apart, lists: Container[str]) -> None:
    if isinstance(item, torch.Tensor):
        if _is_plain(item) and len(apart.leaves) < MAX_LEAVES:
            apart.leaves[path or WHOLE] = item
    elif isinstance(item, _ATOMS):
        apart.scalars.append((path, item))
    elif depth and not _is_tensor_too(item, path, apart, lists):
        for name, child in _children(item):
            _walk(child, f"{path}.{name}" if path else name, depth - 1, apart, lists)


def _is_tensor_too(item: Any, path: str, apart: Apart, lists: Container[str]) -> bool:
    made: torch.Tensor | None = None
    if isinstance(item, np.ndarray):
        made = as_shared(item)
    elif type(item) in (list, tuple) and path and path in lists:
        made = as_numbers(item)
    if made is None or len(apart.leaves) >= MAX_LEAVES:
        return False
    apart.leaves[path or WHOLE], apart.made_of[path or WHOLE] = made, item
    return True


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


def replaced(batch: Any, tensors: Mapping[str, torch.Tensor], forms: Mapping[str, Form] | None = None, path: str = "") -> Any:
    """A copy of the batch, same container types, with the tensors at these paths in place of its own: in the form of what they replace, or in `forms`."""
    forms = forms or {}
    if type(batch) is dict and not path and tensors.keys() <= batch.keys():
        return {**batch, **{key: _formed(tensor, batch[key], forms.get(key)) for key, tensor in tensors.items()}}
    if (path or WHOLE) in tensors and isinstance(batch, (torch.Tensor, np.ndarray, list, tuple)):
        return _formed(tensors[path or WHOLE], batch, forms.get(path or WHOLE))
    if isinstance(batch, (torch.Tensor, np.ndarray, *_ATOMS)):
        return batch
    children = {name: replaced(child, tensors, forms, f"{path}.{name}" if path else name) for name, child in _children(batch)}
    return _rebuilt(batch, children)


def renumbered(batch: Any, numbers: Mapping[int, int]) -> Any:
    """The batch, or a copy with other plain whole numbers where it holds any of these: the length of its sequences, say."""
    if not numbers or not any(type(number) is int and number in numbers for _, number in taken_apart(batch).scalars):
        return batch
    if type(batch) is int:
        return numbers[batch]
    return _rebuilt(batch, {name: renumbered(child, numbers) for name, child in _children(batch)})


def _formed(tensor: torch.Tensor, like: object, form: Form | None) -> Any:
    return in_form(form or form_of(like), tensor, like)


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
