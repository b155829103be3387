"""Which receivers an alert goes to, and when it is kept quiet.

Owns matching by job, kind and severity. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch_watchdog.alerts.alert import Alert

__all__ = ["Match", "Route", "Silence", "route_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Shell patterns for the job and the kind; what is empty matches everything."""

    jobs: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    severities: tuple[str, ...] = ()

    def fits(self, alert: Alert) -> bool:
        return (
            _fits(alert.training_job, self.jobs)
            and _fits(alert.kind, self.kinds)
            and (not self.severities or alert.severity in self.severities)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """To whom; and to whom else where nobody has acknowledged it after so long."""

    match: Match
    to: tuple[str, ...]
    escalate_after_s: float | None = None
    escalate_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Nothing that fits is told to anybody before `until_s`."""

    match: Match
    until_s: float
    by: str
    comment: str = ""


def route_of(alert: Alert, routes: Sequence[Route]) -> Route:
    """The first that fits; one to nobody where none does."""
    return next((route for route in routes if route.match.fits(alert)), Route(match=Match(), to=()))


def _fits(text: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)
