"""Reading tensors of a batch to the CPU, as copies. Owns how much is read; a tensor on a device is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_watchdog_agent.contract.learn import Lesson
from torch_watchdog_agent.contract.signature import shapes_of

__all__ = ["is_on_device", "lesson_of", "read"]

MAX_READ_ELEMENTS = 1 << 22


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether reading this tensor would wait for a device."""
    return not tensor.is_cpu and tensor.device.type != "meta"


def read(leaves: Mapping[str, torch.Tensor], elsewhere: frozenset[str]) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """The tensors with those on a device as CPU copies; and which are too large for that."""
    large = frozenset(key for key in elsewhere if leaves[key].numel() > MAX_READ_ELEMENTS)
    wanted = elsewhere - large
    return {key: t.detach().to("cpu", copy=True) if key in wanted else t for key, t in leaves.items()}, large


def lesson_of(batch: int, leaves: Mapping[str, torch.Tensor], structure: Any) -> Lesson:
    """A copy of what is needed to check what the traced step will teach: the loop may write to the batch."""
    small = {key: t for key, t in leaves.items() if t.device.type != "meta" and t.numel() <= MAX_READ_ELEMENTS}
    copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in small.items()}
    return Lesson(batch=batch, leaves=copies, shapes=shapes_of(leaves), structure=structure, name=f"batch {batch}")
