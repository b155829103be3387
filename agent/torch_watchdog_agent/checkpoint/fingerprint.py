"""Looks at the values of tensors without copying them whole: are they finite, are they the same on two ranks.

Owns two passes in chunks, so that neither needs memory in the size of the tensor on a device that is full. Synchronises with the device:
only for use while a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 20


def all_finite(tensors: Iterable[Any]) -> bool:
    """True where no floating-point or complex tensor holds a NaN or an infinity."""
    return all(bool(torch.isfinite(_comparable(chunk)).all()) for tensor in tensors for chunk in _float_chunks(tensor))


def fingerprint(tensor: Any) -> tuple[Any, ...]:
    """Equal for equal bytes, dtype and shape; different, for all that training does, where one element differs or two are swapped."""
    if tensor.layout != torch.strided:
        return (str(tensor.layout),)
    words = _as_integers(tensor)
    places = torch.arange(1, min(len(words), _CHUNK_ELEMENTS) + 1, device=words.device)
    sums = [
        torch.stack((wide.sum(), (wide * places[: len(wide)]).sum() * (index + 1)))
        for index, chunk in enumerate(words.split(_CHUNK_ELEMENTS))
        if len(wide := chunk.to(torch.int64))
    ]
    total = torch.stack(sums).sum(0).tolist() if sums else []
    return (str(tensor.dtype), tuple(tensor.shape), *total)


def _as_integers(tensor: Any) -> Any:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return raw.view(torch.int32) if len(raw) % 4 == 0 and raw.storage_offset() % 4 == 0 else raw


def _float_chunks(tensor: Any) -> Iterator[Any]:
    if tensor.layout == torch.strided and (tensor.is_floating_point() or tensor.is_complex()):
        yield from tensor.detach().reshape(-1).split(_CHUNK_ELEMENTS)


def _comparable(chunk: Any) -> Any:
    # isfinite knows no 8-bit floats.
    return chunk.float() if chunk.is_floating_point() and chunk.element_size() == 1 else chunk
