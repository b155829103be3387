"""The lines of events.jsonl: numbered, in words, and read again by a daemon that takes over.

Owns their fields and numbers. Pure: lines in and out; `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from torch_watchdog.job.events import AppendEvent
from torch_watchdog_proto.messages import EXIT_BAD_DATA, EXIT_DIVERGED, RankEvent

__all__ = ["EventLog", "words_of"]

_CODES = {"batch": EXIT_BAD_DATA, "order.stop": 0, "loss.not_finite": EXIT_DIVERGED, "grad.not_finite": EXIT_DIVERGED}
_UNWRITTEN_ORDERS = 100  # at most so many orders of a daemon that was killed can have reached the ranks and not the disk


class EventLog:
    """Counts on from where `events`, an earlier daemon's lines, stop."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self._last = 0
        self._generations: dict[int, int] = {}
        self._codes: dict[tuple[int, int], int] = {}  # attempt and generation of an order -> the code of the launch that ranks leave on it
        signals: dict[int, int] = {}
        for event in events:
            self._last = max(self._last, event.get("order", 0))
            attempt, generation = event.get("attempt", 0), event.get("generation", 0)
            if event.get("kind") == "rank.signalled":
                signals[attempt] = event.get("signal", 0)
            if event.get("kind") == "order.opened":
                self._generations[attempt] = max(generation, self._generations.get(attempt, 0))
                codes = _CODES if attempt not in signals else {**_CODES, "order.preemption": 128 + signals[attempt]}
                if (order_kind := event.get("order_kind")) in codes:
                    self._codes[attempt, generation] = codes[order_kind]
        self._gap = _UNWRITTEN_ORDERS if self._last else 0

    def last_generation(self, attempt: int) -> int:
        """Of the orders that an earlier daemon can have given: ranks take none that is older than one they have seen."""
        return self._generations.get(attempt, 0) + self._gap

    def exit_code_of(self, attempt: int, generation: int) -> int | None:
        """Of the launch, where its ranks leave on this order of an earlier daemon's; None where none is known."""
        return self._codes.get((attempt, generation))

    def line(
        self, now: float, kind: str, *, attempt: int, text: str, rank: int | None = None, step: int | None = None, **more: Any
    ) -> AppendEvent:
        """The next line; what is None in `more` is left out."""
        self._last += 1
        time = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "order": self._last, "attempt": attempt, "kind": kind, "rank": rank, "step": step, "text": text}
        return AppendEvent(event=fields | {name: value for name, value in more.items() if value is not None})


def words_of(event: RankEvent) -> str:
    """The event's text, or one for those that come without."""
    if event.kind == "state":
        return f"rank {event.rank}: the state of its process is {event.text}" + (" (stopped)" if event.text == "T" else "")
    if event.text:
        return event.text
    if event.kind != "exited":
        return f"rank {event.rank} {event.kind}, pid {event.pid}"
    if event.signal is not None:
        return f"rank {event.rank} was ended by signal {event.signal}"
    return f"rank {event.rank} ended" + ("" if event.exit_code is None else f" with exit code {event.exit_code}")
