"""What makes two batches alike. Owns the signature (exact shapes) and the structure (without sizes): a new structure is always traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["Scalars", "Signature", "Structure", "shapes_of", "signature_of", "structure_of"]

Signature: TypeAlias = tuple[Any, ...]
Structure: TypeAlias = tuple[Any, ...]
MAX_VALUES = 4
MAX_SCALARS = 64


class Scalars:
    """Numbers, words and flags of the batch that tell batches apart; one that differs all the time (an id, a text) tells nothing."""

    def __init__(self) -> None:
        self._values: dict[str, set[Any]] = {}
        self._volatile: set[str] = set()

    def telling(self, scalars: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
        """Those of a batch's scalars that may tell it from others."""
        found = []
        for path, value in scalars:
            if path in self._volatile:
                continue
            values = self._values.setdefault(path, set())
            values.add(value)
            if len(values) > MAX_VALUES or len(self._values) > MAX_SCALARS:
                self._volatile.add(path)
            else:
                found.append((path, value))
        return tuple(found)


def signature_of(leaves: Mapping[str, torch.Tensor], training: frozenset[bool], scalars: tuple[tuple[str, Any], ...]) -> Signature:
    """Hashable, exact: keys, shapes, dtypes, devices, training flags, scalars."""
    return (tuple((key, tensor.shape, tensor.dtype, tensor.device) for key, tensor in leaves.items()), training, scalars)


def structure_of(signature: Signature) -> Structure:
    """The signature without sizes."""
    tensors, training, scalars = signature
    return (tuple((key, len(shape), dtype) for key, shape, dtype, _ in tensors), training, scalars)


def shapes_of(leaves: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes, as plain tuples."""
    return {key: tuple(tensor.shape) for key, tensor in leaves.items()}
