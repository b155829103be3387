"""The hot path: a batch that is like one before it in container, keys, shapes and dtypes, and that has nothing to tell.

Owns what is prepared once for such batches, so that the next one costs a pass or two over its memory and little Python: between the steps of a real model
the caches are cold, and there every line of Python costs more than it does in a loop. Decides nothing: where anything at all is unlike, the answer is None
and the batch goes the long way (guard.py), which knows all.
"""

from __future__ import annotations

import operator
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from torch_watchdog_agent.contract.bounds import Range
from torch_watchdog_agent.contract.check import UNSIGNED, TensorStat, dtype_name, extremes
from torch_watchdog_agent.contract.checked import Checked
from torch_watchdog_agent.contract.findings import Past
from torch_watchdog_agent.contract.plan import Check, Plan
from torch_watchdog_agent.contract.signature import Signature
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_agent.errors import let_through

__all__ = ["Readies"]

Numbers: TypeAlias = tuple[int | float, int | float, int, int]  # lowest, highest, how many negatives, how many ignored
Look: TypeAlias = Callable[[torch.Tensor], Numbers | None]
_Prepared: TypeAlias = tuple[torch.dtype, torch.Size, str, Look]
_Flat: TypeAlias = dict[Any, Any] | list[Any] | tuple[Any, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
MAX_READY = 256
_shape_of = operator.attrgetter("shape")
_count, _new = np.count_nonzero, tuple.__new__  # (a NamedTuple's own makes a frame of Python)


class Readies:
    """What is prepared for each signature, by the shapes of its tensors."""

    def __init__(self) -> None:
        self._by_shapes: dict[tuple[torch.Size, ...], _Ready] = {}

    def checked(
        self, batch: object, training: frozenset[bool], version: int, number: int, indices: Sequence[int | None] | None, worker: int | None
    ) -> Checked | None:
        """What there is to say of the batch of this number, where that is nothing but its statistics."""
        flat = batch if type(batch) is dict else _flat(batch)
        if flat is None:
            return None
        items = list(flat.values()) if type(flat) is dict else list(flat)
        try:
            ready = self._by_shapes.get(tuple(map(_shape_of, items)))
            if ready is None or ready.version != version or ready.signature[1] != training:
                return None
            stats = ready.judged(flat, items)
        except (AttributeError, RuntimeError, TypeError) as error:  # no tensor, or none that NumPy knows: sparse, nested
            let_through(error)
            return None
        if stats is None:
            return None
        leaves = flat.copy() if type(flat) is dict else dict(zip(ready.keys, items, strict=True))
        return Checked(
            batch_id=number, leaves=leaves, stats=tuple(stats), origin=Origin(leaves=leaves, indices=indices, worker=worker, own=leaves),
            signature=ready.signature, version=version, legal=ready.legal,
        )  # fmt: skip

    def prepare(self, batch: object, checked: Checked, plan: Plan, past_of: Callable[[str], Past | None]) -> None:
        """After a batch that had nothing to tell. Nothing is prepared where rules have to be replayed or settled, or where there is more than tensors."""
        flat, leaves = _flat(batch), checked.leaves
        if flat is None or plan.derived or plan.shape or plan.unsettled or plan.broken:
            return
        items = list(flat.values()) if isinstance(flat, dict) else list(flat)
        if len(items) != len(leaves) or any(item is not leaf for item, leaf in zip(items, leaves.values(), strict=True)):
            return
        looks: dict[str, _Prepared] = {}
        for key, leaf in leaves.items():
            look = _look_for(leaf, plan.by_leaf.get(key, ()), plan.ignored.get(key, -100), past_of(key))
            if look is None:
                return
            looks[key] = (leaf.dtype, leaf.shape, dtype_name(leaf), look)
        if len(self._by_shapes) >= MAX_READY:
            self._by_shapes.clear()
        shapes = tuple([leaf.shape for leaf in leaves.values()])
        self._by_shapes[shapes] = _Ready(type(flat), checked.signature, checked.version, plan.legal, looks)


def _flat(batch: Any) -> _Flat | None:
    """A batch that is a dict, a list or a tuple, or the dict in a UserDict (a tokenizer's); None for any other."""
    if isinstance(batch, UserDict):
        batch = batch.data
    kind = type(batch)
    return batch if kind is dict or kind is list or kind is tuple else None


class _Ready:
    """What is prepared for one signature."""

    __slots__ = ("_kind", "_looks", "keys", "legal", "signature", "version")

    def __init__(
        self, kind: type, signature: Signature, version: int, legal: Mapping[str, tuple[float, float]], looks: Mapping[str, _Prepared]
    ) -> None:
        self._kind, self.signature, self.version, self.legal = kind, signature, version, legal
        self.keys, self._looks = tuple(looks), tuple(looks.items())

    def judged(self, flat: _Flat, items: Sequence[torch.Tensor]) -> list[TensorStat] | None:
        """The statistics of a batch of these shapes; None: the long way. Raises where an item is no plain tensor."""
        if type(flat) is not self._kind or (self._kind is dict and tuple(flat) != self.keys):
            return None
        stats = []
        for (key, (dtype, shape, name, look)), tensor in zip(self._looks, items, strict=True):
            if tensor.dtype is not dtype or type(tensor) not in _PLAIN or not tensor.is_cpu:
                return None
            numbers = look(tensor)
            if numbers is None:
                return None
            stats.append(_new(TensorStat, (key, name, shape, *numbers, True)))
        return stats


def _look_for(leaf: torch.Tensor, checks: Sequence[Check], ignored: int, past: Past | None) -> Look | None:
    ranges = [check.allowed for check in checks if check.rule.kind == "range"]
    if not leaf.is_cpu or leaf.numel() == 0 or leaf.is_complex():
        return None
    if leaf.is_floating_point():
        return _floats(ranges)
    if past is None:
        return None
    if any(check.allowed.ignored not in (None, ignored) for check in checks):
        return None
    left = min((leaf.numel() - check.dropped for check in checks if check.rule.kind == "some"), default=leaf.numel() + 1)
    if past.low >= 0 and _hold(ranges, 0, past.high):
        return _natural(past, ignored, left, leaf.numpy().dtype)
    if past.low == ignored < 0 and leaf.dtype in UNSIGNED and _hold(ranges, 0, past.high, ignored):
        return _labels(past.high, np.array(ignored, leaf.numpy().dtype), UNSIGNED[leaf.dtype], left)
    return None


def _hold(ranges: Sequence[Range], low: int, high: int, ignored: int | None = None) -> bool:
    """Whether whole numbers from `low` to `high`, and the ignored one, are allowed by all of the ranges."""
    return all(
        one.low <= low and high <= one.high and (ignored is None or ignored == one.ignored or one.low <= ignored <= one.high)
        for one in ranges
    )


# The loops. By argmax and not by max: it costs the same in a loop, and half where numpy's own code has left the caches, for it is no ufunc.


def _natural(past: Past, ignored: int, left: int, dtype: Any) -> Look:
    """Whole numbers that are not negative; fewer than `left` may be ignored."""
    low, high = past.low, past.high
    may_be_ignored = low <= ignored <= high
    marker = np.array(ignored if may_be_ignored else low, dtype)

    def look(tensor: torch.Tensor) -> Numbers | None:
        array = tensor.numpy()
        least, greatest = array.item(array.argmin()), array.item(array.argmax())
        if least < low or greatest > high:
            return None
        count = int(_count(array == marker)) if may_be_ignored and least <= ignored <= greatest else 0
        return (least, greatest, 0, count) if count < left else None

    return look


def _labels(high: int, marker: Any, unsigned: Any, left: int) -> Look:
    """Classes and a negative value that the loss ignores. Read as unsigned the negative value nearest to 0 is the largest: it must be that one."""
    ignored = int(marker)  # as a Python number it would be converted for each batch

    def look(tensor: torch.Tensor) -> Numbers | None:
        array = tensor.numpy()
        least, greatest = array.item(array.argmin()), array.item(array.argmax())
        if least < ignored or greatest > high:
            return None
        if least >= 0:
            return least, greatest, 0, 0
        count = int(_count(array == marker))
        if count >= left or array.item(array.view(unsigned).argmax()) != ignored:
            return None
        return least, greatest, count, count

    return look


def _floats(ranges: Sequence[Range]) -> Look:
    def look(tensor: torch.Tensor) -> Numbers | None:
        seen = extremes(tensor)
        if not seen.finite or any(seen.low < one.low or seen.high > one.high for one in ranges):
            return None
        return seen.low, seen.high, 0, 0

    return look
