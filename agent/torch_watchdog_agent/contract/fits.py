"""Which dimensions of a batch's tensors always have one length (ids and mask, inputs and labels; three channels), and the tensor that breaks it.

Learns from every batch that trained, whatever its shapes. A break proves nothing: it is told where the step then fails about a shape, and as a warning where a
mask has not the shape of the ids any more, which libraries fill or cut without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

__all__ = ["Fits", "Unfit"]

FITTED_FOR_BATCHES = 4
MAX_DIMS = 64
MAX_SHAPES = 1 << 14
_Pair: TypeAlias = tuple[str, int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """Dimension `dim` of `key` always had the length of dimension `other_dim` of `other`, or always `usual` elements, and has not now."""

    key: str
    dim: int
    other: str = ""
    other_dim: int = 0
    usual: int | None = None

    @property
    def is_of_a_mask(self) -> bool:
        """Whether a mask is to blame, held against ids beside it."""
        beside = self.key.rpartition(".")[0] == self.other.rpartition(".")[0]
        return self.key.endswith("mask") and "ids" in self.other and beside and self.dim == self.other_dim


@dataclass(slots=True)
class Fits:
    """What was equal in every batch so far."""

    _batches: int = 0
    _equal: set[_Pair] | None = None
    _fixed: dict[tuple[str, int], int] | None = None  # lengths that never were others
    _keys: frozenset[str] | None = None  # tensors that were in all of them
    _taken: set[tuple[torch.Size, ...]] = field(default_factory=set)  # shapes of whole batches

    def unfit(self, leaves: Mapping[str, torch.Tensor]) -> Unfit | None:
        """The tensor that breaks most of what was equal so far; of two that break as much the later one, which was made for the other."""
        if self._batches < FITTED_FOR_BATCHES or _shapes(leaves) in self._taken:
            return None
        broken = [pair for pair in self._equal or () if _is_broken(pair, leaves)]
        alone = self._of_another_length(leaves)
        return self._blamed(broken, leaves, "" if alone is None else alone.key) if broken else alone

    def _of_another_length(self, leaves: Mapping[str, torch.Tensor]) -> Unfit | None:
        """The one tensor with another length where it always had the same; of several nobody knows which is meant."""
        unlike = [
            Unfit(key=key, dim=dim, usual=length)
            for (key, dim), length in (self._fixed or {}).items()
            if key in leaves and leaves[key].shape[dim : dim + 1] != (length,)
        ]
        return unlike[0] if len({one.key for one in unlike}) == 1 else None

    def _blamed(self, broken: Sequence[_Pair], leaves: Mapping[str, torch.Tensor], alone: str) -> Unfit:
        counts = Counter([key for one, _, other, _ in broken for key in (one, other)])
        blamed = max(counts, key=lambda key: (key == alone, counts[key], key.endswith("mask"), list(leaves).index(key)))
        pairs = [pair if pair[0] == blamed else (*pair[2:], *pair[:2]) for pair in broken if blamed in (pair[0], pair[2])]
        alike = Counter(
            [pair[2] if pair[0] == blamed else pair[0] for pair in self._equal or () if blamed in (pair[0], pair[2]) and pair[1] == pair[3]]
        )
        key, dim, other, other_dim = min(pairs, key=lambda pair: (pair[1] != pair[3], -alike[pair[2]], "ids" not in pair[2], pair))
        return Unfit(key=key, dim=dim, other=other, other_dim=other_dim)

    def lacks(self, leaves: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """The tensors that every batch so far had and this one has not."""
        return () if self._batches < FITTED_FOR_BATCHES else tuple(sorted((self._keys or frozenset()) - leaves.keys()))

    def always_was(self, key: str, dim: int, length: int) -> bool:
        """Whether this dimension had this length in every batch so far (channels, features), of which there was one at least."""
        return (self._fixed or {}).get((key, dim)) == length

    def took(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """A batch went to the training: what is not equal in it need not be."""
        self._batches += 1
        self._keys = frozenset(leaves) if self._keys is None else self._keys & leaves.keys()
        shapes = _shapes(leaves)
        if shapes in self._taken or len(self._taken) >= MAX_SHAPES:
            return
        self._taken.add(shapes)
        if self._equal is None or self._fixed is None:
            self._equal, self._fixed = _equal(leaves), {(key, dim): length for key, dim, length in _lengths(leaves)}
        else:
            self._fixed = {
                (key, dim): length
                for (key, dim), length in self._fixed.items()
                if key not in leaves or leaves[key].shape[dim : dim + 1] == (length,)
            }
            self._equal = {pair for pair in self._equal if not _is_broken(pair, leaves)}


def _shapes(leaves: Mapping[str, torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple([tensor.shape for tensor in leaves.values()])


def _lengths(leaves: Mapping[str, torch.Tensor]) -> list[tuple[str, int, int]]:
    return [(key, dim, length) for key, tensor in leaves.items() for dim, length in enumerate(tensor.shape)][:MAX_DIMS]


def _equal(leaves: Mapping[str, torch.Tensor]) -> set[_Pair]:
    dims = _lengths(leaves)
    return {
        (one, dim, other, other_dim)
        for place, (one, dim, length) in enumerate(dims)
        for other, other_dim, other_length in dims[place + 1 :]
        if one != other and length == other_length
    }


def _is_broken(pair: _Pair, leaves: Mapping[str, torch.Tensor]) -> bool:
    """Not where one of the tensors is missing: then there is nothing to compare."""
    one, dim, other, other_dim = pair
    if one not in leaves or other not in leaves:
        return False
    mine, theirs = leaves[one].shape, leaves[other].shape
    return dim >= len(mine) or other_dim >= len(theirs) or mine[dim] != theirs[other_dim]
