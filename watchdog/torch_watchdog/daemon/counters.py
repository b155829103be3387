"""What the daemon counts about itself, for its metrics.

Owns numbers that only grow; decides nothing. Written on the daemon's loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counters"]


@dataclass(slots=True, kw_only=True)
class Counters:
    """`refused_calls` by what was wrong with them: a handful of words, whatever a caller sends."""

    started_s: float
    reports: int = 0
    repeated_reports: int = 0
    refused_calls: Counter[str] = field(default_factory=Counter)
