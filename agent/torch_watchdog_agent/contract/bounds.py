"""The model of a bound: which values an op takes, and where the limit comes from. Knows nothing of batches.

Limits are read live: an embedding may be resized while the job runs, and a sharded parameter shows no rows at rest.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BIG", "LiveTable", "Range"]

BIG = 2**62  # stands for "no upper limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Values from `low` to `high`, both included, and `ignored`."""

    low: int | float
    high: int | float
    ignored: int | None = None

    def within(self, other: Range) -> bool:
        """Whether every value allowed here is allowed there."""
        inside = self.low >= other.low and self.high <= other.high
        return inside and (self.ignored is None or self.ignored == other.ignored or other.low <= self.ignored <= other.high)

    def words(self) -> str:
        high = "any" if self.high >= BIG else f"{self.high}"
        return f"{self.low}..{high}" + ("" if self.ignored is None else f" or {self.ignored}")


class LiveTable:
    """The length of one dimension of a parameter or buffer, read when asked."""

    __slots__ = ("_dim", "_holder", "_seen", "_shape", "_table", "trained")

    def __init__(self, table: torch.Tensor, dim: int, module: torch.nn.Module | None) -> None:
        self._table, self._dim, self._seen, self._shape = weakref.ref(table), dim, int(table.shape[dim]), table.shape
        self.trained = isinstance(table, torch.nn.Parameter)  # and not a buffer
        self._holder: Any = weakref.ref(module) if module is not None else None

    @property
    def alive(self) -> bool:
        return self._table() is not None and (self._holder is None or self._holder() is not None)

    def changed(self) -> bool:
        """The table is gone, or has another length than in the trace: the model was rebuilt or resized."""
        table = self._table()
        if table is not None and table.shape == self._shape and self._holder is not None and self._holder() is not None:
            return False  # as nearly always, and asked before each batch
        return not self.alive or self.rows() != self._seen

    def same(self, other: LiveTable) -> bool:
        return self._table() is other._table() and self._dim == other._dim

    def rows(self) -> int:
        """The length now; the length seen in the trace where the table is not in one piece at this moment (ZeRO-3, FSDP)."""
        table = self._table()
        if table is None:
            return self._seen
        whole = getattr(table, "ds_shape", None)
        if whole is not None:
            return int(whole[self._dim])
        if table.numel() == 0 or table.dim() <= self._dim:
            holder = self._holder() if self._holder is not None else None
            return int(getattr(holder, "num_embeddings", self._seen)) if self._dim == 0 else self._seen
        return int(table.shape[self._dim])
