"""Waits until it can be said which rank failed first.

Owns the ends of one attempt's ranks and the last exception that each left; the judgement is `rules/death.py`. Pure: `now` is an argument.
"""

from __future__ import annotations

from dataclasses import replace

from torch_watchdog.rules.death import PATIENCE_S, Failure
from torch_watchdog_proto.messages import RankEvent

__all__ = ["FailureWatch"]


class FailureWatch:
    """One attempt's ranks that ended badly. A verdict comes once, and again where more ranks fail after it."""

    def __init__(self) -> None:
        self._notes: dict[int, str] = {}  # by pid
        self._failures: list[Failure] = []
        self._unknown: list[Failure] = []  # ended, nobody saw how
        self._since: float | None = None
        self._judged = 0

    @property
    def deadline(self) -> float | None:
        return None if self._since is None or self._judged == len(self._failures) else self._since + PATIENCE_S

    def note(self, pid: int, text: str) -> None:
        """The newest word of an error of that process."""
        self._notes[pid] = text

    def see(self, event: RankEvent, node: str, step: int | None, now: float) -> None:
        """A rank has ended."""
        failure = Failure(
            rank=event.rank, node=node, pid=event.pid, order=event.order, exit_code=event.exit_code, signal=event.signal, step=step,
            text=self._notes.get(event.pid, ""),
        )  # fmt: skip
        if event.exit_code is None and event.signal is None and not failure.text:
            self._unknown.append(failure)
        elif event.signal is not None or event.exit_code != 0:
            self._failures.append(failure)
            self._since = now if self._since is None else self._since

    def command_ended(self, exit_code: int, signal: int | None) -> None:
        """The wrapped command failed though no rank was seen to: then it was the first of those of whose end nothing is known."""
        if (exit_code != 0 or signal is not None) and not self._failures and self._unknown:
            self._failures = [replace(failure, exit_code=exit_code, signal=signal) for failure in self._unknown]
            self._unknown, self._since = [], 0.0

    def verdict(self, *, now: float, all_ended: bool) -> tuple[Failure, ...] | None:
        """All failures so far, once the first can be told from those that followed."""
        if self._since is None or self._judged == len(self._failures):
            return None
        if not all_ended and now < self._since + PATIENCE_S:
            return None
        self._judged = len(self._failures)
        return tuple(self._failures)
