"""What sentences of every process are put together with. Pure."""

from __future__ import annotations

__all__ = ["and_then", "count", "spoken_time"]


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def and_then(cause: str, more: str) -> str:
    """Causes are sentences, or what could follow "because"."""
    if not more:
        return cause
    return f"{cause} {more[:1].upper()}{more[1:]}." if cause.endswith(".") else f"{cause}; {more}"


def spoken_time(seconds: float) -> str:
    """`8 s`, `24 min`, `1.5 h`."""
    for unit_s, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"
