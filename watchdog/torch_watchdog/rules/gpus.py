"""How the rules name a GPU, in a sentence and in an incident."""

from __future__ import annotations

from typing import Any

from torch_watchdog.rules.streams import GpuStream

__all__ = ["facts_of", "who"]


def who(gpu: GpuStream, ranks: tuple[int, ...]) -> str:
    """`GPU 3 of node-7 (rank 3)`: by the node's own number, whatever CUDA_VISIBLE_DEVICES made of it in the rank."""
    on_it = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"GPU {gpu.newest.index} of {gpu.node} ({on_it})"


def facts_of(gpu: GpuStream) -> dict[str, Any]:
    return {"index": gpu.newest.index, "uuid": gpu.newest.uuid, "pci": gpu.newest.pci, "name": gpu.newest.name}
