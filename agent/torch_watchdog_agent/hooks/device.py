"""What the device has done so far, asked without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["backward_finished"]


def backward_finished() -> Callable[[], bool]:
    """A question to ask repeatedly: has the device finished all that was launched up to now? On a CPU it always has.

    The event is recorded when first asked, which is only where a rank has to wait for a neighbour.
    """
    import torch

    if not torch.cuda.is_initialized():
        return lambda: True
    event: Any = None

    def finished() -> bool:
        nonlocal event
        if event is None:
            event = torch.cuda.Event()
            event.record()
        return bool(event.query())

    return finished
