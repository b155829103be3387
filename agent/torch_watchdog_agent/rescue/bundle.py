"""The batch that a rank failed on, on disk and back: a safetensors file of its tensors by their path in the batch.

Owns the file's form: nothing in it is ever unpickled, it is readable by this user only and bounded. What is not a tensor on the CPU is left out: after a
device-side assertion nothing can be read from the device any more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch_watchdog_agent.contract.flatten import leaves_of, replaced

__all__ = ["MAX_BYTES", "read_into", "write"]

MAX_BYTES = 256 << 20


def write(path: Path, batch: object, *, max_bytes: int = MAX_BYTES) -> bool:
    """True where something was written. Raises OSError."""
    from safetensors.torch import save

    leaves = {key: tensor.detach() for key, tensor in leaves_of(batch).items() if not tensor.is_cuda}
    if not leaves or sum(tensor.numel() * tensor.element_size() for tensor in leaves.values()) > max_bytes:
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(save({key: tensor.contiguous().clone() for key, tensor in leaves.items()}))
    return True


def read_into(path: Path, batch: Any) -> Any:
    """`batch` with the recorded tensors in the place of its own: the loop's own containers stay as they are. Raises OSError, ValueError."""
    from safetensors.torch import load_file

    recorded, present = load_file(path), leaves_of(batch)
    missing = sorted(recorded.keys() - present.keys())
    if missing:
        raise ValueError(f"the loop's batches have no {missing[0]}: is this the script that the bundle was recorded from?")
    return replaced(batch, recorded)
