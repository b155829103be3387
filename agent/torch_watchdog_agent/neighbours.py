"""Memory that the ranks of this node share, a file of each attempt: what it is for stands in the module of its kind.

Owns making and mapping it, and that a rank goes on without where that cannot be had.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from torch_watchdog_agent.identity import Identity

__all__ = ["among_neighbours", "mapped"]

_Page = TypeVar("_Page", covariant=True)


class _Kind(Protocol[_Page]):
    def __call__(self, directory: Path, /, *, attempt: int, local_rank: int, local_world_size: int) -> _Page: ...


def mapped(path: Path, size: int) -> mmap.mmap:
    """The file, made and filled where it is not there yet. Raises OSError where there is no room for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def among_neighbours(kind: _Kind[_Page], directory: Path, who: Identity, *, say: Callable[[str], None], without: str) -> _Page | None:
    """The attempt's own; None for a rank that is alone on its node, or where there is no room for it. `without`: what that means, in words."""
    if who.local_world_size == 1:
        return None
    try:
        return kind(directory, attempt=who.attempt, local_rank=who.local_rank, local_world_size=who.local_world_size)
    except OSError as error:
        say(f"no shared memory between the ranks ({error}): {without}")
        return None
