"""What sentences of every process are put together with. Pure."""

from __future__ import annotations

__all__ = ["and_then", "count"]


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def and_then(cause: str, more: str) -> str:
    """Causes are sentences, or what could follow "because"."""
    return f"{cause} {more[:1].upper()}{more[1:]}." if cause.endswith(".") else f"{cause}; {more}"
