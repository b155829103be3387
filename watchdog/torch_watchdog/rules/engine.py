"""START HERE for the rules: blocks and samples in, findings out.

Owns one attempt: the streams, and an alert for each subject of each rule. Looks at everything at most once a second, whatever the number of ranks and
reports. Pure: `now` is an argument and only grows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from torch_watchdog.rules.alert import Alert
from torch_watchdog.rules.catalogue import rules_with, settings_of
from torch_watchdog.rules.most_ranks import FEW, of_most, together
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import View
from torch_watchdog.rules.xid import XidCode
from torch_watchdog_proto.messages import GpuSample, StepTable

__all__ = ["Engine", "Finding"]

_INTERVAL_S = 1.0
_MORE_RANKS = 8192  # for each of these a second more between two looks: a look costs by the rank
_CROWD_S = 1.0  # what more than a few ranks show may be of most at the next look: not all have reported yet
_MAX_ALERTS = 1000  # subjects of one rule: a job that has more of them has told all there is to tell

_Subject: TypeAlias = tuple[int | None, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What began (`fires`) or ended (`resolves`). `sign` is the newest."""

    about: About
    sign: Sign
    change: Literal["fires", "resolves"]


class Engine:
    """The rules of one attempt. `changes`: of thresholds, by rule, checked before."""

    def __init__(self, *, codes: Mapping[int, XidCode], changes: Mapping[str, Mapping[str, Any]]) -> None:
        watched = ((rule, settings_of(rule, changes)) for rule in rules_with(codes))
        self._watched = [_Watched(rule, settings) for rule, settings in watched if settings.enabled]
        self._view = View(watches_highs=any(watched.name == "ids_creep" for watched in self._watched))
        self._next: float | None = None  # when to look; None while nothing is new and nothing is pending
        self._looked = float("-inf")

    @property
    def deadline(self) -> float | None:
        return self._next

    def take_steps(self, table: StepTable, now: float) -> None:
        self._view.take_steps(table)
        self._wake(now)

    def take_gpu(self, node: str, sample: GpuSample, now: float) -> None:
        self._view.take_gpu(node, sample)
        self._wake(now)

    def judge(self, now: float, *, at_end: bool = False) -> tuple[Finding, ...]:
        """What began or ended since the look before; nothing where it is not time yet, unless the job is `at_end`."""
        if self._next is None or (now < self._next and not at_end):
            return ()
        self._looked, self._next = now, None
        # Where a rank has no number yet there is NaN; a word of numpy's on somebody's terminal helps nobody.
        with np.errstate(all="ignore"):
            findings = [finding for _ in self._view.take_waiting() for finding in self._looks(now, each_stretch=True)]
            findings += self._looks(now, each_stretch=False)
        self._view.looked()
        if any(watched.is_waiting for watched in self._watched):
            self._next = now + self._interval_s
        return tuple(findings)

    def _looks(self, now: float, *, each_stretch: bool) -> list[Finding]:
        return [finding for watched in self._watched if watched.each_stretch == each_stretch for finding in watched.look(self._view, now)]

    def _wake(self, now: float) -> None:
        if self._next is None:
            self._next = max(now, self._looked + self._interval_s)

    @property
    def _interval_s(self) -> float:
        return _INTERVAL_S + len(self._view.ranks) // _MORE_RANKS


class _Watched:
    """One rule, and the alerts of its subjects."""

    def __init__(self, rule: Rule, settings: Any) -> None:
        self._rule, self._settings = rule, settings
        self._alerts: dict[_Subject, Alert] = {}
        self._signs: dict[_Subject, Sign] = {}  # the newest of each alert

    @property
    def name(self) -> str:
        return self._rule.about.name

    @property
    def each_stretch(self) -> bool:
        return self._rule.each_stretch

    @property
    def is_waiting(self) -> bool:
        """Whether time alone can change something."""
        return any(alert.state in ("pending", "firing") for alert in self._alerts.values())

    def look(self, view: View, now: float) -> Iterator[Finding]:
        seen = {(sign.rank, sign.subject): sign for sign in self._judged(view)}
        hold_s = max(self._settings.hold_s, _CROWD_S if self._rule.each_rank and len(seen) > FEW else 0.0)
        for subject in seen:
            says_what_the_others_would = self._rule.each_rank and subject[0] is None
            has_room = len(self._alerts) < _MAX_ALERTS or says_what_the_others_would
            if subject not in self._alerts and has_room:
                self._alerts[subject] = Alert(hold_s=hold_s, keep_s=self._settings.keep_s)
        for subject, alert in self._alerts.items():
            if self._is_of_most(subject, seen):
                continue
            self._signs.update({subject: seen[subject]} if subject in seen else {})
            change = alert.step(subject in seen, now)
            if change is not None:
                yield Finding(about=self._rule.about, sign=self._signs[subject], change=change)

    def _judged(self, view: View) -> Iterable[Sign]:
        signs = self._rule.judge(view, self._settings)
        return together(signs, len(view.ranks)) if self._rule.each_rank else signs

    def _is_of_most(self, subject: _Subject, seen: Container[_Subject]) -> bool:
        """A rank whose sign is that of most: it waits until theirs is over."""
        rank, what = subject
        if rank is None or not self._rule.each_rank:
            return False
        most = of_most(what)
        return most in seen or (most in self._alerts and self._alerts[most].state == "firing")
