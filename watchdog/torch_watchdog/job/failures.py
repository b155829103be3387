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
        self._ends: list[Failure] = []
        self._command: tuple[int, int | None] | None = None  # how the wrapped command failed
        self._since: float | None = None
        self._judged = 0

    @property
    def deadline(self) -> float | None:
        return None if self._since is None or self._judged == len(self._failures()) else self._since + PATIENCE_S

    def note(self, pid: int, text: str) -> None:
        """The newest word of an error of that process. It may come after the news of its end."""
        self._notes[pid] = text

    def see(self, event: RankEvent, node: str, step: int | None, now: float) -> None:
        """A rank has ended."""
        self._ends.append(
            Failure(
                rank=event.rank, node=node, pid=event.pid, order=event.order, exit_code=event.exit_code, signal=event.signal, step=step
            )
        )  # fmt: skip
        if self._since is None and self._failures():
            self._since = now

    def command_ended(self, exit_code: int, signal: int | None) -> None:
        """Where it failed and no rank was seen to, it was one of those of whose end nothing is known."""
        if exit_code != 0 or signal is not None:
            self._command = (exit_code, signal)
            self._since = 0.0 if self._since is None else self._since

    def verdict(self, *, now: float, all_ended: bool) -> tuple[Failure, ...] | None:
        """All failures so far, once the first can be told from those that followed."""
        failures = self._failures()
        if self._since is None or self._judged == len(failures):
            return None
        if not all_ended and now < self._since + PATIENCE_S:
            return None
        self._judged = len(failures)
        return failures

    def _failures(self) -> tuple[Failure, ...]:
        told = [replace(end, text=self._notes.get(end.pid, "")) for end in self._ends]
        failed = [end for end in told if end.signal is not None or end.exit_code or (end.exit_code is None and end.text)]
        if failed or self._command is None:
            return tuple(failed)
        code, signal = self._command
        return tuple(replace(end, exit_code=code, signal=signal) for end in told if end.exit_code is None)
