"""Ranks in a sentence: as short for 16,384 of them as for nine."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["named", "out_of"]

_MOST = 8


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3 and 5`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 16 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown, more = [*map(str, ranks[:_MOST])], len(ranks) - _MOST
    if more <= 0:
        *shown, last = shown
    return f"ranks {', '.join(shown)} and {f'{more} more' if more > 0 else last}"


def out_of(number: int, ranks: int) -> str:
    """`all 8 ranks`, or `5 of 8 ranks`."""
    return f"all {ranks} ranks" if number == ranks else f"{number} of {ranks} ranks"
