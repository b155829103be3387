"""The life of an alert: inactive -> pending -> firing -> resolved, and firing again.

Pure: whether its sign is there now, and `now`, in; what changed out. A sign must hold for `hold_s` before anybody is told, and be away for `keep_s`
before it counts as over, so that one slow step tells nobody anything.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["Alert", "State"]

State: TypeAlias = Literal["inactive", "pending", "firing", "resolved"]


class Alert:
    """One subject of one rule."""

    __slots__ = ("_absent_since", "_hold_s", "_keep_s", "_since", "fired", "state")

    def __init__(self, *, hold_s: float, keep_s: float) -> None:
        self._hold_s, self._keep_s = hold_s, keep_s
        self._since = self._absent_since = 0.0
        self.state: State = "inactive"
        self.fired = 0  # how often

    def step(self, present: bool, now: float) -> Literal["fires", "resolves"] | None:
        """What begins or ends at this look."""
        return self._there(now) if present else self._away(now)

    def _there(self, now: float) -> Literal["fires"] | None:
        self._absent_since = 0.0
        if self.state == "firing":
            return None
        if self.state != "pending":
            self.state, self._since = "pending", now
        if now - self._since < self._hold_s:
            return None
        self.state = "firing"
        self.fired += 1
        return "fires"

    def _away(self, now: float) -> Literal["resolves"] | None:
        if self.state == "pending":
            self.state = "resolved" if self.fired else "inactive"
        if self.state != "firing":
            return None
        self._absent_since = self._absent_since or now
        if now - self._absent_since < self._keep_s:
            return None
        self.state, self._absent_since = "resolved", 0.0
        return "resolves"
