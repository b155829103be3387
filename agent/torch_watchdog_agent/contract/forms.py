"""NumPy arrays and lists of numbers as tensors, and tensors in their form. Owns what counts as numbers; an array's tensor shares its memory."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import torch

__all__ = ["Form", "as_numbers", "as_shared", "form_of", "in_form", "said"]

Form: TypeAlias = Literal["tensor", "array", "list"]
_ARRAYS = (np.ndarray, np.memmap)  # of other subclasses nobody knows what they mean: a mask, units
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_SAID = {"tensor": "a tensor", "array": "a NumPy array", "list": "a list"}


def form_of(item: object) -> Form:
    """What an item of a batch that can be a tensor is."""
    return "tensor" if isinstance(item, torch.Tensor) else "array" if isinstance(item, np.ndarray) else "list"


def said(form: str) -> str:
    """The form in words."""
    return _SAID[form]


class _Writable:
    """The memory of an array that nobody may write to (a memory map): torch warns of those, and what is made here is only read."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def as_shared(array: object) -> torch.Tensor | None:
    """A tensor over the array's own memory (over a copy where torch knows no such strides); None where it is no array of numbers."""
    if type(array) not in _ARRAYS or array.dtype.kind not in "biufc":  # type: ignore[attr-defined]
        return None
    own: Any = array
    try:
        if not own.flags.writeable:
            own = np.asarray(_Writable(own))
        return torch.from_numpy(own if min(own.strides, default=0) >= 0 else own.copy())
    except (TypeError, ValueError):  # another machine's byte order, long doubles, strides of a record
        return None


def as_numbers(item: object) -> torch.Tensor | None:
    """A list, or one of lists or arrays of one length, as a new tensor; None where it holds anything but numbers."""
    first: object = item
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if not isinstance(first, (*_NUMBERS, *_ARRAYS)):
        return None
    try:
        return as_shared(np.asarray(item))
    except (TypeError, ValueError, OverflowError):  # ragged, or with something else further on
        return None


def in_form(form: Form, tensor: torch.Tensor, like: object) -> Any:
    """The tensor's numbers in that form; `like`: what they take the place of, whose elements and containers are kept."""
    if form == "tensor":
        return tensor
    if form == "array":
        return tensor.detach().cpu().numpy()
    return _listed(tensor.detach().cpu(), like if isinstance(like, (list, tuple)) else [])


def _listed(tensor: torch.Tensor, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return tensor.numpy()
    if isinstance(like, (list, tuple)):
        first = like[0] if like else []
        return type(like)([_listed(row, first) for row in tensor] if tensor.dim() > 1 or like else tensor.tolist())
    return type(like)(tensor.item()) if isinstance(like, np.generic) else tensor.item()
