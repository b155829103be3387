"""One open alert, and for each of its receivers what it has been told.

Owns the timing: a first word that waits for what was done, words again while it is open, tries again after a failure, escalation. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from torch_watchdog.alerts.alert import Action, Alert, Delivery
from torch_watchdog.alerts.routes import Route

__all__ = ["Line", "Open", "Rules"]

_FIRST_WORD_AFTER_S = 8.0  # what was done about it belongs into the first message; a stop takes seconds
_KEEP_S = 24 * 3600.0
_LONGEST_BACKOFF_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`resend_s`: told again so often while it is open. `tells_past`: also of what was over before it could be told, and then of its end.

    `per_minute`: more than so many have to wait; what changes meanwhile is told once, in its newest words.
    """

    resend_s: float | None = None
    tells_past: bool = False
    per_minute: int = 20


@dataclass(slots=True)
class Line:
    """What one receiver knows: the newest version that it took (0: nothing), when, when it took the first, and how often it has failed since."""

    rules: Rules
    took: int = 0
    took_s: float = 0.0
    first_took_s: float = 0.0
    tries: int = 0
    next_s: float = 0.0
    under_way: bool = False
    said_last: bool = False


class Open:
    """An alert whose words count up as they change."""

    def __init__(self, alert: Alert, receivers: Mapping[str, Rules], now: float) -> None:
        self.alert, self.version, self.since_s = alert, 0, now
        self.lines = {name: Line(rules) for name, rules in receivers.items()}
        self.stands_since_s: float | None = None
        self._escalated = False
        self._resolved_s: float | None = None

    @property
    def was_told(self) -> bool:
        return any(line.took for line in self.lines.values())

    def still_stands(self, now: float) -> bool:
        """As `due` would find it: what a job died of is over after a day."""
        return not self.alert.resolved and (self.stands_since_s is None or now < self.stands_since_s + _KEEP_S)

    def change(self, alert: Alert, now: float) -> None:
        """The newest words. What only repeats the old ones tells nobody anything."""
        if self.version == 0 or alert != self.alert:
            self.alert, self.version = alert, self.version + 1
            self._resolved_s = (self._resolved_s or now) if alert.resolved else None

    def escalate(self, route: Route, rules: Mapping[str, Rules], now: float) -> None:
        """Nobody has said that it is theirs: others are told."""
        at = self._escalates_at(route)
        if at is not None and now >= at:
            self._escalated = True
            for name in route.escalate_to:
                self.lines.setdefault(name, Line(rules[name]))

    def due(self, now: float, *, is_quiet: bool, closing: bool, may_send: Callable[[str], bool]) -> list[Delivery]:
        """`may_send` is asked only for what is due otherwise, and counts."""
        if not self.alert.resolved and not self.still_stands(now):
            self.change(replace(self.alert, resolved=True, resolved_by="nothing more was heard of it for a day"), now)
        return [
            self._delivery(name, line, now, closing)
            for name, line in self.lines.items()
            if self._is_due(line, now, is_quiet, closing=closing) and may_send(name)
        ]

    def delivered(self, delivery: Delivery, now: float) -> None:
        line = self.lines[delivery.receiver]
        line.first_took_s = line.first_took_s or now
        line.took, line.took_s, line.tries, line.next_s, line.under_way = delivery.version, now, 0, 0.0, False
        line.said_last = delivery.is_last

    def failed(self, delivery: Delivery, now: float) -> None:
        line = self.lines[delivery.receiver]
        line.under_way = False
        line.tries += 1
        line.next_s = now + min(_LONGEST_BACKOFF_S, 2.0 ** min(line.tries, 10))

    def has_last_words(self, *, is_quiet: bool) -> bool:
        return any(self._is_due(line, line.next_s, is_quiet, closing=True) or line.under_way for line in self.lines.values())

    def is_over(self, now: float) -> bool:
        """Resolved, and everybody who was told of it knows."""
        if self._resolved_s is None:
            return False
        return now >= self._resolved_s + _KEEP_S or all(self._knows(line) and not line.under_way for line in self.lines.values())

    def unheard(self) -> list[str]:
        """Receivers that do not know how it ended."""
        return [name for name, line in self.lines.items() if not self._knows(line)]

    def next_deadline(self, route: Route) -> float | None:
        times = [self._next_of(line) for line in self.lines.values() if not line.under_way]
        times += [self._escalates_at(route), None if self.stands_since_s is None else self.stands_since_s + _KEEP_S]
        return min((time for time in times if time is not None), default=None)

    def _next_of(self, line: Line) -> float | None:
        if not self._knows(line):
            return max(line.next_s, self._first_s(line))
        if line.rules.resend_s is not None and not self.alert.resolved:
            return line.took_s + line.rules.resend_s
        return None

    def _is_due(self, line: Line, now: float, is_quiet: bool, *, closing: bool) -> bool:
        if line.under_way or now < line.next_s or (is_quiet and not (self.alert.resolved and line.took)):
            return False
        if closing:
            return not self._knows(line) or (line.rules.resend_s is not None and not self.alert.resolved and not line.said_last)
        at = self._next_of(line)
        return at is not None and now >= at

    def _delivery(self, name: str, line: Line, now: float, closing: bool) -> Delivery:
        line.under_way = True
        lasts_s = _KEEP_S if closing else 5 * (line.rules.resend_s or 0.0)
        action: Action = "acknowledge" if self.alert.acknowledged_by and line.took else "trigger"
        version = self.version
        if self.alert.resolved and line.took:
            action = "resolve"
        elif self.alert.resolved:
            # It was over before it could be told. What began comes first all the same, and its end after it: nobody can pair an end with nothing.
            version = max(1, version - 1)
        return Delivery(
            receiver=name, action=action, alert=self.alert, version=version, ends_s=now if action == "resolve" else now + lasts_s,
            again=line.took > 0, is_last=closing,
        )  # fmt: skip

    def _knows(self, line: Line) -> bool:
        never_told = line.took == 0 and self.alert.resolved and not line.rules.tells_past
        return never_told or line.took >= self.version

    def _first_s(self, line: Line) -> float:
        is_decided = self.alert.resolved or self.stands_since_s is not None
        return 0.0 if line.took or is_decided else self.since_s + _FIRST_WORD_AFTER_S

    def _escalates_at(self, route: Route) -> float | None:
        if self._escalated or route.escalate_after_s is None or self.alert.resolved or self.alert.acknowledged_by:
            return None
        # The first word each was told, not the newest: who is told again and again would never be passed over.
        told = [line.first_took_s for line in self.lines.values() if line.took]
        return min(told, default=self.since_s + _FIRST_WORD_AFTER_S) + route.escalate_after_s  # a pager that is away answers nobody either

    # On disk

    def saved(self) -> dict[str, Any]:
        lines = {name: {"took": line.took, "took_s": line.took_s, "first_took_s": line.first_took_s} for name, line in self.lines.items()}
        return {
            "alert": asdict(self.alert), "version": self.version, "since_s": self.since_s, "stands_since_s": self.stands_since_s,
            "escalated": self._escalated, "resolved_s": self._resolved_s, "lines": lines,
        }  # fmt: skip

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], rules: Mapping[str, Rules]) -> Self | None:
        """None for what is none of ours. Receivers that are gone are left out."""
        try:
            known = {"resolved_by": ""} | saved["alert"]  # an older daemon's have no word of it
            known = {field.name: known[field.name] for field in fields(Alert)}
            one = cls(Alert(**known | {"lines": tuple(known["lines"])}), {}, float(saved["since_s"]))
            one.version, one.stands_since_s = int(saved["version"]), saved["stands_since_s"]
            one._escalated, one._resolved_s = bool(saved["escalated"]), saved["resolved_s"]
            for name, line in saved["lines"].items():
                if name in rules:
                    took_s = float(line["took_s"])
                    first_s = float(line.get("first_took_s", took_s))
                    one.lines[name] = Line(rules[name], took=int(line["took"]), took_s=took_s, first_took_s=first_s)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return one
