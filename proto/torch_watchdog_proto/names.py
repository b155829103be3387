"""How people are told which tensor of a batch is meant: `0.targets` and element (7, 3) as `batch[0].targets[7,3]`.

Pure. The path itself (`0.targets`) is what files, JSON and settings hold.
"""

from __future__ import annotations

__all__ = ["spoken"]


def spoken(key: str) -> str:
    """A path that begins with a place in a tuple or list begins with the batch; other places stand in brackets."""
    first, *rest = key.split(".")
    start = f"batch[{first}]" if first.isdecimal() else first
    return start + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in rest)
