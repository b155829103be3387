"""What a rule says of a GPU: which one that is, in a sentence and in an incident, and whom it concerns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch_watchdog.rules.named import named
from torch_watchdog.rules.sign import Severity, Sign
from torch_watchdog.rules.streams import GpuStream

__all__ = ["sign_of"]

_NONE: Mapping[str, Any] = MappingProxyType({})


def sign_of(
    gpu: GpuStream, ranks: tuple[int, ...], said: str, *, cause: str, fix: str, what: str = "", severity: Severity | None = None,
    evidence: Mapping[str, Any] = _NONE,
) -> Sign:  # fmt: skip
    """`ranks` compute on it. `what` tells several signs of one GPU apart."""
    newest = gpu.newest
    return Sign(
        rank=ranks[0], affected=ranks[1:], subject=f"{newest.uuid} {what}".rstrip(), severity=severity, said=f"{_who(gpu, ranks)}: {said}",
        cause=cause, fix=fix, gpu={"index": newest.index, "uuid": newest.uuid, "pci": newest.pci, "name": newest.name},
        evidence=dict(evidence),
    )  # fmt: skip


def _who(gpu: GpuStream, ranks: tuple[int, ...]) -> str:
    """`GPU 3 of node-7 (rank 3)`: by the node's own number, whatever CUDA_VISIBLE_DEVICES made of it in the rank."""
    return f"GPU {gpu.newest.index} of {gpu.node} ({named(ranks)})"
