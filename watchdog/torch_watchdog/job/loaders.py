"""A rank that waits for its data: its node is asked once what the rank and the workers of its loaders are doing, and the incident says it.

Owns which ranks were asked, of one attempt. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LoaderLooks", "words_of_loader"]

KIND = "loader.stalled"
MAX_RANKS = 8  # where all wait they wait for the same, and a look costs a node seconds
MAX_WORDS = 8  # processes named in a sentence


class LoaderLooks:
    """One attempt."""

    def __init__(self) -> None:
        self._incidents: dict[int, str] = {}  # rank -> incident
        self._answered: set[int] = set()

    def whom_to_ask(self, incident: Mapping[str, Any]) -> int | None:
        """The rank, where this is the first word of its waiting, and there are not too many of them. Where most wait, the first of them."""
        ranks = [incident["origin"]["rank"], *incident["ranks_affected"]]
        rank = next((rank for rank in ranks if rank is not None), None)
        if incident["kind"] != KIND or rank is None or rank in self._incidents or len(self._incidents) >= MAX_RANKS:
            return None
        self._incidents[rank] = incident["id"]
        return int(rank)

    def incident_of(self, rank: int) -> str | None:
        """Which incident the answer for `rank` belongs to; None where it was asked for another reason, or has been told."""
        return None if rank in self._answered else self._incidents.get(rank)

    def answered(self, rank: int) -> None:
        """One answer is told: a hang has its own."""
        self._answered.add(rank)


def words_of_loader(text: str) -> str:
    """Of a node's answer what a sentence takes: a line a process, without the stacks below it."""
    lines = [line for line in text.splitlines() if line and not line.startswith(" ")]
    more = f"; and {len(lines) - MAX_WORDS} more" if len(lines) > MAX_WORDS else ""
    return f"when they were looked at: {'; '.join(lines[:MAX_WORDS])}{more}"
