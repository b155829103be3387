"""The hot path: extremes of a tensor by numpy on its own memory, and a range held against them. Allocates as little as it can.

Knows nothing of rules. Never waits for a device: a tensor that is not on the CPU gets a statistic without values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_watchdog_agent.contract.bounds import Range

__all__ = ["MAX_FULL_FLOATS", "UNREAD", "UNSIGNED", "Extremes", "TensorStat", "allows", "dtype_name", "extremes", "known"]

MAX_FULL_FLOATS = 1 << 22  # above this a float tensor is looked at by a strided sample
UNSIGNED = {torch.int64: np.uint64, torch.int32: np.uint32, torch.int16: np.uint16, torch.int8: np.uint8}
_SPAN = {dtype: 1 << (8 * np.dtype(unsigned).itemsize) for dtype, unsigned in UNSIGNED.items()}
_BY_TORCH = (torch.bfloat16, torch.float16)
_NAMES: dict[torch.dtype, str] = {}


class TensorStat(NamedTuple):
    """One tensor of the batch in numbers. `low` and `high` are NaN where the values cannot be read (empty, on another device)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    negatives: int
    ignored: int
    finite: bool


class Extremes:
    """Lowest and highest value, how many are negative, and how many are the ignored value. `array` is the tensor's own memory."""

    __slots__ = ("array", "high", "ignored", "low", "negatives")

    def __init__(self, array: Any, low: Any, high: Any, negatives: int = 0, ignored: int = 0) -> None:
        self.array, self.low, self.high, self.negatives, self.ignored = array, low, high, negatives, ignored

    @property
    def finite(self) -> bool:
        return self.low is None or type(self.low) is int or (math.isfinite(self.low) and math.isfinite(self.high))

    def stat(self, key: str, tensor: torch.Tensor) -> TensorStat:
        low, high = (math.nan, math.nan) if self.low is None else (float(self.low), float(self.high))
        return TensorStat(
            key=key,
            dtype=dtype_name(tensor),
            shape=tuple(tensor.shape),
            low=low,
            high=high,
            negatives=self.negatives,
            ignored=self.ignored,
            finite=self.finite,
        )


UNREAD = Extremes(None, None, None)


def dtype_name(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype) or _NAMES.setdefault(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def known(tensor: torch.Tensor) -> bool:
    """Whether the values of this tensor can be read without waiting for a device."""
    return tensor.is_cpu and tensor.numel() > 0 and not tensor.is_complex()


def extremes(tensor: torch.Tensor, ignored: int = -100) -> Extremes:
    """One or two passes over the tensor's memory. `ignored`: the value that a loss leaves out, counted where it may occur."""
    if not known(tensor):
        return UNREAD
    if tensor.is_neg():
        tensor = tensor.resolve_neg()  # `x.conj().imag`: its memory holds the values without their sign, and numpy takes none of that
    dtype = tensor.dtype
    if dtype.is_floating_point:
        return _float_extremes(tensor)
    array = tensor.numpy()
    if dtype is torch.bool:
        return Extremes(array, int(array.min()), int(array.max()))
    low = int(array.min())
    if low >= 0:
        high = int(array.max())
        return Extremes(array, low, high, 0, int(np.count_nonzero(array == ignored)) if 0 <= low <= ignored <= high else 0)
    negatives = int(np.count_nonzero(array < 0))
    if low == ignored and dtype in UNSIGNED and int(array.view(UNSIGNED[dtype]).max()) == low % _SPAN[dtype]:
        # Read as unsigned, the negative value nearest to 0 is the largest of all: it is the ignored one, so every negative is.
        return Extremes(array, low, int(array.max()), negatives, negatives)
    return Extremes(array, low, int(array.max()), negatives, int(np.count_nonzero(array == ignored)))


def _float_extremes(tensor: torch.Tensor) -> Extremes:
    if tensor.numel() > MAX_FULL_FLOATS:
        stride = -(-tensor.numel() // MAX_FULL_FLOATS)
        tensor = tensor.detach().reshape(-1)[::stride] if tensor.is_contiguous() else tensor.detach()[..., ::stride]
    if tensor.dtype in _BY_TORCH or tensor.element_size() < 2:
        low, high = torch.aminmax(tensor.detach().float() if tensor.element_size() < 2 else tensor.detach())
        return Extremes(None, float(low), float(high))
    array = tensor.detach().numpy()
    return Extremes(array, float(array.min()), float(array.max()))


def allows(allowed: Range, seen: Extremes) -> bool:
    """Whether every element is allowed. Exact; a second pass only where the extremes alone do not say."""
    if seen.low is None or (seen.low >= allowed.low and seen.high <= allowed.high):
        return True
    if allowed.ignored is None or seen.array is None or allowed.low <= allowed.ignored <= allowed.high:
        return False  # an ignored value that is allowed besides is none of those that are outside
    if allowed.low == 0 and allowed.ignored == -100 and seen.high <= allowed.high:
        return seen.negatives == seen.ignored
    array = seen.array
    outside = np.count_nonzero(array < allowed.low) + np.count_nonzero(array > allowed.high)
    return bool(outside == np.count_nonzero(array == allowed.ignored))
