"""What a node process knows of the job's end by itself: the orders that passed through it, and what its ranks said.

Stands in for the daemon's answer where the daemon is gone by the end, or has not heard the order that ranks have left on, because an earlier one gave it: the
exit code must not depend on that. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_watchdog_agent.node.config import JobOutcome
from torch_watchdog_proto.exit_codes import exit_code_of
from torch_watchdog_proto.messages import (
    EXIT_BAD_DATA,
    EXIT_FAILED,
    Commit,
    Committed,
    Hold,
    Leave,
    Left,
    Order,
    RankHello,
    RankMessage,
    Refused,
    Saved,
    Vetoed,
    WriteCommitted,
)
from torch_watchdog_proto.rescue_words import Failed

__all__ = ["LastWords"]

_MOST = 4  # sentences of ranks: for a terminal
_MAX_WORDS = 400  # characters of one: an exception may hold a whole batch


class LastWords:
    """Hears everything that passes between the ranks of this node and the daemon."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}  # generation -> the exit code of its Commit
        self._left: int | None = None
        self._saved: dict[int, Saved] = {}  # generation -> what a rank has written for it
        self._sealed: dict[int, Saved] = {}  # and of which a rank says that it is whole and sealed
        self._not_good: set[int] = set()
        self._told_good: set[int] = set()
        self._attempt = 0
        self._left_out: set[int] = set()  # steps: nothing failed of their batches
        self._found: dict[tuple[int, int], str] = {}
        self._failed: dict[int, str] = {}  # rank -> its own words, or how its process ended

    def told(self, order: Order) -> None:
        if isinstance(order, Commit):
            self._codes.pop(order.generation, None)  # of an attempt before this one
            if order.leave:
                self._codes[order.generation] = order.exit_code
        elif isinstance(order, WriteCommitted) and not order.good:
            self._not_good.add(order.generation)
        elif isinstance(order, Leave) and order.committed:
            self._told_good.add(order.generation)

    def heard(self, message: RankMessage) -> None:
        if isinstance(message, RankHello):
            self._begin_attempt(message.attempt)
        elif isinstance(message, Left):
            self._left = message.generation
        elif isinstance(message, Vetoed):
            self._left_out.add(message.step)
        elif isinstance(message, Saved) and message.error is None:
            self._saved[message.generation] = message
        elif isinstance(message, Committed) and message.error is None and message.generation in self._saved:
            self._sealed[message.generation] = self._saved[message.generation]
        elif isinstance(message, Hold | Refused):
            self._found[message.rank, message.step] = f"rank {message.rank}, step {message.step}: {message.violation.summary}"
        elif isinstance(message, Failed):
            where = f" at {message.where}" if message.where else ""
            self._failed[message.rank] = f"rank {message.rank}, step {message.step}: {message.text[:_MAX_WORDS]}{where}"

    def ended(self, rank: int, *, exit_code: int | None, signal: int | None) -> None:
        """A rank's process has ended. What it had said of itself tells more."""
        if signal is not None or exit_code:
            how = f"was ended by signal {signal}" if signal is not None else f"ended with exit code {exit_code}"
            self._failed.setdefault(rank, f"rank {rank} {how}")

    def _begin_attempt(self, attempt: int) -> None:
        if attempt > self._attempt:
            self._attempt, self._codes, self._left, self._found, self._left_out, self._failed = attempt, {}, None, {}, set(), {}
            self._saved, self._sealed, self._not_good, self._told_good = {}, {}, set(), set()

    def left_with(self) -> int | None:
        """The exit code of the order that ranks of this node have left on, by what came of it: their keepers say 0."""
        code = None if self._left is None else self._codes.get(self._left)
        return None if code is None else exit_code_of(code, saved=self._left in self._told_good or self.sealed() is not None)

    def exit_code(self, told: int | None) -> int | None:
        """What the daemon says, but where that is only what it has not heard: it may be a new one."""
        own = self.left_with()
        return own if own is not None and told in (None, EXIT_FAILED) else told

    def sealed(self) -> Mapping[str, Any] | None:
        """The good checkpoint of the order that ranks of this node have left on, where one of them has sealed it."""
        saved = None if self._left is None or self._left in self._not_good else self._sealed.get(self._left)
        if saved is None:
            return None
        return {"path": saved.path, "updates_applied": saved.updates_applied, "format": saved.format, "committed": True, "finite": True}

    def outcome(self, exit_code: int, *, why: str) -> JobOutcome:
        """How the job ended, as far as it is known here. `why` there is no better answer becomes a line. A batch that was found explains what ranks say."""
        stopped, found = self.left_with(), [words for (_, step), words in self._found.items() if step not in self._left_out]
        if stopped is None and exit_code != 0 and found:
            stopped = EXIT_BAD_DATA  # a rank refused the batch and failed of it
        return JobOutcome(
            exit_code=stopped, lines=(why,), unjudged=tuple((found or list(self._failed.values()))[:_MOST]), sealed=self.sealed()
        )
