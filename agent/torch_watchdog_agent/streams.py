"""The CUDA stream that the caller launches on.

Owns one thing: `torch.cuda.current_stream()` makes a new object of it each time, in Python, and an event that is recorded without a stream asks for it
too; together that was a fifth of what a step cost the training thread of a model that is bound by its launches. Here it is made once for each stream.
"""

from __future__ import annotations

from typing import Any

__all__ = ["current_stream"]

_made: dict[tuple[int, int], Any] = {}  # by device and the driver's handle


def current_stream(device: Any = None) -> Any:
    """Of the `device`, or of the current one. Where torch lacks the calls of C that tell which it is, torch is asked itself."""
    import torch

    try:
        index = torch._C._cuda_getDevice() if device is None else device.index
        place = index, torch._C._cuda_getCurrentRawStream(index)
    except AttributeError:
        return torch.cuda.current_stream(device)
    stream = _made.get(place)
    if stream is None:
        stream = _made[place] = torch.cuda.current_stream(device)
    return stream
