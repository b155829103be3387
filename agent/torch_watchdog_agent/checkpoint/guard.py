"""Whether a checkpoint of ours is being written or read in this process.

Owns one counter. The gate reads it at every `Optimizer.step`: a step taken while it is set belongs to a checkpoint library, not to the
training, and must pass through unseen. Knows nothing of torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


def busy() -> bool:
    """True while this process writes or reads a checkpoint of ours."""
    return _depth > 0


@contextmanager
def marked_busy() -> Iterator[None]:
    """Mark the body as checkpoint work; may be nested."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings from torch's checkpoint code: they are about its own calls and mean nothing to the person who trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
